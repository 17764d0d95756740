"""Deadlines that ended as somebody else's fault: a tiny time-out as 503, a loading embedding model as a failure."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from inference.protocol import Code, ModelState, ModelStatus
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.gateway_rig import CONFIG, Gateway
from tests.rigs.stack import until

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("patience", ["0.001", "0.02", "0.05"])
async def test_a_tiny_time_out_of_the_caller_is_a_504_whichever_tier_it_met(
    tmp_path: Path, fake: FakeInference, patience: str
) -> None:
    """The first tier was left when its share was over, the second dropped because no time was left: that was a 503."""
    silent = Answer(words=(), stall=True)
    fake.answers = {"demo": silent, "demo-mini": silent}
    async with Gateway(tmp_path, fake.url) as gateway:
        for stream in (False, True) * 4:
            answer = await gateway.chat(stream=stream, headers={"x-stainless-read-timeout": patience})
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded"), answer.text
            assert answer.headers["x-should-retry"] == "false"
            assert "the client's own timeout" in answer.json()["error"]["message"]
        for name in ("local", "local/demo", "local/demo-mini"):
            assert (await gateway.breaker(name))["failures"] == 0


async def test_the_services_word_that_our_time_was_too_short_is_a_504(tmp_path: Path, fake: FakeInference) -> None:
    fake.answers = {name: Answer(refuse=Code.DEADLINE_EXCEEDED) for name in ("demo", "demo-mini")}
    async with Gateway(tmp_path, fake.url) as gateway:
        answer = await gateway.chat()
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")


async def test_tiers_that_fail_in_time_are_a_503(tmp_path: Path, fake: FakeInference) -> None:
    fake.answers = {name: Answer(refuse=Code.MODEL_FAILED) for name in ("demo", "demo-mini")}
    async with Gateway(tmp_path, fake.url) as gateway:
        answer = await gateway.chat(headers={"x-stainless-read-timeout": "5"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_tier_available")


async def test_an_embedding_model_that_loads_longer_than_load_wait_is_waited_for_and_trips_nothing(
    tmp_path: Path, fake: FakeInference
) -> None:
    """The last tier was given up after load_wait + first_token, as a failure, though all the time was its own."""
    gate = asyncio.Event()
    fake.models["embed"] = ModelStatus(id="embed", state=ModelState.LOADING, capabilities=("embeddings",))
    fake.answers["embed"] = Answer(hold=gate)
    config = (
        CONFIG.replace('["local/*"]}', '["local/*"], load_wait: 100ms}')
        + "deadlines: {first_token: 100ms, total: 20s}\n"
    )
    async with Gateway(tmp_path, fake.url, config) as gateway:
        body = {"model": "embed", "input": "water"}
        asking = asyncio.create_task(gateway.client.post("/v1/embeddings", json=body))
        await until("the service was asked", lambda: fake.seen)
        await asyncio.sleep(0.5)
        assert not asking.done()
        gate.set()
        assert (await asking).status_code == 200
        assert (await gateway.breaker("local/embed"))["failures"] == 0


async def test_an_embedding_spills_after_load_wait_without_blame(tmp_path: Path, fake: FakeInference) -> None:
    config = "routes: {embed: {chain: [local/slow, local/quick], load_wait: 100ms, same_vectors: true}}\n"
    for name in ("slow", "quick"):
        fake.models[name] = ModelStatus(id=name, state=ModelState.COLD, capabilities=("embeddings",))
    fake.answers["slow"] = Answer(hold=asyncio.Event())
    async with Gateway(tmp_path, fake.url, config) as gateway:
        answer = await gateway.client.post("/v1/embeddings", json={"model": "embed", "input": "water"})
        assert (answer.status_code, answer.headers["x-headgate-reason"]) == (200, "spilled")
        assert (await gateway.breaker("local/slow"))["failures"] == 0


async def test_waiting_at_the_door_is_part_of_the_callers_own_time_out(tmp_path: Path, fake: FakeInference) -> None:
    """A caller with a short time-out was left in the queue for the whole `queue_timeout`."""
    gate = asyncio.Event()
    fake.answers["demo"] = Answer(hold=gate)
    async with Gateway(tmp_path, fake.url, CONFIG + "admission: {max_in_flight: 1}\n") as gateway:
        first = asyncio.create_task(gateway.chat())
        await until("the first is inside", lambda: fake.seen)
        late = await gateway.chat(headers={"x-stainless-read-timeout": "0.2"})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert (late.headers["x-should-retry"], "retry-after" in late.headers) == ("false", False)
        gate.set()
        assert (await first).status_code == 200


async def test_a_model_that_still_loads_when_the_callers_time_ends_is_a_504(
    tmp_path: Path, fake: FakeInference
) -> None:
    """The service's clock ended a moment before ours, and its `model_loading` was a 503."""
    fake.answers = {name: Answer(refuse=Code.MODEL_LOADING) for name in ("demo", "demo-mini")}
    async with Gateway(tmp_path, fake.url) as gateway:
        soon = await gateway.chat(headers={"x-stainless-read-timeout": "0.08"})
        assert (soon.status_code, soon.json()["error"]["code"]) == (504, "deadline_exceeded"), soon.text
        later = await gateway.chat(headers={"x-stainless-read-timeout": "20"})
        assert (later.status_code, later.json()["error"]["code"]) == (503, "no_tier_available"), later.text
