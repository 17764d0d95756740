"""Probes of the inference service with real breakers, with a clock that the tests set."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from gateway.breaker import probe_schedule
from gateway.breaker.breakers import Breakers, Lease, Refused
from gateway.breaker.outcome import Failure, Observation, Scope, Success, judge
from gateway.breaker.permits import BreakerState, Rule
from gateway.breaker.probe_schedule import Finding, ProbeKind, Purpose, Step, Watch
from gateway.breaker.prober import Prober
from gateway.errors import UpstreamError, UpstreamKind
from gateway.errors import UpstreamKind as Kind
from inference.protocol import Code, ModelState, ModelStatus

PROVIDER = Failure(Scope.PROVIDER)
GONE = UpstreamError(UpstreamKind.CONNECT, "refused")


class World:
    """A service that answers `answers` by path, and a prober. `work` and assignments move `now`."""

    def __init__(self, rule: Rule = Rule()) -> None:  # noqa: B008 - it is frozen
        self.now = 1000.0
        self.answers: dict[str, Any] = {"/readyz": {"status": "ready"}}
        self.requests: list[tuple[float, str, Any]] = []
        self.found: list[tuple[Purpose, Finding]] = []
        self.models = {
            "m": ModelStatus("m", ModelState.READY, capabilities=("chat",)),
            "e": ModelStatus("e", ModelState.READY, capabilities=("embeddings",)),
        }
        self.gate: asyncio.Event | None = None
        self.begun = asyncio.Event()
        clock = lambda: self.now  # noqa: E731
        self.breakers = Breakers(rule, clock, on_state=self._moved, on_failure=self._failed)
        self.prober = Prober(
            self.breakers, lambda: self, lambda: self.models, clock, lambda *found: self.found.append(found)
        )

    def _moved(self, provider: str, model: str, state: BreakerState | None) -> None:
        if provider == "local":
            self.prober.on_state(model, state)

    def _failed(self, provider: str, model: str, failure: Failure) -> None:
        if provider == "local" and failure.scope is Scope.PROVIDER:
            self.prober.suspect()

    async def get_json(self, path: str, seconds: float) -> Any:
        """The answer of the path."""
        return await self._answer(path, None)

    async def post_json(self, path: str, body: bytes, seconds: float, headers: Mapping[str, str] | None = None) -> Any:
        """The answer of the path."""
        return await self._answer(path, (body, headers))

    async def _answer(self, path: str, sent: Any) -> Any:
        self.requests.append((self.now, path, sent))
        self.begun.set()
        if self.gate is not None:
            await self.gate.wait()
        answer = self.answers[path]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def work(self, seconds: float) -> None:
        """Makes all probes that are due within `seconds`, in order."""
        end = self.now + seconds
        while (step := self.prober.next()) is not None and step.at <= end:
            self.now = max(self.now, step.at)
            await self.prober.probe(step)
        self.now = end

    def attempt(self, verdict: Any = PROVIDER, model: str = "m", provider: str = "local") -> bool:
        """Makes one request. Returns whether it reached the tier."""
        lease = self.breakers.acquire(provider, model, self.now + 300)
        if isinstance(lease, Refused):
            return False
        lease.settle(verdict, "it failed")
        return True

    def state(self, model: str = "") -> BreakerState:
        """The state of a breaker of the service."""
        return self.breakers.breaker("local", model).state


@pytest.fixture
def world() -> World:
    return World()


async def test_one_failure_and_four_probes_open_breaker_of_dead_service(world: World) -> None:
    world.answers["/readyz"] = GONE
    world.attempt()
    await world.work(1.0)
    assert [at for at, _, _ in world.requests] == [1000.25, 1000.5, 1000.75, 1001.0]
    assert world.state() is BreakerState.OPEN
    entry = world.breakers.breaker("local").describe()
    assert (entry["source"], entry["last_probe"]) == ("probes", "GET /readyz: connect: refused")
    assert world.found == [(Purpose.CONFIRM, Finding.BAD)] * 4


async def test_first_good_probe_ends_confirmation_and_keeps_failure_count(world: World) -> None:
    for _ in range(4):
        world.attempt()
        await world.work(5.0)
    assert len(world.requests) == 4
    assert world.state() is BreakerState.CLOSED
    world.attempt()
    assert world.state() is BreakerState.OPEN


async def test_clouds_are_never_probed(world: World) -> None:
    for _ in range(9):
        world.attempt(provider="cloud")
    assert world.breakers.states()["cloud"] is BreakerState.OPEN
    await world.work(120.0)
    assert world.requests == []


async def test_recovered_service_is_used_by_next_request(world: World) -> None:
    world.answers["/readyz"] = GONE
    world.attempt()
    await world.work(20.0)
    assert not world.attempt(Success())
    world.answers["/readyz"] = {"status": "ready"}
    await world.work(3.0)
    count = len(world.requests)
    await world.work(60.0)
    assert len(world.requests) == count, "the next request is the probe"
    assert world.attempt(Success())
    assert world.state() is BreakerState.CLOSED
    assert world.prober.next() is None


async def test_each_false_recovery_delays_recovery_probes(world: World) -> None:
    for _ in range(5):
        world.attempt()
    for pause, passes in ((0.5, True), (3.9, False), (0.1, True), (29.0, False), (1.0, True)):
        await world.work(pause)
        assert world.attempt() is passes


async def test_failed_probes_keep_requests_away_during_outage(world: World) -> None:
    world.answers["/readyz"] = GONE
    world.attempt()
    reached = 0
    for _ in range(100):
        await world.work(4.0)
        reached += world.attempt()
    assert reached == 0
    (entry,) = [entry for entry in world.breakers.describe() if entry["name"] == "local"]
    assert 0 < entry["retry_after"] <= 10.0


async def test_model_is_probed_by_one_token(world: World) -> None:
    failed = judge(Observation(UpstreamKind.STATUS, 503, Code.MODEL_FAILED, is_local=True))
    world.answers["/v1/chat/completions"] = UpstreamError(UpstreamKind.STATUS, "no", 503, Code.MODEL_FAILED)
    for _ in range(5):
        world.attempt(failed)
    await world.work(60.0)
    assert not world.attempt(Success())
    _at, path, (body, headers) = world.requests[-1]
    assert (path, headers) == ("/v1/chat/completions", {"x-headgate-probe": "1"})
    assert b'"max_tokens":1' in body
    world.answers["/v1/chat/completions"] = {"headgate": {"probe": "cold"}}
    await world.work(5.0)
    assert world.attempt(Success())
    assert world.state("m") is BreakerState.CLOSED


async def test_embedding_model_is_probed_by_one_embedding(world: World) -> None:
    failed = judge(Observation(UpstreamKind.STATUS, 503, Code.MODEL_FAILED, is_local=True))
    world.answers["/v1/embeddings"] = {"data": []}
    for _ in range(5):
        world.attempt(failed, "e")
    await world.work(1.0)
    assert world.requests[-1][1] == "/v1/embeddings"
    assert world.attempt(Success(), "e")


async def test_memory_refusal_is_probed_by_plan(world: World) -> None:
    refused = judge(Observation(UpstreamKind.STATUS, 503, Code.MEMORY_LIMIT_EXCEEDED, is_local=True))
    world.answers["/memory/plan"] = {"result": "CANT_ACCOMMODATE"}
    for _ in range(5):
        world.attempt(refused)
    await world.work(29.9)
    assert {path for _, path, _ in world.requests} == {"/memory/plan"}
    assert not world.attempt(refused)
    await world.work(0.2)
    assert world.attempt(refused), "the open period is over"
    world.answers["/memory/plan"] = {"result": "FREE"}
    await world.work(0.5)
    assert world.attempt(Success())


async def test_failed_connection_of_model_probe_probes_the_service(world: World) -> None:
    failed = judge(Observation(UpstreamKind.STATUS, 503, Code.MODEL_FAILED, is_local=True))
    world.answers = {"/v1/chat/completions": GONE, "/readyz": GONE}
    for _ in range(5):
        world.attempt(failed)
    await world.work(2.0)
    assert world.state() is BreakerState.OPEN
    assert [path for _, path, _ in world.requests][:2] == ["/v1/chat/completions", "/readyz"]


async def test_unknown_models_are_not_probed(world: World) -> None:
    failed = judge(Observation(UpstreamKind.STATUS, 503, Code.MODEL_FAILED, is_local=True))
    for _ in range(5):
        world.attempt(failed, "invented")
    await world.work(29.0)
    assert world.requests == []


async def test_model_is_probed_after_service_recovered(world: World) -> None:
    """Otherwise the recovered service would wait for a request that the model's breaker refuses for its open period."""
    broken = judge(Observation(UpstreamKind.STATUS, 500, is_local=True))
    world.answers = {"/readyz": GONE, "/v1/chat/completions": {"headgate": {"probe": "cold"}}}
    for _ in range(5):
        world.attempt(broken)
    assert (world.state(), world.state("m")) == (BreakerState.OPEN, BreakerState.OPEN)
    await world.work(10.0)
    world.answers["/readyz"] = {}
    await world.work(5.0)
    assert [path for _, path, _ in world.requests][-2:] == ["/readyz", "/v1/chat/completions"]
    assert world.attempt(Success())
    assert (world.state(), world.state("m")) == (BreakerState.CLOSED, BreakerState.CLOSED)


async def test_models_are_not_probed_while_a_request_probes_the_service(world: World) -> None:
    broken = judge(Observation(UpstreamKind.STATUS, 500, is_local=True))
    world.answers["/v1/chat/completions"] = {}
    for model in ("m", "e"):
        for _ in range(5):
            world.attempt(broken, model)
    world.breakers.reset("local/m")
    await world.work(0.5)
    assert world.state() is BreakerState.OPEN
    user = world.breakers.acquire("local", "m", world.now + 300)
    assert isinstance(user, Lease)
    await world.work(3.0)
    assert [path for _, path, _ in world.requests] == ["/readyz"]
    assert world.breakers.breaker("local").outstanding == 1


async def test_sign_of_recovery_is_followed_by_a_probe_at_once(world: World) -> None:
    world.answers["/readyz"] = GONE
    world.attempt()
    await world.work(50.0)
    world.answers["/readyz"] = {}
    world.prober.probe_now("unknown")
    world.prober.probe_now()
    step = world.prober.next()
    assert step is not None
    assert step.at <= world.now
    await world.work(0.0)
    assert world.attempt(Success())


async def test_cancelled_probe_returns_permit_to_requests(world: World) -> None:
    for _ in range(5):
        world.attempt()
    world.now += 29.9
    world.gate = asyncio.Event()
    step = world.prober.next()
    assert step is not None
    asking = asyncio.create_task(world.prober.probe(step))
    await world.begun.wait()
    world.now += 0.2
    assert not any(world.attempt(Success()) for _ in range(50))
    asking.cancel()
    await asyncio.wait({asking})
    clients = [world.breakers.acquire("local", "m", world.now + 300) for _ in range(50)]
    assert sum(isinstance(client, Lease) for client in clients) == 1
    assert world.prober.next() is None, "a request is the probe"


async def test_outdated_probe_step_is_not_made(world: World) -> None:
    world.attempt()
    step = world.prober.next()
    assert step is not None
    for _ in range(4):
        world.attempt()
    await world.prober.probe(step)
    recovering = world.prober.next()
    world.breakers.reset("local")
    assert recovering is not None
    await world.prober.probe(recovering)
    assert world.requests == []
    assert world.breakers.breaker("local").outstanding == 0


async def test_probes_continue_after_an_internal_error(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.breaker.prober.GRACE_SECONDS", 0.0)
    world.answers["/readyz"] = RuntimeError("a defect")
    working = asyncio.create_task(world.prober.run())
    await asyncio.sleep(0)
    for _ in range(5):
        world.attempt()
    world.now += 1.0
    world.prober.probe_now()
    async with asyncio.timeout(5):
        while "internal error in a probe" not in caplog.text:
            await asyncio.sleep(0)
        world.answers["/readyz"] = {}
        world.now += 10.0
        world.prober.probe_now()
        while world.breakers.open_for("local", "m") is not None:
            await asyncio.sleep(0)
    working.cancel()
    await asyncio.wait({working})


CLOSED, HALF, OPEN = BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN
CONFIRM, RECOVER = Purpose.CONFIRM, Purpose.RECOVER
GOOD, BAD, UNKNOWN = Finding.GOOD, Finding.BAD, Finding.UNKNOWN


def test_failure_is_confirmed_every_quarter_second_until_an_answer() -> None:
    watch = probe_schedule.suspected(Watch(), 100.0)
    assert probe_schedule.due_at(watch, CLOSED) == 100.25
    watch = probe_schedule.probed(watch, CONFIRM, BAD, 100.3)
    assert probe_schedule.suspected(watch, 100.4) == watch, "one series at a time"
    assert probe_schedule.due_at(watch, CLOSED) == 100.55
    watch = probe_schedule.probed(watch, CONFIRM, GOOD, 100.6)
    assert probe_schedule.due_at(watch, CLOSED) is None
    assert probe_schedule.due_at(probe_schedule.suspected(watch, 101.0), CLOSED) == 101.25


def test_interval_of_recovery_probes_is_a_tenth_of_the_outage() -> None:
    watch = probe_schedule.opened(probe_schedule.suspected(Watch(), 99.0), 100.0)
    assert probe_schedule.due_at(watch, OPEN) == 100.5
    for at, following in ((100.5, 101.0), (110.0, 111.0), (130.0, 133.0), (1000.0, 1004.0)):
        watch = probe_schedule.probed(watch, RECOVER, BAD, at)
        assert probe_schedule.due_at(watch, OPEN) == following
    again = probe_schedule.opened(watch, 1030.0)
    assert again.not_closed_since == 100.0, "it was never closed in between"
    assert probe_schedule.due_at(again, OPEN) == 1030.5


def test_no_probe_is_due_after_a_good_one_and_false_recovery_delays_next_probe() -> None:
    watch = probe_schedule.probed(probe_schedule.opened(Watch(), 0.0), RECOVER, GOOD, 0.5)
    assert probe_schedule.due_at(watch, OPEN) is None
    assert probe_schedule.due_at(watch, HALF) is None
    dues = []
    for opened in (10.0, 20.0, 30.0):
        watch = probe_schedule.opened(watch, opened)
        dues.append(probe_schedule.due_at(watch, OPEN))
        watch = probe_schedule.probed(watch, RECOVER, GOOD, opened + 1)
    assert dues == [14.0, 52.0, 286.0]
    fair = probe_schedule.opened(
        probe_schedule.probed(probe_schedule.opened(Watch(), 0.0), RECOVER, UNKNOWN, 0.5), 31.0
    )
    assert fair.false_recoveries == 0


def test_sign_of_recovery_skips_the_interval_but_not_the_minimum_period() -> None:
    watch = probe_schedule.probed(probe_schedule.opened(Watch(), 0.0), RECOVER, BAD, 40.0)
    assert probe_schedule.due_at(watch, OPEN) == 44.0
    assert probe_schedule.due_at(probe_schedule.due_now(watch), OPEN) == 0.5
    confirming = probe_schedule.probed(probe_schedule.suspected(Watch(), 0.0), CONFIRM, BAD, 1.0)
    assert probe_schedule.due_now(confirming) == confirming
    assert probe_schedule.due_at(replace(watch, not_closed_since=None), OPEN) == 44.0


def test_service_is_probed_before_its_models() -> None:
    own = probe_schedule.suspected(Watch(), 100.0)
    memory = probe_schedule.opened(Watch(), 50.0, needs_memory=True)
    broken = probe_schedule.opened(Watch(), 49.0)
    watches = {"": own, "big": memory, "failed": broken, "unknown": broken}
    states = {"": CLOSED, "big": OPEN, "failed": OPEN}
    assert probe_schedule.choose(watches, states) == Step("", CONFIRM, ProbeKind.READY, 100.25)
    assert probe_schedule.choose(watches, {**states, "": OPEN}) == Step("", RECOVER, ProbeKind.READY, 0.5)
    answers = {**watches, "": replace(own, ended_early=True)}
    assert probe_schedule.choose(answers, {**states, "": OPEN}) == Step("failed", RECOVER, ProbeKind.TOKEN, 49.5)
    calm = {**watches, "": Watch()}
    assert probe_schedule.choose(calm, states) == Step("failed", RECOVER, ProbeKind.TOKEN, 49.5)
    del calm["failed"]
    assert probe_schedule.choose(calm, states) == Step("big", RECOVER, ProbeKind.PLAN, 50.5)
    assert probe_schedule.choose({"big": memory}, {"big": HALF}) is None
    assert probe_schedule.choose({}, {}) is None


def _error(kind: Kind, status: int | None = None, code: str | None = None) -> UpstreamError:
    return UpstreamError(kind, "message", status=status, code=code)


CASES = [
    ("ready", ProbeKind.READY, {"status": "ready"}, GOOD),
    ("refused", ProbeKind.READY, _error(Kind.CONNECT), BAD),
    ("silent", ProbeKind.READY, _error(Kind.TIMEOUT), BAD),
    ("draining", ProbeKind.READY, _error(Kind.STATUS, 503), BAD),
    ("a path that is not there", ProbeKind.READY, _error(Kind.STATUS, 404), GOOD),
    ("not JSON", ProbeKind.READY, _error(Kind.MALFORMED), GOOD),
    ("it would fit", ProbeKind.PLAN, {"result": "FULL"}, GOOD),
    ("it would not", ProbeKind.PLAN, {"result": "CANT_ACCOMMODATE"}, UNKNOWN),
    ("no plan", ProbeKind.PLAN, _error(Kind.STATUS, 500), UNKNOWN),
    ("cold", ProbeKind.TOKEN, {"headgate": {"probe": "cold"}}, GOOD),
    ("an answer", ProbeKind.TOKEN, {"choices": []}, GOOD),
    ("no chat model", ProbeKind.TOKEN, _error(Kind.STATUS, 400, Code.INVALID_REQUEST), GOOD),
    ("full", ProbeKind.TOKEN, _error(Kind.STATUS, 429, Code.QUEUE_FULL), GOOD),
    ("failed", ProbeKind.TOKEN, _error(Kind.STATUS, 503, Code.MODEL_FAILED), BAD),
    ("lost", ProbeKind.TOKEN, _error(Kind.STATUS, 503, Code.DEVICE_LOST), BAD),
    ("too slow", ProbeKind.TOKEN, _error(Kind.STATUS, 504, Code.DEADLINE_EXCEEDED), UNKNOWN),
    ("slower", ProbeKind.TOKEN, _error(Kind.TIMEOUT), UNKNOWN),
    ("gone", ProbeKind.TOKEN, _error(Kind.CONNECT), UNKNOWN),
]


@pytest.mark.parametrize(("kind", "answer", "finding"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_each_answer_to_a_probe_has_its_finding(
    kind: ProbeKind, answer: UpstreamError | dict[str, str], finding: Finding
) -> None:
    assert probe_schedule.judge_probe(CONFIRM, kind, answer) is finding


def test_error_answer_of_readiness_does_not_extend_open_period() -> None:
    assert probe_schedule.judge_probe(RECOVER, ProbeKind.READY, _error(Kind.STATUS, 502)) is UNKNOWN
    assert probe_schedule.judge_probe(RECOVER, ProbeKind.READY, _error(Kind.CONNECT)) is BAD
    assert probe_schedule.judge_probe(RECOVER, ProbeKind.READY, {}) is GOOD


def test_connection_errors_and_a_502_show_that_the_service_is_down() -> None:
    assert probe_schedule.is_down(_error(Kind.CONNECT))
    assert probe_schedule.is_down(_error(Kind.STATUS, 502))
    assert not probe_schedule.is_down(_error(Kind.STATUS, 503, Code.MODEL_FAILED))
    assert not probe_schedule.is_down(_error(Kind.STATUS, 401))
