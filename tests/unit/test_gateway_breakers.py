"""Leases, breakers and the ramp after a recovery, with a clock that the tests set."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.breaker.breakers import Breakers, Lease, Refused
from gateway.breaker.outcome import Failure, Ignore, Reason, Scope, Success
from gateway.breaker.permits import (
    RAMP_FIRST,
    RAMP_FULL,
    RAMP_SECONDS,
    RAMP_STEP_SECONDS,
    BreakerState,
    Permit,
    Ramp,
    Rule,
)
from gateway.breaker.probe_schedule import Finding
from gateway.breaker.state_machine import BreakerStore
from tests.rigs.breaker_rig import FakeActivity

PAIR, PROVIDER = Failure(Scope.PAIR), Failure(Scope.PROVIDER)
LEFT = Ignore(Reason.CLIENT_LEFT)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breakers(clock: Clock) -> Breakers:
    return Breakers(Rule(), clock)


def _lease(breakers: Breakers, model: str = "m", expires: float = 1e9) -> Lease:
    lease = breakers.acquire("p", model, expires)
    assert isinstance(lease, Lease), lease
    return lease


def _local(breakers: Breakers) -> Lease:
    lease = breakers.acquire("local", "m", 1e9)
    assert isinstance(lease, Lease), lease
    return lease


def _fail(breakers: Breakers, count: int, verdict: Failure = PAIR, model: str = "m") -> None:
    for _ in range(count):
        _lease(breakers, model).settle(verdict, "it failed")


def test_five_failures_in_a_row_open_breaker_and_half_open_admits_one_probe(breakers: Breakers, clock: Clock) -> None:
    _fail(breakers, 4)
    assert breakers.states()["p/m"] is BreakerState.CLOSED
    _fail(breakers, 1)
    assert breakers.states()["p/m"] is BreakerState.OPEN
    refused = breakers.acquire("p", "m", 1e9)
    assert refused == Refused("p/m", 30.0)
    clock.now += 29.9
    assert isinstance(breakers.acquire("p", "m", 1e9), Refused)
    clock.now += 0.1
    probe = _lease(breakers)
    assert probe.is_probe
    assert all(isinstance(breakers.acquire("p", "m", 1e9), Refused) for _ in range(31))
    probe.settle(Success())
    assert breakers.states()["p/m"] is BreakerState.CLOSED
    assert not _lease(breakers).is_probe


def test_success_resets_consecutive_failures(breakers: Breakers) -> None:
    _fail(breakers, 4)
    _lease(breakers).settle(Success())
    _fail(breakers, 4)
    assert breakers.states()["p/m"] is BreakerState.CLOSED


def test_failed_probe_opens_breaker_for_whole_period(breakers: Breakers, clock: Clock) -> None:
    _fail(breakers, 5)
    clock.now += 30
    _lease(breakers).settle(PAIR, "still broken")
    assert breakers.open_for("p", "m") == 30.0


def test_cancelled_probe_returns_its_permit(breakers: Breakers, clock: Clock) -> None:
    _fail(breakers, 5)
    clock.now += 30
    _lease(breakers).settle(LEFT)
    assert breakers.states()["p/m"] is BreakerState.HALF_OPEN
    assert _lease(breakers).is_probe


def test_lost_probe_expires(breakers: Breakers, clock: Clock) -> None:
    _fail(breakers, 5)
    clock.now += 30
    lost = _lease(breakers, expires=clock.now + 10)
    assert breakers.open_for("p", "m") == 1.0
    clock.now += 10
    second = _lease(breakers)
    assert second.is_probe
    lost.settle(PAIR, "late")
    assert breakers.states()["p/m"] is BreakerState.HALF_OPEN
    second.settle(Success())
    assert breakers.states()["p/m"] is BreakerState.CLOSED


def test_cancelled_attempts_and_late_results_change_nothing(breakers: Breakers, clock: Clock) -> None:
    old = [_lease(breakers) for _ in range(10)]
    for lease in old[:5]:
        lease.settle(LEFT)
    assert breakers.breaker("p", "m").describe()["failures"] == 0
    old[9].first_byte(FakeActivity())
    _fail(breakers, 5)
    clock.now += 30
    probe = _lease(breakers)
    old[5].settle(Success())
    old[6].settle(PAIR, "late")
    assert breakers.states()["p/m"] is BreakerState.HALF_OPEN
    probe.settle(Success())
    for lease in old[7:]:
        lease.settle(PAIR, "late")
    assert breakers.breaker("p", "m").describe()["failures"] == 0


def test_provider_breaker_covers_all_its_models(breakers: Breakers) -> None:
    _fail(breakers, 3, PROVIDER, "a")
    _fail(breakers, 2, PROVIDER, "b")
    assert breakers.states() == {"p": BreakerState.OPEN, "p/a": BreakerState.CLOSED, "p/b": BreakerState.CLOSED}
    assert breakers.acquire("p", "c", 1e9) == Refused("p", 30.0)
    assert breakers.open_for("p", "a") == 30.0


def test_model_failure_does_not_count_for_provider(breakers: Breakers) -> None:
    _fail(breakers, 5, Failure(Scope.PAIR, reached=True))
    assert breakers.states() == {"p": BreakerState.CLOSED, "p/m": BreakerState.OPEN}
    _lease(breakers, "other").settle(Success())


def test_failure_without_reason_counts_in_both_scopes(breakers: Breakers) -> None:
    for _ in range(5):
        _fail(breakers, 1, Failure(Scope.PROVIDER, pair_too=True))
        _lease(breakers, "other").settle(Success())
    assert breakers.states() == {"p": BreakerState.CLOSED, "p/m": BreakerState.OPEN, "p/other": BreakerState.CLOSED}


def test_any_answer_recovers_the_provider(breakers: Breakers, clock: Clock) -> None:
    _fail(breakers, 5, PROVIDER)
    clock.now += 30
    _lease(breakers).settle(Failure(Scope.PAIR, reached=True), "refused, but it answered")
    assert breakers.states()["p"] is BreakerState.CLOSED


def test_probe_of_a_provider_and_a_model_excludes_probes_of_other_models(breakers: Breakers, clock: Clock) -> None:
    _fail(breakers, 5)
    _fail(breakers, 5, PROVIDER, "other")
    clock.now += 30
    assert _lease(breakers).is_probe, "it is the probe of both breakers"
    assert isinstance(breakers.acquire("p", "other", 1e9), Refused)


def test_provider_probe_is_returned_when_model_breaker_refuses(breakers: Breakers, clock: Clock) -> None:
    _fail(breakers, 5, PROVIDER, "other")
    clock.now += 10
    breakers.breaker("p", "m")
    for _ in range(5):
        breaker = breakers.breaker("p", "m")
        permit = breaker.acquire(1e9)
        breaker.fail(permit, PAIR, "x")  # type: ignore[arg-type]
    clock.now += 20
    assert breakers.acquire("p", "m", 1e9) == Refused("p/m", 10.0)
    assert _lease(breakers, "third").is_probe


def test_attempts_broken_by_one_event_count_once(breakers: Breakers, clock: Clock) -> None:
    running = [_lease(breakers) for _ in range(9)]
    for lease in running[:6]:
        lease.settle(Failure(Scope.PAIR, broke=True), "the connection broke")
        clock.now += 0.1
    assert breakers.breaker("p", "m").describe()["failures"] == 1
    clock.now += 1.0
    running[6].settle(Failure(Scope.PAIR, broke=True), "the connection broke")
    _lease(breakers).settle(Failure(Scope.PAIR, broke=True), "a new attempt broke")
    assert breakers.breaker("p", "m").describe()["failures"] == 3


def test_high_share_of_failures_opens_breaker(breakers: Breakers, clock: Clock) -> None:
    for index in range(20):
        clock.now += 1
        _lease(breakers).settle(Success() if index % 2 else PAIR, "flaky")
    assert breakers.states()["p/m"] is BreakerState.CLOSED, "the twentieth result is a success"
    _fail(breakers, 1)
    assert breakers.states()["p/m"] is BreakerState.OPEN


def test_old_results_leave_the_window(breakers: Breakers, clock: Clock) -> None:
    for _ in range(10):
        _fail(breakers, 1)
        _lease(breakers).settle(Success())
    clock.now += 61
    _fail(breakers, 1)
    assert breakers.breaker("p", "m").describe()["window"] == {"succeeded": 0, "failed": 1}
    assert breakers.states()["p/m"] is BreakerState.CLOSED


def test_429_opens_breaker_for_its_retry_after(breakers: Breakers, clock: Clock) -> None:
    _lease(breakers).settle(Failure(Scope.PAIR, 7.0, opens=True, reached=True), "slow down")
    assert breakers.open_for("p", "m") == 7.0
    clock.now += 7
    assert _lease(breakers).is_probe


def test_503_with_retry_after_opens_only_its_model(breakers: Breakers, clock: Clock) -> None:
    """The cloud gets no new request for this model before then. For the provider it counts as one failure."""
    _lease(breakers).settle(Failure(Scope.PROVIDER, 7.0, opens=True, pair_too=True), "maintenance")
    assert breakers.open_for("p", "m") == 7.0
    assert breakers.open_for("p", "other") is None
    assert breakers.breaker("p").describe()["failures"] == 1
    clock.now += 7
    assert _lease(breakers).is_probe


def test_longer_retry_after_extends_open_period(breakers: Breakers) -> None:
    _fail(breakers, 5, Failure(Scope.PAIR, 90.0))
    assert breakers.open_for("p", "m") == 90.0


def test_model_with_a_full_queue_is_skipped_without_an_open_breaker(breakers: Breakers, clock: Clock) -> None:
    _lease(breakers).settle(Ignore(Reason.QUEUE_FULL, 4.0, frozenset(("normal",))))
    assert breakers.skipped_for("p", "m") == 4.0
    clock.now += 4
    assert breakers.skipped_for("p", "m") is None
    assert breakers.skipped_for("p", "m") is None


def test_lease_is_settled_once(breakers: Breakers) -> None:
    lease = _lease(breakers)
    for _ in range(9):
        lease.settle(PAIR, "again and again")
    assert breakers.breaker("p", "m").describe()["failures"] == 1


def test_reset_closes_breaker_by_name(breakers: Breakers, clock: Clock) -> None:
    _fail(breakers, 5)
    breakers.skip("p", "m", 60, ["normal", "low"])
    breakers.skip("p", "other", 60, ["low"])
    assert breakers.reset("p/m")
    assert not breakers.reset("p/none")
    assert breakers.skipped_for("p", "m", "low") is None
    assert breakers.skipped_for("p", "other", "low") == 60
    assert breakers.open_for("p", "m") is None
    assert breakers.skipped_for("p", "m") is None
    assert not _lease(breakers).is_probe


# --- recovery probes --------------------------------------------------------------------------------------------------
def _probe(breakers: Breakers, finding: Finding, seconds: float = 2.0) -> Permit:
    permit = breakers.breaker("p").acquire_recovery_probe(breakers.clock() + seconds)
    assert permit is not None
    breakers.breaker("p").settle_recovery_probe(permit, finding, f"it is {finding}")
    return permit


def test_good_recovery_probe_ends_open_period_and_one_request_probes(breakers: Breakers) -> None:
    assert breakers.breaker("p").acquire_recovery_probe(1e9) is None, "it is closed"
    _fail(breakers, 5, PROVIDER)
    _probe(breakers, Finding.GOOD)
    assert breakers.open_for("p", "m") is None
    clients = [breakers.acquire("p", "m", 1e9) for _ in range(50)]
    (probe,) = [client for client in clients if isinstance(client, Lease)]
    assert probe.is_probe
    assert breakers.breaker("p").acquire_recovery_probe(1e9) is None, "a request is the probe"
    probe.settle(PROVIDER, "not quite")
    assert breakers.open_for("p", "m") == 30.0


def test_recovery_probe_excludes_other_probes(breakers: Breakers, clock: Clock) -> None:
    _fail(breakers, 5, PROVIDER)
    clock.now += 29.5
    permit = breakers.breaker("p").acquire_recovery_probe(clock.now + 2)
    assert permit is not None
    assert breakers.breaker("p").acquire_recovery_probe(clock.now + 2) is None
    clock.now += 0.5
    assert breakers.open_for("p", "m") == 1.0
    assert breakers.acquire("p", "m", 1e9) == Refused("p", 1.0)
    breakers.breaker("p").settle_recovery_probe(permit, Finding.UNKNOWN, "no answer")
    assert _lease(breakers).is_probe


def test_failed_recovery_probe_extends_open_period_and_lost_one_expires(breakers: Breakers, clock: Clock) -> None:
    _fail(breakers, 5, PROVIDER)
    clock.now += 29
    _probe(breakers, Finding.BAD)
    assert breakers.open_for("p", "m") == 10.0
    assert breakers.breaker("p").acquire_recovery_probe(clock.now + 11) is not None
    clock.now += 11
    assert _lease(breakers).is_probe


def test_failed_recovery_probe_does_not_shorten_open_period(breakers: Breakers) -> None:
    _fail(breakers, 5, PROVIDER)
    _probe(breakers, Finding.BAD)
    assert breakers.open_for("p", "m") == 30.0
    entry = breakers.describe()[0]
    assert (entry["source"], entry["last_probe"], entry["probing"]) == ("requests", "it is bad", False)


def test_recovery_probe_that_ends_after_reset_changes_nothing(breakers: Breakers) -> None:
    _fail(breakers, 5, PROVIDER)
    permit = breakers.breaker("p").acquire_recovery_probe(1e9)
    assert permit is not None
    breakers.reset("p")
    breakers.breaker("p").settle_recovery_probe(permit, Finding.BAD, "late")
    assert breakers.open_for("p", "m") is None
    assert breakers.breaker("p").outstanding == 0


# --- the ramp ---------------------------------------------------------------------------------------------------------
def _recovered(breakers: Breakers, clock: Clock) -> None:
    _fail(breakers, 5)
    clock.now += 30
    _lease(breakers).settle(Success())


def test_ramp_after_recovery_grows_with_successes_and_time(breakers: Breakers, clock: Clock) -> None:
    _recovered(breakers, clock)
    first = [_lease(breakers), _lease(breakers)]
    refused = breakers.acquire("p", "m", 1e9)
    assert refused == Refused("p/m", 1.0, recovering=True)
    assert breakers.breaker("p").outstanding == 2, "the permit of the provider was returned"
    assert breakers.describe()[1]["ramp"] == 2
    assert breakers.describe()[0]["ramp"] is None, "the provider did not fail"
    first.pop().settle(Success())
    assert breakers.describe()[1]["ramp"] == 3
    first += [_lease(breakers), _lease(breakers)]
    assert isinstance(breakers.acquire("p", "m", 1e9), Refused)
    clock.now += 1.0
    assert isinstance(breakers.acquire("p", "m", 1e9), Lease)
    clock.now += 6.0
    assert all(isinstance(breakers.acquire("p", "m", 1e9), Lease) for _ in range(100))


def test_forced_attempt_is_not_limited_by_the_ramp(breakers: Breakers, clock: Clock) -> None:
    _recovered(breakers, clock)
    leases = [breakers.acquire("p", "m", 1e9, forced=True) for _ in range(20)]
    assert all(isinstance(lease, Lease) for lease in leases)
    assert isinstance(breakers.acquire("p", "m", 1e9), Refused)


def test_failure_resets_the_ramp_to_its_first_step(breakers: Breakers, clock: Clock) -> None:
    _recovered(breakers, clock)
    clock.now += 3.0
    assert breakers.describe()[1]["ramp"] == 16
    _fail(breakers, 1)
    assert breakers.describe()[1]["ramp"] == 2


# --- silence ----------------------------------------------------------------------------------------------------------
def test_breaker_refuses_unforced_attempts_while_many_are_silent(breakers: Breakers, clock: Clock) -> None:
    waiting = [_lease(breakers) for _ in range(4)]
    clock.now += 7.4
    waiting.append(_lease(breakers))
    clock.now += 7.5
    assert breakers.acquire("p", "m", 1e9) == Refused("p", 1.0, silent=True)
    assert isinstance(breakers.acquire("p", "m", 1e9, forced=True), Lease)
    waiting[0].settle(Failure(Scope.PAIR), "it stayed silent")
    assert breakers.acquire("p", "m", 1e9) == Refused("p/m", 1.0, silent=True), "a failure is no sign of life"
    waiting[1].first_byte(FakeActivity())
    assert isinstance(breakers.acquire("p", "m", 1e9), Lease)


def test_ended_attempt_no_longer_counts_as_silent(breakers: Breakers, clock: Clock) -> None:
    waiting = [_lease(breakers) for _ in range(5)]
    clock.now += 8.0
    waiting[0].settle(LEFT)
    assert isinstance(breakers.acquire("p", "m", 1e9), Lease)


def test_attempts_from_before_recovery_do_not_count_as_silent(breakers: Breakers, clock: Clock) -> None:
    for _ in range(5):
        _lease(breakers)
    _fail(breakers, 5, Failure(Scope.PROVIDER, pair_too=True))
    clock.now += 30
    _lease(breakers).settle(Success())
    clock.now += 30  # the ramp is over
    assert isinstance(breakers.acquire("p", "m", 1e9), Lease)


def test_silence_after_first_byte_concerns_one_model(breakers: Breakers, clock: Clock) -> None:
    for _ in range(3):
        known = _lease(breakers)
        known.first_byte(FakeActivity())
        known.first_token()
        known.settle(Success())
    for _ in range(5):
        _lease(breakers).first_byte(FakeActivity(8.0))
    clock.now += 8.0
    assert breakers.acquire("p", "m", 1e9) == Refused("p/m", 1.0, silent=True)
    assert isinstance(breakers.acquire("p", "other", 1e9), Lease)


def test_expired_attempts_do_not_count_as_silent(breakers: Breakers, clock: Clock) -> None:
    for _ in range(5):
        _lease(breakers, expires=clock.now + 20.0)
    clock.now += 19.0
    assert isinstance(breakers.acquire("p", "m", 1e9), Refused)
    clock.now += 1.0
    assert isinstance(breakers.acquire("p", "m", 1e9), Lease)


def test_first_byte_is_a_success_of_the_service_but_not_of_the_model(breakers: Breakers, clock: Clock) -> None:
    """Otherwise all requests would be refused while one waits for its model to load, which may take minutes."""
    for provider in ("local", "cloud"):
        for _ in range(5):
            lease = breakers.acquire(provider, "m", 1e9)
            assert isinstance(lease, Lease)
            lease.settle(Failure(Scope.PROVIDER, pair_too=True), "it failed")
    clock.now += 30
    for provider, others in (("local", True), ("cloud", False)):
        probe = breakers.acquire(provider, "m", 1e9)
        assert isinstance(probe, Lease)
        probe.first_byte(FakeActivity())
        assert isinstance(breakers.acquire(provider, "other", 1e9), Lease) is others
        assert isinstance(breakers.acquire(provider, "m", 1e9), Refused)
        probe.settle(Success())
        probe.first_byte(FakeActivity())
        assert isinstance(breakers.acquire(provider, "m", 1e9), Lease)


def test_silence_is_not_judged_for_inference_service(breakers: Breakers, clock: Clock) -> None:
    assert all(isinstance(breakers.acquire("local", "m", 1e9), Lease) for _ in range(9))
    clock.now += 60.0
    assert isinstance(breakers.acquire("local", "m", 1e9), Lease)


# --- a restart of the gateway -----------------------------------------------------------------------------------------
def test_restored_breaker_is_logged_and_probed_after_its_period(
    breakers: Breakers, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    store = BreakerStore()
    _fail(Breakers(Rule(), clock, store=store), 5, Failure(Scope.PAIR, reached=True))
    clock.now += 12
    again = Breakers(Rule(), clock, store=store)
    again.restore()
    assert again.open_for("p", "m") == 18.0
    entry = again.breaker("p", "m").describe()
    assert (entry["state"], entry["source"]) == ("open", "restart")
    clock.now += 18
    probe = _lease(again)
    assert again.states()["p/m"] is BreakerState.HALF_OPEN
    probe.settle(PAIR, "still")
    assert again.open_for("p", "m") == 30.0
    assert caplog.messages[1] == (
        "breaker p/m: closed -> open for 18 s after a restart of the gateway: it was open before"
    )


def test_configured_number_of_probes_closes_breaker(clock: Clock) -> None:
    breakers = Breakers(Rule(probes=2), clock)
    _fail(breakers, 5)
    clock.now += 30
    _lease(breakers).settle(Success())
    assert breakers.states()["p/m"] is BreakerState.HALF_OPEN
    _lease(breakers).settle(Success())
    assert breakers.states()["p/m"] is BreakerState.CLOSED


def test_new_rule_applies_to_existing_breakers(breakers: Breakers) -> None:
    _fail(breakers, 2)
    breakers.set_rule(Rule(failures=3, open=5.0))
    _fail(breakers, 1)
    assert breakers.open_for("p", "m") == 5.0


def test_new_window_length_clears_results(breakers: Breakers, clock: Clock) -> None:
    """Otherwise results of the shorter window would never leave the longer one."""
    clock.now = 100_000.0
    breakers.set_rule(Rule(window=10.0))
    _fail(breakers, 4)
    breakers.set_rule(Rule(window=10.0, open=60.0))
    assert breakers.breaker("p", "m").describe()["window"] == {"succeeded": 0, "failed": 4}
    breakers.set_rule(Rule(window=60.0))
    for _ in range(200):
        _lease(breakers).settle(Success())
        clock.now += 6.0
    assert breakers.breaker("p", "m").describe()["window"] == {"succeeded": 10, "failed": 0}


def test_each_transition_is_one_log_line(breakers: Breakers, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "gateway.breaker.breakers"):
        _fail(breakers, 5)
        clock.now += 30
        _lease(breakers).settle(Success())
        breakers.reset("p/m")
    assert [record.getMessage() for record in caplog.records] == [
        "breaker p/m: closed -> open for 30 s after 5 failures in a row: it failed",
        "breaker p/m: open -> half-open",
        "breaker p/m: half-open -> closed",
    ]
    _fail(breakers, 5)
    entry = breakers.describe()[1]
    assert (entry["name"], entry["state"], entry["value"], entry["failures"]) == ("p/m", "open", 2, 5)
    assert entry["retry_after"] == 30.0
    assert entry["last_failure"] == "it failed"


def test_log_names_the_reason_for_opening(breakers: Breakers, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(10):
        _lease(breakers, "share").settle(Success())
        _lease(breakers, "share").settle(PAIR, "flaky")
    _lease(breakers, "asked").settle(Failure(Scope.PAIR, 7.0, opens=True), "slow down")
    clock.now += 7
    _lease(breakers, "asked").settle(PAIR, "still no")
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "breaker p/share: closed -> open for 30 s after 10 of 20 attempts within 60 s failed: flaky",
        "breaker p/asked: closed -> open for 7 s after the provider rejected further requests: slow down",
        "breaker p/asked: half-open -> open for 30 s after its probe failed: still no",
    ]


# --- streamed probes --------------------------------------------------------------------------------------------------
def test_probe_closes_breaker_at_its_first_token(breakers: Breakers, clock: Clock) -> None:
    """Otherwise a streamed probe would exclude all other requests until its end, which may be minutes away."""
    _fail(breakers, 5)
    clock.now += 30
    probe = _lease(breakers)
    assert isinstance(breakers.acquire("p", "m", 1e9), Refused)
    probe.first_token()
    assert breakers.states()["p/m"] is BreakerState.CLOSED
    assert not _lease(breakers).is_probe
    probe.first_token()
    probe.settle(Success())
    assert breakers.breaker("p", "m").describe()["window"] == {"succeeded": 0, "failed": 0}, "a new epoch began"


def test_interrupted_answer_of_the_probe_undoes_the_recovery(
    breakers: Breakers, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise a cloud that interrupts every answer would get five more requests after each open period."""
    _fail(breakers, 5)
    clock.now += 30
    probe = _lease(breakers)
    probe.first_token()
    probe.settle(PAIR, "cut")
    assert breakers.open_for("p", "m") == 30.0
    assert "closed -> open for 30 s after the answer of its probe was cut: cut" in caplog.text


def test_interrupted_answer_of_the_probe_is_one_failure_after_another_success(breakers: Breakers, clock: Clock) -> None:
    _fail(breakers, 5)
    clock.now += 30
    probe = _lease(breakers)
    probe.first_token()
    _lease(breakers).settle(Success())
    probe.settle(PAIR, "cut")
    entry = breakers.breaker("p", "m").describe()
    assert (entry["state"], entry["failures"], entry["last_failure"]) == ("closed", 1, "cut")


def test_interrupted_answer_of_a_probe_of_the_inference_service_is_one_failure(
    breakers: Breakers, clock: Clock
) -> None:
    """The service loads the model again at once, and the answer is resumed there."""
    for _ in range(5):
        _local(breakers).settle(PAIR, "it failed")
    clock.now += 30
    probe = _local(breakers)
    probe.first_token()
    probe.settle(PAIR, "cut")
    assert breakers.open_for("local", "m") is None


def test_first_token_is_one_of_two_needed_probe_successes(clock: Clock) -> None:
    breakers = Breakers(Rule(probes=2), clock)
    _fail(breakers, 5)
    clock.now += 30
    first = _lease(breakers)
    first.first_token()
    assert breakers.states()["p/m"] is BreakerState.HALF_OPEN
    second = _lease(breakers)
    assert second.is_probe
    first.settle(Success())
    assert breakers.states()["p/m"] is BreakerState.HALF_OPEN, "one answer counts once"
    second.first_token()
    assert breakers.states()["p/m"] is BreakerState.CLOSED
    third = Breakers(Rule(probes=2), clock)
    _fail(third, 5)
    clock.now += 30
    cut = _lease(third)
    cut.first_token()
    cut.settle(PAIR, "cut")
    assert third.states()["p/m"] is BreakerState.OPEN


def test_ordinary_attempt_counts_at_its_end(breakers: Breakers) -> None:
    _fail(breakers, 4)
    lease = _lease(breakers)
    lease.first_token()
    assert breakers.breaker("p", "m").describe()["failures"] == 4
    lease.settle(Success())
    lease.first_token()
    assert breakers.breaker("p", "m").describe()["failures"] == 0


# --- number of breakers -----------------------------------------------------------------------------------------------
class Gauge:
    """The samples of `gateway_breaker_state`."""

    def __init__(self) -> None:
        self.series: dict[tuple[str, str], BreakerState] = {}

    def __call__(self, provider: str, model: str, state: BreakerState | None) -> None:
        if state is None:
            del self.series[provider, model]
        else:
            self.series[provider, model] = state


def test_breaker_is_shown_as_half_open_from_the_end_of_its_open_period(breakers: Breakers, clock: Clock) -> None:
    """Also without a request, which would begin the half-open state."""
    _fail(breakers, 5)
    assert (breakers.states()["p/m"], breakers.describe()[1]["value"]) == (BreakerState.OPEN, 2)
    clock.now += 30
    assert breakers.states()["p/m"] is breakers.states_by_key()["p", "m"] is BreakerState.HALF_OPEN
    entry = breakers.describe()[1]
    assert (entry["state"], entry["value"], entry["retry_after"], entry["opens_until"]) == ("half-open", 1, None, None)
    _lease(breakers).settle(PAIR, "it failed")
    assert breakers.states()["p/m"] is BreakerState.OPEN


def test_breakers_of_unknown_models_are_removed(clock: Clock) -> None:
    gauge = Gauge()
    breakers = Breakers(Rule(), clock, gauge, 10)
    _fail(breakers, 1, model="kept")
    for index in range(50):
        _lease(breakers, f"invented-{index}").settle(LEFT)
    assert len(breakers.states()) <= 11
    assert "p/kept" in breakers.states()
    assert {model for _, model in gauge.series} == {name.partition("/")[2] for name in breakers.states()}


def test_number_of_breakers_is_limited_and_open_ones_stay_longest(clock: Clock) -> None:
    gauge = Gauge()
    breakers = Breakers(Rule(), clock, gauge, 10)
    _fail(breakers, 5, Failure(Scope.PAIR, reached=True), "open")
    for index in range(50):
        _fail(breakers, 1, Failure(Scope.PAIR, reached=True), f"failing-{index}")
    assert len(breakers.states()) == 10
    assert breakers.states()["p/open"] is BreakerState.OPEN
    assert "p/failing-49" in breakers.states()
    assert "p/failing-0" not in breakers.states()
    assert len(gauge.series) == 10
    for index in range(50):
        _fail(breakers, 5, Failure(Scope.PAIR, reached=True), f"down-{index}")
    assert len(breakers.states()) == 10
    assert "p" in breakers.states(), "breakers of providers are not removed"


def test_breaker_with_running_attempt_is_not_removed(clock: Clock) -> None:
    """Otherwise it would be created again, and the failure of the running attempt would count in the removed one."""
    gauge = Gauge()
    breakers = Breakers(Rule(failures=1), clock, gauge, 10)
    running = _lease(breakers, "running")
    leases = [_lease(breakers, f"other-{index}") for index in range(30)]
    for lease in leases:
        lease.settle(LEFT)
    for index in range(30):
        _lease(breakers, f"more-{index}").release()
    running.settle(PAIR, "it failed")
    assert breakers.open_for("p", "running") == 30.0
    assert gauge.series["p", "running"] is BreakerState.OPEN
    assert len(breakers.states()) <= 11


def test_removed_breaker_reports_nothing(clock: Clock) -> None:
    gauge = Gauge()
    breakers = Breakers(Rule(), clock, gauge, 2)
    old = breakers.breaker("p", "old")
    breakers.breaker("p", "new")
    breakers.breaker("p", "newer")
    old.reset()
    assert ("p", "old") not in gauge.series


def test_released_lease_returns_both_permits(breakers: Breakers, clock: Clock) -> None:
    _fail(breakers, 5)
    clock.now += 30
    lease = _lease(breakers)
    lease.release()
    lease.release()
    assert breakers.breaker("p", "m").outstanding == breakers.breaker("p").outstanding == 0
    assert _lease(breakers).is_probe


def test_expired_skips_are_removed(breakers: Breakers, clock: Clock) -> None:
    breakers.skip("p", "a", 1.0, ["normal"])
    clock.now += 2
    breakers.skip("p", "b", 5.0, ["normal"])
    assert breakers.skipped_for("p", "a") is None
    assert breakers.skipped_for("p", "b") == 5.0


def test_open_breaker_of_the_inference_service_is_retried_within_the_interval_of_probes() -> None:
    """Probes may end its open period early, but not the open period of a cloud."""
    breakers = Breakers(Rule(failures=1), Clock())
    for provider in ("local", "cloud"):
        lease = breakers.acquire(provider, "m", 1e9)
        assert isinstance(lease, Lease)
        lease.settle(Failure(Scope.PROVIDER), "gone")
    refused = breakers.acquire("local", "m", 1e9)
    assert isinstance(refused, Refused)
    assert (breakers.open_for("local", "m"), refused.retry_in) == (4.0, 4.0)
    assert breakers.open_for("cloud", "m") == 30.0
    breaker = next(entry for entry in breakers.describe() if entry["name"] == "local")
    assert breaker["retry_after"] == 30.0


MOMENTS = st.floats(0, 40, allow_nan=False)


def test_ramp_doubles_every_second_and_ends() -> None:
    climb = Ramp(100.0)
    assert [climb.width(100.0 + seconds) for seconds in range(6)] == [2, 4, 8, 16, 32, None]


def test_each_success_widens_ramp_by_one() -> None:
    climb = Ramp(0.0)
    for _ in range(RAMP_FULL - RAMP_FIRST - 1):
        climb.succeeded()
    assert climb.width(0.0) == RAMP_FULL - 1
    climb.succeeded()
    assert climb.width(0.0) is None


def test_failure_restarts_ramp_within_thirty_seconds() -> None:
    climb = Ramp(0.0)
    climb.succeeded()
    climb.failed(4.0)
    assert climb.width(4.0) == RAMP_FIRST
    for second in range(30):
        climb.failed(float(second))
    assert climb.width(29.5) == RAMP_FIRST
    assert climb.width(RAMP_SECONDS) is None


@given(begun=MOMENTS, events=st.lists(st.tuples(st.booleans(), st.floats(0, 2, allow_nan=False)), max_size=60))
def test_ramp_narrows_only_by_failure_and_always_ends(begun: float, events: list[tuple[bool, float]]) -> None:
    climb, now, before = Ramp(begun), begun, RAMP_FIRST
    for ok, pause in events:
        now += pause
        wide = climb.width(now)
        if wide is None:
            break
        assert RAMP_FIRST <= before <= wide < RAMP_FULL
        if ok:
            climb.succeeded()
        else:
            climb.failed(now)
        before = wide if ok else RAMP_FIRST
    assert climb.width(max(now, begun) + RAMP_SECONDS) is None
    assert climb.width(now + 7 * RAMP_STEP_SECONDS) is None
