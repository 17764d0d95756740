"""Follows one answer over the attempts that generate its pieces, and starts the next attempt after a break.

A break after the commit is settled like every other end of an attempt. Then the candidates that may resume are
tried in turn, all within one deadline; the frames of the first one that opens a stream are joined to the answer. When
no candidate can resume, the error of the break is raised.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from gateway.apis.openai.assemble import Assembly
from gateway.apis.openai.frames import Data, Done, Frame
from gateway.apis.openai.generation_request import AnyRequest, ChatRequest, choices_of
from gateway.breaker.outcome import Failure, Ignore, Reason, Scope, Verdict
from gateway.breaker.permits import Refused
from gateway.errors import UpstreamError, UpstreamKind
from gateway.providers.anthropic.anthropic_models import takes_prefill
from gateway.routing import resume_policy
from gateway.routing.attempt import Attempt
from gateway.routing.budget import Budget
from gateway.routing.candidate_filter import CandidateFilter
from gateway.routing.candidate_outcomes import outcome_name
from gateway.routing.chain import Candidate, Dropped
from gateway.routing.explain_record import BreakRecord
from gateway.routing.request_context import RequestState
from gateway.routing.resume_policy import PartialAnswer
from gateway.routing.splice import SentAnswer, Splice, resume_comment
from gateway.routing.stream_reader import ExpiredError
from gateway.telemetry.quote_redaction import without_quotes
from headgate.shared.bodies.openai_bodies import CompletionRequest

log = logging.getLogger("gateway.routing.resume_runner")

MAX_STREAM_BYTES = 2**29
"""Of a stream that is assembled to one object; a chunk takes 100 bytes to 4 KiB."""

Sink = Callable[[list[Frame]], bool]
"""Takes frames as they arrive; False leaves them to the reading task."""

_SPILLED = Ignore(Reason.SPILLED)
"""The verdict on an attempt that is replaced although it did not fail."""
_DOWN = Failure(Scope.PROVIDER)
"""The verdict on an attempt whose service is down."""


class Answer:
    """The frames of one committed answer. `attempt` is the current one; the reader of the answer settles and closes it.

    `whole`: the client has nothing of the answer yet, so only the same model resumes it, within the request's own time.
    """

    def __init__(
        self, state: RequestState, candidate_filter: CandidateFilter, attempt: Attempt, *, whole: bool = False
    ) -> None:
        self.attempt = attempt
        self._state = state
        self._filter = candidate_filter
        self._whole = whole
        request = state.request
        obstacle = resume_policy.why_not_resumable(request, state.policy.route.resume)
        self._sent = SentAnswer(obstacle, choices_of(request.body))
        """What the client has."""
        if not whole:
            attempt.reader.is_replaceable = self._is_replaceable
        self._splice: Splice | None = None
        self._sink: Sink | None = None
        self._hops = 0
        self._budget: Budget | None = None
        self._break: BreakRecord
        """The last break."""
        self._tried: set[Candidate] = set()
        """Candidates that were tried since the last new text."""
        self._stalled: set[Candidate] = set()
        """Candidates whose attempt ended with keep-alives only."""

    def first_frames(self) -> list[Frame]:
        """The frames that have arrived; at least one."""
        frames = [*self.attempt.backlog, *self.attempt.reader.ready()]
        self._note(frames)
        return frames

    def _note(self, frames: list[Frame]) -> None:
        if not frames or not isinstance(frames[-1], Done):  # a complete answer is not resumed
            self._sent.note(frames)

    async def next(self) -> list[Frame]:
        """The next frames; at least one. Raises the UpstreamError or ExpiredError that ends the answer."""
        while True:
            frames = self.attempt.reader.ready()
            if not frames:
                try:
                    frames = [await self.attempt.reader.next()]
                except (UpstreamError, ExpiredError) as error:
                    return await self._after(error)
                frames += self.attempt.reader.ready()
            self.attempt.note_content()
            if joined := self._join(frames):
                return joined

    def pass_on(self, sink: Sink) -> None:
        """Gives `sink` the frames that arrive while `next` waits; see `StreamReader.pass_on`."""
        self._sink = sink
        self.attempt.reader.pass_on(self._passes)

    def _passes(self, frames: list[Frame]) -> bool:
        assert self._sink is not None
        if self._splice is not None or not self._sink(frames):
            return False  # joined frames may be empty, or the end, which `next` handles
        self._sent.note(frames)
        return True

    def _join(self, frames: list[Frame]) -> list[Frame]:
        joined = frames if self._splice is None else self._splice.join(frames)
        self._note(joined)
        return joined

    def forget_sink(self) -> None:
        """Drops the sink, which usually refers to its answer: a reference cycle otherwise."""
        self._sink = None

    async def conclude(self) -> None:
        """Records that the answer is complete, and closes it."""
        try:
            self.attempt.succeed()
            self.note_end()
        finally:
            self.forget_sink()
            await self.attempt.close()

    def note_end(self) -> None:
        """Records that the answer reached its regular end."""
        if self._splice is not None:
            self._count("resumed")

    # --- after a break -----------------------------------------------------------------------------------------------
    async def _after(self, error: UpstreamError | ExpiredError) -> list[Frame]:
        """A comment before the next piece, or the end of a complete answer; raises `error` when there is neither."""
        broken, sent = self.attempt, self._sent
        verdict, observation, message = broken.settle_error(error)
        await broken.close()
        message = without_quotes(message, broken.call.body)[:300]
        self._break = BreakRecord(broken.candidate.place, message)
        self._state.record.breaks.append(self._break)
        if sent.is_finished:
            self._break.outcome = "complete"
            self._count("complete")
            return [Done()]
        if isinstance(error, ExpiredError) and error.kept_alive:
            self._stalled.add(broken.candidate)
        if broken.reader.answered:
            self._hops = self._resumes_with_this
            self._tried.clear()
            self._budget = None
        partial = sent.partial  # before `_obstacle`, which depends on it
        result = self._obstacle(verdict, self._hops)
        if result is None:
            try:
                is_resumed = await self._resume(self._candidates(verdict, partial), partial)
            except BaseException:
                self._break.outcome = "cancelled"
                raise
            if is_resumed:
                name = self.attempt.candidate.place
                characters = len(partial.content) + len(partial.reasoning)
                self._break.outcome = "resumed"
                self._state.record.hops.append(f"{name} after {characters} characters: {message}")
                log.info("request %s: resumed on %s after %d characters", self._state.record.id, name, characters)
                return [resume_comment(name, characters, outcome_name(verdict, observation))]
            self.attempt = broken
        self._break.outcome = result = result or "failed"
        self._count(result)
        raise error

    @property
    def _resumes_with_this(self) -> int:
        """The number of resumes after the current attempt, which has given a part of the answer."""
        return self._hops + (self._splice is not None)

    def _is_replaceable(self, is_down: bool) -> bool:
        """Whether another attempt could resume the answer if the current one ended now. `is_down`: the breaker of its
        service has just opened, so another node may serve the same candidate.
        """
        sent, state = self._sent, self._state
        if sent.is_finished:
            return True
        partial = sent.partial  # before `_obstacle`, which depends on it
        verdict = _DOWN if is_down else _SPILLED
        if self._obstacle(verdict, self._resumes_with_this) is not None:
            return False
        policy, kept = state.policy.route.resume, self._filter.select_again().kept
        order = resume_policy.resume_order(kept, self.attempt.candidate, verdict, policy, partial, self._stalled)
        return any(_continuation(state, partial, candidate) is not None for candidate in order)

    def _obstacle(self, verdict: Verdict, resumes: int) -> str | None:
        """Why the answer is not resumed at all; None when it may be."""
        if self._sent.has_begun and self._sent.obstacle is not None:
            return self._sent.obstacle
        if not resume_policy.is_resumable(verdict):
            return "refused"
        return "failed" if resumes >= resume_policy.MAX_RESUMES else None

    def _candidates(self, verdict: Verdict, partial: PartialAnswer) -> list[Candidate]:
        """The candidates to try, in order; records the reason for each of the others."""
        broken = self.attempt.candidate
        selection = self._filter.select_again()
        for dropped in selection.dropped:
            self._drop(dropped.candidate, f"{dropped.drop}: {dropped.message}")
        break_facts = (broken, verdict, self._state.policy.route.resume, partial, self._stalled)
        for candidate in selection.kept:
            if (why := resume_policy.why_excluded(candidate, *break_facts)) is not None:
                self._drop(candidate, why)
        candidates = []
        for candidate in resume_policy.resume_order(selection.kept, *break_facts):
            if candidate in self._tried:
                self._drop(candidate, "it was tried already")
            elif self._whole and not (candidate == broken and candidate.is_local):
                self._drop(candidate, "only the same local model resumes an answer that is not streamed")
            else:
                candidates.append(candidate)
        return candidates

    def _drop(self, candidate: Candidate, why: str) -> None:
        """Records why `candidate` does not resume."""
        self._break.dropped[candidate.place] = why
        log.info("request %s: %s cannot resume: %s", self._state.record.id, candidate.place, why)

    async def _resume(self, candidates: list[Candidate], partial: PartialAnswer) -> bool:
        """Whether one of `candidates` has opened a stream; its attempt is then the current one."""
        state, broken = self._state, self.attempt.candidate
        now = state.loop.time
        if self._whole:
            self._budget = state.budget
        else:
            began = now() if self._budget is None else self._budget.started
            self._budget = state.budget.renewed(began, self.attempt.reader.last_activity)
        for entry in candidates:
            if not self._budget.has_time(now()):
                self._drop(entry, "the time was spent")
                continue
            candidate = await self._filter.resolved(entry, self._budget)
            if isinstance(candidate, Dropped):
                self._drop(entry, f"{candidate.drop}: {candidate.message}")
                continue
            self._tried |= {entry, candidate}
            continuation = _continuation(state, partial, candidate)
            if continuation is None:
                self._drop(candidate, "it cannot continue token ids, nor a completion without a token limit")
                continue
            last = entry == candidates[-1]
            retry_in = await self._open_on_a_node(candidate, broken, continuation.body, last=last)
            if retry_in is not None and candidate == broken and retry_in <= self._longest_pause(now()):
                await asyncio.sleep(retry_in)  # its worker restarts, and the same model continues exactly
                retry_in = await self._open(broken, continuation.body, last=last)
            if retry_in is None:
                self._splice = Splice(self._sent, partial, continuation.method, _stop_strings(state))
                if not self._whole:
                    self.attempt.reader.is_replaceable = self._is_replaceable
                return True
        return False

    def _longest_pause(self, now: float) -> float:
        """The longest wait before a second try: half of the client's wait, up to the deadline and MAX_PAUSE_SECONDS."""
        assert self._budget is not None
        return min(
            resume_policy.MAX_PAUSE_SECONDS, self._budget.resume_seconds_left(now) / 2, self._budget.commit_by - now
        )

    async def _open_on_a_node(
        self, candidate: Candidate, broken: Candidate, body: AnyRequest, *, last: bool
    ) -> float | None:
        """See `_open`. With several nodes they are tried in turn, that of the `broken` attempt last."""
        nodes = self._filter.nodes
        if nodes is None or not candidate.is_local:
            return await self._open(candidate, body, last=last)
        assert self._budget is not None
        nodes.avoid(broken.node)
        retry_in: float | None = math.inf
        for _ in range(resume_policy.MAX_NODES):
            placed = await self._filter.placed(candidate, self._budget)
            if isinstance(placed, Dropped):
                self._drop(candidate, f"{placed.drop}: {placed.message}")
                break
            retry_in = await self._open(placed, body, last=last)
            if retry_in is None:
                break
            nodes.exclude(placed.node, candidate.model, "it could not continue the answer")
        return retry_in

    async def _open(self, candidate: Candidate, body: AnyRequest, *, last: bool) -> float | None:
        """None once `candidate` has opened a stream; otherwise the seconds until it may, infinite when unknown."""
        assert self._budget is not None
        attempt = await _attempt(self._state, candidate, body, self._budget, last)
        if isinstance(attempt, str):
            self._drop(candidate, attempt)
            return math.inf
        self.attempt = attempt
        try:
            await attempt.begin()
        except (UpstreamError, ExpiredError) as error:
            attempt.settle_error(error)
            await attempt.close()
            retry_after = error.retry_after if isinstance(error, UpstreamError) else None
            return math.inf if retry_after is None else retry_after
        return None

    def _count(self, result: str) -> None:
        self._state.gateway.telemetry.resume.labels(result).inc()


async def _attempt(
    state: RequestState, candidate: Candidate, body: AnyRequest, budget: Budget, last: bool
) -> Attempt | str:
    """An attempt of `candidate` with `body`, or why there is none."""
    provider = state.gateway.provider_of(candidate)
    if provider is None:
        return "its provider is gone"
    lease = await state.acquire(candidate, forced=True)  # a recovering breaker must not end an answer that has begun
    if isinstance(lease, Refused):
        return f"breaker {lease.by} is open; retry in {lease.retry_in:.1f} s"
    try:
        return Attempt(state, candidate, provider, lease, last, budget, body)
    except BaseException:
        lease.release()
        raise


def _continuation(
    state: RequestState, partial: PartialAnswer, candidate: Candidate
) -> resume_policy.Continuation | None:
    """The request for `candidate`; None where it cannot resume."""
    provider = state.gateway.config.providers.get(candidate.provider)
    prefills = provider is not None and provider.kind == "anthropic" and takes_prefill(candidate.model)
    return resume_policy.continuation(state.request, partial, candidate, prefills=prefills)


def _stop_strings(state: RequestState) -> Sequence[str]:
    body = state.request.body
    return body.stops if isinstance(body, ChatRequest | CompletionRequest) else ()


async def assemble(answer: Answer) -> dict[str, Any]:
    """The whole answer as one object; raises UpstreamError or ExpiredError for one that ends early."""
    assembly = Assembly()

    def take(frames: list[Frame]) -> bool:
        """Reads frames without waking the task; malformed ones are left to the loop, which raises."""
        try:
            _read(frames, assembly)
        except ValueError:
            return False
        return True

    frames, is_passed_on = answer.first_frames(), False
    while True:
        try:
            _read(frames, assembly)
        except ValueError as error:
            raise UpstreamError(UpstreamKind.MALFORMED, f"a malformed stream: {error}") from error
        if isinstance(frames[-1], Done):
            if not assembly.is_complete:
                raise UpstreamError(UpstreamKind.READ, "the stream ended before every choice had its finish reason")
            return assembly.result()
        if not is_passed_on:
            answer.pass_on(take)
            is_passed_on = True
        frames = await answer.next()


def _read(frames: list[Frame], assembly: Assembly) -> None:
    for frame in frames:
        if isinstance(frame, Data):
            assembly.stream_bytes += len(frame.payload)
            if assembly.stream_bytes > MAX_STREAM_BYTES:
                raise ValueError(f"it is longer than {MAX_STREAM_BYTES >> 20} MiB")
            assembly.add(frame.chunk or frame.parsed())
