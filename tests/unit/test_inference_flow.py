"""Pieces of a stream on their way through the relay: at once while they can be, in order whatever the reader does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from headgate.shared.hop import BrokenError
from inference.api.flow_control import Flow


class FakeAnswer:
    """A worker's answer that is played by hand."""

    def __init__(self) -> None:
        self.paused = 0
        self.resumed = 0

    def listen(self, on_piece: Callable[[bytes], None], on_end: Callable[[BrokenError | None], None]) -> None:
        """Keeps who listens."""
        self.on_piece, self.on_end = on_piece, on_end

    def pause(self) -> None:
        """Counts."""
        self.paused += 1

    def resume(self) -> None:
        """Counts."""
        self.resumed += 1


class FakeOut:
    """A caller: `takes_pieces` while it reads; what is awaited leaves once `reads` is set."""

    def __init__(self) -> None:
        self.takes_pieces = True
        self.reads = asyncio.Event()
        self.reads.set()
        self.got: list[bytes] = []

    def piece(self, data: bytes) -> None:
        """At once."""
        assert self.takes_pieces
        self.got.append(data)

    async def data(self, data: bytes) -> None:
        """When it reads."""
        await self.reads.wait()
        self.got.append(data)


async def flowing() -> tuple[FakeAnswer, FakeOut, Flow, asyncio.Task[None]]:
    """A flow whose task waits."""
    answer, out = FakeAnswer(), FakeOut()
    flow = Flow(answer, out)  # type: ignore[arg-type]
    task = asyncio.create_task(flow.run())
    await asyncio.sleep(0)
    return answer, out, flow, task


async def test_pieces_leave_at_once_and_the_end_ends_it() -> None:
    answer, out, flow, task = await flowing()
    assert not flow.has_begun
    answer.on_piece(b"a")
    answer.on_piece(b"b")
    assert (out.got, flow.has_begun, answer.paused) == ([b"a", b"b"], True, 0)
    answer.on_end(None)
    await task


async def test_a_reader_that_is_slow_gets_everything_in_order_and_holds_the_worker_up() -> None:
    answer, out, _flow, task = await flowing()
    out.takes_pieces = False
    out.reads.clear()
    answer.on_piece(b"a")
    await asyncio.sleep(0)
    out.takes_pieces = True  # it reads again, but what waits comes first
    answer.on_piece(b"b")
    assert out.got == []
    assert answer.paused >= 1
    assert answer.resumed == 0
    out.reads.set()
    while not answer.resumed:
        await asyncio.sleep(0)
    assert out.got == [b"a", b"b"]
    answer.on_piece(b"c")
    assert out.got == [b"a", b"b", b"c"]
    answer.on_end(None)
    await task


async def test_a_broken_answer_is_told_after_what_came() -> None:
    answer, out, _flow, task = await flowing()
    out.takes_pieces = False
    answer.on_piece(b"a\n\n")
    answer.on_end(BrokenError("gone"))
    with pytest.raises(BrokenError, match="gone"):
        await task
    assert out.got == [b"a\n\n"]
