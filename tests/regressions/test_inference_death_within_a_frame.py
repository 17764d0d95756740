"""A worker that died while its reader was slow left half a frame behind; the error was taken for the rest of it, and
the gateway passed both on as one chunk that is no JSON.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import orjson
import pytest

from headgate.shared.asgi import Response
from headgate.shared.hop import BrokenError
from headgate.shared.sse import SseSplitter
from inference.api.flow_control import Flow
from inference.errors import ModelFailed

WHOLE = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'


class DyingAnswer:
    """An answer that breaks off after `piece`."""

    def __init__(self, piece: bytes) -> None:
        self._piece = piece

    def listen(self, on_piece: Callable[[bytes], None], on_end: Callable[[BrokenError | None], None]) -> None:
        """Plays it."""
        on_piece(self._piece)
        on_end(BrokenError("the connection was closed"))

    def pause(self) -> None:
        """Nothing more comes anyway."""


@pytest.mark.parametrize("cut", [0, 1, 2, 20, len(WHOLE) - 6])
def test_the_error_is_a_frame_of_its_own(cut: int) -> None:
    sent = b""

    async def send(message: object) -> None:
        nonlocal sent
        sent += dict(message).get("body", b"")  # type: ignore[call-overload]

    async def broken() -> None:
        out = Response(send, "req-1")
        await out.begin(200, [])
        with pytest.raises(BrokenError):
            await Flow(DyingAnswer((WHOLE * 2)[: len(WHOLE) * 2 - cut]), out).run()  # type: ignore[arg-type]
        await out.fail(ModelFailed("the worker died"))

    asyncio.run(broken())
    first, *between, last = (frame.data for frame in SseSplitter().feed(sent))
    assert first == WHOLE[6:-2]
    assert len(between) <= 1
    assert orjson.loads(last or b"")["error"]["message"] == "the worker died"
