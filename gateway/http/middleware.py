"""The outermost ASGI layer: request id, headers on every response, Host check, CORS, and the error for a defect.

Plain ASGI, because Starlette's middleware wraps responses in streams that hide a disconnect of the client.
"""

from __future__ import annotations

import functools
import ipaddress
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

from gateway import cors
from gateway.errors import GatewayError, RequestError
from gateway.http.http_exchange import Exchange, new_exchange, send_error
from headgate.shared.asgi import App, ClientDisconnectedError, Message, Receive, Scope, Send
from inference.protocol import Code

log = logging.getLogger("gateway.http.middleware")

ErrorBody = Callable[[GatewayError], dict[str, Any]]

PAGE = "/ui"
"""The path of the dashboard, which no other web page may call."""
_PAGE_LINES = (
    b"content-security-policy: default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    b"connect-src 'self'; font-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'\r\n"
    b"x-content-type-options: nosniff\r\nreferrer-policy: no-referrer\r\n"
)

_ONCE = frozenset({b"host", b"authorization", b"x-api-key", b"content-length"})
_VERSIONED = re.compile(r"/+(?:v1/+)+")
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]]*)(?::\d*)?")


def is_loopback(host: str) -> bool:
    """Whether `host` (name or address, brackets allowed) is a loopback address."""
    name = host.strip("[]").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


@functools.lru_cache(maxsize=64)
def _is_loopback_host(header: str) -> bool:
    match = _HOST.fullmatch(header)
    return match is not None and is_loopback(match[1])


@functools.lru_cache(maxsize=256)
def canonical_path(path: str) -> str:
    """The path without a trailing slash, and with a single `/v1` at its start if it begins with `/v1`.

    Clients whose base address ends in `/v1` send `/v1/v1/messages`; those with a trailing slash send `//v1/messages` or
    `/v1//messages`.
    """
    if (prefix := _VERSIONED.match(path)) is not None:
        path = f"/v1/{path[prefix.end() :]}"
    return path.rstrip("/") or "/"


def _repeated(scope: Scope) -> str | None:
    """The name of a repeated header that access depends on."""
    seen: set[bytes] = set()
    for name, _ in scope["headers"]:
        if name in _ONCE:
            if name in seen:
                return str(name.decode())
            seen.add(name)
    return None


def _is_preflight(headers: Mapping[str, str]) -> bool:
    """Whether this is a CORS preflight request of a browser."""
    return "origin" in headers and "access-control-request-method" in headers


async def _answer_preflight(origins: tuple[str, ...], headers: Mapping[str, str], send: Send, *, is_page: bool) -> None:
    """Answers a preflight request, which has no key; raises RequestError when the page's origin is not allowed."""
    if is_page:
        raise RequestError(Code.PERMISSION_DENIED, f"no other web page may call {PAGE}", param="origin")
    if not cors.is_allowed(origins, headers["origin"]):
        raise RequestError(
            Code.PERMISSION_DENIED,
            f"web pages of {headers['origin'][:200]!r} may not call this gateway; add the origin to `cors: {{origins: "
            "[...]}` in gateway.yaml and reload",
            param="origin",
        )
    allowed = cors.preflight_headers(headers.get("access-control-request-headers", ""))
    await send({"type": "http.response.start", "status": 204, "headers": allowed})
    await send({"type": "http.response.body", "body": b""})


class Edge:
    """Wraps the application. `direct` maps a path to the application that gets its POST requests instead of `app`,
    `errors` maps a path to its error envelope.

    `bound_host` is the address that the gateway listens on. When it is loopback, requests with another Host are
    rejected, as a protection against DNS rebinding. `cors_origins` returns the origins that are allowed now.
    """

    def __init__(
        self,
        app: App,
        direct: Mapping[str, App],
        errors: Mapping[str, ErrorBody],
        bound_host: str,
        cors_origins: Callable[[], tuple[str, ...]],
    ) -> None:
        self._app = app
        self._cors_origins = cors_origins
        self._direct = direct
        self._errors = errors
        self._check_host = is_loopback(bound_host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["path"] = canonical_path(scope["path"])
        exchange = new_exchange(scope)
        is_page = scope["path"] == PAGE or scope["path"].startswith(f"{PAGE}/")
        origins = () if is_page else self._cors_origins()
        if is_page:
            exchange.policy_lines = _PAGE_LINES
        elif origins:
            exchange.policy_lines = cors.response_lines(origins, exchange.headers.get("origin"))
        scope.setdefault("state", {})
        scope["state"]["exchange"] = exchange

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.started = True
                message = {**message, "headers": [*message.get("headers", ()), *exchange.response_headers()]}
            await send(message)

        try:
            app = self._application(scope, exchange)
            if scope["method"] == "OPTIONS" and _is_preflight(exchange.headers):
                await _answer_preflight(origins, exchange.headers, send_on, is_page=is_page)
            else:
                await app(scope, receive, send_on)
        except GatewayError as error:
            if exchange.reason == "none":
                exchange.reason = str(error.code)
            await send_error(send_on, exchange, error)
        except ClientDisconnectedError:
            log.debug("request %s: the client disconnected during the response", exchange.request_id)
        except Exception:
            log.exception("internal error in request %s: %s %s", exchange.request_id, scope["method"], scope["path"])
            if not exchange.started:
                message = f"internal error; see the gateway's log for request {exchange.request_id}"
                await send_error(send_on, exchange, GatewayError(Code.INTERNAL_ERROR, message))
        finally:
            exchange.wire = None  # it refers to the scope, and so to this exchange: a reference cycle otherwise

    def _application(self, scope: Scope, exchange: Exchange) -> App:
        """The application of a request; raises RequestError for headers that are not accepted."""
        headers = exchange.headers
        exchange.error_body = self._errors.get(scope["path"], exchange.error_body)
        if len(headers) < len(scope["headers"]) and (name := _repeated(scope)):
            raise RequestError(Code.INVALID_REQUEST, f"the header {name} must not be repeated", param=name)
        if self._check_host and not _is_loopback_host(headers.get("host", "")):
            raise RequestError(
                Code.PERMISSION_DENIED,
                "the Host header does not name this machine; use http://127.0.0.1 or http://localhost, "
                "or let the proxy in front send `Host: localhost`",
            )
        return (self._direct.get(scope["path"]) if scope["method"] == "POST" else None) or self._app
