"""Images by address: fetched by the gateway from listed hosts, put into the request; nothing else is reached."""

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


class Mill:
    """A web server whose paths say how it answers; `met` are the requests it got."""

    def __init__(self) -> None:
        self.met: list[web.Request] = []
        self.port = 0

    async def __aenter__(self) -> Mill:
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
async def mill() -> AsyncIterator[Mill]:
    async with Mill() as mill:
        yield mill


@pytest.fixture
async def fake() -> AsyncIterator[FakeInference]:
    async with FakeInference("token") as fake:
        fake.models["seer"] = ModelStatus(id="seer", state=ModelState.READY, capabilities=("chat", "vision"))
        yield fake


@pytest.fixture
async def gateway(tmp_path: Path, fake: FakeInference, mill: Mill) -> AsyncIterator[Gateway]:
    """Every name leads to the mill, which counts as public; `secret.example` leads home as well."""
    hosts = f"[mill.example:{mill.port}, secret.example:{mill.port}, both.example:{mill.port}]"
    config = CONFIG + f"images: {{hosts: {hosts}, max_bytes: 100KB, timeout: 300ms}}\n"

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


async def test_an_image_is_fetched_once_and_the_tier_gets_it_whole(
    gateway: Gateway, fake: FakeInference, mill: Mill
) -> None:
    urls = (mill.url("picture?x=%20a&y=%26"), "data:image/png;base64,AA==", mill.url("picture"))
    for stream in (False, True):
        assert (await _ask(gateway, *urls, stream=stream)).status_code == 200
        assert _images(fake) == [DATA_URL, "data:image/png;base64,AA==", DATA_URL]
    assert sorted(request.path_qs for request in mill.met[:2]) == ["/picture", "/picture?x=%20a&y=%26"]
    assert all(request.host == f"mill.example:{mill.port}" for request in mill.met)
    for request in mill.met:
        assert not {"authorization", "cookie", "x-request-id"} & {name.lower() for name in request.headers}


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("redirect", "answered 302"),
        ("missing", "answered 404"),
        ("page", "is text/plain, not an uncompressed image"),
        ("lie", "not a PNG, JPEG, GIF or WebP"),
        ("packed", "not an uncompressed image"),
        ("huge", "larger than 100000 bytes (images.max_bytes)"),
        ("silent", "within 0.3 s (images.timeout)"),
    ],
)
async def test_what_is_no_image_in_time_is_the_requests_fault(
    gateway: Gateway, fake: FakeInference, mill: Mill, how: str, said: str
) -> None:
    answer = await _ask(gateway, mill.url("picture"), mill.url(how))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages[0].content[2].image_url.url")
    assert said in error["message"]
    assert fake.seen == []
    assert gateway.runtime.admission.in_flight == 0


@pytest.mark.parametrize("host", ["secret.example", "both.example"])
async def test_a_name_that_leads_home_is_not_followed(gateway: Gateway, mill: Mill, host: str) -> None:
    """One address of one's own among others is enough: the next look might choose it."""
    answer = await _ask(gateway, mill.url("picture", host))
    assert "an address that is not public" in answer.json()["error"]["message"]
    assert "127.0.0" not in answer.text
    assert mill.met == []


async def test_who_does_not_prove_the_name_gives_no_image(gateway: Gateway, mill: Mill) -> None:
    gateway.runtime.images = Images(gateway.runtime.config.images, gateway.runtime.images._resolver._resolve, bool)
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # the server's side of the broken handshake
    answer = await _ask(gateway, mill.url("picture"))
    assert "mill.example failed (ClientConnectorCertificateError)" in answer.json()["error"]["message"]
    assert mill.met == []


async def test_together_they_are_bounded_too_and_a_reload_applies(gateway: Gateway, mill: Mill) -> None:
    gateway.write(f"{CONFIG}\nimages: {{hosts: ['*:{mill.port}']}}\n")
    answer = await gateway.admin("POST", "/admin/reload")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
    gateway.write(f"{CONFIG}\nmax_body: 1200\nimages: {{hosts: [mill.example:{mill.port}]}}\n")
    assert (await gateway.admin("POST", "/admin/reload")).status_code == 200
    for urls in ([mill.url("picture")] * 12, [mill.url("huge"), mill.url("silent")]):
        error = (await _ask(gateway, *urls)).json()["error"]
        assert error["message"].endswith("and the others are together larger than 1200 bytes (max_body)")
        assert error["param"] == f"messages[0].content[{len(urls)}].image_url.url", "whichever came first"


async def test_what_is_fetched_is_held_like_a_body(gateway: Gateway, fake: FakeInference, mill: Mill) -> None:
    """To the end of its request, and not one byte more than came; what finds no room is refused."""
    bodies, limit = gateway.runtime.bodies, gateway.runtime.config.max_body
    end = asyncio.Event()
    fake.answers["seer"] = Answer(hold=end)
    with contextlib.ExitStack() as held:
        for size in (limit,) * (LARGEST_AT_A_TIME - 1) + (limit - 2 * len(PNG),):
            held.enter_context(bodies.room(size, limit))
        before = bodies.held_bytes
        asked = asyncio.create_task(_ask(gateway, mill.url("picture"), mill.url("picture")))
        await until("a tier was asked", lambda: fake.seen)
        assert bodies.held_bytes == before + 2 * len(PNG)
        answer = await _ask(gateway, mill.url("picture"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        end.set()
        assert (await asked).status_code == 200
        assert (await _ask(gateway, mill.url("picture"), mill.url("missing"))).status_code == 400
        assert bodies.held_bytes == before


async def test_as_shipped_nothing_is_fetched(tmp_path: Path, fake: FakeInference, mill: Mill) -> None:
    async with Gateway(tmp_path, fake.url) as gateway:
        await gateway.look()
        answer = await _ask(gateway, mill.url("picture"))
        assert answer.status_code == 400
        assert "this gateway does not fetch images" in answer.json()["error"]["message"]
        for url in ("http://mill.example/a", "file:///etc/passwd", "ftp://x", "//mill.example/a", "/etc/passwd"):
            answer = await _ask(gateway, url)
            assert (answer.status_code, answer.json()["error"]["param"]) == (
                400,
                "messages[0].content[1].image_url.url",
            )
    assert mill.met == []


async def test_a_name_of_this_machine_is_refused_by_its_address(tmp_path: Path, fake: FakeInference) -> None:
    """With the product's own judgement of addresses."""

    async def home(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    async with Gateway(tmp_path, fake.url, CONFIG + "images: {hosts: ['*']}\n") as gateway:
        gateway.runtime.images = Images(gateway.runtime.config.images, home)
        await gateway.look()
        answer = await _ask(gateway, "https://mill.example/a")
        assert "an address that is not public" in answer.json()["error"]["message"]
