"""Prediction of the time to the first token, and deferral of slow candidates."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.providers.local.candidate_facts import UNKNOWN, Speed, queue_seconds
from gateway.routing.budget import Budget, Limits
from gateway.routing.candidate_checks import Allowed, Prediction, deferral, too_slow
from gateway.routing.chain import Candidate, Drop

LOCAL, MINI, CLOUD = Candidate("local", "a", 0), Candidate("local", "b", 1), Candidate("openai", "c", 2)
COLD = Prediction.of(Speed(80.0, 10.0, 100.0), 1000)
READY = Prediction.of(Speed(0.0, 0.0, 100.0), 1000)
UNMEASURED = Prediction.of(UNKNOWN, 1000)
ALLOWED = Allowed(60.0, 300.0)


def test_load_queue_and_prefill_are_added() -> None:
    assert (COLD.wait_seconds, COLD.seconds) == (90, 100)
    assert str(COLD) == "100 s to the first token (80 s to load, 10 s in the queue, 10 s to read about 1000 tokens)"
    assert (READY.wait_seconds, READY.seconds) == (0, 10)
    assert Speed(80.0, None).ready_in == 80
    assert UNKNOWN.ready_in == 0


def test_unknown_parts_count_as_zero() -> None:
    assert UNMEASURED.seconds == 0
    assert too_slow(UNMEASURED, Allowed(0.0, 0.0)) is None
    assert str(UNMEASURED) == "no known wait"
    assert Prediction.of(Speed(0, 0, 0.0), 1000).prefill_seconds is None


def test_wait_and_first_token_have_separate_limits() -> None:
    assert too_slow(COLD, ALLOWED) == f"{COLD}, and a candidate before the last may keep a request waiting 60 s"
    assert too_slow(COLD, Allowed(120.0, 99.0)) == f"{COLD}, and the deadline for it is in 99 s"
    assert too_slow(COLD, Allowed(120.0, -1.0)) == f"{COLD}, and the deadline for it is in 0 s"
    assert too_slow(COLD, Allowed(120.0, 100.0)) is None


def test_allowed_times_follow_from_the_budget() -> None:
    limits = Limits(first_token=30, inter_token=15, total=300, load_wait=60, attempts=4)
    assert Allowed.by(Budget(limits, 1000.0), 1010.0) == Allowed(60, 290)
    hasty = Limits(first_token=30, inter_token=15, total=300, load_wait=60, attempts=4, client_silence=20)
    assert Allowed.by(Budget(hasty, 1000.0), 1010.0) == Allowed(5, 10)


def test_candidate_is_deferred_only_for_a_quicker_one_or_a_cloud() -> None:
    verdict = deferral(LOCAL, COLD, ALLOWED, [(MINI, READY)])
    assert verdict is not None
    assert (verdict.drop, verdict.retry_in) == (Drop.TOO_SLOW, 90)
    assert verdict.message.endswith("; local/b is tried first")
    assert deferral(LOCAL, COLD, ALLOWED, [(CLOUD, UNMEASURED)]) is not None
    assert deferral(LOCAL, COLD, ALLOWED, [(MINI, UNMEASURED)]) is None
    assert deferral(LOCAL, COLD, ALLOWED, [(MINI, COLD)]) is None
    assert deferral(LOCAL, COLD, ALLOWED, []) is None
    assert deferral(LOCAL, READY, ALLOWED, [(CLOUD, UNMEASURED)]) is None


def test_unmeasured_prefill_is_compared_by_wait() -> None:
    unread = Prediction.of(Speed(0.0, 0.0), 1000)
    assert unread.is_quicker_than(COLD)
    assert not unread.is_quicker_than(READY), "neither has to wait"
    assert not Prediction.of(Speed(0.0, None, 100.0), 10).is_quicker_than(COLD)


def test_outstanding_requests_lengthen_the_reported_queue() -> None:
    assert queue_seconds(3.0, 3, 4, 2.0) == 3
    assert queue_seconds(None, 3, 4, 2.0) is None
    assert queue_seconds(3.0, 9, 4, None) == 3
    assert queue_seconds(None, 4, 4, 2.0) == 2
    assert queue_seconds(3.0, 9, 4, 2.0) == 12
    assert queue_seconds(30.0, 9, 4, 2.0) == 30


def test_request_of_high_priority_waits_only_for_the_next_free_place() -> None:
    assert queue_seconds(30.0, 9, 4, 2.0, first=True) == 2
    assert queue_seconds(1.0, 0, 4, 2.0, first=True) == 1
    assert queue_seconds(30.0, 9, 4, None, first=True) == 30
    assert queue_seconds(None, 0, 4, 2.0, first=True) is None


SECONDS = st.none() | st.floats(0, 1000)
SPEEDS = st.builds(Speed, SECONDS, SECONDS, st.none() | st.floats(0.1, 1e5))


@given(SPEEDS, st.lists(SPEEDS, max_size=4), st.floats(0, 500), st.floats(0, 500), st.integers(0, 10**5))
def test_no_candidate_is_deferred_for_a_slower_one(
    speed: Speed, others: list[Speed], wait: float, left: float, tokens: int
) -> None:
    expected = Prediction.of(speed, tokens)
    later = [(MINI, Prediction.of(other, tokens)) for other in others]
    verdict = deferral(LOCAL, expected, Allowed(wait, left), later)
    if verdict is not None:
        assert too_slow(expected, Allowed(wait, left)) is not None
        assert any(other.is_quicker_than(expected) for _, other in later)
    if speed == UNKNOWN:
        assert verdict is None
