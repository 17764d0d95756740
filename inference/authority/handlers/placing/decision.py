"""The decision where a model goes, for loads and dry runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from inference.authority.handlers.measuring.helper_contexts import HELPERS
from inference.authority.handlers.queries import device_view
from inference.authority.handlers.queries.plan_inputs import fit_of, held_models, request_for, residents
from inference.authority.handlers.running import keeping, load_devices, oom_recovery
from inference.authority.placement.plan import EvictionState, Held, Placement, Refusal, Request, Result, Stages, plan
from inference.authority.placement.smaller_settings import smaller
from inference.authority.placement.turns import Decision, Demand, Occupancy, age_rank, decide
from inference.authority.state import EstimateKey, FixCheck, FixKey, ModelRecord, State
from inference.devices.device import CPU, Reading
from inference.protocol import ModelState
from inference.settings import ModelSpec

FRESH_SECONDS = 1.0
"""Maximum age of readings for a decision."""
MAX_DIVISIONS = 2
"""Maximum number of measured divisions of a model over several devices before a decision."""
MAX_TRIES = 3
"""Maximum number of reductions of a suggested setting."""


@dataclass(frozen=True, slots=True)
class NeedsEstimate:
    """The model must be measured first. `divides`: for a division over several devices that the planner chose."""

    key: EstimateKey
    divides: bool = False


@dataclass(frozen=True, slots=True)
class NeedsReading:
    """The devices must be read first."""


@dataclass(frozen=True, slots=True)
class NeedsCheck:
    """The suggestion of a refusal must be verified first."""

    check: FixCheck
    refusal: Refusal


Missing = NeedsEstimate | NeedsReading | NeedsCheck


def unmeasured(state: State, model: ModelRecord, now: float) -> EstimateKey | None:
    """The first possible device on which the model was not measured."""
    known, spec = state.estimates_of(model.effective), model.effective
    return next(
        (EstimateKey(spec, (item.id,)) for item in load_devices.possible(state, model, now) if item.id not in known),
        None,
    )


def consider(state: State, id: str, now: float, *, divisions: int | None = None) -> Decision | Missing:
    """The decision, or the missing input. It is the same for a request and a dry run.

    `divisions`: number of measured divisions; None for the count in the model's record.
    """
    model = state.models[id]
    spec = model.effective
    divisions = model.divisions if divisions is None else divisions
    options = load_devices.allowed(state, model, now)
    if isinstance(options, Refusal):
        return Decision(options)
    known = state.estimates_of(spec)
    missing = next((item.id for item in options if item.id not in known), None)
    if missing is not None:
        return NeedsEstimate(EstimateKey(spec, (missing,)))
    is_old = now - state.devices.refreshed_at > FRESH_SECONDS
    if is_old and any(item.id != CPU for item in options):
        return NeedsReading()
    request = request_for(state, spec, options, divide=divisions < MAX_DIVISIONS)
    assert request is not None
    if not oom_recovery.falls_back(model, now):
        request = replace(request, options=tuple(option for option in request.options if not option.fallback))
    fit = fit_of(model.spec)
    found = _decided(state, model, replace(request, fit=fit), now)
    refusal = found.outcome if fit.steps and isinstance(found, Decision) else None
    if isinstance(refusal, Refusal) and not refusal.waits_for and not fit.allows(refusal.fix):
        return _decided(state, model, request, now)  # no allowed change suffices: now try the fallback devices
    return found


def _decided(state: State, model: ModelRecord, request: Request, now: float) -> Decision | Missing:
    """The decision with a verified suggestion, or the missing input."""
    spec = model.effective
    decision = _decide(state, model, request, now)
    outcome = decision.outcome
    if isinstance(outcome, Placement):
        if outcome.measured:
            return decision
        return NeedsEstimate(EstimateKey(spec, outcome.devices, tuple(map(int, outcome.tensor_split))), divides=True)
    if outcome.waits_for or not outcome.fix:
        return decision
    key = fix_key(spec, outcome.fix)
    until, fix = state.fixes.get(key, (0.0, {}))
    if now < until:
        return replace(decision, outcome=replace(outcome, fix=fix))
    return NeedsCheck(FixCheck(model.id, spec, key[1], outcome.fix), outcome)


def plan_on(
    state: State, model: ModelRecord, devices: Sequence[Reading], now: float, *, evicts: bool
) -> Placement | Refusal | None:
    """The plan for a move of the model to one of these devices; None while an estimate is missing.

    Its own memory counts as free. Without `evicts`, no other model is evicted for it.
    """
    request = request_for(state, model.effective, devices, divide=False)
    if request is None:
        return None
    held = held_models(state, now)
    own = {item.holding for item in held if item.model == model.id}
    others = [
        item if evicts else replace(item, eviction_state=EvictionState.BUSY) for item in held if item.holding not in own
    ]
    return plan(request, state.ledger.without(own), others, device_view.policy(state.settings, now))


def rank(model: ModelRecord) -> tuple[float, float, str]:
    """The sort key of models that requests wait for: first those for which an eviction has begun, then `age_rank`."""
    return model.eviction_began_at, age_rank(model.queue.waiters), model.id


def _yields(state: State, item: Held, to: ModelRecord) -> bool:
    """Whether `item` is the warm copy of a wanted model that ranks after `to`: `to` may drop it.

    Otherwise two warm models that exclude each other would both wait forever.
    """
    if item.eviction_state is not EvictionState.BUSY or not to.queue.waiters:
        return False
    model = state.models[item.model]
    return model.state is ModelState.WARM and rank(to) < rank(model)


def _decide(state: State, model: ModelRecord, request: Request, now: float) -> Decision:
    ledger = state.ledger
    held = [
        replace(item, eviction_state=EvictionState.WARM) if _yields(state, item, model) else item
        for item in held_models(state, now)
    ]
    if model.state is ModelState.WARM:
        request, ledger = keeping.request_to_restore(state, model, request), keeping.ledger_to_restore(state, model)
        held = [item for item in held if item.model != model.id or item.eviction_state is EvictionState.LEAVING]
    occupancy = Occupancy(
        ledger,
        tuple(held),
        residents(state),
        device_view.policy(state.settings, now),
        frozenset(
            item.id for item in state.models.values() if item.state is ModelState.LOADING and not item.queue.waiters
        ),
    )
    since = model.wanted_at if model.queue.waiters else now
    claims = [claim for claim in state.claims if claim.model != model.id]
    demand = Demand(since, model.reload_seconds)
    found = decide(request, demand, occupancy, claims)
    if not state.helpers or found.outcome.result is Result.FREE:
        return found
    # helpers end soon: nothing is evicted, and no request fails, because of their memory
    ledger = ledger.without(list(state.helpers.values()))
    later = decide(request, demand, replace(occupancy, ledger=ledger), claims)
    if later.outcome.result is Result.FREE:
        return Decision(Refusal((), f"{HELPERS} holds the memory and ends soon", waits_for=(HELPERS,)))
    return later


# --- suggested settings ----------------------------------------------------------------------------------------------
def fix_key(spec: ModelSpec, fix: Mapping[str, Any]) -> FixKey:
    """The key of a check: the kind of the change, because its value varies with foreign use."""
    return spec, tuple(sorted(fix))


def verify(state: State, check: FixCheck, now: float) -> bool | NeedsEstimate:
    """Whether the model fits with the suggested settings after all possible evictions."""
    spec = replace(check.spec, **check.fix)
    devices = device_view.devices_of(state, spec, now)
    known = state.estimates_of(spec)
    missing = next((item.id for item in devices if item.id not in known), None)
    if missing is not None:
        return NeedsEstimate(EstimateKey(spec, (missing,)))
    request = request_for(state, spec, devices, divide=check.divisions < 1)
    assert request is not None
    request = replace(request, options=tuple(option for option in request.options if not option.fallback))
    held = held_models(state, now)
    emptied = Stages.of(state.ledger, [item for item in held if item.model != check.model]).emptied
    own = {item.holding for item in held if item.model == check.model} & emptied.ledger.holdings.keys()
    decision = plan(request, emptied.ledger.without(own), emptied.models, device_view.policy(state.settings, now))
    if not isinstance(decision, Placement):
        return False
    if decision.measured:
        return True
    return NeedsEstimate(EstimateKey(spec, decision.devices, tuple(map(int, decision.tensor_split))), divides=True)


def next_try(check: FixCheck) -> FixCheck:
    """The check of the next smaller suggestion; `fix` is empty if there is none."""
    fix = smaller(check.fix, check.spec.context_length) if check.tries < MAX_TRIES else {}
    return replace(check, fix=fix, tries=check.tries + 1, divisions=0)


# --- dry runs --------------------------------------------------------------------------------------------------------
def with_settings(state: State, id: str, spec: ModelSpec | None, reduced: ModelSpec | None = None) -> State:
    """A copy of the state in which the model has the settings of a dry run.

    With another `spec` the model counts as not loaded, because it would have to be loaded again; `reduced` are the
    settings that it would be loaded with.
    """
    model = state.models[id]
    if spec is None:
        return replace(state, models={**state.models, id: replace(model, reduced=reduced)}) if reduced else state
    worker = state.worker_of(model)
    ledger = state.ledger
    if worker is not None:
        own = {item.holding for item in held_models(state, 0.0) if item.model == id}
        ledger = ledger.without(own)
    unloaded = replace(
        model, spec=spec, reduced=reduced, worker=None, kept=None, state=ModelState.COLD, target=None, on_cpu_until=0.0
    )
    return replace(state, ledger=ledger, models={**state.models, id: unloaded})


def unmeasured_on(state: State, model: ModelRecord, devices: tuple[str, ...]) -> EstimateKey | None:
    """The first of these devices on which the model was not measured."""
    known = state.estimates_of(model.effective)
    return next((EstimateKey(model.effective, (name,)) for name in devices if name not in known), None)
