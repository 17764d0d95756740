"""One circuit breaker, of a provider or of a (provider, model) pair: its state machine, permits, window, ramp, silence.

The state is read from the storage of `gateway.breaker.state_machine`; this module adds what pybreaker lacks for
concurrent, cancellable attempts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from gateway.breaker.outcome import Failure, is_local, split_key
from gateway.breaker.permits import (
    CLOSED,
    HALF_OPEN,
    OPEN,
    BreakerState,
    FailureWindow,
    Permit,
    Permits,
    Ramp,
    Refused,
    Rule,
)
from gateway.breaker.probe_schedule import MAX_PACE_SECONDS, POSTPONE_SECONDS, Finding
from gateway.breaker.silence import SilenceDetector
from gateway.breaker.state_machine import BreakerStorage, StateMachine

log = logging.getLogger("gateway.breaker.breakers")

REQUESTS, PROBES, RESTART, FLEET = "requests", "probes", "restart", "fleet"
"""What opened a breaker: users' requests, probes of the gateway, it was open before the gateway was restarted, or
another gateway opened it."""

SHORT_WAIT_SECONDS = 1.0
"""The wait for a running probe, or for the next step of a ramp."""

Clock = Callable[[], float]
OnState = Callable[[str, str, BreakerState | None], None]
"""Called with provider, model (empty for the provider's own breaker) and the new state; None: it was removed."""


class Breaker:
    """The breaker of a provider, or of a pair where `model` is not empty. `provider` is a key, see `provider_key`."""

    def __init__(
        self, provider: str, model: str, rule: Rule, clock: Clock, on_state: OnState, storage: BreakerStorage
    ) -> None:
        self.provider = provider
        self.model = model
        self.name = f"{provider}/{model}" if model else provider
        self.last_failure: str | None = None
        self.last_probe: str | None = None
        self.provider_answered = False
        """`Failure.reached` of the last failure. If false, perhaps only this gateway cannot reach the provider."""
        self.needs_memory = False
        """Whether the last failure was a refusal of memory by the inference service."""
        self.source: str | None = None
        self.is_retired = False
        self.is_local = is_local(provider)
        self.silence = None if self.is_local else SilenceDetector(is_model=bool(model))
        """For clouds only: the inference service is probed, and reports when it is busy."""
        self.on_down: set[Callable[[], None]] = set()
        """Callbacks of attempts; called when probes open this breaker."""
        self._permits = Permits()
        self._window = FailureWindow()
        self._ramp: Ramp | None = None
        self._open_reason: str | None = None
        self._rule = rule
        self._clock = clock
        self._on_state = on_state
        self.storage = storage
        self._machine = StateMachine(self.name, rule, storage, self._changed)
        state = self.state
        if state is not CLOSED:
            self.last_failure, self.source = "it was open before", RESTART
            self._log_change(CLOSED, state, "a restart of the gateway")

    @property
    def state(self) -> BreakerState:
        """The stored state."""
        return self._machine.state

    @property
    def shown_state(self) -> BreakerState:
        """The state for operators: half-open from the end of the open period. The next attempt changes `state`."""
        state = self.state
        return HALF_OPEN if state is OPEN and self._clock() >= self.storage.open_until else state

    @property
    def outstanding(self) -> int:
        """Attempts and probes that run now."""
        return self._permits.outstanding

    def set_rule(self, rule: Rule) -> None:
        """Use a new rule; the state and the consecutive failures stay."""
        if rule.window != self._rule.window:
            self._window.clear()
        self._rule = rule
        self._machine.set_rule(rule)

    def _changed(self, before: BreakerState, after: BreakerState) -> None:
        """The state machine changed its state, or was reset without a change of the state."""
        self._permits.new_epoch()
        self._window.clear()
        self._ramp = Ramp(self._clock()) if after is CLOSED and before is HALF_OPEN else None
        if self.silence is not None:
            self.silence.clear()
        if after is CLOSED:
            self.source = None
        self._on_state(self.provider, self.model, after)
        if after is before:
            return
        failures = f"{self.storage.counter} failures in a row"
        reason = "its probe failed" if before is HALF_OPEN else self._open_reason or failures
        self._log_change(before, after, reason)
        if after is OPEN and self.source == PROBES:
            for on_down in tuple(self.on_down):
                on_down()

    def _log_change(self, before: BreakerState, after: BreakerState, reason: str) -> None:
        if self.is_retired:
            return
        level, detail = logging.INFO, ""
        if after is OPEN:
            level = logging.WARNING
            seconds = max(0.0, self.storage.open_until - self._clock())
            detail = f" for {seconds:.3g} s after {reason}: {self.last_failure or 'unknown'}"
        log.log(level, "breaker %s: %s -> %s%s", self.name, before.label, after.label, detail)

    def acquire(self, expires: float, forced: bool = False) -> Permit | Refused:
        """A permit for one attempt that ends by `expires`, or the refusal. If the open period is over, the breaker
        becomes half-open here.

        Neither the ramp after a recovery nor silence refuses a `forced` attempt.
        """
        now = self._clock()
        permits, state = self._permits, self._machine.state
        if state is CLOSED:
            if not forced:
                if self.silence is not None and self._is_silent(self.silence, now):
                    return Refused(self.name, SHORT_WAIT_SECONDS, silent=True)
                if self._ramp is not None:
                    width = self._ramp.width(now)
                    if width is not None and permits.outstanding >= width:
                        return Refused(self.name, self._retry_in(SHORT_WAIT_SECONDS), recovering=True)
        elif permits.is_probing(now) or (state is OPEN and now < self.storage.open_until):
            return Refused(self.name, self._retry_in(self._blocked_seconds(now)))
        elif state is OPEN:
            self._machine.half_open()
        permit = permits.issue(expires, is_probe=state is not CLOSED)
        if self.silence is not None:
            self.silence.started(permit.number, now, expires)
        return permit

    def _blocked_seconds(self, now: float) -> float:
        """Seconds until an attempt may pass, while the state is not closed."""
        probing = SHORT_WAIT_SECONDS if self._permits.is_probing(now) else 0.0
        return max(probing, self.storage.open_until - now) if self.state is OPEN else probing

    def _retry_in(self, seconds: float) -> float:
        """Seconds until a new try is useful: probes may end the open period of the inference service early."""
        return min(seconds, MAX_PACE_SECONDS) if self.is_local and not self.model else seconds

    def _is_silent(self, silence: SilenceDetector, now: float) -> bool:
        """Whether silent attempts, counted as failures, would open this closed breaker."""
        missing = max(1, self._rule.failures - self.storage.counter)
        return silence.silent_attempts(now, missing) >= missing

    def _ended(self, permit: Permit, *, answered: bool = False) -> None:
        self._permits.outstanding -= 1
        if self.silence is not None:
            self.silence.ended(permit.number, answered=answered)

    def release(self, permit: Permit) -> None:
        """Return a permit whose attempt has no result for this breaker."""
        self._ended(permit)
        self._permits.release_probe(permit)

    def succeed(self, permit: Permit) -> None:
        """Record that the attempt under `permit` succeeded."""
        self._ended(permit, answered=True)
        if self._counts(permit):
            self._record_success(permit)

    def confirm_probe(self, permit: Permit) -> Permit:
        """Record the success of a probe whose answer continues; returns the permit for the rest of the answer.

        An ordinary or late permit is returned as it is: nothing is recorded before its end.
        """
        if not permit.is_probe or not self._counts(permit):
            return permit
        if self.silence is not None:
            self.silence.clear()  # the rest of the answer gets a new permit
        self._record_success(permit)
        # one failure does not undo the recovery of the inference service: it is probed, and its answers are resumed
        return self._permits.renew(permit, can_undo_recovery=not self.is_local)

    def _counts(self, permit: Permit) -> bool:
        """Whether a result under `permit` counts in the current epoch."""
        _ = self._machine.state  # reports a change that was made elsewhere
        return self._permits.counts(permit)

    def _record_success(self, permit: Permit) -> None:
        if permit.is_probe:
            self._permits.release_probe(permit)
        if self._ramp is not None:
            self._ramp.succeeded()
        self._window.add(self._rule, self._clock(), failed=False)
        self._machine.record_success()

    def fail(self, permit: Permit, failure: Failure, reason: str, source: str = REQUESTS) -> None:
        """Record that the attempt under `permit`, made by `source`, failed because of `reason`."""
        self._ended(permit)
        permits, now = self._permits, self._clock()
        if not self._counts(permit):
            return
        self.last_failure, self.needs_memory, self.source = reason, failure.needs_memory, source
        self.provider_answered = failure.reached
        permits.release_probe(permit)
        if not failure.broke or permits.is_new_event(permit, now):
            self._record_failure(permit, failure, now)
        if self.state is CLOSED:
            self.source = None

    def _record_failure(self, permit: Permit, failure: Failure, now: float) -> None:
        rule, ramp = self._rule, self._ramp
        opens = failure.opens and bool(self.model)  # the failure does not concern other models of the provider
        open_seconds = rule.open
        if failure.retry_after is not None:
            open_seconds = failure.retry_after if opens else max(failure.retry_after, rule.open)
        undoes_recovery = permit.can_undo_recovery and ramp is not None and not ramp.successes
        if ramp is not None:
            ramp.failed(now)
        self._window.add(rule, now, failed=True)
        if self._machine.record_failure(now + open_seconds):
            return
        if opens:
            self._open_reason = "the provider rejected further requests"
        elif undoes_recovery:
            self._open_reason = "the answer of its probe was cut"
        elif self._window.exceeds(rule):
            succeeded, failed = self._window.counts
            self._open_reason = f"{failed} of {succeeded + failed} attempts within {rule.window:.3g} s failed"
        if self._open_reason is not None:
            self._machine.open(now + open_seconds)
            self._open_reason = None

    def acquire_recovery_probe(self, expires: float) -> Permit | None:
        """A permit to probe an open breaker until `expires`; None unless it is open and no probe is running."""
        if self.state is not OPEN or self._permits.is_probing(self._clock()):
            return None
        return self._permits.issue(expires, is_probe=True)

    def settle_recovery_probe(self, permit: Permit, finding: Finding, detail: str) -> None:
        """Record the finding of the probe under `permit`: GOOD ends the open period now, BAD extends it.

        UNKNOWN has no effect, and neither has a late finding. The next attempt is still a probe.
        """
        self._permits.outstanding -= 1
        self.last_probe = detail
        if not self._counts(permit):
            return
        now, storage = self._clock(), self.storage
        self._permits.release_probe(permit)
        if finding is Finding.GOOD:
            log.info("breaker %s: the open period ends early: %s", self.name, detail)
            storage.open_until = min(storage.open_until, now)
        elif finding is Finding.BAD:
            storage.open_until = max(storage.open_until, now + min(POSTPONE_SECONDS, self._rule.open))

    def follow(self, open_until: float | None, reason: str, needs_memory: bool = False) -> None:
        """Take over what another gateway recorded: open until then because of `reason`, or closed (None)."""
        if open_until is None:
            if self.state is OPEN:
                self._machine.half_open()  # so that a ramp follows, as where the probe succeeded
            if self.state is HALF_OPEN:
                self._machine.close()
            return
        self.last_failure, self.needs_memory, self.source = reason, needs_memory, FLEET
        self.provider_answered = True  # otherwise it would not have been shared
        if self.state is OPEN:
            self.storage.open_until = open_until
        else:
            self._open_reason = "failures at another gateway"
            self._machine.open(open_until)
            self._open_reason = None

    def reset(self) -> None:
        """Close the breaker by hand."""
        self.last_failure = self.last_probe = None
        self._machine.close()

    def retire(self) -> None:
        """The breaker was removed: results of its attempts no longer count and are not reported."""
        self._on_state = lambda *_: None
        self.is_retired = True
        self._permits.new_epoch()

    @property
    def is_blank(self) -> bool:
        """Whether this breaker has the state of a new one."""
        return self.state is CLOSED and not self._window.counts.failed

    @property
    def is_removable(self) -> bool:
        """Whether it is a pair's breaker without running attempts. The breakers of providers are few, and stay."""
        return bool(self.model) and not self.outstanding

    @property
    def open_for(self) -> float | None:
        """Seconds until a probe may pass; None when an attempt may pass now. An estimate: `acquire` decides."""
        state = self._machine.state
        if state is CLOSED:
            return None
        now = self._clock()
        if self._permits.is_probing(now) or (state is OPEN and now < self.storage.open_until):
            return self._retry_in(self._blocked_seconds(now))
        return None

    def describe(self) -> dict[str, Any]:
        """The entry of this breaker in `/admin/breakers`."""
        now, state = self._clock(), self.shown_state
        counts = self._window.counts
        remaining = max(0.0, self.storage.open_until - now) if state is OPEN else None
        provider, node = split_key(self.provider)
        return {
            "name": self.name,
            "provider": provider,
            "node": node,
            "model": self.model or None,
            "state": state.label,
            "value": int(state),
            "failures": self.storage.counter,
            "window": {"succeeded": counts.succeeded, "failed": counts.failed},
            "epoch": self._permits.epoch,
            "probing": self._permits.probe is not None,
            "retry_after": None if remaining is None else round(remaining, 3),
            "opens_until": None if remaining is None else round(time.time() + remaining, 3),
            "source": self.source,
            "ramp": None if self._ramp is None else self._ramp.width(now),
            "last_failure": self.last_failure,
            "last_probe": self.last_probe,
        }
