"""Makes every HTTP client of the gateway, with its pool and keep-alive; sends nothing itself."""

from __future__ import annotations

from ssl import SSLContext
from urllib.parse import urlsplit

import aiohttp
import httpx2
from aiohttp.abc import AbstractResolver

from headgate.shared import hop

LOCAL_KEEPALIVE_SECONDS = 2.0
"""Shorter than any server's own (uvicorn: 5 s), so that a request never meets a connection that is being closed."""


def make_local_session() -> aiohttp.ClientSession:
    """The session for the state of the inference service: no deadlines but those a call names, no cookies, no proxy.

    Create it inside the running loop.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=LOCAL_KEEPALIVE_SECONDS, enable_cleanup_closed=False),
        timeout=aiohttp.ClientTimeout(total=None),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
        skip_auto_headers=("User-Agent", "Accept-Encoding"),
        read_bufsize=2**18,
    )


def make_image_session(resolver: AbstractResolver, trust: SSLContext | None = None) -> aiohttp.ClientSession:
    """The session for images of others' hosts: each connection is made anew to what `resolver` says, by no proxy.

    `trust` replaces the system's authorities. Create it inside the running loop.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=64, force_close=True, use_dns_cache=False, resolver=resolver, ssl=True if trust is None else trust
        ),
        timeout=aiohttp.ClientTimeout(total=None),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
        headers={"User-Agent": "headgate", "Accept": "image/*", "Accept-Encoding": "identity"},
    )


def make_hop(url: str) -> tuple[hop.Hop, str]:
    """What answers of the inference service at `url` come through, and the path in `url` that all paths begin with."""
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    connector = hop.tcp(parts.hostname or "", parts.port or (443 if tls else 80), tls=tls)
    return hop.Hop(connector, parts.netloc.rpartition("@")[2], LOCAL_KEEPALIVE_SECONDS), parts.path


def make_sdk_client(connect_seconds: float) -> httpx2.AsyncClient:
    """The client a cloud SDK sends with: only connecting has a deadline, the attempt measures silence itself.

    It has as many connections as there are calls: the door bounds those, and a wait for a connection of ours would
    look like a fault of the provider.

    Certificates are verified, and nothing turns that off. A redirect is not followed: prompts and keys go to the
    address in the configuration and nowhere else. Proxies of the environment (`HTTPS_PROXY`) are used.
    """
    return httpx2.AsyncClient(
        timeout=httpx2.Timeout(None, connect=connect_seconds),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=30.0),
        follow_redirects=False,
    )
