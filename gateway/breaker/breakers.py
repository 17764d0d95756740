"""All breakers of the gateway: one per provider and one per (provider, model) pair. An attempt needs both permits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.breaker.breaker import Breaker, Clock, OnState
from gateway.breaker.outcome import Failure, Ignore, Scope, Success, Verdict
from gateway.breaker.permits import CLOSED, BreakerState, Permit, Refused, Rule
from gateway.breaker.probe_claims import Claim, ProbeClaims
from gateway.breaker.silence import StreamActivity
from gateway.breaker.state_machine import BreakerStore
from inference.protocol import Priority

OnFailure = Callable[[str, str, Failure], None]
"""Called with provider, model and each failure of an attempt, after it was recorded."""

MAX_BREAKERS = 512
"""Model names come from clients where a route is `*`: above this number old breakers are removed, except those with
running attempts."""


@dataclass(slots=True)
class _HeldPermit:
    """One of the two permits of a lease. `is_confirmed`: its success was recorded and the answer continues.
    `claim`: of a probe, where several gateways share breakers.
    """

    breaker: Breaker
    permit: Permit
    is_confirmed: bool = False
    claim: Claim | None = None

    def confirm_probe(self) -> None:
        renewed = self.breaker.confirm_probe(self.permit)
        if renewed is not self.permit:
            self.is_confirmed = True
            self.release_claim()
        self.permit = renewed

    def release_claim(self) -> None:
        if self.claim is not None:
            self.claim.release(self.breaker.provider, self.breaker.model)
            self.claim = None


@dataclass(slots=True)
class Lease:
    """Both permits of one attempt; none for an attempt at a provider that was replaced, whose result does not count.

    The first call of `settle` or `release` counts.
    """

    _held: tuple[_HeldPermit, ...]
    _breakers: Breakers
    _key: tuple[str, str]
    _is_settled: bool = field(default=False)
    _on_down: Callable[[], None] | None = None

    @property
    def is_probe(self) -> bool:
        """Whether the attempt decides about a half-open breaker."""
        return any(held.permit.is_probe for held in self._held)

    def first_byte(self, activity: StreamActivity) -> None:
        """The first byte of the answer has arrived; `activity` reports its later silence.

        The inference service sends it while a model loads, which may take minutes: it proves the service itself.
        """
        for held in () if self._is_settled else self._held:
            if held.permit.is_probe and held.breaker.is_local and not held.breaker.model:
                held.confirm_probe()
            elif held.breaker.silence is not None:
                held.breaker.silence.first_byte(held.permit.number, self._breakers.clock(), activity)

    def first_token(self) -> None:
        """The first token has arrived: the success of a probe is recorded now, so that other attempts need not wait."""
        for held in () if self._is_settled else self._held:
            if held.breaker.silence is not None:
                held.breaker.silence.first_token(held.permit.number, self._breakers.clock())
            if held.permit.is_probe:
                held.confirm_probe()

    def call_when_down(self, on_down: Callable[[], None]) -> None:
        """Call `on_down` if probes of the gateway find the provider down before the attempt ends. Once per lease."""
        if self._held and not self._is_settled:
            self._on_down = on_down
            self._held[0].breaker.on_down.add(on_down)

    def _end(self) -> None:
        self._is_settled = True
        if self._on_down is not None:
            self._held[0].breaker.on_down.discard(self._on_down)
            self._on_down = None

    def release(self) -> None:
        """Return both permits: no attempt was made."""
        if self._is_settled:
            return
        self._end()
        for held in self._held:
            held.breaker.release(held.permit)
            held.release_claim()

    @property
    def probes(self) -> list[tuple[str, str]]:
        """Provider and model of each breaker about which the attempt decides."""
        return [(held.breaker.provider, held.breaker.model) for held in self._held if held.permit.is_probe]

    def hold_claim(self, claim: Claim) -> None:
        """The probes of this lease are claimed among all gateways until they end."""
        for held in self._held:
            if held.permit.is_probe:
                held.claim = claim

    def settle(self, verdict: Verdict, reason: str = "") -> None:
        """Record how the attempt ended; `reason` is shown as the last failure."""
        if self._is_settled:
            return
        self._end()
        failure = verdict if isinstance(verdict, Failure) else None
        answered = isinstance(verdict, Success) if failure is None else failure.reached
        for held in self._held:
            breaker = held.breaker
            if failure is not None and (
                failure.pair_too or failure.scope is (Scope.PAIR if breaker.model else Scope.PROVIDER)
            ):
                breaker.fail(held.permit, failure, reason)
            elif answered and not held.is_confirmed:
                breaker.succeed(held.permit)
            else:
                breaker.release(held.permit)
            held.release_claim()
        if not self._held or self._held[0].breaker.is_retired:
            return  # the provider of this name was replaced
        if failure is not None:
            self._breakers.on_failure(*self._key, failure)
        if isinstance(verdict, Ignore) and verdict.skip_seconds:
            self._breakers.skip(*self._key, verdict.skip_seconds, verdict.full_for)


class Breakers:
    """All breakers of the gateway, created on first use. `store` has their state."""

    def __init__(
        self,
        rule: Rule,
        clock: Clock = time.monotonic,
        on_state: OnState = lambda *_: None,
        max_breakers: int = MAX_BREAKERS,
        on_failure: OnFailure = lambda *_: None,
        store: BreakerStore | None = None,
    ) -> None:
        self.on_failure = on_failure
        self.claims: ProbeClaims | None = None
        """Set where several gateways share breakers: a probe needs a claim besides its permit."""
        self._rule = rule
        self.max_breakers = max_breakers
        self.clock = clock
        self._on_state = on_state
        self._store = BreakerStore() if store is None else store
        self._breakers: dict[tuple[str, str], Breaker] = {}
        self._by_provider: dict[str, dict[str, Breaker]] = {}
        """The same breakers by provider and model."""
        self.generation = 0
        """How often a provider was replaced. A request keeps the number it began with and gives it to `acquire`."""
        self._replaced: dict[str, int] = {}
        """The generation in which each replaced provider was replaced."""
        self._skipped_until: dict[tuple[str, str, str], float] = {}
        """Until when requests of a priority skip a pair: (provider, model, priority)."""

    def restore(self) -> None:
        """Create the breakers whose state the store kept from before a restart."""
        for provider, model in self._store.stored():
            self.breaker(provider, model)

    def set_rule(self, rule: Rule) -> None:
        """Use a new rule for every breaker."""
        self._rule = rule
        for breaker in self._breakers.values():
            breaker.set_rule(rule)

    def breaker(self, provider: str, model: str = "") -> Breaker:
        """The breaker of a provider (no model) or of a pair."""
        key = (provider, model)
        breaker = self._breakers.get(key)
        if breaker is None:
            if len(self._breakers) >= self.max_breakers:
                self._make_room()
            storage = self._store.storage(provider, model)
            breaker = self._breakers[key] = Breaker(provider, model, self._rule, self.clock, self._on_state, storage)
            self._by_provider.setdefault(provider, {})[model] = breaker
            self._on_state(provider, model, breaker.state)
        return breaker

    def _make_room(self) -> None:
        """Remove all blank breakers, or else the oldest closed one, or else the oldest."""
        idle = [(key, breaker) for key, breaker in self._breakers.items() if breaker.is_removable]
        removed = [key for key, breaker in idle if breaker.is_blank]
        if not removed:
            # the dictionary is in order of age, and sorting keeps it
            removed = [key for key, _ in sorted(idle, key=lambda item: item[1].state is not CLOSED)[:1]]
        self._remove(removed)

    def forget(self, provider: str) -> None:
        """The provider was removed or replaced: attempts of requests that began before do not count for the new one."""
        self.generation += 1
        self._replaced[provider] = self.generation
        self._remove([key for key in self._breakers if key[0] == provider])
        self._skipped_until = {key: until for key, until in self._skipped_until.items() if key[0] != provider}

    def _remove(self, keys: Iterable[tuple[str, str]]) -> None:
        for key in keys:
            self._breakers.pop(key).retire()
            del self._by_provider[key[0]][key[1]]
            self._store.discard(*key)
            self._on_state(*key, None)

    def acquire(
        self, provider: str, model: str, expires: float, forced: bool = False, generation: int | None = None
    ) -> Lease | Refused:
        """Both permits for an attempt that ends by `expires` (monotonic seconds), or a refusal and neither permit.

        A `forced` attempt is not refused because of a ramp or silence. An attempt at a provider that was
        replaced after the `generation` of its request is never refused, and its result does not count.
        """
        if generation is not None and generation < self._replaced.get(provider, 0):
            return Lease((), self, (provider, model))
        outer, inner = self.breaker(provider), self.breaker(provider, model)
        first = outer.acquire(expires, forced)
        if isinstance(first, Refused):
            return first
        second = inner.acquire(expires, forced)
        if isinstance(second, Refused):
            outer.release(first)
            return second
        return Lease((_HeldPermit(outer, first), _HeldPermit(inner, second)), self, (provider, model))

    def open_for(self, provider: str, model: str) -> float | None:
        """Seconds until the pair may be tried, None when now. An estimate: `acquire` decides."""
        longest = None
        for key in ((provider, ""), (provider, model)):
            breaker = self._breakers.get(key)
            if breaker is not None and (wait := breaker.open_for) is not None:
                longest = wait if longest is None else max(longest, wait)
        return longest

    def awaits_probe(self, provider: str, model: str) -> bool:
        """Whether the next attempt at the pair decides about an open breaker."""
        found = (self._breakers.get((provider, "")), self._breakers.get((provider, model)))
        return any(breaker is not None and breaker.state is not CLOSED for breaker in found) and (
            self.open_for(provider, model) is None
        )

    def outstanding(self, provider: str, model: str) -> int:
        """Attempts at the pair that run now."""
        breaker = self._breakers.get((provider, model))
        return 0 if breaker is None else breaker.outstanding

    def skip(self, provider: str, model: str, seconds: float, priorities: Iterable[str]) -> None:
        """Requests of these priorities skip the pair for `seconds`: its queue is full."""
        now = self.clock()
        self._skipped_until = {key: until for key, until in self._skipped_until.items() if until > now}
        self._skipped_until.update(((provider, model, priority), now + seconds) for priority in priorities)

    def skipped_for(self, provider: str, model: str, priority: str = Priority.NORMAL) -> float | None:
        """Seconds for which requests of `priority` still skip the pair, or None."""
        until = self._skipped_until.get((provider, model, priority))
        if until is None:
            return None
        if (remaining := until - self.clock()) > 0:
            return remaining
        del self._skipped_until[provider, model, priority]
        return None

    def by_model(self, provider: str) -> Mapping[str, Breaker]:
        """The breakers of a provider by model; the provider's own breaker has the empty name."""
        return self._by_provider.get(provider, {})

    def reset(self, name: str) -> bool:
        """Close the breaker with this name; False when there is none."""
        found = [(key, breaker) for key, breaker in self._breakers.items() if breaker.name == name]
        for pair, breaker in found:
            breaker.reset()
            self._skipped_until = {key: until for key, until in self._skipped_until.items() if key[:2] != pair}
        return bool(found)

    def describe(self) -> list[dict[str, Any]]:
        """The entries of all breakers in `/admin/breakers`, by name."""
        return [breaker.describe() for breaker in sorted(self._breakers.values(), key=lambda breaker: breaker.name)]

    def states(self) -> Mapping[str, BreakerState]:
        """State for operators by name."""
        return {breaker.name: breaker.shown_state for breaker in self._breakers.values()}

    def states_by_key(self) -> Mapping[tuple[str, str], BreakerState]:
        """State for operators by provider and model (empty for the provider's own)."""
        return {key: breaker.shown_state for key, breaker in self._breakers.items()}
