"""Budgets over all gateways: each writes what it used itself in the month, and reads the sums of the others.

Every gateway writes totals of its own, which it keeps in its usage file, so nothing is lost or counted twice when the
store loses its data. A request waits for nothing: the sums are at most a heartbeat old, or a few with more than
MAX_KEYS keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from gateway.access.budgets import Spent, month_of
from gateway.shared_state.scripts import spent_key

if TYPE_CHECKING:
    from gateway.shared_state.shared_state import SharedState

MAX_KEYS = 500
"""Keys in one heartbeat; more of them take turns."""


class SharedBudgets:
    """What other gateways used. `gateway` is the name of this one, which stays over its restarts.

    `keys` gives the names of keys with a budget, `own` what this gateway used of a key's budget, `wall` the Unix time.
    """

    def __init__(
        self,
        state: SharedState,
        gateway: str,
        keys: Callable[[], Iterable[str]],
        own: Callable[[str, float], Spent],
        wall: Callable[[], float],
    ) -> None:
        self._state = state
        self._gateway = gateway
        self._keys = keys
        self._own = own
        self._wall = wall
        self._month = month_of(wall())
        self._others: dict[str, Spent] = {}
        self._at_loss: dict[str, Spent] = {}
        self._next = 0
        state.on_up.append(self._came_up)
        state.on_tick.append(self._exchange)
        state.on_down.append(self._on_down)
        self._on_down()

    def elsewhere(self, key: str, now: float) -> Spent:
        """What the other gateways used in the month of `now`.

        While the store is lost, each of them is assumed to use as much as this gateway since the loss, or since its
        start if the store has not answered yet; for a key that is newer, since its creation.
        """
        if month_of(now) == self._month:
            others, before = self._others.get(key, Spent()), self._at_loss.get(key, Spent())
        else:
            others, before = Spent(), Spent()
        if self._state.is_up:
            return others
        own, more = self._own(key, now), self._state.gateways - 1
        return others.plus(more * (own.dollars - before.dollars), more * (own.tokens - before.tokens))

    def _on_down(self) -> None:
        now = self._wall()
        self._at_loss = {key: self._own(key, now) for key in self._keys()}

    async def _came_up(self) -> None:
        self._next = 0
        for _ in range(0, max(1, len(list(self._keys()))), MAX_KEYS):
            await self._exchange()

    async def _exchange(self) -> None:
        """Writes and reads; raises StoreLostError."""
        names = sorted(self._keys())
        part = names[self._next : self._next + MAX_KEYS]
        self._next = 0 if self._next + MAX_KEYS >= len(names) else self._next + MAX_KEYS
        if not part:
            return
        now = self._wall()
        month = month_of(now)
        values: list[str | int | float] = [self._gateway]
        for name in part:
            own = self._own(name, now)
            values += [repr(own.dollars), own.tokens]
        reply = await self._state.call("budgets", "exchange_spent", [spent_key(month, name) for name in part], values)
        if month != self._month:
            self._month, self._others = month, {}
        for name, dollars, tokens in zip(part, reply[::2], reply[1::2], strict=True):
            self._others[name] = Spent(float(dollars), int(float(tokens)))
