"""Loads several models at once, at the start or by hand, and says what became of each; decides nothing about room.

By hand is a wish like any other, so models may leave for it. At the start nobody leaves for anybody.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from inference.authority.placement.plan import Result
from inference.errors import InferenceError
from inference.protocol import Priority

if TYPE_CHECKING:
    from inference.authority.shell import Authority
    from inference.model import Model, Ticket

log = logging.getLogger(__name__)

_BOOKED_SECONDS = 0.05
"""How soon a booking is seen."""


async def load_all(authority: Authority) -> None:
    """Loads every configured model that fits beside those before it, side by side; the log names those that do not."""
    loading = []
    for model in list(authority.models.values()):
        try:
            if (ticket := await _booked(authority, model)) is not None:
                loading.append((model, ticket))
        except InferenceError as error:
            log.warning("%s is not loaded at start: %s", model.id, error.message)
    for model, ticket in loading:
        try:
            with ticket:
                await ticket.wait()
        except InferenceError as error:
            log.warning("%s is not loaded at start: %s", model.id, error.message)


async def _booked(authority: Authority, model: Model) -> Ticket | None:
    """Begins to load a model if nobody has to leave for it; returns when its memory is booked, or it failed."""
    decision, _ = await authority.outlook.dry_run(model, {})
    if decision.result not in (Result.FREE, Result.DEPLOYED):
        log.warning("%s is not loaded at start: there is no room beside those before it", model.id)
        return None
    ticket = authority.ask(model)
    while model.running is None and ticket.pending:
        await ticket.wait(_BOOKED_SECONDS)
    return ticket


async def preload(
    authority: Authority, names: Sequence[str], priority: Priority = Priority.NORMAL, seconds: float | None = None
) -> list[dict[str, Any]]:
    """One result per name, in order: `model`, `loaded`, `state`, `devices`, `seconds` it took, and `error` (the body of
    the envelope) where it was not loaded. None of them waits longer than `seconds`.
    """
    return await asyncio.gather(*(_one(authority, name, priority, seconds) for name in dict.fromkeys(names)))


async def _one(authority: Authority, name: str, priority: Priority, seconds: float | None) -> dict[str, Any]:
    began = authority.loop.time()
    error: dict[str, Any] | None = None
    try:
        with authority.ask(authority.resolve(name), priority=priority, seconds=seconds) as ticket:
            await ticket.wait()
    except InferenceError as raised:
        error = raised.body()["error"]
    model = authority.models.get(authority.config.names.get(name, ""))
    status = None if model is None else authority.status(model)
    return {
        "model": name if status is None else status.id,
        "loaded": error is None,
        "state": None if status is None else str(status.state),
        "devices": [] if status is None else list(status.devices),
        "seconds": round(authority.loop.time() - began, 3),
        "error": error,
    }
