"""Requests with images held their files, up to 23 MiB each, while 64 of them waited for a turn and while they ran."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from inference.protocol import Code
from inference.worker.backend import ImageTile
from inference.worker.prompt.vision import (
    HELD_BYTES,
    KEPT_BYTES,
    MAX_FILES_BYTES,
    MAX_REQUEST_BYTES,
    MAX_TURNS,
    Sight,
)
from inference.worker.worker_errors import WorkerError


class BlindEye:
    """A projector that nobody asks."""

    width = 4

    def read(self, data: bytes) -> list[Sequence[int] | ImageTile]:
        raise AssertionError("nothing is read")

    def encode(self, picture: ImageTile) -> None:
        raise AssertionError("nothing is encoded")


@pytest.fixture
async def sight() -> Sight:
    return Sight(BlindEye(), 100, 1, at_once=50)


async def full(sight: Sight, size: int) -> bool:
    try:
        async with sight.turn(0.0, size):
            return False
    except WorkerError as error:
        return error.code is Code.QUEUE_FULL


async def test_files_that_wait_have_a_bound_in_bytes(sight: Sight) -> None:
    half = MAX_FILES_BYTES // 2
    async with sight.turn(None, half) as let_go:
        waiting = asyncio.create_task(_wait(sight, half))
        await asyncio.sleep(0)
        assert await full(sight, 1), "the one that is read and the one that waits hold all there is"
        let_go()
        assert not await full(sight, half), "what has been read holds no file"
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert not await full(sight, MAX_FILES_BYTES)
    assert not await full(sight, MAX_FILES_BYTES), "every way out gives back what was held"


async def _wait(sight: Sight, size: int) -> None:
    async with sight.turn(None, size):
        raise AssertionError("there is one turn, and it is taken")


def test_what_is_held_is_what_is_reserved() -> None:
    assert HELD_BYTES == MAX_TURNS * MAX_REQUEST_BYTES + KEPT_BYTES + MAX_FILES_BYTES
