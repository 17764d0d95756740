"""Requests with large, odd or stale content."""

from __future__ import annotations

import asyncio
import gc
import resource
import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import httpx2
import pytest
from yarl import URL

from gateway.apis.body_parser import MAX_NESTING
from gateway.apis.openai.frames import Endpoint, Flavor
from gateway.apis.openai.generation_request import parse
from gateway.errors import RequestError
from gateway.http.http_exchange import Exchange
from gateway.providers.anthropic.anthropic_request import ToolIds
from gateway.providers.http_clients import make_cloud_http
from gateway.routing.attempt import Attempt
from gateway.settings_loading import load
from headgate.shared.errors import ConfigError
from inference.protocol import Code, ModelState, ModelStatus
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.gateway_rig import CONFIG, Gateway
from tests.rigs.stack import until
from tests.rigs.typed_bodies import template_messages, to_openai

pytestmark = pytest.mark.timeout(60)

ANSWER = {"role": "assistant", "content": "Hi", "annotations": [], "parsed": None}


@pytest.mark.parametrize("flavor", Flavor)
def test_message_of_an_sdk_answer_is_sent_without_its_extra_fields(flavor: Flavor) -> None:
    sent = to_openai(Endpoint.CHAT, {"messages": [{"role": "user", "content": "Hi"}, ANSWER]}, "m", flavor)
    assert sent["messages"] == [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi"}]


def test_message_of_an_sdk_answer_is_accepted_by_local_models() -> None:
    assert template_messages([ANSWER]) == ({"role": "assistant", "content": "Hi"},)


NESTED = b"[]" * MAX_NESTING


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a":' + NESTED + b'"' + b'\\"' * 4_000_000,
        b'{"a":' + NESTED + b'"' + b"\\" * 8_000_000,
        b'{"a":[' + b"[]," * 2_000_000 + b"1]}",
        b"{" + b'"a":1,' * 1_500_000 + b'"a":1}',
        b"[" * 8_000_000,
        b'{"a":' + b"NaN," * 2_000_000,
    ],
    ids=["quotes", "backslashes", "empty arrays", "names", "depth", "not a number"],
)
def test_large_invalid_bodies_are_refused_in_linear_time(raw: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        parse(Endpoint.CHAT, raw)
    assert caught.value.status == 400


async def test_stored_conversation_is_limited_like_a_body(tmp_path: Path) -> None:
    async with FakeInference("token") as fake, Gateway(tmp_path, fake.url, CONFIG + "max_body: 3KB\n") as gateway:

        async def ask(earlier: str | None) -> httpx2.Response:
            body = {"model": "demo", "input": "mill " * 200, "previous_response_id": earlier}
            return await gateway.client.post("/v1/responses", json=body)

        first = await ask(None)
        second = await ask(first.json()["id"])
        assert (first.status_code, second.status_code) == (200, 200)
        third = await ask(second.json()["id"])
    error = third.json()["error"]
    assert (third.status_code, error["code"], error["param"]) == (413, "body_too_large", "previous_response_id")
    assert "begin a new one" in error["message"]
    assert len(fake.seen) == 2


URLS = [{"type": "image_url", "image_url": {"url": f"https://mill.example/{number}"}} for number in range(4)]


@pytest.mark.parametrize("hosts", ["[]", "[mill.example]"])
async def test_queued_requests_with_image_urls_reserve_no_memory(tmp_path: Path, hosts: str) -> None:
    config = f"{CONFIG}\nadmission: {{max_in_flight: 1}}\nimages: {{hosts: {hosts}}}\n"
    gate = asyncio.Event()
    async with FakeInference("token") as fake, Gateway(tmp_path, fake.url, config) as gateway:
        fake.models["seer"] = ModelStatus(id="seer", state=ModelState.READY, capabilities=("chat", "vision"))
        fake.answers["demo"] = Answer(hold=gate)
        await gateway.look()
        first = asyncio.create_task(gateway.chat())
        await until("the first is inside", lambda: fake.seen)
        messages = [{"role": "user", "content": URLS}]
        others = [asyncio.create_task(gateway.chat("seer", messages=messages)) for _ in range(2)]
        depth = "gateway_queue_depth 2.0"
        await until("the others wait", lambda: depth in gateway.runtime.telemetry.render().decode())
        assert gateway.runtime.bodies.held_bytes == 0
        for other in others:
            other.cancel()
        gate.set()
        assert (await first).status_code == 200


CANARY = "gsk_canary1234567890"


def _load(tmp_path: Path, key: str) -> str:
    (tmp_path / "gateway.yaml").write_text('providers: {oa: {kind: openai, api_key: "${env:THE_KEY}"}}\n')
    return load(tmp_path, {"THE_KEY": key}).providers["oa"].api_key


@pytest.mark.parametrize("around", ["{}\r", "{}\n", " {}\t"])
def test_white_space_around_an_api_key_is_removed(tmp_path: Path, around: str) -> None:
    assert _load(tmp_path, around.format(CANARY)) == CANARY


@pytest.mark.parametrize("odd", ["{}\nsk-old", "{}\x00", "{} {}", "schlüssel-{}", "{}\x7f"])
def test_api_key_that_is_no_header_value_is_refused_without_its_text(tmp_path: Path, odd: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _load(tmp_path, odd.format(CANARY, CANARY))
    (problem,) = caught.value.problems
    assert problem.key == "providers.oa.api_key"
    assert CANARY not in str(problem)


@pytest.mark.parametrize("url", ["http://[::1", "http://", "ftp://x", "http://x:99999/", "http://a b/", "nonsense"])
def test_invalid_url_is_reported_with_its_line(tmp_path: Path, url: str) -> None:
    (tmp_path / "gateway.yaml").write_text(f'inference:\n  url: "{url}"\n')
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, {})
    (problem,) = caught.value.problems
    assert problem.line == 2
    assert "not a URL" in problem.message


MANY = 200_000
"""A linear search among all earlier ids would take ten minutes."""


def test_tool_call_ids_are_mapped_in_constant_time() -> None:
    ids = ToolIds()
    assert len({ids(f"call_{number}") for number in range(MANY)}) == MANY


def test_tool_call_ids_that_map_to_the_same_text_are_numbered() -> None:
    ids = ToolIds()
    assert [ids(id) for id in ("a!", "a?", "a_2", "a_", "a!")] == ["a_", "a__2", "a_2", "a__3", "a_"]
    alike = {ids("b" + chr(0x4E00 + number)) for number in range(20_000)}
    assert len(alike) == 20_000


TIER_SECONDS = 0.6


@pytest.mark.parametrize("stream", [False, True])
async def test_overhead_header_excludes_the_time_of_failing_tiers(tmp_path: Path, stream: bool) -> None:
    async with FakeInference("token") as fake, Gateway(tmp_path, fake.url) as gateway:
        slow = Answer(comments=2, pause=TIER_SECONDS / 2, words=(), error=Code.MODEL_FAILED)
        fake.answers = {"demo": slow, "demo-mini": slow}
        began = time.monotonic()
        answer = await gateway.chat(stream=stream)
        elapsed = time.monotonic() - began
        assert answer.status_code == 503
        assert float(answer.headers["x-headgate-overhead-ms"]) / 1000 <= elapsed - TIER_SECONDS


@pytest.mark.parametrize("stream", [True, False])
async def test_requests_leave_no_reference_cycles(tmp_path: Path, stream: bool) -> None:
    async with FakeInference() as fake, Gateway(tmp_path, fake.url) as gateway:
        for _ in range(3):
            answer = await gateway.chat(stream=stream)
            assert answer.status_code == 200
        gc.collect()
        gc.disable()
        try:
            for _ in range(5):
                await gateway.chat(stream=stream)
            left = [type(held).__name__ for held in gc.get_objects() if isinstance(held, Attempt | Exchange)]
        finally:
            gc.enable()
    assert left in ([], ["Exchange"])  # an open connection keeps its last exchange


CALLS = 520


@pytest.fixture(autouse=True)
def descriptors() -> Iterator[None]:
    """Enough for both ends of every connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * CALLS)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_connections_of_a_cloud_are_not_limited() -> None:
    """`admission.max_in_flight` may be any number."""
    arrived, all_here = 0, asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal arrived
        await reader.readuntil(b"\r\n\r\n")
        arrived += 1
        if arrived == CALLS:
            all_here.set()
        await all_here.wait()
        writer.write(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=CALLS)
    port = server.sockets[0].getsockname()[1]
    url = URL(f"http://127.0.0.1:{port}/")
    http = make_cloud_http(str(url))
    async with server, aclosing(http), asyncio.timeout(15):
        answers = await asyncio.gather(*(http.post(url, b"{}", {}, 20.0) for _ in range(CALLS)))
    assert {response.status for response in answers} == {204}


async def test_route_for_other_names_may_name_a_local_model(tmp_path: Path, fake: FakeInference) -> None:
    """Some clients send a fixed model name, which no local model has."""
    async with Gateway(tmp_path, fake.url, 'routes: {"*": {chain: [local/demo]}}\n') as gateway:
        await gateway.look()
        for name in ("gpt-3.5-turbo", "demo-mini"):
            answer = await gateway.chat(name)
            assert (answer.status_code, answer.headers.get("x-headgate-model")) == (200, "local/demo"), answer.text
