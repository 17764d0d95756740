"""Bounds the memory that large bodies, and conversations that are built on, take together; reads none.

What a body takes is told before its first byte comes, and held to its request's end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager

from gateway.errors import RefusedError
from inference.protocol import Code

SMALL_BYTES = 64 * 1024
"""Bodies up to this are not counted: there are no more of them than connections."""

LARGEST_AT_A_TIME = 16
"""So many bodies of the largest size allowed may be held at a time, or more of smaller ones."""

NOTHING = contextlib.nullcontext()
"""A context in which nothing has to be done."""

_RETRY_SECONDS = 1.0


class Bodies:
    """What the bodies of all requests hold now, in bytes."""

    def __init__(self) -> None:
        self.held_bytes = 0

    def hold(self, headers: Mapping[str, str], limit: int) -> AbstractContextManager[None]:
        """While a request with these headers is served; raises RefusedError (429) when there is no memory for it."""
        return self.room(length_of(headers, limit), limit)

    def room(self, size: int, limit: int) -> AbstractContextManager[None]:
        """The same for `size` bytes that a request needs beside its body."""
        return NOTHING if size <= SMALL_BYTES else self._room(size, limit)

    @contextlib.contextmanager
    def _room(self, size: int, limit: int) -> Iterator[None]:
        self.take(size, limit)
        try:
            yield
        finally:
            self.give_back(size)

    def take(self, size: int, limit: int) -> None:
        """Room for `size` bytes until they are given back; raises RefusedError (429) when there is none."""
        if self.held_bytes + size > LARGEST_AT_A_TIME * limit:
            said = f"requests with {self.held_bytes} bytes of bodies are being served; try again shortly"
            raise RefusedError(Code.QUEUE_FULL, said, retry_after=_RETRY_SECONDS)
        self.held_bytes += size

    def give_back(self, size: int) -> None:
        """What was taken."""
        self.held_bytes -= size


class Room:
    """What one request holds beside its body while it comes, byte by byte; `limit` is the most. `close` ends it."""

    def __init__(self, bodies: Bodies, limit: int) -> None:
        self._bodies = bodies
        self._taken = 0
        self.limit = limit

    def take(self, size: int) -> bool:
        """Whether `size` more are within the limit; raises RefusedError when others leave no memory for them."""
        if self._taken + size > self.limit:
            return False
        self._bodies.take(size, self.limit)
        self._taken += size
        return True

    def close(self) -> None:
        """Nothing of it is held any more."""
        self._bodies.give_back(self._taken)
        self._taken = 0


def length_of(headers: Mapping[str, str], limit: int) -> int:
    """How long a body is said to be, but at most `limit` bytes; so long is one whose length is not told."""
    declared = headers.get("content-length", "")
    if declared.isdigit():
        return min(int(declared), limit)
    return limit if declared or "transfer-encoding" in headers else 0  # HTTP: then there is no body
