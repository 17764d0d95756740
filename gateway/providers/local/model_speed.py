"""How quick a model is, as the inference service measured it and our own requests may change it; measures nothing."""

from __future__ import annotations

from typing import NamedTuple


class Speed(NamedTuple):
    """What was measured of a model; None where nothing was. `load_seconds` is 0 for one that is loaded,
    `queue_seconds` what somebody who comes now waits behind others once it is.
    """

    load_seconds: float | None = None
    queue_seconds: float | None = None
    prefill_tokens_per_second: float | None = None

    @property
    def ready_in(self) -> float:
        """Seconds until it takes a request of somebody who comes now, as far as known."""
        return (self.load_seconds or 0.0) + (self.queue_seconds or 0.0)


def queue_seconds(
    told_seconds: float | None, outstanding: int, parallel: int, answer_seconds: float | None, *, first: bool = False
) -> float | None:
    """The wait behind others: as the service told it last, or more by the `outstanding` requests of our own.

    The service is asked every few seconds; in between many may come at once, and only the gateway knows of them. Who
    is served `first` has the next place that is free, whoever else waits.
    """
    waits_for = outstanding - parallel + 1
    if waits_for > 0 and answer_seconds is not None:
        told_seconds = max(told_seconds or 0.0, waits_for * answer_seconds)
    if first and told_seconds is not None and answer_seconds is not None:
        return min(told_seconds, answer_seconds)
    return told_seconds


UNKNOWN = Speed()
"""Nothing was measured."""
