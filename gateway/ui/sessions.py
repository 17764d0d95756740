"""Sessions of signed-in pages, and the limit of failed sign-ins. Only hashes of session tokens are kept."""

from __future__ import annotations

import hashlib
import hmac
from collections import OrderedDict
from dataclasses import dataclass

IDLE_SECONDS = 12 * 3600.0
"""A session ends after this time without a request and without an open event stream."""
MAX_SESSIONS = 1000
"""If there are more, the session that was unused for longest ends."""

FREE_FAILURES = 5
"""Failed sign-ins of an address until its attempts are limited."""
PAUSE_SECONDS = 1.0
"""Pause after the last of them, and after each further one."""
FORGET_SECONDS = 900.0
"""The failures of an address are forgotten after this time without another one."""
MAX_ADDRESSES = 1000


@dataclass(slots=True)
class Session:
    """One sign-in: the digest of its key, the CSRF token, and when it was last used (monotonic seconds)."""

    key_digest: bytes
    csrf: str
    used_at: float


class Sessions:
    """All sessions, by the hash of their token; the last used one is last. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(self, token: str, csrf: str, key_digest: bytes, now: float) -> Session:
        """Adds a session for a new random `token`."""
        session = self._sessions[_hash(token)] = Session(key_digest, csrf, now)
        while len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return session

    def find(self, token: str, now: float) -> Session | None:
        """The session of `token`, None when there is none. Counts as a use of it."""
        name = _hash(token)
        session = self._sessions.get(name)
        if session is None:
            return None
        if now - session.used_at > IDLE_SECONDS:
            del self._sessions[name]
            return None
        session.used_at = now
        self._sessions.move_to_end(name)
        return session

    def end(self, token: str) -> None:
        """Ends the session of `token`, if there is one."""
        self._sessions.pop(_hash(token), None)


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def is_same(given: str, expected: str) -> bool:
    """Whether two secrets are equal, in the same time for every `given`."""
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), expected.encode())


def cookie_value(header: str, name: str) -> str:
    """The value of a cookie in a Cookie header; empty when it is missing."""
    for part in header.split(";"):
        found, _, value = part.strip().partition("=")
        if found == name:
            return value
    return ""


def is_same_origin(origin: str | None, host: str) -> bool:
    """Whether a request comes from a page of this host, or has no Origin, as from clients that are not browsers."""
    if origin is None:
        return True
    scheme, separator, place = origin.partition("://")
    return separator != "" and scheme in ("http", "https") and place.lower() == host.lower()


class SignInLimit:
    """Limits the sign-ins of an address after failed ones. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._failures: OrderedDict[str, tuple[int, float]] = OrderedDict()
        """By address: the number of failures, and when the last attempt failed."""

    def wait_seconds(self, address: str, now: float) -> float:
        """Seconds until the address may try; 0 for now."""
        count, failed_at = self._failures.get(address, (0, now))
        if count < FREE_FAILURES or now - failed_at > FORGET_SECONDS:
            return 0.0
        return max(0.0, failed_at + PAUSE_SECONDS - now)

    def failed(self, address: str, now: float) -> None:
        """An attempt failed."""
        count, failed_at = self._failures.pop(address, (0, now))
        self._failures[address] = (1 if now - failed_at > FORGET_SECONDS else count + 1, now)
        while len(self._failures) > MAX_ADDRESSES:
            self._failures.popitem(last=False)

    def succeeded(self, address: str) -> None:
        """An attempt was successful."""
        self._failures.pop(address, None)
