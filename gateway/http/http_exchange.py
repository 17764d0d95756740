"""One HTTP exchange: request id, headers, body, error envelope, and the end of its task when the client disconnects."""

from __future__ import annotations

import asyncio
import functools
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import orjson
from starlette.responses import Response

from gateway.apis.messages import messages_errors
from gateway.apis.ollama import ollama_answer
from gateway.breaker.outcome import End
from gateway.errors import GatewayError, PassedOnError, RequestError
from headgate.shared import asgi, wire
from headgate.shared.asgi import JSON, Receive, Scope, Send, wait_for_disconnect
from inference.protocol import (
    H_ATTEMPTS,
    H_DEVICE,
    H_MODEL,
    H_NODE,
    H_OVERHEAD,
    H_REASON,
    H_REQUEST_ID,
    H_TIER,
    Code,
    Tier,
)

BODY_SILENCE_SECONDS = 30.0
"""Longest pause within a body."""

BODY_SECONDS = 120.0
"""Time limit for a whole body."""

_JSON_LINE = b"content-type: application/json\r\n"
_MESSAGES = "/v1/messages"
_OLLAMA = "/api/"
_MESSAGES_ID = "request-id"
_ENCODING = "content-encoding"
_VERSION = "anthropic-version"
"""A header that only clients of Anthropic's API send. The list of models and unknown paths are answered in the form of
the client's API."""


@dataclass(slots=True)
class Exchange:
    """The headers of a request, and the values of the response headers.

    `waited_seconds` (admission, refresh of the models) and `upstream_seconds` (providers) are not the gateway's own
    time.
    """

    request_id: str
    headers: Mapping[str, str]
    is_messages: bool = False
    """Whether the client uses Anthropic's API, which has its own header for the request id."""
    error_body: Callable[[GatewayError], dict[str, Any]] = GatewayError.body
    """The error envelope of the path's API."""
    began: float = field(default_factory=time.monotonic)
    tier: str = Tier.NONE
    model: str = "none"
    attempts: int = 0
    reason: str = "none"
    device: str | None = None
    node: str = ""
    limits: tuple[tuple[str, str], ...] = ()
    """Rate-limit headers of the key."""
    waited_seconds: float = 0.0
    upstream_seconds: float = 0.0
    started: bool = False
    policy_lines: bytes = b""
    """Header lines of CORS, or those of the dashboard."""
    wire: wire.Wire | None = None
    """The connection, for writing without ASGI; None if the server does not give access to it."""

    @property
    def overhead_seconds(self) -> float:
        """Time spent in the gateway itself so far."""
        return max(0.0, time.monotonic() - self.began - self.waited_seconds - self.upstream_seconds)

    def envelope(self, error: GatewayError) -> dict[str, Any]:
        """The body for `error` on this path, with the request id where the envelope has one."""
        body = self.error_body(error)
        return {**body, "request_id": self.request_id} if "request_id" in body else body

    def response_lines(self) -> bytes:
        """The headers of every response, as bytes on the wire."""
        lines = (
            f"{H_REQUEST_ID}: {self.request_id}\r\n{H_TIER}: {self.tier}\r\n{H_MODEL}: {_header_value(self.model)}\r\n"
            f"{H_ATTEMPTS}: {self.attempts}\r\n{H_REASON}: {_header_value(self.reason)}\r\n"
            f"{H_OVERHEAD}: {self.overhead_seconds * 1000:.3f}\r\n"
        )
        for name, value in self.limits:
            lines += f"{name}: {_header_value(value)}\r\n"
        if self.device is not None:
            lines += f"{H_DEVICE}: {_header_value(self.device)}\r\n"
        if self.node:
            lines += f"{H_NODE}: {self.node}\r\n"
        if self.is_messages:
            lines += f"{_MESSAGES_ID}: {self.request_id}\r\n"
        return lines.encode("ascii") + self.policy_lines

    def response_headers(self) -> list[tuple[bytes, bytes]]:
        """The headers of every response, as pairs of name and value."""
        pairs = (line.partition(b": ") for line in self.response_lines().split(b"\r\n")[:-1])
        return [(name, value) for name, _, value in pairs]


@functools.lru_cache(maxsize=256)
def _header_value(value: str) -> str:
    """`value` with characters that a header allows; model names come from clients."""
    if value.isascii() and value.isprintable() and len(value) <= 512:
        return value
    return re.sub(r"[^\x20-\x7e]", "?", value)[:512]


def new_exchange(scope: Scope) -> Exchange:
    """The exchange of a request; keeps a valid request id of the client."""
    headers = asgi.headers_of(scope)
    exchange = Exchange(asgi.request_id_of(headers), headers, wire=wire.take(scope))
    if scope["path"].startswith(_MESSAGES) or _VERSION in headers:
        exchange.is_messages, exchange.error_body = True, messages_errors.envelope
    elif scope["path"].startswith(_OLLAMA):
        exchange.error_body = ollama_answer.error_body
    return exchange


def exchange_of(scope: Scope) -> Exchange:
    """The exchange that `Edge` put into `scope`."""
    found: Exchange = scope["state"]["exchange"]
    return found


def take_buffered_body(exchange: Exchange, limit: int) -> bytes | None:
    """Takes the body if all of it arrived with the headers; None if `read_body` must read it.

    Raises RequestError when it is longer than `limit` bytes.
    """
    if exchange.wire is None or _ENCODING in exchange.headers:
        return None
    whole = exchange.wire.take_body()
    if whole is not None and len(whole) > limit:
        raise _too_large(limit)
    return whole


async def read_body(
    receive: Receive,
    headers: Mapping[str, str],
    limit: int,
    silence_seconds: float = BODY_SILENCE_SECONDS,
    total_seconds: float = BODY_SECONDS,
) -> bytes:
    """The whole body; raises RequestError when it is encoded, longer than `limit` bytes, stops or is too slow.

    Raises ClientDisconnectedError when the client disconnects.
    """
    encoding = headers.get(_ENCODING, "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise RequestError(
            Code.UNSUPPORTED_MEDIA_TYPE,
            f"Content-Encoding {encoding[:40]!r} is not supported; send the body without compression",
            param="content-encoding",
        )
    try:
        return b"".join(await asgi.read_body(receive, headers, limit, total_seconds, silence_seconds))
    except asgi.BodyTooLargeError:
        raise _too_large(limit) from None
    except asgi.BodyTimeoutError as error:
        problem = f"stopped for {silence_seconds:g} s" if error.silent else f"took over {total_seconds:g} s"
        raise RequestError(Code.INVALID_REQUEST, f"the body {problem}; send it again") from None


def _too_large(limit: int) -> RequestError:
    return RequestError(
        Code.BODY_TOO_LARGE, f"the body is longer than the limit of {limit} bytes (max_body); send less"
    )


def error_headers(error: GatewayError) -> list[tuple[bytes, bytes]]:
    """The response headers of an error."""
    headers = asgi.error_headers(error)
    if error.code is Code.INVALID_API_KEY and not isinstance(error, PassedOnError):
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


async def send_bytes(send: Send, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = (JSON,)) -> None:
    """Sends one whole response."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


def send_at_once(exchange: Exchange, body: bytes) -> bool:
    """Writes a whole answer to the connection without waiting. Sends nothing and returns False if that is not possible.

    This is faster than ASGI, which needs two messages and validates the headers.
    """
    if exchange.wire is not None and exchange.wire.answer(200, _JSON_LINE + exchange.response_lines(), body):
        exchange.started = True
        return True
    return False


async def send_head(send: Send, exchange: Exchange, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Sends status 200 and the headers of a streamed answer, directly to the connection if possible."""
    if exchange.wire is not None:
        own = b"".join(b"%b: %b\r\n" % header for header in headers)
        if exchange.wire.begin(200, own + exchange.response_lines()):
            exchange.started = True
            return
    await send({"type": "http.response.start", "status": 200, "headers": [*headers]})


async def send_error(send: Send, exchange: Exchange, error: GatewayError) -> None:
    """Sends `error` in the envelope of the path."""
    await send_bytes(send, error.status, orjson.dumps(exchange.envelope(error)), [JSON, *error_headers(error)])


def json_response(content: Any, status: int = 200) -> Response:
    """`content` as JSON."""
    return Response(orjson.dumps(content), status_code=status, media_type="application/json")


def error_response(exchange: Exchange, error: GatewayError) -> Response:
    """`error` in the envelope of the path."""
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    body = orjson.dumps(exchange.envelope(error))
    return Response(body, status_code=error.status, headers=headers, media_type="application/json")


# --- disconnects ------------------------------------------------------------------------------------------------------
class OpenRequests:
    """All requests that are being served."""

    def __init__(self) -> None:
        self._all: set[DisconnectWatch] = set()

    def __len__(self) -> int:
        return len(self._all)

    def watch(self, receive: Receive, wire: wire.Wire | None = None) -> DisconnectWatch:
        """A context for the running task, after the body was read. Without a `wire` it calls `receive`."""
        return DisconnectWatch(receive, self._all, wire)

    def interrupt_all(self) -> int:
        """Cancels every request; returns how many there were."""
        for watch in tuple(self._all):
            watch.interrupt(End.SHUTTING_DOWN)
        return len(self._all)


class DisconnectWatch:
    """While the context is open, a disconnect cancels the task. `reason` is why it was cancelled."""

    def __init__(self, receive: Receive, open_requests: set[DisconnectWatch], wire: wire.Wire | None) -> None:
        self.reason: End | None = None
        self._receive = receive
        self._wire = wire
        self._open_requests = open_requests
        self._task: asyncio.Task[object] | None = None
        self._listener: asyncio.Task[None] | None = None

    def __enter__(self) -> DisconnectWatch:
        self._task = asyncio.current_task()
        self._open_requests.add(self)
        if self._wire is not None:
            self._wire.on_disconnect(self._on_disconnect)
        else:
            self._listener = asyncio.create_task(self._listen(), name="disconnect-watch")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Stops watching. Called before the last byte, because the end of a response looks like a disconnect."""
        if self._task is None:
            return
        self._task = None
        self._open_requests.discard(self)
        if self._wire is not None:
            self._wire.on_disconnect(None)
        if self._listener is not None:
            self._listener.cancel()
            self._listener = None

    def interrupt(self, why: End) -> None:
        """Cancels the task with the reason `why`, once."""
        if self._task is not None and self.reason is None:
            self.reason = why
            self._task.cancel()

    def absorb(self) -> bool:
        """For `except CancelledError`: takes back a cancellation that `interrupt` caused. False for any other one."""
        task = asyncio.current_task()
        return self.reason is not None and task is not None and task.uncancel() <= 0

    def cancel_reason(self) -> End:
        """Why the task was cancelled. Without a call of `interrupt` the server has cancelled it because it stops."""
        return self.reason or End.SHUTTING_DOWN

    async def _listen(self) -> None:
        await wait_for_disconnect(self._receive)
        self._on_disconnect()

    def _on_disconnect(self) -> None:
        self.interrupt(End.CLIENT_LEFT)
