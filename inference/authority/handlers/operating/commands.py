"""Commands of operators: from their start to their answer. It comes once, unless the client disconnects before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from inference.authority.draft import Draft
from inference.authority.effects import RenewProbes, StopWorker, TrimWorkers
from inference.authority.events import (
    Abandoned,
    Collect,
    Commanded,
    Defragment,
    Evict,
    Move,
    Offload,
    Plan,
    Recover,
    Refresh,
    Trimmed,
    Unload,
)
from inference.authority.handlers.measuring import estimates
from inference.authority.handlers.placing import decision, defragmentation, moving
from inference.authority.handlers.queries import decode_speed, device_view, expectations
from inference.authority.handlers.queries.decode_speed import DecodeSpeed
from inference.authority.handlers.queries.fit_costs import fit_costs
from inference.authority.handlers.queries.plan_inputs import fit_of, held_models
from inference.authority.handlers.running import departure, device_incidents, keeping, oom_recovery
from inference.authority.handlers.running.worker_memory import reclaim, serving
from inference.authority.lifecycle import ACCEPTING, Action, Reason
from inference.authority.pending_commands import (
    CollectCommand,
    DefragmentCommand,
    EvictCommand,
    MoveCommand,
    OffloadCommand,
    PlanCommand,
    RecoverCommand,
    RefreshCommand,
    UnloadCommand,
)
from inference.authority.placement.plan import EvictionState, Held, Placement, Refusal, Result
from inference.authority.placement.turns import Decision
from inference.authority.state import ModelRecord, TimerKind, placement_key
from inference.errors import (
    DeadlineExceeded,
    InferenceError,
    InvalidRequestError,
    ModelNotFound,
    ShuttingDown,
)
from inference.estimate.model_estimate import Estimate
from inference.file_stamp import changed
from inference.protocol import ModelState
from inference.settings import ModelSpec, contradictions

LEAVE_SECONDS = 30.0
"""Time for the memory of a leaving model to become free, in addition to the time for its running requests."""
_IDLE = (EvictionState.IDLE, EvictionState.WARM)
_S = ModelState


@dataclass(frozen=True, slots=True)
class Planned:
    """The answer to a dry run: the decision, what was measured, which accelerators are missing, and of a placement the
    expected speed and time to load, the models that leave, and the bytes that are free on its devices afterwards.
    """

    outcome: Placement | Refusal
    estimate: Estimate | None
    lost: str
    changes: Mapping[str, Any]
    """settings with which it would be loaded, because it does not fit as configured"""
    steps: Sequence[Mapping[str, Any]]
    """the cost of each change"""
    speed: DecodeSpeed | None
    load_seconds: float | None = None
    evictions: Sequence[Held] = ()
    free_bytes: Mapping[str, int] = field(default_factory=dict)


# --- beginning -------------------------------------------------------------------------------------------------------
def begin(draft: Draft, event: Commanded) -> None:
    """Begins a command; while the service ends only those that free memory."""
    id, request = event.command, event.request
    if draft.state.closing and not isinstance(request, Unload | Offload | Evict):
        draft.refuse(id, ShuttingDown())
    elif isinstance(request, Move):
        moving.begin(draft, id, request)
    elif isinstance(request, Collect):
        _collect(draft, id)
    elif isinstance(request, Defragment):
        defragmentation.begin(draft, id)
    elif isinstance(request, Refresh):
        draft.set_command(id, RefreshCommand(device_view.read(draft)))
    elif isinstance(request, Recover):
        _recover(draft, id, request)
    else:
        model = draft.state.models.get(request.model)
        if model is None:
            draft.refuse(id, ModelNotFound(request.model, sorted(draft.state.config.model_ids)))
        elif isinstance(request, Unload):
            _unload(draft, id, request, model)
        elif isinstance(request, Offload):
            _offload(draft, id, model)
        elif isinstance(request, Evict):
            _evict(draft, id, request, model)
        else:
            _plan(draft, id, request, model)


def _unload(draft: Draft, id: int, request: Unload, model: ModelRecord) -> None:
    worker = draft.worker_of(model.id)
    if worker is None:
        draft.answer(id)
        return
    draft.set_command(id, UnloadCommand(model.id, worker.id))
    departure.leave(draft, model.id, Reason.BY_HAND)
    if request.now:
        draft.emit(StopWorker(worker.id))
    else:
        departure.stop_in(draft, model.id, draft.state.settings.drain_seconds)


def _offload(draft: Draft, id: int, model: ModelRecord) -> None:
    if model.state is _S.WARM:
        draft.answer(id)
        return
    if model.state not in ACCEPTING:
        why = f"the model {model.id!r} is {model.state}; only a loaded one can be offloaded"
        draft.refuse(id, InvalidRequestError(why))
        return
    if obstacle := keeping.obstacle(draft.state, model):
        draft.refuse(id, InvalidRequestError(f"the model {model.id!r} cannot be offloaded: {obstacle}"))
        return
    draft.set_command(id, OffloadCommand(model.id))
    departure.leave(draft, model.id, Reason.BY_HAND, Action.OFFLOAD)
    departure.stop_in(draft, model.id, draft.state.settings.drain_seconds)


def _evict(draft: Draft, id: int, request: Evict, model: ModelRecord) -> None:
    if model.spec.pinned:
        why = f"the model {model.id!r} is pinned and is not evicted"
        why += f"; use POST /models/{model.id}/unload to unload it"
        draft.refuse(id, InvalidRequestError(why, param="model"))
        return
    worker = draft.state.worker_of(model)
    if worker is None or worker.ending:
        draft.answer(id, {"model_name": model.id, "evicted": False, "memory_freed_mb": 0.0})
        return
    draft.set_command(id, EvictCommand(model.id))
    drain_seconds = draft.state.settings.drain_seconds
    departure.leave(draft, model.id, Reason.BY_HAND, request.action)
    departure.stop_in(draft, model.id, drain_seconds)
    draft.timer(TimerKind.COMMAND, id, draft.now + drain_seconds + LEAVE_SECONDS)


def _collect(draft: Draft, id: int) -> None:
    idle = [
        model.id
        for model in draft.state.models.values()
        if model.worker is not None and draft.state.eviction_state(model, draft.now) in _IDLE
    ]
    draft.set_command(id, CollectCommand(frozenset(idle)))
    draft.timer(TimerKind.COMMAND, id, draft.now + draft.state.timing.return_seconds + LEAVE_SECONDS)
    for name in idle:
        departure.leave(draft, name, Reason.BY_HAND, explanation=("idle when an operator collected memory",))


def _recover(draft: Draft, id: int, request: Recover) -> None:
    if error := device_incidents.refuse_recovery(draft.state, request.device):
        draft.refuse(id, error)
    else:
        draft.set_command(id, RecoverCommand(request.device))
        draft.emit(RenewProbes(id))


def _plan(draft: Draft, id: int, request: Plan, model: ModelRecord) -> None:
    spec = replace(model.spec, **request.changes)
    values = {**asdict(spec), "min_context": request.changes.get("min_context")}
    if contradiction := next(contradictions(values), None):
        name, problem = contradiction
        draft.refuse(id, InvalidRequestError(problem, param=name))
        return
    anew = bool(request.changes) and spec != model.effective
    draft.set_command(id, PlanCommand(model.id, spec if anew else None))
    draft.plan()


# --- continuing ------------------------------------------------------------------------------------------------------
def advance(draft: Draft) -> None:
    """Continues the commands that need no plan, if what they wait for has happened."""
    for id, command in list(draft.state.commands.items()):
        match command:
            case UnloadCommand(_, worker):
                if worker not in draft.state.workers:
                    draft.answer(id)
            case OffloadCommand(name):
                model = draft.state.models.get(name)
                if model is None or model.state not in (_S.DRAINING, _S.OFFLOADING):
                    draft.answer(id)
            case EvictCommand(_, record):
                if record is not None:
                    draft.answer(id, {"evicted": True, **record.to_json()})
            case CollectCommand(awaited, _, trimming):
                if not awaited and not trimming:
                    _trim(draft, id, command)
            case RecoverCommand():
                device_incidents.recovered(draft, id, command)
            case RefreshCommand(needed):
                if draft.state.devices.reads_done >= needed:
                    draft.answer(id)
            case _:
                pass


def advance_planned(draft: Draft) -> None:
    """Continues the commands that plan; the readings are current."""
    for id, command in list(draft.state.commands.items()):
        if isinstance(command, PlanCommand):
            _continue_plan(draft, id, command)
        elif isinstance(command, MoveCommand):
            moving.advance(draft, id, command)
        elif isinstance(command, DefragmentCommand):
            defragmentation.advance(draft, id, command)


def _continue_plan(draft: Draft, id: int, command: PlanCommand) -> None:
    state = draft.state
    if command.model not in state.models:
        draft.refuse(id, ModelNotFound(command.model, sorted(state.config.model_ids)))
        return
    assumed = decision.with_settings(state, command.model, command.spec, command.reduced)
    model = assumed.models[command.model]
    found = decision.consider(assumed, command.model, draft.now, divisions=command.divisions)
    match found:
        case decision.NeedsEstimate(key, divides):
            if divides and not state.is_measuring(key.spec):
                draft.set_command(id, replace(command, divisions=command.divisions + 1))
            if not estimates.request(draft, key):
                draft.refuse(id, estimates.devices_are_missing(model))
        case decision.NeedsReading():
            device_view.read(draft)
        case decision.NeedsCheck(check, _):
            if (check.spec, check.kinds) not in state.checks:
                draft.set(checks={(check.spec, check.kinds): check, **state.checks})
                draft.plan()  # begins it in this step
        case Decision(Refusal(fix=fix)) if fit_of(model.spec).allows(fix):
            draft.set_command(id, replace(command, reduced=replace(model.effective, **fix), divisions=0))
            draft.plan()
        case _:
            draft.answer(id, _planned(draft, command, model, found.outcome))


def _planned(draft: Draft, command: PlanCommand, model: ModelRecord, outcome: Placement | Refusal) -> Planned:
    state = draft.state
    own = [item for item in held_models(state, draft.now) if item.model == command.model]
    if command.spec is not None and own:
        line = f"{command.model} is on {own[0].device} with other settings, and would be loaded again"
        outcome = replace(outcome, trace=(line, *outcome.trace))
    worker = state.worker_of(model)
    if command.spec is None and worker is not None and (found := changed(worker.files, model.seen_files)):
        line = f"the file of {model.id} changed since it was loaded: {found}; the next load reads the new file"
        outcome = replace(outcome, trace=(line, *outcome.trace))
    known = state.estimates_of(model.effective)
    estimate = next(iter(known.values()), None)
    if isinstance(outcome, Placement):
        estimate = known.get(placement_key(outcome.devices, outcome.tensor_split), estimate)
    lost, _ = device_view.lost_for(state.models[command.model].effective, device_view.readings(state, draft.now))
    changes = {name: getattr(model.effective, name) for name in model.spec.changed(model.effective)}
    speed = None
    if isinstance(outcome, Placement) and (first := known.get(outcome.devices[0])) is not None:
        speed = decode_speed.expected(state.read_rates, model.effective, first, outcome)
    steps: Sequence[Mapping[str, Any]] = ()
    undivided = ((name, found) for name, found in state.estimates_of(model.spec).items() if not found.counts)
    if changes and (configured := next(undivided, None)) is not None:
        device, of_device = configured
        steps = fit_costs(state.read_rates, model.spec, model.effective, of_device, device)
    if isinstance(outcome, Refusal):
        return Planned(outcome, estimate, lost, changes, steps, speed)
    leaving = [item for item in held_models(state, draft.now) if item.model in outcome.evict]
    is_there = outcome.result is Result.DEPLOYED
    ledger = state.ledger if is_there else state.ledger.without([item.holding for item in (*leaving, *own)])
    free = {name: max(0, ledger.room(name)[0] - (0 if is_there else need)) for name, need in outcome.need.items()}
    load_seconds = expectations.load_seconds(state, model, draft.now)
    return Planned(outcome, estimate, lost, changes, steps, speed, load_seconds, leaving, free)


def _trim(draft: Draft, id: int, command: CollectCommand) -> None:
    draft.cancel(TimerKind.COMMAND, id)
    draft.set_command(id, replace(command, trimming=True))
    draft.emit(TrimWorkers(id, serving(draft.state)))


def trimmed(draft: Draft, event: Trimmed) -> None:
    """Workers have dropped retained prefixes."""
    if isinstance(event.job, str):
        oom_recovery.cleaned(draft, event)
        return
    command = draft.state.commands.get(event.job)
    if isinstance(command, DefragmentCommand):
        defragmentation.trimmed(draft, event.job, command, event)
    elif isinstance(command, CollectCommand):
        reclaim(draft, event.bytes)
        freed = sum(record.memory_freed_mb for record in command.records)
        trimmed_mb = round(event.freed_bytes / 2**20, 3)
        answer = {
            "freed_mb": round(freed + trimmed_mb, 3),
            "models_unloaded": len(command.records),
            "models": [record.model_name for record in command.records],
            "trimmed_mb": trimmed_mb,
        }
        draft.answer(event.job, answer)


def overdue(draft: Draft, id: int) -> None:
    """The deadline of a command has passed."""
    command = draft.state.commands.get(id)
    if isinstance(command, EvictCommand):
        draft.refuse(id, DeadlineExceeded(f"{command.model!r} is leaving, but its memory is not free yet"))
    elif isinstance(command, CollectCommand) and not command.trimming:
        _trim(draft, id, replace(command, awaited=frozenset()))


def abandoned(draft: Draft, event: Abandoned) -> None:
    """The client of a command has disconnected."""
    command = draft.state.commands.get(event.command)
    if isinstance(command, MoveCommand):
        moving.abandon(draft, event.command, command)
    elif command is not None:
        draft.drop_command(event.command)


def cannot_measure(draft: Draft, spec: ModelSpec, error: InferenceError) -> None:
    """A model cannot be measured: commands that wait for its size fail, and a defragmentation does not move it."""
    moving.cannot_measure(draft, spec, error)
    defragmentation.cannot_measure(draft, spec, error)
    for id, command in list(draft.state.commands.items()):
        if isinstance(command, PlanCommand) and command.model == spec.id:
            model = draft.state.models.get(command.model)
            planned = command.spec or (None if model is None else model.effective)
            if planned == spec:
                draft.refuse(id, error)


_REFUSED_AT_CLOSING = (PlanCommand, RecoverCommand, RefreshCommand, DefragmentCommand, CollectCommand)


def refuse_pending(draft: Draft) -> None:
    """The service is shutting down: commands fail, except unload, offload and evict, and moves that have begun."""
    for id, command in list(draft.state.commands.items()):
        if isinstance(command, _REFUSED_AT_CLOSING) or (isinstance(command, MoveCommand) and not command.begun):
            draft.refuse(id, ShuttingDown())
