"""Loads several models at once by hand, and reports what became of each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from inference.authority.shell import Authority
from inference.errors import InferenceError
from inference.protocol import Priority


async def preload(
    authority: Authority, names: Sequence[str], priority: Priority = Priority.NORMAL, seconds: float | None = None
) -> list[dict[str, Any]]:
    """One result per name, in order: `model`, `loaded`, `state`, `devices`, `seconds` it took, and `error` (the body of
    the envelope) where it was not loaded. None of them waits longer than `seconds`.
    """
    return await asyncio.gather(*(_one(authority, name, priority, seconds) for name in dict.fromkeys(names)))


async def _one(authority: Authority, name: str, priority: Priority, seconds: float | None) -> dict[str, Any]:
    began = authority.now
    error: dict[str, Any] | None = None
    try:
        with authority.ask(authority.resolve(name), priority=priority, seconds=seconds) as ticket:
            await ticket.wait()
    except InferenceError as raised:
        error = raised.body()["error"]
    id = authority.state.config.names.get(name, "")
    status = authority.status(id) if id in authority.state.models else None
    return {
        "model": name if status is None else status.id,
        "loaded": error is None,
        "state": None if status is None else str(status.state),
        "devices": [] if status is None else list(status.devices),
        "seconds": round(authority.now - began, 3),
        "error": error,
    }
