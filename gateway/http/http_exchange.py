"""One HTTP exchange: its id, its headers in and out, its error body; decides nothing about models."""

from __future__ import annotations

import functools
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from gateway.apis.messages import messages_errors
from gateway.errors import GatewayError, PassedOnError, RequestError
from headgate.shared import asgi, wire
from headgate.shared.asgi import Receive, Scope, Send
from inference.protocol import (
    H_ATTEMPTS,
    H_DEVICE,
    H_MODEL,
    H_OVERHEAD,
    H_REASON,
    H_REQUEST_ID,
    H_SHOULD_RETRY,
    H_TIER,
    Code,
    Tier,
)

BODY_SILENCE_SECONDS = 30.0
"""A body of which nothing more comes for so long is given up."""

BODY_SECONDS = 120.0
"""And so is one that is not whole after so long."""

_SANE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_JSON = (b"content-type", b"application/json")
_JSON_LINE = b"content-type: application/json\r\n"
_MESSAGES = "/v1/messages"
_MESSAGES_ID = "request-id"
_ENCODING = "content-encoding"
_VERSION = "anthropic-version"
"""All clients of Anthropic's API send it, and no others: the listing of models and paths that do not exist are answered
in the form of the API that the client speaks."""


@dataclass(slots=True)
class Told:
    """What the head of a request says to the layers that the request passes."""

    headers: Mapping[str, str]
    request_id: str | None = None
    """The caller's own, if it is sane."""
    is_messages: bool = False
    """Whether Anthropic's API is asked, whose clients look for the request's id in a header of their own."""
    error_body: Callable[[GatewayError], dict[str, Any]] = GatewayError.body
    """How errors are told to clients of the path that was asked."""


@dataclass(slots=True)
class Exchange:
    """What the headers of a response tell. `waited_seconds`, and `upstream_seconds` that tiers took, are not the
    gateway's own time.
    """

    request_id: str
    told: Told
    began: float = field(default_factory=time.monotonic)
    tier: str = Tier.NONE
    model: str = "none"
    attempts: int = 0
    reason: str = "none"
    device: str | None = None
    limits: tuple[tuple[str, str], ...] = ()
    """How the key stands with its limits, as headers."""
    waited_seconds: float = 0.0
    upstream_seconds: float = 0.0
    started: bool = False
    cors: bytes = b""
    """Header lines for the browser that sent the request."""
    wire: wire.Wire | None = None
    """Where pieces of an answer that has begun can be written at once; None under a server that has none."""

    @property
    def overhead_seconds(self) -> float:
        """Time spent in the gateway itself until now."""
        return max(0.0, time.monotonic() - self.began - self.waited_seconds - self.upstream_seconds)

    def envelope(self, error: GatewayError) -> dict[str, Any]:
        """The body for `error` on this path; an envelope that names the request gets its id."""
        body = self.told.error_body(error)
        return {**body, "request_id": self.request_id} if "request_id" in body else body

    def response_lines(self) -> bytes:
        """The headers that every response carries, as they stand on the wire."""
        lines = (
            f"{H_REQUEST_ID}: {self.request_id}\r\n{H_TIER}: {self.tier}\r\n{H_MODEL}: {_header_value(self.model)}\r\n"
            f"{H_ATTEMPTS}: {self.attempts}\r\n{H_REASON}: {_header_value(self.reason)}\r\n"
            f"{H_OVERHEAD}: {self.overhead_seconds * 1000:.3f}\r\n"
        )
        for name, value in self.limits:
            lines += f"{name}: {_header_value(value)}\r\n"
        if self.device is not None:
            lines += f"{H_DEVICE}: {_header_value(self.device)}\r\n"
        if self.told.is_messages:
            lines += f"{_MESSAGES_ID}: {self.request_id}\r\n"
        return lines.encode("ascii") + self.cors

    def response_headers(self) -> list[tuple[bytes, bytes]]:
        """The same, apart."""
        pairs = (line.partition(b": ") for line in self.response_lines().split(b"\r\n")[:-1])
        return [(name, value) for name, _, value in pairs]


@functools.lru_cache(maxsize=256)
def _header_value(value: str) -> str:
    """`value` as a header may hold it: a model's name is text of the caller's."""
    if value.isascii() and value.isprintable() and len(value) <= 512:
        return value
    return re.sub(r"[^\x20-\x7e]", "?", value)[:512]


def new_exchange(scope: Scope) -> Exchange:
    """The exchange of a request; the caller's own request id is kept when it is sane."""
    told = _told(scope)
    return Exchange(told.request_id or f"req_{os.urandom(12).hex()}", told, wire=wire.take(scope))


def _told(scope: Scope) -> Told:
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    asked = headers.get(H_REQUEST_ID)
    request_id = asked if asked and _SANE_ID.fullmatch(asked) else None
    if scope["path"].startswith(_MESSAGES) or _VERSION in headers:
        return Told(headers, request_id, True, messages_errors.envelope)
    return Told(headers, request_id)


def exchange_of(scope: Scope) -> Exchange:
    """The exchange that the edge put into `scope`."""
    found: Exchange = scope["state"]["exchange"]
    return found


def body_at_hand(exchange: Exchange, limit: int) -> bytes | None:
    """The whole body, once, when it came with its head; None when `read_body` has to see about it.

    Raises RequestError when it is longer than `limit` bytes.
    """
    if exchange.wire is None or _ENCODING in exchange.told.headers:
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
    """The whole body; raises RequestError when it is encoded, longer than `limit` bytes, stops or comes too slowly.

    Raises ClientLeftError when the client went away.
    """
    encoding = headers.get(_ENCODING, "identity").strip().lower()
    if encoding not in ("", "identity"):
        said = f"the body is encoded ({encoding[:40]}), and the gateway unpacks nothing; send it as it is"
        raise RequestError(Code.UNSUPPORTED_MEDIA_TYPE, said, param="content-encoding")
    try:
        return b"".join(await asgi.read_body(receive, headers, limit, total_seconds, silence_seconds))
    except asgi.BodyTooLargeError:
        raise _too_large(limit) from None
    except asgi.BodyTimeoutError as error:
        problem = f"stopped for {silence_seconds:g} s" if error.silent else f"took over {total_seconds:g} s"
        raise RequestError(Code.INVALID_REQUEST, f"the body {problem}; send it again") from None


def _too_large(limit: int) -> RequestError:
    return RequestError(Code.BODY_TOO_LARGE, f"the body is longer than the {limit} bytes that are allowed; send less")


def error_headers(error: GatewayError) -> list[tuple[bytes, bytes]]:
    """The headers that belong to an error."""
    headers = []
    if error.retry_after is not None:
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after))).encode()))
    if not error.should_retry:
        headers.append((H_SHOULD_RETRY.encode(), b"false"))
    if error.code is Code.INVALID_API_KEY and not isinstance(error, PassedOnError):
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


async def send_bytes(
    send: Send, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = (_JSON,), head: bool = False
) -> None:
    """One whole response; `head` leaves the body out."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": b"" if head else body})


def send_at_once(exchange: Exchange, body: bytes) -> bool:
    """Sends a whole answer by the `wire`, without waiting; False, and nothing is sent, where only ASGI can, which takes
    two messages and looks at headers of ours as if they came from elsewhere.
    """
    if exchange.wire is not None and exchange.wire.answer(200, _JSON_LINE + exchange.response_lines(), body):
        exchange.started = True
        return True
    return False


async def send_head(send: Send, exchange: Exchange, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Status and headers of a good answer that comes in pieces, by the `wire` where there is one."""
    if exchange.wire is not None:
        own = b"".join(b"%b: %b\r\n" % header for header in headers)
        if exchange.wire.begin(200, own + exchange.response_lines()):
            exchange.started = True
            return
    await send({"type": "http.response.start", "status": 200, "headers": [*headers]})


async def send_error(send: Send, exchange: Exchange, error: GatewayError) -> None:
    """`error` as clients of the path know it."""
    await send_bytes(send, error.status, orjson.dumps(exchange.envelope(error)), [_JSON, *error_headers(error)])
