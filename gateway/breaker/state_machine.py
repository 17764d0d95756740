"""Drives pybreaker's state machine, and the storage of the state of a breaker.

State, consecutive failures, successes of probes and the end of the open period are only in a `BreakerStorage`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import pybreaker

from gateway.breaker.permits import CLOSED, HALF_OPEN, OPEN, BreakerState, Rule

_STATES = {
    pybreaker.STATE_CLOSED: CLOSED,
    pybreaker.STATE_HALF_OPEN: HALF_OPEN,
    pybreaker.STATE_OPEN: OPEN,
}

OnChange = Callable[[BreakerState, BreakerState], None]
"""Called with the state before and after each transition."""


class BreakerStorage(pybreaker.CircuitBreakerStorage):
    """The stored state of one breaker: pybreaker's interface and the end of the open period.

    `open_until` is in seconds of the gateway's monotonic clock and means something only while the state is open. Every
    request reads `state`: a storage on another machine must answer from a local copy.
    """

    open_until: float


class MemoryStorage(pybreaker.CircuitMemoryStorage, BreakerStorage):
    """The state of one breaker in the memory of this process."""

    state = pybreaker.STATE_CLOSED  # an attribute is faster than a property, and each request reads it several times

    def __init__(self) -> None:
        super().__init__(pybreaker.STATE_CLOSED)
        self.open_until = 0.0


class BreakerStore:
    """The storages of all breakers, by provider and model. The breaker of a provider itself has an empty model.

    This class keeps them in memory; a subclass can keep them elsewhere.
    """

    def __init__(self) -> None:
        self._storages: dict[tuple[str, str], BreakerStorage] = {}

    def storage(self, provider: str, model: str) -> BreakerStorage:
        """The storage of one breaker; a new one is closed."""
        storage = self._storages.get((provider, model))
        if storage is None:
            storage = self._storages[provider, model] = self._new(provider, model)
        return storage

    def _new(self, provider: str, model: str) -> BreakerStorage:
        return MemoryStorage()

    def discard(self, provider: str, model: str) -> None:
        """Forget the state of one breaker."""
        self._storages.pop((provider, model), None)

    def stored(self) -> Collection[tuple[str, str]]:
        """Provider and model of each storage."""
        return tuple(self._storages)


class StateMachine:
    """pybreaker's machine of one breaker. Results are recorded afterwards: no lock is held across an await."""

    def __init__(self, name: str, rule: Rule, storage: BreakerStorage, on_change: OnChange) -> None:
        self.storage = storage
        self._reported = storage.state
        """The stored state as it was last reported."""
        self._on_change = on_change
        self._listener = _Listener()
        self._breaker = pybreaker.CircuitBreaker(
            fail_max=rule.failures,
            reset_timeout=rule.open,
            success_threshold=rule.probes,
            name=name,
            state_storage=storage,
            listeners=[self._listener],
        )

    @property
    def state(self) -> BreakerState:
        """The stored state. A change that was made elsewhere is reported to `on_change` first."""
        stored = self.storage.state
        if stored != self._reported:
            _ = self._breaker.state  # pybreaker notices the change and calls its listeners
            self._report()
        return _STATES[stored]

    def _report(self) -> None:
        """Report transitions once they are complete: pybreaker calls its listeners before it stores the new state."""
        self._reported = self.storage.state
        changes, self._listener.changes = self._listener.changes, []
        for before, after in changes:
            self._on_change(before, after)

    def set_rule(self, rule: Rule) -> None:
        """Use a new rule; state and counters stay."""
        self._breaker.fail_max = rule.failures
        self._breaker.reset_timeout = rule.open
        self._breaker.success_threshold = rule.probes

    def record_success(self) -> None:
        """Record a success: it ends the consecutive failures, and in the half-open state it may close the breaker."""
        if self.storage.counter:
            self.storage.reset_counter()
        if self.storage.state != pybreaker.STATE_CLOSED:
            self._breaker.state.on_success()
            self._report()

    def record_failure(self, open_until: float) -> bool:
        """Record a failure. Returns whether the breaker opened because of it, until `open_until`."""
        self.storage.open_until = open_until
        self.storage.increment_counter()
        try:
            self._breaker.state.on_failure(Exception())  # pybreaker does not use the argument
        except pybreaker.CircuitBreakerError:  # pybreaker reports that the breaker opened
            self._report()
            return True
        return False

    def open(self, until: float) -> None:
        """Open the breaker until `until`, whatever the counters are."""
        self.storage.open_until = until
        self._breaker.open()
        self._report()

    def half_open(self) -> None:
        """Begin the half-open state."""
        self._breaker.half_open()
        self._report()

    def close(self) -> None:
        """Close the breaker and reset its counters."""
        self._breaker.close()
        self._report()


class _Listener(pybreaker.CircuitBreakerListener):
    """Collects the transitions of one machine: the states before and after each."""

    def __init__(self) -> None:
        self.changes: list[tuple[BreakerState, BreakerState]] = []

    def state_change(
        self,
        cb: pybreaker.CircuitBreaker,
        old_state: pybreaker.CircuitBreakerState | None,
        new_state: pybreaker.CircuitBreakerState,
    ) -> None:
        """Note one transition."""
        after = _STATES[new_state.name]
        self.changes.append((after if old_state is None else _STATES[old_state.name], after))
