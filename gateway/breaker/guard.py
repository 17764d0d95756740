"""Guards one provider or one PROVIDER/MODEL: its state, its permits, what opened it; never awaits or asks anything.

pybreaker is the state machine, the storage and the listener façade. Results reach it afterwards, in one synchronous
call each, so its lock is never held across an await; who may pass is decided by `gateway.breaker.permits`, because
pybreaker admits everybody while half-open, counts a cancelled call, lets late results move a newer state and reads the
wall clock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pybreaker

from gateway.breaker import permits as core
from gateway.breaker import ramp as ramps
from gateway.breaker.outcome import LOCAL, Failure
from gateway.breaker.permits import CLOSED, HALF_OPEN, OPEN, Count, Permit, Refusal, Rule, State
from gateway.breaker.probe_schedule import MOST_PACE_SECONDS, POSTPONE_SECONDS, Finding
from gateway.breaker.silence import Silence, Silent

log = logging.getLogger("gateway.breaker.breakers")

_STATES = {
    pybreaker.STATE_CLOSED: CLOSED,
    pybreaker.STATE_HALF_OPEN: HALF_OPEN,
    pybreaker.STATE_OPEN: OPEN,
}

REQUESTS, PROBES, RESTART = "requests", "probes", "restart"
"""What opened a breaker: users' requests, probes of our own, or it was open before the gateway was restarted."""

Clock = Callable[[], float]
OnState = Callable[[str, str, State | None], None]
"""Called with provider, model (empty for the provider's own breaker) and the new state; None: it is forgotten."""


class _AttemptFailed(Exception):  # noqa: N818  # never leaves this module: it is how a failure is told to pybreaker
    """The attempt failed; raised inside pybreaker's call and caught around it."""


def _fail() -> None:
    raise _AttemptFailed


def _succeed() -> None:
    return


class _Watcher(pybreaker.CircuitBreakerListener):
    """Hands pybreaker's state changes to the guard it belongs to."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def state_change(self, cb: Any, old_state: Any, new_state: Any) -> None:
        """One transition happened."""
        self._guard.entered(_STATES[new_state.name])


class Guard:
    """One breaker: pybreaker's machine and our book of permits, kept in step."""

    def __init__(self, provider: str, model: str, rule: Rule, clock: Clock, on_state: OnState) -> None:
        self.provider = provider
        self.model = model
        self.name = f"{provider}/{model}" if model else provider
        self.last_failure: str | None = None
        self.last_probe: str | None = None
        self.needs_memory = False
        """Whether its last failure was a refusal of memory by our own service."""
        self.source: str | None = None
        self.is_retired = False
        """Whether it is forgotten: what still reaches it concerns nobody."""
        self.outstanding = 0
        self.silence = None if provider == LOCAL else Silence(is_model=bool(model))
        """How far attempts have come; our own service is asked itself instead, and says when it is busy."""
        self.leaving: set[Callable[[], None]] = set()
        """Called when probes of our own find the tier gone: by them leave who had no word and have somewhere to go."""
        self._tripped: str | None = None
        self.book = core.Book()
        self._rule = rule
        self._clock = clock
        self._on_state = on_state
        self._machine = pybreaker.CircuitBreaker(
            fail_max=rule.failures,
            reset_timeout=rule.open,
            success_threshold=rule.probes,
            name=self.name,
            listeners=[_Watcher(self)],
            throw_new_error_on_trip=False,
        )
        on_state(provider, model, CLOSED)

    def set_rule(self, rule: Rule) -> None:
        """Applies a new rule; the present state and the failures in a row stay."""
        self.book = core.ruled(self.book, self._rule, rule)
        self._rule = rule
        self._machine.fail_max = rule.failures
        self._machine.reset_timeout = rule.open
        self._machine.success_threshold = rule.probes

    def entered(self, state: State) -> None:
        """pybreaker moved: the book begins a new epoch."""
        before, now = self.book.state, self._clock()
        failures = self._machine.fail_counter
        self.book = core.entered(self.book, self._rule, state, now)
        if self.silence is not None:
            self.silence.clear()
        if state is CLOSED:
            self.source = None
        self._on_state(self.provider, self.model, state)
        if state is before:
            return
        detail = ""
        if state is OPEN:
            pause = self.book.open_until - now
            why = "its probe failed" if before is HALF_OPEN else self._tripped or f"{failures} failures in a row"
            detail = f" for {pause:.3g} s after {why}: {self.last_failure or 'unknown'}"
        if not self.is_retired:
            log.log(
                logging.WARNING if state is OPEN else logging.INFO,
                "breaker %s: %s -> %s%s", self.name, before.label, state.label, detail,
            )  # fmt: skip
        if state is OPEN and self.source == PROBES:
            for leave in tuple(self.leaving):
                leave()

    def ask(self, expires: float, forced: bool = False) -> Permit | Refusal:
        """A permit for one attempt, or the refusal; an open period that is over ends here.

        A `forced` attempt passes whatever the ramp after a recovery says.
        """
        now = self._clock()
        if self.book.state is OPEN and core.is_due(self.book, now):
            self._machine.half_open()
        if self.silence is not None and not forced and self._is_silent(self.silence, now):
            return Refusal(core.MOMENT_SECONDS, self.book.state, silent=True)
        self.book, answer = core.ask(self.book, now, expires, self.outstanding, forced)
        if isinstance(answer, Permit):
            self.outstanding += 1
            if self.silence is not None:
                self.silence.asked(answer.number, now, expires)
            return answer
        return replace(answer, retry_in=self._worth_asking_in(answer.retry_in))

    def _worth_asking_in(self, seconds: float) -> float:
        """Our own service is asked by probes meanwhile, so that it need not stay away for all of its open period."""
        return min(seconds, MOST_PACE_SECONDS) if self.provider == LOCAL and not self.model else seconds

    def _is_silent(self, silence: Silence, now: float) -> bool:
        """Whether others had better be asked: with the failures in a row as many wait in vain as would open it."""
        if self.book.state is not CLOSED:
            return False
        lacking = max(1, self._rule.failures - self._machine.fail_counter)
        return silence.speaking(now, lacking) >= lacking

    def opened(self, permit: Permit, silent: Silent) -> None:
        """The first byte for the attempt under `permit` is here."""
        if self.silence is not None:
            self.silence.opened(permit.number, self._clock(), silent)

    def begun(self, permit: Permit) -> None:
        """The first word for the attempt under `permit` is here."""
        if self.silence is not None:
            self.silence.begun(permit.number, self._clock())

    def _returned(self, permit: Permit, *, whole: bool = False) -> None:
        """The attempt under `permit` runs no longer; `whole`: it has its answer."""
        self.outstanding -= 1
        if self.silence is not None:
            self.silence.ended(permit.number, whole=whole)

    def give_back(self, permit: Permit) -> None:
        """The attempt under `permit` says nothing about this tier, or nothing more."""
        self._returned(permit)
        self.book = core.give_back(self.book, permit)

    def succeed(self, permit: Permit) -> None:
        """The attempt under `permit` succeeded."""
        self._returned(permit, whole=True)
        self._record_success(permit)

    def prove(self, permit: Permit) -> Permit:
        """The probe under `permit` has begun to answer, which is its success; the permit for the rest of the answer.

        A late or ordinary permit is returned as it is: nothing is recorded before its end.
        """
        self.begun(permit)
        if not permit.is_probe or not core.counts(self.book, permit):
            return permit
        if self.silence is not None:
            self.silence.clear()  # the rest of its answer has another number
        self._record_success(permit)
        # our own service is asked by probes, and goes on with an answer by itself: a closed breaker lets it
        self.book, fresh = core.renew(self.book, permit, on_trial=self.provider != LOCAL)
        return fresh

    def _record_success(self, permit: Permit) -> None:
        self.book, count = core.settle(self.book, self._rule, permit, True, self._clock())
        self._tell(count)

    def fail(self, permit: Permit, failure: Failure, why: str, source: str = REQUESTS) -> None:
        """The attempt under `permit`, whose was `source`, failed because of `why`."""
        self._returned(permit)
        if core.counts(self.book, permit):
            self.last_failure, self.needs_memory, self.source = why, failure.needs_memory, source
        opens = failure.opens and bool(self.model)  # other models of the provider were not spoken of
        self.book, count = core.settle(
            self.book, self._rule, permit, False, self._clock(), failure.retry_after, opens, failure.broke
        )
        self._tell(count, opens, permit.on_trial)
        if self.book.state is CLOSED:
            self.source = None

    def _tell(self, count: Count, asked: bool = False, on_trial: bool = False) -> None:
        """Moves pybreaker. It is never open here: every result of an older epoch counts for nothing.

        `asked` is whether the tier itself said how long to stay away, `on_trial` whether its probe's answer is meant.
        """
        if count is core.SUCCESS:
            if self.book.state is not CLOSED or self._machine.fail_counter:
                self._machine.call(_succeed)  # to a closed one without failures it says nothing
        elif count is not core.NOTHING:
            try:
                self._machine.call(_fail)
            except _AttemptFailed:
                if count is core.TRIP and self.book.state is not OPEN:
                    broke_off = "its probe's answer broke off" if on_trial else self._share_of_failures()
                    self._tripped = "it asked to be left alone" if asked else broke_off
                    self._machine.open()
                    self._tripped = None

    def _share_of_failures(self) -> str:
        failed = sum(tally.failed for tally in self.book.tallies)
        seen = failed + sum(tally.succeeded for tally in self.book.tallies)
        return f"{failed} of {seen} attempts within {self._rule.window:g} s failed"

    def scout(self, expires: float) -> Permit | None:
        """The permit to ask the tier off the users' path; None unless it is open and nobody else finds out."""
        self.book, permit = core.scout(self.book, self._clock(), expires)
        if permit is not None:
            self.outstanding += 1
        return permit

    def scouted(self, permit: Permit, finding: Finding, said: str) -> None:
        """What was found out under `permit`: the open period ends now, or no sooner than is useful, or as it was.

        UNKNOWN, as any finding that comes too late, changes nothing.
        """
        self.outstanding -= 1
        self.last_probe = said
        if not core.counts(self.book, permit):
            return
        now = self._clock()
        self.book = core.give_back(self.book, permit)
        if finding is Finding.GOOD:
            log.info("breaker %s: its open period ends early: %s", self.name, said)
            self.book = core.hasten(self.book, now)
        elif finding is Finding.BAD:
            self.book = core.postpone(self.book, now + min(POSTPONE_SECONDS, self._rule.open))

    def restore(self, seconds: float) -> None:
        """Opens a closed breaker for what was left of its open period before the gateway was restarted."""
        self.last_failure, self.source = "it was open before", RESTART
        self._tripped = "a restart of the gateway"
        self.book = core.pausing(self.book, seconds)
        self._machine.open()
        self._tripped = None

    def reset(self) -> None:
        """Closes the breaker by hand."""
        self.last_failure = self.last_probe = None
        self._machine.close()

    def retire(self) -> None:
        """This breaker is forgotten: whatever still reaches it is told to nobody."""
        self._on_state = lambda *_: None
        self.is_retired = True

    @property
    def is_blank(self) -> bool:
        """Whether nothing would be lost if this breaker were made anew."""
        return self.book.state is CLOSED and not any(tally.failed for tally in self.book.tallies)

    @property
    def may_be_forgotten(self) -> bool:
        """Whether it is a pair's breaker under which no attempt runs; providers' are as few as the configuration's."""
        return bool(self.model) and not self.outstanding

    @property
    def closed_for(self) -> float | None:
        """Seconds until a probe may pass, None when an attempt may pass now. Advisory."""
        if self.book.state is CLOSED or core.is_due(self.book, now := self._clock()):
            return None
        if core.is_probed(self.book, now):
            return self._worth_asking_in(max(core.MOMENT_SECONDS, self.book.open_until - now))
        return self._worth_asking_in(self.book.open_until - now) if self.book.state is OPEN else None

    @property
    def remaining(self) -> float:
        """Seconds that are left of the open period; 0 when it is over or there is none."""
        return max(0.0, self.book.open_until - self._clock()) if self.book.state is OPEN else 0.0

    def describe(self) -> dict[str, Any]:
        """What `/admin/breakers` shows."""
        now = self._clock()
        tallies = self.book.tallies
        remaining = self.remaining if self.book.state is OPEN else None
        return {
            "name": self.name,
            "provider": self.provider,
            "model": self.model or None,
            "state": self.book.state.label,
            "value": int(self.book.state),
            "failures": self._machine.fail_counter,
            "window": {
                "succeeded": sum(tally.succeeded for tally in tallies),
                "failed": sum(tally.failed for tally in tallies),
            },
            "epoch": self.book.epoch,
            "probing": self.book.probe is not None,
            "retry_after": None if remaining is None else round(remaining, 3),
            "opens_until": None if remaining is None else round(time.time() + remaining, 3),
            "source": self.source,
            "ramp": None if self.book.ramp is None else ramps.width(self.book.ramp, now),
            "last_failure": self.last_failure,
            "last_probe": self.last_probe,
        }
