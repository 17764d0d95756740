"""The state of the dashboard of one gateway: sessions, timeline and live feed, and the right to use it."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from gateway.access.authentication import Key, Scope
from gateway.breaker.permits import BreakerState
from gateway.errors import RefusedError, RequestError
from gateway.http.http_exchange import Exchange
from gateway.runtime import Runtime
from gateway.ui.live_feed import LiveFeed
from gateway.ui.sessions import Session, Sessions, SignInLimit, cookie_value, is_same, is_same_origin
from gateway.ui.timeline import Timeline
from inference.protocol import Code

log = logging.getLogger("gateway.ui.dashboard")

COOKIE = "headgate_session"
CSRF_HEADER = "x-csrf-token"
TOKEN_BYTES = 32


class SignedIn(NamedTuple):
    """A request with a session. `token` is the value of its cookie."""

    key: Key
    tenant: str
    session: Session
    token: str

    @property
    def is_admin(self) -> bool:
        """Whether the key has the scope `admin`."""
        return "admin" in self.key.scopes


class Dashboard:
    """Observes `runtime`, so it must be created before the runtime starts."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._sessions = Sessions()
        self._limit = SignInLimit()
        self._timeline = Timeline()
        self.feed = LiveFeed(runtime)
        runtime.observer = self

    def start(self) -> None:
        """Begins to keep log lines."""
        logging.getLogger().addHandler(self.feed.lines)

    def stop(self) -> None:
        """Ends all streams."""
        logging.getLogger().removeHandler(self.feed.lines)
        self.feed.close()

    # --- what happens (see `gateway.inference_nodes.Observer`) --------------------------------------------------------
    def on_event(self, node: str, kind: str, data: Mapping[str, Any]) -> None:
        """See `Observer`."""
        try:
            if kind == "snapshot":
                self._timeline.keep(self._runtime.fleet.nodes)
            if kind == "log":
                line = dict(data["line"])
                self.feed.lines.add({**line, "text": f"{node}: {line['text']}"} if node else line)
            elif (entry := self._timeline.note_event(node, kind, data, time.time())) is not None:
                self.feed.add_entry(entry)
        except (KeyError, TypeError, ValueError) as error:  # must not end the stream, on which requests depend
            log.warning("an event %s of the inference service is not shown: %r", kind, error)

    def on_reachable(self, node: str, is_reachable: bool) -> None:
        """See `Observer`."""
        if (entry := self._timeline.note_reachable(node, is_reachable, time.time())) is not None:
            self.feed.add_entry(entry)
        if is_reachable:
            self.feed.retry(node)

    def on_breaker(self, provider: str, model: str, state: BreakerState | None) -> None:
        """See `Observer`."""
        breaker = self._runtime.breakers.by_model(provider).get(model)
        name = f"{provider}/{model}" if model else provider
        label, reason = None if state is None else state.label, None if breaker is None else breaker.last_failure
        if (entry := self._timeline.note_breaker(name, label, reason, time.time())) is not None:
            self.feed.add_entry(entry)

    def on_stop(self) -> None:
        """See `Observer`."""
        self.feed.close()

    # --- access ------------------------------------------------------------------------------------------------------
    def sign_in(self, exchange: Exchange, key: str, address: str) -> SignedIn:
        """A new session for an API key; raises RequestError (401, 403) and, after failures, RefusedError (429)."""
        _check_origin(exchange)
        now = time.monotonic()
        if wait := self._limit.wait_seconds(address, now):
            raise RefusedError(
                Code.RATE_LIMIT_EXCEEDED, "too many failed sign-ins from this address; try again in a second",
                retry_after=wait,
            )  # fmt: skip
        try:
            found, tenant = self._runtime.keys.admit({"x-api-key": key}, "use")
        except RequestError:
            self._limit.failed(address, now)
            raise
        self._limit.succeeded(address)
        self._sessions.end(cookie_value(exchange.headers.get("cookie", ""), COOKIE))
        token = secrets.token_urlsafe(TOKEN_BYTES)
        session = self._sessions.begin(token, secrets.token_urlsafe(TOKEN_BYTES), found.digest, now)
        log.info("the key %s signed in from %s", found.name, address)
        return SignedIn(found, tenant, session, token)

    def sign_out(self, signed: SignedIn) -> None:
        """Ends a session."""
        self._sessions.end(signed.token)

    def signed_in(self, exchange: Exchange, *, scope: Scope = "use", changes: bool = False) -> SignedIn:
        """The session of a request whose key has `scope`; raises RequestError (401, 403).

        A request that `changes` something must have the session's CSRF token, and no Origin of another host.
        """
        token = cookie_value(exchange.headers.get("cookie", ""), COOKIE)
        found = self._find(token)
        if found is None:
            raise RequestError(Code.INVALID_API_KEY, "there is no session, or it has ended; sign in with an API key")
        if changes:
            _check_origin(exchange)
            if not is_same(exchange.headers.get(CSRF_HEADER, ""), found.session.csrf):
                raise RequestError(
                    Code.PERMISSION_DENIED, f"the header {CSRF_HEADER} must have the value from GET /ui/session"
                )
        if scope not in found.key.scopes:
            raise RequestError(
                Code.PERMISSION_DENIED,
                f"the key {found.key.name!r} lacks the scope `{scope}`; sign in with another key",
            )
        return found

    def admit(self, exchange: Exchange) -> tuple[Key, str]:
        """The key and tenant of a request of the playground; raises RequestError (401, 403)."""
        found = self.signed_in(exchange, changes=True)
        return found.key, found.tenant

    def is_valid(self, signed: SignedIn) -> bool:
        """Whether the session still exists, and its key still has the same scopes. Counts as a use of the session."""
        found = self._find(signed.token)
        return found is not None and found.key.scopes == signed.key.scopes

    def _find(self, token: str) -> SignedIn | None:
        session = self._sessions.find(token, time.monotonic()) if token else None
        if session is None:
            return None
        known = self._runtime.keys.by_digest(session.key_digest)
        if known is None:
            self._sessions.end(token)  # the key was removed
            return None
        return SignedIn(*known, session, token)


def _check_origin(exchange: Exchange) -> None:
    if not is_same_origin(exchange.headers.get("origin"), exchange.headers.get("host", "")):
        raise RequestError(Code.PERMISSION_DENIED, "only pages of this gateway may send this request", param="origin")
