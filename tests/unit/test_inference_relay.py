"""The relay of token streams: pieces, order, flow control; and the shape of a request in crash records."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from headgate.shared.hop import BrokenError
from inference.api.relay import Flow
from inference.api.relayed_request import read_request


class FakeAnswer:
    """An answer of a worker, driven by the test."""

    def __init__(self) -> None:
        self.paused = 0
        self.resumed = 0

    def listen(self, on_piece: Callable[[bytes], None], on_end: Callable[[BrokenError | None], None]) -> None:
        self.on_piece, self.on_end = on_piece, on_end

    def pause(self) -> None:
        self.paused += 1

    def resume(self) -> None:
        self.resumed += 1


class FakeOut:
    """A client: accepts pieces while `takes_pieces`; awaited data is delivered when `reads` is set."""

    def __init__(self) -> None:
        self.takes_pieces = True
        self.reads = asyncio.Event()
        self.reads.set()
        self.got: list[bytes] = []

    def piece(self, data: bytes) -> None:
        assert self.takes_pieces
        self.got.append(data)

    async def data(self, data: bytes) -> None:
        await self.reads.wait()
        self.got.append(data)


async def flowing() -> tuple[FakeAnswer, FakeOut, Flow, asyncio.Task[None]]:
    """A flow with a waiting task."""
    answer, out = FakeAnswer(), FakeOut()
    flow = Flow(answer, out)  # type: ignore[arg-type]
    task = asyncio.create_task(flow.run())
    await asyncio.sleep(0)
    return answer, out, flow, task


async def test_pieces_are_relayed_at_once() -> None:
    answer, out, flow, task = await flowing()
    assert not flow.has_begun
    answer.on_piece(b"a")
    answer.on_piece(b"b")
    assert (out.got, flow.has_begun, answer.paused) == ([b"a", b"b"], True, 0)
    answer.on_end(None)
    await task


async def test_slow_client_gets_all_pieces_in_order_and_pauses_the_worker() -> None:
    answer, out, _flow, task = await flowing()
    out.takes_pieces = False
    out.reads.clear()
    answer.on_piece(b"a")
    await asyncio.sleep(0)
    out.takes_pieces = True  # buffered pieces go first
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


async def test_error_of_the_worker_is_raised_after_its_pieces() -> None:
    answer, out, _flow, task = await flowing()
    out.takes_pieces = False
    answer.on_piece(b"a\n\n")
    answer.on_end(BrokenError("gone"))
    with pytest.raises(BrokenError, match="gone"):
        await task
    assert out.got == [b"a\n\n"]


async def test_shape_of_a_request_has_counts_and_no_text() -> None:
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "a secret"}],
        "tools": [{}, {}],
        "max_tokens": 7,
        "n": True,
        "stream": True,
        "regex": "secret",
    }
    data = json.dumps(body).encode()
    shape = (await read_request("/v1/chat/completions", {}, data)).shape()
    counts = {"messages": 1, "tools": 2, "max_tokens": 7, "constrained": True}
    assert shape == {"path": "/v1/chat/completions", "body_bytes": len(data), "stream": True, **counts}
    tokenized = await read_request("/tokenize", {}, b'{"model":"demo","messages":"text"}')
    assert tokenized.shape() == {"path": "/tokenize", "body_bytes": 34, "stream": False}


async def test_shape_of_a_request_leaves_out_numbers_of_too_many_digits() -> None:
    data = b'{"model":"demo","n":1' + b"0" * 5000 + b"}"
    assert (await read_request("/tokenize", {}, data)).shape() == {
        "path": "/tokenize",
        "body_bytes": len(data),
        "stream": False,
    }
