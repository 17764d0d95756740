"""The limits of keys over all gateways: the accounts are in the shared store, and scripts decide on the server's clock.

While the store is lost each gateway decides alone, with its share of the limits and of the usage that it knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gateway.access.rate_limits import Account, Limits, Running
from gateway.errors import StoreLostError
from gateway.shared_state.scripts import ACTIVE, DEAD_SECONDS, GATEWAYS, USAGE, running_key, usage_key

if TYPE_CHECKING:
    from gateway.shared_state.shared_state import SharedState

MAX_ACTIVE = 500
"""Keys whose usage each gateway reads regularly, so that it knows this usage when the store is lost."""


class SharedOutcome(NamedTuple):
    """The account of a key at all gateways, before a refusal or after a start, and whether the request may start."""

    account: Account
    is_accepted: bool


class Outage(NamedTuple):
    """The use of a key around a time without the store: requests and tokens.

    `began` is a time of this process's clock. `left`: what still counts of the use of all gateways before it; `added`:
    what this gateway used since then.
    """

    began: float
    left: tuple[float, float]
    added: tuple[float, float]


def share_of(limits: Limits, gateways: int) -> Limits:
    """One gateway's share of the limits, at least 1 of each."""

    def part(bound: int | None) -> int | None:
        return None if bound is None else max(1, bound // gateways)

    return Limits(part(limits.requests_per_minute), part(limits.tokens_per_minute), part(limits.concurrent))


class SharedLimits:
    """The accounts in the store. The `number` of a request identifies it in this gateway."""

    def __init__(self, state: SharedState) -> None:
        self.state = state

    async def enter(self, name: str, limits: Limits, number: int) -> SharedOutcome | None:
        """Counts request `number` of a key, if it may start; None while the store is lost."""
        try:
            reply = await self.state.call(
                "limits", "enter", [usage_key(name), running_key(name), GATEWAYS, ACTIVE],
                [*_bounds(limits), _bound(limits.concurrent), self._member(number), DEAD_SECONDS, name],
            )  # fmt: skip
        except StoreLostError:
            return None
        except BaseException:  # the client left while this waited
            self.leave(name, limits, number, 0, 0)
            raise
        now = self.state.clock()
        running: tuple[Running, ...] = ()
        if int(reply[3]):
            first = self.state.local_time(float(reply[4]))
            running = (Running(0, first),) * int(reply[3])
        return SharedOutcome(Account(float(reply[1]), float(reply[2]), now, running), bool(reply[0]))

    async def reserve(self, name: str, limits: Limits, tokens: int) -> SharedOutcome | None:
        """Reserves tokens for a request that entered; None while the store is lost."""
        try:
            reply = await self.state.call("limits", "reserve", [usage_key(name)], [*_bounds(limits), tokens])
        except StoreLostError:
            return None
        return SharedOutcome(Account(float(reply[1]), float(reply[2]), self.state.clock()), bool(reply[0]))

    def leave(self, name: str, limits: Limits, number: int, tokens: int, reserved: int) -> None:
        """Ends a request; does not wait."""
        self.state.post(
            "limits", "leave", [usage_key(name), running_key(name)],
            [*_bounds(limits), self._member(number), tokens, reserved],
        )  # fmt: skip

    async def merge(self, name: str, limits: Limits, outage: Outage, running: tuple[Running, ...]) -> None:
        """Adds what was used during an outage, and lists the running requests of this gateway.

        What was used before counts again if the server has lost its data. Raises StoreLostError.
        """
        values: list[str | int | float] = []
        if limits.concurrent is not None:
            for one in running:
                values += [self.state.server_time(one.since), self._member(one.number)]
        await self.state.call(
            "limits", "merge_usage", [usage_key(name), running_key(name)],
            [
                *_bounds(limits), self.state.gateway, *map(repr, outage.added),
                repr(self.state.server_time(outage.began)), *map(repr, outage.left), *values,
            ],
        )  # fmt: skip

    async def active(self) -> dict[str, Account]:
        """Accounts of keys with recent requests at any gateway; raises StoreLostError."""
        reply = await self.state.call("limits", "active_usage", [ACTIVE], [USAGE, MAX_ACTIVE])
        now = self.state.clock()
        rows = zip(*(reply[column::4] for column in range(4)), strict=True)
        return {name: Account(float(requests), float(tokens), now - float(age)) for name, requests, tokens, age in rows}

    def _member(self, number: int) -> str:
        return f"{self.state.gateway}:{number}"


def _bounds(limits: Limits) -> tuple[str, str]:
    return _bound(limits.requests_per_minute), _bound(limits.tokens_per_minute)


def _bound(limit: int | None) -> str:
    return "" if limit is None else str(limit)
