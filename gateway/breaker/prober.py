"""Runs the probes of the inference service in the background; `gateway.breaker.probe_schedule` decides when."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import orjson

from gateway.breaker import probe_schedule
from gateway.breaker.breaker import PROBES, Breaker, Clock
from gateway.breaker.breakers import Breakers
from gateway.breaker.outcome import LOCAL, Failure, Scope
from gateway.breaker.permits import BreakerState, Permit, Refused
from gateway.breaker.probe_claims import Claim, ClaimRefused
from gateway.breaker.probe_schedule import TIMEOUT_SECONDS, Finding, ProbeKind, Purpose, Step, Watch
from gateway.errors import UpstreamError
from inference.protocol import H_PROBE, ModelStatus

log = logging.getLogger("gateway.breaker.prober")

GRACE_SECONDS = 1.0
"""A probe's permit expires this long after its time-out, in case its task ends without returning it."""

OnProbe = Callable[[Purpose, Finding], None]
"""Called after each probe."""


class Service(Protocol):
    """The inference service; both methods raise UpstreamError."""

    async def get_json(self, path: str, seconds: float) -> Any:
        """The JSON at a GET path."""
        ...

    async def post_json(self, path: str, body: bytes, seconds: float, headers: Mapping[str, str] | None = None) -> Any:
        """The JSON that answers a POST."""
        ...


class Prober:
    """The probes of one service, whose breakers have the key `provider`. `models` returns the models that it has
    listed: no others are probed.
    """

    def __init__(
        self,
        breakers: Breakers,
        service: Callable[[], Service],
        models: Callable[[], Mapping[str, ModelStatus]],
        clock: Clock = time.monotonic,
        on_probe: OnProbe = lambda *_: None,
        provider: str = LOCAL,
    ) -> None:
        self._breakers = breakers
        self._service = service
        self._models = models
        self._clock = clock
        self._on_probe = on_probe
        self._provider = provider
        self._watches: dict[str, Watch] = {}
        self._changed = asyncio.Event()

    def suspect(self) -> None:
        """The service itself failed a request: probes confirm or refute that it is down."""
        if self._breakers.breaker(self._provider).state is BreakerState.CLOSED:
            self._watches[""] = probe_schedule.suspected(self._watches.get("", Watch()), self._clock())
            self._changed.set()

    def on_state(self, model: str, state: BreakerState | None) -> None:
        """A breaker of the service changed its state, or was removed (None)."""
        if state is BreakerState.OPEN:
            needs_memory = bool(model) and self._breakers.breaker(self._provider, model).needs_memory
            watch = self._watches.get(model, Watch())
            self._watches[model] = probe_schedule.opened(watch, self._clock(), needs_memory)
        elif state is not BreakerState.HALF_OPEN:
            self._watches.pop(model, None)
        self._changed.set()

    def probe_now(self, model: str = "") -> None:
        """The service, or one of its models, may have recovered: make the next recovery probe as early as allowed."""
        if model in self._watches:
            self._watches[model] = probe_schedule.due_now(self._watches[model])
            self._changed.set()

    def next(self) -> Step | None:
        """The next probe and its time; None when none is needed."""
        known = self._models() if self._watches else {}
        breakers = self._breakers.by_model(self._provider)
        watches = {model: watch for model, watch in self._watches.items() if not model or model in known}
        return probe_schedule.choose(watches, {model: breakers[model].state for model in watches if model in breakers})

    async def run(self) -> None:
        """Probe until cancelled, also after internal errors. Without probes, open periods end at their normal time."""
        while True:
            step = self.next()
            wait = None if step is None else step.at - self._clock()
            if step is None or (wait is not None and wait > 0):
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait):
                        await self._changed.wait()
                continue
            try:
                await self.probe(step)
            except Exception:
                log.exception("internal error in a probe of %s", step.model or self._provider)
                await asyncio.sleep(GRACE_SECONDS)

    async def probe(self, step: Step) -> None:
        """Make one probe, under a permit that excludes other probes, and record the finding."""
        breaker = self._breakers.breaker(self._provider, step.model)
        expires = self._clock() + TIMEOUT_SECONDS[step.kind] + GRACE_SECONDS
        outer = self._breakers.breaker(self._provider)
        first = outer.acquire(expires) if step.model and outer.state is not BreakerState.CLOSED else None
        if isinstance(first, Refused):
            self._note(step, Finding.UNKNOWN)  # a request of a user is the probe of the service
            return
        permit = self._permit(breaker, step, expires)
        finding, detail = Finding.UNKNOWN, "the probe was not made"
        probing = [held for held, mine in ((outer, first), (breaker, permit)) if mine is not None and mine.is_probe]
        claim: Claim | ClaimRefused | None = None
        try:
            if self._breakers.claims is not None and probing:
                claim = await self._breakers.claims.claim([(held.provider, held.model) for held in probing])
            if isinstance(claim, ClaimRefused):
                detail = "another gateway probes it"
            elif permit is not None:  # otherwise the state changed since the step was chosen
                finding, detail = await self._make(step)
        finally:
            if first is not None:
                outer.release(first)
            if permit is not None:
                self._note(step, finding)
                self._settle(breaker, permit, step, finding, detail)
            if claim is not None and not isinstance(claim, ClaimRefused):
                for held in probing:
                    claim.release(held.provider, held.model)
        if permit is not None and not isinstance(claim, ClaimRefused):
            self._on_probe(step.purpose, finding)

    def _note(self, step: Step, finding: Finding) -> None:
        if (watch := self._watches.get(step.model)) is not None:
            self._watches[step.model] = probe_schedule.probed(watch, step.purpose, finding, self._clock())

    def _permit(self, breaker: Breaker, step: Step, expires: float) -> Permit | None:
        if step.purpose is Purpose.RECOVER:
            return breaker.acquire_recovery_probe(expires)
        if breaker.state is not BreakerState.CLOSED:
            return None
        permit = breaker.acquire(expires, forced=True)
        assert isinstance(permit, Permit), "a closed breaker does not refuse a forced attempt"
        return permit

    def _settle(self, breaker: Breaker, permit: Permit, step: Step, finding: Finding, detail: str) -> None:
        if step.purpose is Purpose.RECOVER:
            breaker.settle_recovery_probe(permit, finding, detail)
            return
        breaker.last_probe = detail
        if finding is Finding.BAD:
            breaker.fail(permit, Failure(Scope.PROVIDER), detail, PROBES)
        else:
            breaker.release(permit)

    async def _make(self, step: Step) -> tuple[Finding, str]:
        """Make the request of a probe. Returns the finding, and a description for operators."""
        name = _NAMES[step.kind]
        try:
            answer = await self._request(step, TIMEOUT_SECONDS[step.kind])
        except UpstreamError as error:
            if step.model and probe_schedule.is_down(error):
                self.suspect()
            return probe_schedule.judge_probe(step.purpose, step.kind, error), f"{name}: {error}"
        finding = probe_schedule.judge_probe(step.purpose, step.kind, answer if isinstance(answer, dict) else {})
        return finding, f"{name} {'was answered' if finding is Finding.GOOD else 'was refused'}"

    async def _request(self, step: Step, seconds: float) -> Any:
        service = self._service()
        if step.kind is ProbeKind.READY:
            return await service.get_json("/readyz", seconds)
        if step.kind is ProbeKind.PLAN:
            return await service.post_json("/memory/plan", orjson.dumps({"model": step.model}), seconds)
        status = self._models().get(step.model)
        path, body = _token_request(step.model, status.capabilities if status is not None else ())
        return await service.post_json(path, orjson.dumps(body), seconds, {H_PROBE: "1"})


_NAMES: Mapping[ProbeKind, str] = {
    ProbeKind.READY: "GET /readyz",
    ProbeKind.PLAN: "POST /memory/plan",
    ProbeKind.TOKEN: "a request for one token",
}


def _token_request(model: str, capabilities: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    """Path and body of the smallest request for a model with these capabilities."""
    if "embeddings" in capabilities and "chat" not in capabilities:
        return "/v1/embeddings", {"model": model, "input": "."}
    body = {"model": model, "messages": [{"role": "user", "content": "."}], "max_tokens": 1}
    return "/v1/chat/completions", body
