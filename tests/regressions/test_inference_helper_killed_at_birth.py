"""A helper that was dead before it was asked was no HelperError, so that no header was tried and the model failed."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from inference.workers import helper_client
from inference.workers.helper_client import HelperError, ServingHelper, run_helper


@pytest.fixture(autouse=True)
def dead_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Helpers are processes that are gone, and known to be, before anybody writes to them."""
    start = helper_client._start

    async def start_dead(job: str, environment: dict[str, str]) -> object:
        process = await start(job, environment)
        process.kill()
        await process.wait()
        return process

    monkeypatch.setattr(helper_client, "_start", start_dead)


def test_its_death_is_told_as_one() -> None:
    async def ask() -> None:
        with pytest.raises(HelperError, match="ended with signal SIGKILL"):
            await run_helper("estimate", {"path": "x" * 100_000}, seconds=20)
        with pytest.raises(HelperError, match="the nvml helper failed"):
            await ServingHelper("nvml").ask(seconds=20)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # the loop that the service runs on
        runner.run(ask())
