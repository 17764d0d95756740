"""Keeps what steps produced until it is delivered; decides nothing but what may leave together.

Every piece that leaves is paid for again in each process on its way, so text for which its reader has patience waits
for the next to leave with it. It never waits longer than that patience, nor beyond the end of its choice.
"""

from __future__ import annotations

import math

from inference.worker.generation import Output
from inference.worker.tickets import Ticket

Delivery = tuple[Ticket[Output], Output]


class Outbox:
    """On the engine's thread. Outputs of one choice leave in the order in which they came."""

    def __init__(self) -> None:
        self.ready: list[Delivery] = []
        """What leaves with the next delivery."""
        self._waiting: dict[tuple[Ticket[Output], int], Output] = {}
        self._due = math.inf

    @property
    def is_waiting(self) -> bool:
        """Whether something waits for more."""
        return bool(self._waiting)

    def put(self, ticket: Ticket[Output], output: Output) -> None:
        """Leaves next, with what of its choice waits."""
        before = self._waiting.pop((ticket, output.choice), None)
        if before is not None and output.error is not None:
            self.ready.append((ticket, before))
        elif before is not None:
            output = before.joined(output)
        self.ready.append((ticket, output))

    def hold(self, ticket: Ticket[Output], output: Output, due: float) -> bool:
        """Waits until `due`, or leaves earlier with what comes before that. Whether it waits on its own: False when it
        joined what waited.
        """
        key = ticket, output.choice
        before = self._waiting.get(key)
        if before is not None:
            self._waiting[key] = before.joined(output)
            return False
        self._waiting[key] = output
        self._due = min(self._due, due)
        return True

    def release(self, next_chance: float = math.inf) -> None:
        """What waits leaves next where it would be too late at `next_chance`: everything together, because it came
        together.
        """
        if self._due < next_chance:
            self.ready += [(ticket, output) for (ticket, _choice), output in self._waiting.items()]
            self._waiting.clear()
            self._due = math.inf

    def drop(self, ticket: Ticket[Output]) -> None:
        """Nobody waits for the outputs of `ticket` any more."""
        for key in [key for key in self._waiting if key[0] is ticket]:
            del self._waiting[key]
