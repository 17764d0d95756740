"""The gateway's view understands the events of the real event bus of the inference service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.providers.local.inference_snapshot import Events, InferenceView
from inference.authority.views.event_bus import Bus
from inference.protocol import ModelState
from tests.rigs.authority_rig import Start


class OnTheBus:
    """The stream of `GET /events`."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus

    @asynccontextmanager
    async def events(
        self, silence_seconds: float, *, figures: bool = False, kv: bool = False
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """The bus, beginning with its snapshot."""
        yield self.bus.listen()


async def _no_polls(path: str, seconds: float) -> Any:
    raise AssertionError("the view polled the service")


async def test_view_follows_the_states_of_a_model_by_events_alone(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    service = await start({"a": {}, "broken": {}}, {"broken": {"abort": "GGML_ASSERT"}})
    authority = service.authority
    view = InferenceView(_no_polls)
    source = OnTheBus(authority.bus)
    listening = asyncio.create_task(Events(lambda: source, view).run())
    await authority.reached(lambda: set(view.models) == {"a", "broken"})
    lease = await authority.ask(authority.resolve("a")).wait(10)
    assert lease is not None
    await authority.reached(lambda: view.models["a"].state is ModelState.BUSY)
    lease.release()
    await authority.unload(authority.resolve("a"))
    await authority.reached(lambda: view.models["a"].state is ModelState.COLD)
    assert "invalid event" not in caplog.text
    listening.cancel()
    await asyncio.wait({listening})
