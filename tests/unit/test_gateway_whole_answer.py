"""A whole answer is assembled as its pieces arrive; the waiting task wakes once, at the end."""

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
    """An answer whose `pieces` arrive while a task waits for its end; counts the wake-ups."""

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


async def test_task_wakes_once_for_a_whole_answer() -> None:
    """All text arrives in order, with one wake-up."""
    coming = _Coming(*(_data({"content": word}) for word in ("one ", "two ", "three")))
    whole = await assemble(cast(Answer, coming))
    assert whole["choices"][0]["message"]["content"] == "one two three"
    assert coming.wakes == 1


async def test_malformed_chunk_ends_the_answer() -> None:
    """The error is raised although no task reads the piece."""
    coming = _Coming(_data({"content": "one"}), Data(b'{"choices":7}', DeltaKind.OTHER))
    with pytest.raises(UpstreamError) as raised:
        await assemble(cast(Answer, coming))
    assert raised.value.kind is UpstreamKind.MALFORMED


async def test_answer_without_finish_reason_is_an_error() -> None:
    """Also when the stream has its end marker: the client of an object could not see the difference."""
    coming = _Coming(_data({"content": "one"}))
    coming.last.clear()
    with pytest.raises(UpstreamError, match="finish reason") as raised:
        await assemble(cast(Answer, coming))
    assert raised.value.kind is UpstreamKind.READ
