"""Guards every provider and every PROVIDER/MODEL with a breaker and remembers what they asked for; never awaits.

pybreaker is the state machine, the storage and the listener façade. Results reach it afterwards, in one synchronous
call each, so its lock is never held across an await; who may pass is decided by `gateway.core.breaker`, because
pybreaker admits everybody while half-open, counts a cancelled call, lets late results move a newer state and reads the
wall clock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pybreaker

from gateway.core import breaker as core
from gateway.core.breaker import Count, Permit, Refusal, Rule, State
from gateway.core.outcome import Failure, Ignore, Scope, Success, Verdict

log = logging.getLogger("gateway.breakers")

_STATES = {
    pybreaker.STATE_CLOSED: State.CLOSED,
    pybreaker.STATE_HALF_OPEN: State.HALF_OPEN,
    pybreaker.STATE_OPEN: State.OPEN,
}

Clock = Callable[[], float]
OnState = Callable[[str, str, State | None], None]
"""Called with provider, model (empty for the provider's own breaker) and the new state; None: it is forgotten."""

MAX_GUARDS = 512
"""Names come from callers where a route is `*`: beyond so many breakers, old ones are forgotten. A breaker under which
an attempt runs never is, so that the bound is this number and the requests in flight."""


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
        self.outstanding = 0
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
        on_state(provider, model, State.CLOSED)

    def set_rule(self, rule: Rule) -> None:
        """Applies a new rule; the present state and counts stay."""
        self._rule = rule
        self._machine.fail_max = rule.failures
        self._machine.reset_timeout = rule.open
        self._machine.success_threshold = rule.probes

    def entered(self, state: State) -> None:
        """pybreaker moved: the book begins a new epoch."""
        before, now = self.book.state, self._clock()
        failures = self._machine.fail_counter
        self.book = core.entered(self.book, self._rule, state, now)
        self._on_state(self.provider, self.model, state)
        if state is before:
            return
        detail = ""
        if state is State.OPEN:
            pause = self.book.open_until - now
            why = "its probe failed" if before is State.HALF_OPEN else self._tripped or f"{failures} failures in a row"
            detail = f" for {pause:.3g} s after {why}: {self.last_failure or 'unknown'}"
        log.log(
            logging.WARNING if state is State.OPEN else logging.INFO,
            "breaker %s: %s -> %s%s", self.name, before.label, state.label, detail,
        )  # fmt: skip

    def ask(self, expires: float) -> Permit | Refusal:
        """A permit for one attempt, or the refusal; an open period that is over ends here."""
        now = self._clock()
        if core.is_due(self.book, now):
            self._machine.half_open()
        self.book, answer = core.ask(self.book, now, expires)
        if isinstance(answer, Permit):
            self.outstanding += 1
        return answer

    def give_back(self, permit: Permit) -> None:
        """The attempt under `permit` says nothing about this tier, or nothing more."""
        self.outstanding -= 1
        self.book = core.give_back(self.book, permit)

    def succeed(self, permit: Permit) -> None:
        """The attempt under `permit` succeeded."""
        self.outstanding -= 1
        self._record_success(permit)

    def prove(self, permit: Permit) -> Permit:
        """The probe under `permit` has begun to answer, which is its success; the permit for the rest of the answer.

        A late or ordinary permit is returned as it is: nothing is recorded before its end.
        """
        if not permit.is_probe or not core.counts(self.book, permit):
            return permit
        self._record_success(permit)
        self.book, fresh = core.renew(self.book, permit)
        return fresh

    def _record_success(self, permit: Permit) -> None:
        self.book, count = core.settle(self.book, self._rule, permit, True, self._clock())
        self._tell(count)

    def fail(self, permit: Permit, failure: Failure, why: str) -> None:
        """The attempt under `permit` failed because of `why`."""
        self.outstanding -= 1
        if core.counts(self.book, permit):
            self.last_failure = why
        self.book, count = core.settle(
            self.book, self._rule, permit, False, self._clock(), failure.retry_after, failure.opens, failure.broke
        )
        self._tell(count, failure.opens)

    def _tell(self, count: Count, asked: bool = False) -> None:
        """Moves pybreaker. It is never open here: every result of an older epoch counts for nothing.

        `asked` is whether the tier itself said how long to stay away.
        """
        if count is Count.SUCCESS:
            self._machine.call(_succeed)
        elif count is not Count.NOTHING:
            try:
                self._machine.call(_fail)
            except _AttemptFailed:
                if count is Count.TRIP and self.book.state is not State.OPEN:
                    self._tripped = "it asked to be left alone" if asked else self._share_of_failures()
                    self._machine.open()
                    self._tripped = None

    def _share_of_failures(self) -> str:
        failed = sum(tally.failed for tally in self.book.tallies)
        seen = failed + sum(tally.succeeded for tally in self.book.tallies)
        return f"{failed} of {seen} attempts within {self._rule.window:g} s failed"

    def hasten(self) -> None:
        """Ends an open period early."""
        self.book = core.hasten(self.book, self._clock())

    def reset(self) -> None:
        """Closes the breaker by hand."""
        self.last_failure = None
        self._machine.close()

    def retire(self) -> None:
        """This breaker is forgotten: whatever still reaches it is told to nobody."""
        self._on_state = lambda *_: None

    @property
    def is_blank(self) -> bool:
        """Whether nothing would be lost if this breaker were made anew."""
        return self.book.state is State.CLOSED and not any(tally.failed for tally in self.book.tallies)

    @property
    def may_be_forgotten(self) -> bool:
        """Whether it is a pair's breaker under which no attempt runs; providers' are as few as the configuration's."""
        return bool(self.model) and not self.outstanding

    @property
    def closed_for(self) -> float | None:
        """Seconds until a probe may pass, None when an attempt may pass now. Advisory."""
        now = self._clock()
        if self.book.state is State.OPEN and not core.is_due(self.book, now):
            return self.book.open_until - now
        if self.book.state is State.HALF_OPEN and self.book.probe is not None and now < self.book.probe.expires:
            return 1.0
        return None

    def describe(self) -> dict[str, Any]:
        """What `/admin/breakers` shows."""
        now = self._clock()
        tallies = self.book.tallies
        is_open = self.book.state is State.OPEN
        remaining = max(0.0, self.book.open_until - now) if is_open else None
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
            "last_failure": self.last_failure,
        }


@dataclass(frozen=True, slots=True)
class Refused:
    """No attempt at this tier now: whose breaker said so, and in how many seconds asking again may help."""

    by: str
    retry_in: float


@dataclass(slots=True)
class _Held:
    """One permit of a lease; `proven` once its success was recorded while the answer goes on."""

    scope: Scope
    guard: Guard
    permit: Permit
    proven: bool = False


@dataclass(slots=True)
class Lease:
    """Both permits of one attempt. It is settled exactly once; later calls change nothing."""

    _held: tuple[_Held, ...]
    _breakers: Breakers
    _key: tuple[str, str]
    _settled: bool = field(default=False)

    @property
    def is_probe(self) -> bool:
        """Whether the attempt decides over a half-open breaker."""
        return any(held.permit.is_probe for held in self._held)

    def prove(self) -> None:
        """The answer has begun: a probe's success is recorded now, so that others need not wait for its end."""
        for held in () if self._settled else self._held:
            fresh = held.guard.prove(held.permit)
            held.proven |= fresh is not held.permit
            held.permit = fresh

    def release(self) -> None:
        """Gives both permits back: no attempt was made."""
        if self._settled:
            return
        self._settled = True
        for held in self._held:
            held.guard.give_back(held.permit)

    def settle(self, verdict: Verdict, why: str = "") -> None:
        """Records how the attempt ended; `why` is kept as the last failure."""
        if self._settled:
            return
        self._settled = True
        answered = isinstance(verdict, Success) or (isinstance(verdict, Failure) and verdict.reached)
        for held in self._held:
            failed = isinstance(verdict, Failure) and (held.scope is verdict.scope or verdict.pair_too)
            if isinstance(verdict, Failure) and failed:
                held.guard.fail(held.permit, verdict, why)
            elif answered and not held.proven:
                held.guard.succeed(held.permit)
            else:
                held.guard.give_back(held.permit)
        if isinstance(verdict, Ignore) and verdict.hold:
            self._breakers.hold(*self._key, verdict.hold)


class Breakers:
    """All breakers of the gateway, made when first needed."""

    def __init__(
        self,
        rule: Rule,
        clock: Clock = time.monotonic,
        on_state: OnState = lambda *_: None,
        max_guards: int = MAX_GUARDS,
    ) -> None:
        self._rule = rule
        self._max_guards = max_guards
        self._clock = clock
        self._on_state = on_state
        self._guards: dict[tuple[str, str], Guard] = {}
        self._held: dict[tuple[str, str], float] = {}

    def set_rule(self, rule: Rule) -> None:
        """Applies a new rule to every breaker."""
        self._rule = rule
        for guard in self._guards.values():
            guard.set_rule(rule)

    def guard(self, provider: str, model: str = "") -> Guard:
        """The breaker of a provider (no model) or of a pair."""
        key = (provider, model)
        if key not in self._guards:
            if len(self._guards) >= self._max_guards:
                self._make_room()
            self._guards[key] = Guard(provider, model, self._rule, self._clock, self._on_state)
        return self._guards[key]

    def _make_room(self) -> None:
        """Forgets every blank breaker, or else the oldest one that is closed, or else the oldest."""
        idle = [(key, guard) for key, guard in self._guards.items() if guard.may_be_forgotten]
        leaving = [key for key, guard in idle if guard.is_blank]
        if not leaving:
            # sorting is stable and the dictionary in order of age
            leaving = [key for key, _ in sorted(idle, key=lambda item: item[1].book.state is not State.CLOSED)[:1]]
        for key in leaving:
            self._guards.pop(key).retire()
            self._on_state(*key, None)

    def acquire(self, provider: str, model: str, expires: float) -> Lease | Refused:
        """Both permits for an attempt that ends by `expires` (monotonic seconds), or the refusal and neither."""
        outer, inner = self.guard(provider), self.guard(provider, model)
        first = outer.ask(expires)
        if isinstance(first, Refusal):
            return Refused(outer.name, first.retry_in)
        second = inner.ask(expires)
        if isinstance(second, Refusal):
            outer.give_back(first)
            return Refused(inner.name, second.retry_in)
        held = (_Held(Scope.PROVIDER, outer, first), _Held(Scope.PAIR, inner, second))
        return Lease(held, self, (provider, model))

    def closed_for(self, provider: str, model: str) -> float | None:
        """Seconds until the pair may be tried, None when now. Advisory: the permit is what counts."""
        waits = [
            wait
            for key in ((provider, ""), (provider, model))
            if key in self._guards and (wait := self._guards[key].closed_for) is not None
        ]
        return max(waits, default=None)

    def hold(self, provider: str, model: str, seconds: float) -> None:
        """The pair asked to be left alone for so long."""
        now = self._clock()
        self._held = {key: until for key, until in self._held.items() if until > now}
        self._held[provider, model] = now + seconds

    def held_for(self, provider: str, model: str) -> float | None:
        """Seconds that the pair still wants to be left alone, or None."""
        until = self._held.get((provider, model))
        if until is None:
            return None
        if (rest := until - self._clock()) > 0:
            return rest
        del self._held[provider, model]
        return None

    def came_back(self, provider: str) -> None:
        """The provider was gone and answers again: its own open period ends now, by a probe as always."""
        if (guard := self._guards.get((provider, ""))) is not None:
            guard.hasten()

    def reset(self, name: str) -> bool:
        """Closes the breaker called `name`; False when there is none."""
        found = [guard for guard in self._guards.values() if guard.name == name]
        for guard in found:
            guard.reset()
            self._held.pop((guard.provider, guard.model), None)
        return bool(found)

    def describe(self) -> list[dict[str, Any]]:
        """Every breaker, by name."""
        return [guard.describe() for guard in sorted(self._guards.values(), key=lambda guard: guard.name)]

    def states(self) -> Mapping[str, State]:
        """State by name."""
        return {guard.name: guard.book.state for guard in self._guards.values()}
