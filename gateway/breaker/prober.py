"""Asks our own inference service whether it is well, off the users' path; decides neither when nor what it means.

`gateway.breaker.probe_schedule` decides both. One task asks one question at a time; clouds are never asked anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import orjson

from gateway.breaker import probe_schedule
from gateway.breaker.breakers import Breakers
from gateway.breaker.guard import PROBES, Clock, Guard
from gateway.breaker.outcome import LOCAL, Failure, Scope
from gateway.breaker.permits import Permit, Refusal, State
from gateway.breaker.probe_schedule import ASK_SECONDS, Finding, Purpose, Question, Step, Watch
from gateway.errors import UpstreamError
from inference.protocol import H_PROBE, ModelStatus

log = logging.getLogger("gateway.breaker.prober")

GRACE_SECONDS = 1.0
"""So much longer than its answer may take a probe's permit is held, should its task have died."""

OnProbe = Callable[[Purpose, Finding], None]
"""Called with every probe that came back."""


class Service(Protocol):
    """What is asked; both raise UpstreamError."""

    async def get_json(self, path: str, seconds: float) -> Any:
        """The JSON at a GET path."""
        ...

    async def post_json(self, path: str, body: bytes, seconds: float, headers: Mapping[str, str] | None = None) -> Any:
        """The JSON that answers a POST."""
        ...


class Prober:
    """All probes of one gateway. `models` tells what the service said of its models: no others are asked for."""

    def __init__(
        self,
        breakers: Breakers,
        service: Callable[[], Service],
        models: Callable[[], Mapping[str, ModelStatus]],
        clock: Clock = time.monotonic,
        on_probe: OnProbe = lambda *_: None,
    ) -> None:
        self._breakers = breakers
        self._service = service
        self._models = models
        self._clock = clock
        self._on_probe = on_probe
        self._watches: dict[str, Watch] = {}
        self._changed = asyncio.Event()

    def suspect(self) -> None:
        """The service itself failed somebody: that is confirmed or refuted now."""
        if self._breakers.guard(LOCAL).book.state is State.CLOSED:
            self._watches[""] = probe_schedule.suspected(self._watches.get("", Watch()), self._clock())
            self._changed.set()

    def moved(self, model: str, state: State | None) -> None:
        """A breaker of ours moved, or was forgotten (None)."""
        if state is State.OPEN:
            needs_memory = bool(model) and self._breakers.guard(LOCAL, model).needs_memory
            watch = self._watches.get(model, Watch())
            self._watches[model] = probe_schedule.opened(watch, self._clock(), needs_memory)
        elif state is not State.HALF_OPEN:
            self._watches.pop(model, None)
        self._changed.set()

    def hint(self, model: str = "") -> None:
        """Something says that the service, or this model of it, is well again."""
        if model in self._watches:
            self._watches[model] = probe_schedule.hinted(self._watches[model])
            self._changed.set()

    def next(self) -> Step | None:
        """The next probe, and when; None while nothing is to be found out."""
        known = self._models() if self._watches else {}
        guards = self._breakers.of(LOCAL)
        watches = {model: watch for model, watch in self._watches.items() if not model or model in known}
        return probe_schedule.choose(watches, {model: guards[model].book.state for model in watches if model in guards})

    async def run(self) -> None:
        """Probes until cancelled, whatever happens. Without it open periods end by themselves."""
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
                await self.ask(step)
            except Exception:
                log.exception("a probe of %s failed in the gateway itself", step.model or LOCAL)
                await asyncio.sleep(GRACE_SECONDS)

    async def ask(self, step: Step) -> None:
        """Makes one probe, under a permit that keeps everybody else from probing, and records what it proves."""
        guard = self._breakers.guard(LOCAL, step.model)
        expires = self._clock() + ASK_SECONDS[step.question] + GRACE_SECONDS
        service = self._breakers.guard(LOCAL)
        outer = service.ask(expires) if step.model and service.book.state is not State.CLOSED else None
        if isinstance(outer, Refusal):
            self._note(step, Finding.UNKNOWN)  # a user finds out about the service just now
            return
        permit = self._permit(guard, step, expires)
        finding, said = Finding.UNKNOWN, "it was not asked"
        try:
            if permit is not None:  # else the breaker moved meanwhile
                finding, said = await self._find_out(step)
        finally:
            if outer is not None:
                service.give_back(outer)
            if permit is not None:
                self._note(step, finding)
                self._settle(guard, permit, step, finding, said)
        if permit is not None:
            self._on_probe(step.purpose, finding)

    def _note(self, step: Step, finding: Finding) -> None:
        if (watch := self._watches.get(step.model)) is not None:
            self._watches[step.model] = probe_schedule.asked(watch, step.purpose, finding, self._clock())

    def _permit(self, guard: Guard, step: Step, expires: float) -> Permit | None:
        if step.purpose is Purpose.RECOVER:
            return guard.scout(expires)
        if guard.book.state is not State.CLOSED:
            return None
        permit = guard.ask(expires, forced=True)
        assert isinstance(permit, Permit), "a closed breaker refuses nobody who is forced"
        return permit

    def _settle(self, guard: Guard, permit: Permit, step: Step, finding: Finding, said: str) -> None:
        if step.purpose is Purpose.RECOVER:
            guard.scouted(permit, finding, said)
        elif finding is Finding.BAD:
            guard.last_probe = said
            guard.fail(permit, Failure(Scope.PROVIDER), said, PROBES)
        else:
            guard.last_probe = said
            guard.give_back(permit)

    async def _find_out(self, step: Step) -> tuple[Finding, str]:
        """What the probe proves, and in words what it heard."""
        seconds = ASK_SECONDS[step.question]
        try:
            answer, asked = await self._question(step, seconds), _NAMES[step.question]
        except UpstreamError as error:
            if step.model and probe_schedule.is_down(error):
                self.suspect()
            return probe_schedule.found(step.purpose, step.question, error), f"{_NAMES[step.question]}: {error}"
        finding = probe_schedule.found(step.purpose, step.question, answer if isinstance(answer, dict) else {})
        return finding, f"{asked} {'was answered' if finding is Finding.GOOD else 'refuses'}"

    async def _question(self, step: Step, seconds: float) -> Any:
        service = self._service()
        if step.question is Question.READY:
            return await service.get_json("/readyz", seconds)
        if step.question is Question.PLAN:
            return await service.post_json("/memory/plan", orjson.dumps({"model": step.model}), seconds)
        status = self._models().get(step.model)
        path, body = _token_request(step.model, status.capabilities if status is not None else ())
        return await service.post_json(path, orjson.dumps(body), seconds, {H_PROBE: "1"})


_NAMES: Mapping[Question, str] = {
    Question.READY: "GET /readyz",
    Question.PLAN: "POST /memory/plan",
    Question.TOKEN: "a request for one token",
}


def _token_request(model: str, capabilities: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    """Path and body of the least that a model of these capabilities can be asked."""
    if "embeddings" in capabilities and "chat" not in capabilities:
        return "/v1/embeddings", {"model": model, "input": "."}
    body = {"model": model, "messages": [{"role": "user", "content": "."}], "max_tokens": 1}
    return "/v1/chat/completions", body
