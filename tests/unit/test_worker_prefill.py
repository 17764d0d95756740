"""The prefill rate follows the steps with many prompt tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inference.worker.engine_stats import LEAST_TOKENS, WINDOW_SECONDS, PrefillRate


def test_rate_is_none_before_a_step_that_counts() -> None:
    assert PrefillRate().tokens_per_second is None
    assert PrefillRate().read(LEAST_TOKENS - 1, 0.5).tokens_per_second is None
    assert PrefillRate().read(500, 0.0).tokens_per_second is None
    assert PrefillRate().read(500, 0.5).tokens_per_second == 1000


def test_older_steps_have_less_weight_and_leave_the_window() -> None:
    rate = PrefillRate().read(1000, 1.0)
    for _ in range(200):
        rate = rate.read(100, 1.0)
    assert rate.tokens_per_second is not None
    assert abs(rate.tokens_per_second - 100) < 1
    assert rate.read(50, WINDOW_SECONDS * 2) == PrefillRate(50, WINDOW_SECONDS * 2)


@given(st.lists(st.tuples(st.integers(0, 10_000), st.floats(0, 60)), max_size=40))
def test_rate_stays_within_the_measured_rates(steps: list[tuple[int, float]]) -> None:
    rate = PrefillRate()
    for tokens, seconds in steps:
        rate = rate.read(tokens, seconds)
    seen = [tokens / seconds for tokens, seconds in steps if tokens >= LEAST_TOKENS and seconds > 0]
    found = rate.tokens_per_second
    assert (found is None) == (not seen)
    if found is not None:
        assert min(seen) * 0.999 <= found <= max(seen) * 1.001
