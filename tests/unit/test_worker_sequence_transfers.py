"""When retained sequences are stored: from the threshold on while others run, or when the engine is idle."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

import pytest

from headgate.shared.parameters import Sampling
from inference.worker.backend import Decode
from inference.worker.engine.engine import Engine
from inference.worker.engine.engine_work import Work
from inference.worker.engine.output_tickets import Ticket
from inference.worker.engine.scheduler import Scheduler
from inference.worker.engine.sequence_transfers import AHEAD_SHARE, IDLE_SECONDS, LOOK_SECONDS, SequenceTransfers
from inference.worker.engine_stats import EngineCounters
from inference.worker.kv.catalog import Catalog
from inference.worker.steps import Checkpoint, Job, Limits, Operation, StoredSequence
from inference.worker_link import KvCounts
from tests.rigs.fake_backend import ByteVocabulary, FakeBackend, SamplerShop

SAVE_SECONDS = 0.1


class TimedStore:
    """Stores every sequence, which takes SAVE_SECONDS on its clock."""

    def __init__(self) -> None:
        self.catalog = Catalog()
        self.enabled = True
        self.saved: list[int] = []
        self.now = 0.0

    def add(self, slot: int, sequence: StoredSequence, checkpoints: Sequence[Checkpoint]) -> bool:
        self.now += SAVE_SECONDS
        self.saved.append(slot)
        sequence.in_ram = True
        self.catalog.add(sequence)
        return True

    def load(self, slot: int, sequence: StoredSequence, checkpoints: Sequence[Checkpoint]) -> bool:
        raise AssertionError

    def fetch(self, sequence: StoredSequence) -> None:
        raise AssertionError

    def run(self) -> None:
        """Nothing is done in the background."""

    def pin(self, sequences: Collection[StoredSequence], until: float) -> None:
        raise AssertionError

    def drop(self, sequences: Collection[StoredSequence]) -> None:
        raise AssertionError

    def limit(self, ram_bytes: int) -> None:
        raise AssertionError

    def slot_bytes(self, slot: int) -> int:
        return 1

    def counts(self) -> KvCounts:
        return KvCounts()


class Rig:
    """Four slots: two retained sequences and a running stream."""

    def __init__(self, threshold: float = 0.75) -> None:
        self.store = TimedStore()
        self.scheduler = Scheduler(
            Limits(slots=4, context=40, batch=40, queue=4, threshold=threshold), self.store.catalog
        )
        for number in (1, 2, 3):
            self.scheduler.submit([Job(number, (number,) * 5)])
        self.step()
        for number in (1, 2):
            self.scheduler.finish(number)
        counters = EngineCounters(lambda: self.store.now)
        self.transfers = SequenceTransfers(self.scheduler, self.store, counters, lambda: self.store.now)

    def step(self) -> None:
        step = self.scheduler.plan(0.0, 40)
        self.scheduler.computed()
        for row in step.rows:
            self.scheduler.extend(row.job, 9)

    def ahead(self, *operations: Operation) -> int:
        """The number of stored sequences after the next look."""
        self.store.now += LOOK_SECONDS
        self.transfers.ahead(operations)
        return len(self.store.saved)


@pytest.mark.parametrize(("threshold", "count"), [(0.0, 1), (0.75, 1), (0.8, 0), (1.0, 0)])
def test_idle_sequences_are_stored_ahead_once_slots_in_use_reach_the_threshold(threshold: float, count: int) -> None:
    """Three of four slots are in use."""
    assert Rig(threshold).ahead() == count


def test_storing_ahead_takes_a_small_share_of_the_time() -> None:
    rig = Rig()
    assert rig.ahead() == 1
    until = rig.store.now - SAVE_SECONDS + SAVE_SECONDS / AHEAD_SHARE
    while rig.store.now < until - 2 * LOOK_SECONDS:
        assert rig.ahead() == 1
    rig.store.now = until
    assert rig.ahead() == 2
    rig.store.now += 100
    assert rig.ahead() == 2, "the running sequence stays"


def test_nothing_is_stored_ahead_while_a_request_waits_for_a_slot_or_beside_another_transfer() -> None:
    rig = Rig()
    copied = rig.scheduler.slots.store_one()
    assert copied is not None
    assert rig.ahead(copied) == 0
    rig = Rig()
    rig.scheduler.submit([Job(number, (number,) * 5) for number in (4, 5, 6, 7)])
    assert rig.ahead() == 0


def test_everything_is_stored_once_the_engine_is_idle() -> None:
    """Whatever the threshold is."""
    rig = Rig(threshold=1.0)
    rig.transfers.ahead([])
    assert rig.transfers.idle() == IDLE_SECONDS
    rig.store.now += IDLE_SECONDS
    assert [rig.transfers.idle() for _ in range(3)] == [0.0, 0.0, None]
    assert len(rig.store.saved) == 2


@pytest.mark.parametrize(("fate", "stored"), [(Decode.COMPUTE_FAILED, [2]), (Decode.BAD_BATCH, [])])
async def test_sequence_that_moved_with_a_failed_batch_is_stored(fate: Decode, stored: list[int]) -> None:
    """llama.cpp moves its cells before it computes, but after it has checked the batch."""
    store, backend = TimedStore(), FakeBackend()
    limits = Limits(slots=3, context=40, batch=40, queue=4, min_copied=4)
    engine = Engine(
        backend, ByteVocabulary(), SamplerShop(), limits, lambda _outputs: None, print, lambda: store.now, store
    )

    def ask(prompt: range, most: int) -> None:
        work = Work([[*prompt]], 1, Sampling(), most)
        engine.submit(work, Ticket(asyncio.get_running_loop()))

    ask(range(10), 30)
    ask(range(20, 30), 1)
    engine._iterate()
    ask(range(50, 52), 30)  # takes the place beside the running stream
    backend.fates.append(fate)
    engine._iterate()
    assert backend.held[2] == [*range(20, 30)]
    store.now += IDLE_SECONDS
    while engine._iterate():
        store.now += IDLE_SECONDS
    store.now += IDLE_SECONDS
    engine._iterate()
    assert store.saved == stored
