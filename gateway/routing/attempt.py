"""One attempt at one candidate: opens its stream, reads until the commit, and records its end once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Mapping
from typing import TypeVar

from gateway.apis.openai.frames import Comment, Data, Frame
from gateway.apis.openai.generation_request import AnyRequest
from gateway.breaker.breakers import Lease
from gateway.breaker.outcome import End, Failure, Ignore, Next, Observation, Verdict, judge, needs_operator
from gateway.errors import UpstreamError, UpstreamKind
from gateway.providers.provider import Provider
from gateway.routing.budget import Budget, Deadline, Due
from gateway.routing.candidate_outcomes import outcome_name
from gateway.routing.chain import Candidate
from gateway.routing.explain_record import AttemptRecord
from gateway.routing.request_context import RequestState
from gateway.routing.stream_reader import ANSWERS, ExpiredError, StreamReader
from gateway.telemetry.quote_redaction import without_quotes
from headgate.shared.traces.span_ids import new_span_id
from inference.protocol import FULL_FOR

log = logging.getLogger("gateway.routing.chain_runner")

T = TypeVar("T")

COMMENT_GRACE_SECONDS = 5.0
"""Comments are left out for at most this long after the start of a request. A refusal within this time can still set
the HTTP status."""

_FINISHED = Observation(End.FINISHED)

_ENDS: Mapping[Due, End | UpstreamKind] = {
    Due.SILENCE: UpstreamKind.TIMEOUT,
    Due.LOAD_WAIT: End.SPILLED,
    Due.TOTAL: End.OUT_OF_TIME,
    Due.CLIENT: End.CALLER_DEADLINE,
}


class Attempt:
    """One attempt. Its owner calls `settle` (or `succeed`, `abandon`) once and `close` at its end."""

    def __init__(
        self,
        state: RequestState,
        candidate: Candidate,
        provider: Provider,
        lease: Lease,
        last: bool,
        budget: Budget | None = None,
        body: AnyRequest | None = None,
        *,
        other_node: bool = False,
    ) -> None:
        """`budget` and `body` replace those of the request. `last`: no other candidate is left. `other_node`: another
        node could answer instead.
        """
        self.candidate = candidate
        self.provider = provider
        self.last = last
        self._is_replaceable = other_node or not last
        self._state = state
        self._lease = lease
        self.began = time.monotonic()
        budget = budget or state.budget
        trace = state.record.trace
        self._span = None if trace is None else trace.child(new_span_id())
        self.call = state.call(candidate, last, budget, body, self._span)
        meter = state.context.meter
        on_frame = None if meter is None else meter.note
        self.reader = StreamReader(
            provider, self.call, budget, last=last, on_frame=on_frame, on_progress=state.record.note_progress,
            whole=not state.request.stream,
        )  # fmt: skip
        state.record.note_prefill()
        self.backlog: list[Frame] = []
        self._settled = False
        self._has_content = False

    async def begin(self) -> None:
        """Opens the stream and waits for its first byte."""
        self._lease.call_when_down(self._on_down)
        await self.reader.open()
        self._lease.first_byte(self.reader)

    async def within(self, deadline: Deadline, answer: Awaitable[T]) -> T:
        """The result of `answer`, which has no stream. Raises ExpiredError at the deadline, or when probes find the
        provider down, which its silence does not show: it may be loading the model.
        """
        loop = self._state.loop
        began = loop.time()
        try:
            async with asyncio.timeout_at(deadline.at) as limit:
                self._lease.call_when_down(lambda: None if limit.expired() else limit.reschedule(loop.time()))
                return await answer
        except TimeoutError:
            if (now := loop.time()) < deadline.at:
                deadline = Deadline(now, Due.SILENCE)
            raise ExpiredError(deadline, deadline.at - began) from None

    def _on_down(self) -> None:
        """Probes found the provider down: the attempt ends now if it is silent and another one can take over."""
        can_resume = self.reader.is_replaceable
        if self._is_replaceable if can_resume is None else can_resume(True):
            self.reader.abort()

    async def open(self, *, forward_comments: bool) -> None:
        """Reads until the commit; `backlog` then has the frames so far, without the comments before the commit."""
        await self.begin()
        is_committed = False
        while not is_committed:
            for frame in self.reader.ready() or [await self.reader.next()]:
                if not isinstance(frame, Comment):
                    self.backlog.append(frame)
                    is_committed = is_committed or (isinstance(frame, Data) and frame.kind in ANSWERS)
                elif is_committed or (forward_comments and self.last and self._grace_is_over()):
                    self.backlog.append(frame)
                    is_committed = True
        self.note_content()

    def note_content(self) -> None:
        """Records, once, that content has arrived: the success of a probe and the time to the first token."""
        if self._has_content or not self.reader.answered:
            return
        self._has_content = True
        self._lease.first_token()
        self._state.note_first_token()

    def _grace_is_over(self) -> bool:
        silence = self._state.context.silence_seconds
        grace = COMMENT_GRACE_SECONDS if silence is None else min(COMMENT_GRACE_SECONDS, silence / 3)
        return time.monotonic() - self._state.began >= grace

    @property
    def is_settled(self) -> bool:
        """Whether its end is recorded."""
        return self._settled

    def settle(self, observation: Observation, message: str = "") -> Verdict:
        """Records the end of the attempt; later calls are ignored."""
        verdict = judge(observation)
        if self._settled:
            return verdict
        self._settled = True
        state, candidate = self._state, self.candidate
        message = without_quotes(message, self.call.body)
        self._lease.settle(verdict, message)
        outcome = outcome_name(verdict, observation)
        state.gateway.telemetry.attempts(
            candidate.provider, candidate.node, state.model_label(candidate), outcome
        ).inc()
        if self.reader.usage is None:
            state.record.pieces += self.reader.pieces
        else:
            state.record.note_usage(self.reader.usage)
        state.record.attempts.append(
            AttemptRecord(
                candidate.name,
                outcome,
                message[:500],
                round(time.monotonic() - self.began, 6),
                self.call.restored,
                round(self.began - state.began, 6),
                self._span,
                candidate.node,
            )
        )
        if isinstance(verdict, Failure) or (isinstance(verdict, Ignore) and verdict.next is not Next.STOP):
            misconfigured = needs_operator(verdict, observation)
            level = logging.ERROR if misconfigured else logging.WARNING
            hint = _advice(candidate) if misconfigured else ""
            log.log(level, "request %s: %s: %s%s", state.record.id, candidate.place, message, hint)
        return verdict

    def settle_error(self, error: BaseException) -> tuple[Verdict, Observation, str]:
        """Records the end of the attempt by `error`: an UpstreamError, an ExpiredError or a cancellation."""
        observation, message = self._observe(error)
        return self.settle(observation, message), observation, message

    def _observe(self, error: BaseException) -> tuple[Observation, str]:
        if isinstance(error, UpstreamError):
            details, local = error.details or {}, self.candidate.is_local
            full_for = frozenset(map(str, details.get(FULL_FOR) or ()))
            observation = Observation(
                error.kind, error.status, error.code, error.retry_after, local, details.get("cause"), full_for
            )
            return observation, f"{error.code}: {error.message}" if error.code else str(error)
        if isinstance(error, ExpiredError):
            return Observation(_ENDS[error.due], is_local=self.candidate.is_local), str(error)
        if isinstance(error, asyncio.CancelledError):
            return Observation(self._state.cancel_reason()), "cancelled"
        log.error(
            "request %s: the attempt at %s failed: internal error of the gateway",
            self._state.record.id, self.candidate.place,
            exc_info=error,
        )  # fmt: skip
        return Observation(UpstreamKind.MALFORMED, is_local=self.candidate.is_local), f"internal: {error!r}"

    def succeed(self) -> None:
        """Records that the answer is complete."""
        self.settle(_FINISHED)

    async def abandon(self, error: BaseException) -> None:
        """Ends the attempt because of `error`, which the caller of this method raises."""
        self.settle_error(error)
        await self.close()

    async def close(self) -> None:
        """Closes the provider's stream at once."""
        await self.reader.close()


def _advice(candidate: Candidate) -> str:
    """What an operator checks when a provider rejects the gateway's credentials."""
    if candidate.is_local:
        return "; INFERENCE_TOKEN must be the same at the gateway and at each inference service"
    return f"; check the key and the settings of provider {candidate.provider}"
