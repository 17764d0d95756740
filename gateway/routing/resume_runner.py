"""Follows one answer over the attempts that give its pieces: opens the next when one breaks; decides by `core.resume`.

A break after the commit is settled like every other end of an attempt; then whoever may go on is asked, each once and
all within one deadline, and what they say is joined on. When nobody can, the break itself is raised.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gateway.apis.lenient_json import loads
from gateway.apis.openai.assemble import Assembly
from gateway.apis.openai.finish_reasons import choices_of
from gateway.apis.openai.frames import Data, Done, Frame
from gateway.breaker.outcome import Ignore, Reason, Verdict
from gateway.breaker.permits import Refused
from gateway.errors import UpstreamError, UpstreamKind
from gateway.providers.anthropic.anthropic_models import takes_prefill
from gateway.routing import resume_policy
from gateway.routing.attempt import Attempt
from gateway.routing.budget import Budget
from gateway.routing.candidate_filter import CandidateFilter
from gateway.routing.candidate_outcomes import outcome_name
from gateway.routing.chain import Candidate
from gateway.routing.explain_record import Broke
from gateway.routing.quote_redaction import without_quotes
from gateway.routing.request_context import RequestState
from gateway.routing.resume_policy import Said
from gateway.routing.splice import Kept, Splice, hop_comment
from gateway.routing.stream_reader import ExpiredError

log = logging.getLogger("gateway.routing.resume_runner")

Sink = Callable[[list[Frame]], bool]

_SPILLED = Ignore(Reason.SPILLED)
"""The verdict on an attempt that is left without blame."""


class Answer:
    """The frames of one committed answer. `attempt` gives them now; whoever reads settles it and closes it.

    `whole`: nobody has seen anything of it yet, so only the same model goes on with it, in the request's own time.
    """

    def __init__(
        self, state: RequestState, candidate_filter: CandidateFilter, attempt: Attempt, *, whole: bool = False
    ) -> None:
        self.attempt = attempt
        self._state = state
        self._filter = candidate_filter
        self._whole = whole
        self._known: Kept | None = None
        self._unnoted: list[Frame] = []
        if not whole:
            attempt.listening.is_replaceable = self._is_replaceable
        self._splice: Splice | None = None
        self._sink: Sink | None = None
        self._hops = 0
        self._budget: Budget | None = None
        self._broke: Broke
        """The last break."""
        self._tried: set[Candidate] = set()
        """Whoever was asked since somebody said something new."""
        self._stalled: set[Candidate] = set()
        """Whoever sent nothing but keep-alives at last."""

    @property
    def _kept(self) -> Kept:
        """What the caller has; of an answer that was here at once nothing is kept."""
        if self._known is None:
            asked = self._state.request
            self._known = Kept(resume_policy.why_not(asked, self._state.policy.route.resume), choices_of(asked.body))
        return self._known

    def begin(self) -> list[Frame]:
        """The frames that are here already; at least one. They are noted when `next` is called: they leave first."""
        frames = self.attempt.backlog
        if not isinstance(frames[-1], Done):
            self._unnoted = frames = frames + self.attempt.listening.ready()
        return frames

    async def next(self) -> list[Frame]:
        """What comes next; at least one frame. Raises the UpstreamError or ExpiredError that ends the answer."""
        if self._unnoted:
            self._kept.note(self._unnoted)
            self._unnoted = []
        while True:
            frames = self.attempt.listening.ready()
            if not frames:
                try:
                    frames = [await self.attempt.listening.next()]
                except (UpstreamError, ExpiredError) as error:
                    return await self._after(error)
                frames += self.attempt.listening.ready()
            self.attempt.note_begun()
            if joined := self._join(frames):
                return joined

    def pass_on(self, sink: Sink) -> None:
        """Offers `sink` the frames that come while `next` waits, as `Listening.pass_on` does."""
        self._sink = sink
        self.attempt.listening.pass_on(self._passes)

    def _passes(self, frames: list[Frame]) -> bool:
        assert self._sink is not None
        if self._splice is not None or not self._sink(frames):
            return False  # of what is joined there may be nothing left, or the end: that is for the loop
        self._kept.note(frames)
        return True

    def _join(self, frames: list[Frame]) -> list[Frame]:
        joined = frames if self._splice is None else self._splice.join(frames)
        if not joined or not isinstance(joined[-1], Done):  # nobody goes on with what has its end
            self._kept.note(joined)
        return joined

    def forget_sink(self) -> None:
        """Nothing is passed on any more. A sink mostly knows its answer: a circle that nothing else would undo."""
        self._sink = None

    async def conclude(self) -> None:
        """Records that the answer came whole, and closes it."""
        try:
            self.attempt.succeed()
            self.note_end()
        finally:
            self.forget_sink()
            await self.attempt.close()

    def note_end(self) -> None:
        """The answer reached its true end."""
        if self._splice is not None:
            self._count("resumed")

    # --- after a break -----------------------------------------------------------------------------------------------
    async def _after(self, error: UpstreamError | ExpiredError) -> list[Frame]:
        """What follows a break: a comment before the next piece, the end of an answer that was whole, or the error."""
        broken, kept = self.attempt, self._kept
        verdict, seen, why = broken.settle_error(error)
        await broken.close()
        why = without_quotes(why, broken.call.body)[:300]
        self._broke = Broke(broken.candidate.name, why)
        self._state.record.breaks.append(self._broke)
        if kept.is_finished:
            self._broke.outcome = "complete"
            self._count("complete")
            return [Done()]
        if isinstance(error, ExpiredError) and error.kept_alive:
            self._stalled.add(broken.candidate)
        if broken.listening.answered:
            self._hops = self._hops_with_this
            self._tried.clear()
            self._budget = None
        said = kept.said  # read before it is asked whether that can go on
        result = self._why_not(verdict, self._hops)
        if result is None:
            try:
                has_climbed = await self._climb(self._rungs(verdict, said), said)
            except BaseException:
                self._broke.outcome = "left"
                raise
            if has_climbed:
                name = self.attempt.candidate.name
                characters = len(said.content) + len(said.reasoning)
                self._broke.outcome = "gone_on"
                self._state.record.hops.append(f"{name} after {characters} characters: {why}")
                log.info("request %s: %s goes on after %d characters", self._state.record.id, name, characters)
                return [hop_comment(name, characters, outcome_name(verdict, seen))]
            self.attempt = broken
        self._broke.outcome = result = result or "failed"
        self._count(result)
        raise error

    @property
    def _hops_with_this(self) -> int:
        """How often the answer went on elsewhere, once the attempt of now is over that said a part of it."""
        return self._hops + (self._splice is not None)

    def _is_replaceable(self) -> bool:
        """Whether somebody else could go on, should the attempt of now be left because it says nothing more."""
        kept, state = self._kept, self._state
        if kept.is_finished:
            return True
        said = kept.said  # read before it is asked whether that can go on
        if self._why_not(_SPILLED, self._hops_with_this) is not None:
            return False
        policy, left = state.policy.route.resume, self._filter.select_again().kept
        rungs = resume_policy.ladder(left, self.attempt.candidate, _SPILLED, policy, said, self._stalled)
        return any(_plan(state, said, rung) is not None for rung in rungs)

    def _why_not(self, verdict: Verdict, hops: int) -> str | None:
        """Why nobody is asked to go on."""
        if self._kept.has_begun and self._kept.why_not is not None:
            return self._kept.why_not
        if not resume_policy.may_go_on(verdict):
            return "refused"
        return "failed" if hops >= resume_policy.MAX_HOPS else None

    def _rungs(self, verdict: Verdict, said: Said) -> list[Candidate]:
        state, broken = self._state, self.attempt.candidate
        chain = self._filter.select_again()
        for dropped in chain.dropped:
            self._drop(dropped.candidate, f"{dropped.drop}: {dropped.message}")
        asked = (broken, verdict, state.policy.route.resume, said, self._stalled)
        for candidate in chain.kept:
            if (why := resume_policy.barred(candidate, *asked)) is not None:
                self._drop(candidate, why)
        rungs = []
        for rung in resume_policy.ladder(chain.kept, *asked):
            if rung in self._tried:
                self._drop(rung, "it was asked already")
            elif self._whole and not (rung == broken and rung.is_local):
                self._drop(rung, "only the same local model goes on with an answer that is not streamed")
            else:
                rungs.append(rung)
        return rungs

    def _drop(self, candidate: Candidate, why: str) -> None:
        """Records why `candidate` is not asked to go on."""
        self._broke.dropped[candidate.name] = why
        log.info("request %s: %s cannot go on: %s", self._state.record.id, candidate.name, why)

    async def _climb(self, rungs: list[Candidate], said: Said) -> bool:
        """Whether one of them has opened a stream, which is the current attempt's then."""
        state, broken = self._state, self.attempt.candidate
        loop = state.loop
        if self._whole:
            self._budget = state.budget
        else:
            began = loop.time() if self._budget is None else self._budget.started
            self._budget = state.budget.renewed(began, self.attempt.listening.heard)
        for candidate in rungs:
            if not self._budget.has_time(loop.time()):
                self._drop(candidate, "the time was spent")
                continue
            self._tried.add(candidate)
            plan = _plan(state, said, candidate)
            if plan is None:
                self._drop(candidate, "it cannot go on behind token ids")
                continue
            again_in = await self._open(candidate, plan.body, last=candidate == rungs[-1])
            if again_in is not None and candidate == broken and again_in <= self._longest_pause(loop.time()):
                await asyncio.sleep(again_in)  # the same model is worth a rest between two starts of its worker
                again_in = await self._open(candidate, plan.body, last=candidate == rungs[-1])
            if again_in is None:
                self._splice = Splice(self._kept, said, plan.how, _stops(state))
                if not self._whole:
                    self.attempt.listening.is_replaceable = self._is_replaceable
                return True
        return False

    def _longest_pause(self, now: float) -> float:
        """How long nothing may be done at all: half as long as the caller listens, and until the deadline at most."""
        assert self._budget is not None
        return min(resume_policy.MOST_PAUSE_SECONDS, self._budget.quiet_left(now) / 2, self._budget.commit_by - now)

    async def _open(self, candidate: Candidate, body: Mapping[str, Any], *, last: bool) -> float | None:
        """None once `candidate` has opened a stream; otherwise in how many seconds it may, as far as it said so."""
        assert self._budget is not None
        attempt = _attempt(self._state, candidate, body, self._budget, last)
        if isinstance(attempt, str):
            self._drop(candidate, attempt)
            return math.inf
        self.attempt = attempt
        try:
            await attempt.begin()
        except (UpstreamError, ExpiredError) as error:
            attempt.settle_error(error)
            await attempt.close()
            known = error.retry_after if isinstance(error, UpstreamError) else None
            return math.inf if known is None else known
        return None

    def _count(self, result: str) -> None:
        self._state.gateway.telemetry.resume.labels(result).inc()


def _attempt(
    state: RequestState, candidate: Candidate, body: Mapping[str, Any], budget: Budget, last: bool
) -> Attempt | str:
    """An attempt of `candidate` to go on with `body`, or why there is none."""
    provider = state.gateway.registry.get(candidate.provider)
    if provider is None:
        return "its provider is gone"
    # no ramp after a recovery may cost an answer that somebody is reading
    lease = state.acquire(candidate, forced=True)
    if isinstance(lease, Refused):
        return f"the breaker of {lease.by} lets nobody pass for {lease.retry_in:.1f} s"
    try:
        return Attempt(state, candidate, provider, lease, last, budget, body)
    except BaseException:
        lease.release()
        raise


def _plan(state: RequestState, said: Said, candidate: Candidate) -> resume_policy.Continuation | None:
    """What `candidate` would be asked; None where it cannot go on."""
    return resume_policy.continuation(state.request, said, candidate, prefills=_prefills(state, candidate))


def _prefills(state: RequestState, candidate: Candidate) -> bool:
    """Whether the candidate's model goes on with an assistant's message at the end."""
    found = state.gateway.config.providers.get(candidate.provider)
    return found is not None and found.kind == "anthropic" and takes_prefill(candidate.model)


def _stops(state: RequestState) -> Sequence[str]:
    """The request's stop strings."""
    said = state.request.body.get("stop") or ()
    return (said,) if isinstance(said, str) else tuple(said)


async def assemble(answer: Answer) -> dict[str, Any]:
    """The whole answer as one object; raises UpstreamError or ExpiredError for one that ends early."""
    assembly = Assembly()

    def take(frames: list[Frame]) -> bool:
        """Reads what comes and wakes nobody; what is no chunk stays for the loop, which says so."""
        try:
            _read(frames, assembly)
        except ValueError:
            return False
        return True

    frames, is_passed_on = answer.begin(), False
    while True:
        try:
            _read(frames, assembly)
        except ValueError as error:
            raise UpstreamError(UpstreamKind.MALFORMED, f"not a chunk: {error}") from error
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
            assembly.add(loads(frame.payload) if frame.chunk is None else frame.chunk)
