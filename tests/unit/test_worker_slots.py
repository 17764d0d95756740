"""Single cases of slots: sequences on disk, windows, checkpoints, and jobs that wait for a slot or for cells."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest

from headgate.shared.kv_hint import KvHint
from inference.worker.engine.scheduler import MIN_FETCH_SECONDS, Scheduler
from inference.worker.kv.catalog import MAX_CANDIDATES, Catalog
from inference.worker.kv.slots import Slots
from inference.worker.steps import (
    Copy,
    Fetch,
    Job,
    Limits,
    Load,
    Operation,
    Remove,
    RestoreCheckpoint,
    SaveCheckpoint,
    Step,
    Store,
    StoredSequence,
    sequence_id,
)

PLAIN = Limits(slots=2, context=40, batch=40, queue=8)
RECURRENT = Limits(slots=2, context=40, batch=40, queue=8, can_trim=False, checkpoints=2, checkpoint_gap=2)
WINDOW = Limits(
    slots=3, context=40, batch=40, queue=8, min_copied=4, window=4, window_cells=8, checkpoints=4, checkpoint_gap=2
)


def tokens(*numbers: int) -> array[int]:
    return array("i", numbers)


def run(scheduler: Scheduler, now: float = 0.0) -> Step:
    """A step whose batch is computed; checkpoints get a state."""
    step = scheduler.plan(now, 40)
    for operation in step.operations:
        if isinstance(operation, SaveCheckpoint):
            operation.checkpoint.state = "state"
    if step.rows:
        scheduler.computed()
    return step


def served(scheduler: Scheduler, job: Job, answer: Sequence[int] = (90,)) -> None:
    """Runs a job to its end."""
    assert scheduler.submit([job])
    for token in answer:
        while not any(row.sample for row in run(scheduler).rows if row.job == job.id):
            pass
        scheduler.extend(job.id, token)
    scheduler.finish(job.id)


def kinds(operations: Sequence[Operation]) -> list[type[Operation]]:
    return [type(operation) for operation in operations]


def test_job_waits_for_its_sequence_on_disk_for_a_while() -> None:
    """It is read once. The job is computed when that takes too long, or loaded; then it counts as a hit on disk."""
    catalog = Catalog()
    stored = StoredSequence(tokens(*range(10)), "", on_disk=True)
    catalog.add(stored)
    scheduler = Scheduler(PLAIN, catalog)
    scheduler.submit([Job(1, (*range(10), 20))])
    step = run(scheduler)
    assert kinds(step.operations) == [Fetch]
    assert not step.rows
    assert run(scheduler, MIN_FETCH_SECONDS / 2) == Step((), [], (), 0, 0)
    assert [(row.job, row.start) for row in run(scheduler, MIN_FETCH_SECONDS).rows] == [(1, 0)]
    scheduler.finish(1)
    scheduler.slots.forget()
    stored.in_ram, stored.fetching, stored.fetched = True, False, True
    scheduler.submit([Job(2, (*range(10), 21))])
    step = run(scheduler)
    assert Load in kinds(step.operations)
    assert scheduler.restored(2) == "disk"
    assert scheduler.slots.hits.disk == 1


@pytest.mark.parametrize("prefetched", [0, 1])
def test_sequence_of_a_job_without_a_slot_is_read_ahead_if_prefetching_is_on(prefetched: int) -> None:
    """The only slot is taken."""
    catalog = Catalog()
    scheduler = Scheduler(replace(PLAIN, slots=1, prefetched=prefetched), catalog)
    scheduler.submit([Job(1, (30, 31))])
    run(scheduler)
    scheduler.extend(1, 32)
    catalog.add(StoredSequence(tokens(*range(10)), "", on_disk=True))
    scheduler.submit([Job(2, (*range(10), 20)), Job(3, (*range(10), 21))])
    assert kinds(run(scheduler).operations) == [Fetch] * prefetched


@pytest.mark.parametrize("place", ["slot", "memory", "nowhere"])
def test_sequence_is_read_from_disk_only_if_it_is_better(place: str) -> None:
    """Than those in slots and in memory."""
    catalog = Catalog()
    scheduler = Scheduler(PLAIN, catalog)
    if place == "slot":
        served(scheduler, Job(1, tuple(range(10))))
    catalog.add(StoredSequence(tokens(*range(10)), "", on_disk=True, in_ram=place == "memory"))
    scheduler.submit([Job(2, (*range(9), 20) if place != "nowhere" else (30, 31))])
    assert Fetch not in kinds(run(scheduler).operations)


def test_least_recently_used_sequence_is_stored_once() -> None:
    scheduler = Scheduler(PLAIN, Catalog())
    assert scheduler.slots.store_one() is None
    served(scheduler, Job(1, (1, 2, 3)))
    served(scheduler, Job(2, (4, 5, 6)))
    found = [scheduler.slots.store_one(), scheduler.slots.store_one()]
    assert [store.sequence.tokens[0] for store in found if store is not None] == [1, 4]
    assert scheduler.slots.store_one() is None
    assert scheduler.slots.used == 6


def test_stored_sequence_is_chosen_by_what_can_be_used_of_it() -> None:
    """A longer one without a checkpoint is useless if its end cannot be removed; one on disk only cannot be loaded."""
    catalog = Catalog()
    for item in (
        StoredSequence(tokens(1, 2, 3, 4, 5, 6, 9), "", in_ram=True),
        StoredSequence(tokens(1, 2, 3, 4, 5, 6, 8), "", on_disk=True),
        StoredSequence(tokens(1, 2, 3, 4, 5), "", in_ram=True),
        StoredSequence(tokens(1, 2, 3), "", in_ram=True),
    ):
        catalog.add(item)
    scheduler = Scheduler(RECURRENT, catalog)
    scheduler.submit([Job(1, (1, 2, 3, 4, 5, 6, 7))])
    step = run(scheduler)
    (load,) = [operation for operation in step.operations if isinstance(operation, Load)]
    assert list(load.sequence.tokens) == [1, 2, 3, 4, 5]
    assert [row.start for row in step.rows] == [5]


def test_copy_of_a_recurrent_state_goes_back_to_a_checkpoint() -> None:
    """The slot of the prefix keeps what is behind it."""
    scheduler = Scheduler(RECURRENT)
    served(scheduler, Job(1, tuple(range(12)), message_starts=(0, 6)), range(50, 58))
    scheduler.submit([Job(2, (*range(6), 30, 31))])
    step = run(scheduler)
    assert kinds(step.operations) == [Copy, RestoreCheckpoint]
    assert [(row.slot, row.start) for row in step.rows] == [(1, 6)]


def test_least_useful_checkpoint_is_replaced() -> None:
    """There are two at most."""
    slots = Slots(RECURRENT)
    slot = slots.take(tokens(*range(30)), "", 0)
    assert slot is not None
    for computed in (5, 6, 20, 22, 29):
        slot.computed = computed
        slots.save_checkpoint(slot)
    assert [checkpoint.position for checkpoint in slot.checkpoints] == [20, 29]


def test_window_has_only_the_newest_tokens() -> None:
    """A prompt that departs before the window of a slot continues from a checkpoint, or is computed."""
    scheduler = Scheduler(WINDOW)
    served(scheduler, Job(1, tuple(range(20)), message_starts=(0, 8)))
    scheduler.submit([Job(2, (*range(10), 60))])
    step = run(scheduler)
    assert kinds(step.operations) == [RestoreCheckpoint]
    assert [row.start for row in step.rows] == [8]
    scheduler.submit([Job(3, (*range(5), 61))])
    assert [row.start for row in run(scheduler).rows if row.job == 3] == [0], "its slot is taken"


def test_copied_window_gets_no_checkpoint_before_its_batch() -> None:
    """Its cells come with the batch."""
    slots = Slots(WINDOW)
    first = slots.take(tokens(*range(10)), "", 0)
    assert first is not None
    first.computed = 10
    slots.arrived()
    slots.operations()
    second = slots.take(tokens(*range(10), 11), "", 10)
    assert second is not None
    assert Copy in kinds(slots.operations())
    slots.save_checkpoint(second)
    assert slots.operations() == ()
    slots.release(second, 0.0)
    third = slots.take(tokens(*range(8), 12, 13), "", 8)
    assert third is not None
    assert third.computed in (0, 8)


def test_sequence_is_not_loaded_into_a_slot_that_is_about_to_move() -> None:
    """Its job waits for the batch that moves the tokens of the slot, then until they are stored."""
    catalog = Catalog()
    slots = Slots(PLAIN, catalog)
    first = slots.take(tokens(*range(10)), "", 0)
    assert first is not None
    first.computed = 10
    slots.arrived()
    second = slots.take(tokens(*range(10), 11), "", 10)
    assert second is not None
    slots.release(second, 0.0)
    catalog.add(StoredSequence(tokens(30, 31, 32, 33), "", in_ram=True))
    slots.operations()
    prompt = tokens(30, 31, 32, 33, 34)
    assert slots.take(prompt, "", 4) is None
    assert kinds(slots.operations()) == []
    slots.arrived()
    slots.begin(1)
    assert slots.take(prompt, "", 4) is None
    assert kinds(slots.operations()) == [Store]
    slots.begin(1)
    assert slots.take(prompt, "", 4) is second
    assert second.computed == 4
    assert Load in kinds(slots.operations())


def test_job_continues_a_sequence_that_is_moved_in_the_same_step() -> None:
    """Nothing is lost, so it need not wait; a job that would displace the sequence does."""
    slots = Slots(replace(PLAIN, slots=3, min_copied=4), Catalog())
    running = slots.take(tokens(*range(10)), "", 0)
    assert running is not None
    running.computed = 10
    near = slots.take(tokens(*range(20, 30)), "", 0)
    assert near is not None
    near.computed = 10
    slots.release(near, 0.0)
    assert slots.take(tokens(50, 51), "", 0) is near
    assert Copy in kinds(slots.operations())
    assert slots.take(tokens(60, 61), "", 0) is None
    continued = slots.take(tokens(*range(20, 30), 31), "", 10)
    assert continued is not None
    assert continued.computed == 10


def test_stream_of_a_full_pool_waits_if_nothing_gives_way() -> None:
    """A single job keeps its cells; two that cannot both continue wait for a transfer."""
    scheduler = Scheduler(Limits(slots=2, context=10, batch=10, queue=2, cells=10, answer_cells=1), Catalog())
    scheduler.submit([Job(1, tuple(range(10)))])
    run(scheduler)
    scheduler.extend(1, 90)
    assert run(scheduler).rows == []


def test_engine_only_decodes_when_no_prompt_waits() -> None:
    scheduler = Scheduler(PLAIN)
    assert not scheduler.only_decodes
    scheduler.submit([Job(1, (1, 2))])
    run(scheduler)
    scheduler.extend(1, 3)
    assert scheduler.only_decodes
    scheduler.submit([Job(2, (1, 2))])
    assert not scheduler.only_decodes


def test_jobs_of_a_failed_batch_end_and_others_go_on() -> None:
    """Their slots are emptied, unless the failure comes after the batch, before a token is reported."""
    scheduler = Scheduler(PLAIN)
    scheduler.submit([Job(1, (1, 2)), Job(2, (3, 4)), Job(3, (5, 6))])
    assert scheduler.just_begun
    scheduler.plan(0.0, 40)
    assert [(job, phase.name, *counts) for job, phase, *counts in scheduler.progress()] == [
        (3, "WAITING", 1, 2), (1, "PREFILL", 0, 2), (2, "PREFILL", 0, 2),
    ]  # fmt: skip
    assert scheduler.failed() == (1, 2)
    assert scheduler.slots.cells == (0, 0)
    run(scheduler)
    assert scheduler.slots.cells == (2, 0)
    assert scheduler.failed() == (3,)
    assert scheduler.slots.cells == (0, 2)
    assert not scheduler.progress()


def test_jobs_expire_at_their_own_deadlines() -> None:
    scheduler = Scheduler(Limits(slots=1, context=40, batch=40, queue=8))
    scheduler.submit([Job(1, (1, 2)), Job(2, (3,), deadline=1.0), Job(3, (4,), deadline=2.0)])
    assert run(scheduler, 1.5).expired == (2,)
    scheduler.extend(1, 9)
    assert run(scheduler, 1.9).expired == ()


def test_catalog_finds_and_forgets_sequences() -> None:
    """At most MAX_CANDIDATES for a prompt; removing an unknown one has no effect."""
    catalog = Catalog()
    sequences = [StoredSequence(tokens(1, 2, number), "a") for number in range(2 * MAX_CANDIDATES)]
    for sequence in sequences:
        catalog.add(sequence)
    assert len(list(catalog.candidates(tokens(1, 2, MAX_CANDIDATES, 7), "a", 4))) == MAX_CANDIDATES
    assert list(catalog) == sequences
    assert catalog.same(tokens(1, 2, 3), "a") is sequences[3]
    assert catalog.same(tokens(1, 2, 3), "b") is None
    catalog.remove(StoredSequence(tokens(1, 2, 3), "a"))
    catalog.remove(StoredSequence(tokens(1, 2, 3), "b"))
    assert len(catalog) == 2 * MAX_CANDIDATES
    catalog.remove(sequences[3])
    assert catalog.same(tokens(1, 2, 3), "a") is None
    assert sequences[3].id == sequences[3].id == sequence_id(tokens(1, 2, 3), "a")


def test_only_sequences_with_the_hint_are_kept() -> None:
    hints = (None, KvHint("keep"), KvHint("drop"), KvHint("pin", 60.0))
    assert [StoredSequence(tokens(1), "", hint=hint).keeps for hint in hints] == [False, True, False, False]


def test_sequences_of_free_slots_are_dropped_for_one_tenant() -> None:
    slots = Slots(PLAIN)
    for tenant in ("a", "b"):
        slot = slots.take(tokens(1, 2, 3), tenant, 0)
        assert slot is not None
        slot.computed = 3
        slots.release(slot, 0.0)
    slots.operations()
    assert slots.forget("a") == 1
    assert kinds(slots.operations()) == [Remove]
    assert [slot.tenant for slot in slots.held()] == ["b"]
    assert Store not in kinds(slots.operations())
