"""With the inference service down, clouds answer in OpenAI's format, then a 503; one probe finds the service again."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.rigs.processes import Service
from tests.rigs.stack import MODELS, Stack, chat_body, fake_cloud, until

OPEN_SECONDS = 3
CROWD = 8
"""Number of simultaneous requests; small enough that all are sent within one open period, also on a slow machine."""

CONFIG = """
providers:
  openai:    {{kind: openai,    api_key: "${{env:OPENAI_API_KEY}}",    base_url: {url}/v1}}
  anthropic: {{kind: anthropic, api_key: "${{env:ANTHROPIC_API_KEY}}", base_url: {url}}}
  google:    {{kind: openai,    api_key: "${{env:GEMINI_API_KEY}}",    base_url: {url}/v1beta/openai/}}
routes:
  demo:            {{chain: [local/demo, openai/gpt-test]}}
  demo-anthropic:  {{chain: [local/demo, anthropic/claude-test]}}
  demo-google:     {{chain: [local/demo, google/gemini-test]}}
  demo-everything: {{chain: [local/demo, openai/fault-503, anthropic/fault-529]}}
  demo-home:       {{chain: [local/demo, openai/gpt-test], cloud: never}}
breaker: {{failures: {failures}, open: {open}s, probes: 1, window: 60s, failure_ratio: 0.5, min_requests: 1000}}
"""
KEYS = {"OPENAI_API_KEY": "fake-openai", "ANTHROPIC_API_KEY": "fake-anthropic", "GEMINI_API_KEY": "fake-google"}


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    cloud = fake_cloud(tmp_path_factory.mktemp("cloud")).start()
    yield cloud
    cloud.kill()


def _stack(root: Path, cloud: Service, failures: int) -> Stack:
    """A gateway whose inference service is not running; its breakers open after `failures` failures."""
    config = CONFIG.format(url=cloud.url, failures=failures, open=OPEN_SECONDS)
    return Stack(root, models=MODELS, gateway=config, gateway_env=KEYS)


@pytest.fixture(scope="module")
def shared_stack(tmp_path_factory: pytest.TempPathFactory, cloud: Service) -> Iterator[Stack]:
    """Shared by tests that do not change breakers: it keeps trying the missing service."""
    stack = _stack(tmp_path_factory.mktemp("shared_stack"), cloud, 1000)
    stack.front.start(wait_for="/readyz")
    yield stack
    stack.kill()


@pytest.fixture
async def stack(tmp_path: Path, cloud: Service) -> AsyncIterator[Stack]:
    """A stack whose breakers open after five failures."""
    stack = _stack(tmp_path, cloud, 5)
    await asyncio.to_thread(stack.front.start, wait_for="/readyz")
    yield stack
    await asyncio.to_thread(stack.kill)


def _client(stack: Stack) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=stack.base_url, api_key=stack.key, max_retries=0, timeout=30)


def _seen(cloud: Service) -> list[dict[str, Any]]:
    with urllib.request.urlopen(cloud.url + "/_fake/requests", timeout=5) as answer:
        return list(json.load(answer)["requests"])


def _attempts(stack: Stack, of: str = "") -> int:
    """Attempts so far at the tiers whose labels contain `of`."""
    with urllib.request.urlopen(stack.front.url + "/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return sum(
        int(float(line.rpartition(" ")[2]))
        for line in lines
        if line.startswith("gateway_attempts_total{") and of in line
    )


def _local_attempts(stack: Stack) -> int:
    return _attempts(stack, 'provider="local"')


@pytest.mark.parametrize(
    ("route", "provider", "dialect"),
    [
        ("demo", "openai/gpt-test", "openai"),
        ("demo-anthropic", "anthropic/claude-test", "anthropic"),
        ("demo-google", "google/gemini-test", "google"),
    ],
)
async def test_each_provider_answers_in_the_format_of_openai(
    shared_stack: Stack, cloud: Service, route: str, provider: str, dialect: str
) -> None:
    before = len(_seen(cloud))
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How deep is the water?"}]
    async with _client(shared_stack) as client:
        raw = await client.chat.completions.with_raw_response.create(model=route, messages=messages)
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model=route, messages=messages, stream=True, stream_options={"include_usage": True}
            )
        ]
    whole = raw.parse()
    assert raw.headers["x-headgate-tier"] == "cloud"
    assert raw.headers["x-headgate-model"] == provider
    assert raw.headers["x-headgate-reason"] != "none"
    assert raw.headers["x-headgate-attempts"] == "2"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert "How deep is the water?" in text
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert whole.usage.completion_tokens > 0
    assert chunks[-1].usage is not None
    assert len({chunk.id for chunk in chunks}) == 1
    assert [record["dialect"] for record in _seen(cloud)[before:]] == [dialect, dialect]


async def test_tools_work_with_every_provider(shared_stack: Stack) -> None:
    tools: Any = [
        {
            "type": "function",
            "function": {
                "name": "read_gauge",
                "description": "Reads a water gauge.",
                "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
            },
        }
    ]
    async with _client(shared_stack) as client:
        answer = await client.chat.completions.create(
            model="demo-anthropic",
            messages=[{"role": "user", "content": "How deep is it at the mill?"}],
            tools=tools,
            tool_choice="required",
        )
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "read_gauge"
    assert isinstance(json.loads(call.function.arguments), dict)


async def test_all_tiers_down_is_a_503_with_the_retry_after(stack: Stack) -> None:
    async with httpx2.AsyncClient(timeout=30) as client:
        for stream in (False, True):
            answer = await client.post(
                stack.base_url + "/chat/completions",
                json=chat_body("Hello!", "demo-everything", stream=stream),
                headers={"authorization": f"Bearer {stack.key}"},
            )
            assert answer.status_code == 503
            error = answer.json()["error"]
            assert error["code"] == "no_tier_available"
            for name in ("local/demo", "openai/fault-503", "anthropic/fault-529"):
                assert name in error["message"]
            assert answer.headers["x-headgate-tier"] == "none"
    for _ in range(4):
        async with httpx2.AsyncClient(timeout=30) as client:
            answer = await client.post(
                stack.base_url + "/chat/completions",
                json=chat_body("Hello!", "demo-everything"),
                headers={"authorization": f"Bearer {stack.key}"},
            )
    retry_after = int(answer.headers["retry-after"])
    assert 1 <= retry_after <= OPEN_SECONDS
    await asyncio.sleep(retry_after)
    before = _attempts(stack)
    async with httpx2.AsyncClient(timeout=30) as client:
        await client.post(
            stack.base_url + "/chat/completions",
            json=chat_body("Hello!", "demo-everything"),
            headers={"authorization": f"Bearer {stack.key}"},
        )
    assert _attempts(stack) > before, "no attempt was made after Retry-After"


async def test_route_without_clouds_sends_nothing_to_a_cloud(shared_stack: Stack, cloud: Service) -> None:
    before = len(_seen(cloud))
    async with _client(shared_stack) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model="demo-home", messages=[{"role": "user", "content": "Hello!"}])
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(
                model="demo",
                messages=[{"role": "user", "content": "Hello!"}],
                extra_headers={"x-headgate-policy": "local-only"},
            )
    assert caught.value.status_code == 503
    assert len(_seen(cloud)) == before


def _next_may_pass(stack: Stack) -> bool:
    (entry,) = [entry for entry in stack.breakers() if entry["name"] == "local"]
    return entry["retry_after"] == 0


async def test_recovery_uses_exactly_one_probe_under_load(stack: Stack) -> None:
    async with _client(stack) as client:

        async def ask() -> str:
            raw = await client.chat.completions.with_raw_response.create(
                model="demo", messages=[{"role": "user", "content": "Hello!"}], temperature=0
            )
            return str(raw.headers["x-headgate-tier"])

        for _ in range(5):
            assert await ask() == "cloud"
        opened = time.monotonic()
        assert _local_attempts(stack) == 5
        assert await asyncio.gather(*(ask() for _ in range(CROWD))) == ["cloud"] * CROWD
        assert _local_attempts(stack) == 5, "an open breaker lets no request through"

        # The open period is over and the service is still down: probes detect that, not requests of users.
        await asyncio.sleep(max(0.0, opened + OPEN_SECONDS + 0.2 - time.monotonic()))
        assert await asyncio.gather(*(ask() for _ in range(CROWD))) == ["cloud"] * CROWD
        assert _local_attempts(stack) == 5

        # Half-open with the service back: one request loads the cold model while the others are answered elsewhere.
        await asyncio.to_thread(stack.inference.start, wait_for="/readyz")
        await until("a probe found the service", lambda: _next_may_pass(stack))
        tiers = await asyncio.gather(*(ask() for _ in range(CROWD)))
        assert sorted(tiers) == ["cloud"] * (CROWD - 1) + ["local"]
        assert _local_attempts(stack) == 6
        assert await ask() == "local"

    async def closed() -> bool:
        return all(entry["state"] == "closed" for entry in await asyncio.to_thread(stack.breakers))

    await until("every breaker is closed", closed)
