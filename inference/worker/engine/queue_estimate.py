"""Tells whoever finds the queue full when to come back, from how long sequences took; queues nothing itself."""

from __future__ import annotations

import math

from inference.protocol import FULL_FOR, Code, Priority
from inference.worker.steps import Limits
from inference.worker.worker_errors import WorkerError

_OLD, _NEW = 0.8, 0.2
"""How much of what is known stays with every sequence that ends."""


class Turnover:
    """How long a sequence holds its slot, in seconds, as a moving average."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._seconds: float | None = None

    def took(self, seconds: float) -> None:
        """A sequence ended so long after its first step."""
        self._seconds = seconds if self._seconds is None else _OLD * self._seconds + _NEW * seconds

    def queue_full(self, asked: int, room: int) -> WorkerError:
        """The refusal of `asked` sequences where there is `room` for fewer; `retry_after` once anything is known."""
        slots, queue = self._limits.slots, self._limits.queue
        if asked > queue + slots:
            return WorkerError(Code.QUEUE_FULL, f"{asked} answers were asked for; this model's queue holds fewer")
        wait = None
        if self._seconds is not None:
            wait = max(1.0, math.ceil(self._seconds * (asked - room) / slots))
        return WorkerError(
            Code.QUEUE_FULL,
            f"{asked} more would wait for this model, and its queue of {queue} has room for {room}",
            retry_after=wait,
            details=None if room else {FULL_FOR: [*Priority]},
        )
