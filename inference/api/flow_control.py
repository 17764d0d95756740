"""Relays one stream from a worker to its client, with backpressure."""

from __future__ import annotations

import asyncio

from headgate.shared.asgi import Response
from headgate.shared.hop import Answer, BrokenError

_FRAME_END = b"\n\n"
_DATA = b"\ndata:"


class Flow:
    """The pieces of one stream between the worker and the client.

    While the client reads more slowly than the worker writes, reading from the worker is paused.
    """

    def __init__(self, answer: Answer, response: Response) -> None:
        self.has_begun = False
        """Whether anything except comments was relayed."""
        self._answer = answer
        self._response = response
        self._kept: list[bytes] = []
        self._last = _FRAME_END
        self._ended = False
        self._error: BrokenError | None = None
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Returns after the last piece; raises BrokenError."""
        self._answer.listen(self._on_piece, self._on_end)
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._kept:
                await self._response.data(self._kept[0])
                del self._kept[0]  # removed after sending, so that pieces that arrive meanwhile keep their order
            if self._error is not None:
                if not self._last.endswith(_FRAME_END):
                    await self._response.data(_FRAME_END)  # separates the error from a partial frame
                raise self._error
            if self._ended:
                return
            self._answer.resume()

    def _on_piece(self, piece: bytes) -> None:
        if not self.has_begun:
            self.has_begun = not piece.startswith(b":") or _DATA in piece
        self._last = piece
        if not self._kept and self._response.takes_pieces:
            self._response.piece(piece)
        else:
            self._kept.append(piece)
            self._answer.pause()
            self._changed.set()

    def _on_end(self, error: BrokenError | None) -> None:
        self._ended, self._error = error is None, error
        self._changed.set()
