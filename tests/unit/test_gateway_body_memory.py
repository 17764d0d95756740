"""The memory of large bodies is bounded by their declared lengths."""

from __future__ import annotations

import contextlib

import pytest

from gateway.errors import RefusedError
from gateway.http.body_memory import LARGEST_AT_A_TIME, SMALL_BYTES, Bodies, Room
from inference.protocol import Code

LIMIT = 1_000_000


def _of(size: int) -> dict[str, str]:
    return {"content-length": str(size)}


def test_memory_of_bodies_is_bounded() -> None:
    bodies = Bodies()
    with contextlib.ExitStack() as held:
        for headers in (_of(LIMIT), _of(10 * LIMIT), {"transfer-encoding": "chunked"}):
            held.enter_context(bodies.hold(headers, LIMIT))
        assert bodies.held_bytes == 3 * LIMIT
        for _ in range(LARGEST_AT_A_TIME - 3):
            held.enter_context(bodies.hold(_of(LIMIT), LIMIT))
        with pytest.raises(RefusedError) as caught, bodies.hold(_of(SMALL_BYTES + 1), LIMIT):
            pass
        assert (caught.value.code, caught.value.status, caught.value.retry_after) == (Code.QUEUE_FULL, 429, 1.0)
        for small in (_of(SMALL_BYTES), {}, _of(0)):
            with bodies.hold(small, LIMIT):
                assert bodies.held_bytes == LARGEST_AT_A_TIME * LIMIT
    assert bodies.held_bytes == 0


def test_failed_request_releases_its_memory() -> None:
    bodies = Bodies()
    with pytest.raises(ValueError, match="it"), bodies.hold(_of(LIMIT), LIMIT):
        raise ValueError("it")
    assert bodies.held_bytes == 0


def test_continued_conversation_counts_like_a_body() -> None:
    bodies = Bodies()
    with bodies.room(0, LIMIT), bodies.room(LIMIT, LIMIT), bodies.hold(_of(LIMIT), LIMIT):
        assert bodies.held_bytes == 2 * LIMIT
        with pytest.raises(RefusedError), bodies.room(LARGEST_AT_A_TIME * LIMIT, LIMIT):
            pass
    assert bodies.held_bytes == 0


def test_memory_is_reserved_piece_by_piece() -> None:
    bodies = Bodies()
    room = Room(bodies, LIMIT)
    assert (room.take(LIMIT - 1), room.take(2), room.take(1)) == (True, False, True)
    assert bodies.held_bytes == LIMIT
    with bodies.room((LARGEST_AT_A_TIME - 1) * LIMIT, LIMIT), pytest.raises(RefusedError):
        Room(bodies, LIMIT).take(1)
    room.close()
    assert bodies.held_bytes == 0
