"""Keeps a breaker for every provider and every PROVIDER/MODEL and remembers what they asked for; never awaits.

An attempt needs both permits: the provider's and the pair's. How one breaker works is in `gateway.breaker.guard`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.breaker.guard import Clock, Guard, OnState
from gateway.breaker.outcome import LOCAL, Failure, Ignore, Scope, Success, Verdict
from gateway.breaker.permits import CLOSED, Permit, Refusal, Rule, State
from gateway.breaker.silence import Silent
from inference.protocol import Priority

OnFailure = Callable[[str, str, Failure], None]
"""Called with provider, model and every failure of an attempt, after it was recorded."""

MAX_GUARDS = 512
"""Names come from callers where a route is `*`: beyond so many breakers, old ones are forgotten. A breaker under which
an attempt runs never is, so that the bound is this number and the requests in flight."""


@dataclass(frozen=True, slots=True)
class Refused:
    """No attempt at this tier now: whose breaker said so, and in how many seconds asking again may help.

    `recovering`: it is closed and lets only some pass yet. `silent`: it is closed, and keeps too many waiting.
    An attempt that either keeps off and that has nowhere else to go may be forced.
    """

    by: str
    retry_in: float
    recovering: bool = False
    silent: bool = False


@dataclass(slots=True)
class _Held:
    """One permit of a lease; `proven` once its success was recorded while the answer goes on."""

    guard: Guard
    permit: Permit
    proven: bool = False

    @property
    def scope(self) -> Scope:
        """Whose failures it is about."""
        return Scope.PAIR if self.guard.model else Scope.PROVIDER

    def prove(self) -> None:
        """What is known already is the success of a probe; nothing else changes."""
        fresh = self.guard.prove(self.permit)
        self.proven |= fresh is not self.permit
        self.permit = fresh


@dataclass(slots=True)
class Lease:
    """Both permits of one attempt, or none at a provider that is a former one: nobody keeps its breaker.

    It is settled exactly once; later calls change nothing.
    """

    _held: tuple[_Held, ...]
    _breakers: Breakers
    _key: tuple[str, str]
    _settled: bool = field(default=False)

    @property
    def is_probe(self) -> bool:
        """Whether the attempt decides over a half-open breaker."""
        return any(held.permit.is_probe for held in self._held)

    def heard(self, silent: Silent) -> None:
        """The tier's first byte under this lease is here; `silent` tells for how long it says nothing more.

        Our own service says it while a model loads, which may take minutes: that the service itself is there is proven.
        """
        for held in () if self._settled else self._held:
            if held.permit.is_probe and held.guard.name == LOCAL:
                held.prove()
            else:
                held.guard.opened(held.permit, silent)

    @contextlib.contextmanager
    def until_gone(self, leave: Callable[[], None]) -> Iterator[None]:
        """Meanwhile `leave` is called, once, should probes of our own find that nobody is there."""
        waiting = self._held[0].guard.leaving if self._held else set()
        waiting.add(leave)
        try:
            yield
        finally:
            waiting.discard(leave)

    def prove(self) -> None:
        """The answer has begun: a probe's success is recorded now, so that others need not wait for its end."""
        for held in () if self._settled else self._held:
            if held.permit.is_probe:
                held.prove()
            else:
                held.guard.begun(held.permit)

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
        failure = verdict if isinstance(verdict, Failure) else None
        answered = isinstance(verdict, Success) if failure is None else failure.reached
        for held in self._held:
            if failure is not None and (held.scope is failure.scope or failure.pair_too):
                held.guard.fail(held.permit, failure, why)
            elif answered and not held.proven:
                held.guard.succeed(held.permit)
            else:
                held.guard.give_back(held.permit)
        if not self._held or self._held[0].guard.is_retired:
            return  # somebody else has the name now
        if failure is not None:
            self._breakers.on_failure(*self._key, failure)
        if isinstance(verdict, Ignore) and verdict.hold:
            self._breakers.hold(*self._key, verdict.hold, verdict.full_for)


def _refused(guard: Guard, refusal: Refusal) -> Refused:
    is_closed = refusal.state is CLOSED
    return Refused(guard.name, refusal.retry_in, is_closed and not refusal.silent, refusal.silent)


class Breakers:
    """All breakers of the gateway, made when first needed."""

    def __init__(
        self,
        rule: Rule,
        clock: Clock = time.monotonic,
        on_state: OnState = lambda *_: None,
        max_guards: int = MAX_GUARDS,
        on_failure: OnFailure = lambda *_: None,
    ) -> None:
        self.on_failure = on_failure
        self._rule = rule
        self._max_guards = max_guards
        self._clock = clock
        self._on_state = on_state
        """The breakers that are not closed."""
        self._guards: dict[tuple[str, str], Guard] = {}
        self.generation = 0
        """Told to `acquire` by requests that began now: whom they know by a name may be another one later."""
        self._since: dict[str, int] = {}
        """In which generation whoever has a name now began, where there was another one."""
        self._held: dict[tuple[str, str, str], float] = {}
        """Until when pairs asked to be left alone by requests of a priority."""

    def set_rule(self, rule: Rule) -> None:
        """Applies a new rule to every breaker."""
        self._rule = rule
        for guard in self._guards.values():
            guard.set_rule(rule)

    def guard(self, provider: str, model: str = "") -> Guard:
        """The breaker of a provider (no model) or of a pair."""
        key = (provider, model)
        guard = self._guards.get(key)
        if guard is None:
            if len(self._guards) >= self._max_guards:
                self._make_room()
            guard = self._guards[key] = Guard(provider, model, self._rule, self._clock, self._on_state)
        return guard

    def _make_room(self) -> None:
        """Forgets every blank breaker, or else the oldest one that is closed, or else the oldest."""
        idle = [(key, guard) for key, guard in self._guards.items() if guard.may_be_forgotten]
        leaving = [key for key, guard in idle if guard.is_blank]
        if not leaving:
            # sorting is stable and the dictionary in order of age
            leaving = [key for key, _ in sorted(idle, key=lambda item: item[1].book.state is not CLOSED)[:1]]
        self._remove(leaving)

    def forget(self, provider: str) -> None:
        """Whoever has this name from now on is somebody else, or nobody.

        Attempts that run, and those of requests that began before, concern the old one.
        """
        self.generation += 1
        self._since[provider] = self.generation
        self._remove([key for key in self._guards if key[0] == provider])
        self._held = {key: until for key, until in self._held.items() if key[0] != provider}

    def _remove(self, keys: Iterable[tuple[str, str]]) -> None:
        for key in keys:
            self._guards.pop(key).retire()
            self._on_state(*key, None)

    def acquire(
        self, provider: str, model: str, expires: float, forced: bool = False, generation: int | None = None
    ) -> Lease | Refused:
        """Both permits for an attempt that ends by `expires` (monotonic seconds), or the refusal and neither.

        An attempt that is `forced` has nowhere else to go: it passes whatever a ramp after a recovery says. So does one
        at a provider of another `generation` than whoever has its name now, and nothing comes of it.
        """
        if generation is not None and generation < self._since.get(provider, 0):
            return Lease((), self, (provider, model))
        outer, inner = self.guard(provider), self.guard(provider, model)
        first = outer.ask(expires, forced)
        if isinstance(first, Refusal):
            return _refused(outer, first)
        second = inner.ask(expires, forced)
        if isinstance(second, Refusal):
            outer.give_back(first)
            return _refused(inner, second)
        return Lease((_Held(outer, first), _Held(inner, second)), self, (provider, model))

    def closed_for(self, provider: str, model: str) -> float | None:
        """Seconds until the pair may be tried, None when now. Advisory: the permit is what counts."""
        longest = None
        for key in ((provider, ""), (provider, model)):
            guard = self._guards.get(key)
            if guard is not None and (wait := guard.closed_for) is not None:
                longest = wait if longest is None else max(longest, wait)
        return longest

    def outstanding(self, provider: str, model: str) -> int:
        """Attempts at the pair that run now."""
        guard = self._guards.get((provider, model))
        return 0 if guard is None else guard.outstanding

    def hold(self, provider: str, model: str, seconds: float, priorities: Iterable[str]) -> None:
        """The pair asked to be left alone for so long by requests of these priorities."""
        self._forget_past_holds()
        until = self._clock() + seconds
        self._held.update(((provider, model, priority), until) for priority in priorities)

    def _forget_holds(self, provider: str, model: str) -> None:
        self._held = {key: until for key, until in self._held.items() if key[:2] != (provider, model)}

    def _forget_past_holds(self) -> None:
        now = self._clock()
        self._held = {key: until for key, until in self._held.items() if until > now}

    def held_for(self, provider: str, model: str, priority: str = Priority.NORMAL) -> float | None:
        """Seconds that the pair still wants to be left alone by such requests, or None."""
        until = self._held.get((provider, model, priority))
        if until is None:
            return None
        if (rest := until - self._clock()) > 0:
            return rest
        del self._held[provider, model, priority]
        return None

    def of(self, provider: str) -> Mapping[str, Guard]:
        """The breakers of a provider by model, its own under the empty name."""
        return {model: guard for (name, model), guard in self._guards.items() if name == provider}

    def kept(self) -> list[tuple[str, str, float]]:
        """What a restart must not forget: provider, model and remaining seconds (0: half-open) of each not closed."""
        return [
            (provider, model, guard.remaining)
            for (provider, model), guard in self._guards.items()
            if guard.book.state is not CLOSED
        ]

    def restore(self, provider: str, model: str, seconds: float) -> None:
        """Opens a breaker for what was left of its open period before a restart."""
        self.guard(provider, model).restore(seconds)

    def reset(self, name: str) -> bool:
        """Closes the breaker called `name`; False when there is none."""
        found = [guard for guard in self._guards.values() if guard.name == name]
        for guard in found:
            guard.reset()
            self._forget_holds(guard.provider, guard.model)
        return bool(found)

    def describe(self) -> list[dict[str, Any]]:
        """Every breaker, by name."""
        return [guard.describe() for guard in sorted(self._guards.values(), key=lambda guard: guard.name)]

    def states(self) -> Mapping[str, State]:
        """State by name."""
        return {guard.name: guard.book.state for guard in self._guards.values()}
