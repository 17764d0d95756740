"""What opens a breaker, what does not, and what closes it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.breaker import probe_schedule
from gateway.breaker.breakers import Breakers, Lease
from gateway.breaker.outcome import Failure, Ignore, Observation, Reason, Scope, Success, Verdict, judge
from gateway.breaker.permits import BreakerState, Rule
from gateway.breaker.probe_schedule import ProbeKind
from gateway.breaker.silence import MIN_SAMPLES, SILENT_SECONDS
from gateway.errors import UpstreamKind
from gateway.providers.local import inference_snapshot
from gateway.routing.stream_reader import LATE_SECONDS
from inference.protocol import Code, ModelState, ModelStatus, Priority
from tests.rigs.breaker_rig import FakeActivity
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.fake_provider import KEY, FakeProvider, Fault
from tests.rigs.gateway_rig import CONFIG, MESSAGES, Gateway
from tests.rigs.stack import until

pytestmark = pytest.mark.timeout(60)

FULL = Ignore(Reason.QUEUE_FULL, 60.0, frozenset({"normal"}))
CLOUD = """
providers: {{openai: {{kind: openai, api_key: {key}, base_url: "{url}"}}}}
routes:
  demo: {{chain: [openai/gpt-test, local/demo]}}
deadlines: {{connect: {connect}s}}
"""
LOCAL_ONLY = "routes: {demo: {chain: [local/demo]}}"


async def _breaker_names(gateway: Gateway) -> set[str]:
    return {breaker["name"] for breaker in (await gateway.admin("GET", "/admin/breakers")).json()["breakers"]}


def _config(cloud: FakeProvider, **more: Any) -> str:
    return CLOUD.format(**{"key": "fake-openai", "url": cloud.openai_url, "connect": 5, **more})


async def test_removed_provider_is_not_reported_as_failing(tmp_path: Path) -> None:
    async with FakeInference() as fake, FakeProvider() as cloud, Gateway(tmp_path, fake.url, _config(cloud)) as gateway:
        cloud.faults.add(Fault("status", status=429, retry_after=3600))
        assert (await gateway.chat()).json()["model"] == "demo"
        assert (await gateway.client.get("/health")).json()["breakers_not_closed"] == ["openai/gpt-test"]

        gateway.write(LOCAL_ONLY)
        assert (await gateway.admin("POST", "/admin/reload")).status_code == 200
        assert (await gateway.client.get("/health")).json()["status"] == "ok"
        assert await _breaker_names(gateway) == {"local", "local/demo"}
        assert 'gateway_breaker_state{model="gpt-test"' not in (await gateway.client.get("/metrics")).text


@pytest.mark.parametrize("change", ["key", "connect"])
async def test_changed_provider_starts_with_closed_breakers(tmp_path: Path, change: str) -> None:
    async with FakeInference() as fake, FakeProvider() as cloud, Gateway(tmp_path, fake.url, _config(cloud)) as gateway:
        cloud.faults.add(Fault("status", status=429, retry_after=3600))
        assert (await gateway.chat()).json()["model"] == "demo"

        gateway.write(_config(cloud, **{change: {"key": "fake-openai-2", "connect": 4}[change]}))
        assert (await gateway.admin("POST", "/admin/reload")).status_code == 200
        state = (await gateway.breaker("openai/gpt-test"))["state"]
        assert state == ("closed" if change == "key" else "open"), "a changed deadline is not another provider"


async def test_changed_inference_service_is_used_at_once(tmp_path: Path) -> None:
    async with FakeInference() as fake, FakeInference() as other, Gateway(tmp_path, fake.url, LOCAL_ONLY) as gateway:
        fake.answers["demo"] = Answer(refuse=Code.MODEL_FAILED)
        for _ in range(5):
            assert (await gateway.chat()).status_code == 503
        assert (await gateway.breaker("local/demo"))["state"] == "open"

        gateway.environ["GATEWAY_INFERENCE__URL"] = other.url
        assert (await gateway.admin("POST", "/admin/reload")).status_code == 200
        assert (await gateway.chat()).status_code == 200
        assert len(other.seen) == 1


@pytest.mark.parametrize("verdict", [FULL, Failure(Scope.PAIR, 3600.0, opens=True), Success()])
def test_attempts_at_replaced_provider_change_nothing(caplog: pytest.LogCaptureFixture, verdict: Verdict) -> None:
    failures: list[str] = []
    breakers = Breakers(Rule(), on_failure=lambda provider, model, failure: failures.append(provider))
    before = breakers.generation
    running = breakers.acquire("openai", "gpt-test", 1e9, generation=before)
    breakers.skip("openai", "gpt-test", 60.0, ["normal"])
    breakers.forget("openai")
    later = breakers.acquire("openai", "gpt-test", 1e9, generation=before)
    for lease in (running, later):
        assert isinstance(lease, Lease)
        lease.first_byte(FakeActivity())
        lease.first_token()
        lease.call_when_down(lambda: None)
        lease.settle(verdict)
        lease.release()
    assert breakers.skipped_for("openai", "gpt-test") is None
    assert (breakers.states(), failures, caplog.records) == ({}, [], [])

    now = breakers.acquire("openai", "gpt-test", 1e9, generation=breakers.generation)
    assert isinstance(now, Lease)
    now.settle(Failure(Scope.PAIR, 3600.0, opens=True))
    assert (breakers.states()["openai/gpt-test"], failures) == (BreakerState.OPEN, ["openai"])


async def test_waiting_request_uses_replaced_provider_without_recording(tmp_path: Path) -> None:
    """It began before the reload and uses the earlier key, so its outcome says nothing about the new account."""
    gate = asyncio.Event()
    async with FakeInference() as fake, FakeProvider() as cloud:
        slow = "routes:\n  slow: {chain: [local/demo]}"
        config = _config(cloud).replace("routes:", slow) + "admission: {max_in_flight: 1}\n"
        async with Gateway(tmp_path, fake.url, config) as gateway:
            fake.queue["demo"] = [Answer(hold=gate)]
            first = asyncio.create_task(gateway.chat("slow"))
            await until("the first is inside", lambda: fake.seen)
            second = asyncio.create_task(gateway.chat("demo"))
            depth = "gateway_queue_depth 1.0"
            await until("the second waits", lambda: depth in gateway.runtime.telemetry.render().decode())
            gateway.write(config.replace("api_key: fake-openai", "api_key: fake-openai-2"))
            assert (await gateway.admin("POST", "/admin/reload")).status_code == 200
            cloud.faults.add(Fault("status", status=429, retry_after=3600))
            gate.set()
            assert [(await one).json()["model"] for one in (first, second)] == ["demo", "demo"]
            sent = {name.lower(): value for name, value in (await cloud.record()).headers.items()}
            assert sent["authorization"] == "Bearer fake-openai"
            assert (await gateway.breaker("openai/gpt-test"))["state"] == "closed"


FAILURES = 3
SILENT_CONFIG = """
providers:
  one: {{kind: openai, api_key: "${{env:CLOUD}}", base_url: {url}/v1}}
  other: {{kind: anthropic, api_key: "${{env:CLOUD}}", base_url: {url}}}
routes:
  one: {{chain: [one/gpt, local/demo]}}
  other: {{chain: [other/claude, local/demo]}}
breaker: {{failures: {failures}}}
"""


async def test_next_tier_is_used_while_attempts_are_silent(tmp_path: Path) -> None:
    async with FakeInference("token") as fake, FakeProvider() as cloud:
        config = SILENT_CONFIG.format(url=cloud.url, failures=FAILURES)
        await _expect_next_tier_while_silent(Gateway(tmp_path, fake.url, config, {"CLOUD": KEY}), cloud)


async def _expect_next_tier_while_silent(rig: Gateway, cloud: FakeProvider) -> None:
    async with rig as gateway:
        await gateway.look()
        names = ("one", "other")
        known = [gateway.chat(name, stream=True) for name in names for _ in range(MIN_SAMPLES)]
        assert all(answer.status_code == 200 for answer in await asyncio.gather(*known))
        cloud.faults.add(
            Fault("stall", after=0, count=None, model="gpt"), Fault("stall", after=2, count=None, model="claude")
        )
        waiting = [asyncio.create_task(gateway.chat(name, stream=True)) for name in names for _ in range(FAILURES)]
        await until("all requests arrived", lambda: len(cloud.records) >= 2 * (MIN_SAMPLES + FAILURES))
        await asyncio.sleep(SILENT_SECONDS + 1.0)
        for name in names:
            answer = await gateway.chat(name)
            assert answer.headers["x-headgate-model"] == "local/demo"
            record = (await gateway.admin("GET", f"/admin/requests/{answer.headers['x-request-id']}")).json()
            assert [tried["name"] for tried in record["attempts"]] == ["local/demo"]
            assert " several attempts wait for its first byte" in str(record)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        breakers = gateway.runtime.breakers
        running = [("one", "gpt"), ("other", "claude")]
        await until("the attempts ended", lambda: not any(breakers.outstanding(*pair) for pair in running))
        for pair in running:
            lease = breakers.acquire(*pair, expires=1e9)
            assert isinstance(lease, Lease), "ended attempts are not silent"
            lease.release()


CRASH = judge(Observation(UpstreamKind.ERROR_FRAME, status=503, code="model_failed", is_local=True))
REFUSAL = judge(Observation(UpstreamKind.STATUS, status=503, code="memory_limit_exceeded", is_local=True))


class _Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def _leases(breakers: Breakers, count: int) -> list[Lease]:
    found = [breakers.acquire("local", "demo", expires=1e9) for _ in range(count)]
    assert all(isinstance(lease, Lease) for lease in found)
    return [lease for lease in found if isinstance(lease, Lease)]


def test_crash_under_twenty_requests_is_one_failure() -> None:
    clock = _Clock()
    breakers = Breakers(Rule(), clock)
    for lease in _leases(breakers, 20):
        lease.settle(CRASH)
        clock.now += 0.01
    assert breakers.breaker("local", "demo").describe()["failures"] == 1
    assert set(breakers.states().values()) == {BreakerState.CLOSED}


def test_each_of_several_concurrent_refusals_counts() -> None:
    breakers = Breakers(Rule(), _Clock())
    for lease in _leases(breakers, 5):
        lease.settle(REFUSAL)
    assert breakers.breaker("local", "demo").state is BreakerState.OPEN


NO_RESUME = CONFIG.replace("demo-mini]}", "demo-mini], resume: off}")


async def test_requests_pass_after_first_token_of_streamed_probe(tmp_path: Path) -> None:
    async with (
        FakeInference("token") as fake,
        Gateway(tmp_path, fake.url, NO_RESUME + "breaker: {open: 200ms}\n") as gateway,
    ):
        fake.queue["demo"] = [Answer(refuse=Code.MODEL_FAILED)] * 5
        for _ in range(5):
            assert (await gateway.chat()).json()["model"] == "demo-mini"
        await until("the open period is over", lambda: gateway.runtime.breakers.open_for("local", "demo") is None)
        fake.queue["demo"] = [Answer(words=("word ",) * 20, pause=0.05, error=Code.DEVICE_LOST)]
        body = {"model": "demo", "messages": MESSAGES, "stream": True}
        async with gateway.client.stream("POST", "/v1/chat/completions", json=body) as probe:
            assert (await gateway.breaker("local/demo"))["state"] == "closed"
            assert (await gateway.chat()).json()["model"] == "demo"
            text = "".join([piece async for piece in probe.aiter_text()])
        assert '"error"' in text
        entry = await gateway.breaker("local/demo")
        assert (entry["state"], entry["failures"]) == ("closed", 1)


RESTART_CONFIG = """
breaker: {open: 600s, failures: 2}
routes:
  demo: {chain: [local/demo]}
"""


async def test_quick_restart_of_service_ends_open_period(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(inference_snapshot, "POLL_SECONDS", 600.0)
    monkeypatch.setattr(inference_snapshot, "MISSING_POLL_SECONDS", 600.0)
    async with FakeInference("token") as inference, Gateway(tmp_path, inference.url, RESTART_CONFIG) as gateway:
        body = {"model": "demo", "messages": MESSAGES}
        await until("the service was seen", lambda: gateway.runtime.view.reachable)
        port = int(inference.url.rsplit(":", 1)[1])
        await inference.stop()
        refused = await gateway.client.post("/v1/chat/completions", json=body)
        assert refused.status_code == 503
        await gateway.client.post("/v1/chat/completions", json=body)
        assert gateway.runtime.breakers.breaker("local").state is BreakerState.OPEN
        await inference.start(port)

        async def answered() -> bool:
            return (await gateway.client.post("/v1/chat/completions", json=body)).status_code == 200

        await until("requests pass again", answered)


ALIAS_CONFIG = "routes: {nice: {chain: [local/nick]}}\nbreaker: {failures: 1}\n"


async def test_alias_in_a_route_uses_context_and_breaker_of_the_model(tmp_path: Path) -> None:
    async with FakeInference("token") as fake:
        fake.models["demo"] = ModelStatus(
            "demo", ModelState.READY, context_length=4096, capabilities=("chat",), aliases=("nick",)
        )
        async with Gateway(tmp_path, fake.url, ALIAS_CONFIG) as gateway:
            await gateway.look()
            body = {"model": "nice", "max_tokens": 32000, "messages": MESSAGES}
            bounded = await gateway.client.post("/v1/messages", content=json.dumps(body))
            assert (bounded.status_code, bounded.headers["x-headgate-model"]) == (200, "local/demo")
            assert (fake.seen[-1].model, fake.seen[-1].body["max_tokens"]) == ("demo", 4096)
            fake.answers["demo"] = Answer(refuse=Code.MODEL_FAILED)
            assert (await gateway.chat("nice")).status_code == 503
            assert (await gateway.breaker("local/demo"))["state"] == "open"
            assert gateway.runtime.inference.node().prober.next() is not None


CONFIG_SHORT = CONFIG + "deadlines: {first_token: 200ms, inter_token: 200ms}\n"


async def test_suspended_gateway_does_not_count_a_provider_timeout(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with FakeInference("token") as fake:
        fake.answers["demo"] = Answer(hold=gate)
        async with Gateway(tmp_path, fake.url, CONFIG_SHORT) as gateway:
            chat = asyncio.create_task(gateway.chat())
            await until("the provider has the request", lambda: fake.seen)
            gate.set()
            time.sleep(LATE_SECONDS + 0.4)  # blocks the loop, as a suspended process does
            answer = await chat
            assert answer.status_code == 200
            assert answer.headers["x-headgate-model"] == "local/demo"
            assert (await gateway.breaker("local/demo"))["failures"] == 0


async def _answered_by(gateway: Gateway, priority: str) -> str:
    answer = await gateway.chat(headers={"x-headgate-priority": priority})
    return str(answer.json()["model"])


async def test_full_queue_of_one_priority_does_not_affect_the_others(tmp_path: Path) -> None:
    async with FakeInference() as fake, Gateway(tmp_path, fake.url) as gateway:
        fake.queue["demo"] = [Answer(refuse=Code.QUEUE_FULL, retry_after=60, full_for=("low",))]
        assert await _answered_by(gateway, "low") == "demo-mini"
        assert [await _answered_by(gateway, priority) for priority in Priority] == ["demo", "demo", "demo-mini"]
        assert len(fake.seen_for("demo")) == 3, "a request of the full priority is not sent"


@pytest.mark.parametrize("stream", [False, True])
async def test_refusal_without_full_priorities_does_not_affect_other_requests(tmp_path: Path, stream: bool) -> None:
    async with FakeInference() as fake, Gateway(tmp_path, fake.url, "routes: {demo: {chain: [local/demo]}}") as gateway:
        fake.queue["demo"] = [Answer(refuse=Code.QUEUE_FULL, retry_after=5, message="this model prepares other forms")]
        refused = await gateway.chat(stream=stream)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
        assert (await gateway.chat(stream=stream)).status_code == 200


QUOTA_CONFIG = """
providers: {{cloud: {{kind: {kind}, api_key: {key}, base_url: "{url}"}}}}
routes: {{demo: {{chain: [cloud/m, local/demo]}}}}
"""


@pytest.mark.parametrize(
    ("kind", "fault"),
    [("openai", Fault("no_quota", count=None)), ("anthropic", Fault("status", status=402, count=None))],
    ids=["openai", "anthropic"],
)
async def test_empty_account_opens_the_breaker_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, fault: Fault
) -> None:
    async with FakeInference() as fake, FakeProvider() as cloud:
        url = cloud.openai_url if kind == "openai" else cloud.url
        async with Gateway(tmp_path, fake.url, QUOTA_CONFIG.format(kind=kind, key=KEY, url=url)) as gateway:
            cloud.faults.add(fault)
            answers = [await gateway.chat() for _ in range(4)]
            breaker = await gateway.breaker("cloud/m")
    assert [answer.headers["x-headgate-model"] for answer in answers] == ["local/demo"] * 4
    assert [answer.headers["x-headgate-reason"] for answer in answers] == ["status_402"] + ["breaker_open"] * 3
    assert (breaker["state"], breaker["retry_after"]) == ("open", pytest.approx(30, abs=5))
    (logged,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "check the key and the settings of provider cloud" in logged.getMessage()


GONE_CONFIG = """
providers:
  openai: {{kind: openai, api_key: "${{env:CLOUD}}", base_url: {url}/v1}}
routes:
  demo: {{chain: [local/demo, openai/gpt]}}
breaker: {{failures: 1}}
deadlines: {{first_token: 60s}}
"""


@pytest.mark.parametrize("stream", [False, True])
async def test_wait_for_an_unreachable_service_ends_at_the_next_probe(tmp_path: Path, stream: bool) -> None:
    async with (
        FakeInference("token") as fake,
        FakeProvider() as cloud,
        Gateway(tmp_path, fake.url, GONE_CONFIG.format(url=cloud.url), environ={"CLOUD": KEY}) as gateway,
    ):
        fake.answers["demo"] = Answer(stall_before_headers=True)
        body = {"model": "demo", "messages": MESSAGES, "stream": stream}
        chat = asyncio.create_task(gateway.client.post("/v1/chat/completions", json=body))
        await until("the service has the request", lambda: fake.seen)
        fake.ready = False
        gateway.runtime.inference.node().prober.suspect()
        answer = await chat
        assert answer.status_code == 200
        assert answer.headers["x-headgate-model"] == "openai/gpt"
        assert answer.headers["x-headgate-reason"] == "timeout"
        await asyncio.wait_for(fake.seen[0].closed.wait(), 10)


TOO_LARGE_CONFIG = """
providers: {{openai: {{kind: openai, api_key: {key}, base_url: "{url}"}}}}
routes:
  demo: {{chain: [openai/gpt-test, local/demo]}}
  alone: {{chain: [openai/gpt-test]}}
"""


@pytest.fixture
async def gateway(tmp_path: Path, cloud: FakeProvider) -> AsyncIterator[Gateway]:
    config = TOO_LARGE_CONFIG.format(key=KEY, url=cloud.openai_url)
    async with FakeInference() as fake, Gateway(tmp_path, fake.url, config) as gateway:
        yield gateway


@pytest.mark.parametrize("stream", [False, True])
async def test_request_larger_than_the_account_allows_goes_to_the_next_tier_without_a_failure(
    gateway: Gateway, cloud: FakeProvider, stream: bool
) -> None:
    cloud.faults.add(Fault("too_large", count=6))
    for _ in range(6):
        answer = await gateway.chat(stream=stream)
        assert answer.headers["x-headgate-model"] == "local/demo"
        assert answer.headers["x-headgate-reason"] == "request_too_large"
    breaker = await gateway.breaker("openai/gpt-test")
    assert (breaker["state"], breaker["window"]["failed"]) == ("closed", 0)
    assert (await gateway.chat(stream=stream)).headers["x-headgate-model"] == "openai/gpt-test"


async def test_request_larger_than_the_account_allows_without_another_tier_is_413(
    gateway: Gateway, cloud: FakeProvider
) -> None:
    cloud.faults.add(Fault("too_large"))
    answer = await gateway.chat("alone")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (413, "request_too_large")
    assert error["message"].startswith("Request too large for")
    assert answer.headers["x-should-retry"] == "false"


async def test_embedding_ends_when_probes_find_the_service_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the only candidate, and its silence alone does not end it: the service may be loading the model."""
    monkeypatch.setitem(probe_schedule.TIMEOUT_SECONDS, ProbeKind.READY, 0.1)  # type: ignore[arg-type]
    async with FakeInference("token") as fake, Gateway(tmp_path, fake.url) as gateway:
        fake.models["demo"] = replace(fake.models["demo"], capabilities=("embeddings",))
        await gateway.look()
        fake.answers["demo"] = Answer(hold=asyncio.Event())
        body = {"model": "demo", "input": "x"}
        embedding = asyncio.create_task(gateway.client.post("/v1/embeddings", json=body))
        await until("the request runs", lambda: fake.seen)
        fake.is_silent = True
        gateway.runtime.inference.node().prober.suspect()
        async with asyncio.timeout(20):
            answer = await embedding
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, Code.NO_TIER_AVAILABLE)
        await until("the service sees the disconnect", fake.seen[0].closed.is_set)
        record = (await gateway.admin("GET", f"/admin/requests/{answer.headers['x-request-id']}")).json()
        assert [tried["outcome"] for tried in record["attempts"]] == ["timeout"]
