"""Runs one request along its chain: permits, attempts, and the next candidate after a failure.

Until the commit a failed candidate costs only time: it is recorded and the next one is tried, within one budget of
attempts and time. Each attempt is settled once, before its connection is closed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from typing import Any, TypeVar

from gateway.apis.lenient_json import dumps
from gateway.apis.openai.generation_request import InferenceRequest
from gateway.breaker.breakers import Lease
from gateway.breaker.outcome import End, Failure, Ignore, Next, Observation, Verdict, is_node_specific
from gateway.breaker.permits import Refused
from gateway.errors import GatewayError, PassedOnError
from gateway.nodes.node_selection import NodeSelection
from gateway.providers.local.candidate_facts import SHORT_REST_SECONDS
from gateway.providers.provider import AnswersWhole, Provider
from gateway.routing.attempt import Attempt
from gateway.routing.budget import Deadline, unary_deadline
from gateway.routing.candidate_filter import CandidateFilter
from gateway.routing.candidate_outcomes import (
    CandidateOutcome,
    CandidateOutcomes,
    failed_attempt,
    no_answer,
    outcome_name,
    ran_out_of_time,
)
from gateway.routing.chain import DEFERRING, Candidate, Drop, Dropped, RouteMatch, Selection, expand
from gateway.routing.explain_record import Record
from gateway.routing.request_context import GatewayState, RequestContext, RequestState
from gateway.routing.resume_runner import Answer, assemble
from inference.protocol import H_DEVICE, Code

T = TypeVar("T")

MAX_BREAKS = 2
"""Nodes whose model or device may fail under one request before its candidate is given up. A connection that closes
does not count: then the node has ended, which no request causes."""

USAGE_BYTES = 1024
"""The end of an answer without a stream, where its usage is."""

_SILENT = (Drop.SILENT, "several attempts wait for its first byte")
_RECOVERING = (Drop.RECOVERING, "it recovers from a failure and gets few requests at a time")


class ChainRunner:
    """One request and its chain. Create it, then call `stream`, `whole` or `unary` once.

    See `RequestState` for `began`, `waited_seconds` and `cancel_reason`.
    """

    def __init__(
        self,
        gateway: GatewayState,
        request: InferenceRequest,
        match: RouteMatch,
        context: RequestContext,
        record: Record,
        began: float,
        waited_seconds: float = 0.0,
        cancel_reason: Callable[[], End] = lambda: End.CLIENT_LEFT,
    ) -> None:
        policy = gateway.policies[match.route]
        self._state = RequestState(gateway, request, policy, context, record, began, waited_seconds, cancel_reason)
        self._record = record
        self.candidates = expand(policy.route.chain, match.model, gateway.view.aliases)
        self._filter = CandidateFilter(
            gateway, request, policy, self.candidates, record,
            cloud_allowed=context.cloud_allowed, priority=context.priority, nodes=self._state.nodes,
        )  # fmt: skip
        self._outcomes = CandidateOutcomes(record)
        self._waiting: deque[Candidate] = deque()
        self._out_of_time = False
        self._breaks = 0
        self.upstream_seconds = 0.0
        self.answered_by: Candidate | None = None
        self.device: str | None = None
        """The device that computes the answer, if the provider reports it."""

    # `stream`, `whole` and `unary` are not coroutines: each coroutine on the stack is resumed whenever the task wakes.
    def stream(self) -> Awaitable[Answer]:
        """A committed answer; raises GatewayError when no candidate began one.

        The caller relays its frames, settles its attempt and closes it.
        """

        async def work(attempt: Attempt) -> Answer:
            await attempt.open(forward_comments=True)
            return Answer(self._state, self._filter, attempt)

        if self._may_delay_text:
            self._state.stream_interval = self._state.policy.stream_interval
        return self._first(work)

    def whole(self) -> Awaitable[tuple[dict[str, Any], Answer | None]]:
        """The whole answer as one object. Only the same local model resumes it; otherwise the next candidate answers.

        For a local candidate the answer is returned too, and the caller closes it after sending the object. The stream
        of a cloud is closed before this returns.
        """

        async def work(attempt: Attempt) -> tuple[dict[str, Any], Answer | None]:
            provider = attempt.provider
            if self._state.policy.route.whole_answers == "whole" and isinstance(provider, AnswersWhole):
                return await self._in_one_piece(attempt, provider), None
            await attempt.open(forward_comments=False)
            answer = Answer(self._state, self._filter, attempt, whole=True)
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

        if self._may_delay_text:
            self._state.stream_interval = self._state.policy.whole_interval
        return self._first(work)

    async def _in_one_piece(self, attempt: Attempt, provider: AnswersWhole) -> dict[str, Any]:
        """An answer without a stream. It shows no progress, so all remaining time is its limit."""
        state, budget = self._state, self._state.budget
        answer = await attempt.within(Deadline(budget.commit_by, budget.commit_due), provider.whole(attempt.call))
        usage = dumps(answer.get("usage"))
        state.record.note_usage(usage)
        attempt.succeed()
        if state.context.meter is not None:
            state.context.meter.note_whole(usage)
        return answer

    def unary(self) -> Awaitable[bytes]:
        """The bytes of an answer that has no stream."""
        state = self._state

        async def work(attempt: Attempt) -> bytes:
            now = state.loop.time()
            deadline = unary_deadline(state.budget, now, is_local=attempt.candidate.is_local, last=attempt.last)
            answer = await attempt.within(deadline, attempt.provider.unary(attempt.call))
            state.record.note_usage(answer[-USAGE_BYTES:])
            attempt.succeed()
            if state.context.meter is not None:
                state.context.meter.note_whole(answer)
            return answer

        return self._first(work)

    @property
    def _may_delay_text(self) -> bool:
        """Whether the worker may hold text back to send larger pieces: not where each piece is counted as a token."""
        return not self._state.context.counts_pieces

    # --- the loop over the chain -------------------------------------------------------------------------------------
    async def _first(self, work: Callable[[Attempt], Awaitable[T]]) -> T:
        """The result of `work` for the first candidate that succeeds; raises GatewayError when none does."""
        state, outcomes = self._state, self._outcomes
        now, nodes = state.loop.time, self._filter.nodes
        waiting = self._waiting = deque(self._select().kept)
        while waiting:
            candidate = waiting.popleft()
            if not state.budget.allows_attempt(now()):
                self._out_of_time |= not state.budget.has_time(now())
                spent = "time was" if self._out_of_time else f"{state.budget.limits.attempts} attempts were"
                outcomes.drop(Dropped(candidate, Drop.BUDGET, f"not tried: the request's {spent} spent"))
                continue
            resolved = await self._resolved(candidate)
            if isinstance(resolved, Dropped):
                if resolved.drop is Drop.NO_NODE and outcomes.has_failed(candidate):
                    self._record.dropped[candidate.name] = f"{resolved.drop}: {resolved.message}"
                else:
                    outcomes.drop(resolved)
                continue
            candidate = resolved
            if self._filter.may_change(candidate, waiting) and (verdict := await self._judge(candidate, waiting)):
                if verdict.drop in DEFERRING:
                    outcomes.defer(verdict)
                    waiting.append(candidate)
                else:
                    outcomes.drop(verdict)
                continue
            provider = state.gateway.provider_of(candidate)
            assert provider is not None, "the filter drops absent providers"
            other_node = nodes is not None and nodes.has_other
            forced = not other_node and (not waiting or outcomes.is_deferred(candidate))
            lease = await state.acquire(candidate, forced=forced)
            if isinstance(lease, Refused):
                if nodes is not None and other_node:
                    nodes.refused(candidate.node, candidate.model, lease)
                    waiting.appendleft(candidate)
                elif lease.recovering or lease.silent:
                    drop, why = _SILENT if lease.silent else _RECOVERING
                    outcomes.defer(Dropped(candidate, drop, f"{lease.by}: {why}"))
                    waiting.append(candidate)
                else:
                    why = f"breaker {lease.by} is open; retry in {max(lease.retry_in, 0):.0f} s"
                    outcomes.drop(Dropped(candidate, Drop.BREAKER, why, lease.retry_in))
                continue
            state.budget = state.budget.spend()
            last = not waiting or not state.budget.allows_attempt(now())
            outcomes.start(candidate)
            result = await self._try(candidate, provider, lease, last, other_node, work)
            if result is not None:
                return result
        raise self._no_answer()

    def _select(self) -> Selection:
        chain = self._filter.select()
        self._record.chain = self.candidates
        for dropped in chain.dropped:
            self._outcomes.drop(dropped)
        for deferred in chain.deferred:
            self._outcomes.defer(deferred)
        return chain

    async def _resolved(self, candidate: Candidate) -> Candidate | Dropped:
        """`candidate` with the model that it stands for now and the node; the reason if there is none."""
        budget = self._state.budget
        if not candidate.is_rule and self._filter.nodes is None:
            return candidate
        began = time.monotonic()
        resolved = await self._filter.resolved(candidate, budget)
        if not isinstance(resolved, Dropped):
            resolved = await self._filter.placed(resolved, budget)
        self.upstream_seconds += time.monotonic() - began
        return resolved

    async def _judge(self, candidate: Candidate, waiting: Collection[Candidate]) -> Dropped | None:
        """Why `candidate` is not tried now; None when it is. No candidate is deferred twice."""
        began = time.monotonic()
        verdict = await self._filter.judge(candidate, tuple(waiting), self._state.budget)
        self.upstream_seconds += time.monotonic() - began
        again = verdict is not None and verdict.drop in DEFERRING and self._outcomes.is_deferred(candidate)
        return None if again else verdict

    async def _try(
        self,
        candidate: Candidate,
        provider: Provider,
        lease: Lease,
        last: bool,
        other_node: bool,
        work: Callable[[Attempt], Awaitable[T]],
    ) -> T | None:
        """The result of `work` for one candidate; None when the next one is to be tried."""
        try:
            attempt = Attempt(self._state, candidate, provider, lease, last, other_node=other_node)
        except BaseException:
            lease.release()
            raise
        try:
            result = await work(attempt)
        except BaseException as error:
            verdict, observation, message = attempt.settle_error(error)
            await attempt.close()
            if not isinstance(error, Exception):
                raise
            self._note_failure(attempt, verdict, observation, message, error)
            return None
        finally:
            self.upstream_seconds += time.monotonic() - attempt.began
        self._note_answer(candidate)
        self.device = attempt.call.response_headers.get(H_DEVICE)
        return result

    # --- results -----------------------------------------------------------------------------------------------------
    def _note_failure(
        self, attempt: Attempt, verdict: Verdict, observation: Observation, message: str, error: Exception
    ) -> None:
        """Records a failed attempt; raises PassedOnError when it ends the request."""
        candidate, state = attempt.candidate, self._state
        if isinstance(verdict, Ignore):
            seconds_left = state.budget.commit_by - state.loop.time()
            self._out_of_time |= verdict.next is Next.STOP or (attempt.last and ran_out_of_time(verdict, seconds_left))
        outcome = failed_attempt(
            state.request, candidate, verdict, observation, message, error,
            larger_context_left=candidate.is_local and self._filter.may_hold_more(candidate, self._waiting),
        )  # fmt: skip
        if isinstance(outcome, PassedOnError):
            self._record.reason = outcome_name(verdict, observation)
            raise outcome from error
        is_first, retry_in = not self._outcomes.has_failed(candidate), outcome.retry_in
        self._outcomes.fail(outcome)
        # the inference service names a short time if another device has room for the model
        is_movable = outcome.name == Code.DEVICE_LOST and retry_in is not None and retry_in <= SHORT_REST_SECONDS
        if self._filter.nodes is not None and candidate.is_local:
            self._try_elsewhere(self._filter.nodes, candidate, verdict, outcome.name)
        elif is_movable and is_first:
            self._waiting.append(candidate)  # once more, after the others

    def _try_elsewhere(self, nodes: NodeSelection, candidate: Candidate, verdict: Verdict, why: str) -> None:
        """Lets the next turn be that of the same candidate on another node, if one may answer the request.

        The candidates that wait keep an attempt each. A request that broke on two nodes is perhaps the cause.
        """
        nodes.failed(candidate.node, candidate.model, verdict, why)
        self._breaks += isinstance(verdict, Failure) and verdict.broke and verdict.reached
        may_move = is_node_specific(verdict) and self._breaks < MAX_BREAKS
        if may_move and self._state.budget.attempts_left > len(self._waiting):
            self._waiting.appendleft(candidate)

    def _note_answer(self, candidate: Candidate) -> None:
        self.answered_by = candidate
        self._record.answered_by, self._record.node = candidate.name, candidate.node
        self._record.tier = candidate.tier
        if candidate.position > 0:
            first, label = self._outcomes.first, self._state.model_label
            self._record.reason = first.name
            self._state.gateway.telemetry.fallback.labels(
                f"{first.candidate.provider}/{label(first.candidate)}",
                f"{candidate.provider}/{label(candidate)}",
                first.name,
            ).inc()

    def _no_answer(self) -> GatewayError:
        """The error when no candidate answered, with each outcome and when a retry may succeed."""
        state = self._state
        outcomes = self._outcomes.in_chain_order(self._ready_in)
        now = state.loop.time()
        has_time = not self._out_of_time and state.budget.has_time(now)
        passed_limit = None if has_time else state.budget.limit_text(now)
        error = no_answer(state.request, outcomes, passed_limit, is_retry=state.context.retries > 0)
        self._record.reason = outcomes[0].name if outcomes else str(error.code)
        return error

    def _ready_in(self, outcome: CandidateOutcome) -> float:
        """Seconds until the candidate may take a request, as far as known."""
        candidate = outcome.candidate
        gateway = self._state.gateway
        breaker_open_for = gateway.open_for(candidate, candidate.model) if outcome.drop is None else None
        return max(breaker_open_for or 0.0, self._filter.ready_in(candidate))
