"""A timer that was due already when it was set had no `when()` under uvloop, and the request behind it hung."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import uvloop

from inference.authority.clock import Clock
from inference.errors import DeadlineExceeded
from inference.protocol import ModelState
from tests.rigs.authority_rig import services


def test_timers_in_the_past_fire_under_the_loop_that_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        async with services(tmp_path, monkeypatch) as start:
            service = await start({"a": {}})
            authority, model = service.authority, service.authority.resolve("a")
            service.estimator.gate = asyncio.Event()  # type: ignore[attr-defined]
            rung = asyncio.Event()
            Clock().call_at(authority.now - 1.0, rung.set)
            await asyncio.wait_for(rung.wait(), 5)
            with pytest.raises(DeadlineExceeded):
                await asyncio.wait_for(authority.ask(model, seconds=0.0).wait(), 5)
            service.estimator.gate.set()  # type: ignore[attr-defined]
            await asyncio.wait_for(authority.load(model), 10)
            assert model.state is ModelState.READY

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(play())
