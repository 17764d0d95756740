"""A whole answer is read piece by piece as it comes; whoever waits for it wakes once, at its end."""

from __future__ import annotations

from typing import Any, cast

import orjson
import pytest

from gateway.apis.openai.frames import Data, DeltaKind, Done, Frame
from gateway.errors import UpstreamError, UpstreamKind
from gateway.routing.resume_runner import Answer, Sink, assemble


def _data(delta: dict[str, Any], finish: str | None = None) -> Data:
    chunk = {
        "id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "demo",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
    }  # fmt: skip
    return Data(orjson.dumps(chunk), DeltaKind.FINISH if finish else DeltaKind.CONTENT)


class _Coming:
    """An answer of which `pieces` come while its end is awaited; counts who was woken."""

    def __init__(self, *pieces: Data) -> None:
        self._pieces = list(pieces)
        self._sink: Sink = lambda _: False
        self.wakes = 0
        self.last: list[Frame] = [_data({}, "stop")]

    def begin(self) -> list[Frame]:
        return [_data({"role": "assistant", "content": ""})]

    def pass_on(self, sink: Sink) -> None:
        self._sink = sink

    async def next(self) -> list[Frame]:
        self.wakes += 1
        while self._pieces:
            piece = self._pieces.pop(0)
            if not self._sink([piece]):
                return [piece]
        return [*self.last, Done()]


async def test_pieces_wake_nobody() -> None:
    """All text arrives, in order, and there was one awakening."""
    coming = _Coming(*(_data({"content": word}) for word in ("one ", "two ", "three")))
    whole = await assemble(cast(Answer, coming))
    assert whole["choices"][0]["message"]["content"] == "one two three"
    assert coming.wakes == 1


async def test_what_is_no_chunk_ends_the_answer() -> None:
    """It is not swallowed where nobody waits."""
    coming = _Coming(_data({"content": "one"}), Data(b'{"choices":7}', DeltaKind.OTHER))
    with pytest.raises(UpstreamError) as raised:
        await assemble(cast(Answer, coming))
    assert raised.value.kind is UpstreamKind.MALFORMED


async def test_an_answer_without_its_finish_reason_is_not_whole() -> None:
    """Whoever says that it is: nobody who asked for it whole could tell."""
    coming = _Coming(_data({"content": "one"}))
    coming.last.clear()
    with pytest.raises(UpstreamError, match="finish reason") as raised:
        await assemble(cast(Answer, coming))
    assert raised.value.kind is UpstreamKind.READ
