"""A vocabulary without a model, for constraints: every byte, some longer pieces, control tokens and two ends."""

from __future__ import annotations

import numpy as np

from inference.worker.backend import Mask

PIECES = ('{"', '":', '":"', '"}', '","', "true", "null", "12", "0.5", "ab", "abc", "<tool", "é", "\n  ", "    ")
CONTROL = ("<tool_call>", "</tool_call>", "<think>")
ENDS = ("</s>", "<|eom|>")


class PieceVocabulary:
    """Ids: 256 bytes, PIECES, one empty piece, CONTROL, ENDS."""

    def __init__(self) -> None:
        self._plain = [bytes([byte]) for byte in range(256)] + [piece.encode() for piece in PIECES] + [b""]
        self._control = [text.encode() for text in (*CONTROL, *ENDS)]
        self.n_vocab = len(self._plain) + len(self._control)
        self.end_tokens = frozenset(range(self.n_vocab - len(ENDS), self.n_vocab))
        self.asked = 0

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Bytes of a token."""
        self.asked += 1
        if token < len(self._plain):
            return self._plain[token]
        return self._control[token - len(self._plain)] if special else b""

    def control(self, text: str) -> int:
        """The id of a control token."""
        return len(self._plain) + self._control.index(text.encode())

    def tokens(self, *parts: str | bytes | int) -> list[int]:
        """Ids that spell the parts, longest pieces first; a number is a token id."""
        found: list[int] = []
        for part in parts:
            if isinstance(part, int):
                found.append(part)
                continue
            rest = part.encode() if isinstance(part, str) else part
            while rest:
                fitting = (token for token, piece in enumerate(self._plain) if piece and rest.startswith(piece))
                token = max(fitting, key=lambda token: len(self._plain[token]))
                found.append(token)
                rest = rest[len(self._plain[token]) :]
        return found

    def allowed(self, mask: Mask) -> frozenset[int]:
        """The allowed next tokens."""
        logits = np.zeros(self.n_vocab, np.float32)
        mask.apply(logits)
        return frozenset(np.flatnonzero(np.isfinite(logits)).tolist())

    def follow(self, mask: Mask, *parts: str | bytes | int) -> bool:
        """Continues with the parts; False as soon as a token is not allowed."""
        for token in self.tokens(*parts):
            if token not in self.allowed(mask):
                return False
            mask.accept(token)
        return True

    def may_end(self, mask: Mask) -> bool:
        """True if all end tokens are allowed, False if none is; anything else fails."""
        ends = self.allowed(mask) & self.end_tokens
        assert ends in (frozenset(), self.end_tokens)
        return bool(ends)
