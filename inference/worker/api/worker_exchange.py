"""One HTTP request to the worker and its response: headers, body, disconnect."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from headgate.shared import wire
from headgate.shared.asgi import (
    JSON,
    BodyTimeoutError,
    BodyTooLargeError,
    ClientDisconnectedError,
    Receive,
    Response,
    Scope,
    Send,
    declared_length,
    discard_body,
    headers_of,
    read_body,
    wait_for_disconnect,
)
from headgate.shared.kv_hint import KvHint, parse_kv_hint
from inference.protocol import (
    H_DEADLINE,
    H_KV,
    H_PREFIX,
    H_PRIORITY,
    H_REQUEST_ID,
    H_STREAM_INTERVAL,
    Code,
    Priority,
    prefix_hashes,
)
from inference.worker.worker_errors import BadRequestError, GoneError, WorkerError

MAX_BODY_BYTES = 32 * 2**20
MAX_DISCARDED_BYTES = 256 * 2**20
"""The rest of a body over the limit is received up to this size, so that the client reads the error."""
BODY_SECONDS = 30.0
"""Time limit for the arrival of a body."""
MAX_STREAM_INTERVAL_SECONDS = 1.0
"""Upper bound of the requested interval: a stream that is silent for longer looks hung."""


class Exchange(Response):
    """One request and its response. `gone`: the client has disconnected; any thread may read it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._headers = headers_of(scope)
        super().__init__(send, self.header(H_REQUEST_ID), wire.take(scope))
        self.method = str(scope["method"])
        self.path = str(scope["path"])
        self.gone = False
        self._receive = receive
        self._watcher: asyncio.Task[None] | None = None
        self._on_disconnect: Callable[[], None] | None = None

    def header(self, name: str) -> str:
        """A header's value, empty when absent."""
        return self._headers.get(name, "")

    def priority(self) -> Priority:
        """The request's queue class."""
        value = self.header(H_PRIORITY)
        try:
            return Priority(value.lower()) if value else Priority.NORMAL
        except ValueError:
            raise BadRequestError(f"{H_PRIORITY} must be high, normal or low", H_PRIORITY) from None

    def kv_hint(self) -> KvHint | None:
        """What happens to the tokens of the request after it; None without a hint."""
        value = self.header(H_KV)
        try:
            return parse_kv_hint(value) if value else None
        except ValueError as error:
            raise BadRequestError(f"{H_KV} {error}", H_KV) from None

    def prefix_labels(self) -> tuple[str, ...]:
        """Labels of the prompt; empty without them."""
        value = self.header(H_PREFIX)
        try:
            return prefix_hashes(value) if value else ()
        except ValueError as error:
            raise BadRequestError(f"{H_PREFIX} {error}", H_PREFIX) from None

    def deadline(self, now: float) -> float | None:
        """Time by which the first token must be generated, on the clock of `now`; None without a deadline."""
        milliseconds = self._milliseconds(H_DEADLINE)
        return None if milliseconds is None else now + milliseconds / 1000

    def stream_interval(self) -> float:
        """Seconds that text of a stream may be held back to be sent with more text."""
        return min((self._milliseconds(H_STREAM_INTERVAL) or 0) / 1000, MAX_STREAM_INTERVAL_SECONDS)

    def _milliseconds(self, name: str) -> int | None:
        value = self.header(name)
        if not value:
            return None
        if not (value.isascii() and value.isdigit() and len(value) < 12):
            raise BadRequestError(f"{name} must be a whole number of milliseconds", name)
        return int(value)

    @property
    def announced_bytes(self) -> float:
        """Declared length of the body, infinite where it is unknown, 0 without a body."""
        length = declared_length(self._headers)
        if length is None:
            return math.inf if self._headers.get("transfer-encoding") or self._headers.get("content-length") else 0
        return length

    async def body(self) -> list[bytes]:
        """The whole body in pieces; raises GoneError, BadRequestError, or WorkerError(body_too_large)."""
        try:
            return await read_body(self._receive, self._headers, MAX_BODY_BYTES, BODY_SECONDS)
        except ClientDisconnectedError:
            raise GoneError from None
        except BodyTimeoutError:
            raise BadRequestError(f"the body did not arrive within {BODY_SECONDS:g} s") from None
        except BodyTooLargeError:
            await discard_body(self._receive, MAX_DISCARDED_BYTES, BODY_SECONDS)
            raise WorkerError(Code.BODY_TOO_LARGE, f"the body is larger than {MAX_BODY_BYTES} bytes") from None

    def watch(self) -> None:
        """Starts to watch for the client's disconnect; the body must have been read."""
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch())

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        """Calls `callback` when the client disconnects, at once if it has."""
        self._on_disconnect = callback
        self.watch()
        if self.gone:
            callback()

    async def _watch(self) -> None:
        await wait_for_disconnect(self._receive)
        self.gone = True
        if self._on_disconnect is not None:
            self._on_disconnect()

    def close(self) -> None:
        """Ends the watch."""
        if self._watcher is not None:
            self._watcher.cancel()

    async def json_bytes(self, body: bytes) -> None:
        """Sends a complete response that is JSON already."""
        await self.whole(200, [JSON], body)
