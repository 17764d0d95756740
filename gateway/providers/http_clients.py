"""Creates the HTTP clients of the gateway."""

from __future__ import annotations

from functools import partial
from ssl import SSLContext, create_default_context
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import httpx2
from aiohttp.abc import AbstractResolver

from gateway.providers.cloud_http import CloudHttp
from headgate.shared import hop
from headgate.shared.errors import HeadgateError

KEEPALIVE_SECONDS = 30.0
"""Of connections to clouds."""

LOCAL_KEEPALIVE_SECONDS = 2.0
"""Shorter than the server's own (uvicorn: 5 s), so that no request uses a connection that is being closed."""


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
    """The client for the inference service at `url`, and the path prefix in `url`.

    `tls` replaces the default context for https; `server_name` is expected in the certificate instead of the host.
    """
    parts = urlsplit(url)
    is_tls = parts.scheme == "https"
    trust = (tls or create_default_context()) if is_tls else None  # once: loading the authorities takes milliseconds
    connector = hop.tcp(parts.hostname or "", parts.port or (443 if is_tls else 80), tls=trust, server_name=server_name)
    return hop.Hop(connector, parts.netloc.rpartition("@")[2], LOCAL_KEEPALIVE_SECONDS), parts.path


def make_cloud_http(url: str) -> CloudHttp:
    """The HTTP client of the cloud at `url`. It has a connect timeout only, because the attempt measures silence.

    The number of connections is not limited, because admission limits the calls, and a wait for a free connection would
    look like a fault of the provider. Certificates are always verified. The proxy is the one that the environment names
    for the host now (`HTTPS_PROXY`, `ALL_PROXY`, `NO_PROXY`). Raises HeadgateError for another kind of proxy than HTTP.
    """
    return CloudHttp(partial(_make_cloud_session, httpx2.create_ssl_context(), _proxy_of(url)))


def _proxy_of(url: str) -> str | None:
    parts, proxies = urlsplit(url), getproxies()
    if not proxies or proxy_bypass(parts.hostname or ""):
        return None
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if proxy and "://" not in proxy:
        proxy = f"http://{proxy}"
    if proxy and urlsplit(proxy).scheme not in ("http", "https"):
        raise HeadgateError(
            f"the proxy of the environment for {parts.hostname} is not an HTTP proxy; set "
            f"{parts.scheme.upper()}_PROXY to one, or add the host to NO_PROXY"
        )
    return proxy


def _make_cloud_session(trust: SSLContext, proxy: str | None) -> aiohttp.ClientSession:
    """The session for a cloud: no cookies, no limit of connections, deadlines per call only."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS, ssl=trust),
        timeout=aiohttp.ClientTimeout(total=None),
        cookie_jar=aiohttp.DummyCookieJar(),
        proxy=proxy,
        read_bufsize=2**18,
        max_field_size=2**16,
    )


def make_unused_client() -> httpx2.AsyncClient:
    """The HTTP client of an SDK whose own calls are not used. It opens no connection, and loads no certificates."""

    def refuse(request: httpx2.Request) -> httpx2.Response:
        raise httpx2.ConnectError("requests are sent by CloudSender", request=request)

    return httpx2.AsyncClient(transport=httpx2.MockTransport(refuse), trust_env=False)
