"""Loads configured models at the start, in order and without evictions."""

from __future__ import annotations

from inference.authority.draft import Draft
from inference.authority.effects import ReadFiles
from inference.authority.events import Wanted
from inference.authority.handlers.placing import decision, measuring
from inference.authority.handlers.queries import device_view
from inference.authority.handlers.queueing import request_events
from inference.authority.placement.plan import Result
from inference.authority.state import Purpose, TicketRecord
from inference.errors import InferenceError
from inference.settings import ModelSpec


def advance(draft: Draft) -> None:
    """Continues with the next model; the readings are current."""
    while draft.state.startup and not draft.state.closing:
        waiting = [item.model for item in draft.state.tickets.values() if item.purpose is Purpose.STARTUP]
        if any(name in draft.state.models and draft.model(name).worker is None for name in waiting):
            return
        name = draft.state.startup[0]
        if name not in draft.state.models:
            _next(draft)
            continue
        found = decision.consider(draft.state, name, draft.now)
        match found:
            case decision.NeedsEstimate(key, divides):
                if divides and not draft.state.is_estimating(draft.model(name)):
                    draft.set_model(name, divisions=draft.model(name).divisions + 1)
                if measuring.request(draft, key):
                    return
                _next(draft)
            case decision.NeedsReading():
                device_view.read(draft)
                return
            case decision.NeedsFiles():
                draft.emit(ReadFiles(name, draft.model(name).effective))
                return
            case decision.NeedsCheck():
                _no_room(draft, name)
            case _ if found.outcome.result in (Result.FREE, Result.DEPLOYED):
                _next(draft)
                request_events.wanted(draft, Wanted(draft.number(), name, purpose=Purpose.STARTUP))
            case _:
                _no_room(draft, name)


def _next(draft: Draft) -> None:
    draft.set(startup=draft.state.startup[1:])


def _no_room(draft: Draft, name: str) -> None:
    draft.warning("%s is not loaded at start: there is no room beside the models before it", name)
    _next(draft)


def cannot_measure(draft: Draft, spec: ModelSpec, error: InferenceError) -> None:
    """A model cannot be measured."""
    if draft.state.startup and draft.state.startup[0] == spec.id:
        draft.warning("%s is not loaded at start: %s", spec.id, error.message)
        _next(draft)


def settled(draft: Draft, ticket: TicketRecord, error: InferenceError | None) -> None:
    """A model is loaded, or could not be."""
    if error is not None:
        draft.warning("%s is not loaded at start: %s", ticket.model, error.message)
