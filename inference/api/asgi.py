"""The service's plain ASGI parts: headers, bodies with a limit, answers, error envelopes, the token; no policy."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

from headgate.shared.wire import Wire
from inference.errors import InferenceError, InvalidRequestError
from inference.protocol import H_REQUEST_ID, H_SHOULD_RETRY, Code, Progress, error_body

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/livez", "/readyz", "/health", "/metrics"})
BODY_SECONDS = 60.0
"""A body must arrive within this."""
_LINGER_SECONDS = 2.0
_LINGER_BYTES = 64 * 2**20
_MOST_ID = 128
_SSE = [(b"content-type", b"text/event-stream; charset=utf-8")]


class Headers:
    """The request's headers by lower-case name; the last of several wins."""

    def __init__(self, scope: Scope) -> None:
        self._values: dict[bytes, bytes] = dict(scope["headers"])
        self.request_id = request_id(scope)

    def get(self, name: str) -> str | None:
        """One header, or None."""
        value = self._values.get(name.encode())
        return None if value is None else value.decode("latin-1").strip()


def request_id(scope: Scope) -> str:
    """The id the caller gave, if it can stand in a log and a header, else a fresh one; the same for one request."""
    state = scope.setdefault("state", {})
    if "request_id" not in state:
        given = next((value for name, value in scope["headers"] if name == H_REQUEST_ID.encode()), b"")
        usable = 0 < len(given) <= _MOST_ID and all(33 <= byte < 127 for byte in given)
        state["request_id"] = given.decode() if usable else "req-" + secrets.token_hex(12)
    return str(state["request_id"])


class Out:
    """One response. It knows whether it has begun, so that an error is a status before and a frame after."""

    def __init__(self, send: Send, request_id: str, wire: Wire | None = None) -> None:
        self._send = send
        self._wire = wire
        self.request_id = request_id
        self.started = False
        self._ended = False

    async def begin(self, status: int, headers: list[tuple[bytes, bytes]], length: int | None = None) -> None:
        """Status and headers, once; later calls do nothing."""
        if self.started:
            return
        self.started = True
        all_headers = [*headers, (H_REQUEST_ID.encode(), self.request_id.encode())]
        if length is not None:
            all_headers.append((b"content-length", str(length).encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": all_headers})

    async def data(self, data: bytes) -> None:
        """A piece of the body."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    @property
    def takes_pieces(self) -> bool:
        """Whether `piece` may be called now."""
        return self._wire is not None and self._wire.is_free

    def piece(self, data: bytes) -> None:
        """A piece of the body that leaves at once; only while `takes_pieces` and nobody awaits another."""
        assert self._wire is not None
        self._wire.write(data)

    async def end(self) -> None:
        """The end of the body."""
        self._ended = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def comment(self, progress: Progress) -> None:
        """A progress comment; opens the stream if it is not open."""
        await self.begin(200, _SSE)
        await self.data(progress.frame())

    async def json(self, status: int, data: dict[str, Any], headers: list[tuple[bytes, bytes]] | None = None) -> None:
        """A whole JSON answer."""
        body = json.dumps(data).encode()
        await self.begin(status, [(b"content-type", b"application/json"), *(headers or [])], len(body))
        await self.data(body)
        await self.end()

    async def fail(self, error: InferenceError) -> None:
        """`error` as a status, or as the last frame of a stream that has begun; nothing after a complete answer."""
        if self._ended:
            return
        if self.started:
            await self.data(b"data: " + json.dumps(error.body(), separators=(",", ":")).encode() + b"\n\n")
            await self.end()
        else:
            await self.json(error.status, error.body(), error_headers(error))


def error_headers(error: InferenceError) -> list[tuple[bytes, bytes]]:
    """Retry-After when it is true; x-should-retry: false when trying again cannot help."""
    headers = []
    if error.retry_after is not None:
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after))).encode()))
    if not error.retryable:
        headers.append((H_SHOULD_RETRY.encode(), b"false"))
    return headers


async def read_body(headers: Headers, receive: Receive, out: Out, most_bytes: int) -> bytes | None:
    """The request's body; None when it was answered already (too large, too slow) or the caller left."""
    length = headers.get("content-length")
    if length is not None and length.isdigit() and int(length) > most_bytes:
        await _too_large(receive, out, most_bytes)
        return None
    pieces: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                piece = message.get("body", b"")
                size += len(piece)
                if size > most_bytes:
                    break
                pieces.append(piece)
                if not message.get("more_body", False):
                    return b"".join(pieces)
    except TimeoutError:
        await out.fail(InvalidRequestError(f"the body did not arrive within {BODY_SECONDS:g} s"))
        return None
    await _too_large(receive, out, most_bytes)
    return None


async def _too_large(receive: Receive, out: Out, most_bytes: int) -> None:
    """Says so at once, then takes in what is under way for a moment: a closed socket would swallow the answer."""
    error = InvalidRequestError(
        f"the body is larger than {most_bytes / 2**20:g} MiB, which is the most that is taken", code=Code.BODY_TOO_LARGE
    )
    body = json.dumps(error.body()).encode()
    await out.begin(413, [(b"content-type", b"application/json"), (b"connection", b"close")], len(body))
    await out.data(body)
    thrown_away = 0
    try:
        async with asyncio.timeout(_LINGER_SECONDS):
            while thrown_away < _LINGER_BYTES:
                message = await receive()
                thrown_away += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    break
    except TimeoutError:
        log.debug("the caller of %s still sends", out.request_id)
    await out.end()


async def disconnected(receive: Receive) -> None:
    """Returns when the caller has left."""
    while (await receive())["type"] != "http.disconnect":
        continue


class Guard:
    """Lets in who knows the token, and to what changes something only who knows the admin key, if there is one.

    Everybody else gets 401 or 403, except on the open paths. What changes something is every method but GET and HEAD on
    a path that is not one of `use_paths`. Compares in constant time.
    """

    def __init__(self, app: App, token: str, admin_key: str | None = None, use_paths: Collection[str] = ()) -> None:
        self._app = app
        self._token = token.encode()
        self._admin_key = (admin_key or token).encode()
        self._use_paths = frozenset(use_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        given = _bearer(scope)
        is_admin = hmac.compare_digest(given, self._admin_key)
        changes = scope["method"] not in ("GET", "HEAD") and scope["path"] not in self._use_paths
        if is_admin or (not changes and hmac.compare_digest(given, self._token)):
            await self._app(scope, receive, send)
            return
        out = Out(send, request_id(scope))
        if hmac.compare_digest(given, self._token):
            said = "this needs the admin key of the inference service (INFERENCE_ADMIN_KEY); its token is not enough"
            await out.json(403, error_body(Code.PERMISSION_DENIED, said))
            return
        body = error_body(Code.INVALID_API_KEY, "the inference service needs its token: Authorization: Bearer TOKEN")
        await out.json(401, body, [(b"www-authenticate", b"Bearer")])


def _bearer(scope: Scope) -> bytes:
    """What the caller gives as its key; empty when that is nothing."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, given = value.partition(b" ")
            return bytes(given.strip()) if scheme.lower() == b"bearer" else b""
    return b""
