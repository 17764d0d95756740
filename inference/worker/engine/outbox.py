"""Collects the outputs of steps until they are delivered, and joins outputs that may wait.

Each delivered output costs time in every process on its way. Text that may wait is therefore joined with the next text
of its choice. It leaves no later than its due time, estimated from the next step, and with the end of its choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from inference.worker.answers.generation import Output
from inference.worker.engine.output_tickets import Ticket

Delivery = tuple[Ticket[Output], Output]


class Outbox:
    """Used on the engine thread only. Outputs of one choice are delivered in order."""

    def __init__(self) -> None:
        self._ready: list[Delivery] = []
        self._waiting: dict[tuple[Ticket[Output], int], tuple[float, Output]] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether an output waits to be joined."""
        return bool(self._waiting)

    def put(self, ticket: Ticket[Output], output: Output) -> None:
        """Adds an output to the next delivery, together with the waiting output of its choice."""
        _due, before = self._waiting.pop((ticket, output.choice), (math.inf, None))
        if before is not None and output.error is not None:
            self._ready.append((ticket, before))
        elif before is not None:
            output = before.joined(output)
        self._ready.append((ticket, output))

    def hold(self, ticket: Ticket[Output], output: Output, due: float) -> bool:
        """Keeps an output until `due`, or until the next `put` of its choice.

        Returns False if the output was joined with one that already waits.
        """
        key = ticket, output.choice
        if (waiting := self._waiting.get(key)) is None:
            self._waiting[key] = due, output
            return True
        due, before = waiting
        self._waiting[key] = due, before.joined(output)
        return False

    def release(self, next_chance: float = math.inf) -> None:
        """Moves all waiting outputs to the next delivery if one of them is due before `next_chance`."""
        if min((due for due, _output in self._waiting.values()), default=math.inf) < next_chance:
            self._ready += [(ticket, output) for (ticket, _choice), (_due, output) in self._waiting.items()]
            self._waiting.clear()

    def drop(self, ticket: Ticket[Output]) -> None:
        """Drops the waiting outputs of `ticket`."""
        for key in [key for key in self._waiting if key[0] is ticket]:
            del self._waiting[key]

    def deliver(self, send: Callable[[list[Delivery]], None]) -> None:
        """Sends the next delivery; if `send` raises, its outputs stay for the next call."""
        if self._ready:
            send(self._ready)
            self._ready = []
