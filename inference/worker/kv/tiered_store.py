"""Stores sequences in host memory and on disk."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from inference.worker import llama
from inference.worker.kv.arena import Arena, Region
from inference.worker.kv.background_jobs import Apply, BackgroundJobs
from inference.worker.kv.catalog import Catalog
from inference.worker.kv.context_states import ContextStates
from inference.worker.kv.disk_tier import AbandonedError, DiskTier, FoundEntry
from inference.worker.kv.entry_format import (
    HEADER_BYTES,
    Head,
    InvalidEntryError,
    decode_head,
    decode_header,
    encode_head,
)
from inference.worker.kv.memory_tier import MemoryTier, Stored
from inference.worker.kv.retention_policies import POLICIES
from inference.worker.kv.sequence_key import FileKeys, sequence_key
from inference.worker.steps import Checkpoint, StoredSequence
from inference.worker_link import Grant, KvCounts, KvTiers

log = logging.getLogger("headgate.worker.kv")

FOUND_AT_A_TIME = 16
LOCK_SECONDS = 0.05
"""Interval of the attempts to take an arena that another worker of the model still uses."""
FIND_SECONDS = 0.05
"""The load of a model waits at most this long until its stored sequences are found on disk, last used ones first.

The first request can then continue them.
"""
FETCH_SECONDS = 10.0
"""A read that takes longer (and longer than 0.25 s per MiB) is not waited for."""
ABANDON_SECONDS = 1.0


def open_store(
    context: llama.Context,
    grant: Grant,
    files: FileKeys,
    arena_handle: int | None,
    on_change: Callable[[], None],
) -> TieredStore:
    """The stored sequences of a model. `files`: the weights in all parts and the LoRA adapters, as they were loaded.

    `arena_handle`: an inherited memory file for the sequences in host memory. `on_change` is called on another thread
    when `run` has something to do.
    """
    store = TieredStore(context, grant.kv, sequence_key(grant, files), Arena(arena_handle), on_change)
    store.open()
    return store


class TieredStore:
    """Implements `SequenceStore`. One thread at a time may use it, except for the threads that it starts itself."""

    def __init__(
        self,
        context: llama.Context,
        tiers: KvTiers,
        key: Mapping[str, Any],
        arena: Arena,
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._states = ContextStates(context)
        self._key = dict(key)
        self._clock = clock
        self._disk = _disk_tier(tiers, self._key, clock)
        self._catalog = Catalog()
        self._stored: dict[StoredSequence, Stored] = {}
        self._by_file: dict[str, Stored] = {}
        self._counts = KvCounts()
        self._fetches: dict[Stored, float] = {}
        self._unwritten: list[Stored] = []
        self._is_open = False
        self._closing = threading.Event()
        self._abandoned = threading.Event()
        self._all_found = threading.Event()
        names = ("kv-memory", "kv-read", "kv-write") if self._disk is not None else ("kv-memory",)
        self._jobs = [BackgroundJobs(name, on_change) for name in names]
        self._memory_jobs, self._reads, self._writes = self._jobs[0], self._jobs[-2:][0], self._jobs[-1]
        policy = POLICIES[tiers.policy]
        self._memory = MemoryTier(arena, tiers.ram_bytes, policy, clock, self._counts, self._memory_jobs, self._evict)

    # --- the interface for the engine ---------------------------------------------------------------------------------
    @property
    def catalog(self) -> Catalog:
        """The sequences that can be restored."""
        return self._catalog

    @property
    def enabled(self) -> bool:
        """Whether sequences can be saved at present."""
        return self._is_open and (self._memory.limit_bytes > 0 or self._can_write)

    @property
    def _can_write(self) -> bool:
        return self._disk is not None and not self._disk.is_paused

    def add(self, slot: int, sequence: StoredSequence, checkpoints: Sequence[Checkpoint]) -> bool:
        """Copies the state of `slot` to host memory and adds `sequence` to the catalog; False if it is not stored.

        Sequences with images are not saved, because the numbers of images are valid in this process only.
        """
        began = time.perf_counter()
        self.run()
        tokens = sequence.tokens
        if not self.enabled or not _is_text(tokens) or not self._states.trim(slot, len(tokens)):
            return False
        kept = [item for item in checkpoints if item.state is not None]
        sequence.checkpoints = tuple((item.position, item.oldest) for item in kept)
        if self._replaces(sequence):
            return True
        state_bytes, partial_at = self._states.measure(slot)
        head, sizes = encode_head(sequence, self._key, state_bytes, [item.state.nbytes for item in kept], partial_at)
        stored = Stored(sequence, sizes, partial_at)
        may_pass_through = self._disk is not None and not self._disk.is_paused and self._disk.fits(sizes.all_bytes)
        if (region := self._memory.allocate(stored, may_pass_through=may_pass_through)) is None:
            return False
        if not self._states.read(slot, region.array(sizes.state_at, state_bytes)):
            log.warning("sequence of %d tokens not saved: llama.cpp did not return its state", len(tokens))
            self._memory.give_back(stored, region)
            return False
        for item, at in zip(kept, sizes.checkpoints_at, strict=True):
            np.copyto(region.array(at, item.state.nbytes), item.state.reshape(-1).view(np.uint8))
        region.view[: len(head)] = head
        self._memory.arena.commit(region)
        self._add(stored)
        self._memory.enter(stored, region)
        self._remove_prefixes(sequence, with_files=self._disk is None)
        if self._disk is not None:
            self._queue_write(stored)
        self._memory.prepare(stored)
        self._counts.saves += 1
        self._counts.saved_bytes += sizes.all_bytes
        self._counts.save_seconds += time.perf_counter() - began
        return True

    def load(self, slot: int, sequence: StoredSequence, checkpoints: Sequence[Checkpoint]) -> bool:
        """Restores a sequence that is in host memory into the empty `slot` and fills the states of `checkpoints`.

        If that fails, the slot is empty and the result is False. A sequence whose state is rejected is removed from
        the catalog; one that has left host memory may still be on disk.
        """
        began = time.perf_counter()
        stored = self._stored.get(sequence)
        if stored is None or stored.region is None:
            return False
        region, sizes = stored.region, stored.sizes
        self._memory.arena.prefault(region)
        state = region.array(sizes.state_at, sizes.state_bytes)
        if not self._states.write(slot, state, stored.partial_at, len(sequence.tokens)):
            log.warning("stored sequence of %d tokens removed: llama.cpp rejects its state", len(sequence.tokens))
            self._counts.invalid += 1
            self._remove(stored)
            return False
        places = {position: place for place, (position, _oldest) in enumerate(sequence.checkpoints)}
        for item in checkpoints:
            if (place := places.get(item.position)) is not None:
                saved = region.array(sizes.checkpoints_at[place], sizes.checkpoint_bytes[place])
                item.state = self._states.checkpoint(saved)
        self._loaded(stored)
        self._counts.loads += 1
        self._counts.loaded_bytes += sizes.all_bytes
        self._counts.load_seconds += time.perf_counter() - began
        return True

    def fetch(self, sequence: StoredSequence) -> None:
        """Begins to read a sequence from disk. It is `fetching` until it is in host memory or was removed.

        Without room, or if the disk takes too long, it is not `fetching` and stays on disk.
        """
        self.run()
        stored = self._stored.get(sequence)
        if stored in self._fetches:
            return
        sequence.fetching = False
        if stored is None or stored.region is not None or stored.file is None:
            return
        if any(map(self._is_overdue, self._fetches)) or not self._memory.reserve(stored, may_pass_through=True):
            return
        sequence.fetching = True
        self._fetches[stored] = time.monotonic()
        self._reads.add(lambda: self._read(stored))

    def run(self) -> None:
        """Applies the results of background work. Called before each step."""
        for jobs in self._jobs:
            jobs.apply()
        if self._unwritten and self._can_write:
            again, self._unwritten = self._unwritten, []
            for stored in again:
                self._queue_write(stored)
        for stored in self._fetches:
            if stored.sequence.fetching and self._is_overdue(stored):
                log.warning(
                    "reading a stored sequence of %d tokens takes too long; the waiting prompt is computed instead",
                    len(stored.sequence.tokens),
                )
                stored.sequence.fetching = False
        self._memory.end_transit()

    def pin(self, sequences: Collection[StoredSequence], until: float) -> None:
        """Pins `sequences` until the Unix time `until`. Sequences without a pin are removed before pinned ones."""
        for sequence in sequences:
            if (stored := self._stored.get(sequence)) is not None:
                sequence.pinned_until = until
                self._record_times(stored)

    def drop(self, sequences: Collection[StoredSequence]) -> None:
        """Removes `sequences` from the catalog, from host memory and from disk."""
        for sequence in list(sequences):
            if (stored := self._stored.get(sequence)) is not None:
                self._remove(stored)

    def limit(self, ram_bytes: int) -> None:
        """Sets the limit of host memory; sequences beyond it are removed, or stay only on disk if they are there."""
        self.run()
        self._memory.limit(ram_bytes)

    def slot_bytes(self, slot: int) -> int:
        """Bytes of the state of `slot`."""
        return self._states.measure(slot)[0]

    def counts(self) -> KvCounts:
        """Numbers for the heartbeat, without `hits_*` and `misses`."""
        return replace(self._counts)

    # --- the life of the store ----------------------------------------------------------------------------------------
    def open(self) -> None:
        """Finds the sequences of earlier workers, now or as soon as a worker that still uses them ends."""
        try:
            is_free = self._memory.arena.open()
        except OSError as error:
            log.warning(
                "stored sequences in host memory are lost when this worker ends: cannot open the arena (%s)",
                error.strerror,
            )
            self._memory.arena = Arena()
            is_free = self._memory.arena.open()
        if is_free:
            self._opened()
            if self._disk is not None:
                self._all_found.wait(FIND_SECONDS)
                self.run()
        else:
            log.info("another worker of this model still uses the stored sequences; waiting until it ends")
            self._memory_jobs.add(self._await_arena)

    def close(self, seconds: float) -> None:
        """Ends the work in the background, which may take `seconds`; what is not written then is abandoned.

        Sequences in inherited memory stay there for the next worker.
        """
        self._closing.set()
        self._memory.is_closing = True
        until = time.monotonic() + seconds
        ended = [jobs.close(until - time.monotonic()) for jobs in self._jobs]
        if not all(ended):
            self._abandoned.set()
            ended = [jobs.close(ABANDON_SECONDS) for jobs in self._jobs]
        if all(ended):
            self.run()
        self._is_open = False
        self._catalog = Catalog()
        self._stored.clear()
        self._by_file.clear()
        self._memory.close(unmaps=all(ended))

    def _await_arena(self) -> Apply | None:
        while not self._memory.arena.open():
            if self._closing.wait(LOCK_SECONDS):
                return None
        return self._opened

    def _opened(self) -> None:
        self._is_open = True
        self._find_in_ram()
        self._memory.shrink()
        if self._disk is not None:
            self._find_on_disk()

    def _find_in_ram(self) -> None:
        unusable = 0
        for region in self._memory.arena.scan():
            try:
                head = decode_head(region.view[: decode_header(region.view[:HEADER_BYTES]).state_at])
            except InvalidEntryError as error:
                log.warning("stored sequence removed from host memory: it %s", error)
                self._counts.invalid += 1
                self._memory.arena.release(region)
                continue
            if head.key != self._key or self._catalog.same(head.sequence.tokens, head.sequence.tenant) is not None:
                unusable += 1
                self._memory.arena.release(region)
                continue
            stored = Stored(head.sequence, head.sizes, head.partial_at)
            self._add(stored)
            self._memory.enter(stored, region)
        if unusable:
            self._counts.invalid += unusable
            why = "duplicates, or made with another file or other settings of the model"
            log.info("%d stored sequences removed from host memory: %s", unusable, why)

    def _find_on_disk(self) -> None:
        """Reads the heads of the files in the background, some at a time, so that fetches need not wait."""
        assert self._disk is not None
        disk, entries = self._disk, self._disk.find()

        def some() -> Apply:
            found = list(itertools.islice(entries, FOUND_AT_A_TIME))
            goes_on = len(found) == FOUND_AT_A_TIME and not self._closing.is_set()
            self._reads.add(some if goes_on else self._all_found.set)
            return lambda: self._found(disk, found, is_last=not goes_on)

        self._reads.add(some)

    def _found(self, disk: DiskTier, found: Sequence[FoundEntry | None], *, is_last: bool) -> None:
        now = self._clock()
        for entry in found:
            if entry is None:
                self._counts.invalid += 1
            elif disk is self._disk and entry.name not in self._by_file:
                sequence = entry.head.sequence
                same = self._catalog.same(sequence.tokens, sequence.tenant)
                if same is None:
                    sequence.used_at = min(entry.modified_at, now)
                    sequence.pinned_until = entry.modified_at if entry.modified_at > now else 0.0
                    self._add(Stored(sequence, entry.head.sizes, entry.head.partial_at))
                    same = sequence
                self._enter_disk(self._stored[same], entry.name)
        if is_last:
            for stored in self._stored.values():
                self._queue_write(stored)
            if self._stored:
                self._memory.prepare(max(self._stored.values(), key=lambda item: item.sequence.used_at))

    # --- places -------------------------------------------------------------------------------------------------------
    def _add(self, stored: Stored) -> None:
        stored.sequence.count_bytes = stored.sizes.all_bytes
        self._stored[stored.sequence] = stored
        self._catalog.add(stored.sequence)

    def _forget(self, stored: Stored) -> None:
        """Removes a sequence from the catalog and from host memory. Its file stays in the directory, uncounted."""
        self._stored.pop(stored.sequence, None)
        self._catalog.remove(stored.sequence)
        self._memory.leave(stored)
        self._leave_disk(stored)

    def _remove(self, stored: Stored) -> None:
        """Removes a sequence everywhere."""
        name = stored.file
        self._forget(stored)
        self._unlink(name)

    def _unlink(self, name: str | None) -> None:
        if name is None or (disk := self._disk) is None:
            return
        if self._closing.is_set():
            disk.remove(name)
        else:
            self._writes.add(lambda: disk.remove(name))

    def _enter_disk(self, stored: Stored, name: str) -> None:
        if stored.file is not None:
            return  # the search of the directory found a new file before its writer reported it
        self._by_file[name] = stored
        stored.file, stored.sequence.on_disk = name, True
        self._counts.disk_sequences += 1
        self._counts.disk_bytes += stored.sequence.count_bytes
        self._counts.disk_tokens += len(stored.sequence.tokens)

    def _leave_disk(self, stored: Stored) -> None:
        if stored.file is not None:
            self._by_file.pop(stored.file, None)
            stored.file, stored.sequence.on_disk = None, False
            self._counts.disk_sequences -= 1
            self._counts.disk_bytes -= stored.sequence.count_bytes
            self._counts.disk_tokens -= len(stored.sequence.tokens)

    def _evict(self, stored: Stored) -> None:
        """Frees the host memory of a sequence; it stays on disk if it is there."""
        if stored.file is None:
            self._counts.evicted += 1
            self._forget(stored)
        else:
            self._memory.leave(stored)

    # --- the disk -----------------------------------------------------------------------------------------------------
    def _queue_write(self, stored: Stored) -> None:
        """Queues the writing of a sequence that is in host memory only, unless it is queued already."""
        if stored.region is not None and stored.file is None and not stored.write_queued:
            stored.write_queued = True
            self._writes.add(lambda: self._write(stored))

    def _write(self, stored: Stored) -> Apply:
        """Writes a sequence to a file. Runs on the thread that writes."""
        disk = self._disk
        assert disk is not None
        region = self._memory.begin_write(stored)
        if region is None or stored.file is not None:
            return lambda: self._not_written(disk, stored, ())
        sizes, began = stored.sizes, time.perf_counter()
        removed: list[str] = []
        try:
            if disk.fits(sizes.all_bytes) and not disk.is_paused:
                head, states = bytearray(region.view[: sizes.state_at]), region.view[sizes.state_at : sizes.all_bytes]
                disk.write(stored.sequence, head, states, self._abandoned.is_set, removed)
                seconds = time.perf_counter() - began
                return lambda: self._written(disk, stored, removed, seconds)
        except (OSError, AbandonedError):
            pass  # logged, or the worker ends
        except Exception:
            log.exception("internal error: a stored sequence could not be written to disk")
            return lambda: self._not_written(disk, stored, removed, again=False)
        return lambda: self._not_written(disk, stored, removed)

    def _written(self, disk: DiskTier, stored: Stored, removed: Sequence[str], seconds: float) -> None:
        """`removed`: files that were removed for room."""
        self._end_write(stored, removed)
        self._counts.disk_written_bytes += stored.sizes.all_bytes
        self._counts.disk_write_seconds += seconds
        name = disk.name_of(stored.sequence)
        if self._stored.get(stored.sequence) is stored and disk is self._disk:
            self._enter_disk(stored, name)
            self._remove_prefixes(stored.sequence, with_files=True)
        elif self._catalog.same(stored.sequence.tokens, stored.sequence.tenant) is None:
            self._unlink(name)
        self._memory.shrink()

    def _not_written(self, disk: DiskTier, stored: Stored, removed: Sequence[str], *, again: bool = True) -> None:
        """The sequence is written later if it is in host memory only and `again` is true."""
        self._end_write(stored, removed)
        is_only_copy = stored.file is None and stored.region is not None
        if again and self._stored.get(stored.sequence) is stored and is_only_copy and disk.fits(stored.sizes.all_bytes):
            self._unwritten.append(stored)
        self._memory.shrink()

    def _end_write(self, stored: Stored, removed: Sequence[str]) -> None:
        self._memory.end_write(stored)
        for name in removed:
            if (other := self._by_file.get(name)) is not None:
                self._lost_file(other)
                self._counts.evicted += 1

    def _lost_file(self, stored: Stored) -> None:
        """Records that the file of a sequence is gone."""
        if stored.region is None:
            self._forget(stored)
        else:
            self._leave_disk(stored)

    def _read(self, stored: Stored) -> Apply | None:
        """Reads a sequence from its file. Runs on the thread that reads."""
        disk, began = self._disk, time.perf_counter()
        region, head = None, None
        failure: Exception | None = None
        try:
            assert disk is not None
            region, head = disk.read(stored.sequence, self._memory.arena, self._memory.limit_bytes)
        except (OSError, MemoryError, InvalidEntryError) as error:
            failure = error
        except Exception as error:
            log.exception("internal error: a stored sequence could not be read")
            failure = error
        seconds = time.perf_counter() - began
        return lambda: self._fetched(stored, region, head, failure, seconds)

    def _fetched(
        self,
        stored: Stored,
        region: Region | None,
        head: Head | None,
        failure: Exception | None,
        seconds: float,
    ) -> None:
        stored.sequence.fetching = False
        self._fetches.pop(stored, None)
        self._memory.end_reserve(stored, is_read=region is not None)
        if region is None or head is None:
            self._not_fetched(stored, failure)
            return
        self._counts.prefetched += 1
        self._counts.disk_read_bytes += head.sizes.all_bytes
        self._counts.disk_read_seconds += seconds
        if self._stored.get(stored.sequence) is not stored or stored.region is not None:
            self._memory.give_back(stored, region)  # removed, or saved again
            return
        self._memory.arena.commit(region)
        stored.sizes, stored.partial_at = head.sizes, head.partial_at
        stored.sequence.checkpoints = head.sequence.checkpoints
        self._memory.arena.touch(region, stored.sequence.used_at, stored.sequence.pinned_until)
        self._memory.enter(stored, region)
        stored.fetched_at, stored.sequence.fetched = time.monotonic(), True
        stored.sequence.fetch_seconds = seconds
        self._memory.prepare(stored)

    def _not_fetched(self, stored: Stored, failure: Exception | None) -> None:
        """Forgets the file, unless memory was lacking. `discard` keeps a file on disk if the error may be temporary."""
        if isinstance(failure, MemoryError) or self._stored.get(stored.sequence) is not stored:
            log.warning(
                "a stored sequence of %d tokens could not be read (%s); the waiting prompt is computed instead",
                len(stored.sequence.tokens),
                failure,
            )
        elif isinstance(failure, FileNotFoundError):
            self._lost_file(stored)
        elif stored.file is not None and failure is not None and self._disk is not None:
            self._counts.invalid += 1
            self._disk.discard(stored.file, failure)
            self._lost_file(stored)

    def _is_overdue(self, stored: Stored) -> bool:
        allowed = max(FETCH_SECONDS, 0.25 * stored.sizes.all_bytes / 2**20)
        return time.monotonic() - self._fetches[stored] > allowed

    # --- sequences ----------------------------------------------------------------------------------------------------
    def _replaces(self, sequence: StoredSequence) -> bool:
        """Whether the same entry is in host memory already. `sequence` then takes its place in the catalog.

        If the present entry is worse, or only on disk, it is removed instead, and the result is False.
        """
        same = self._catalog.same(sequence.tokens, sequence.tenant)
        if same is None:
            return False
        stored = self._stored[same]
        is_worse = len(same.checkpoints) < len(sequence.checkpoints) or same.keeps != sequence.keeps
        is_worse = is_worse or not sequence.labels.keys() <= same.labels.keys()
        sequence.labels = {**same.labels, **sequence.labels}
        if stored.region is None or is_worse:
            self._remove(stored)
            return False
        self._catalog.remove(same)
        del self._stored[same]
        sequence.checkpoints, sequence.hits = same.checkpoints, same.hits
        sequence.pinned_until = max(sequence.pinned_until, same.pinned_until)
        sequence.in_ram, sequence.on_disk, sequence.fetched = same.in_ram, same.on_disk, same.fetched
        same.in_ram = same.on_disk = same.fetched = False
        stored.sequence = sequence
        self._add(stored)
        self._record_times(stored)
        return True

    def _remove_prefixes(self, sequence: StoredSequence, *, with_files: bool) -> None:
        """Removes the sequences that `sequence` continues: it can replace them, because its end can be removed.

        Where the end of a sequence cannot be removed, nothing is done. Pinned sequences and those being read stay.
        Without `with_files`, sequences with a file are removed from host memory only.
        """
        if not self._states.can_trim:
            return
        now = self._clock()
        found = self._catalog.candidates(sequence.tokens, sequence.tenant, len(sequence.tokens))
        for other in [other for other, shared in found if shared == len(other.tokens) and other is not sequence]:
            if other.pinned_until > now or other.fetching:
                continue
            stored = self._stored[other]
            if with_files or stored.file is None:
                self._remove(stored)
            else:
                self._memory.leave(stored)

    def _loaded(self, stored: Stored) -> None:
        """Records that a sequence was loaded."""
        stored.sequence.hits += 1
        stored.sequence.used_at = self._clock()
        if stored.fetched_at is not None:
            self._counts.prefetched_used += 1
            stored.fetched_at, stored.sequence.fetched = None, False
        self._record_times(stored)
        self._memory.end_transit()

    def _record_times(self, stored: Stored) -> None:
        """Records the last use and the pin of a sequence where it is stored."""
        sequence = stored.sequence
        if stored.region is not None:
            self._memory.arena.touch(stored.region, sequence.used_at, sequence.pinned_until)
        if (name := stored.file) is not None and (disk := self._disk) is not None:
            at = max(sequence.used_at, sequence.pinned_until)
            self._writes.add(lambda: disk.touch(name, at))


def _disk_tier(tiers: KvTiers, key: Mapping[str, Any], clock: Callable[[], float]) -> DiskTier | None:
    """The files of the model; None without a directory or room in it."""
    if tiers.directory is None or tiers.disk_bytes <= 0:
        return None
    return DiskTier(Path(tiers.directory), key, tiers.disk_bytes, clock)


def _is_text(tokens: array[int]) -> bool:
    """Whether there are tokens, and none of them belongs to an image (negative numbers)."""
    return len(tokens) > 0 and int(np.frombuffer(tokens, np.int32).min()) >= 0
