"""Carries one request along its chain: permits, attempts, commit, and what each end means; never touches HTTP.

Everything before the commit costs only time: a tier that fails is recorded and the next one asked, within one budget of
attempts and time. Verdicts are recorded synchronously, once, before the connection is closed.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from gateway.access.key_usage import Meter
from gateway.apis.openai.generation_request import InferenceRequest
from gateway.breaker.breakers import Breakers, Lease, Refused
from gateway.breaker.outcome import OF_THIS_TIER, End, Failure, Ignore, Next, Observation, Reason, Verdict
from gateway.errors import GatewayError, PassedOnError, UpstreamError
from gateway.providers.local.inference_snapshot import InferenceView
from gateway.providers.local.token_count import Counter
from gateway.providers.provider import Call, Provider
from gateway.providers.registry import Registry
from gateway.routing.attempt import Attempt, outcome_name
from gateway.routing.attempt_log import Outcomes
from gateway.routing.budget import Budget, Limits, unary_deadline
from gateway.routing.candidate_filter import Choice
from gateway.routing.chain import PUT_OFF, Candidate, Chain, Drop, Dropped, Found, expand, passes_on
from gateway.routing.explain_record import Record
from gateway.routing.refusal import Outcome, no_answer
from gateway.routing.resume_runner import Answer, assemble
from gateway.routing.stream_reader import ExpiredError
from gateway.settings import GatewayConfig, RouteSettings
from gateway.telemetry.gateway_metrics import Telemetry
from inference.protocol import H_DEADLINE, H_DEVICE, H_KV, H_PRIORITY, H_STREAM_INTERVAL, H_TENANT, Priority

log = logging.getLogger("gateway.routing.chain_runner")

T = TypeVar("T")


_SILENT = (Drop.SILENT, "keeps several waiting")
_RECOVERING = (Drop.RECOVERING, "takes only some requests yet")

WHOLE_INTERVAL_SECONDS = 0.25
"""Between two pieces of a local answer that the caller gets as a whole: nobody reads them, but silence is judged."""
NEARLY_OVER_SECONDS = 0.1
"""The service counts whole milliseconds on a clock of its own, and so refuses a little before our time is over."""


class Caller(NamedTuple):
    """Who asks, as far as an attempt must know. `silence_seconds` is how long the caller waits for an answer to begin,
    `gap_seconds` for its next byte. `retries`: it asks the same for the so manieth time again. `meter` counts what the
    answer takes, for a key with limits.
    """

    request_id: str
    tenant: str = ""
    priority: Priority = Priority.NORMAL
    cloud_allowed: bool = True
    silence_seconds: float | None = None
    retries: int = 0
    kv: str | None = None
    gap_seconds: float | None = None
    meter: Meter | None = None


class Way(NamedTuple):
    """What the configuration says of the requests of a route; `limits` as long as a caller names no time of its own.

    `stream_interval` and `whole_interval` are as a header says them, empty for none.
    """

    route: RouteSettings
    limits: Limits
    chain: tuple[str, ...]
    is_cloud_allowed: bool
    same_vectors: bool
    connect_seconds: float
    stream_interval: str
    whole_interval: str


@dataclass(frozen=True)
class Tools:
    """What every request shares: the configuration in force and the long-lived parts of the gateway.

    `breaker_generation` is the breakers' own at the time.
    """

    config: GatewayConfig
    registry: Registry
    breakers: Breakers
    view: InferenceView
    counter: Counter
    telemetry: Telemetry
    breaker_generation: int = 0

    @functools.cached_property
    def ways(self) -> Mapping[str, Way]:
        """By route; read once, because a model of pydantic's takes as long to tell one setting as a call."""
        said, most = self.config.deadlines, self.config.attempts.max
        intervals = [
            _interval(wanted, said.inter_token) for wanted in (self.config.stream_interval, WHOLE_INTERVAL_SECONDS)
        ]
        return {
            name: Way(
                route, Limits(said.first_token, said.inter_token, said.total, route.load_wait, most), route.chain,
                route.cloud == "allowed", route.same_vectors, said.connect, *intervals,
            )
            for name, route in self.config.routes.items()
        }  # fmt: skip


def _interval(wanted_seconds: float, silence_seconds: float) -> str:
    """How long text of a local answer may wait for more, in milliseconds: too little to be taken for silence."""
    seconds = min(wanted_seconds, silence_seconds / 4)
    return str(round(seconds * 1000)) if seconds else ""


class Request:
    """One request on its way. Create it, then call `stream`, `whole` or `unary` once.

    Of the caller's time `waited_seconds` passed before a tier could be asked. `why_cancelled` says, inside a cancelled
    task, whether the caller left or the gateway stops.
    """

    def __init__(
        self,
        tools: Tools,
        request: InferenceRequest,
        found: Found,
        caller: Caller,
        record: Record,
        began: float,
        waited_seconds: float = 0.0,
        why_cancelled: Callable[[], End] = lambda: End.CLIENT_LEFT,
    ) -> None:
        self.tools = tools
        self.request = request
        self.caller = caller
        self.record = record
        self.began = began
        self.why_cancelled = why_cancelled
        self.upstream_seconds = 0.0
        self._way = way = tools.ways[found.route]
        limits = way.limits
        if caller.silence_seconds is not None:
            limits = limits._replace(caller_silence=caller.silence_seconds, caller_gap=caller.gap_seconds)
        self._loop = asyncio.get_running_loop()  # asked once: every time it asks the kernel who we are
        self.budget = Budget(limits, self._loop.time(), waited=waited_seconds)
        self.candidates = expand(way.chain, found.model, tools.view.aliases)
        self._choice = Choice(
            tools, request, way, self.candidates, record,
            cloud_allowed=caller.cloud_allowed, priority=caller.priority,
        )  # fmt: skip
        self._outcomes = Outcomes(record)
        self._waiting: Collection[Candidate] = ()
        self._out_of_time = False
        self._interval = ""
        self.answered_by: Candidate | None = None
        self.device: str | None = None
        """What computes the answer, as far as its tier said so by now."""

    @property
    def route(self) -> RouteSettings:
        """The route's settings."""
        return self._way.route

    def label(self, candidate: Candidate) -> str:
        """The candidate's model as a metric label: names that callers invent share one."""
        return candidate.model if candidate.named or candidate.model in self.tools.view.models else "*"

    def call_for(self, candidate: Candidate, last: bool, budget: Budget, body: Mapping[str, Any] | None = None) -> Call:
        """What the provider is asked; the local hop also learns who asks and how long the answer may take."""
        headers: dict[str, str] = {}
        asked = self.request.body if body is None else body
        if candidate.is_local:
            asked = self._bounded(asked, candidate)
            wait = budget.commit_by - self._loop.time()
            if not last:
                wait = min(wait, self._way.limits.load_wait)
            headers = {
                H_PRIORITY: self.caller.priority,
                H_TENANT: self.caller.tenant,
                H_DEADLINE: str(max(1, int(wait * 1000))),
            }
            if self._interval:
                headers[H_STREAM_INTERVAL] = self._interval
            if self.caller.kv is not None:
                headers[H_KV] = self.caller.kv
        return Call(
            self.request.endpoint, candidate.model, asked, self.caller.request_id, self._way.connect_seconds, headers
        )

    @property
    def _may_wait_for_more(self) -> bool:
        """Whether text may wait for more: not where the pieces of an answer that breaks off are charged as tokens."""
        return self.caller.meter is None or not self.caller.meter.counts_tokens

    def _bounded(self, body: Mapping[str, Any], candidate: Candidate) -> Mapping[str, Any]:
        """`body` with a `max_tokens` that the model takes, where the caller only had to name one."""
        if not self.request.is_only_bounded:
            return body
        status = self.tools.view.models.get(candidate.model)
        asked = body.get("max_tokens")
        if asked is None or status is None or not status.context_length:
            return body
        most = min(asked, status.context_length)
        return body if most == asked else {**body, "max_tokens": most}

    # These three await nothing themselves: every coroutine that waits is gone through whenever the task wakes.
    def stream(self) -> Awaitable[Attempt]:
        """An attempt whose answer has begun; raises GatewayError when no tier began one.

        The caller relays `backlog`, then `listening.next()`, settles, and closes it.
        """

        async def work(attempt: Attempt) -> Attempt:
            await attempt.open(forward_comments=True)
            return attempt

        if self._may_wait_for_more:
            self._interval = self._way.stream_interval
        return self._first(work)

    def whole(self) -> Awaitable[tuple[dict[str, Any], Answer | None]]:
        """The whole answer as one object; a tier that breaks off half-way is replaced by the next one.

        Where its stream is closed without waiting the answer comes along, and the caller concludes it, when the object
        has left: nobody need wait for what is only written down. A cloud's stream is closed first: until then the
        request keeps its place.
        """

        async def work(attempt: Attempt) -> tuple[dict[str, Any], Answer | None]:
            await attempt.open(forward_comments=False)
            answer = Answer(self, attempt, whole=True)
            try:
                assembled = await assemble(answer)
                if answer.attempt.candidate.is_local:
                    return assembled, answer
            except BaseException as error:
                answer.forget_sink()
                await answer.attempt.abandon(error)
                raise
            await answer.conclude()
            return assembled, None

        if self._may_wait_for_more:
            self._interval = self._way.whole_interval
        return self._first(work)

    def unary(self) -> Awaitable[bytes]:
        """The bytes of an answer that has no stream."""

        async def work(attempt: Attempt) -> bytes:
            now = self._loop.time()
            deadline = unary_deadline(self.budget, now, is_local=attempt.candidate.is_local, last=attempt.last)
            try:
                async with asyncio.timeout_at(deadline.at):
                    answer = await attempt.provider.unary(attempt.call)
            except TimeoutError:
                raise ExpiredError(deadline, deadline.at - now) from None
            attempt.succeed()
            if self.caller.meter is not None:
                self.caller.meter.note_whole(answer)
            return answer

        return self._first(work)

    def choose_again(self) -> Chain:
        """The candidates as things are now."""
        return self._choice.again()

    def note_committed(self, attempt: Attempt) -> None:
        """The caller's status is decided: `attempt` answers."""
        attempt.listening.mark_sent()

    def note_first_token(self) -> None:
        """The first token of an answer came; a later tier's does not count again."""
        if self.record.first_token_seconds is not None:
            return
        self.record.first_token_seconds = time.monotonic() - self.began
        self.tools.telemetry.ttft.observe(self.record.first_token_seconds)

    async def _first(self, work: Callable[[Attempt], Awaitable[T]]) -> T:
        """What `work` makes of the first candidate that lets it; raises GatewayError when none does."""
        chain = self._fold()
        loop = self._loop
        waiting = self._waiting = deque(chain.kept)
        while waiting:
            candidate = waiting.popleft()
            if not self.budget.allows_attempt(loop.time()):
                self._out_of_time |= not self.budget.has_time(loop.time())
                spent = "time was" if self._out_of_time else f"{self.budget.limits.attempts} attempts were"
                self._outcomes.drop(Dropped(candidate, Drop.BUDGET, f"not asked, the request's {spent} spent"))
                continue
            if self._choice.is_open(candidate, waiting) and (verdict := await self._judge(candidate, waiting)):
                if verdict.drop in PUT_OFF:
                    self._outcomes.put_behind(verdict)
                    waiting.append(candidate)
                else:
                    self._outcomes.drop(verdict)
                continue
            provider = self.tools.registry.get(candidate.provider)
            assert provider is not None, "the fold drops absent providers"
            forced = not waiting or self._outcomes.was_put_behind(candidate)
            lease = self.acquire(candidate, forced)
            if isinstance(lease, Refused) and (lease.recovering or lease.silent):
                drop, said = _SILENT if lease.silent else _RECOVERING
                self._outcomes.put_behind(Dropped(candidate, drop, f"{lease.by} {said}"))
                waiting.append(candidate)
                continue
            if isinstance(lease, Refused):
                said = f"breaker {lease.by} open for another {max(lease.retry_in, 0):.0f} s"
                self._outcomes.drop(Dropped(candidate, Drop.BREAKER, said, lease.retry_in))
                continue
            self.budget = self.budget.spend()
            last = not waiting or not self.budget.allows_attempt(loop.time())
            self._outcomes.take_up(candidate)
            result = await self._try(candidate, provider, lease, last, work)
            if result is not None:
                return result
        raise self._failed()

    async def _judge(self, candidate: Candidate, waiting: Collection[Candidate]) -> Dropped | None:
        """What speaks against `candidate` now that its turn has come; nobody is put behind the others twice."""
        began = time.monotonic()
        verdict = await self._choice.judge(candidate, tuple(waiting), self.budget)
        self.upstream_seconds += time.monotonic() - began
        again = verdict is not None and verdict.drop in PUT_OFF and self._outcomes.was_put_behind(candidate)
        return None if again else verdict

    async def _try(
        self,
        candidate: Candidate,
        provider: Provider,
        lease: Lease,
        last: bool,
        work: Callable[[Attempt], Awaitable[T]],
    ) -> T | None:
        """`work` on one candidate; None when the next one should be asked."""
        try:
            attempt = Attempt(self, candidate, provider, lease, last)
        except BaseException:
            lease.release()
            raise
        try:
            result = await work(attempt)
        except BaseException as error:
            verdict, seen, said = attempt.settle_error(error)
            await attempt.close()
            if not isinstance(error, Exception):
                raise
            self._judge_next(attempt, verdict, seen, said, error)
            return None
        finally:
            self.upstream_seconds += time.monotonic() - attempt.began
        self._note_answer(candidate)
        self.device = attempt.call.heard.get(H_DEVICE)
        return result

    def _judge_next(self, attempt: Attempt, verdict: Verdict, seen: Observation, said: str, error: Exception) -> None:
        """Raises what ends the request here; returns when the next tier is to be asked."""
        candidate = attempt.candidate
        wait = verdict.retry_after if isinstance(verdict, Failure) else None
        if isinstance(verdict, Ignore):
            wait = verdict.hold
            if wait is None and candidate.is_local and isinstance(error, UpstreamError):
                wait = error.retry_after
            # the last tier was told of all the time there is: its own word that this was too short is ours
            self._out_of_time |= verdict.next is Next.STOP or (attempt.last and self._ended_with_time(verdict.reason))
            wider_left = candidate.is_local and self._choice.could_hold_more(candidate, self._waiting)
            if isinstance(error, UpstreamError) and passes_on(verdict, candidate, wider_left=wider_left):
                self.record.reason = str(verdict.reason)
                raise self._pass_on(verdict, error) from error
        own_words = None
        if isinstance(verdict, Ignore) and verdict.reason in OF_THIS_TIER and isinstance(error, UpstreamError):
            own_words = self._pass_on(verdict, error)
        outcome = Outcome(candidate, outcome_name(verdict, seen), said, wait, own_words=own_words)
        if verdict == Ignore(Reason.CONTEXT_LENGTH) and isinstance(error, UpstreamError):
            outcome = replace(outcome, param=error.param, details=error.details)
        self._outcomes.fail(outcome)

    def _ended_with_time(self, reason: Reason) -> bool:
        """Whether the last tier's refusal says that the time it was granted, all there was, is over.

        A model may be loading for other reasons too, so there the clock must agree.
        """
        left = self.budget.commit_by - self._loop.time()
        return reason is Reason.DEADLINE or (reason is Reason.MODEL_LOADING and left < NEARLY_OVER_SECONDS)

    def _pass_on(self, verdict: Verdict, error: UpstreamError) -> PassedOnError:
        param = error.param
        if param is None and verdict == Ignore(Reason.NOT_FOUND):
            param = "model"
        if param is None and verdict == Ignore(Reason.CONTEXT_LENGTH):
            param = next(name for name in ("messages", "prompt", "input", "documents") if name in self.request.body)
        status = error.status if error.status is not None and 400 <= error.status < 500 else 400
        return PassedOnError(error, status, param)

    def _fold(self) -> Chain:
        chain = self._choice.fold()
        self.record.chain = self.candidates
        for dropped in chain.dropped:
            self._outcomes.drop(dropped)
        for put_off in chain.put_off:
            self._outcomes.put_behind(put_off)
        return chain

    def acquire(self, candidate: Candidate, forced: bool) -> Lease | Refused:
        """Permits for an attempt at `candidate`, or the refusal."""
        tools = self.tools
        return tools.breakers.acquire(
            candidate.provider, candidate.model, self._permit_end(), forced, tools.breaker_generation
        )

    def _permit_end(self) -> float:
        """When a permit counts as lost, on the breakers' clock: after the time to commit and one silence."""
        return time.monotonic() + self.budget.limits.total + self.budget.limits.inter_token

    def _note_answer(self, candidate: Candidate) -> None:
        self.answered_by = candidate
        self.record.answered_by = candidate.name
        self.record.tier = candidate.tier
        if candidate.position > 0:
            first = self._outcomes.first
            self.record.reason = first.name
            self.tools.telemetry.fallback.labels(
                f"{first.candidate.provider}/{self.label(first.candidate)}",
                f"{candidate.provider}/{self.label(candidate)}",
                first.name,
            ).inc()

    def _failed(self) -> GatewayError:
        """The refusal when no tier answered: what each said, and when coming back may help."""
        waits = self._outcomes.waiting(self._ready_in)
        error = no_answer(self.request, waits, self._time_spent(), asks_again=self.caller.retries > 0)
        self.record.reason = waits[0].name if waits else str(error.code)
        return error

    def _ready_in(self, outcome: Outcome) -> float:
        """In how many seconds its tier may take a request, as far as anything is known now."""
        name = outcome.candidate
        known = self.tools.breakers.closed_for(name.provider, name.model) if outcome.drop is None else None
        return max(known or 0.0, self._choice.ready_in(name))

    def _time_spent(self) -> str | None:
        """Whose time is over, for people; None while some is left."""
        now = self._loop.time()
        return None if not self._out_of_time and self.budget.has_time(now) else self.budget.whose_time(now)
