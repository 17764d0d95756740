"""Creates the HTTP clients of the gateway."""

from __future__ import annotations

from functools import partial
from ssl import SSLContext, create_default_context
from urllib.parse import urlsplit
from urllib.request import getproxies

import aiohttp
import httpx2
from aiohttp.abc import AbstractResolver

from gateway.providers.aiohttp_transport import AiohttpTransport
from headgate.shared import hop

KEEPALIVE_SECONDS = 30.0
"""Of connections to clouds."""

LOCAL_KEEPALIVE_SECONDS = 2.0
"""Shorter than the server's own (uvicorn: 5 s), so that no request uses a connection that is being closed."""


def make_local_session(tls: SSLContext | None = None) -> aiohttp.ClientSession:
    """The session for state and events of the inference service: no cookies, no proxy, deadlines per call only.

    `tls` replaces the default context for https. Create it inside the running loop.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0, keepalive_timeout=LOCAL_KEEPALIVE_SECONDS, enable_cleanup_closed=False, ssl=tls or True
        ),
        timeout=aiohttp.ClientTimeout(total=None),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
        skip_auto_headers=("User-Agent", "Accept-Encoding"),
        read_bufsize=2**18,
    )


def make_image_session(resolver: AbstractResolver, trust: SSLContext | None = None) -> aiohttp.ClientSession:
    """The session for images of other hosts: each request opens a new connection to the result of `resolver`, no proxy.

    `trust` replaces the system's certificate authorities. Create it inside the running loop.
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


def make_hop(url: str, tls: SSLContext | None = None, server_name: str | None = None) -> tuple[hop.Hop, str]:
    """The client for generation requests to the inference service at `url`, and the path prefix in `url`.

    `tls` replaces the default context for https; `server_name` is expected in the certificate instead of the host.
    """
    parts = urlsplit(url)
    is_tls = parts.scheme == "https"
    trust = (tls or create_default_context()) if is_tls else None  # once: loading the authorities takes milliseconds
    connector = hop.tcp(parts.hostname or "", parts.port or (443 if is_tls else 80), tls=trust, server_name=server_name)
    return hop.Hop(connector, parts.netloc.rpartition("@")[2], LOCAL_KEEPALIVE_SECONDS), parts.path


def make_sdk_client(connect_seconds: float) -> httpx2.AsyncClient:
    """The HTTP client of a cloud SDK. It has a connect timeout only, because the attempt measures silence.

    The number of connections is not limited, because admission limits the calls, and a wait for a free connection would
    look like a fault of the provider. Certificates are always verified. Redirects are not followed, so that prompts and
    keys go to the configured address only. Proxies of the environment (`HTTPS_PROXY`) are used, by httpx2's own
    transport.
    """
    return httpx2.AsyncClient(
        timeout=httpx2.Timeout(None, connect=connect_seconds),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=KEEPALIVE_SECONDS),
        follow_redirects=False,
        transport=None if getproxies() else AiohttpTransport(partial(_make_cloud_session, httpx2.create_ssl_context())),
    )


def _make_cloud_session(trust: SSLContext) -> aiohttp.ClientSession:
    """The session below an SDK's client: no cookies, no limit of connections, deadlines per call only."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS, ssl=trust),
        timeout=aiohttp.ClientTimeout(total=None),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        read_bufsize=2**18,
        max_field_size=2**16,
    )
