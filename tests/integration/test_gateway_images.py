"""Image URLs: the gateway fetches them from listed hosts only and puts the image into the request."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from aiohttp import web

from gateway.http.body_memory import LARGEST_AT_A_TIME
from gateway.http.image_fetch import Images
from inference.protocol import ModelState, ModelStatus
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.gateway_rig import CONFIG, Gateway
from tests.rigs.stack import until
from tests.rigs.tls import server_context, trusting_context

PNG = b"\x89PNG\r\n\x1a\n" + bytes(100)
DATA_URL = "data:image/png;base64," + base64.b64encode(PNG).decode()


class ImageServer:
    """A web server whose paths choose the response; `met` are the requests it received."""

    def __init__(self) -> None:
        self.met: list[web.Request] = []
        self.port = 0

    async def __aenter__(self) -> ImageServer:
        app = web.Application()
        app.router.add_get("/{how}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=server_context()).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    def url(self, how: str, host: str = "mill.example") -> str:
        return f"https://{host}:{self.port}/{how}"

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.met.append(request)
        match request.match_info["how"]:
            case "redirect":
                return web.Response(status=302, headers={"location": self.url("picture")})
            case "missing":
                return web.Response(status=404)
            case "page":
                return web.Response(text="<html>")
            case "lie":
                return web.Response(body=b"<svg>", content_type="image/png")
            case "packed":
                return web.Response(body=PNG, content_type="image/png", headers={"content-encoding": "gzip"})
            case "huge":
                return web.Response(body=PNG * 2000, content_type="image/png")
            case "silent":
                await asyncio.Event().wait()
        return web.Response(body=PNG, content_type="image/png", headers={"set-cookie": "a=b"})


@pytest.fixture
async def image_server() -> AsyncIterator[ImageServer]:
    async with ImageServer() as image_server:
        yield image_server


@pytest.fixture
async def fake() -> AsyncIterator[FakeInference]:
    async with FakeInference("token") as fake:
        fake.models["seer"] = ModelStatus(id="seer", state=ModelState.READY, capabilities=("chat", "vision"))
        yield fake


@pytest.fixture
async def gateway(tmp_path: Path, fake: FakeInference, image_server: ImageServer) -> AsyncIterator[Gateway]:
    """Every name resolves to the server, which counts as public; `secret.example` also has a private address."""
    hosts = f"[mill.example:{image_server.port}, secret.example:{image_server.port}, both.example:{image_server.port}]"
    config = CONFIG + f"images: {{hosts: {hosts}, max_bytes: 100KB, timeout: 1500ms}}\n"

    async def resolve(host: str, port: int) -> list[str]:
        if host == "both.example":
            return ["127.0.0.1", "127.0.0.2"]
        return ["127.0.0.2" if host == "secret.example" else "127.0.0.1"]

    async with Gateway(tmp_path, fake.url, config) as gateway:
        settings = gateway.runtime.config.images
        gateway.runtime.images = Images(settings, resolve, lambda address: address == "127.0.0.1", trusting_context())
        await gateway.look()
        yield gateway


async def _ask(gateway: Gateway, *urls: str, **more: Any) -> httpx2.Response:
    parts = [{"type": "text", "text": "look"}, *({"type": "image_url", "image_url": {"url": url}} for url in urls)]
    return await gateway.chat("seer", messages=[{"role": "user", "content": parts}], **more)


def _images(fake: FakeInference) -> list[str]:
    return [part["image_url"]["url"] for part in fake.seen[-1].body["messages"][0]["content"][1:]]


async def test_image_is_fetched_without_headers_of_the_client_and_sent_to_the_tier(
    gateway: Gateway, fake: FakeInference, image_server: ImageServer
) -> None:
    urls = (image_server.url("picture?x=%20a&y=%26"), "data:image/png;base64,AA==", image_server.url("picture"))
    for stream in (False, True):
        assert (await _ask(gateway, *urls, stream=stream)).status_code == 200
        assert _images(fake) == [DATA_URL, "data:image/png;base64,AA==", DATA_URL]
    assert sorted(request.path_qs for request in image_server.met[:2]) == ["/picture", "/picture?x=%20a&y=%26"]
    assert all(request.host == f"mill.example:{image_server.port}" for request in image_server.met)
    for request in image_server.met:
        assert not {"authorization", "cookie", "x-request-id"} & {name.lower() for name in request.headers}


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("redirect", "answered 302"),
        ("missing", "answered 404"),
        ("page", "is text/plain, not an image"),
        ("lie", "not a PNG, JPEG, GIF or WebP"),
        ("packed", "was sent with Content-Encoding"),
        ("huge", "larger than 100000 bytes (images.max_bytes)"),
        ("silent", "within 1.5 s (images.timeout)"),
    ],
)
async def test_url_without_an_image_in_time_is_a_client_error(
    gateway: Gateway, fake: FakeInference, image_server: ImageServer, how: str, message: str
) -> None:
    answer = await _ask(gateway, image_server.url("picture"), image_server.url(how))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages[0].content[2].image_url.url")
    assert message in error["message"]
    assert fake.seen == []
    assert gateway.runtime.admission.in_flight == 0


@pytest.mark.parametrize("host", ["secret.example", "both.example"])
async def test_host_that_resolves_to_a_private_address_is_refused(
    gateway: Gateway, image_server: ImageServer, host: str
) -> None:
    """One private address among several is enough, because a later lookup might return it."""
    answer = await _ask(gateway, image_server.url("picture", host))
    assert "an address that is not public" in answer.json()["error"]["message"]
    assert "127.0.0" not in answer.text
    assert image_server.met == []


async def test_server_without_a_valid_certificate_is_refused(gateway: Gateway, image_server: ImageServer) -> None:
    gateway.runtime.images = Images(gateway.runtime.config.images, gateway.runtime.images._resolver._resolve, bool)
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # server side of the failed handshake
    answer = await _ask(gateway, image_server.url("picture"))
    assert "mill.example failed (ClientConnectorCertificateError)" in answer.json()["error"]["message"]
    assert image_server.met == []


async def test_limit_of_the_total_size_of_images_is_changed_by_a_reload(
    gateway: Gateway, image_server: ImageServer
) -> None:
    gateway.write(f"{CONFIG}\nimages: {{hosts: ['*:{image_server.port}']}}\n")
    answer = await gateway.admin("POST", "/admin/reload")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
    gateway.write(f"{CONFIG}\nmax_body: 1200\nimages: {{hosts: [mill.example:{image_server.port}]}}\n")
    assert (await gateway.admin("POST", "/admin/reload")).status_code == 200
    for urls in ([image_server.url("picture")] * 12, [image_server.url("huge"), image_server.url("silent")]):
        error = (await _ask(gateway, *urls)).json()["error"]
        assert error["message"].endswith("and the others are together larger than 1200 bytes (max_body)")
        assert error["param"] == f"messages[0].content[{len(urls)}].image_url.url"


async def test_fetched_images_count_as_bytes_of_bodies(
    gateway: Gateway, fake: FakeInference, image_server: ImageServer
) -> None:
    """The received bytes of images count until the end of the request. An image beyond the limit is refused."""
    bodies, limit = gateway.runtime.bodies, gateway.runtime.config.max_body
    end = asyncio.Event()
    fake.answers["seer"] = Answer(hold=end)
    with contextlib.ExitStack() as held:
        for size in (limit,) * (LARGEST_AT_A_TIME - 1) + (limit - 2 * len(PNG),):
            held.enter_context(bodies.room(size, limit))
        before = bodies.held_bytes
        chat = asyncio.create_task(_ask(gateway, image_server.url("picture"), image_server.url("picture")))
        await until("a tier has the request", lambda: fake.seen)
        assert bodies.held_bytes == before + 2 * len(PNG)
        answer = await _ask(gateway, image_server.url("picture"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        end.set()
        assert (await chat).status_code == 200
        assert (await _ask(gateway, image_server.url("picture"), image_server.url("missing"))).status_code == 400
        assert bodies.held_bytes == before


async def test_no_url_is_fetched_by_default(tmp_path: Path, fake: FakeInference, image_server: ImageServer) -> None:
    async with Gateway(tmp_path, fake.url) as gateway:
        await gateway.look()
        answer = await _ask(gateway, image_server.url("picture"))
        assert answer.status_code == 400
        assert "this gateway does not fetch images" in answer.json()["error"]["message"]
        for url in (
            "http://mill.example/a",
            "file:///etc/passwd",
            "ftp://x",
            "//mill.example/a",
            "/etc/passwd",
        ):
            answer = await _ask(gateway, url)
            assert (answer.status_code, answer.json()["error"]["param"]) == (
                400,
                "messages[0].content[1].image_url.url",
            )
    assert image_server.met == []


async def test_image_host_that_resolves_to_this_machine_is_refused(tmp_path: Path, fake: FakeInference) -> None:
    """With the address check of the product."""

    async def home(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    async with Gateway(tmp_path, fake.url, CONFIG + "images: {hosts: ['*']}\n") as gateway:
        gateway.runtime.images = Images(gateway.runtime.config.images, home)
        await gateway.look()
        answer = await _ask(gateway, "https://mill.example/a")
        assert "an address that is not public" in answer.json()["error"]["message"]
