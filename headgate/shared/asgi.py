"""Plain ASGI parts that the services share: request ids, bodies with limits and deadlines, responses, error headers."""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, Protocol

import orjson

from headgate.shared.wire import Wire

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Header = tuple[bytes, bytes]
Headers = Mapping[str, str]
"""A request's headers by lower-case name."""

REQUEST_ID = "x-request-id"
JSON: Header = (b"content-type", b"application/json")
_EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_USABLE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


class EnvelopeError(Protocol):
    """An error that the client gets. `retry_after`: seconds until a retry; None when unknown."""

    retry_after: float | None

    @property
    def status(self) -> int:
        """The HTTP status."""
        ...

    @property
    def retryable(self) -> bool:
        """Whether a retry can succeed."""
        ...

    def body(self) -> dict[str, Any]:
        """The error envelope."""
        ...


class ClientDisconnectedError(Exception):
    """The client closed the connection."""


class BodyTooLargeError(Exception):
    """The body is longer than the limit. The rest of the body was not received."""


class BodyTimeoutError(Exception):
    """The body did not arrive in time. With `silent` the client stopped sending, else the whole body took too long."""

    def __init__(self, silent: bool) -> None:
        super().__init__()
        self.silent = silent


def headers_of(scope: Scope) -> dict[str, str]:
    """The headers of a request. The last of several with the same name is kept."""
    return {name.decode("latin-1"): value.decode("latin-1").strip() for name, value in scope["headers"]}


_ids = random.Random()  # noqa: S311 - ids are unique, not secret


def new_request_id() -> str:
    """A request id."""
    return f"req_{_ids.getrandbits(96):024x}"


def request_id_of(headers: Headers) -> str:
    """The client's request id if it has 1 to 128 letters, digits and `._:-` and does not begin with `._:-`, else a new
    one.
    """
    given = headers.get(REQUEST_ID, "")
    return given if _USABLE_ID.fullmatch(given) else new_request_id()


def request_id(scope: Scope) -> str:
    """The id of a request; each call with the same `scope` returns the same id."""
    state = scope.setdefault("state", {})
    if "request_id" not in state:
        state["request_id"] = request_id_of(headers_of(scope))
    return str(state["request_id"])


def declared_length(headers: Headers) -> int | None:
    """The length of the body in bytes from Content-Length; None when that header is missing or invalid."""
    value = headers.get("content-length", "")
    return int(value) if value.isascii() and value.isdigit() and len(value) < 16 else None


async def read_body(
    receive: Receive,
    headers: Headers,
    limit_bytes: int,
    total_seconds: float,
    silence_seconds: float = math.inf,
) -> list[bytes]:
    """The body in pieces.

    Raises ClientDisconnectedError, BodyTooLargeError for more than `limit_bytes`, and BodyTimeoutError when the body
    takes longer than `total_seconds` or nothing arrives for `silence_seconds`.
    """
    if (declared_length(headers) or 0) > limit_bytes:
        raise BodyTooLargeError
    pieces: list[bytes] = []
    size = 0
    loop = asyncio.get_running_loop()
    end = loop.time() + total_seconds
    while True:
        silent_at = loop.time() + silence_seconds
        try:
            async with asyncio.timeout_at(min(silent_at, end)):
                message = await receive()
        except TimeoutError:
            raise BodyTimeoutError(silent_at < end) from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        piece = message.get("body", b"")
        size += len(piece)
        if size > limit_bytes:
            raise BodyTooLargeError
        pieces.append(piece)
        if not message.get("more_body", False):
            return pieces


async def discard_body(receive: Receive, limit_bytes: int = 64 * 2**20, total_seconds: float = 2.0) -> None:
    """Receives and drops the rest of a body, up to the limits, before the connection is closed: a client that still
    sends at that time does not see the response.
    """
    size = 0
    try:
        async with asyncio.timeout(total_seconds):
            while size < limit_bytes:
                message = await receive()
                size += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        pass


async def wait_for_disconnect(receive: Receive) -> None:
    """Returns when the client has disconnected. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        continue


def error_headers(error: EnvelopeError) -> list[Header]:
    """Retry-After (whole seconds, at least 1) if `retry_after` is known; `x-should-retry: false` if not `retryable`."""
    headers = []
    if error.retry_after is not None:
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after))).encode()))
    if not error.retryable:
        headers.append((b"x-should-retry", b"false"))
    return headers


def error_frame(error: EnvelopeError) -> bytes:
    """`error` as a server-sent event, the last one of its stream."""
    return b"data: " + orjson.dumps(error.body()) + b"\n\n"


class Response:
    """One response. An error before the response has started is a response with its status, a later one the last frame
    of the stream.
    """

    def __init__(self, send: Send, request_id: str, wire: Wire | None = None) -> None:
        """An empty `request_id` is not sent."""
        self.request_id = request_id
        self.started = False
        self._send = send
        self._wire = wire
        self._ended = False

    async def begin(self, status: int, headers: Iterable[Header], length: int | None = None) -> None:
        """Sends status and headers; does nothing when the response has started."""
        if self.started:
            return
        self.started = True
        all_headers = list(headers)
        if self.request_id:
            all_headers.append((REQUEST_ID.encode(), self.request_id.encode("latin-1")))
        if length is not None:
            all_headers.append((b"content-length", str(length).encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": all_headers})

    async def begin_stream(self) -> None:
        """Sends status and headers of an event stream; does nothing when the response has started."""
        await self.begin(200, _EVENT_STREAM)

    async def data(self, data: bytes) -> None:
        """Sends a piece of the body."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    @property
    def takes_pieces(self) -> bool:
        """Whether `piece` may be called now."""
        return self.started and self._wire is not None and self._wire.is_free

    def piece(self, data: bytes) -> None:
        """Sends a piece of the body without a task switch. Requires `takes_pieces` and no pending call of `data`."""
        assert self._wire is not None
        self._wire.write(data)

    async def end(self) -> None:
        """Ends the body."""
        self._ended = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def whole(self, status: int, headers: Iterable[Header], body: bytes) -> None:
        """Sends a complete response."""
        await self.begin(status, headers, len(body))
        self._ended = True
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def json(self, status: int, data: dict[str, Any], headers: Iterable[Header] = ()) -> None:
        """Sends a complete JSON response."""
        await self.whole(status, [JSON, *headers], orjson.dumps(data))

    async def refuse_body(self, error: EnvelopeError, receive: Receive) -> None:
        """Sends `error`, drops the rest of the request's body, and closes the connection."""
        body = orjson.dumps(error.body())
        await self.begin(error.status, [JSON, (b"connection", b"close"), *error_headers(error)], len(body))
        await self.data(body)
        await discard_body(receive)
        await self.end()

    async def fail(self, error: EnvelopeError) -> None:
        """Sends `error` as a response, or as the last frame of a stream that has started; nothing if the response has
        ended.
        """
        if self._ended:
            return
        if self.started:
            await self.data(error_frame(error))
            await self.end()
        else:
            await self.json(error.status, error.body(), error_headers(error))
