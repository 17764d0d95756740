"""Decodes a stream of token bytes into text at the borders of characters."""

from __future__ import annotations

from encodings.utf_8 import IncrementalDecoder


class Detokenizer:
    """Exact incremental UTF-8: the pieces joined equal the bytes joined and decoded at once, with U+FFFD for errors."""

    def __init__(self) -> None:
        self._decoder = IncrementalDecoder("replace")

    def push(self, piece: bytes) -> str:
        """The text that `piece` completes; bytes of an unfinished character wait."""
        if piece.isascii() and not self._decoder.buffer:
            return piece.decode("ascii")  # as most are: the decoder itself is Python
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """What is left at the end: nothing, or U+FFFD for a character that was never finished."""
        return self._decoder.decode(b"", True)
