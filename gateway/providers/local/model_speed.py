"""The expected waiting times of a local model, from measurements of the inference service."""

from __future__ import annotations

from typing import NamedTuple


class Speed(NamedTuple):
    """Measurements of a model; None where none exist.

    `load_seconds` is 0 for a loaded model. `queue_seconds` is the wait of a new request behind others after loading.
    """

    load_seconds: float | None = None
    queue_seconds: float | None = None
    prefill_tokens_per_second: float | None = None

    @property
    def ready_in(self) -> float:
        """Seconds until the model starts a new request, as far as known."""
        return (self.load_seconds or 0.0) + (self.queue_seconds or 0.0)


def queue_seconds(
    reported_seconds: float | None,
    outstanding: int,
    parallel: int,
    answer_seconds: float | None,
    *,
    first: bool = False,
) -> float | None:
    """The wait behind other requests: the last reported one, or a longer estimate from the gateway's own requests.

    The service reports every few seconds; `outstanding` includes requests that were sent since. `first`: the request
    has the highest priority and gets the next free place.
    """
    waits_for = outstanding - parallel + 1
    if waits_for > 0 and answer_seconds is not None:
        reported_seconds = max(reported_seconds or 0.0, waits_for * answer_seconds)
    if first and reported_seconds is not None and answer_seconds is not None:
        return min(reported_seconds, answer_seconds)
    return reported_seconds


UNKNOWN = Speed()
"""Without measurements."""
