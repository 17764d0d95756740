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
        """While a request with these headers is served; raises RefusedError (429) when there is no memory for it.

        A body whose length is not told counts as the longest there may be, which is `limit` bytes.
        """
        declared = headers.get("content-length", "")
        size = min(int(declared), limit) if declared.isdigit() else limit
        if not declared and "transfer-encoding" not in headers:
            size = 0  # HTTP: then there is no body
        return self.room(size, limit)

    def room(self, size: int, limit: int) -> AbstractContextManager[None]:
        """The same for `size` bytes that a request needs beside its body."""
        return NOTHING if size <= SMALL_BYTES else self._room(size, limit)

    @contextlib.contextmanager
    def _room(self, size: int, limit: int) -> Iterator[None]:
        if self.held_bytes + size > LARGEST_AT_A_TIME * limit:
            said = f"requests with {self.held_bytes} bytes of bodies are being served; try again shortly"
            raise RefusedError(Code.QUEUE_FULL, said, retry_after=_RETRY_SECONDS)
        self.held_bytes += size
        try:
            yield
        finally:
            self.held_bytes -= size
