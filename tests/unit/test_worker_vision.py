"""Encoding of images with a fake projector: caching, limits, waiting."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from inference.protocol import Code
from inference.worker.backend import ImageTile
from inference.worker.prompt.vision import KEPT_BYTES, MAX_CONCURRENT, MAX_REQUEST_BYTES, MAX_WAITING, Vision
from inference.worker.worker_errors import BadRequestError, WorkerError


@dataclass
class FakeEye:
    """An image file is the list of the sizes of its tiles, such as b"3 2"; tokens 1 and 2 are the marks around it."""

    width: int = 4
    encoded: list[int] = field(default_factory=list)
    breaks: bool = False
    non_causal: bool = False
    watched: list[Callable[[], object]] = field(default_factory=list)

    def read(self, data: bytes) -> list[Sequence[int] | ImageTile]:
        if data == b"bad":
            raise ValueError("it cannot be decoded")
        tiles = [ImageTile(int(size), int(size), self.non_causal) for size in data.split()]
        return [[1], *tiles, [2]]

    def encode(self, picture: ImageTile) -> None:
        if self.breaks:
            raise RuntimeError("the projector could not encode an image")
        self.encoded.append(picture.n_tokens)
        for look in self.watched:
            look()
        picture.rows = np.zeros((picture.n_tokens, self.width), np.float32)


@pytest.fixture
async def eye() -> FakeEye:
    return FakeEye()


@pytest.fixture
async def vision(eye: FakeEye) -> Vision:
    return Vision(eye, 100, 8, at_once=50)


async def test_tiles_are_runs_of_negative_numbers_with_gaps(vision: Vision) -> None:
    image = vision.read(b"3 2", "messages")
    assert image.tokens == (1, -1, -2, -3, -5, -6, 2)
    assert vision.read(b"2", "messages").tokens == (1, -8, -9, 2)


async def test_same_file_has_the_same_numbers_and_is_encoded_once(vision: Vision, eye: FakeEye) -> None:
    for _ in range(2):
        vision.encode([vision.read(b"3", "messages"), vision.read(b"4", "messages")], "messages")
    assert eye.encoded == [3, 4]
    assert vision.read(b"3", "messages").tokens == (1, -1, -2, -3, 2)
    vision.encode([vision.read(b"3", "messages")] * 5, "messages")
    assert eye.encoded == [3, 4]


async def test_images_are_not_shared_between_tenants(vision: Vision, eye: FakeEye) -> None:
    def see() -> tuple[int, ...]:
        image = vision.read(b"3", "messages")
        vision.encode([image], "messages")
        return image.tokens

    numbers = [await vision.off_loop(see, tenant) for tenant in ("one", "other", "one")]
    assert numbers[0] == numbers[2] != numbers[1]
    assert eye.encoded == [3, 3]


async def test_images_are_kept_while_in_use_and_cached_within_a_limit(eye: FakeEye) -> None:
    """Numbers are remembered beyond the limit."""
    eye.width = KEPT_BYTES // 4 // 150  # one and a half images are cached
    vision = Vision(eye, 100, 8, at_once=50)
    first = vision.read(b"100", "messages")
    vision.encode([first], "messages")
    vision.encode([vision.read(b"99", "messages")], "messages")
    assert vision.tiles[-1] is first.tiles[0], "its request still needs it"
    del first
    gc.collect()
    assert -1 not in vision.tiles
    again = vision.read(b"100", "messages")
    assert again.tokens[1] == -1
    vision.encode([again], "messages")
    assert eye.encoded == [100, 99, 100]


async def test_unusable_images_are_bad_requests(vision: Vision, eye: FakeEye) -> None:
    for data, says in ((b"bad", "cannot be decoded"), (b"101", "has 101 tokens, but this model processes at most 100")):
        with pytest.raises(BadRequestError, match=says) as caught:
            vision.read(data, "messages")
        assert caught.value.param == "messages"
    eye.non_causal = True
    with pytest.raises(BadRequestError, match="at most 50 at a time"):
        vision.read(b"51", "messages")
    eye.non_causal = False
    eye.width = MAX_REQUEST_BYTES // 4 // 150
    both = [vision.read(b"100", "messages"), vision.read(b"99", "messages")]
    with pytest.raises(BadRequestError, match="bytes of embeddings"):
        vision.encode(both, "messages")
    vision.encode([both[0]] * 3, "messages")  # an image counts once
    eye.breaks = True
    with pytest.raises(WorkerError, match="could not encode") as failed:
        vision.encode([both[1]], "messages")
    assert failed.value.code is Code.MODEL_FAILED


async def test_concurrent_and_waiting_requests_are_limited(vision: Vision) -> None:
    release = asyncio.Event()
    inside = 0

    async def see() -> None:
        nonlocal inside
        async with vision.place(None, 1):
            inside += 1
            await release.wait()

    tasks = [asyncio.create_task(see()) for _ in range(MAX_CONCURRENT + MAX_WAITING)]
    while inside < MAX_CONCURRENT:
        await asyncio.sleep(0)
    with pytest.raises(WorkerError) as full:
        async with vision.place(None, 1):
            raise AssertionError("the queue is full")
    assert full.value.code is Code.QUEUE_FULL
    tasks.pop().cancel()
    await asyncio.sleep(0)
    with pytest.raises(WorkerError) as late:
        async with vision.place(0.0, 1):
            raise AssertionError("the deadline has passed")
    assert late.value.code is Code.DEADLINE_EXCEEDED
    release.set()
    await asyncio.gather(*tasks)
    assert inside == MAX_CONCURRENT + MAX_WAITING - 1


async def test_encoding_is_part_of_the_heartbeat(vision: Vision, eye: FakeEye) -> None:
    """A hanging device is detected like one that hangs in a step."""
    beats = []
    eye.watched.append(lambda: beats.append(vision.counters.beat()))
    vision.encode([vision.read(b"3", "messages")], "messages")
    assert [(beat.step_seconds is not None, beat.step_tokens) for beat in beats] == [(True, 3)]
    eye.breaks = True
    with pytest.raises(WorkerError):
        vision.encode([vision.read(b"4", "messages")], "messages")
    assert vision.counters.beat().step_seconds is None


async def test_encoding_has_its_own_thread(vision: Vision) -> None:
    assert (await vision.off_loop(lambda: threading.current_thread().name)).startswith("vision")
