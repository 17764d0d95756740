"""How the tier is chosen: contexts, capabilities, memory, policy and the predicted wait, over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from inference.protocol import Code, ModelState, ModelStatus
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.fake_provider import FakeProvider
from tests.rigs.gateway_rig import CONFIG, Gateway
from tests.rigs.stack import until

pytestmark = pytest.mark.timeout(60)

CLOUD = """
providers:
  cloud: {kind: openai, api_key: fake-cloud-key, base_url: URL}
routes:
  demo: {chain: [local/demo, local/demo-mini, cloud/large]}
  pair: {chain: [local/demo, cloud/large], load_wait: 20s}
  home: {chain: [local/demo, cloud/large], cloud: never}
  vectors: {chain: [local/embed, local/other, cloud/embed, local/twin]}
  same: {chain: [local/embed, local/other], same_vectors: true}
  "*": {chain: ["local/*"]}
"""
LONG = "the water of the mill turns the wheel " * 40
"""1,520 bytes: close to 1,000 tokens together with a template."""


@pytest.fixture
async def gateway(tmp_path: Path, fake: FakeInference) -> AsyncIterator[Gateway]:
    async with Gateway(tmp_path, fake.url, CONFIG) as gateway:
        yield gateway


@pytest.fixture
async def cloudy(tmp_path: Path, fake: FakeInference) -> AsyncIterator[Gateway]:
    async with FakeProvider() as cloud, Gateway(tmp_path, fake.url, CLOUD.replace("URL", cloud.openai_url)) as gateway:
        yield gateway


def _set_status(fake: FakeInference, name: str, **more: Any) -> None:
    """Changes the status of a model."""
    fake.models[name] = replace(fake.models[name], **more)


async def _ask(gateway: Gateway, text: str = LONG, **more: Any) -> httpx2.Response:
    await gateway.look()
    return await gateway.chat(messages=[{"role": "user", "content": text}], **more)


async def _explained(gateway: Gateway, answer: httpx2.Response) -> dict[str, Any]:
    found: dict[str, Any] = (await gateway.admin("GET", f"/admin/requests/{answer.headers['x-request-id']}")).json()
    return found


# --- contexts ---------------------------------------------------------------------------------------------------------
async def test_prompt_too_long_for_the_first_candidate_goes_to_a_larger_context_without_an_attempt(
    gateway: Gateway, fake: FakeInference
) -> None:
    _set_status(fake, "demo", context_length=1000)
    fake.counts["demo"] = 1200
    answer = await _ask(gateway)
    assert (answer.json()["model"], answer.headers["x-headgate-reason"]) == ("demo-mini", "context_too_small")
    assert (answer.headers["x-headgate-attempts"], fake.seen_for("demo")) == ("1", [])
    record = await _explained(gateway, answer)
    assert LONG.strip() not in json.dumps(record)
    assert (record["needs"], record["max_tokens"]) == (["chat"], None)
    assert record["size_bytes"] > len(LONG)
    assert record["considered"]["local/demo"]["context_length"] == 1000
    assert "1200 tokens, and the model's context holds 1000" in record["dropped"]["local/demo"]
    assert record["considered"]["local/demo"]["prompt_tokens"] == 1200
    assert "prompt_tokens" not in record["considered"]["local/demo-mini"], "it fits in any case"
    assert [body["model"] for body in fake.counted] == ["demo"]
    await _ask(gateway)
    assert len(fake.counted) == 1, "the same prompt is counted once"


async def test_prompt_too_long_for_every_context_is_a_400_with_the_lengths(
    gateway: Gateway, fake: FakeInference
) -> None:
    _set_status(fake, "demo", context_length=1000)
    _set_status(fake, "demo-mini", context_length=1100)
    fake.counts |= {"demo": 1200, "demo-mini": 1150}
    answer = await _ask(gateway, max_tokens=5)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
    assert all(number in error["message"] for number in ("1200", "1000", "1150", "1100"))
    assert error["headgate"] == {"context_length": 1100, "prompt_tokens": 1150, "max_tokens": 5}
    assert fake.seen == []


async def test_prompts_are_counted_only_if_they_may_not_fit_and_a_larger_tier_exists(
    gateway: Gateway, fake: FakeInference
) -> None:
    fake.counts |= {"demo": 9000, "demo-mini": 9000}
    assert (await _ask(gateway)).headers["x-headgate-model"] == "local/demo"
    _set_status(fake, "demo", context_length=1000)
    _set_status(fake, "demo-mini", context_length=1000)
    assert (await _ask(gateway)).headers["x-headgate-model"] == "local/demo", "the model itself refuses if needed"
    assert (await _ask(gateway, model="demo-mini")).status_code == 200
    assert fake.counted == []


async def test_prompt_of_very_short_tokens_is_rejected_by_the_model_and_sent_to_the_next_candidate(
    gateway: Gateway, fake: FakeInference
) -> None:
    """The body is far from the context, so it is not counted."""
    _set_status(fake, "demo", context_length=1500)
    fake.answers["demo"] = Answer(refuse=Code.CONTEXT_LENGTH_EXCEEDED)
    answer = await _ask(gateway)
    assert (answer.headers["x-headgate-model"], answer.headers["x-headgate-attempts"]) == ("local/demo-mini", "2")
    assert answer.headers["x-headgate-reason"] == "context_length"
    assert fake.counted == []
    fake.answers["demo-mini"] = Answer(refuse=Code.CONTEXT_LENGTH_EXCEEDED)
    answer = await _ask(gateway)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    _set_status(fake, "demo", context_length=4096)
    answer = await _ask(gateway)
    assert (answer.status_code, answer.headers["x-headgate-attempts"]) == (400, "1"), "no other context is larger"


async def test_request_whose_answer_may_not_fit_goes_to_the_larger_context_first(
    gateway: Gateway, fake: FakeInference
) -> None:
    _set_status(fake, "demo", context_length=1000)
    fake.counts["demo"] = 900
    assert (await _ask(gateway, max_tokens=100)).headers["x-headgate-model"] == "local/demo"
    answer = await _ask(gateway, max_tokens=101)
    assert answer.headers["x-headgate-model"] == "local/demo-mini"
    assert answer.headers["x-headgate-reason"] == "little_room"
    fake.answers["demo-mini"] = Answer(refuse=Code.MODEL_FAILED)
    answer = await _ask(gateway, max_tokens=101)
    assert answer.headers["x-headgate-model"] == "local/demo", "the answer may end early"
    _set_status(fake, "demo-mini", context_length=1001, state=ModelState.READY)
    fake.counts["demo-mini"] = 950
    fake.seen.clear()
    assert (await _ask(gateway, max_tokens=101)).headers["x-headgate-model"] == "local/demo"
    assert fake.seen_for("demo-mini") == []
    _set_status(fake, "demo-mini", context_length=1051)
    fake.answers.clear()
    answer = await _ask(gateway, max_tokens=101)
    assert answer.headers["x-headgate-model"] == "local/demo-mini", "both prompts were counted"


async def test_max_tokens_beyond_the_context_drops_the_candidate(cloudy: Gateway, fake: FakeInference) -> None:
    _set_status(fake, "demo", context_length=1000)
    fake.counts["demo"] = 400
    assert (await _ask(cloudy, model="pair", max_tokens=900)).headers["x-headgate-model"] == "local/demo"
    answer = await _ask(cloudy, model="pair", max_tokens=1001)
    assert answer.headers["x-headgate-model"] == "cloud/large", "the model would refuse it"
    assert answer.headers["x-headgate-reason"] == "context_too_small"


async def test_missing_count_drops_no_candidate(gateway: Gateway, fake: FakeInference) -> None:
    _set_status(fake, "demo", context_length=1000)
    assert (await _ask(gateway)).headers["x-headgate-model"] == "local/demo"
    assert len(fake.counted) == 1


# --- capabilities -----------------------------------------------------------------------------------------------------
async def test_tier_that_cannot_serve_a_field_is_skipped_with_the_reason(cloudy: Gateway, fake: FakeInference) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    _set_status(fake, "demo-mini", capabilities=("chat", "completions", "tools"))
    answer = await _ask(cloudy, "x", tools=[tool])
    assert answer.headers["x-headgate-model"] == "local/demo-mini"
    assert "cannot do tools" in (await _explained(cloudy, answer))["dropped"]["local/demo"]
    answer = await cloudy.chat(messages=[{"role": "user", "content": image}])
    assert answer.headers["x-headgate-model"] == "cloud/large"
    for field, value in (("n", 17), ("prediction", {"type": "content", "content": "x"}), ("web_search_options", {})):
        answer = await _ask(cloudy, "x", **{field: value})
        assert answer.headers["x-headgate-model"] == "cloud/large", field
        assert (
            f"capability: {field} is not supported by this provider: "
            in (await _explained(cloudy, answer))["dropped"]["local/demo"]
        )
    _set_status(fake, "demo", capabilities=("completions",))
    _set_status(fake, "demo-mini", capabilities=("embeddings",))
    answer = await _ask(cloudy, "x", model="demo-mini")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    assert (await _ask(cloudy, "x")).headers["x-headgate-model"] == "cloud/large"
    assert all(seen.model == "demo-mini" for seen in fake.seen)


async def test_vectors_of_different_models_are_never_mixed(cloudy: Gateway, fake: FakeInference) -> None:
    for name in ("embed", "other"):
        fake.models[name] = ModelStatus(
            id=name,
            state=ModelState.READY,
            capabilities=("embeddings", "rerank"),
            aliases=("twin",) * (name == "embed"),
        )
    fake.answers["embed"] = Answer(refuse=Code.MODEL_FAILED)
    await cloudy.look()
    for path, body in (("embeddings", {"input": "x"}), ("rerank", {"query": "x", "documents": ["y"]})):
        answer = await cloudy.client.post(f"/v1/{path}", json={"model": "vectors", **body})
        record = await _explained(cloudy, answer)
        assert record["dropped"]["local/other"].startswith("other_vectors:")
        assert "local/twin" not in record["dropped"]
        assert fake.seen_for("other") == []
        fake.seen.clear()
    answer = await cloudy.client.post("/v1/embeddings", json={"model": "vectors", "input": "x"})
    assert answer.headers["x-headgate-model"] == "cloud/embed", "the same model elsewhere gives the same vectors"
    answer = await cloudy.client.post("/v1/embeddings", json={"model": "same", "input": "x"})
    assert answer.headers["x-headgate-model"] == "local/other", "the route says that the vectors are the same"


async def test_token_ids_are_not_sent_to_a_model_with_another_vocabulary(cloudy: Gateway, fake: FakeInference) -> None:
    fake.answers["demo"] = Answer(refuse=Code.MODEL_FAILED)
    answer = await _ask(cloudy, "x", logit_bias={"7": 100})
    assert (answer.status_code, answer.headers["x-headgate-attempts"]) == (503, "1")
    record = await _explained(cloudy, answer)
    assert all(record["dropped"][name].startswith("other_vocabulary:") for name in ("local/demo-mini", "cloud/large"))
    answer = await cloudy.client.post("/v1/completions", json={"model": "demo", "prompt": [7, 8]})
    assert answer.status_code == 503
    assert fake.seen_for("demo-mini") == []
    answer = await cloudy.client.post("/v1/completions", json={"model": "demo", "prompt": "seven"})
    assert answer.headers["x-headgate-model"] == "local/demo-mini"


# --- memory and policy ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "request_fields", [{"model": "home"}, {"model": "pair", "headers": {"x-headgate-policy": "local-only"}}]
)
async def test_local_only_request_gets_the_remaining_retry_after(
    cloudy: Gateway, fake: FakeInference, request_fields: dict[str, Any]
) -> None:
    _set_status(fake, "demo", state=ModelState.COLD, fits=False, reason="gpu-0 lacks 300 MiB", retry_after_seconds=41.5)
    answer = await _ask(cloudy, "x", **request_fields)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "42")
    assert "policy keeps this request local" in answer.json()["error"]["message"]
    assert (await _explained(cloudy, answer))["cloud_allowed"] is False
    _set_status(fake, "demo", state=ModelState.LOADING, fits=True, reason=None, load_seconds=27.2, queue_seconds=3.0)
    fake.answers["demo"] = Answer(refuse=Code.MODEL_LOADING)
    answer = await _ask(cloudy, "x", **request_fields)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "31"), "the rest of the load, and the queue"
    fake.answers["demo"] = Answer(refuse=Code.MODEL_LOADING, retry_after=50.0)
    answer = await _ask(cloudy, "x", **request_fields)
    assert answer.headers["retry-after"] == "50", "the value of the service is newer"
    assert answer.headers["x-headgate-tier"] == "none"


# --- the expected wait ------------------------------------------------------------------------------------------------
async def test_candidate_is_deferred_when_its_predicted_wait_is_too_long(cloudy: Gateway, fake: FakeInference) -> None:
    _set_status(fake, "demo", state=ModelState.COLD, fits=True, load_seconds=25.0, queue_seconds=0.0)
    answer = await _ask(cloudy, "x", model="pair")
    assert answer.headers["x-headgate-model"] == "cloud/large"
    assert answer.headers["x-headgate-reason"] == "predicted_too_slow"
    record = await _explained(cloudy, answer)
    assert "25 s to load" in record["dropped"]["local/demo"]
    assert "may keep a request waiting 20 s" in record["dropped"]["local/demo"]
    assert record["considered"]["local/demo"]["expected_seconds"] == 25
    assert fake.seen == []
    assert (await cloudy.breaker("local/demo"))["failures"] == 0
    assert (await _ask(cloudy, "x", model="home")).headers["x-headgate-model"] == "local/demo", (
        "no other candidate is allowed"
    )
    _set_status(fake, "demo", load_seconds=19.0)
    assert (await _ask(cloudy, "x", model="pair")).headers["x-headgate-model"] == "local/demo"
    _set_status(fake, "demo", load_seconds=None, queue_seconds=None)
    assert (await _ask(cloudy, "x", model="pair")).headers["x-headgate-model"] == "local/demo", "no prediction yet"


async def test_slow_candidate_is_tried_after_the_quicker_one_failed(gateway: Gateway, fake: FakeInference) -> None:
    gateway.write(CONFIG.replace("local/demo-mini]", "local/demo-mini], load_wait: 20s"))
    await gateway.runtime.reload()
    _set_status(fake, "demo", load_seconds=25.0, queue_seconds=0.0)
    assert (await _ask(gateway, "x")).headers["x-headgate-model"] == "local/demo", "no prediction for the other one"
    _set_status(fake, "demo-mini", load_seconds=0.0, queue_seconds=2.0)
    assert (await _ask(gateway, "x")).headers["x-headgate-model"] == "local/demo-mini"
    fake.answers["demo-mini"] = Answer(refuse=Code.MODEL_FAILED)
    answer = await _ask(gateway, "x")
    assert (answer.headers["x-headgate-model"], answer.headers["x-headgate-reason"]) == ("local/demo", "none")
    record = await _explained(gateway, answer)
    assert record["dropped"]["local/demo"].startswith("predicted_too_slow:")
    assert [tried["name"] for tried in record["attempts"]] == ["local/demo-mini", "local/demo"]


async def test_queue_longer_than_the_clients_timeout_defers_the_candidate(cloudy: Gateway, fake: FakeInference) -> None:
    _set_status(fake, "demo", load_seconds=0.0, queue_seconds=4.0, prefill_tokens_per_second=10.0)
    headers = {"x-stainless-read-timeout": "6"}
    assert (await _ask(cloudy, "x", model="pair")).headers["x-headgate-model"] == "local/demo"
    answer = await _ask(cloudy, "x", model="pair", headers=headers)
    assert answer.headers["x-headgate-model"] == "cloud/large"
    assert "4 s in the queue" in (await _explained(cloudy, answer))["dropped"]["local/demo"]
    _set_status(fake, "demo", queue_seconds=0.0)
    answer = await _ask(cloudy, model="pair", headers=headers)
    assert answer.headers["x-headgate-model"] == "cloud/large", "1,600 bytes are 40 s of reading"
    assert "to read about" in (await _explained(cloudy, answer))["dropped"]["local/demo"]


async def test_predicted_wait_includes_requests_that_the_gateway_has_just_sent(
    cloudy: Gateway, fake: FakeInference
) -> None:
    """The service reports its queue every two seconds; newer requests are counted by the gateway."""
    gate = asyncio.Event()
    _set_status(fake, "demo", parallel=1, load_seconds=0.0, queue_seconds=0.0, answer_seconds=9.0)
    fake.answers["demo"] = Answer(hold=gate)
    await cloudy.look()
    asking = []
    for number in range(1, 4):
        asking.append(asyncio.create_task(cloudy.chat("pair")))
        await until("it is running", lambda number=number: len(fake.seen) == number)
    spilled = await cloudy.chat("pair")
    assert spilled.headers["x-headgate-model"] == "cloud/large"
    urgent = asyncio.create_task(cloudy.chat("pair", headers={"x-headgate-priority": "high"}))
    await until("a request of high priority is not deferred", lambda: len(fake.seen) == 4)
    asking.append(urgent)
    assert "27 s in the queue" in (await _explained(cloudy, spilled))["dropped"]["local/demo"]
    gate.set()
    assert {(await answer).headers["x-headgate-model"] for answer in asking} == {"local/demo"}
    assert (await cloudy.chat("pair")).headers["x-headgate-model"] == "local/demo"
