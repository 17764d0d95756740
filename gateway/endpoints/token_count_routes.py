"""`POST /v1/messages/count_tokens` and `/v1/responses/input_tokens`: the tokens of a request for the candidate that
would answer it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import orjson

from gateway.apis.openai.generation_request import InferenceRequest
from gateway.endpoints.serve import Job, Parse, RequestApp, log_end
from gateway.errors import PassedOnError, UpstreamError, UpstreamKind
from gateway.providers.provider import Call, CountsTokens
from gateway.routing.budget import Budget
from gateway.routing.candidate_filter import CandidateFilter
from gateway.routing.candidate_outcomes import CandidateOutcome, CandidateOutcomes, no_answer
from gateway.routing.chain import Candidate, Drop, Dropped, RouteMatch, expand
from gateway.routing.explain_record import AttemptRecord, Record
from gateway.routing.request_context import GatewayState, RequestContext
from gateway.runtime import Runtime
from gateway.telemetry.quote_redaction import without_quotes
from inference.protocol import Code

PATH = "/v1/messages/count_tokens"
INPUT_TOKENS_PATH = "/v1/responses/input_tokens"

SECONDS = 30.0
"""Time limit of one count. For a model that is not loaded a helper process reads its vocabulary first."""

_LACK_OF_ROOM = frozenset((Drop.HELD, Drop.NO_FIT))
"""Reasons to drop a candidate that do not matter to a count."""


class CountTokens(RequestApp):
    """Counts the tokens of requests. `extra` are further fields of the response."""

    takes_tokens = False

    def __init__(
        self,
        runtime: Runtime,
        parse: Parse,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(runtime, parse)
        self._extra = extra or {}

    async def run(self, job: Job) -> bytes | None:
        """See `RequestApp`."""
        exchange, record = job.exchange, job.record
        request, waited = job.parsed.request, job.note_waited()
        counting = _Counting(job.state, request, job.match, job.context, record, waited)
        began = time.monotonic()
        try:
            answered_by, count = await counting.result()
        finally:
            exchange.upstream_seconds = time.monotonic() - began
        exchange.tier, exchange.model, exchange.reason = answered_by.tier, answered_by.name, record.reason
        exchange.attempts = len(record.attempts)
        record.outcome, record.status = "success", 200
        return orjson.dumps({**self._extra, "input_tokens": count})

    def finish(self, record: Record) -> None:
        """Logs a failed request. Metrics do not include counts, because a count is not an answer."""
        if record.status not in (None, 200):
            log_end(record)


class _Counting:
    """One count request and its chain.

    Candidates are dropped for the same reasons as for an answer. The result of a count does not change a
    breaker, because it does not show whether the provider can generate.
    """

    def __init__(
        self,
        gateway: GatewayState,
        request: InferenceRequest,
        match: RouteMatch,
        context: RequestContext,
        record: Record,
        waited: float,
    ) -> None:
        """The client has already waited `waited` seconds."""
        self._gateway = gateway
        self._request = request
        self._context = context
        self._record = record
        self._outcomes = CandidateOutcomes(record)
        self._short: deque[Candidate] = deque()
        """Local candidates that lack memory or queue space, but can count."""
        self._loop = asyncio.get_running_loop()
        policy = gateway.policies[match.route]
        limits = policy.limits._replace(client_silence=context.silence_seconds)
        self._budget = Budget(limits, self._loop.time(), waited=waited)
        record.chain = expand(policy.route.chain, match.model, gateway.view.aliases)
        self._filter = CandidateFilter(
            gateway, request, policy, record.chain, record,
            cloud_allowed=context.cloud_allowed, priority=context.priority,
        )  # fmt: skip

    async def result(self) -> tuple[Candidate, int]:
        """The candidate that would answer, and its count; raises GatewayError when there is no count."""
        waiting = self._candidates()
        while waiting and self._budget.has_time(self._loop.time()):
            candidate = await self._filter.resolved(waiting.popleft(), self._budget)
            if isinstance(candidate, Dropped):
                self._outcomes.drop(candidate)
                if not waiting:
                    waiting, self._short = self._short, deque()
                continue
            self._outcomes.start(candidate)
            count = await self._try(candidate, last=not waiting)
            if count is not None:
                self._record.answered_by, self._record.tier = candidate.name, candidate.tier
                if candidate.position > 0:
                    self._record.reason = self._outcomes.first.name
                return candidate, count
            waiting = self._still_possible(waiting)
        for candidate in waiting:
            self._outcomes.drop(Dropped(candidate, Drop.BUDGET, "not tried: the request's time was spent"))
        now = self._loop.time()
        spent = None if self._budget.has_time(now) else self._budget.limit_text(now)
        waits = self._outcomes.in_chain_order(lambda _: 0.0)
        raise no_answer(self._request, waits, spent, is_retry=self._context.retries > 0)

    def _candidates(self) -> deque[Candidate]:
        """The candidates to try. If none is kept, local ones that only lack memory or queue space can still count."""
        chain = self._filter.select()
        for dropped in chain.dropped:
            self._outcomes.drop(dropped)
        for deferred in chain.deferred:
            self._outcomes.defer(deferred)
        short = (dropped.candidate for dropped in chain.dropped if dropped.drop in _LACK_OF_ROOM)
        self._short = deque(candidate for candidate in short if candidate.is_local)
        return deque(chain.kept) or self._short

    def _still_possible(self, waiting: deque[Candidate]) -> deque[Candidate]:
        """`waiting` without the candidates that are ruled out now: a breaker may have opened during the last try."""
        dropped = (item for item in self._filter.select_again().dropped if item.drop not in _LACK_OF_ROOM)
        lost = {item.candidate: item for item in dropped if item.candidate in waiting}
        for item in lost.values():
            self._outcomes.drop(item)
        return deque(candidate for candidate in waiting if candidate not in lost)

    async def _try(self, candidate: Candidate, *, last: bool) -> int | None:
        """The count of `candidate`; None to try the next one. Raises PassedOnError if it rejects the request."""
        began = self._loop.time()
        seconds = min(SECONDS, self._budget.commit_by - began, math.inf if last else self._budget.share(began))
        retry_in, failure = None, "timeout"
        try:
            async with asyncio.timeout(seconds):
                count = await self._count(candidate, seconds)
        except TimeoutError:
            message = f"no response within {seconds:.3g} s"
        except UpstreamError as error:
            if error.status is not None and error.status in (400, 413, 422):
                raise PassedOnError(error, error.status, error.param) from error
            message, retry_in = str(error), error.retry_after
            failure = str(error.kind) if error.status is None else f"status_{error.status}"
        else:
            self._note(candidate, "success", "", began)
            return count
        self._note(candidate, failure, message, began)
        self._outcomes.fail(CandidateOutcome(candidate, failure, message, retry_in))
        return None

    def _note(self, candidate: Candidate, outcome: str, message: str, began: float) -> None:
        kept = without_quotes(message, self._request.body)[:500]
        self._record.attempts.append(AttemptRecord(candidate.name, outcome, kept, round(self._loop.time() - began, 6)))

    async def _count(self, candidate: Candidate, seconds: float) -> int:
        gateway, request = self._gateway, self._request
        if candidate.is_local:
            return await gateway.counter.count(candidate.model, request.body, seconds)
        provider = gateway.registry.providers.get(candidate.provider)
        if isinstance(provider, CountsTokens):
            connect = gateway.config.deadlines.connect
            return await provider.count_tokens(
                Call(request.endpoint, candidate.model, request.body, self._context.request_id, connect)
            )
        raise UpstreamError(
            UpstreamKind.STATUS,
            f"{candidate.name} would answer this request but cannot count tokens; use a model of local or anthropic",
            status=400,
            code=Code.UNSUPPORTED_PARAMETER,
            param="model",
        )
