"""Timeouts that the client announces in a header."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.access.authentication import Key
from gateway.endpoints.serve import request_context
from gateway.http.http_exchange import Exchange
from inference.protocol import ModelState, ModelStatus
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.gateway_rig import MESSAGES, Gateway

pytestmark = pytest.mark.timeout(60)

CONFIG = """
routes:
  demo: {chain: [local/demo, local/demo-mini]}
  three: {chain: [local/demo, local/demo-mini, local/third]}
  alone: {chain: [local/demo]}
deadlines: {inter_token: 50s, first_token: 50s}
"""
ONE_SECOND = {"x-stainless-read-timeout": "1"}
STALL = Answer(words=("one ", "two "), stall=True)
WHOLE = Answer(words=("one ", "two ", "three"))


@pytest.fixture
async def fake() -> AsyncIterator[FakeInference]:
    async with FakeInference("token") as fake:
        fake.models["third"] = ModelStatus(id="third", state=ModelState.READY, capabilities=("chat",))
        fake.answers = {"demo": STALL, "demo-mini": WHOLE, "third": WHOLE}
        yield fake


@pytest.fixture
async def gateway(tmp_path: Path, fake: FakeInference) -> AsyncIterator[Gateway]:
    async with Gateway(tmp_path, fake.url, CONFIG) as gateway:
        yield gateway


async def test_client_timeout_longer_than_the_total_deadline_ends_an_unstreamed_answer(
    gateway: Gateway, fake: FakeInference
) -> None:
    gateway.write(CONFIG.replace("{inter", "{total: 900ms, connect: 500ms, inter"))
    assert (await gateway.admin("POST", "/admin/reload")).status_code == 200
    fake.answers["demo"] = Answer(words=("word ",) * 60, pause=0.1)
    late = await gateway.chat("alone", headers={"x-stainless-read-timeout": "1.5"})
    assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert late.headers["x-should-retry"] == "false"
    assert "the client's own timeout" in late.json()["error"]["message"]
    await fake.seen[0].closed.wait()
    assert (await gateway.breaker("local/demo"))["failures"] == 0


@pytest.mark.parametrize(
    ("path", "more", "end"),
    [
        ("/v1/chat/completions", {}, "data: [DONE]\n\n"),
        ("/v1/messages", {"max_tokens": 9}, 'data: {"type":"message_stop"}\n\n'),
    ],
)
async def test_stalled_stream_is_resumed_before_the_client_timeout_without_a_failure(
    gateway: Gateway, path: str, more: dict[str, Any], end: str
) -> None:
    body = {"model": "demo", "messages": MESSAGES, "stream": True, **more}
    got = await gateway.client.post(path, content=json.dumps(body), headers=ONE_SECOND)
    assert "three" in got.text and got.text.endswith(end), got.text
    record = (await gateway.admin("GET", f"/admin/requests/{got.headers['x-request-id']}")).json()
    assert [(tried["name"], tried["outcome"]) for tried in record["attempts"]] == [
        ("local/demo", "spilled"), ("local/demo-mini", "success"),
    ]  # fmt: skip
    assert (await gateway.breaker("local/demo"))["failures"] == 0


async def test_second_tier_that_does_not_answer_leaves_time_for_the_third(
    gateway: Gateway, fake: FakeInference
) -> None:
    fake.answers["demo-mini"] = Answer(stall_before_headers=True)
    got = await gateway.chat("three", stream=True, headers=ONE_SECOND)
    assert ": headgate resumed on local/third after 8 characters (spilled)" in got.text
    assert got.text.endswith("data: [DONE]\n\n")
    assert (await gateway.breaker("local/demo-mini"))["failures"] == 0


@pytest.mark.parametrize(("model", "more"), [("alone", {}), ("demo", {"n": 2})], ids=["no other tier", "not resumable"])
async def test_stalled_stream_that_cannot_be_resumed_ends_with_deadline_exceeded(
    gateway: Gateway, fake: FakeInference, model: str, more: dict[str, Any]
) -> None:
    got = await gateway.chat(model, stream=True, headers=ONE_SECOND, **more)
    last = json.loads(got.text.rstrip().rpartition("data: ")[2])
    assert last["error"]["code"] == "deadline_exceeded"
    record = (await gateway.admin("GET", f"/admin/requests/{got.headers['x-request-id']}")).json()
    assert [(tried["name"], tried["outcome"]) for tried in record["attempts"]] == [("local/demo", "caller_deadline")]
    assert fake.seen_for("demo-mini") == []
    assert (await gateway.breaker("local/demo"))["failures"] == 0


async def test_second_tier_that_stalls_ends_with_deadline_exceeded(gateway: Gateway, fake: FakeInference) -> None:
    fake.answers["demo-mini"] = Answer(hold=asyncio.Event())
    got = await gateway.chat(stream=True, headers=ONE_SECOND)
    assert "deadline_exceeded" in got.text and "[DONE]" not in got.text
    assert (await gateway.breaker("local/demo-mini"))["failures"] == 0


def test_timeout_header_without_a_read_timeout_limits_only_the_first_byte() -> None:
    key = Key("name", b"", frozenset())
    contexts = [
        request_context(Exchange("id", headers), key, "", None)
        for headers in (
            {"x-stainless-timeout": "5"},
            {"x-stainless-timeout": "9", "x-stainless-read-timeout": "5"},
            {"x-stainless-timeout": "5", "x-stainless-read-timeout": "NOT_GIVEN"},
            {},
        )
    ]
    limits = [(context.silence_seconds, context.gap_seconds) for context in contexts]
    assert limits == [(4.5, None), (4.5, 4.5), (4.5, None), (None, None)]
