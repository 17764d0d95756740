"""Which sequences the store keeps, where, and what it does when a tier fails."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headgate.shared.kv_hint import KvHint
from inference.protocol import Priority
from inference.worker.kv import memory_tier, tiered_store
from inference.worker.kv.arena import Arena, Region
from inference.worker.kv.tiered_store import TieredStore
from inference.worker.steps import Checkpoint, StoredSequence
from inference.worker_link import KvTiers
from tests.rigs.store_rig import PLENTY, OpenStore, StoreRig, family, random_tokens, store_rig


@pytest.fixture(scope="module")
def opened_rig() -> Iterator[StoreRig]:
    with store_rig(family("gqa")) as opened:
        yield opened


@pytest.fixture
def rig(opened_rig: StoreRig) -> StoreRig:
    opened_rig.context.forget_all()
    return opened_rig


@pytest.fixture
def keep() -> Iterator[int]:
    handle = os.memfd_create("test-keep")
    yield handle
    os.close(handle)


@pytest.fixture
def disk(tmp_path: Path) -> dict[str, Any]:
    return {"disk_bytes": PLENTY, "directory": str(tmp_path / "kv")}


def saved(rig: StoreRig, opened: OpenStore, number: int, count: int = 200, **more: Any) -> StoredSequence:
    """A sequence with its own tokens."""
    tokens = random_tokens(number, count)
    rig.context.remove(0)
    rig.fill(0, tokens)
    sequence: StoredSequence = opened.save(0, tokens, **more)
    return sequence


def saved_to_disk(rig: StoreRig, opened: OpenStore, number: int) -> StoredSequence:
    """One that was last used at the time `number`, and is on disk."""
    sequence = saved(rig, opened, number, used_at=float(number))
    opened.wait(lambda: sequence.on_disk)
    return sequence


def size_of(rig: StoreRig, count: int = 200) -> int:
    """The bytes of such a sequence, in whole pages."""
    with rig.store() as opened:
        saved(rig, opened, 0, count)
        return opened.store.counts().ram_bytes


def resident(handle: int) -> int:
    return os.fstat(handle).st_blocks * 512


def test_only_whole_text_is_saved(rig: StoreRig) -> None:
    """Surplus cells are removed before; a slot without all tokens, an empty one, and images are refused."""
    tokens = random_tokens(1, 100)
    rig.fill(0, tokens)
    with rig.store() as opened:
        assert not opened.store.add(1, StoredSequence(array("i"), ""), [])
        assert not opened.store.add(1, StoredSequence(tokens, ""), [])
        assert not opened.store.add(0, StoredSequence(array("i", [*tokens[:99], -5]), ""), [])
        assert not opened.store.add(0, StoredSequence(random_tokens(1, 101), ""), [])
        assert len(opened.store.catalog) == 0
        shorter = opened.save(0, tokens[:80])
        rig.context.remove(0)
        assert opened.store.load(0, shorter, [])
        assert rig.go_on(0, tokens[:81]) == rig.cold(tokens[:81], slot=1)


def test_sequence_of_the_lowest_worth_leaves_a_full_memory(rig: StoreRig, keep: int) -> None:
    """A pinned one stays. Without a disk, the sequence that leaves is gone."""
    one = size_of(rig)
    with rig.store(keep, ram_bytes=3 * one) as opened:
        pinned, old, new = (saved(rig, opened, number, used_at=float(number)) for number in (1, 2, 3))
        opened.store.pin([pinned], 1e12)
        last = saved(rig, opened, 4, used_at=4.0)
        assert set(opened.store.catalog) == {pinned, new, last}
        assert not old.in_ram
        assert opened.store.counts().evicted == 1
        opened.wait(lambda: resident(keep) <= 3 * one)
        assert not opened.store.load(1, old, [])
        opened.store.limit(one)
        assert set(opened.store.catalog) == {pinned}
        opened.wait(lambda: resident(keep) == one)
        opened.store.limit(0)
        opened.wait(lambda: resident(keep) == 0)
        assert not opened.store.enabled
        rig.fill(1, last.tokens)
        assert not opened.store.add(1, StoredSequence(last.tokens, ""), [])


@pytest.mark.parametrize(("policy", "leaves"), [("lru", 1), ("priority", 2), ("hybrid", 3)])
def test_the_policy_decides_which_sequence_leaves(rig: StoreRig, policy: str, leaves: int) -> None:
    """The first was used earliest, the second has a low priority, the third was cheap to compute."""
    now = time.time()
    with rig.store(ram_bytes=int(3.5 * size_of(rig)), policy=policy) as opened:
        sequences = [
            saved(rig, opened, 1, used_at=now - 30.0, compute_seconds=8.0),
            saved(rig, opened, 2, used_at=now - 20.0, compute_seconds=8.0, priority=Priority.LOW),
            saved(rig, opened, 3, used_at=now - 10.0, compute_seconds=0.01),
        ]
        saved(rig, opened, 4, used_at=now, compute_seconds=8.0)
        assert [number for number, item in enumerate(sequences, 1) if not item.in_ram] == [leaves]


def test_a_transfer_takes_little_longer_than_a_copy_of_its_bytes(rig: StoreRig) -> None:
    """The shortest of several, because other programs may run. Running sequences wait for it."""
    tokens = random_tokens(1, 1500)
    rig.fill(0, tokens)
    with rig.store() as opened:
        seconds: dict[str, list[float]] = {"save": [], "load": [], "copy": []}
        for number in range(6):
            rig.context.remove(1)
            sequence = StoredSequence(tokens, str(number))
            began = time.perf_counter()
            assert opened.store.add(0, sequence, [])
            seconds["save"].append(time.perf_counter() - began)
            began = time.perf_counter()
            assert opened.store.load(1, sequence, [])
            seconds["load"].append(time.perf_counter() - began)
            state = np.ones(sequence.count_bytes, np.uint8)
            began = time.perf_counter()
            state.copy()
            seconds["copy"].append(time.perf_counter() - began)
        assert sequence.count_bytes > 2**20
        bound = 20 * min(seconds["copy"]) + 0.005
        assert max(min(seconds["save"]), min(seconds["load"])) < bound


def test_memory_is_freed_in_the_background(rig: StoreRig) -> None:
    """Running sequences need not wait when much memory is to be returned at once."""
    freeing = set()

    class Watched(Arena):
        def trim(self, spare_bytes: int) -> None:
            if self.spare_bytes > spare_bytes:
                freeing.add(threading.current_thread().name)
            super().trim(spare_bytes)

        def release(self, region: Region, *, spare: bool = False) -> None:
            if not spare:
                freeing.add(threading.current_thread().name)
            super().release(region, spare=spare)

    changed = threading.Event()
    arena = Watched()
    store = TieredStore(rig.context, KvTiers(ram_bytes=PLENTY), {}, arena, changed.set)
    store.open()
    opened = OpenStore(store, changed, KvTiers())
    for number in range(3):
        saved(rig, opened, number, 1500)
    store.limit(0)
    opened.wait(lambda: arena.used_bytes + arena.spare_bytes == 0)
    assert freeing == {"kv-memory"}
    store.close(10.0)


def test_what_leaves_memory_stays_on_disk(rig: StoreRig, disk: dict[str, Any]) -> None:
    """A sequence that was fetched for a request stays in memory until it is loaded."""
    one = size_of(rig)
    with rig.store(ram_bytes=2 * one, **disk) as opened:
        old, new = (saved(rig, opened, number, used_at=float(number)) for number in (1, 2))
        opened.wait(lambda: old.on_disk and new.on_disk)
        last = saved(rig, opened, 3, used_at=3.0)
        assert (old.in_ram, old.on_disk) == (False, True)
        assert set(opened.store.catalog) == {old, new, last}
        assert opened.store.counts().evicted == 0
        opened.wait(lambda: last.on_disk)
        opened.store.fetch(old)
        opened.wait(lambda: not old.fetching)
        assert old.in_ram
        saved(rig, opened, 4, used_at=4.0)
        assert old.in_ram
        rig.context.remove(1)
        assert opened.store.load(1, old, [])
        assert not old.fetched
        assert rig.go_on(1, [*old.tokens, 5]) == rig.cold([*old.tokens, 5])


def test_a_continued_sequence_replaces_its_beginning(rig: StoreRig, disk: dict[str, Any]) -> None:
    """Of the same tenant, without a pin. A file stays until the longer sequence has one."""
    tokens = random_tokens(1, 300)
    rig.fill(0, tokens)
    with rig.store(**disk) as opened:
        pinned = opened.save(0, tokens[:100], pinned_until=1e12)
        rig.fill(0, tokens, start=100)
        other = opened.save(0, tokens[:200], tenant="bob")
        rig.fill(0, tokens, start=200)
        short = opened.save(0, tokens[:200])
        opened.wait(lambda: short.on_disk)
        rig.fill(0, tokens, start=200)
        long = opened.save(0, tokens)
        assert not short.in_ram
        opened.wait(lambda: long.on_disk)
        assert set(opened.store.catalog) == {pinned, other, long}
        assert opened.store.counts().disk_sequences == 3
    assert len(list(Path(disk["directory"]).rglob("*.kv"))) == 3


def test_a_model_with_checkpoints_keeps_the_beginning(keep: int) -> None:
    """Its end cannot be removed, so a shorter sequence may be better than a longer one."""
    with store_rig(family("recurrent")) as rig, rig.store(keep) as opened:
        tokens = random_tokens(1, 60)
        rig.fill(0, tokens[:30])
        short = opened.save(0, tokens[:30])
        rig.fill(0, tokens, start=30)
        long = opened.save(0, tokens)
        assert set(opened.store.catalog) == {short, long}
        assert not opened.store.add(0, StoredSequence(tokens[:50], ""), [])


def test_the_same_tokens_are_stored_once(rig: StoreRig, keep: int) -> None:
    """The new record takes the place of the old one; more checkpoints make a new copy."""
    tokens = random_tokens(1, 100)
    rig.fill(0, tokens)
    state = rig.context.save(0)
    with rig.store(keep) as opened:
        first = opened.save(0, tokens, used_at=1.0, pinned_until=9.0)
        second = opened.save(0, tokens, used_at=2.0)
        assert opened.found(tokens) is second
        assert (first.in_ram, second.in_ram, second.pinned_until) == (False, True, 9.0)
        assert opened.store.counts().saves == 1
        third = opened.save(0, tokens, [Checkpoint(100, 0, state), Checkpoint(50, 0, None)], used_at=3.0)
        assert third.checkpoints == ((100, 0),)
        assert opened.found(tokens) is third
        assert opened.store.counts().saves == 2
        assert opened.store.counts().ram_sequences == 1


@pytest.mark.parametrize("waits", [True, False])
def test_dropped_sequences_leave_no_trace(rig: StoreRig, keep: int, disk: dict[str, Any], waits: bool) -> None:
    """Neither in memory nor on disk, also while they are being written."""
    with rig.store(keep, **disk) as opened:
        sequences = [saved(rig, opened, number) for number in range(5)]
        if waits:
            opened.wait(lambda: all(sequence.on_disk for sequence in sequences))
        opened.store.drop(sequences[1:])
        assert set(opened.store.catalog) == {sequences[0]}
        opened.store.drop(opened.store.catalog)  # type: ignore[arg-type]
        assert len(opened.store.catalog) == 0
        assert opened.store.counts().ram_bytes == opened.store.counts().disk_bytes == 0
    assert list(Path(disk["directory"]).rglob("*.kv")) == []
    assert resident(keep) == 0


def test_a_damaged_file_costs_a_prefill_and_a_log_line(
    rig: StoreRig, disk: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """It is removed when it is fetched. One that another worker removed is forgotten without a log line."""
    with rig.store(ram_bytes=0, **disk) as opened:
        damaged, gone = [], []
        for number in range(2):
            sequence = saved(rig, opened, number)
            opened.wait(lambda sequence=sequence: sequence.on_disk and not sequence.in_ram)
            (path,) = set(Path(disk["directory"]).rglob("*.kv")) - set(damaged)
            damaged.append(path)
            gone.append(sequence)
        content = bytearray(damaged[0].read_bytes())
        content[-100] ^= 1
        damaged[0].write_bytes(content)
        damaged[1].unlink()
        for sequence in gone:
            opened.store.fetch(sequence)
            opened.wait(lambda sequence=sequence: not sequence.fetching)
        assert len(opened.store.catalog) == 0
        assert opened.store.counts().invalid == 1
        assert not damaged[0].exists()
        assert len(caplog.messages) == 1


def test_a_state_that_llama_cpp_rejects_is_removed(rig: StoreRig, keep: int, caplog: pytest.LogCaptureFixture) -> None:
    """The slot is empty then, and the sequence is not offered again."""
    with rig.store(keep) as opened:
        sequence = saved(rig, opened, 1)
        with open(f"/proc/self/fd/{keep}", "r+b") as file:
            content = file.read()
            file.seek(content.index(b"\xd8<\x14\xaf"))
            file.write(b"????")
        rig.context.remove(0)
        assert not opened.store.load(0, sequence, [])
        assert len(opened.store.catalog) == 0
        assert opened.store.counts().invalid == 1
        assert rig.go_on(0, [7]) == rig.cold([7], slot=1)
        assert "rejects" in caplog.text


def test_sequences_of_another_form_of_the_model_are_removed(
    rig: StoreRig, keep: int, disk: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """From memory with one line for all; files of the other form are in another directory, and stay."""
    caplog.set_level("INFO")
    with rig.store(keep, **disk) as opened:
        for number in range(2):
            saved(rig, opened, number)
    with store_rig(family("gqa"), kv_type="q8_0") as other, other.store(keep, **disk) as opened:
        opened.wait(lambda: True)
        assert len(opened.store.catalog) == 0
        opened.wait(lambda: resident(keep) == 0)
        assert len([text for text in caplog.messages if "with another file or other settings" in text]) == 1
    with rig.store(keep, **disk) as opened:
        opened.wait(lambda: len(opened.store.catalog) == 2)


def test_a_worker_waits_for_the_memory_that_another_one_uses(rig: StoreRig, keep: int) -> None:
    """Until then it saves nothing."""
    tokens = random_tokens(1, 50)
    rig.fill(0, tokens)
    with rig.store(keep) as user, store_rig(family("gqa")) as other:
        user.save(0, tokens)
        with other.store(keep) as opened:
            other.fill(0, tokens)
            assert not opened.store.enabled
            assert not opened.store.add(0, StoredSequence(tokens, ""), [])
            user.store.close(1.0)
            opened.wait(lambda: opened.store.enabled)
            assert opened.found(tokens) is not None
    with rig.store(keep) as first, rig.store(keep):
        first.save(0, tokens)  # the other one ends while it waits


def test_a_worker_without_its_memory_uses_its_own(rig: StoreRig, caplog: pytest.LogCaptureFixture) -> None:
    """An invalid descriptor costs a log line."""
    with rig.store(987) as opened:
        sequence = saved(rig, opened, 1)
        rig.context.remove(0)
        assert opened.store.load(0, sequence, [])
    assert "stored sequences in host memory are lost when this worker ends" in caplog.text


def test_sequences_in_memory_get_files_from_the_next_worker(rig: StoreRig, keep: int, disk: dict[str, Any]) -> None:
    """Only those that have none."""
    with rig.store(keep) as opened:
        first = saved(rig, opened, 1)
    with rig.store(keep, **disk) as opened:
        found = opened.found(first.tokens)
        assert found is not None
        opened.wait(lambda: found.on_disk)
    with rig.store(keep, **disk) as opened:
        again = opened.found(first.tokens)
        assert again is not None
        opened.wait(lambda: again.on_disk)
        assert opened.store.counts().disk_written_bytes == 0


def test_the_first_request_finds_the_files(
    rig: StoreRig, disk: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load waits a moment for them, but not for a disk that hangs."""
    with rig.store(**disk) as opened:
        for number in range(20):
            saved(rig, opened, number, 20)
    read, works = os.preadv, threading.Event()

    def hanging(*arguments: Any) -> int:
        works.wait()
        return read(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(tiered_store, "FIND_SECONDS", 20.0)
        with rig.store(**disk) as opened:
            assert len(opened.store.catalog) == 20
    monkeypatch.setattr(os, "preadv", hanging)
    with rig.store(**disk) as opened:
        assert len(opened.store.catalog) == 0
        works.set()
        opened.wait(lambda: len(opened.store.catalog) == 20)


def test_a_disk_that_hangs_is_not_waited_for(
    rig: StoreRig, disk: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its sequence is computed instead, no other file is read, and memory works. Later the disk answers again."""
    monkeypatch.setattr(tiered_store, "FETCH_SECONDS", 0.2)
    one, works = size_of(rig), threading.Event()
    works.set()
    read = os.preadv

    def hanging(*arguments: Any) -> int:
        works.wait()
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", hanging)
    with rig.store(ram_bytes=one, **disk) as opened:
        hangs, other, last = (saved_to_disk(rig, opened, number) for number in range(3))
        assert (hangs.in_ram, other.in_ram, last.in_ram) == (False, False, True)
        works.clear()
        opened.store.fetch(hangs)
        opened.wait(lambda: not hangs.fetching)
        assert not hangs.in_ram
        opened.store.fetch(other)
        assert not other.fetching
        assert "takes too long" in caplog.text
        works.set()
        opened.wait(lambda: hangs.in_ram)
        opened.store.fetch(other)
        opened.wait(lambda: other.in_ram)


def test_a_full_disk_affects_nothing_else(
    rig: StoreRig, disk: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory is used as before, with one log line for all writes."""

    def full(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    one = size_of(rig)
    monkeypatch.setattr(os, "fsync", full)
    with rig.store(ram_bytes=3 * one, **disk) as opened:
        sequences = [saved(rig, opened, number, used_at=float(number)) for number in range(5)]
        opened.wait(lambda: "No space" in caplog.text)
        assert set(opened.store.catalog) == set(sequences[2:])
        assert opened.store.load(1, sequences[4], [])
        assert opened.store.enabled
        opened.store.limit(0)
        assert not opened.store.enabled
    assert len(caplog.messages) == 1


def test_an_unexpected_error_of_a_write_is_logged_once(
    rig: StoreRig, disk: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The sequence stays in host memory, and later ones are written."""

    def fails(*_arguments: object) -> None:
        raise MemoryError

    with rig.store(**disk) as opened:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fails)
            first = saved(rig, opened, 1)
            opened.wait(lambda: caplog.messages)
            for _ in range(20):
                opened.store.run()
                opened.changed.wait(0.01)
                opened.changed.clear()
            assert caplog.messages == ["internal error: a stored sequence could not be written to disk"]
        second = saved_to_disk(rig, opened, 2)
        assert [(item.in_ram, item.on_disk) for item in (first, second)] == [(True, False), (True, True)]


def test_files_that_gave_way_on_a_full_disk_are_forgotten(
    rig: StoreRig, disk: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the write fails nevertheless: what is in memory is kept there, the rest is gone."""
    one, works = size_of(rig), threading.Event()
    works.set()
    sync = os.fsync

    def fsync(handle: int) -> None:
        if not works.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with rig.store(ram_bytes=2 * one, **disk) as opened:
        sequences = [saved_to_disk(rig, opened, number) for number in range(4)]
        assert [sequence.in_ram for sequence in sequences] == [False, False, True, True]
        works.clear()
        last = saved(rig, opened, 4, used_at=4.0)
        opened.wait(lambda: not sequences[0].on_disk)
        assert [sequence.on_disk for sequence in sequences] == [False, False, False, True]
        assert set(opened.store.catalog) == {sequences[3], last}
        assert opened.store.counts().evicted == 3
    assert len(list(Path(disk["directory"]).rglob("*.kv"))) == 1


def test_a_sequence_larger_than_the_limits_is_not_saved(rig: StoreRig, disk: dict[str, Any]) -> None:
    """Larger than memory: it passes through to the disk, one at a time. Larger than both: not at all."""
    one = size_of(rig)
    with rig.store(ram_bytes=one, **disk) as opened:
        small = saved(rig, opened, 1, used_at=1.0)
        tokens = random_tokens(2, 500)
        rig.context.remove(0)
        rig.fill(0, tokens)
        large = opened.save(0, tokens)
        assert small.in_ram
        opened.wait(lambda: large.on_disk and not large.in_ram)
        assert small.in_ram
    disk["disk_bytes"] = one
    with rig.store(ram_bytes=one, **disk) as opened:
        assert not opened.store.add(0, StoredSequence(tokens, ""), [])


def test_pins_and_times_outlive_the_worker(rig: StoreRig, keep: int, disk: dict[str, Any]) -> None:
    """In memory and on disk."""
    until = time.time() + 1000.0
    with rig.store(keep, **disk) as opened:
        sequence = saved(rig, opened, 1, used_at=50.0)
        opened.wait(lambda: sequence.on_disk)
        opened.store.pin([sequence], until)
    with rig.store(keep, **disk) as opened:
        found = opened.found(sequence.tokens)
        assert found is not None
        assert (found.used_at, found.pinned_until) == (50.0, until)
        opened.wait(lambda: found.on_disk)
    with rig.store(**disk) as opened:
        opened.wait(lambda: opened.found(sequence.tokens))
        on_disk = opened.found(sequence.tokens)
        assert on_disk is not None
        assert on_disk.used_at <= time.time()
        assert on_disk.pinned_until == pytest.approx(until, abs=1e-3)
    (path,) = Path(disk["directory"]).rglob("*.kv")
    assert path.stat().st_mtime == pytest.approx(until, abs=1e-3)


def test_end_of_a_pin_is_no_use(rig: StoreRig, disk: dict[str, Any]) -> None:
    """The file gets the time of the last use again: it does not leave later than before the pin."""
    with rig.store(**disk) as opened:
        sequence = saved(rig, opened, 1, used_at=50.0)
        opened.wait(lambda: sequence.on_disk)
        opened.store.pin([sequence], time.time() + 1000.0)
        opened.store.pin([sequence], 0.0)
    (path,) = Path(disk["directory"]).rglob("*.kv")
    assert path.stat().st_mtime == 50.0


def test_the_hint_to_keep_a_sequence_outlives_the_worker(rig: StoreRig, keep: int, disk: dict[str, Any]) -> None:
    """In memory and on disk, also if the same tokens were saved without it before."""
    one = size_of(rig)
    with rig.store(keep, **disk) as opened:
        without = saved(rig, opened, 1, used_at=1.0)
        opened.wait(lambda: without.on_disk)
        kept = saved(rig, opened, 1, used_at=1.0, hint=KvHint("keep"))
        opened.wait(lambda: kept.on_disk)
        assert set(opened.store.catalog) == {kept}
    with rig.store(**disk) as opened:
        opened.wait(lambda: opened.found(kept.tokens))
        found = opened.found(kept.tokens)
        assert found is not None
        assert found.keeps
    with rig.store(keep, ram_bytes=2 * one) as opened:
        newer = [saved(rig, opened, number, used_at=float(number)) for number in (2, 3)]
        assert {opened.found(kept.tokens), newer[1]} == set(opened.store.catalog)


def test_each_of_many_tenants_finds_its_own_conversation(rig: StoreRig, keep: int, disk: dict[str, Any]) -> None:
    """200 tenants with the same system prompt, host memory for a tenth of them, and a second worker."""
    shared, one = random_tokens(1, 60), size_of(rig, 80)
    own = {f"tenant {number}": shared + random_tokens(number, 20) for number in range(200)}
    limits = {"ram_bytes": 20 * one, **disk}
    with rig.store(keep, **limits) as opened:
        for number, (tenant, tokens) in enumerate(own.items()):
            rig.context.remove(0)
            rig.fill(0, tokens)
            sequence = opened.save(0, tokens, tenant=tenant, used_at=float(number))
            if number % 10 == 9:  # slower than the disk writes
                opened.wait(lambda sequence=sequence: sequence.on_disk)
        assert opened.store.counts().ram_bytes <= 20 * one
        assert opened.store.counts().evicted == 0
    with rig.store(keep, **limits) as opened:
        opened.wait(lambda: opened.store.counts().disk_sequences == 200)
        for tenant, tokens in list(own.items())[::10]:
            ((found, count), *others) = opened.store.catalog.candidates(tokens, tenant, len(tokens))
            assert (found.tenant, count, others) == (tenant, 80, [])
            opened.store.fetch(found)
            opened.wait(lambda found=found: found.in_ram)
            rig.context.remove(0)
            assert opened.store.load(0, found, [])
        assert rig.go_on(0, tokens + array("i", [7])) == rig.cold(tokens + array("i", [7]), slot=1)


def test_a_directory_that_is_deleted_is_made_again(
    rig: StoreRig, disk: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Sequences that were only there are forgotten; new ones are written at once."""
    with rig.store(ram_bytes=size_of(rig), **disk) as opened:
        first, second = (saved_to_disk(rig, opened, number) for number in range(2))
        shutil.rmtree(disk["directory"])
        opened.store.fetch(first)
        opened.wait(lambda: not first.fetching)
        assert set(opened.store.catalog) == {second}
        third = saved_to_disk(rig, opened, 2)
        assert opened.store.load(1, third, [])
        opened.store.drop([second, third])
    assert caplog.messages == []
    assert list(Path(disk["directory"]).rglob("*.kv")) == []


def test_closing_finishes_writes_or_abandons_them(rig: StoreRig, disk: dict[str, Any]) -> None:
    """With time all sequences are on disk; without time there is no damaged file."""
    with rig.store(**disk) as opened:
        for number in range(8):
            saved(rig, opened, number)
    assert len(list(Path(disk["directory"]).rglob("*.kv"))) == 8
    with rig.store(**disk) as opened:
        for number in range(8, 16):
            saved(rig, opened, number)
        opened.store.close(0.0)
    assert list(Path(disk["directory"]).rglob("*.tmp")) == []
    with rig.store(**disk) as opened:
        opened.wait(lambda: len(opened.store.catalog) >= 8)
        assert opened.store.counts().invalid == 0


def test_random_use_keeps_to_the_limits(rig: StoreRig, keep: int, disk: dict[str, Any]) -> None:
    """Saves, loads, fetches, pins, drops and changed limits in random order; each load restores what was saved."""
    chosen = random.Random(11)
    one = size_of(rig, 100)
    ends = {}
    for number in range(8):
        tokens = random_tokens(number, 100)
        rig.context.remove(0)
        rig.fill(0, tokens)
        ends[number] = (tokens, rig.state(0))
    disk["disk_bytes"] = 6 * one
    limit = 4 * one
    with rig.store(keep, ram_bytes=limit, **disk) as opened:
        store = opened.store
        for _ in range(250):
            tokens, state = ends[chosen.randrange(8)]
            found = opened.found(tokens)
            match chosen.choice(("save", "save", "load", "load", "fetch", "pin", "drop", "limit", "run")):
                case "save":
                    rig.context.remove(0)
                    rig.fill(0, tokens)
                    if store.add(0, StoredSequence(tokens, "", used_at=chosen.random()), []):
                        assert opened.found(tokens) is not None
                case "load" if found is not None:
                    rig.context.remove(0)
                    if store.load(0, found, []):
                        assert rig.state(0) == state
                    else:
                        assert not found.in_ram
                case "fetch" if found is not None:
                    store.fetch(found)
                    opened.wait(lambda found=found: not found.fetching)
                case "pin" if found is not None:
                    store.pin([found], chosen.choice((0.0, 3e9)))
                case "drop" if found is not None and chosen.random() < 0.3:
                    store.drop([found])
                    assert opened.found(tokens) is None
                case "limit":
                    limit = chosen.choice((0, one, 2 * one, 4 * one))
                    store.limit(limit)
                case _:
                    store.run()
            counts, held = store.counts(), list(store.catalog)
            assert counts.ram_sequences == sum(sequence.in_ram for sequence in held)
            assert counts.disk_sequences == sum(sequence.on_disk for sequence in held)
            assert counts.ram_bytes <= limit + memory_tier.TRANSIT_BYTES
            assert all(sequence.in_ram or sequence.on_disk for sequence in held)
            assert all(sequence.in_ram for sequence in held if sequence.fetched)
        store.limit(0)
        for sequence in [sequence for sequence in store.catalog if sequence.fetched]:
            rig.context.remove(0)
            assert store.load(0, sequence, [])
        opened.wait(lambda: store.counts().ram_bytes == 0)
        assert store.counts().invalid == 0
    assert resident(keep) == 0


def test_a_closed_store_ignores_later_orders(rig: StoreRig, keep: int) -> None:
    """A limit may arrive while a worker ends; its sequences stay for the next one."""
    with rig.store(keep) as opened:
        sequence = saved(rig, opened, 1)
        opened.store.close(10.0)
        opened.store.limit(0)
        assert not opened.store.enabled
    with rig.store(keep) as opened:
        assert opened.found(sequence.tokens) is not None
