"""Sequences of a real context are stored and restored exactly, from host memory and from disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from inference.worker.steps import Checkpoint
from tests.rigs.store_rig import PLENTY, StoreRig, family, random_tokens, store_rig

FAMILIES = ("gqa", "window", "hybrid", "recurrent")


@pytest.fixture(
    scope="module", params=[(name, kv_type) for name in FAMILIES for kv_type in ("f16", "q8_0")], ids="-".join
)
def rig(request: pytest.FixtureRequest) -> Iterator[StoreRig]:
    """A model with two slots."""
    name, kv_type = request.param
    with store_rig(family(name), kv_type=kv_type) as opened:
        yield opened


@pytest.fixture
def keep() -> Iterator[int]:
    """A memory file that outlives workers, as the inference service creates it."""
    handle = os.memfd_create("test-keep")
    yield handle
    os.close(handle)


def test_a_sequence_returns_from_host_memory(rig: StoreRig) -> None:
    """The state has the same bytes, and the answer continues unchanged, in each slot; checkpoints return too."""
    tokens = random_tokens(1, 900)
    rig.context.forget_all()
    taken = rig.fill(0, tokens[:-1], checkpoint_every=300)
    before = rig.state(0)
    with rig.store() as opened:
        sequence = opened.save(0, tokens[:-1], taken)
        assert sequence.in_ram
        assert opened.found(tokens[:-1]) is sequence
        expected = rig.go_on(0, tokens)
        rig.context.forget_all()
        empty = [Checkpoint(position, oldest) for position, oldest in sequence.checkpoints]
        assert opened.store.load(0, sequence, empty)
        assert rig.state(0) == before
        assert [item.state.tobytes() for item in empty] == [item.state.tobytes() for item in taken]
        assert opened.store.load(1, sequence, [])
        assert rig.go_on(1, tokens) == expected == rig.cold(tokens)
        counts = opened.store.counts()
        assert (counts.saves, counts.loads, counts.ram_sequences, counts.ram_tokens) == (1, 2, 1, 899)
        assert counts.saved_bytes == sequence.count_bytes == counts.loaded_bytes / 2


@pytest.mark.parametrize("parallel", [2, 5])
def test_another_worker_finds_the_sequences_of_an_ended_one(rig: StoreRig, keep: int, parallel: int) -> None:
    """They are in the inherited memory. The new context may have another number of slots."""
    tokens = random_tokens(2, 700)
    rig.context.forget_all()
    taken = rig.fill(0, tokens[:-1], checkpoint_every=350)
    before = rig.state(0)
    with rig.store(keep) as opened:
        opened.save(0, tokens[:-1], taken, tenant="alice", used_at=5.0, compute_seconds=2.0)
    with (
        store_rig(Path(rig.grant.path), kv_type=rig.grant.kv_type, parallel=parallel) as other,
        other.store(keep) as opened,
    ):
        expected = other.cold(tokens)
        sequence = opened.found(tokens[:-1], "alice")
        assert sequence is not None
        assert (sequence.used_at, sequence.compute_seconds, sequence.in_ram) == (5.0, 2.0, True)
        empty = [Checkpoint(position, oldest) for position, oldest in sequence.checkpoints]
        assert opened.store.load(parallel - 1, sequence, empty)
        assert other.go_on(parallel - 1, tokens) == expected
        assert opened.store.load(0, sequence, empty)
        if parallel == 2:
            assert other.state(0) == before
        if not other.context.can_trim or other.context.window:
            assert other.context.restore(0, empty[0].state, 350)
            other.fill(0, tokens[:-1], start=350)
        assert other.go_on(0, tokens) == expected


def test_a_sequence_returns_from_disk_after_a_restart(rig: StoreRig, tmp_path: Path) -> None:
    """Without any host memory: it passes through while it is written, and again while it is read."""
    tokens = random_tokens(3, 700)
    rig.context.forget_all()
    taken = rig.fill(0, tokens[:-1], checkpoint_every=350)
    before, disk = rig.state(0), {"ram_bytes": 0, "disk_bytes": PLENTY, "directory": str(tmp_path / "kv")}
    with rig.store(**disk) as opened:
        sequence = opened.save(0, tokens[:-1], taken, tenant="alice", compute_seconds=2.0)
        opened.wait(lambda: sequence.on_disk and not sequence.in_ram)
        counts = opened.store.counts()
        assert (counts.disk_sequences, counts.disk_bytes, counts.ram_bytes) == (1, sequence.count_bytes, 0)
    with rig.store(**disk) as opened:
        opened.wait(lambda: opened.found(tokens[:-1], "alice"))
        found = opened.found(tokens[:-1], "alice")
        assert found is not None
        assert (found.on_disk, found.in_ram, found.compute_seconds) == (True, False, 2.0)
        opened.store.fetch(found)
        assert found.fetching
        opened.wait(lambda: not found.fetching)
        assert found.in_ram
        assert found.fetched
        rig.context.forget_all()
        empty = [Checkpoint(position, oldest) for position, oldest in found.checkpoints]
        assert opened.store.load(0, found, empty)
        assert rig.state(0) == before
        assert [item.state.tobytes() for item in empty] == [item.state.tobytes() for item in taken]
        assert rig.go_on(0, tokens) == rig.cold(tokens)
        assert not found.in_ram
        counts = opened.store.counts()
        assert (counts.prefetched, counts.prefetched_used, counts.disk_read_bytes) == (1, 1, found.count_bytes)
