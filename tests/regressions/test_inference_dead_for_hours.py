"""A device that was dead for hours raised an overflow from every reading, and no other device was read any more."""

from __future__ import annotations

from inference.devices.reopen_policy import MOST_SECONDS, Reopening


def test_what_fails_for_days_is_still_started_afresh_in_time() -> None:
    """At eight seconds a time, a thousand failures take two hours."""
    state = Reopening()
    for _ in range(20_000):
        state = state.failed(state.due_at)
    assert state.failed(0.0).due_at == MOST_SECONDS
