"""Rate limits of a key: requests and tokens per minute, concurrent requests, and the wait in a rejection."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.access import rate_limits as core
from gateway.access.rate_limits import Account, LimitKind, Limits, LimitStatus, Refusal, Running
from gateway.apis.openai.frames import Endpoint
from tests.rigs.typed_bodies import decoded

FREE = Account()


def _entered(account: Account, limits: Limits, number: int, now: float) -> Account:
    account, refusal = core.enter(account, limits, number, now)
    assert refusal is None
    return account


def test_requests_of_a_minute_may_arrive_at_once() -> None:
    limits = Limits(requests_per_minute=2)
    account = _entered(_entered(FREE, limits, 1, 10.0), limits, 2, 10.0)
    account, refusal = core.enter(account, limits, 3, 20.0)
    assert refusal == Refusal(LimitKind.REQUESTS, 2, pytest.approx(20.0))
    assert [one.number for one in account.running] == [1, 2], "a rejected request is not counted"
    assert core.enter(account, limits, 3, 40.0)[1] is None


def test_concurrent_requests_are_limited() -> None:
    limits = Limits(concurrent=1)
    account = core.leave(_entered(FREE, limits, 1, 0.0), limits, 1, 0, 8.0)
    account = _entered(account, limits, 2, 10.0)
    account, refusal = core.enter(account, limits, 3, 13.0)
    assert refusal == Refusal(LimitKind.CONCURRENT, 1, pytest.approx(5.0)), (
        "a request takes 8 s, this one has run for 3 s"
    )
    assert core.enter(core.leave(account, limits, 2, 0, 14.0), limits, 3, 14.0)[1] is None


def test_longer_of_two_waits_is_reported() -> None:
    limits = Limits(requests_per_minute=1, concurrent=1)
    account = _entered(FREE, limits, 1, 0.0)
    assert core.enter(account, limits, 2, 0.0)[1] == Refusal(LimitKind.REQUESTS, 1, pytest.approx(60.0))
    account = replace(account, mean_seconds=100.0)
    assert core.enter(account, limits, 2, 0.0)[1] == Refusal(LimitKind.CONCURRENT, 1, pytest.approx(100.0))


def test_unused_reserved_tokens_are_released() -> None:
    limits = Limits(tokens_per_minute=100)
    account, refusal = core.reserve(_entered(FREE, limits, 1, 0.0), limits, 1, 90, 0.0)
    assert refusal is None
    second = _entered(account, limits, 2, 0.0)
    assert core.reserve(second, limits, 2, 40, 0.0)[1] == Refusal(LimitKind.TOKENS, 100, pytest.approx(18.0))
    account = core.leave(second, limits, 1, 30, 0.0)
    assert account.tokens == 30
    account, refusal = core.reserve(account, limits, 2, 40, 0.0)
    assert (refusal, account.tokens) == (None, 70)


def test_request_larger_than_the_limit_starts_when_the_usage_is_zero() -> None:
    limits = Limits(tokens_per_minute=60)
    account, refusal = core.reserve(_entered(FREE, limits, 1, 0.0), limits, 1, 5000, 0.0)
    assert refusal is None
    account = core.leave(account, limits, 1, 180, 0.0)
    assert account.tokens == 180
    account = _entered(account, limits, 2, 0.0)
    assert core.reserve(account, limits, 2, 10, 0.0)[1] == Refusal(LimitKind.TOKENS, 60, pytest.approx(130.0))
    assert core.limit_statuses(account, limits, 0.0) == (LimitStatus(LimitKind.TOKENS, 60, 0, pytest.approx(180.0)),)


def test_wait_for_tokens_includes_the_wait_for_requests() -> None:
    limits = Limits(requests_per_minute=1, tokens_per_minute=600)
    account, _ = core.reserve(_entered(FREE, limits, 1, 0.0), limits, 1, 600, 0.0)
    assert core.reserve(account, limits, 1, 10, 0.0)[1] == Refusal(LimitKind.TOKENS, 600, pytest.approx(60.0))


def test_account_without_limits_keeps_only_running_requests() -> None:
    account = _entered(FREE, Limits(concurrent=2), 1, 5.0)
    account, refusal = core.reserve(account, Limits(concurrent=2), 1, 10**9, 5.0)
    assert (refusal, account.requests, account.tokens) == (None, 0.0, 0.0)
    account = core.leave(account, Limits(concurrent=2), 1, 10**9, 7.0)
    assert (account.tokens, account.mean_seconds, account.running) == (0.0, 2.0, ())
    assert core.limit_statuses(account, Limits(concurrent=2), 7.0) == ()


def test_mean_duration_is_updated_by_known_requests_only() -> None:
    limits = Limits(concurrent=1)
    account = replace(FREE, mean_seconds=8.0, running=(Running(1, 0.0),))
    assert core.leave(account, limits, 1, 0, 16.0).mean_seconds == 9.0
    assert core.leave(account, limits, 7, 0, 0.0) == account


def test_changed_limit_keeps_the_used_amount() -> None:
    account = _entered(_entered(FREE, Limits(requests_per_minute=2), 1, 0.0), Limits(requests_per_minute=2), 2, 0.0)
    assert core.enter(account, Limits(requests_per_minute=3), 3, 0.0)[1] is None
    _, refusal = core.enter(account, Limits(requests_per_minute=1), 3, 0.0)
    assert refusal == Refusal(LimitKind.REQUESTS, 1, pytest.approx(120.0))


def test_account_is_idle_when_nothing_is_limited_or_running() -> None:
    limits = Limits(requests_per_minute=60)
    account = _entered(FREE, limits, 1, 0.0)
    assert not account.is_idle(limits, 30.0), "a request is running"
    account = core.leave(account, limits, 1, 0, 0.5)
    assert not account.is_idle(limits, 0.6)
    assert account.is_idle(limits, 2.0)
    assert FREE.is_idle(core.NO_LIMITS, 0.0)
    assert (limits.is_any, core.NO_LIMITS.is_any) == (True, False)


def test_clock_that_is_set_back_refills_nothing() -> None:
    limits = Limits(requests_per_minute=1)
    account = _entered(FREE, limits, 1, 10.0)
    assert core.settled(account, limits, 9.0) == account


def test_limit_status_has_the_remaining_amount_and_the_time_until_all_is_available() -> None:
    limits = Limits(requests_per_minute=10, tokens_per_minute=1000)
    account, _ = core.reserve(_entered(FREE, limits, 1, 0.0), limits, 1, 250, 0.0)
    assert core.limit_statuses(account, limits, 0.0) == (
        LimitStatus(LimitKind.REQUESTS, 10, 9, pytest.approx(6.0)),
        LimitStatus(LimitKind.TOKENS, 1000, 750, pytest.approx(15.0)),
    )


def test_expected_seconds_until_the_end_of_a_request_have_a_minimum() -> None:
    assert core.seconds_until_end(0.0, None, 100.0) == core.UNKNOWN_SECONDS
    assert core.seconds_until_end(0.0, 30.0, 100.0) == core.UNKNOWN_SECONDS
    assert core.seconds_until_end(90.0, 30.0, 100.0) == 20.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.0001, "1ms"), (0.12, "120ms"), (1, "1s"), (1.5, "1.5s"), (60, "1m0s"), (366.25, "6m6.25s")],
)
def test_duration_has_openais_format(seconds: float, text: str) -> None:
    assert core.duration(seconds) == text


def test_usage_of_an_answer_is_not_confused_with_its_text() -> None:
    assert core.total_tokens(b'{"usage":{"prompt_tokens":3,"total_tokens": 7}}') == 7
    assert core.total_tokens(rb'{"text":"\"total_tokens\": 9","usage":{"total_tokens":7}}') == 7
    assert core.total_tokens(rb'{"text":"\"total_tokens\": 9"}') is None


def test_prompt_tokens_are_estimated_from_text_ids_and_images() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 10_000}}
    message = {"role": "user", "content": [{"type": "text", "text": "x" * 400}, image]}
    names = len("musertextimage_url")
    assert core.prompt_tokens(decoded({"messages": [message]})) == -(-(400 + names) // 4) + core.IMAGE_TOKENS
    ids = decoded({"input": [[1, 2, 3], [4]]}, Endpoint.EMBEDDINGS)
    assert core.prompt_tokens(ids) == 4 + 1  # with the name of the model
    assert core.answer_tokens(decoded({}), None) == core.ANSWER_TOKENS
    assert core.answer_tokens(decoded({"n": 3}), 20) == 60


@given(
    limit=st.integers(1, 50),
    arrivals=st.lists(st.tuples(st.floats(0, 30), st.integers(1, 80), st.integers(0, 120)), max_size=40),
)
def test_limits_hold_in_each_interval_and_waits_are_exact(limit: int, arrivals: list[tuple[float, int, int]]) -> None:
    """At most `limit * (1 + t / 60)` requests start in t seconds, and reserved tokens never exceed the limit."""
    limits = Limits(requests_per_minute=limit, tokens_per_minute=limit)
    account, now, starts = FREE, 0.0, []
    for number, (pause, wanted, taken) in enumerate(arrivals):
        now += pause
        account, refusal = core.enter(account, limits, number, now)
        if refusal is not None:
            assert core.enter(account, limits, number, now + refusal.wait)[1] is None, "the wait is exact"
            continue
        starts.append(now)
        account, refusal = core.reserve(account, limits, number, wanted, now)
        if refusal is not None:
            later = now + refusal.wait
            assert core.reserve(account, limits, number, wanted, later)[1] is None
            assert core.enter(account, limits, -1, later)[1] is None, "a request may start then"
        else:
            assert account.tokens <= limit + 1e-3
        account = core.leave(account, limits, number, taken if refusal is None else 0, now)
        assert account.tokens >= 0
    for first, begin in enumerate(starts):
        for last in range(first, len(starts)):
            assert last - first + 1 <= limit * (1 + (starts[last] - begin) / 60) + 1e-3
