"""Loads further replicas of models that need them, and lets those leave that are not needed any more."""

from __future__ import annotations

import math
from dataclasses import replace

from inference.authority.draft import Draft
from inference.authority.events import Wanted
from inference.authority.handlers.running import departure, keeping, replicas, request_events
from inference.authority.lifecycle import Reason
from inference.authority.placement import replica_choice
from inference.authority.state import ModelRecord, Purpose, TicketRecord
from inference.errors import InferenceError
from inference.protocol import ModelState, Priority

REST_SECONDS = 30.0
"""Pause after a further replica could not be loaded."""
USED_SECONDS = 1.0
"""A model counts as used for this time after its last request."""


def tick(draft: Draft) -> None:
    """Checks every model with replicas. The periodic timer calls it."""
    if draft.state.closing:
        return
    for model in list(draft.state.models.values()):
        if replicas.is_first_of_several(model) and not model.removed:
            _scale(draft, model)


def _scale(draft: Draft, first: ModelRecord) -> None:
    least, now = first.spec.replicas[0], draft.now
    found = replicas.candidates(draft.state, first, now)
    before = first.scaling
    scaling = replace(
        before,
        crowded_since=min(before.crowded_since, now) if replica_choice.is_crowded(found) else math.inf,
        spare_since=min(before.spare_since, now) if replica_choice.has_spare(found, least) else math.inf,
    )
    if scaling != before:
        draft.set_model(first.id, scaling=scaling)
    used_at = max(draft.model(item.id).last_used_at for item in found)
    is_used = any(item.active for item in found) or now - used_at <= USED_SECONDS
    id = replica_choice.to_load(found, least, is_used=is_used, crowded_seconds=now - scaling.crowded_since)
    if id is not None and now >= scaling.retry_at:
        _load(draft, first, id)
    elif unneeded := replica_choice.to_drop(found, least, spare_seconds=now - scaling.spare_since):
        draft.set_model(first.id, scaling=replace(scaling, spare_since=math.inf))
        departure.leave(draft, unneeded, Reason.FEWER_REPLICAS, keeping.action_of(draft.state, draft.model(unneeded)))


def _load(draft: Draft, first: ModelRecord, id: str) -> None:
    draft.debug("%s needs a further replica: loading %s", first.id, id)
    _set(draft, first.id, crowded_since=math.inf)
    wanted = Wanted(draft.number(), id, Priority.LOW, counts_as_use=False, purpose=Purpose.REPLICA)
    request_events.wanted(draft, wanted)


def _set(draft: Draft, id: str, **changes: float) -> None:
    draft.set_model(id, scaling=replace(draft.model(id).scaling, **changes))  # type: ignore[arg-type]


def load_settled(draft: Draft, ticket: TicketRecord, error: InferenceError | None) -> None:
    """A further replica is loaded, or could not be."""
    model = draft.state.models.get(ticket.model)
    if error is None or model is None:
        return
    if model.failure != error.message:  # it is tried again and again
        draft.info("the further replica %s is not loaded: %s", model.id, error.message)
    first = replicas.first_of(draft.state, model)
    _set(draft, first.id, retry_at=draft.now + REST_SECONDS)
    if model.state is ModelState.COLD:
        draft.set_model(model.id, failure=error.message)
    draft.changed()
