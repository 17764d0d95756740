"""Knows the head of a request again that came before, but for the length of the body; parses no other and reads none.

Clients send the same head with every request on a connection. What it means is found out once: what a parser that was
here took for a whole head means the same, byte for byte, when it comes again between two messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MAX_BYTES = 4096
"""A longer head is not remembered."""

_MAX_DIGITS = 10
_LENGTH = b"content-length"
_CHANGES_THE_CONNECTION = frozenset({b"transfer-encoding", b"expect", b"upgrade"})
_SAID = ("type", "asgi", "http_version", "server", "client", "scheme", "root_path", "method", "path", "raw_path",
         "query_string")  # fmt: skip
"""What of an ASGI scope is the connection's or the request line's."""


class Head:
    """One head. `understood` is the application's: whatever it keeps there is kept as long as the head is."""

    __slots__ = ("_after", "_before", "_headers", "_position", "_said", "understood")

    def __init__(
        self,
        before: bytes,
        after: bytes,
        said: Mapping[str, Any],
        headers: Sequence[tuple[bytes, bytes]],
        position: int,
    ) -> None:
        self._before, self._after = before, after
        self._said, self._headers, self._position = said, headers, position
        self.understood: Any = None

    def rest(self, data: bytes) -> tuple[bytes, bytes] | None:
        """The length, in digits, and what there is of the body when `data` begins with this head; None otherwise, also
        when a part of the head is still to come or more than the body has.
        """
        before, after = self._before, self._after
        if not data.startswith(before):
            return None
        begin = len(before)
        end = data.find(after, begin, begin + _MAX_DIGITS + len(after))
        length = data[begin:end]
        if end < 0 or not length.isdigit():
            return None
        body = data[end + len(after) :]
        return (length, body) if len(body) <= int(length) else None

    def scope(self) -> dict[str, Any]:
        """A new scope of such a request, without `state` and extensions; the length in it is the first one's."""
        return {**self._said, "headers": [*self._headers]}

    def set_length(self, headers: list[tuple[bytes, bytes]], length: bytes) -> None:
        """Puts the length that a request tells into the headers of its scope."""
        headers[self._position] = (_LENGTH, length)


def learn(raw: bytes, scope: Mapping[str, Any], url: bytes) -> Head | None:
    """The head in `raw`, from which a parser made `scope`; None when it is not to be remembered: it has no length,
    changes what the connection does, or `raw` is not exactly the request line with `url` and the scope's headers.
    """
    headers = scope["headers"]
    names = [name for name, _ in headers]
    if (
        (scope["method"], scope["http_version"]) != ("POST", "1.1")
        or len(raw) > MAX_BYTES
        or names.count(_LENGTH) != 1
        or not _CHANGES_THE_CONNECTION.isdisjoint(names)
    ):
        return None
    first, *lines = raw.split(b"\r\n")
    said = [(name.lower(), value.lstrip(b" \t")) for name, _, value in (line.partition(b":") for line in lines[:-2])]
    position = names.index(_LENGTH)
    digits = headers[position][1]
    if first != b"POST %b HTTP/1.1" % url or said != headers or lines[-2:] != [b"", b""] or not digits.isdigit():
        return None
    end = len(b"\r\n".join((first, *lines[: position + 1])))
    return Head(raw[: end - len(digits)], raw[end:], {name: scope[name] for name in _SAID}, tuple(headers), position)
