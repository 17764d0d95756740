"""Outages with real breakers, probes and polling on virtual time; only the tier is simulated."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.breaker.breakers import Breakers, Lease
from gateway.breaker.outcome import End, Failure, Observation, Scope, judge
from gateway.breaker.permits import BreakerState, Rule
from gateway.breaker.probe_schedule import Purpose, Step
from gateway.breaker.prober import Prober
from gateway.errors import UpstreamError, UpstreamKind
from gateway.providers.local.inference_snapshot import InferenceView
from inference.protocol import Code, ModelState, ModelStatus
from tests.rigs import virtual_time
from tests.rigs.breaker_rig import FakeActivity

pytestmark = pytest.mark.unmeasured

OUTAGE, PERIOD, FIRST_TOKEN, INTER_TOKEN, ANSWER = 60.0, 4.0, 30.0, 15.0, 0.1
STATUS = ModelStatus("demo", ModelState.READY, capabilities=("chat",))

ERRORS: Mapping[str, UpstreamError] = {
    "refused": UpstreamError(UpstreamKind.CONNECT, "refused"),
    "reset": UpstreamError(UpstreamKind.READ, "reset"),
    "500": UpstreamError(UpstreamKind.STATUS, "500", status=500),
    "529": UpstreamError(UpstreamKind.STATUS, "529", status=529),
    "stopping": UpstreamError(UpstreamKind.STATUS, "503", status=503, code=Code.SHUTTING_DOWN),
    "model failed": UpstreamError(UpstreamKind.STATUS, "503", status=503, code=Code.MODEL_FAILED),
}


@dataclass
class Outage:
    """A tier that fails as `how` says from `begins` to `ends`.

    `reached`: times of requests between `begins` and `ends`; `used`: times of successful requests.
    """

    provider: str
    how: str
    begins: float
    ends: float
    thinks: float = 0.0
    reached: list[float] = field(default_factory=list)
    used: list[float] = field(default_factory=list)
    probing: int = 0
    max_probing: int = 0

    def __post_init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.breakers = Breakers(Rule(), self.loop.time, on_state=self._moved, on_failure=self._failed)
        self.prober = Prober(self.breakers, lambda: self, lambda: {"demo": STATUS}, self.loop.time)
        self.view = InferenceView(
            self.get_json, self.loop.time, self.prober.probe_now, self.prober.suspect, self.prober.probe_now
        )
        self._ask, self.prober.probe = self.prober.probe, self._watched  # type: ignore[method-assign]

    def _moved(self, provider: str, model: str, state: BreakerState | None) -> None:
        if provider == "local":
            self.prober.on_state(model, state)

    def _failed(self, provider: str, model: str, failure: Failure) -> None:
        if provider == "local" and failure.scope is Scope.PROVIDER:
            self.prober.suspect()

    async def _watched(self, step: Step) -> None:
        with self._probe(step.purpose is Purpose.RECOVER):
            await self._ask(step)

    def _probe(self, counts: bool) -> _Count:
        return _Count(self, counts)

    async def get_json(self, path: str, seconds: float) -> Any:
        """`/readyz` and `/v1/models`; both work while only a model fails."""
        if self.how != "model failed":
            await self._fail(seconds)
        return {"data": [STATUS.to_json()]}

    async def post_json(self, path: str, body: bytes, seconds: float, headers: Mapping[str, str] | None = None) -> Any:
        """A request for one token."""
        await self._fail(seconds)
        return {}

    async def _fail(self, seconds: float) -> None:
        until = self.ends - self.loop.time()
        if self.loop.time() < self.begins or until <= 0:
            return
        if self.how == "silent":
            await asyncio.sleep(min(until, seconds))
            if until > seconds:
                raise UpstreamError(UpstreamKind.TIMEOUT, "silent")
            return
        if self.how not in ("cut", "head only", "stalled"):
            raise ERRORS[self.how]

    async def user(self) -> bool:
        """Makes one request. Returns whether it reached the tier."""
        forced = self.provider == "local"  # a cloud has another tier behind it
        is_away = self.begins <= self.loop.time() < self.ends
        lease = self.breakers.acquire(self.provider, "demo", self.loop.time() + 315, forced)
        if not isinstance(lease, Lease):
            return False
        with self._probe(lease.is_probe):
            if is_away:
                self.reached.append(self.loop.time())
            try:
                if is_away and self.how in ("cut", "head only", "stalled"):
                    await self._cut(lease)
                await self._fail(FIRST_TOKEN)
            except UpstreamError as error:
                seen = Observation(error.kind, error.status, error.code, is_local=self.provider == "local")
                lease.settle(judge(seen), str(error))
            else:
                self.used.append(self.loop.time())
                await asyncio.sleep(ANSWER)
                lease.first_byte(FakeActivity(longest_silence=self.thinks))
                lease.first_token()
                lease.settle(judge(Observation(End.FINISHED)))
        return True

    async def _cut(self, lease: Lease) -> None:
        """An answer that is interrupted, or that stops after its first byte or after its first token."""
        since, activity = self.loop.time(), FakeActivity()
        activity.silent_seconds = lambda: self.loop.time() - since  # type: ignore[method-assign]
        lease.first_byte(activity)
        if self.how != "head only":
            lease.first_token()
        await asyncio.sleep({"cut": ANSWER, "head only": FIRST_TOKEN, "stalled": INTER_TOKEN}[self.how])
        raise ERRORS["reset"] if self.how == "cut" else UpstreamError(UpstreamKind.TIMEOUT, "silent")

    async def live(self, seconds: float, period: float = PERIOD, offset: float = 0.0, at_once: int = 1) -> None:
        """Makes `at_once` requests every `period` seconds, with polling and probes."""
        tasks = [asyncio.create_task(self.prober.run())]
        if self.provider == "local":
            tasks.append(asyncio.create_task(self.view.run()))
        end = self.loop.time() + seconds
        await asyncio.sleep(offset)
        while self.loop.time() < end:
            tasks += [asyncio.create_task(self.user()) for _ in range(at_once)]
            await asyncio.sleep(period)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def back_after(self) -> float:
        """Seconds from the end of the outage to the next answer."""
        return min(moment for moment in self.used if moment >= self.ends) - self.ends


@dataclass
class _Count:
    """Counts a probe while it is entered."""

    outage: Outage
    counts: bool

    def __enter__(self) -> None:
        self.outage.probing += self.counts
        self.outage.max_probing = max(self.outage.max_probing, self.outage.probing)

    def __exit__(self, *_: object) -> None:
        self.outage.probing -= self.counts


async def _outage(provider: str, how: str, offset: float, at_once: int = 1, thinks: float = 0.0) -> Outage:
    """An outage of sixty seconds, then a minute and a half without one."""
    start = asyncio.get_running_loop().time()
    outage = Outage(provider, how, start + 20.0, start + 20.0 + OUTAGE, thinks)
    await outage.live(170.0, offset=offset, at_once=at_once)
    return outage


@pytest.mark.parametrize("how", ["refused", "reset", "500", "stopping", "silent"])
def test_outage_of_inference_service_costs_at_most_four_requests(how: str) -> None:
    for offset in range(8):
        outage = virtual_time.run(_outage("local", how, offset / 2))
        assert len(outage.reached) <= 4
        assert outage.back_after <= 10.0
        assert outage.max_probing == 1


@pytest.mark.parametrize("how", ["refused", "reset", "500", "529", "silent", "cut", "head only", "stalled"])
def test_outage_of_cloud_costs_at_most_six_requests(how: str) -> None:
    for offset in range(8):
        outage = virtual_time.run(_outage("cloud", how, offset / 2))
        assert len(outage.reached) <= 6
        assert outage.back_after <= Rule().open + PERIOD
        assert outage.max_probing == 1


@pytest.mark.parametrize(("thinks", "head_only", "stalled"), [(3.5, 6, 6), (6.0, 7, 6), (20.0, 12, 6)])
def test_cloud_with_long_thinking_is_given_more_time(thinks: float, head_only: int, stalled: int) -> None:
    """Silence before the first token counts only if it is longer than in earlier answers of this cloud."""
    for how, most in (("head only", head_only), ("stalled", stalled)):
        seen = [len(virtual_time.run(_outage("cloud", how, offset / 2, thinks=thinks)).reached) for offset in range(8)]
        assert max(seen) == most


def test_recovered_local_model_is_used_within_ten_seconds() -> None:
    for offset in range(8):
        outage = virtual_time.run(_outage("local", "model failed", offset / 2))
        assert len(outage.reached) <= 5, "each is a failure of the model"
        assert outage.back_after <= 10.0
        assert outage.max_probing == 1


@pytest.mark.parametrize("provider", ["local", "cloud"])
def test_fifty_clients_at_half_open_send_one_probe(provider: str) -> None:
    outage = virtual_time.run(_outage(provider, "refused", 2.0, at_once=50))
    bursts = [moment for moment in outage.reached if moment > outage.begins + 5]
    assert len(bursts) == len(set(bursts)), "one request probes"
    returned = min(moment for moment in outage.used if moment >= outage.ends)
    assert outage.used.count(returned) == 1
    following = next(outage.used.count(moment) for moment in sorted(set(outage.used)) if moment > returned)
    assert (following == 50) is (provider == "local"), "the ramp sends the others to the next tier"
    assert outage.max_probing == 1


async def _any(provider: str, how: str, away: list[tuple[float, float]], at_once: int) -> Outage:
    start = asyncio.get_running_loop().time()
    outage = Outage(provider, how, start, start)
    living = asyncio.create_task(outage.live(sum(map(sum, away)) + 120.0, period=2.7, at_once=at_once))
    for well, ill in away:
        await asyncio.sleep(well)
        outage.begins, outage.ends = outage.loop.time(), outage.loop.time() + ill
        await asyncio.sleep(ill)
    await living
    return outage


@settings(max_examples=25, deadline=None)
@given(
    provider=st.sampled_from(["local", "cloud"]),
    how=st.sampled_from([*ERRORS, "silent", "cut", "head only", "stalled"]),
    away=st.lists(st.tuples(st.floats(0.1, 20.0), st.floats(0.1, 90.0)), min_size=1, max_size=4),
    at_once=st.sampled_from([1, 3]),
)
def test_random_outages_have_one_probe_at_a_time_and_a_fast_recovery(
    provider: str, how: str, away: list[tuple[float, float]], at_once: int
) -> None:
    outage = virtual_time.run(_any(provider, how, away, at_once))
    assert outage.max_probing <= 1
    # after two false recoveries only the end of the open period counts
    soonest = 10.0 if len(away) == 1 else Rule().open + 10.0
    assert outage.back_after <= (soonest if provider == "local" else 34.0 + FIRST_TOKEN)
    assert all(breaker.outstanding == 0 for breaker in outage.breakers.by_model(provider).values())
