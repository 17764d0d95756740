"""Host memory for stored sequences: entries are complete or gone, also after a crash at any point."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inference.worker.kv.arena import MIN_SPARE_BYTES, Arena, Region, rounded
from inference.worker.kv.entry_format import encode_head
from tests.rigs.stored_entries import KEY, number_in, put, sequence_of, state_of

MOST = 16 * 2**20


def entry_bytes(number: int) -> int:
    return rounded(encode_head(sequence_of(number), KEY, len(state_of(number)), [])[1].all_bytes)


def resident(handle: int) -> int:
    """Bytes that the memory file takes."""
    return os.fstat(handle).st_blocks * 512


def copy_of(handle: int) -> int:
    """A copy of a memory file."""
    copied = os.memfd_create("test-copy")
    end = os.fstat(handle).st_size
    os.ftruncate(copied, end)
    at = 0
    while at < end:
        try:
            at = os.lseek(handle, at, os.SEEK_DATA)
        except OSError:  # no more data
            break
        until = os.lseek(handle, at, os.SEEK_HOLE)
        os.pwrite(copied, os.pread(handle, until - at, at), at)
        at = until
    return copied


@pytest.fixture
def keep() -> Iterator[int]:
    handle = os.memfd_create("test-keep")
    yield handle
    os.close(handle)


class ArenaMachine(RuleBasedStateMachine):
    """Random operations; now and then the worker ends at once, and the next one finds what was complete."""

    def __init__(self) -> None:
        super().__init__()
        self.handle = os.memfd_create("test-keep")
        self.arena = Arena(self.handle)
        assert self.arena.open()
        assert list(self.arena.scan()) == []
        self.held: dict[int, Region] = {}
        self.unfinished: list[Region] = []

    def teardown(self) -> None:
        self.arena.close()
        os.close(self.handle)

    @rule(number=st.integers(0, 20))
    def add(self, number: int) -> None:
        if number not in self.held:
            self.held[number] = put(self.arena, number, MOST)

    @rule(size=st.integers(200, 2**21))
    def begin(self, size: int) -> None:
        region = self.arena.allocate(size, MOST)
        region.view[150:] = bytes(len(region.view) - 150)
        self.unfinished.append(region)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), spare=st.booleans())
    def remove(self, data: st.DataObject, spare: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.held)))
        self.arena.release(self.held.pop(number), spare=spare)

    @rule(size=st.integers(1, 2**22), most=st.integers(0, 2**23))
    def prepare(self, size: int, most: int) -> None:
        self.arena.prepare(size, most)
        assert self.arena.spare_bytes <= most

    @rule(most=st.integers(0, 2**22))
    def trim(self, most: int) -> None:
        self.arena.trim(most)
        assert self.arena.spare_bytes <= most

    @rule()
    def end(self) -> None:
        """The worker ends, and the next one finds its entries."""
        for region in [*self.held.values(), *self.unfinished]:
            self.arena.unmap(region)
        self.arena.close()
        self.arena = Arena(self.handle)
        assert self.arena.open()
        found = [(number_in(region), region) for region in self.arena.scan()]
        assert sorted(number for number, _ in found) == sorted(self.held)
        self.held, self.unfinished = dict(found), []

    @rule()
    def crash(self) -> None:
        """What the next worker would find if this one ended now."""
        copied = copy_of(self.handle)
        arena = Arena(copied)
        assert arena.open()
        regions = list(arena.scan())
        assert sorted(map(number_in, regions)) == sorted(self.held)
        assert resident(copied) == sum(map(entry_bytes, self.held))
        for region in regions:
            arena.unmap(region)
        arena.close()
        os.close(copied)

    @invariant()
    def entries_are_whole(self) -> None:
        for number, region in self.held.items():
            assert number_in(region) == number

    @invariant()
    def memory_is_counted(self) -> None:
        used = sum(region.size for region in [*self.held.values(), *self.unfinished])
        assert self.arena.used_bytes == used
        assert resident(self.handle) == used + self.arena.spare_bytes


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=12, stateful_step_count=25, deadline=None)


def test_only_one_process_uses_an_arena(keep: int) -> None:
    """The next process gets it after the first one has ended, even by SIGKILL."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.rigs.stored_entries", "arena", str(keep), "1"],
        pass_fds=[keep], stdout=subprocess.PIPE,
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stdout.readline() == b"begun\n"
    arena = Arena(keep)
    assert not arena.open()
    child.kill()
    child.wait()
    child.stdout.close()
    assert arena.open()
    arena.close()


def test_entries_are_complete_or_gone_after_a_kill(keep: int) -> None:
    """Workers that add and remove entries are killed at random times, one after another."""
    chosen = random.Random(7)
    found = 0
    for seed in range(1, 9):
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.rigs.stored_entries", "arena", str(keep), str(seed % 3 + 1)],
            pass_fds=[keep], stdout=subprocess.PIPE,
        )  # fmt: skip
        assert child.stdout is not None
        assert child.stdout.readline() == b"begun\n"
        time.sleep(chosen.uniform(0.0, 0.1))
        child.kill()
        child.wait()
        child.stdout.close()
        arena = Arena(keep)
        assert arena.open()
        regions = list(arena.scan())
        numbers = [number_in(region) for region in regions]
        assert len(set(numbers)) == len(numbers)
        assert resident(keep) == sum(map(entry_bytes, numbers))
        found += len(numbers)
        for region in regions:
            arena.unmap(region)
        arena.close()
    assert found > 0


def test_memory_of_a_removed_entry_serves_the_next_ones() -> None:
    """It is divided. A rest that is too small for any entry is returned to the system."""
    arena = Arena()
    assert arena.open()
    first = arena.allocate(10 * 2**20, MOST)
    address = first.address
    arena.release(first, spare=True)
    assert (arena.used_bytes, arena.spare_bytes) == (0, 10 * 2**20)
    second = arena.allocate(4 * 2**20, MOST)
    third = arena.allocate(6 * 2**20 - MIN_SPARE_BYTES // 2, MOST)
    assert (second.address, third.address) == (address, address + 4 * 2**20)
    assert arena.spare_bytes == 0
    assert arena.used_bytes == 10 * 2**20 - MIN_SPARE_BYTES // 2
    arena.close()


def test_spare_memory_gives_way_to_the_limit() -> None:
    """Spare regions are returned to the system when an entry fits into none of them."""
    arena = Arena()
    assert arena.open()
    arena.release(arena.allocate(6 * 2**20, MOST), spare=True)
    arena.allocate(12 * 2**20, MOST)
    assert arena.used_bytes + arena.spare_bytes <= MOST
    arena.close()


def test_arena_works_on_systems_without_memory_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its entries do not outlive the process there."""
    monkeypatch.delattr(os, "memfd_create")
    arena = Arena()
    assert arena.open()
    assert list(arena.scan()) == []
    region = put(arena, 3)
    assert number_in(region) == 3
    arena.release(region, spare=True)
    assert number_in(put(arena, 4)) == 4
    arena.close()
