"""Leases: at most one holder of a name, with a fencing token where several gateways share them.

`LocalLeases` are those of one gateway alone, `SharedLeases` those of all gateways.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from gateway.errors import StoreLostError
from gateway.shared_state.scripts import fence_key, lease_key

if TYPE_CHECKING:
    from gateway.shared_state.shared_state import SharedState


class Lease(NamedTuple):
    """The right to a piece of work until it expires.

    `is_exclusive`: no other gateway holds it. One that was acquired while the store was lost is of this gateway only.
    `fence`: a later holder of a lease of all gateways has a larger one; None for a lease of this gateway only.
    """

    name: str
    token: str
    fence: int | None
    is_exclusive: bool


class Leases(Protocol):
    """All leases that one gateway can hold."""

    async def acquire(self, name: str, seconds: float) -> Lease | None:
        """The lease of `name` for `seconds`; None while another holder has it."""
        ...

    async def renew(self, lease: Lease, seconds: float) -> bool:
        """Extends a lease to `seconds` from now; False when it is not held any more."""
        ...

    async def release(self, lease: Lease) -> None:
        """Ends a lease; one that is not held any more is ignored."""
        ...


class LocalLeases:
    """Leases of one gateway without shared state."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, is_exclusive: bool = True) -> None:
        """`is_exclusive`: this gateway is the only one."""
        self._clock = clock
        self._is_exclusive = is_exclusive
        self._held: dict[str, tuple[str, float]] = {}
        """Token and end by name."""

    async def acquire(self, name: str, seconds: float) -> Lease | None:
        """See `Leases`."""
        now = self._clock()
        if name in self._held and self._held[name][1] > now:
            return None
        self._held = {other: held for other, held in self._held.items() if held[1] > now}
        lease = Lease(name, secrets.token_hex(8), None, self._is_exclusive)
        self._held[name] = (lease.token, now + seconds)
        return lease

    async def renew(self, lease: Lease, seconds: float) -> bool:
        """See `Leases`."""
        token, until = self._held.get(lease.name, ("", 0.0))
        now = self._clock()
        if token != lease.token or until <= now:
            return False
        self._held[lease.name] = (token, now + seconds)
        return True

    async def release(self, lease: Lease) -> None:
        """See `Leases`."""
        if self._held.get(lease.name, ("", 0.0))[0] == lease.token:
            del self._held[lease.name]


class SharedLeases:
    """Leases of all gateways. While the store is lost a lease is of this gateway only."""

    def __init__(self, state: SharedState) -> None:
        self._state = state
        self._local = LocalLeases(state.clock, is_exclusive=False)

    async def acquire(self, name: str, seconds: float) -> Lease | None:
        """See `Leases`."""
        token = secrets.token_hex(8)
        try:
            fence = await self._state.call(
                "acquire_lease", "acquire_lease", [lease_key(name), fence_key(name)], [token, round(seconds * 1000)]
            )
        except StoreLostError:
            return await self._local.acquire(name, seconds)
        except BaseException:
            self._state.post("release_lease", "release", [lease_key(name)], [token])
            raise
        return None if fence is None else Lease(name, token, int(fence), True)

    async def renew(self, lease: Lease, seconds: float) -> bool:
        """See `Leases`. A shared lease cannot be renewed while the store is lost."""
        if not lease.is_exclusive:
            return await self._local.renew(lease, seconds)
        try:
            reply = await self._state.call(
                "renew_lease", "renew_lease", [lease_key(lease.name)], [lease.token, round(seconds * 1000)]
            )
        except StoreLostError:
            return False
        return bool(reply)

    async def release(self, lease: Lease) -> None:
        """See `Leases`. Without the store it expires."""
        if not lease.is_exclusive:
            await self._local.release(lease)
            return
        self._state.post("release_lease", "release", [lease_key(lease.name)], [lease.token])
