"""What operators do with the sequences of an engine. Runs on the engine thread."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence

from inference.worker.engine.scheduler import Scheduler
from inference.worker.engine.sequence_transfers import SequenceTransfers
from inference.worker.kv.sequence_control import SequenceRow
from inference.worker.kv.sequence_store import SequenceStore
from inference.worker.kv.slot import Slot
from inference.worker.steps import StoredSequence, sequence_id


def rows(scheduler: Scheduler, store: SequenceStore | None, now: float) -> Sequence[SequenceRow]:
    """All sequences, the last used first. `now` is on the clock of the scheduler."""
    stored = {} if store is None else {sequence.id: sequence for sequence in store.catalog}
    found = []
    for slot in scheduler.slots.held():
        tokens = slot.tokens[: slot.computed]
        id = sequence_id(tokens, slot.tenant)
        idle = 0.0 if slot.taken else max(0.0, now - slot.released_at)
        size = 0 if store is None else store.slot_bytes(slot.number)
        copy = stored.pop(id, None)
        tiers = ("hot", *(() if copy is None else _tiers(copy)))
        hits, pinned = (0, None) if copy is None else (copy.hits, _pinned_until(copy))
        found.append(SequenceRow(id, tiers, slot.computed, size, slot.tenant, round(idle, 3), hits, pinned))
    unix = time.time()
    found += [
        SequenceRow(
            id,
            _tiers(sequence),
            len(sequence.tokens),
            sequence.count_bytes,
            sequence.tenant,
            round(max(0.0, unix - sequence.used_at), 3),
            sequence.hits,
            _pinned_until(sequence),
        )
        for id, sequence in stored.items()
    ]
    return sorted(found, key=lambda row: row.idle_seconds)


def clear(scheduler: Scheduler, store: SequenceStore | None, tenant: str | None) -> int:
    """Drops stored sequences and those in slots that no request uses, of `tenant` or of all; returns how many."""
    free = {_slot_id(slot) for slot in scheduler.slots.held() if not slot.taken and tenant in (None, slot.tenant)}
    scheduler.slots.forget(tenant)
    if store is not None:
        stored = [sequence for sequence in store.catalog if tenant in (None, sequence.tenant)]
        free |= {sequence.id for sequence in stored}
        store.drop(stored)
    return len(free)


def pin(scheduler: Scheduler, transfers: SequenceTransfers, ids: Collection[str], seconds: float) -> int:
    """Pins sequences for `seconds` from now, 0 to end their pins; returns how many were found.

    Those that are only in slots are stored first, unless a request uses them.
    """
    if (store := transfers.store) is None:
        return 0
    for slot in scheduler.slots.held():
        if not slot.taken and slot.unstored and _slot_id(slot) in ids and (operation := scheduler.slots.store(slot)):
            transfers.store_sequence(operation)
    found = [sequence for sequence in store.catalog if sequence.id in ids]
    store.pin(found, time.time() + seconds if seconds else 0.0)
    return len(found)


def _slot_id(slot: Slot) -> str:
    return sequence_id(slot.tokens[: slot.computed], slot.tenant)


def _tiers(sequence: StoredSequence) -> tuple[str, ...]:
    return tuple(_names(sequence))


def _names(sequence: StoredSequence) -> Iterator[str]:
    if sequence.in_ram:
        yield "ram"
    if sequence.on_disk:
        yield "disk"


def _pinned_until(sequence: StoredSequence) -> float | None:
    return sequence.pinned_until if sequence.pinned_until > time.time() else None
