"""Checks the token and the admin key of requests to the inference service."""

from __future__ import annotations

import hmac
from collections.abc import Collection

from headgate.shared.asgi import App, Receive, Response, Scope, Send, request_id
from inference.protocol import Code, error_body

OPEN_PATHS = frozenset({"/livez", "/readyz", "/health", "/metrics"})
"""Paths that need no token."""


class Guard:
    """Checks the bearer token of requests. Open paths need none; requests that change something need the admin key.

    Every method except GET and HEAD changes something, except on `use_paths`. Without an admin key the token is enough
    for all requests. Other requests get status 401 or 403. Keys are compared in constant time.
    """

    def __init__(self, app: App, token: str, admin_key: str | None = None, use_paths: Collection[str] = ()) -> None:
        self._app = app
        self._token = token.encode()
        self._admin_key = (admin_key or token).encode()
        self._use_paths = frozenset(use_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one ASGI request."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        given = _bearer(scope)
        is_admin = hmac.compare_digest(given, self._admin_key)
        changes = scope["method"] not in ("GET", "HEAD") and scope["path"] not in self._use_paths
        if is_admin or (not changes and hmac.compare_digest(given, self._token)):
            await self._app(scope, receive, send)
            return
        response = Response(send, request_id(scope))
        if hmac.compare_digest(given, self._token):
            problem = "this request needs the admin key of the inference service (INFERENCE_ADMIN_KEY), not its token"
            await response.json(403, error_body(Code.PERMISSION_DENIED, problem))
            return
        body = error_body(Code.INVALID_API_KEY, "the inference service needs its token: Authorization: Bearer TOKEN")
        await response.json(401, body, [(b"www-authenticate", b"Bearer")])


def _bearer(scope: Scope) -> bytes:
    """The bearer token of a request, empty without one."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, given = value.partition(b" ")
            return bytes(given.strip()) if scheme.lower() == b"bearer" else b""
    return b""
