"""The memory of a simulated device: granted amounts fit, and every byte is released exactly once."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from inference.devices.simgpu.simulated_memory import ALL, POOL_STEPS, Memory

CAPACITY = 1000
SIZES = st.integers(0, 400)
CONNECTIONS = st.integers(1, 3)


class Device(RuleBasedStateMachine):
    """Clients, faults and time in any order."""

    buffers: Bundle[tuple[int, int]] = Bundle("buffers")

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory(CAPACITY)
        self.now = 0.0
        self.pointers = 0
        self.live: dict[tuple[int, int], int] = {}
        self.away: dict[tuple[int, int], int] = {}
        self.outside: dict[int, int] = {}

    def outside_of(self, connections: set[int]) -> int:
        """What these connections have on the device outside buffers."""
        away = {number for number, _pointer in self.away}
        return sum(size for number, size in self.outside.items() if number in connections and number not in away)

    @rule(connection=CONNECTIONS, context=st.integers(0, 50), pools=st.integers(0, 90), computes=st.booleans())
    def use(self, connection: int, context: int, pools: int, computes: bool) -> None:
        if any(number == connection for number, _pointer in self.away):
            return  # its requests wait
        before = replace(self.memory, context_bytes=context, pool_bytes=pools)
        self.memory = before.computed(connection) if computes else before.connected(connection)
        more = self.memory.used_bytes - before.used_bytes
        most = -(-pools // POOL_STEPS) if computes else context
        assert 0 <= more <= min(most, before.free_bytes)
        assert self.memory.pools.get(connection, 0) <= max(pools, before.pools.get(connection, 0))
        if more:
            self.outside[connection] = self.outside.get(connection, 0) + more
        live = sum(size for (number, _pointer), size in self.live.items() if number == connection)
        assert self.memory.bytes_of(connection) == live + self.outside.get(connection, 0)

    @rule(target=buffers, connection=CONNECTIONS, size=SIZES, comes=st.booleans(), extra=st.integers(0, 3))
    def allocate(self, connection: int, size: int, comes: bool, extra: int) -> tuple[int, int]:
        before = self.memory
        fits = size <= before.free_bytes and not before.failures_left and before.successes_left != 0
        after, granted = before.request(connection, size)
        assert granted == fits
        self.pointers += 1
        key = (connection, self.pointers)
        if not granted:
            assert after.counters.allocations == before.counters.allocations
            assert after.used_bytes == before.used_bytes
            self.memory = after
            return key
        assert after.used_bytes == before.used_bytes + size
        if comes:
            self.memory = after.created(connection, self.pointers, size, size + extra)
            self.live[key] = size + extra
        else:
            self.memory = after.creation_failed(connection, size)
            assert self.memory.used_bytes == before.used_bytes
        return key

    @rule(buffer=buffers)
    def free(self, buffer: tuple[int, int]) -> None:
        self.memory = self.memory.free(*buffer, self.now)
        self.live.pop(buffer, None)

    @rule(connection=CONNECTIONS)
    def end(self, connection: int) -> None:
        self.memory = self.memory.end(connection, self.now)
        self.live = {key: size for key, size in self.live.items() if key[0] != connection}
        self.away = {key: size for key, size in self.away.items() if key[0] != connection}
        self.outside.pop(connection, None)

    @rule(connections=st.sets(CONNECTIONS))
    def suspend(self, connections: set[int]) -> None:
        before = self.memory
        self.memory = before.suspend(connections, self.now)
        theirs = {key: size for key, size in self.live.items() if key[0] in connections}
        outside = self.outside_of({number for number, _pointer in theirs})
        self.away |= theirs
        self.live = {key: size for key, size in self.live.items() if key not in theirs}
        gone = 0 if before.late_seconds else sum(theirs.values()) + outside
        assert self.memory.used_bytes == before.used_bytes - gone

    @rule(connections=st.sets(CONNECTIONS))
    def resume(self, connections: set[int]) -> None:
        before = self.memory
        theirs = {key: size for key, size in self.away.items() if key[0] in connections}
        outside = sum(self.outside.get(number, 0) for number in {key[0] for key in theirs})
        need = sum(theirs.values()) + outside
        fits = need <= before.free_bytes and not before.failures_left and before.successes_left != 0
        self.memory, granted = before.resume(connections)
        assert granted == fits
        assert self.memory.counters.refusals == before.counters.refusals + (not fits)
        if granted:
            self.live |= theirs
            self.away = {key: size for key, size in self.away.items() if key not in theirs}
        else:
            assert self.memory.used_bytes == before.used_bytes

    @rule(seconds=st.sampled_from([0.0, 5.0, ALL]))
    def late(self, seconds: float) -> None:
        self.memory = replace(self.memory, late_seconds=seconds)

    @rule(seconds=st.floats(0, 10))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.memory = self.memory.settle(self.now)
        assert all(due > self.now for due, _size in self.memory.late)

    @rule(count=st.sampled_from([0, 1, ALL]))
    def refuse(self, count: float) -> None:
        self.memory = replace(self.memory, failures_left=count)

    @rule(count=st.sampled_from([None, 0, 1]))
    def spare(self, count: int | None) -> None:
        self.memory = replace(self.memory, successes_left=count)

    @rule(capacity=st.integers(0, CAPACITY))
    def resize(self, capacity: int) -> None:
        self.memory = self.memory.resized(capacity)

    @rule(count=st.integers(0, CAPACITY))
    def others_take(self, count: int) -> None:
        if count <= self.memory.capacity_bytes - self.memory.ours_bytes:
            self.memory = self.memory.with_foreign(count)
            assert self.memory.foreign_bytes == count
        else:
            with pytest.raises(ValueError, match="other processes can use"):
                self.memory.with_foreign(count)

    @invariant()
    def every_byte_has_an_account(self) -> None:
        memory = self.memory
        late = sum(size for _due, size in memory.late)
        assert dict(memory.held) == self.live
        assert dict(memory.suspended) == self.away
        assert memory.suspended_bytes == sum(self.away.values())
        assert memory.pending == {}
        assert memory.outside_bytes == self.outside_of({1, 2, 3})
        assert memory.used_bytes == memory.foreign_bytes + sum(self.live.values()) + memory.outside_bytes + late
        assert memory.free_bytes == max(0, memory.capacity_bytes - memory.used_bytes)
        counters = memory.counters
        assert counters.allocations - counters.frees == len(self.live)
        assert counters.peak_bytes >= sum(self.live.values())

    def teardown(self) -> None:
        for connection in (1, 2, 3):
            self.memory = self.memory.end(connection, self.now)
        self.memory = self.memory.settle(ALL)
        assert self.memory.used_bytes == self.memory.foreign_bytes
        assert self.memory.counters.allocations == self.memory.counters.frees


TestDevice = Device.TestCase


def test_requested_bytes_are_reserved_until_they_are_allocated() -> None:
    """Two clients at once cannot get the same bytes, and one that leaves in between releases its own."""
    memory, first = Memory(100).request(1, 60)
    memory, second = memory.request(2, 60)
    assert (first, second) == (True, False)
    assert memory.end(1, 0.0).free_bytes == 100


def test_late_bytes_return_on_command() -> None:
    memory, _granted = replace(Memory(100), late_seconds=math.inf).request(1, 60)
    memory = memory.created(1, 7, 60, 60).free(1, 7, now=0.0)
    assert memory.settle(1e9).free_bytes == 40
    assert memory.settle(ALL).free_bytes == 100


def test_one_allocation_in_the_middle_is_refused() -> None:
    """Allocations before it succeed, it fails once, and later ones succeed."""
    memory = replace(Memory(100), successes_left=2)
    answers = []
    for _ in range(4):
        memory, granted = memory.request(1, 10)
        answers.append(granted)
    assert answers == [True, True, False, True]
    assert memory.counters.refusals == 1


def test_suspended_bytes_return_only_if_there_is_room() -> None:
    """If others use the memory, all bytes return at once or none, also for an injected refusal."""
    memory, _granted = Memory(100).request(1, 60)
    memory = memory.created(1, 7, 60, 60).suspend([1], now=0.0)
    assert (memory.free_bytes, memory.suspended_bytes, memory.counters.frees) == (100, 60, 1)
    full, granted = memory.with_foreign(50).resume([1])
    assert (granted, full.suspended_bytes, full.counters.refusals) == (False, 60, 1)
    refused, granted = replace(memory, failures_left=1).resume([1])
    assert (granted, refused.failures_left) == (False, 0)
    back, granted = refused.resume([1])
    assert (granted, back.free_bytes, back.suspended_bytes, back.counters.allocations) == (True, 40, 0, 2)
    assert memory.end(1, 0.0).suspended_bytes == 0
    assert replace(memory, held={}, suspended={}).resume([1])[1]
