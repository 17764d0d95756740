"""Loads several models at once, at the start or by hand, and says what became of each; decides nothing about room."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from inference.errors import InferenceError
from inference.protocol import Priority

if TYPE_CHECKING:
    from inference.authority import Authority


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
