"""One try of one candidate: opens, peeks until there is something to commit to, collects, judges its own end once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gateway.apis.openai.frames import Comment, Data, Frame
from gateway.breaker.breakers import Lease
from gateway.breaker.outcome import End, Failure, Ignore, Next, Observation, Success, Verdict, is_operators, judge
from gateway.errors import UpstreamError, UpstreamKind
from gateway.providers.provider import Provider
from gateway.routing.budget import Budget, Due
from gateway.routing.chain import Candidate
from gateway.routing.explain_record import Tried
from gateway.routing.quote_redaction import without_quotes
from gateway.routing.stream_reader import ANSWERS, ExpiredError, Listening
from inference.protocol import FULL_FOR, Code

if TYPE_CHECKING:
    from gateway.routing.chain_runner import Request

log = logging.getLogger("gateway.routing.chain_runner")

_CODES = frozenset(Code)

COMMENT_GRACE_SECONDS = 5.0
"""Comments of the last tier are held back so long: within it a refusal can still have its true status."""

_FINISHED = Observation(End.FINISHED)

_ENDS: Mapping[Due, End | UpstreamKind] = {
    Due.SILENCE: UpstreamKind.TIMEOUT,
    Due.LOAD_WAIT: End.SPILLED,
    Due.TOTAL: End.OUT_OF_TIME,
    Due.CALLER: End.CALLER_DEADLINE,
}


class Attempt:
    """One try of one candidate. `settle` is called exactly once by whoever sees its end."""

    def __init__(
        self,
        request: Request,
        candidate: Candidate,
        provider: Provider,
        lease: Lease,
        last: bool,
        budget: Budget | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> None:
        """`budget` and `body` stand for the request's own where they are given."""
        self.candidate = candidate
        self.provider = provider
        self.last = last
        self._request = request
        self._lease = lease
        self.began = time.monotonic()
        budget = budget or request.budget
        self.call = request.call_for(candidate, last, budget, body)
        meter = request.caller.meter
        on_frame = None if meter is None else meter.note
        self.listening = Listening(
            provider, self.call, budget, last=last, on_frame=on_frame, whole=not request.request.stream
        )
        self.backlog: list[Frame] = []
        self._settled = False
        self._begun = False

    async def begin(self) -> None:
        """Opens the stream: the tier's first byte is here."""
        if self.last:
            await self.listening.open()
        else:
            with self._lease.until_gone(self.listening.give_up):
                await self.listening.open()
        self._lease.heard(self.listening)

    async def open(self, *, forward_comments: bool) -> None:
        """Reads until there is something to commit to; the frames so far are in `backlog`."""
        await self.begin()
        is_enough = False  # `listening.answered` speaks of all frames that came together, and so of those behind
        while not is_enough:
            for frame in self.listening.ready() or [await self.listening.next()]:
                if not isinstance(frame, Comment):
                    self.backlog.append(frame)
                    is_enough = is_enough or (isinstance(frame, Data) and frame.kind in ANSWERS)
                elif is_enough or (forward_comments and self.last and self._waited_long()):
                    self.backlog.append(frame)
                    is_enough = True
        self.note_begun()

    def note_begun(self) -> None:
        """Records, once, that the answer's first content is here: a probe's success, the time to the first token."""
        if self._begun or not self.listening.answered:
            return
        self._begun = True
        self._lease.prove()
        self._request.note_first_token()

    def _waited_long(self) -> bool:
        patience = self._request.caller.silence_seconds
        grace = COMMENT_GRACE_SECONDS if patience is None else min(COMMENT_GRACE_SECONDS, patience / 3)
        return time.monotonic() - self._request.began >= grace

    @property
    def is_settled(self) -> bool:
        """Whether its end is recorded."""
        return self._settled

    def settle(self, observation: Observation, said: str = "") -> Verdict:
        """Records the end of the attempt; the first call counts."""
        verdict = judge(observation)
        if self._settled:
            return verdict
        self._settled = True
        request, candidate = self._request, self.candidate
        said = without_quotes(said, self.call.body)
        self._lease.settle(verdict, said)
        outcome = outcome_name(verdict, observation)
        request.tools.telemetry.attempts.count(candidate.provider, request.label(candidate), outcome)
        request.record.attempts.append(
            Tried(candidate.name, outcome, said[:500], round(time.monotonic() - self.began, 6))
        )
        if isinstance(verdict, Failure) or (isinstance(verdict, Ignore) and verdict.next is not Next.STOP):
            misconfigured = is_operators(verdict, observation)
            level = logging.ERROR if misconfigured else logging.WARNING
            hint = f"; check the key and the settings of provider {candidate.provider}" if misconfigured else ""
            log.log(level, "request %s: %s: %s%s", request.record.id, candidate.name, said, hint)
        return verdict

    def settle_error(self, error: BaseException) -> tuple[Verdict, Observation, str]:
        """Records what `error` means: an UpstreamError, an ExpiredError or a cancellation."""
        seen, said = self._observe(error)
        return self.settle(seen, said), seen, said

    def _observe(self, error: BaseException) -> tuple[Observation, str]:
        if isinstance(error, UpstreamError):
            details, local = error.details or {}, self.candidate.is_local
            full_for = frozenset(map(str, details.get(FULL_FOR) or ()))
            seen = Observation(
                error.kind, error.status, error.code, error.retry_after, local, details.get("cause"), full_for
            )
            return seen, f"{error.code}: {error.message}" if error.code else str(error)
        if isinstance(error, ExpiredError):
            return Observation(_ENDS[error.due], is_local=self.candidate.is_local), str(error)
        if isinstance(error, asyncio.CancelledError):
            return Observation(self._request.why_cancelled()), "cancelled"
        # a defect of ours or of an adapter: the tier answered nothing usable, and nothing of it may stay open
        log.error("request %s: %s broke its contract", self._request.record.id, self.candidate.name, exc_info=error)
        return Observation(UpstreamKind.MALFORMED, is_local=self.candidate.is_local), f"internal: {error!r}"

    def succeed(self) -> None:
        """Records the true end of a whole answer."""
        self.settle(_FINISHED)

    async def abandon(self, error: BaseException) -> None:
        """Ends the attempt because of `error`, which its caller raises."""
        self.settle_error(error)
        await self.close()

    async def close(self) -> None:
        """Closes the provider's stream at once."""
        await self.listening.close()


def outcome_name(verdict: Verdict, seen: Observation) -> str:
    """A short, bounded name for metrics, records and `x-headgate-reason`."""
    if isinstance(verdict, Success):
        return "success"
    if isinstance(verdict, Ignore):
        return str(verdict.reason)
    if seen.is_local and seen.code is not None:
        return seen.code if seen.code in _CODES else "error"
    return f"status_{seen.status}" if seen.status is not None else str(seen.kind)
