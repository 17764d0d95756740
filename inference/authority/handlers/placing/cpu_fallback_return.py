"""Moves a model that fell back to the CPU to an accelerator with enough free memory, while no request uses it.

No other model is evicted for it.
"""

from __future__ import annotations

from dataclasses import replace

from inference.authority.draft import Draft
from inference.authority.events import Move
from inference.authority.handlers.placing import decision, measuring, moving
from inference.authority.handlers.queries import device_view
from inference.authority.handlers.queries.plan_inputs import Subject, held_models, request_for
from inference.authority.handlers.queries.pressure_view import open_to
from inference.authority.handlers.running import oom_ladder
from inference.authority.placement.plan import Placement, Refusal, Result, Standing, plan
from inference.authority.state import ModelRecord, MoveCommand, ReturnHome, State
from inference.devices.device import CPU
from inference.errors import InferenceError
from inference.protocol import ModelState
from inference.settings import ModelSpec

LOOK_SECONDS = 5.0
"""Interval of checks for free memory."""


def tick(draft: Draft) -> None:
    """Begins a check for each idle model that fell back, at intervals."""
    for model in draft.state.models.values():
        known = draft.state.going_home.get(model.id)
        if not oom_ladder.is_fallback(draft.state, model):
            if known is not None:
                _forget(draft, model.id)
            continue
        known = known or ReturnHome()
        is_due = draft.now >= max(known.look_at, model.sheltered_until)
        if known.needs_read is None and is_due and _is_idle(draft.state, model):
            begun = ReturnHome(device_view.read(draft), draft.now + LOOK_SECONDS)
            draft.set(going_home={**draft.state.going_home, model.id: begun})


def _is_idle(state: State, model: ModelRecord) -> bool:
    is_free = model.state is ModelState.READY and not state.in_flight(model) and not model.queue.waiters
    moves = any(isinstance(item, MoveCommand) and item.model == model.id for item in state.commands.values())
    return is_free and model.target is None and not moves


def is_pending(state: State) -> bool:
    """Whether a check is pending."""
    return any(
        item.needs_read is not None and state.devices.done >= item.needs_read for item in state.going_home.values()
    )


def advance(draft: Draft) -> None:
    """Continues the checks whose reading has come; the readings are current."""
    for id, known in list(draft.state.going_home.items()):
        if known.needs_read is None or draft.state.devices.done < known.needs_read:
            continue
        model = draft.state.models.get(id)
        if model is None or not oom_ladder.is_fallback(draft.state, model) or not _is_idle(draft.state, model):
            _done(draft, id)
            continue
        key = decision.unmeasured(draft.state, model, draft.now)
        if key is not None and measuring.request(draft, key):
            continue
        _done(draft, id)
        device = _room(draft.state, model, draft.now)
        if device is not None:
            draft.info("moving %s from the CPU back to %s, which has enough free memory again", id, device)
            moving.begin(draft, draft.number(), Move(id, device), returns_home=True)


def cannot_measure(draft: Draft, spec: ModelSpec, error: InferenceError) -> None:
    """A model cannot be measured."""
    known = draft.state.going_home.get(spec.id)
    if known is not None and known.needs_read is not None:
        _done(draft, spec.id)
        moving.stays_on_cpu(draft, spec.id, error)


def _done(draft: Draft, id: str) -> None:
    known = replace(draft.state.going_home[id], needs_read=None)
    draft.set(going_home={**draft.state.going_home, id: known})


def _forget(draft: Draft, id: str) -> None:
    draft.set(going_home={name: item for name, item in draft.state.going_home.items() if name != id})


def _room(state: State, model: ModelRecord, now: float) -> str | None:
    """The accelerator where the model fits without evictions, or None."""
    devices = device_view.candidates(model.effective, device_view.readings(state, now), state.settings)
    allowed = open_to(state, model.effective, [item for item in devices if item.id != CPU], now)
    if isinstance(allowed, Refusal):
        return None
    request = request_for(Subject.of(state, model.effective), allowed, divide=False)
    if request is None:
        return None
    held = held_models(state, now)
    own = {item.holding for item in held if item.model == model.id}
    others = [replace(item, standing=Standing.BUSY) for item in held if item.holding not in own]
    found = plan(request, state.ledger.without(own), others, device_view.policy(state.settings, now))
    alone = isinstance(found, Placement) and found.result is Result.FREE and len(found.devices) == 1
    return found.device if isinstance(found, Placement) and alone else None
