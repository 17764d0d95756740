"""Helper processes that hang in a driver or end before they answer."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import pytest
import uvloop

from inference.workers import helper_client
from inference.workers.helper_client import HelperError, ServingHelper, run_helper


class Unkillable:
    """A process that ignores SIGKILL until `released`, like one that hangs in a driver."""

    pid = 4711
    returncode = None

    def __init__(self) -> None:
        self.released = asyncio.Event()

    def kill(self) -> None:
        """Without effect."""

    async def wait(self) -> int:
        await self.released.wait()
        return -9


async def test_hanging_helper_is_reaped_later_and_too_many_block_the_job(caplog: pytest.LogCaptureFixture) -> None:
    hung = [Unkillable() for _ in range(helper_client.MAX_STUCK)]
    with caplog.at_level(logging.WARNING):
        for process in hung:
            await helper_client._end(cast(Any, process), "nvml", seconds=0.01)
    assert caplog.messages == ["the nvml helper (pid 4711) hangs in a driver and cannot be killed"] * len(hung)
    with pytest.raises(HelperError, match="3 nvml helpers hang in a driver"):
        await ServingHelper("nvml").ask(seconds=5)
    for process in hung:
        process.released.set()
    await asyncio.wait(set(helper_client._stuck["nvml"]))
    assert not helper_client._stuck["nvml"]


async def test_hanging_helper_is_reaped_after_its_caller_was_cancelled() -> None:
    hung = Unkillable()
    ending = asyncio.create_task(helper_client._end(cast(Any, hung), "trial"))
    await asyncio.sleep(0)
    ending.cancel()
    await asyncio.wait({ending})
    assert ending.cancelled()
    (reaping,) = helper_client._reaping
    hung.released.set()
    await reaping
    assert not helper_client._reaping
    assert "trial" not in helper_client._stuck


@pytest.fixture
def dead_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every helper has ended before the first message is sent to it."""
    start = helper_client._start

    async def start_dead(job: str, environment: dict[str, str]) -> object:
        process = await start(job, environment)
        process.kill()
        await process.wait()
        return process

    monkeypatch.setattr(helper_client, "_start", start_dead)


@pytest.mark.usefixtures("dead_helpers")
def test_helper_that_ended_at_its_start_is_a_helper_error() -> None:
    async def ask() -> None:
        with pytest.raises(HelperError, match="ended with signal SIGKILL"):
            await run_helper("estimate", {"path": "x" * 100_000}, seconds=20)
        with pytest.raises(HelperError, match="the nvml helper failed"):
            await ServingHelper("nvml").ask(seconds=20)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # the loop that the service runs on
        runner.run(ask())
