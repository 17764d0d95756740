"""Estimates `retry_after` for a request that finds the queue full, from how long earlier sequences took."""

from __future__ import annotations

import math

from inference.protocol import FULL_FOR, Code, Priority
from inference.worker.steps import Limits
from inference.worker.worker_errors import WorkerError

_OLD, _NEW = 0.8, 0.2
"""Weights of the old average and of the new value."""


class QueueEstimate:
    """The time for which a sequence holds its slot: a moving average in seconds."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._seconds: float | None = None

    def observe(self, seconds: float) -> None:
        """A sequence ended `seconds` after its first step."""
        self._seconds = seconds if self._seconds is None else _OLD * self._seconds + _NEW * seconds

    def queue_full(self, requested: int, room: int) -> WorkerError:
        """The error for `requested` sequences where the queue has `room` for fewer.

        `retry_after` is None until a sequence has ended.
        """
        slots, queue = self._limits.slots, self._limits.queue
        if requested > queue + slots:
            return WorkerError(
                Code.QUEUE_FULL,
                f"the request needs {requested} sequences; this model accepts at most {slots} running and "
                f"{queue} queued ones",
            )
        wait = None
        if self._seconds is not None:
            wait = max(1.0, math.ceil(self._seconds * (requested - room) / slots))
        return WorkerError(
            Code.QUEUE_FULL,
            f"the request needs {requested} sequences; the queue of this model (size {queue}) has room for {room}",
            retry_after=wait,
            details=None if room else {FULL_FOR: [*Priority]},
        )
