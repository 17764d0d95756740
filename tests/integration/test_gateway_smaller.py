"""The chain entry `local/smaller` stands for the largest other local model that can answer when its turn comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from inference.protocol import Code, ModelState, ModelStatus
from tests.rigs.breaker_rig import open_breaker
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.fake_provider import FakeProvider
from tests.rigs.gateway_rig import Gateway
from tests.rigs.stack import until

pytestmark = pytest.mark.timeout(60)

CONFIG = """
providers:
  cloud: {kind: openai, api_key: fake-cloud-key, base_url: URL}
routes:
  named: {chain: [local/big, local/smaller, local/mid]}
  cloudy: {chain: [local/big, local/smaller, cloud/large]}
  "*": {chain: ["local/*", local/smaller]}
"""
CHAT = ("chat", "completions")
REFUSES = Answer(refuse=Code.MEMORY_LIMIT_EXCEEDED, message="big needs 9 GiB")
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
LONG = [{"role": "user", "content": "the water of the mill turns the wheel " * 40}]


def status(id: str, size: int | None, **more: Any) -> ModelStatus:
    given: dict[str, Any] = {"state": ModelState.COLD, "fits": True, "capabilities": CHAT, "context_length": 4096}
    return ModelStatus(id, predicted_bytes=size, **given | more)


@pytest.fixture
async def cloud() -> AsyncIterator[FakeProvider]:
    async with FakeProvider() as cloud:
        yield cloud


@pytest.fixture
async def gateway(tmp_path: Path, fake: FakeInference, cloud: FakeProvider) -> AsyncIterator[Gateway]:
    fake.models = {
        model.id: model
        for model in (
            status("big", 90), status("mid", 50), status("tiny", 10), status("tools", 5, capabilities=(*CHAT, "tools")),
            status("embed", 99, capabilities=("embeddings",)), status("new", None, fits=None, capabilities=()),
        )
    }  # fmt: skip
    fake.answers["big"] = REFUSES
    async with Gateway(tmp_path, fake.url, CONFIG.replace("URL", cloud.openai_url)) as gateway:
        await gateway.look()
        yield gateway


async def change(gateway: Gateway, fake: FakeInference, name: str, **more: Any) -> None:
    fake.models[name] = replace(fake.models[name], **more)
    await gateway.look()


async def explained(gateway: Gateway, answer: httpx2.Response) -> dict[str, Any]:
    found: dict[str, Any] = (await gateway.admin("GET", f"/admin/requests/{answer.headers['x-request-id']}")).json()
    return found


async def test_largest_other_model_answers_and_is_named(gateway: Gateway) -> None:
    answer = await gateway.chat("big")
    assert (answer.status_code, answer.json()["model"]) == (200, "mid")
    assert answer.headers["x-headgate-model"] == "local/mid"
    assert answer.headers["x-headgate-tier"] == "local-fallback"
    record = await explained(gateway, answer)
    assert record["chain"] == ["local/big", "local/mid"]
    assert record["chosen"] == {"local/smaller": "local/mid"}
    assert record["considered"]["local/mid"]["fits"] is True
    assert [attempt["name"] for attempt in record["attempts"]] == ["local/big", "local/mid"]
    assert record["answered_by"] == "local/mid"


async def test_smaller_model_is_chosen_by_the_state_when_its_turn_comes(gateway: Gateway, fake: FakeInference) -> None:
    """The first model refuses late; meanwhile another one no longer fits. No event is needed."""
    fake.answers["big"] = Answer(comments=1, pause=0.8, words=(), error=Code.MEMORY_LIMIT_EXCEEDED)
    asking = asyncio.create_task(gateway.chat("big"))
    await until("big is asked", lambda: bool(fake.seen_for("big")))
    fake.models["mid"] = replace(fake.models["mid"], fits=False, reason="lacks 3 GiB")
    assert (await asking).headers["x-headgate-model"] == "local/tiny"


@pytest.mark.parametrize(
    ("changed", "chosen"),
    [
        ({"mid": {"fits": False}}, "tiny"),
        ({"mid": {"fits": None}}, "tiny"),
        ({"mid": {"state": ModelState.FAILED, "retry_after_seconds": 60.0}}, "tiny"),
        ({"tiny": {"state": ModelState.READY}}, "mid"),
        ({"mid": {"fits": False}, "tiny": {"state": ModelState.BUSY, "fits": None}}, "tiny"),
        ({"mid": {"fits": False}, "tiny": {"fits": False}, "tools": {"fits": False}}, "new"),
    ],
    ids=["no room", "unknown", "failed", "the smaller one is ready", "busy", "never measured"],
)
async def test_models_that_cannot_answer_now_are_left_out(
    gateway: Gateway, fake: FakeInference, changed: dict[str, dict[str, Any]], chosen: str
) -> None:
    for name, more in changed.items():
        await change(gateway, fake, name, **more)
    assert (await gateway.chat("big")).headers["x-headgate-model"] == f"local/{chosen}"


async def test_smaller_model_has_the_needed_capabilities_and_no_open_breaker(
    gateway: Gateway, fake: FakeInference
) -> None:
    await change(gateway, fake, "big", capabilities=(*CHAT, "tools"))
    answer = await gateway.chat("big", tools=TOOLS)
    assert answer.headers["x-headgate-model"] == "local/tools"
    open_breaker(gateway.runtime.breakers, "local", "mid", 30)
    assert (await gateway.chat("big")).headers["x-headgate-model"] == "local/tiny"


async def test_model_whose_context_is_too_small_is_passed_over(gateway: Gateway, fake: FakeInference) -> None:
    await change(gateway, fake, "mid", context_length=700)
    fake.counts |= {"mid": 900, "tiny": 900, "big": 900}
    answer = await gateway.chat("big", messages=LONG)
    assert answer.headers["x-headgate-model"] == "local/tiny"
    for name in ("tiny", "tools", "new", "big"):
        fake.counts[name] = 900
        await change(gateway, fake, name, context_length=700)
    answer = await gateway.chat("big", messages=LONG)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_tier_available"), "big lacks memory"
    fake.answers["big"] = Answer(refuse=Code.CONTEXT_LENGTH_EXCEEDED)
    answer = await gateway.chat("big", messages=LONG)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_models_that_the_chain_names_have_their_own_turn(gateway: Gateway, fake: FakeInference) -> None:
    assert (await gateway.chat("named")).headers["x-headgate-model"] == "local/tiny"
    for name in ("tiny", "tools", "new"):
        fake.answers[name] = Answer(refuse=Code.MODEL_FAILED)
    answer = await gateway.chat("named")
    assert answer.headers["x-headgate-model"] == "local/mid"
    record = await explained(gateway, answer)
    assert [attempt["name"] for attempt in record["attempts"]] == ["local/big", "local/tiny", "local/mid"]


async def test_chain_continues_if_no_smaller_model_can_answer(gateway: Gateway, fake: FakeInference) -> None:
    for name in ("mid", "tiny", "tools", "new"):
        await change(gateway, fake, name, fits=False, reason=f"{name} lacks memory")
    answer = await gateway.chat("cloudy")
    assert answer.headers["x-headgate-model"] == "cloud/large"
    reason = (await explained(gateway, answer))["dropped"]["local/smaller"]
    assert reason.startswith("no_smaller: no other local model is ready or fits now: mid: cannot fit now: mid lacks")
    refused = await gateway.chat("big")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_tier_available")
    assert "no other local model is ready or fits now" in refused.json()["error"]["message"]


async def test_embeddings_and_unknown_names_have_no_smaller_model(gateway: Gateway, fake: FakeInference) -> None:
    fake.answers["embed"] = Answer(refuse=Code.MEMORY_LIMIT_EXCEEDED)
    answer = await gateway.client.post("/v1/embeddings", json={"model": "embed", "input": "x"})
    assert answer.status_code == 503
    dropped = (await explained(gateway, answer))["dropped"]
    assert dropped == {"local/smaller": "capability: no other local model can do embeddings"}
    unknown = await gateway.chat("bgi")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert "did you mean 'big'?" in unknown.json()["error"]["message"]


async def test_only_chat_model_has_no_smaller_model(gateway: Gateway, fake: FakeInference) -> None:
    fake.models = {"big": fake.models["big"], "embed": fake.models["embed"]}
    await gateway.look()
    answer = await gateway.chat("big")
    record = await explained(gateway, answer)
    assert record["dropped"] == {"local/smaller": "capability: no other local model can do chat"}


async def test_interrupted_answer_is_continued_by_a_smaller_model(gateway: Gateway, fake: FakeInference) -> None:
    fake.queue["big"] = [Answer(words=("Hello",), cut=True), Answer(refuse=Code.MODEL_FAILED)]
    answer = await gateway.chat("big", stream=True)
    assert answer.text.endswith("data: [DONE]\n\n")
    record = await explained(gateway, answer)
    assert record["chosen"] == {"local/smaller": "local/mid"}
    assert fake.seen_for("mid")[0].body["answer_so_far"]["content"] == "Hello"


async def test_tokens_are_counted_by_the_model_that_would_answer(gateway: Gateway, fake: FakeInference) -> None:
    """When no model fits, the first one still counts."""
    fake.counts |= {"mid": 11, "big": 22}
    body = {"model": "big", "messages": [{"role": "user", "content": "Hi"}]}
    await change(gateway, fake, "big", fits=False)
    answer = await gateway.client.post("/v1/messages/count_tokens", json=body)
    assert (answer.json(), answer.headers["x-headgate-model"]) == ({"input_tokens": 11}, "local/mid")
    for name in ("mid", "tiny", "tools", "new"):
        await change(gateway, fake, name, fits=False)
    answer = await gateway.client.post("/v1/messages/count_tokens", json=body)
    assert (answer.json(), answer.headers["x-headgate-model"]) == ({"input_tokens": 22}, "local/big")
