"""Writes log probabilities as OpenAI's JSON, token by token.

The bytes are appended to one buffer, which takes less memory: Python objects for a token with 20 alternatives take
kilobytes, and so does a separate result of orjson for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import orjson

from inference.worker.answers.generation import TokenLogprob

Kind = Literal["chat", "completion"]


class Logprobs:
    """The log probabilities of one choice, or of one chunk of it."""

    def __init__(self, kind: Kind) -> None:
        self._chat = kind == "chat"
        self._columns = [bytearray() for _ in range(1 if self._chat else 4)]

    @property
    def size_bytes(self) -> int:
        """Length of the JSON so far."""
        return sum(map(len, self._columns))

    def add(self, items: Sequence[TokenLogprob], shift: int = 0) -> None:
        """Adds tokens of the same choice. Their offsets are shifted by `shift` characters."""
        for item in items:
            cells = [_chat_token(item)] if self._chat else _completion_token(item, shift)
            for column, cell in zip(self._columns, cells, strict=True):
                if column:
                    column += b","
                column += cell

    def json(self) -> bytes:
        """OpenAI's `logprobs` object."""
        names = ("content",) if self._chat else ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        lists = [
            b'"%b":[%b]' % (name.encode(), bytes(column)) for name, column in zip(names, self._columns, strict=True)
        ]
        return b"{" + b",".join([*lists, b'"refusal":null'] if self._chat else lists) + b"}"


def _chat_token(item: TokenLogprob) -> bytes:
    return orjson.dumps(
        {
            "token": _show(item.piece),
            "logprob": _finite(item.logprob),
            "bytes": list(item.piece),
            "top_logprobs": [
                {"token": _show(piece), "logprob": _finite(value), "bytes": list(piece)} for piece, value in item.top
            ],
        }
    )


def _completion_token(item: TokenLogprob, shift: int) -> list[bytes]:
    return [
        orjson.dumps(_key(item.piece)),
        orjson.dumps(_finite(item.logprob)),
        b"null" if item.logprob is None else orjson.dumps(_by_key([*item.top, (item.piece, item.logprob)])),
        orjson.dumps(max(0, item.offset + shift)),
    ]


def _by_key(scored: Sequence[tuple[bytes, float]]) -> dict[str, float | None]:
    """Scores by the text of the token. Of tokens with the same text the likeliest is kept."""
    found: dict[str, float | None] = {}
    for piece, value in scored:
        found.setdefault(_key(piece), _finite(value))
    return found


def _key(piece: bytes) -> str:
    """The text of a token. As at OpenAI, tokens that are not valid UTF-8 are written as bytes."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + piece.decode("latin-1").encode("unicode_escape").decode("ascii")


def _finite(value: float | None) -> float | None:
    """As at OpenAI, -9999 stands for minus infinity."""
    return None if value is None else max(value, -9999.0)


def _show(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")
