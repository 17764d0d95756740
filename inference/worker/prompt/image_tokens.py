"""Keeps the tokens of an image together, and reads the size of an image file.

In a prompt's tokens an image is a run of negative numbers, each one less than the one before. The same image has the
same numbers, so prompts with images are compared like texts. Between the numbers of two images there is a gap.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

_PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
_JPEG = b"\xff\xd8"
_NO_LENGTH = frozenset([0x01, *range(0xD0, 0xDA)])
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


def undivided(tokens: Sequence[int], start: int, end: int, most: int) -> int:
    """The end of a batch of the tokens from `start` on, moved so that no image is divided; `end` is the wanted end.

    If `end` is inside an image, the batch ends before that image. If it begins with the image, it ends after the image
    if that is at most `most` tokens, and is empty (`start`) otherwise.
    """
    if not _goes_on(tokens, end):
        return end
    first = end - 1
    while first > start and _goes_on(tokens, first):
        first -= 1
    if first > start:
        return first
    last = end
    while _goes_on(tokens, last):
        last += 1
    return last if last - start <= most else start


def _goes_on(tokens: Sequence[int], at: int) -> bool:
    """Whether the token at `at` belongs to the same image as the one before it."""
    return 0 < at < len(tokens) and tokens[at] < 0 and tokens[at] == tokens[at - 1] - 1


def size_of(data: bytes) -> tuple[int, int] | None:
    """Width and height in pixels in the header of a PNG or JPEG file; None for anything else and for a damaged header.

    PNG: the first chunk (ISO/IEC 15948, 11.2.1). JPEG: the frame header behind any other segments (ITU-T T.81, B.2.2).
    """
    if data.startswith(_PNG):
        return struct.unpack_from(">II", data, 16) if len(data) >= 24 else None
    if not data.startswith(_JPEG):
        return None
    at = 2
    while at + 9 <= len(data) and data[at] == 0xFF:
        kind = data[at + 1]
        if kind == 0xFF:  # a fill byte
            at += 1
        elif kind in _NO_LENGTH:
            at += 2
        elif kind in _FRAMES:
            height, width = struct.unpack_from(">HH", data, at + 5)
            return width, height
        else:
            at += 2 + struct.unpack_from(">H", data, at + 2)[0]
    return None
