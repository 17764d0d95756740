"""The memory accounts of a simulated device: which allocations succeed, and when freed bytes become available.

    capacity = free + foreign + pending + held + outside + late   (free is 0 where a shrunken device is over-full)

`held`: the buffers of all connections. `pending`: bytes that were granted and whose buffer does not exist yet.
`outside`: bytes of connections beside their buffers, as the device context of a process and its pools, which grow while
it computes. `late`: freed bytes that are not available yet. `suspended` buffers are in host memory; neither they
nor the `outside` bytes of their connections are part of the sum. Times are arguments.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

Buffer = tuple[int, int]
"""Connection number and pointer; pointers are unique only within one server."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals since the start. `peak_bytes` is the highest use."""

    allocations: int = 0
    refusals: int = 0
    frees: int = 0
    allocated_bytes: int = 0
    peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of one device.

    `failures_left`: number of allocations to refuse (infinity: all). `successes_left`: number of allocations that
    succeed before one is refused (None: no refusal). `late_seconds`: delay of freed bytes (infinity: until `settle`).
    `late`: tuples (due, bytes). `context_bytes`: what a new connection takes; `pool_bytes`: what it takes more while it
    computes, in `POOL_STEPS` steps.
    """

    capacity_bytes: int
    foreign_bytes: int = 0
    context_bytes: int = 0
    pool_bytes: int = 0
    outside: Mapping[int, int] = field(default_factory=dict)
    pools: Mapping[int, int] = field(default_factory=dict)
    held: Mapping[Buffer, int] = field(default_factory=dict)
    suspended: Mapping[Buffer, int] = field(default_factory=dict)
    pending: Mapping[int, int] = field(default_factory=dict)
    late: tuple[tuple[float, int], ...] = ()
    late_seconds: float = 0.0
    failures_left: float = 0
    successes_left: int | None = None
    counters: Counters = Counters()

    @property
    def used_bytes(self) -> int:
        """All used bytes, including foreign and late ones."""
        return self.foreign_bytes + self.ours_bytes

    @property
    def ours_bytes(self) -> int:
        """Bytes of the clients, including late ones."""
        late = sum(size for _due, size in self.late)
        return sum(self.held.values()) + sum(self.pending.values()) + self.outside_bytes + late

    @property
    def outside_bytes(self) -> int:
        """Bytes of clients outside their buffers, without those of suspended clients."""
        away = {number for number, _pointer in self.suspended}
        return sum(size for number, size in self.outside.items() if number not in away)

    def bytes_of(self, connection: int) -> int:
        """The bytes of one client on the device."""
        held = sum(size for (number, _pointer), size in self.held.items() if number == connection)
        is_away = any(number == connection for number, _pointer in self.suspended)
        return held + self.pending.get(connection, 0) + (0 if is_away else self.outside.get(connection, 0))

    @property
    def suspended_bytes(self) -> int:
        """Bytes of suspended clients in host memory."""
        return sum(self.suspended.values())

    @property
    def free_bytes(self) -> int:
        """Bytes that could be allocated now; 0 on a device that was shrunk below its use."""
        return max(0, self.capacity_bytes - self.used_bytes)

    # --- clients ---------------------------------------------------------------------------------------------------
    def connected(self, connection: int) -> Memory:
        """A client begins to use the device; its context takes at most what is left."""
        return self._with_outside(connection, min(self.context_bytes, self.free_bytes))

    def computed(self, connection: int) -> Memory:
        """A client has computed a graph: its pools grow by a step, up to `pool_bytes` and what is left."""
        grown = self.pools.get(connection, 0)
        step = min(-(-self.pool_bytes // POOL_STEPS), self.pool_bytes - grown, self.free_bytes)
        if step <= 0:
            return self
        pools = {**self.pools, connection: grown + step}
        return replace(self._with_outside(connection, step), pools=pools)

    def _with_outside(self, connection: int, more_bytes: int) -> Memory:
        outside = {**self.outside, connection: self.outside.get(connection, 0) + more_bytes} if more_bytes else None
        after = self if outside is None else replace(self, outside=outside)
        peak = max(self.counters.peak_bytes, after.used_bytes)
        return replace(after, counters=replace(self.counters, peak_bytes=peak))

    def request(self, connection: int, size_bytes: int) -> tuple[Memory, bool]:
        """Requests an allocation; returns whether it is granted; if so, `created` or `creation_failed` must follow."""
        after, granted = self._decided(size_bytes)
        return (after._with_pending(connection, size_bytes), True) if granted else (after, False)

    def created(self, connection: int, pointer: int, requested_bytes: int, size_bytes: int) -> Memory:
        """The buffer of a granted allocation exists and has `size_bytes`."""
        after = self._with_pending(connection, -requested_bytes)
        return after._grown({(connection, pointer): size_bytes})

    def creation_failed(self, connection: int, requested_bytes: int) -> Memory:
        """The server could not make the buffer although it was granted."""
        counters = replace(self.counters, refusals=self.counters.refusals + 1)
        return replace(self._with_pending(connection, -requested_bytes), counters=counters)

    def free(self, connection: int, pointer: int, now: float) -> Memory:
        """Frees a buffer; an unknown one is ignored."""
        size = self.held.get((connection, pointer))
        if size is None:
            return self
        held = {buffer: count for buffer, count in self.held.items() if buffer != (connection, pointer)}
        return self._returned(replace(self, held=held), size, 1, now)

    def end(self, connection: int, now: float) -> Memory:
        """Frees all buffers of a closed connection."""
        theirs, held = _partition(self.held, {connection})
        _gone, suspended = _partition(self.suspended, {connection})
        pending = {number: size for number, size in self.pending.items() if number != connection}
        outside = {number: size for number, size in self.outside.items() if number != connection}
        pools = {number: size for number, size in self.pools.items() if number != connection}
        after = replace(self, held=held, suspended=suspended, pending=pending, outside=outside, pools=pools)
        freed = sum(theirs.values()) + self.outside_bytes - after.outside_bytes
        return self._returned(after, freed, len(theirs), now)

    def suspend(self, connections: Collection[int], now: float) -> Memory:
        """Frees the buffers of these connections, which were copied to host memory."""
        theirs, held = _partition(self.held, connections)
        after = replace(self, held=held, suspended={**self.suspended, **theirs})
        freed = sum(theirs.values()) + self.outside_bytes - after.outside_bytes
        return self._returned(after, freed, len(theirs), now)

    def resume(self, connections: Collection[int]) -> tuple[Memory, bool]:
        """Allocates all suspended buffers of these connections, with what is outside of them; returns whether it is
        granted.
        """
        theirs, suspended = _partition(self.suspended, connections)
        outside = replace(self, suspended=suspended).outside_bytes - self.outside_bytes
        after, granted = self._decided(sum(theirs.values()) + outside)
        return (replace(after, suspended=suspended)._grown(theirs), True) if granted else (after, False)

    # --- faults ----------------------------------------------------------------------------------------------------
    def settle(self, now: float) -> Memory:
        """Makes late bytes available that are due; at infinity all of them."""
        return replace(self, late=tuple((due, size) for due, size in self.late if due > now))

    def resized(self, capacity_bytes: int) -> Memory:
        """Changes the reported capacity; allocations stay."""
        return replace(self, capacity_bytes=capacity_bytes)

    def with_foreign(self, foreign_bytes: int) -> Memory:
        """Sets the bytes of other processes; raises ValueError if that is more than available."""
        room = self.capacity_bytes - self.ours_bytes
        if not 0 <= foreign_bytes <= max(0, room):
            raise ValueError(f"other processes can use 0 to {max(0, room)} bytes now, not {foreign_bytes}")
        after = replace(self, foreign_bytes=foreign_bytes)
        peak = max(self.counters.peak_bytes, after.used_bytes)
        return replace(after, counters=replace(self.counters, peak_bytes=peak))

    def _decided(self, size_bytes: int) -> tuple[Memory, bool]:
        """Whether the allocation is granted, by free memory and requested refusals. Counts a refusal."""
        if self.failures_left > 0 or self.successes_left == 0 or size_bytes > self.free_bytes:
            counters = replace(self.counters, refusals=self.counters.refusals + 1)
            failures, successes = max(0, self.failures_left - 1), self.successes_left or None
            return replace(self, failures_left=failures, successes_left=successes, counters=counters), False
        return replace(self, successes_left=None if self.successes_left is None else self.successes_left - 1), True

    def _grown(self, buffers: Mapping[Buffer, int]) -> Memory:
        """Adds these buffers and counts them."""
        grown = replace(self, held={**self.held, **buffers})
        counters = replace(
            self.counters,
            allocations=self.counters.allocations + len(buffers),
            allocated_bytes=self.counters.allocated_bytes + sum(buffers.values()),
            peak_bytes=max(self.counters.peak_bytes, grown.used_bytes),
        )
        return replace(grown, counters=counters)

    def _with_pending(self, connection: int, size_bytes: int) -> Memory:
        left = self.pending.get(connection, 0) + size_bytes
        others = {number: size for number, size in self.pending.items() if number != connection}
        return replace(self, pending={**others, connection: left} if left else others)

    def _returned(self, after: Memory, size_bytes: int, buffers: int, now: float) -> Memory:
        counters = replace(self.counters, frees=self.counters.frees + buffers)
        is_late = self.late_seconds > 0 and size_bytes > 0
        late = (*after.late, (now + self.late_seconds, size_bytes)) if is_late else after.late
        return replace(after, late=late, counters=counters)


def _partition(
    buffers: Mapping[Buffer, int], connections: Collection[int]
) -> tuple[dict[Buffer, int], dict[Buffer, int]]:
    """The buffers of these connections, and the others."""
    theirs = {buffer: size for buffer, size in buffers.items() if buffer[0] in connections}
    return theirs, {buffer: size for buffer, size in buffers.items() if buffer[0] not in connections}


POOL_STEPS = 8
"""Graphs after which pools have their full size."""
ALL = math.inf
"""As `failures_left`: all allocations. As `late_seconds`: until `settle`. As a time to settle at: all late bytes."""
