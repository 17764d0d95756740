"""Finds the end of a JSON value in growing text."""

from __future__ import annotations

import re

_INSIDE = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]<]')


class ValueEnd:
    """Follows one JSON object, array or string from its first character on; every character is looked at once.

    Brackets are balanced outside strings only. A `<` outside a string is in no JSON: there the value is broken off,
    because a model that goes on with the marker that closes a call has forgotten a bracket.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    @property
    def whole(self) -> bool:
        """Whether all that was opened is closed."""
        return self._depth == 0 and not self._in_string

    def scan(self, text: str, at: int) -> tuple[int, bool]:
        """Looks at `text` from `at`, where the last scan stopped. Returns where the value goes to, and whether it ends
        there.
        """
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            match = (_INSIDE if self._in_string else _OUTSIDE).search(text, at)
            if match is None:
                return len(text), False
            at, char = match.end(), match[0]
            if char == "<":
                return at - 1, True
            if char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if char in "{[" else -1
            if self.whole:
                return at, True
        return at, False
