"""The chain over real sockets with a fake service: commit, fallback, breakers, deadlines, ends of streams."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.breaker.permits import BreakerState
from gateway.inference_nodes import Observer
from inference.protocol import Code, ModelState, ModelStatus, ReplicaStatus
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.full_backlog import full_backlog
from tests.rigs.gateway_rig import CONFIG, MESSAGES, Gateway
from tests.rigs.stack import until

pytestmark = pytest.mark.timeout(60)

FAST = CONFIG + "deadlines: {connect: 1s, first_token: 800ms, inter_token: 600ms, total: 8s}\nbreaker: {open: 500ms}\n"


@pytest.fixture
async def gateway(tmp_path: Path, fake: FakeInference) -> AsyncIterator[Gateway]:
    async with Gateway(tmp_path, fake.url, FAST) as gateway:
        yield gateway


@pytest.fixture
async def without_resume(tmp_path: Path, fake: FakeInference) -> AsyncIterator[Gateway]:
    """A gateway whose routes do not resume."""
    async with Gateway(tmp_path, fake.url, FAST.replace("demo-mini]}", "demo-mini], resume: off}")) as gateway:
        yield gateway


@pytest.fixture
async def patient(tmp_path: Path, fake: FakeInference) -> AsyncIterator[Gateway]:
    """A gateway with quick breakers and long deadlines."""
    async with Gateway(tmp_path, fake.url, CONFIG + "breaker: {open: 500ms}\n") as gateway:
        yield gateway


def _text(stream: str) -> str:
    """The text of an SSE stream."""
    chunks = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk.get("choices", []))


def _error_of(stream: str) -> dict[str, Any]:
    """The error frame at the end of a stream."""
    frames = [frame for frame in stream.split("\n\n") if frame]
    error: dict[str, Any] = json.loads(frames[-1].removeprefix("data: "))["error"]
    return error


async def _lines(answer: httpx2.Response) -> list[str]:
    return [line async for line in answer.aiter_lines() if line]


# --- answers ----------------------------------------------------------------------------------------------------------
async def test_first_candidate_answers_whole_and_streamed(gateway: Gateway) -> None:
    whole = await gateway.chat()
    assert whole.status_code == 200
    assert whole.json()["choices"][0]["message"]["content"] == "Hello there!"
    assert whole.json()["usage"]["completion_tokens"] == 3
    assert (whole.headers["x-headgate-tier"], whole.headers["x-headgate-model"]) == ("local", "local/demo")
    assert (whole.headers["x-headgate-attempts"], whole.headers["x-headgate-reason"]) == ("1", "none")
    streamed = await gateway.chat(stream=True)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert _text(streamed.text) == "Hello there!"
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert '"usage"' not in streamed.text
    with_usage = await gateway.chat(stream=True, stream_options={"include_usage": True})
    assert json.loads(with_usage.text.split("\n\n")[-3].removeprefix("data: "))["usage"]["completion_tokens"] == 3


async def test_local_hop_is_a_stream_with_token_tenant_and_priority(gateway: Gateway, fake: FakeInference) -> None:
    await gateway.chat(headers={"x-request-id": "mine-1", "x-headgate-priority": "low", "x-headgate-kv": "pin:60s"})
    seen = fake.seen[0]
    assert seen.body["stream"] is True
    assert seen.body["stream_options"] == {"include_usage": True, "prompt_usage": True}
    assert seen.headers["authorization"] == "Bearer token"
    assert seen.headers["x-request-id"] == "mine-1"
    assert (seen.headers["x-headgate-priority"], seen.headers["x-headgate-kv"]) == ("low", "pin:60s")
    assert len(seen.headers["x-headgate-tenant"]) == 32
    assert 0 < int(seen.headers["x-headgate-deadline-ms"]) <= 8000


async def test_conversation_key_is_sent_for_models_with_replicas(gateway: Gateway, fake: FakeInference) -> None:
    """It is the same for each turn."""
    await gateway.chat()
    assert "x-headgate-conversation" not in fake.seen[0].headers
    replicas = (ReplicaStatus("demo", ModelState.READY), ReplicaStatus("demo@2", ModelState.READY))
    fake.models["demo"] = replace(fake.models["demo"], replicas=replicas)
    await gateway.runtime.view.refresh()
    messages = [{"role": "user", "content": "Hello!"}]
    await gateway.chat(messages=messages)
    await gateway.chat(messages=[*messages, {"role": "assistant", "content": "Hi."}, *messages])
    keys = [seen.headers["x-headgate-conversation"] for seen in fake.seen[1:]]
    assert (len(keys), len(set(keys)), len(keys[0])) == (2, 1, 16)


async def test_text_completions_and_embeddings_are_served(gateway: Gateway, fake: FakeInference) -> None:
    answer = await gateway.client.post("/v1/completions", json={"model": "demo-mini", "prompt": "Once"})
    assert answer.json()["object"] == "text_completion"
    assert answer.json()["choices"][0]["text"] == "Hello there!"
    fake.models["embed"] = ModelStatus(id="embed", state=ModelState.READY, capabilities=("embeddings",))
    answer = await gateway.client.post("/v1/embeddings", json={"model": "embed", "input": "water"})
    assert answer.json()["data"][0]["embedding"] == [0.5, 0.25]
    assert answer.headers["x-headgate-model"] == "local/embed"


# --- fallback before the first token ----------------------------------------------------------------------------------
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer(refuse=Code.MEMORY_LIMIT_EXCEEDED), "memory_limit_exceeded"),
        (Answer(refuse=Code.MODEL_LOADING), "model_loading"),
        (Answer(refuse=Code.QUEUE_FULL, retry_after=3), "queue_full"),
        (Answer(status=500), "status_500"),
        (Answer(words=(), error=Code.DEVICE_LOST), "device_lost"),
        (Answer(words=(), cut=True), "read"),
        (Answer(words=(), garbage=b"data: {half\n\n"), "malformed"),
        (Answer(words=(), finish=None), "empty"),
        (Answer(stall_before_headers=True), "timeout"),
        (Answer(words=(), stall=True), "timeout"),
        (Answer(raw=b""), "empty"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_failure_before_the_first_token_is_answered_by_the_next_tier(
    gateway: Gateway, fake: FakeInference, answer: Answer, reason: str, stream: bool
) -> None:
    fake.answers["demo"] = answer
    got = await gateway.chat(stream=stream)
    assert got.status_code == 200
    assert (got.headers["x-headgate-tier"], got.headers["x-headgate-model"]) == ("local-fallback", "local/demo-mini")
    assert (got.headers["x-headgate-attempts"], got.headers["x-headgate-reason"]) == ("2", reason)
    text = _text(got.text) if stream else got.json()["choices"][0]["message"]["content"]
    assert text == "Hello there!"


async def test_incomplete_whole_answer_is_replaced_by_the_next_tier(gateway: Gateway, fake: FakeInference) -> None:
    fake.answers["demo"] = Answer(words=("half ",), cut=True)
    answer = await gateway.chat()
    assert answer.json()["choices"][0]["message"]["content"] == "Hello there!"
    assert answer.json()["model"] == "demo-mini"


async def test_request_that_no_model_can_serve_is_refused(gateway: Gateway, fake: FakeInference) -> None:
    content = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    answer = await gateway.chat(messages=[{"role": "user", "content": content}])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert "vision" in answer.json()["error"]["message"]
    assert fake.seen == []


@pytest.mark.parametrize("code", [Code.CONTEXT_LENGTH_EXCEEDED, Code.POISON_REQUEST, Code.INVALID_REQUEST])
@pytest.mark.parametrize("stream", [False, True])
async def test_4xx_of_the_request_is_passed_on_without_a_fallback(
    gateway: Gateway, fake: FakeInference, code: Code, stream: bool
) -> None:
    fake.answers["demo"] = Answer(refuse=code, message=f"{code}: 9000 tokens, 2048 fit")
    answer = await gateway.chat(stream=stream)
    error = answer.json()["error"]
    assert answer.status_code in (400, 422)
    assert (error["code"], error["message"]) == (code, f"{code}: 9000 tokens, 2048 fit")
    assert answer.headers["x-should-retry"] == "false"
    assert (answer.headers["x-headgate-tier"], answer.headers["x-headgate-attempts"]) == ("none", "1")
    assert fake.seen_for("demo-mini") == []
    assert (await gateway.breaker("local/demo"))["failures"] == 0


async def test_unsupported_parameter_is_tried_elsewhere_and_then_refused(gateway: Gateway, fake: FakeInference) -> None:
    fake.answers["demo"] = Answer(refuse=Code.UNSUPPORTED_PARAMETER, message="no grammar here")
    assert (await gateway.chat()).json()["model"] == "demo-mini"
    fake.answers["demo-mini"] = Answer(refuse=Code.UNSUPPORTED_PARAMETER, message="nor here")
    answer = await gateway.chat()
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "no grammar here")


async def test_unknown_model_is_a_404(gateway: Gateway, fake: FakeInference) -> None:
    answer = await gateway.chat("demo-minni")
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")
    assert "did you mean 'demo-mini'?" in answer.json()["error"]["message"]
    assert fake.seen == []
    fake.models["fresh"] = ModelStatus(id="fresh", state=ModelState.COLD)
    assert (await gateway.chat("fresh")).status_code == 200


async def test_unknown_model_in_a_configured_chain_is_not_a_client_error(gateway: Gateway, fake: FakeInference) -> None:
    del fake.models["demo"]
    answer = await gateway.chat()
    assert (answer.json()["model"], answer.headers["x-headgate-reason"]) == ("demo-mini", "model_not_found")


# --- no answer --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("retry_after", "attempts"), [(1, 3), (20, 2), (None, 2)])
@pytest.mark.parametrize("stream", [False, True])
async def test_model_that_lost_its_device_is_tried_again_last_if_it_is_back_soon(
    gateway: Gateway, fake: FakeInference, stream: bool, retry_after: float | None, attempts: int
) -> None:
    """Both models were on the device. The inference service loads the first one on another device."""
    lost = Answer(refuse=Code.DEVICE_LOST, retry_after=retry_after)
    fake.queue = {"demo": [lost], "demo-mini": [lost]}
    answer = await gateway.chat(stream=stream)
    assert answer.headers["x-headgate-attempts"] == str(attempts)
    assert answer.status_code == (200 if attempts == 3 else 503)
    if attempts == 3:
        assert (answer.headers["x-headgate-model"], answer.headers["x-headgate-tier"]) == ("local/demo", "local")


async def test_503_names_every_candidate_and_the_retry_after(gateway: Gateway, fake: FakeInference) -> None:
    fake.answers["demo"] = Answer(refuse=Code.MEMORY_LIMIT_EXCEEDED, message="needs 5 MiB, has 3")
    fake.answers["demo-mini"] = Answer(refuse=Code.DEVICE_LOST, retry_after=20)
    answer = await gateway.chat()
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (503, "no_tier_available")
    assert "local/demo: memory_limit_exceeded: needs 5 MiB, has 3; local/demo-mini: device_lost" in error["message"]
    assert answer.headers["retry-after"] == "1"
    assert answer.headers["x-headgate-attempts"] == "2"
    fake.answers["demo"] = Answer(refuse=Code.QUEUE_FULL, retry_after=7)
    assert (await gateway.chat()).headers["retry-after"] == "7"


async def test_candidate_with_a_full_queue_is_skipped_during_its_retry_after(
    gateway: Gateway, fake: FakeInference
) -> None:
    fake.queue["demo"] = [Answer(refuse=Code.QUEUE_FULL, retry_after=1, full_for=("normal",))]
    assert (await gateway.chat()).json()["model"] == "demo-mini"
    answer = await gateway.chat()
    assert (answer.json()["model"], answer.headers["x-headgate-reason"]) == ("demo-mini", "held")
    assert (await gateway.breaker("local/demo"))["failures"] == 0


async def test_embedding_request_ends_at_its_deadline_without_a_failure(tmp_path: Path, fake: FakeInference) -> None:
    fake.models["embed"] = ModelStatus(id="embed", state=ModelState.READY, capabilities=("embeddings",))
    fake.answers["embed"] = Answer(hold=asyncio.Event())
    config = CONFIG + "deadlines: {connect: 100ms, total: 300ms}\n"
    async with Gateway(tmp_path, fake.url, config) as gateway:
        body = {"model": "embed", "input": "x"}
        answer = await gateway.client.post("/v1/embeddings", json=body)
        assert (answer.status_code, answer.headers["x-should-retry"]) == (504, "false")
        headers = {"x-stainless-read-timeout": "0.2"}
        answer = await gateway.client.post("/v1/embeddings", json=body, headers=headers)
        assert answer.status_code == 504
        assert (await gateway.breaker("local/embed"))["failures"] == 0
        await asyncio.wait_for(fake.seen[-1].closed.wait(), 2)


async def test_whole_answer_with_a_malformed_chunk_is_replaced(gateway: Gateway, fake: FakeInference) -> None:
    fake.answers["demo"] = Answer(garbage=b'data: {"choices": 7}\n\n')
    answer = await gateway.chat()
    assert (answer.json()["model"], answer.headers["x-headgate-reason"]) == ("demo-mini", "malformed")


# --- breakers ---------------------------------------------------------------------------------------------------------
async def test_five_failures_open_the_breaker_and_one_probe_closes_it(patient: Gateway, fake: FakeInference) -> None:
    fake.answers["demo"] = Answer(refuse=Code.MEMORY_LIMIT_EXCEEDED)
    for _ in range(5):
        assert (await patient.chat()).json()["model"] == "demo-mini"
    assert (await patient.breaker("local/demo"))["state"] == "open"
    answer = await patient.chat()
    assert (answer.headers["x-headgate-reason"], answer.headers["x-headgate-attempts"]) == ("breaker_open", "1")
    assert len(fake.seen_for("demo")) == 5
    gate = asyncio.Event()
    fake.answers["demo"] = Answer(hold=gate)
    await until("the open period is over", lambda: patient.runtime.breakers.open_for("local", "demo") is None)
    assert (await patient.breaker("local/demo"))["state"] == "half-open"
    metrics = (await patient.client.get("/metrics")).text.splitlines()
    assert 'gateway_breaker_state{model="demo",node="",provider="local"} 1.0' in metrics
    clients = [asyncio.create_task(patient.chat()) for _ in range(32)]
    await until("31 were answered elsewhere", lambda: sum(client.done() for client in clients) == 31)
    assert len(fake.seen_for("demo")) == 6
    assert (await patient.breaker("local/demo"))["state"] == "half-open"
    gate.set()
    answers = [client.result().json()["model"] for client in clients if client.done()] + [
        (await client).json()["model"] for client in clients if not client.done()
    ]
    assert sorted(answers) == ["demo"] + ["demo-mini"] * 31
    assert (await patient.breaker("local/demo"))["state"] == "closed"
    assert (await patient.chat()).json()["model"] == "demo"


async def test_dead_service_opens_the_breaker_and_a_probe_closes_it(gateway: Gateway, fake: FakeInference) -> None:
    await gateway.chat()
    await fake.stop()
    answers = [await gateway.chat() for _ in range(4)]
    assert {answer.status_code for answer in answers} == {503}
    assert answers[0].headers["x-headgate-attempts"] == "2"
    assert answers[-1].headers["x-headgate-attempts"] == "0", "open after three failures, or earlier because of probes"
    assert answers[-1].headers["retry-after"] == "1"
    await fake.start()
    async with asyncio.timeout(10.0):
        while (answer := await gateway.chat()).status_code == 503:  # the open period, then a probe
            await asyncio.sleep(0.02)
    assert answer.json()["model"] == "demo"
    assert (await gateway.breaker("local"))["state"] == "closed"


async def test_one_failed_request_is_enough_to_detect_a_dead_service(tmp_path: Path, fake: FakeInference) -> None:
    async with Gateway(tmp_path, fake.url, 'routes: {"*": {chain: ["local/*"]}}') as gateway:
        await gateway.chat()
        await fake.stop()
        assert (await gateway.chat()).headers["x-headgate-attempts"] == "1"

        async def opened() -> bool:
            return bool((await gateway.breaker("local"))["state"] == "open")

        await until("probes opened the breaker", opened)
        entry = await gateway.breaker("local")
        assert (entry["source"], entry["last_probe"]) == ("probes", "GET /readyz: connect: connection refused")
        assert (await gateway.chat()).headers["x-headgate-attempts"] == "0"
        await fake.start()
        await until("the breaker may close", lambda: gateway.runtime.breakers.open_for("local", "demo") is None)
        answers = await asyncio.gather(*(gateway.chat() for _ in range(50)))
        assert len(fake.seen) == 1 + [answer.status_code for answer in answers].count(200)
        assert (await gateway.breaker("local"))["state"] == "closed"
        metrics = (await gateway.client.get("/metrics")).text
        assert 'gateway_probes_total{node="",purpose="confirm",result="bad"}' in metrics


async def test_probe_finds_a_recovered_model(tmp_path: Path, fake: FakeInference) -> None:
    async with Gateway(tmp_path, fake.url, CONFIG + "breaker: {open: 600s}\n") as gateway:
        await gateway.look()
        fake.answers["demo"] = Answer(refuse=Code.MODEL_FAILED)
        for _ in range(5):
            await gateway.chat()
        assert (await gateway.breaker("local/demo"))["state"] == "open"
        await until("a probe requested a token", lambda: fake.probes)
        del fake.answers["demo"]
        await until("the breaker may close", lambda: gateway.runtime.breakers.open_for("local", "demo") is None)
        assert (await gateway.chat()).json()["model"] == "demo"
        assert len(fake.seen_for("demo")) == 6


async def test_recovered_service_is_probed_early(tmp_path: Path, fake: FakeInference) -> None:
    async with Gateway(tmp_path, fake.url, CONFIG + "breaker: {open: 60s}\n") as gateway:
        await fake.stop()
        for _ in range(3):
            await gateway.chat()
        assert (await gateway.breaker("local"))["state"] == "open"
        await until("the service is unreachable", lambda: gateway.runtime.view.reachable is False)
        await fake.start()
        await until("the service is reachable", lambda: gateway.runtime.view.reachable)
        answers = await asyncio.gather(*(gateway.chat() for _ in range(8)))
        assert [answer.status_code for answer in answers].count(200) >= 1
        assert (await gateway.breaker("local"))["state"] == "closed"


async def test_ramp_sends_most_requests_elsewhere_and_rejects_none(
    patient: Gateway, fake: FakeInference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.breaker.permits.RAMP_STEP_SECONDS", 600.0)
    monkeypatch.setattr("gateway.breaker.permits.RAMP_SECONDS", 600.0)
    fake.queue["demo"] = [Answer(refuse=Code.MODEL_FAILED)] * 5
    for _ in range(5):
        await patient.chat()

    async def recovered() -> bool:  # not while a probe of the gateway itself has the only permit
        return bool((await patient.chat()).json()["model"] == "demo")

    await until("the model answers again", recovered)
    elsewhere = len(fake.seen_for("demo-mini"))
    gate = asyncio.Event()
    fake.answers["demo"] = Answer(hold=gate)
    clients = [asyncio.create_task(patient.chat()) for _ in range(30)]
    await until("most were answered elsewhere", lambda: sum(client.done() for client in clients) == 28)
    fake.answers["demo-mini"] = Answer(status=500)
    stubborn = asyncio.create_task(patient.chat())
    await until("another model was tried first", lambda: len(fake.seen_for("demo-mini")) == elsewhere + 28 + 1)
    gate.set()
    answers = [await client for client in clients]
    assert {answer.status_code for answer in answers} == {200}
    spilled = {answer.headers["x-headgate-reason"] for answer in answers if answer.json()["model"] == "demo-mini"}
    assert spilled == {"recovering"}
    assert ((await stubborn).json()["model"], (await stubborn).headers["x-headgate-reason"]) == ("demo", "none")


async def test_failed_model_is_tried_last(patient: Gateway, fake: FakeInference) -> None:
    await patient.look()
    fake.models["demo"] = replace(fake.models["demo"], state=ModelState.FAILED, retry_after_seconds=60.0)
    await patient.look()
    answer = await patient.chat()
    assert (answer.json()["model"], answer.headers["x-headgate-reason"]) == ("demo-mini", "unhealthy")
    record = (await patient.admin("GET", f"/admin/requests/{answer.headers['x-request-id']}")).json()
    assert record["dropped"] == {"local/demo": "unhealthy: the model failed: no reason given"}
    fake.answers["demo-mini"] = Answer(refuse=Code.MODEL_FAILED)
    answer = await patient.chat()
    assert (answer.json()["model"], answer.headers["x-headgate-attempts"]) == ("demo", "2")


async def test_events_of_the_service_take_effect_before_the_next_poll(
    tmp_path: Path, fake: FakeInference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.providers.local.inference_snapshot.POLL_SECONDS", 600.0)
    monkeypatch.setattr("gateway.breaker.probe_schedule.MIN_PACE_SECONDS", 300.0)
    async with Gateway(tmp_path, fake.url, CONFIG + "breaker: {open: 600s}\n") as gateway:
        view, demo = gateway.runtime.view, fake.models["demo"]
        await until("the gateway listens", lambda: fake.listeners)
        fake.tell("model", {"model": replace(demo, state=ModelState.FAILED, retry_after_seconds=60.0).to_json()})
        await until("the event arrived", lambda: view.likely_failure("demo"))
        answer = await gateway.chat()
        assert (answer.json()["model"], answer.headers["x-headgate-reason"]) == ("demo-mini", "unhealthy")
        fake.answers["demo"] = fake.answers["demo-mini"] = Answer(refuse=Code.MODEL_FAILED)
        for _ in range(5):
            await gateway.chat()
        assert (await gateway.breaker("local/demo"))["state"] == "open"
        fake.answers.clear()
        monkeypatch.undo()
        fake.tell("model", {"model": demo.to_json()})
        await until("the breaker may close", lambda: gateway.runtime.breakers.open_for("local", "demo") is None)
        assert (await gateway.chat()).json()["model"] == "demo"


async def test_open_breaker_stays_open_across_a_restart(tmp_path: Path, fake: FakeInference) -> None:
    fake.answers["demo"] = Answer(refuse=Code.MODEL_FAILED)
    config = CONFIG + "breaker: {open: 600s}\n"
    async with Gateway(tmp_path, fake.url, config) as gateway:
        for _ in range(5):
            await gateway.chat()
    async with Gateway(tmp_path, fake.url, config) as gateway:
        entry = await gateway.breaker("local/demo")
        assert (entry["state"], entry["source"], entry["retry_after"] > 500) == ("open", "restart", True)
        assert (await gateway.chat()).headers["x-headgate-reason"] == "breaker_open"
    assert len(fake.seen_for("demo")) == 5


class _SlowDisk(ThreadPoolExecutor):
    """Threads in which each call takes longer than the first answer of an inference service."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        return super().submit(lambda: (time.sleep(0.05), fn(*args, **kwargs))[1])


async def test_open_breakers_are_restored_before_the_first_contact_with_the_service(
    tmp_path: Path, fake: FakeInference
) -> None:
    """The state from before a restart does not replace what the gateway has seen since its start."""
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "breakers.json").write_text(
        json.dumps({"format": 1, "written": time.time(), "breakers": [["local", "demo", time.time() + 600]]})
    )
    runtime = Gateway(tmp_path, fake.url).runtime
    contacts: list[Mapping[str, BreakerState]] = []

    class Contacts(Observer):
        def on_reachable(self, node: str, is_reachable: bool) -> None:
            contacts.append(runtime.breakers.states())

    runtime.observer = Contacts()
    asyncio.get_running_loop().set_default_executor(_SlowDisk())
    await runtime.start()
    await until("the service was reached", lambda: contacts)
    await runtime.stop()
    assert contacts[0] == {"local/demo": BreakerState.OPEN}


async def test_gateway_is_ready_once_it_has_reached_the_inference_service_and_stays_ready_without_it(
    tmp_path: Path, fake: FakeInference
) -> None:
    await fake.stop()
    async with Gateway(tmp_path, fake.url) as gateway:
        await until("the service is unreachable", lambda: gateway.runtime.view.reachable is False)
        answer = await gateway.client.get("/readyz")
        assert (answer.status_code, answer.json()) == (503, {"status": "starting"})
        await fake.start()
        await until("the gateway is ready", lambda: gateway.runtime.is_ready)
        await fake.stop()
        await until("the service is unreachable", lambda: gateway.runtime.view.reachable is False)
        assert (await gateway.client.get("/readyz")).status_code == 200


async def test_breaker_can_be_reset_by_an_operator(gateway: Gateway, fake: FakeInference) -> None:
    fake.queue["demo"] = [Answer(status=500)] * 5
    for _ in range(5):
        await gateway.chat()
    assert (await gateway.breaker("local/demo"))["state"] == "open"
    answer = await gateway.admin("POST", "/admin/breakers/local/demo/reset")
    assert answer.json() == {"name": "local/demo", "state": "closed"}
    assert (await gateway.chat()).json()["model"] == "demo"
    assert (await gateway.admin("POST", "/admin/breakers/local/nope/reset")).status_code == 404


# --- commit and ends of streams ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (Answer(words=("one ", "two "), cut=True), "model_failed"),
        (Answer(words=("one ", "two "), finish=None), "model_failed"),
        (Answer(words=("one ", "two "), finish=None, done=False), "model_failed"),
        (Answer(words=("one ", "two "), stall=True), "deadline_exceeded"),
        (Answer(words=("one ", "two "), error=Code.DEVICE_LOST), "device_lost"),
        (Answer(words=("one ", "two "), garbage=b"data: oops\n\n"), "model_failed"),
    ],
    ids=["cut", "no finish", "no finish, no DONE", "stall", "error frame", "garbage"],
)
async def test_failure_after_the_first_token_ends_in_an_error_frame_without_done(
    without_resume: Gateway, fake: FakeInference, answer: Answer, code: str
) -> None:
    """On a route that does not resume."""
    fake.answers["demo"] = answer
    got = await without_resume.chat(stream=True)
    assert got.status_code == 200
    assert _text(got.text) == "one two "
    assert "[DONE]" not in got.text
    assert _error_of(got.text)["code"] == code
    assert fake.seen_for("demo-mini") == []
    breaker = "local" if code == "model_failed" and answer.cut else "local/demo"
    counted = (await without_resume.breaker(breaker))["failures"]
    assert counted == 1 or answer.finish is None


async def test_status_is_sent_with_the_first_token(patient: Gateway, fake: FakeInference) -> None:
    gate = asyncio.Event()
    fake.answers["demo"] = Answer(comments=1, hold=gate)
    request = patient.client.build_request(
        "POST", "/v1/chat/completions", json={"model": "demo", "messages": MESSAGES, "stream": True}
    )
    sending = asyncio.create_task(patient.client.send(request, stream=True))
    await until("the service has the request", lambda: fake.seen)
    await asyncio.sleep(0.1)
    assert not sending.done()
    gate.set()
    answer = await sending
    lines = await _lines(answer)
    assert not any(line.startswith(":") for line in lines), "comments of earlier tiers are not forwarded"
    assert lines[-1] == "data: [DONE]"


async def test_progress_comments_of_the_last_tier_are_forwarded_after_a_delay(
    gateway: Gateway, fake: FakeInference
) -> None:
    gate = asyncio.Event()
    fake.answers["demo-mini"] = Answer(comments=8, pause=0.2, hold=gate)
    began = asyncio.get_running_loop().time()
    async with gateway.client.stream(
        "POST",
        "/v1/chat/completions",
        json={"model": "demo-mini", "messages": MESSAGES, "stream": True},
        headers={"x-stainless-read-timeout": "3"},
    ) as answer:
        assert asyncio.get_running_loop().time() - began > 0.4, "early comments are not forwarded"
        lines = []
        async with asyncio.timeout(10):
            async for line in answer.aiter_lines():
                lines.append(line)
                gate.set()  # so progress arrived before the first content
    assert answer.status_code == 200
    assert lines[0].startswith(": headgate loading")
    assert [line for line in lines if line][-1] == "data: [DONE]"


async def test_slow_load_with_progress_is_no_failure(gateway: Gateway, fake: FakeInference) -> None:
    fake.answers["demo"] = Answer(comments=8, pause=0.2)  # 1.6 s, twice the longest allowed silence
    answer = await gateway.chat()
    assert (answer.json()["model"], answer.headers["x-headgate-attempts"]) == ("demo", "1")
    assert (await gateway.breaker("local/demo"))["failures"] == 0


async def test_long_load_spills_to_the_next_candidate_without_a_failure(tmp_path: Path, fake: FakeInference) -> None:
    config = FAST.replace("demo-mini]}", "demo-mini], load_wait: 500ms}")
    fake.answers["demo"] = Answer(comments=50, pause=0.1)
    async with Gateway(tmp_path, fake.url, config) as gateway:
        answer = await gateway.chat()
        assert (answer.json()["model"], answer.headers["x-headgate-reason"]) == ("demo-mini", "spilled")
        assert (await gateway.breaker("local/demo"))["failures"] == 0
        await asyncio.wait_for(fake.seen_for("demo")[0].closed.wait(), 2)


async def test_total_deadline_limits_the_time_to_commit_over_all_tiers(tmp_path: Path, fake: FakeInference) -> None:
    config = CONFIG + "deadlines: {connect: 500ms, first_token: 400ms, inter_token: 300ms, total: 600ms}\n"
    fake.answers = {"demo": Answer(stall=True, words=()), "demo-mini": Answer(stall=True, words=())}
    async with Gateway(tmp_path, fake.url, config) as gateway:
        answer = await gateway.chat()
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert answer.headers["x-should-retry"] == "false"
        assert "retry-after" not in answer.headers
        assert (await gateway.breaker("local/demo"))["failures"] == 1
        assert (await gateway.breaker("local/demo-mini"))["failures"] == 0, "it did not have its share of the time"


async def test_connect_timeout_is_separate(tmp_path: Path) -> None:
    """It is much shorter than the allowed silence, for the local service and for a cloud."""
    with full_backlog() as address:
        config = f"""
providers: {{openai: {{kind: openai, api_key: fake, base_url: "http://{address}/v1"}}}}
routes: {{demo: {{chain: [local/demo, openai/gpt]}}}}
deadlines: {{connect: 200ms, first_token: 3s, total: 8s}}
"""
        async with Gateway(tmp_path, f"http://{address}", config) as gateway:
            answer = await gateway.chat(stream=True)
            assert answer.status_code == 503
            record = (await gateway.admin("GET", f"/admin/requests/{answer.headers['x-request-id']}")).json()
    assert [(one["name"], one["outcome"]) for one in record["attempts"]] == [
        ("local/demo", "connect"),
        ("openai/gpt", "connect"),
    ]


# --- client disconnects -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "answer",
    [Answer(stall=True), Answer(words=(), stall=True), Answer(stall_before_headers=True)],
    ids=["after the first token", "before it", "before the status"],
)
async def test_client_disconnect_closes_the_upstream_without_a_failure(
    tmp_path: Path, fake: FakeInference, stream: bool, answer: Answer
) -> None:
    fake.answers["demo"] = answer
    async with Gateway(tmp_path, fake.url) as gateway:
        for count in range(1, 7):
            asking = asyncio.create_task(gateway.chat(stream=stream))
            await until("the service has the request", lambda count=count: len(fake.seen) == count)
            await asyncio.sleep(0.02)
            asking.cancel()
            await asyncio.wait({asking})
            await asyncio.wait_for(fake.seen[-1].closed.wait(), 2)
        await until("nothing is in flight", lambda: gateway.runtime.admission.in_flight == 0)
        assert len(gateway.runtime.open_requests) == 0
        for name in ("local", "local/demo"):
            assert ((await gateway.breaker(name))["state"], (await gateway.breaker(name))["failures"]) == ("closed", 0)
        metrics = (await gateway.client.get("/metrics")).text
        assert "gateway_client_disconnect_total 6.0" in metrics


async def test_client_disconnect_closes_an_embedding_request(tmp_path: Path, fake: FakeInference) -> None:
    fake.models["embed"] = ModelStatus(id="embed", state=ModelState.READY, capabilities=("embeddings",))
    fake.answers["embed"] = Answer(hold=asyncio.Event())
    async with Gateway(tmp_path, fake.url) as gateway:
        asking = asyncio.create_task(gateway.client.post("/v1/embeddings", json={"model": "embed", "input": "x"}))
        await until("the service has the request", lambda: fake.seen)
        asking.cancel()
        await asyncio.wait_for(fake.seen[-1].closed.wait(), 2)


async def test_short_timeout_of_the_client_is_a_504_without_a_failure(tmp_path: Path, fake: FakeInference) -> None:
    fake.answers = {"demo": Answer(words=(), stall=True), "demo-mini": Answer(words=(), stall=True)}
    async with Gateway(tmp_path, fake.url) as gateway:
        for _ in range(6):
            answer = await gateway.chat(headers={"x-stainless-read-timeout": "0.2"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
            assert answer.headers["x-should-retry"] == "false"
        del fake.answers["demo-mini"]
        answer = await gateway.chat(headers={"x-stainless-read-timeout": "1"})
        assert (answer.json()["model"], answer.headers["x-headgate-reason"]) == ("demo-mini", "spilled")
        assert ((await gateway.breaker("local/demo"))["state"], (await gateway.breaker("local/demo"))["failures"]) == (
            "closed", 0,
        )  # fmt: skip


async def test_cancelled_probe_releases_its_permit(patient: Gateway, fake: FakeInference) -> None:
    fake.queue["demo"] = [Answer(refuse=Code.MODEL_FAILED)] * 5 + [Answer(stall_before_headers=True)]
    for _ in range(5):
        await patient.chat()
    await until("the open period is over", lambda: patient.runtime.breakers.open_for("local", "demo") is None)
    async with asyncio.timeout(10):
        probe = asyncio.create_task(patient.chat())
        while len(fake.seen_for("demo")) < 6:
            await asyncio.wait([probe], timeout=0.02)
            if probe.done():  # the gateway's own probe came first
                probe = asyncio.create_task(patient.chat())
    assert (await patient.chat()).json()["model"] == "demo-mini"
    probe.cancel()
    await asyncio.wait_for(fake.seen_for("demo")[-1].closed.wait(), 2)

    async def answers() -> bool:
        return bool((await patient.chat()).json()["model"] == "demo")

    await until("the permit is free", answers)


# --- admission --------------------------------------------------------------------------------------------------------
async def test_requests_beyond_the_limits_wait_and_are_then_rejected(tmp_path: Path, fake: FakeInference) -> None:
    gate = asyncio.Event()
    fake.answers["demo"] = Answer(hold=gate)
    config = CONFIG + "admission: {max_in_flight: 1, queue: 1, queue_timeout: 300ms}\n"
    async with Gateway(tmp_path, fake.url, config) as gateway:
        first = asyncio.create_task(gateway.chat())
        await until("the first is admitted", lambda: fake.seen)
        second = asyncio.create_task(gateway.chat())
        await until(
            "the second waits", lambda: "gateway_queue_depth 1.0" in gateway.runtime.telemetry.render().decode()
        )
        third = await gateway.chat()
        assert (third.status_code, third.json()["error"]["code"]) == (429, "queue_full")
        assert third.headers["retry-after"] == "1"
        late = await second
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        fourth = asyncio.create_task(gateway.chat())
        await until(
            "the fourth waits", lambda: "gateway_queue_depth 1.0" in gateway.runtime.telemetry.render().decode()
        )
        gate.set()
        assert (await first).status_code == 200
        assert (await fourth).status_code == 200
