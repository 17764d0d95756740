"""Splits a byte stream into server-sent events and keeps their raw bytes."""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_FRAME_BYTES = 16 * 2**20
"""The size limit of a frame; a longer one is an error."""

_EOL = rb"(?:\r\n|\n|\r(?=[^\n]))"  # a bare CR counts only when the next byte shows that it is not half of a CRLF
_BLANK = re.compile(_EOL + _EOL)
_LINES = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


class SseFrame(NamedTuple):
    """One frame. `raw` is its bytes with the blank line that ended it.

    `data` is the joined `data:` lines or None without any; `event` the event type or None. A frame of comment lines
    alone has neither.
    """

    raw: bytes
    data: bytes | None = None
    event: bytes | None = None

    @property
    def is_comment(self) -> bool:
        """Whether the frame has only comment lines."""
        return self.data is None and self.event is None and self.raw.startswith(b":")


class SseSplitter:
    """Splits bytes that arrive in pieces of any size into frames.

    The frames do not depend on how the bytes were cut. Raises ValueError when a frame exceeds `max_frame_bytes`.
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
        frames: list[SseFrame] = []
        begin, look = 0, self._searched
        is_plain = (
            rest.find(b"\r") < 0
        )  # plain line feeds, which Headgate's own services write, need no regular expression
        while (end := rest.find(b"\n\n", look) + 2 if is_plain else _blank_end(rest, look)) > 1:
            if frame := _frame(rest[begin:end]):
                frames.append(frame)
            begin = look = end
        self._rest = rest[begin:]
        # the next search starts before an incomplete blank line at the end of this piece: at most `\r\n\r`
        self._searched = max(0, len(self._rest) - 3)
        if len(self._rest) > self._limit:
            raise ValueError(f"a frame of the stream exceeds {self._limit} bytes")
        return frames

    def plain(self, piece: bytes) -> list[bytes] | None:
        """The data of the frames in `piece`, if it consists of complete frames of one `data: ` line each and no
        incomplete frame is pending. None otherwise: then `feed` must parse it.
        """
        if self._rest or not piece.startswith(b"data: ") or not piece.endswith(b"\n\n") or piece.count(b"\r"):
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
            frame = _frame(rest)
            return [frame] if frame else []
        return []


def _blank_end(rest: bytes, look: int) -> int:
    """Where the first blank line from `look` on ends; 0 without one."""
    match = _BLANK.search(rest, look)
    return match.end() if match else 0


def _frame(raw: bytes) -> SseFrame | None:
    """The frame in `raw`, which ends with a blank line; None when there is nothing but blank lines."""
    if raw[:6] == b"data: " and raw.find(b"\n") == len(raw) - 2 and b"\r" not in raw:
        return SseFrame(raw, raw[6:-2])
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
    return SseFrame(raw, b"\n".join(data) if data else None, event)
