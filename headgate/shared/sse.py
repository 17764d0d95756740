"""Splits a byte stream into server-sent events."""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_FRAME_BYTES = 16 * 2**20
"""Default limit of the bytes that wait for the end of their frame."""

_EOL = rb"(?:\r\n|\n|\r(?=[^\n]))"  # a bare CR counts only when the next byte shows that it is not half of a CRLF
_BLANK = re.compile(_EOL + _EOL)
_LINES = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


class SseFrame(NamedTuple):
    """One frame. `data`: its `data:` lines, joined by line feeds; None without any. `event`: the event type or None.

    `comment`: the lines and the blank line of a frame that begins with a comment and has neither data nor event type;
    None for other frames.
    """

    data: bytes | None = None
    event: bytes | None = None
    comment: bytes | None = None


class SseSplitter:
    """Splits bytes that arrive in pieces of any size into frames.

    The frames do not depend on how the bytes were cut. `feed` raises ValueError when more than `max_frame_bytes` wait
    for the end of their frame.
    """

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._rest = b""
        self._searched = 0
        self._limit = max_frame_bytes
        self._at_start = True

    def feed(self, piece: bytes) -> list[SseFrame]:
        """The frames that `piece` completed, in order."""
        rest = self._rest + piece if self._rest else piece
        if self._at_start:
            if len(rest) < len(_BOM) and _BOM.startswith(rest):
                self._rest = rest
                return []
            self._at_start = False
            rest = rest.removeprefix(_BOM)
        frames: list[bytes] = []
        if rest.find(b"\r") >= 0:
            end = 0
            while match := _BLANK.search(rest, max(end, self._searched)):
                frames.append(rest[end : match.start()])
                end = match.end()
            rest = rest[end:]
        elif rest.find(b"\n\n", self._searched) >= 0:  # plain line feeds need no regular expression
            *frames, rest = rest.split(b"\n\n")
        self._rest = rest
        # the next search starts before an incomplete blank line at the end of this piece: at most `\r\n\r`
        self._searched = max(0, len(rest) - 3)
        if len(rest) > self._limit:
            raise ValueError(f"a frame of the stream exceeds {self._limit} bytes")
        return [frame for raw in frames if (frame := _frame(raw)) is not None]

    def plain(self, piece: bytes) -> list[bytes] | None:
        """The data of the frames in `piece`, if it consists of complete frames of one `data: ` line each and no
        incomplete frame is pending. None otherwise: then `feed` must parse it.
        """
        if self._rest or not piece.startswith(b"data: ") or not piece.endswith(b"\n\n") or piece.find(b"\r") >= 0:
            return None
        lines = piece[6:-2].split(b"\n\ndata: ")
        if piece.count(b"\n") != 2 * len(lines):
            return None
        self._at_start = False
        return lines

    def end(self) -> list[SseFrame]:
        """The frame that the end of the stream completes (a final bare CR); an incomplete frame is dropped."""
        rest, self._rest = self._rest, b""
        if rest.endswith((b"\r\r", b"\n\r")):
            frame = _frame(rest.rstrip(b"\r\n"))
            return [frame] if frame else []
        return []


def _frame(raw: bytes) -> SseFrame | None:
    """The frame of the lines in `raw`; None when `raw` has only line ends."""
    if raw.startswith(b"data: ") and raw.find(b"\n") < 0 and raw.find(b"\r") < 0:
        return SseFrame(raw[6:])
    raw = raw.lstrip(b"\r\n")
    if not raw:
        return None
    data: list[bytes] = []
    event: bytes | None = None
    for line in _LINES.split(raw):
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            data.append(value)
        elif name == b"event":
            event = value
    is_comment = not data and event is None and raw.startswith(b":")
    return SseFrame(b"\n".join(data) if data else None, event, raw + b"\n\n" if is_comment else None)
