"""Keeps what steps produced until it is delivered; decides nothing but what may leave together.

Every piece that leaves is paid for again in each process on its way, so text for which its reader has patience waits
for the next to leave with it: as long as the patience lasts, by what is expected of the coming step, and never beyond
the end of its choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from inference.worker.answers.generation import Output
from inference.worker.engine.output_tickets import Ticket

Delivery = tuple[Ticket[Output], Output]


class Outbox:
    """On the engine's thread. Outputs of one choice leave in the order in which they came."""

    def __init__(self) -> None:
        self._ready: list[Delivery] = []
        self._waiting: dict[tuple[Ticket[Output], int], tuple[float, Output]] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether something waits for more."""
        return bool(self._waiting)

    def put(self, ticket: Ticket[Output], output: Output) -> None:
        """Leaves with the next delivery, and so does what of its choice waits."""
        _due, before = self._waiting.pop((ticket, output.choice), (math.inf, None))
        if before is not None and output.error is not None:
            self._ready.append((ticket, before))
        elif before is not None:
            output = before.joined(output)
        self._ready.append((ticket, output))

    def hold(self, ticket: Ticket[Output], output: Output, due: float) -> bool:
        """Waits until `due`, or leaves earlier with what comes before that. Whether it waits on its own: False when it
        joined what waited.
        """
        key = ticket, output.choice
        if (waiting := self._waiting.get(key)) is None:
            self._waiting[key] = due, output
            return True
        due, before = waiting
        self._waiting[key] = due, before.joined(output)
        return False

    def release(self, next_chance: float = math.inf) -> None:
        """What waits leaves next where some of it would be too late at `next_chance`: everything together, because it
        came together.
        """
        if min((due for due, _output in self._waiting.values()), default=math.inf) < next_chance:
            self._ready += [(ticket, output) for (ticket, _choice), (_due, output) in self._waiting.items()]
            self._waiting.clear()

    def drop(self, ticket: Ticket[Output]) -> None:
        """Nobody waits for the outputs of `ticket` any more."""
        for key in [key for key in self._waiting if key[0] is ticket]:
            del self._waiting[key]

    def deliver(self, send: Callable[[list[Delivery]], None]) -> None:
        """Sends what is to leave, at once; what `send` raises leaves it here for the next time."""
        if self._ready:
            send(self._ready)
            self._ready = []
