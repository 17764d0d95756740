"""A helper that hung inside a driver, where no signal reaches it, was waited for without end, like every reading."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import pytest

from inference.workers import helper_client
from inference.workers.helper_client import HelperError, ServingHelper


class Unkillable:
    """A process that takes no notice of being killed until `released`."""

    pid = 4711
    returncode = None

    def __init__(self) -> None:
        self.released = asyncio.Event()

    def kill(self) -> None:
        """In vain."""

    async def wait(self) -> int:
        await self.released.wait()
        return -9


async def test_it_is_left_alone_and_reaped_when_the_driver_lets_go(caplog: pytest.LogCaptureFixture) -> None:
    """A few may hang so; then that job is refused until one is gone."""
    hung = [Unkillable() for _ in range(helper_client.MOST_STUCK)]
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


async def test_a_caller_who_gives_up_leaves_it_to_be_reaped() -> None:
    """Nothing of it is left behind once it ends."""
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
