"""Requests that reach a deadline: their status, and whether a breaker counts a failure."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from inference.protocol import Code, ModelState, ModelStatus
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.gateway_rig import CONFIG, Gateway
from tests.rigs.stack import until

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("timeout", ["0.001", "0.02", "0.05"])
async def test_tiny_client_timeout_is_a_504_at_any_tier(tmp_path: Path, fake: FakeInference, timeout: str) -> None:
    silent = Answer(words=(), stall=True)
    fake.answers = {"demo": silent, "demo-mini": silent}
    async with Gateway(tmp_path, fake.url) as gateway:
        for stream in (False, True) * 4:
            answer = await gateway.chat(stream=stream, headers={"x-stainless-read-timeout": timeout})
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded"), answer.text
            assert answer.headers["x-should-retry"] == "false"
            assert "the client's own timeout" in answer.json()["error"]["message"]
        for name in ("local", "local/demo", "local/demo-mini"):
            assert (await gateway.breaker(name))["failures"] == 0


async def test_deadline_exceeded_of_the_inference_service_is_a_504(tmp_path: Path, fake: FakeInference) -> None:
    fake.answers = {name: Answer(refuse=Code.DEADLINE_EXCEEDED) for name in ("demo", "demo-mini")}
    async with Gateway(tmp_path, fake.url) as gateway:
        answer = await gateway.chat()
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")


async def test_tiers_that_fail_within_the_timeout_are_a_503(tmp_path: Path, fake: FakeInference) -> None:
    fake.answers = {name: Answer(refuse=Code.MODEL_FAILED) for name in ("demo", "demo-mini")}
    async with Gateway(tmp_path, fake.url) as gateway:
        answer = await gateway.chat(headers={"x-stainless-read-timeout": "5"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_tier_available")


async def test_last_tier_may_load_longer_than_load_wait_without_a_failure(tmp_path: Path, fake: FakeInference) -> None:
    gate = asyncio.Event()
    fake.models["embed"] = ModelStatus(id="embed", state=ModelState.LOADING, capabilities=("embeddings",))
    fake.answers["embed"] = Answer(hold=gate)
    config = (
        CONFIG.replace('["local/*"]}', '["local/*"], load_wait: 100ms}')
        + "deadlines: {first_token: 100ms, total: 20s}\n"
    )
    async with Gateway(tmp_path, fake.url, config) as gateway:
        body = {"model": "embed", "input": "water"}
        embedding = asyncio.create_task(gateway.client.post("/v1/embeddings", json=body))
        await until("the service has the request", lambda: fake.seen)
        await asyncio.sleep(0.5)
        assert not embedding.done()
        gate.set()
        assert (await embedding).status_code == 200
        assert (await gateway.breaker("local/embed"))["failures"] == 0


async def test_embedding_spills_after_load_wait_without_a_failure(tmp_path: Path, fake: FakeInference) -> None:
    config = "routes: {embed: {chain: [local/slow, local/quick], load_wait: 100ms, same_vectors: true}}\n"
    for name in ("slow", "quick"):
        fake.models[name] = ModelStatus(id=name, state=ModelState.COLD, capabilities=("embeddings",))
    fake.answers["slow"] = Answer(hold=asyncio.Event())
    async with Gateway(tmp_path, fake.url, config) as gateway:
        answer = await gateway.client.post("/v1/embeddings", json={"model": "embed", "input": "water"})
        assert (answer.status_code, answer.headers["x-headgate-reason"]) == (200, "spilled")
        assert (await gateway.breaker("local/slow"))["failures"] == 0


async def test_client_timeout_includes_the_time_in_the_queue(tmp_path: Path, fake: FakeInference) -> None:
    gate = asyncio.Event()
    fake.answers["demo"] = Answer(hold=gate)
    async with Gateway(tmp_path, fake.url, CONFIG + "admission: {max_in_flight: 1}\n") as gateway:
        first = asyncio.create_task(gateway.chat())
        await until("the first is admitted", lambda: fake.seen)
        late = await gateway.chat(headers={"x-stainless-read-timeout": "0.2"})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert (late.headers["x-should-retry"], "retry-after" in late.headers) == ("false", False)
        gate.set()
        assert (await first).status_code == 200


async def test_model_that_still_loads_at_the_client_timeout_is_a_504(tmp_path: Path, fake: FakeInference) -> None:
    """The inference service may answer `model_loading` a moment before the gateway's own deadline."""
    fake.answers = {name: Answer(refuse=Code.MODEL_LOADING) for name in ("demo", "demo-mini")}
    async with Gateway(tmp_path, fake.url) as gateway:
        soon = await gateway.chat(headers={"x-stainless-read-timeout": "0.08"})
        assert (soon.status_code, soon.json()["error"]["code"]) == (504, "deadline_exceeded"), soon.text
        later = await gateway.chat(headers={"x-stainless-read-timeout": "20"})
        assert (later.status_code, later.json()["error"]["code"]) == (503, "no_tier_available"), later.text
