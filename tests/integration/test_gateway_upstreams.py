"""Only the configuration decides where requests are sent, and servers must prove their names."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gateway.apis.openai.frames import Endpoint
from gateway.errors import UpstreamError, UpstreamKind
from gateway.providers import registry
from gateway.providers.anthropic.anthropic_sdk import AnthropicProvider
from gateway.providers.http_clients import make_cloud_http
from gateway.providers.local.local_provider import LocalProvider
from gateway.providers.openai.openai_sdk import OpenAIProvider
from gateway.providers.provider import Provider
from gateway.providers.provider_errors import status_error
from gateway.settings import GatewayConfig
from tests.rigs.fake_inference import FakeInference
from tests.rigs.gateway_rig import KEY, MESSAGES, Gateway
from tests.rigs.tls import CERTIFICATE, server_context
from tests.rigs.typed_bodies import call as typed_call

SECRET = "key-of-the-provider"


def _openai(url: str) -> Provider:
    return OpenAIProvider("openai", api_key=SECRET, base_url=f"{url}/v1", http=make_cloud_http(url))


def _anthropic(url: str) -> Provider:
    return AnthropicProvider("anthropic", api_key=SECRET, base_url=url, http=make_cloud_http(url))


def _local(url: str) -> Provider:
    return LocalProvider(url, SECRET)


every_provider = pytest.mark.parametrize("make", [_openai, _anthropic, _local], ids=["openai", "anthropic", "local"])


@asynccontextmanager
async def _server(answer: Callable[[web.Request], web.Response], *, tls: bool = False) -> AsyncIterator[str]:
    async def handle(request: web.Request) -> web.Response:
        await request.read()
        return answer(request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=server_context() if tls else None)
    await site.start()
    yield f"{'https' if tls else 'http'}://localhost:{runner.addresses[0][1]}"
    await runner.cleanup()


async def _failure(provider: Provider) -> UpstreamError:
    call = typed_call(Endpoint.CHAT, "m", {"messages": MESSAGES}, "req-1", connect_seconds=5.0)
    try:
        with pytest.raises(UpstreamError) as caught:
            async with asyncio.timeout(10), provider.stream(call) as frames:
                async for _ in frames:
                    pass
    finally:
        await provider.aclose()
    return caught.value


@every_provider
async def test_redirect_is_a_failure_and_is_not_followed(make: Callable[[str], Provider]) -> None:
    """It would send the prompt, and perhaps the key, to another address."""
    met: list[str] = []

    def note(request: web.Request) -> web.Response:
        met.append(request.path)
        return web.json_response({})

    async with _server(note) as elsewhere:

        def redirect(_: web.Request) -> web.Response:
            return web.Response(status=307, headers={"location": elsewhere})

        async with _server(redirect) as url:
            error = await _failure(make(url))
    assert (error.kind, error.status) == (UpstreamKind.STATUS, 307)
    assert met == []


@every_provider
@pytest.mark.parametrize(
    "environ",
    [{}, {"SSL_CERT_FILE": ""}, {"PYTHONHTTPSVERIFY": "0", "REQUESTS_CA_BUNDLE": "", "CURL_CA_BUNDLE": ""},
     {"NODE_TLS_REJECT_UNAUTHORIZED": "0", "SSL_VERIFY": "false"}],
    ids=["no variable", "empty file name", "variables of Python", "variables of Node.js"],
)  # fmt: skip
async def test_server_without_a_valid_certificate_gets_no_request(
    make: Callable[[str], Provider], environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    met: list[str] = []

    def note(request: web.Request) -> web.Response:
        met.append(request.path)
        return web.json_response({})

    async with _server(note, tls=True) as url:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # server side of the failed handshake
        error = await _failure(make(url))
    assert error.kind is UpstreamKind.CONNECT
    assert "certificate verify failed" in error.message.lower()
    assert met == []


@every_provider
async def test_trusted_authorities_can_be_configured(
    make: Callable[[str], Provider], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`SSL_CERT_FILE` replaces the trusted authorities."""
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    met: list[str] = []

    def refuse(request: web.Request) -> web.Response:
        met.append(request.path)
        return web.json_response({"error": {"message": "no"}}, status=418)

    async with _server(refuse, tls=True) as url:
        assert (await _failure(make(url))).status == 418
        wrong_name = await _failure(make(url.replace("localhost", "127.0.0.1")))
    assert wrong_name.kind is UpstreamKind.CONNECT
    assert len(met) == 1


async def test_proxy_of_the_environment_is_used_for_clouds_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    met: list[str] = []

    def note(request: web.Request) -> web.Response:
        met.append(request.headers["host"])
        return web.json_response({"error": {"message": "no"}}, status=418)

    for name in ("NO_PROXY", "no_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    async with _server(note) as proxy:
        monkeypatch.setenv("http_proxy", proxy)
        assert (await _failure(_openai("http://cloud.example"))).status == 418
        assert (await _failure(_anthropic("http://cloud.example"))).status == 418
        assert (await _failure(_local("http://127.0.0.1:9"))).kind is UpstreamKind.CONNECT
        monkeypatch.setenv("http_proxy", proxy.removeprefix("http://"))
        assert (await _failure(_openai("http://cloud.example"))).status == 418
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert (await _failure(_openai("http://127.0.0.1:9"))).kind is UpstreamKind.CONNECT
    assert met == ["cloud.example"] * 3


async def test_cloud_behind_a_proxy_that_is_not_an_http_proxy_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It must not be asked without the proxy."""
    for name in ("NO_PROXY", "no_proxy", "HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("all_proxy", "socks5://127.0.0.1:9")
    cloud = {"kind": "openai", "api_key": SECRET, "base_url": "https://cloud.example/v1"}
    built = await registry.build(GatewayConfig.model_validate({"providers": {"cloud": cloud}}))
    assert built.providers == {}
    assert "cloud.example is not an HTTP proxy; set HTTPS_PROXY to one" in caplog.text


async def test_requests_cannot_choose_the_upstream_address(tmp_path: Path) -> None:
    """Neither headers, fields of the body, the form of the target nor the name of the model."""
    with socket.socket() as trap:
        trap.bind(("127.0.0.1", 0))
        trap.listen()
        trap.setblocking(False)
        address = f"http://127.0.0.1:{trap.getsockname()[1]}"
        names = (
            "forwarded",
            "x-forwarded-host",
            "x-original-url",
            "x-rewrite-url",
            "x-upstream",
            "x-base-url",
            "proxy",
        )
        headers = dict.fromkeys(names, address)
        async with FakeInference("token") as fake, Gateway(tmp_path, fake.url) as gateway:
            assert (await gateway.chat(headers=headers)).status_code == 200
            for name in ("base_url", "api_base", "url", "upstream", "extra_headers"):
                answer = await gateway.chat(**{name: address})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
            for model in (address, f"local/{address}", "openai/gpt", "../demo", "demo\r\nhost: x"):
                assert (await gateway.chat(model)).status_code == 404
            assert (await _absolute(gateway, f"{address}/v1/chat/completions"))[:12] == b"HTTP/1.1 200"
            assert len(fake.seen) == 2
            assert all(seen.model == "demo" for seen in fake.seen)
            assert all(seen.headers["host"] == fake.url.removeprefix("http://") for seen in fake.seen)
            sent = set().union(*(seen.headers for seen in fake.seen))
            assert not sent & set(headers)
        with pytest.raises(BlockingIOError):
            trap.accept()


async def _absolute(gateway: Gateway, target: str) -> bytes:
    """The answer to a request whose target is an absolute URL, as for a proxy."""
    body = json.dumps({"model": "demo", "messages": MESSAGES}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    writer.write(
        f"POST {target} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    return answer


SERVED = ("LOCALHOST", "LocalHost:8080", "[::1]", "[::1]:8080", "127.8.8.8:1", "[0:0:0:0:0:0:0:1]", "127.0.0.1:")
FOREIGN = (
    "localhost.", "0.0.0.0", "[::]", "::1", "127.0.0.1:80:80", "127.1", "2130706433", "[::1].evil.example",
    "evil.example:127.0.0.1", "localhost, evil.example", "", None,
)  # fmt: skip


async def test_loopback_host_is_accepted_in_every_form_and_other_hosts_are_refused(tmp_path: Path) -> None:
    async with FakeInference("token") as fake, Gateway(tmp_path, fake.url) as gateway:
        for host in (*SERVED, *FOREIGN):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
            line = "" if host is None else f"Host: {host}\r\n"
            writer.write(f"GET /livez HTTP/1.1\r\n{line}Connection: close\r\n\r\n".encode())
            async with asyncio.timeout(10):
                answer = await reader.read()
            writer.close()
            assert int(answer.split(b" ", 2)[1]) == (200 if host in SERVED else 403), host


@pytest.mark.parametrize("value", [SECRET, f"x-{SECRET}", "a code of words", "x" * 65, 7, ["x"], ""])
def test_error_codes_that_are_no_names_are_dropped(value: Any) -> None:
    """Codes, types and params appear in headers, labels of metrics and logs."""
    error = status_error(
        400,
        {},
        json.dumps({"error": {"message": "m", "code": value, "type": value, "param": value}}).encode(),
        now=0.0,
        secrets=(SECRET,),
    )
    assert (error.code, error.type, error.param) == (None, None, None) if value != "x" * 65 else (None, None, value)
