"""Limits the total memory of large bodies, and of stored conversations that requests continue.

Memory for a body is reserved before its first byte is read, and held until its request ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager

from gateway.errors import RefusedError
from headgate.shared.asgi import declared_length
from inference.protocol import Code

SMALL_BYTES = 64 * 1024
"""Smaller bodies are not counted: the number of connections bounds them."""

LARGEST_AT_A_TIME = 16
"""Number of bodies of the largest allowed size that may be held at a time, or a larger number of smaller ones."""

_RETRY_SECONDS = 1.0

_UNCOUNTED = contextlib.nullcontext()


class Bodies:
    """The memory that the bodies of all requests hold."""

    def __init__(self) -> None:
        self.held_bytes = 0

    def hold(self, headers: Mapping[str, str], limit: int) -> AbstractContextManager[None]:
        """A context for serving a request with these headers; raises RefusedError (429) when there is no memory."""
        return self.room(_length_of(headers, limit), limit)

    def room(self, size: int, limit: int) -> AbstractContextManager[None]:
        """A context for `size` bytes that a request needs in addition to its body; raises RefusedError like `hold`."""
        return _UNCOUNTED if size <= SMALL_BYTES else self._room(size, limit)

    @contextlib.contextmanager
    def _room(self, size: int, limit: int) -> Iterator[None]:
        self.take(size, limit)
        try:
            yield
        finally:
            self.release(size)

    def take(self, size: int, limit: int) -> None:
        """Reserves `size` bytes until `release`; raises RefusedError (429) when there is no memory."""
        if self.held_bytes + size > LARGEST_AT_A_TIME * limit:
            message = f"requests with {self.held_bytes} bytes of bodies are being served; try again shortly"
            raise RefusedError(Code.QUEUE_FULL, message, retry_after=_RETRY_SECONDS)
        self.held_bytes += size

    def release(self, size: int) -> None:
        """Releases `size` bytes."""
        self.held_bytes -= size


class Room:
    """Memory that one request reserves piece by piece, up to `limit` bytes. `close` releases it."""

    def __init__(self, bodies: Bodies, limit: int) -> None:
        self._bodies = bodies
        self._taken = 0
        self.limit = limit

    def take(self, size: int) -> bool:
        """Reserves `size` more bytes; False beyond the limit. Raises RefusedError without free memory."""
        if self._taken + size > self.limit:
            return False
        self._bodies.take(size, self.limit)
        self._taken += size
        return True

    def close(self) -> None:
        """Releases everything."""
        self._bodies.release(self._taken)
        self._taken = 0


def _length_of(headers: Mapping[str, str], limit: int) -> int:
    """The declared length of a body, at most `limit` bytes; `limit` for a body without a declared length."""
    declared = declared_length(headers)
    if declared is not None:
        return min(declared, limit)
    has_body = "content-length" in headers or "transfer-encoding" in headers
    return limit if has_body else 0
