"""CORS: which web pages may call the gateway from a browser, and the response headers for it.

Credentials (cookies) are not allowed: clients authenticate with an API key.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from inference.protocol import (
    H_ATTEMPTS,
    H_DEVICE,
    H_MODEL,
    H_NODE,
    H_OVERHEAD,
    H_REASON,
    H_REQUEST_ID,
    H_SHOULD_RETRY,
    H_TIER,
)

ANY = "*"
METHODS = ("GET", "POST", "DELETE")
MAX_AGE_SECONDS = 600
"""How long a browser may cache a preflight response; a reload takes effect after this time at the latest."""

ALLOWED_HEADERS = (
    "accept", "accept-language", "authorization", "content-language", "content-type", "http-referer",
    "idempotency-key", "traceparent", "tracestate", "user-agent", "x-api-key", "x-request-id", "x-title",
)  # fmt: skip
ALLOWED_PREFIXES = ("anthropic-", "openai-", "x-headgate-", "x-stainless-")
"""Prefixes of further request headers that are allowed."""

EXPOSED_HEADERS = (
    H_REQUEST_ID, "request-id", H_TIER, H_MODEL, H_ATTEMPTS, H_REASON, H_OVERHEAD, H_DEVICE, H_NODE, "retry-after",
    H_SHOULD_RETRY,
    *(f"x-ratelimit-{what}-{which}" for what in ("limit", "remaining", "reset") for which in ("requests", "tokens")),
)  # fmt: skip

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@,*]+")
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]{1,64}")


def why_no_origin(origin: str) -> str | None:
    """What is wrong with an entry of `cors.origins`; None for `*` and for an origin as browsers send it."""
    if origin == ANY:
        return None
    if not _ORIGIN.fullmatch(origin):
        return (
            f"{origin!r} is not an origin; write for example https://app.example.org (no path), or * for every origin"
        )
    if (origin.startswith("https://") and origin.endswith(":443")) or (
        origin.startswith("http://") and origin.endswith(":80")
    ):
        return f"{origin!r} names the default port, which browsers leave out; leave it out here too"
    return None


@functools.lru_cache(maxsize=64)
def response_lines(origins: tuple[str, ...], origin: str | None) -> bytes:
    """The header lines of every response to a request with this Origin header."""
    if not origins:
        return b""
    lines = "" if ANY in origins else "vary: Origin\r\n"
    if is_allowed(origins, origin):
        allowed = ANY if ANY in origins else origin
        lines += f"access-control-allow-origin: {allowed}\r\n"
        lines += f"access-control-expose-headers: {', '.join(EXPOSED_HEADERS)}\r\n"
    return lines.encode("latin-1")


def is_allowed(origins: Sequence[str], origin: str | None) -> bool:
    """Whether pages of `origin` may call."""
    return origin is not None and (ANY in origins or origin in origins)


def preflight_headers(requested: str) -> list[tuple[bytes, bytes]]:
    """The headers of a preflight response; `requested` is the value of Access-Control-Request-Headers, or empty."""
    names = [name.strip().lower() for name in requested.split(",")]
    others = [name for name in names if name.startswith(ALLOWED_PREFIXES) and _NAME.fullmatch(name)]
    return [
        (b"access-control-allow-methods", ", ".join(METHODS).encode()),
        (b"access-control-allow-headers", ", ".join((*ALLOWED_HEADERS, *dict.fromkeys(others))).encode()),
        (b"access-control-max-age", str(MAX_AGE_SECONDS).encode()),
        (b"vary", b"Access-Control-Request-Headers"),
    ]
