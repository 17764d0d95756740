"""What the fake provider remembers of a request; decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.rigs.fake_provider.answers import Prompt
from tests.rigs.fake_provider.faults import Fault


@dataclass(eq=False)
class Record:
    """One request as it came, and how it ended: answered, refused, faulted or disconnected (by the client).

    `peer` is the client's port.
    """

    number: int
    dialect: str
    path: str
    headers: Mapping[str, str]
    body: Any
    peer: int = 0
    status: int | None = None
    outcome: str | None = None
    fault: str | None = None
    frames_sent: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "ended"} | {
            "headers": dict(self.headers),
            "ended": self.ended.is_set(),
        }


@dataclass(frozen=True, slots=True)
class Work:
    """One checked request on its way to its answer."""

    request: web.Request
    record: Record
    body: Mapping[str, Any]
    prompt: Prompt
    fault: Fault | None


@contextlib.contextmanager
def recorded(record: Record) -> Iterator[None]:
    """Marks the request as ended, and as disconnected if the client left: that cancels the handler or fails a write."""
    try:
        yield
    except (asyncio.CancelledError, ConnectionError):
        record.outcome = "disconnected"
        raise
    finally:
        record.ended.set()
