"""Stores sequences in host memory and on disk."""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from inference.file_stamp import Fingerprint, fingerprint
from inference.worker import llama
from inference.worker.kv.arena import Arena, Region
from inference.worker.kv.background_jobs import Apply, BackgroundJobs
from inference.worker.kv.catalog import Catalog
from inference.worker.kv.entry_format import (
    HEADER_BYTES,
    InvalidEntryError,
    Sizes,
    decode_head,
    decode_prefix,
    encode_head,
)
from inference.worker.kv.retention_policies import POLICIES, leaves_after
from inference.worker.kv.stored_sequences import StoredSequence
from inference.worker.llama import sequence_state
from inference.worker.llama.binding import lib
from inference.worker.steps import Checkpoint
from inference.worker_link import Grant, KvCounts, KvTiers

log = logging.getLogger("headgate.worker.kv")

LOCK_SECONDS = 0.5
"""Interval of the attempts to take an arena that another worker of the model still uses."""
FETCHED_SECONDS = 30.0
"""A fetched sequence stays in host memory at least for this long, unless it was loaded."""
SPARE_SHARE = 4
"""Memory for the next sequence is prepared if so many of them fit into the limit."""


def open_store(
    context: llama.Context,
    grant: Grant,
    files: Fingerprint,
    keep_handle: int | None,
    on_change: Callable[[], None],
) -> TieredStore:
    """The stored sequences of a model. `files`: the weights in all parts and the LoRA adapters, as they were loaded.

    `keep_handle`: an inherited memory file for the sequences in host memory. `on_change` is called on another thread
    when `run` has something to do.
    """
    store = TieredStore(context, grant.kv, sequence_key(grant, files), Arena(keep_handle), on_change)
    store.open()
    return store


def sequence_key(grant: Grant, files: Fingerprint) -> dict[str, Any]:
    """The properties that must be equal for a state to be valid, as JSON returns them.

    Files have names and no inodes, so that a new container of the same image finds its sequences. The number of
    sequences and the devices are left out, because a state does not depend on them.
    """
    library = fingerprint(Path(lib._lib._name))
    return {
        "files": [[Path(path).name, size, modified] for path, (size, modified, _inode) in files],
        "kv_type": grant.kv_type,
        "flash_attention": grant.flash_attention,
        "swa_full": grant.swa_full,
        "context_length": grant.context_length,
        "library": [[Path(path).name, size, modified] for path, (size, modified, _inode) in library],
    }


@dataclass(slots=True)
class HitCounts:
    """How prompts were continued; counted by the owner of the slots. See `KvCounts`."""

    hits_hot: int = 0
    hits_ram: int = 0
    hits_disk: int = 0
    misses: int = 0


@dataclass(slots=True)
class _Counts:
    """The counters of `KvCounts` that the store keeps."""

    ram_sequences: int = 0
    ram_bytes: int = 0
    ram_tokens: int = 0
    disk_sequences: int = 0
    disk_bytes: int = 0
    evicted: int = 0
    invalid: int = 0
    prefetched: int = 0
    prefetched_used: int = 0
    saves: int = 0
    saved_bytes: int = 0
    save_seconds: float = 0.0
    loads: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    disk_written_bytes: int = 0
    disk_write_seconds: float = 0.0
    disk_read_bytes: int = 0
    disk_read_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Form:
    """What kinds of layers a model has. `is_recurrent`: no attention at all."""

    has_window: bool
    has_partial: bool
    is_recurrent: bool


def _form(context: llama.Context) -> _Form:
    model = context.model
    has_window = int(lib.llama_model_n_swa(model.handle)) > 0
    return _Form(has_window, has_window or model.keeps_whole_state, bool(lib.llama_model_is_recurrent(model.handle)))


@dataclass(slots=True, eq=False)
class _Stored:
    """Where a sequence is stored. `partial_at`: see `Head`.

    `fetched_at`: when it was fetched (monotonic), until it is loaded.
    """

    sequence: StoredSequence
    sizes: Sizes
    partial_at: int
    region: Region | None = None
    fetched_at: float | None = None


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
        self.hits = HitCounts()
        self._context = context
        self._form = _form(context)
        self._key = dict(key)
        self._arena = arena
        self._clock = clock
        self._policy = POLICIES[tiers.policy]
        self._ram_bytes = tiers.ram_bytes
        self._catalog = Catalog()
        self._stored: dict[StoredSequence, _Stored] = {}
        self._counts = _Counts()
        self._is_open = False
        self._closing = threading.Event()
        self._memory_jobs = BackgroundJobs("kv-memory", on_change)

    # --- the interface for the engine ---------------------------------------------------------------------------------
    @property
    def catalog(self) -> Catalog:
        """The sequences that can be restored."""
        return self._catalog

    @property
    def enabled(self) -> bool:
        """Whether sequences can be saved at present."""
        return self._is_open and self._ram_bytes > 0

    def save(self, slot: int, sequence: StoredSequence, checkpoints: Sequence[Checkpoint]) -> bool:
        """Copies the state of `slot` to host memory and adds `sequence` to the catalog; False if there is no room.

        Sequences with images are not saved, because the numbers of images are valid in this process only.
        """
        began = time.perf_counter()
        tokens = sequence.tokens
        if not self.enabled or not _is_text(tokens) or not self._holds_only(slot, len(tokens)):
            return False
        kept = [item for item in checkpoints if item.state is not None]
        sequence.checkpoints = tuple((item.position, item.oldest) for item in kept)
        if self._replaces(sequence):
            return True
        handle = self._context.handle
        state_bytes = sequence_state.count_bytes(handle, slot)
        partial_at = sequence_state.partial_at(handle, slot) if self._form.has_partial else 0
        head, sizes = encode_head(sequence, self._key, state_bytes, [item.state.nbytes for item in kept], partial_at)
        region = self._room(sizes.all_bytes)
        if region is None:
            return False
        room = region.size - sizes.state_at
        if sequence_state.read(handle, slot, region.address + sizes.state_at, room) != state_bytes:
            log.warning("sequence not saved: llama.cpp did not return its state: tokens=%d", len(tokens))
            self._arena.release(region, spare=True)
            return False
        for item, at in zip(kept, sizes.checkpoints_at, strict=True):
            np.copyto(region.array(at, item.state.nbytes), item.state.reshape(-1).view(np.uint8))
        region.view[: len(head)] = head
        self._arena.commit(region)
        stored = _Stored(sequence, sizes, partial_at)
        self._add(stored)
        self._enter_ram(stored, region)
        self._remove_prefixes(sequence)
        self._prepare(sizes.all_bytes)
        self._counts.saves += 1
        self._counts.saved_bytes += sizes.all_bytes
        self._counts.save_seconds += time.perf_counter() - began
        return True

    def load(self, slot: int, sequence: StoredSequence, checkpoints: Sequence[Checkpoint]) -> bool:
        """Restores a sequence that is in host memory into the empty `slot` and fills the states of `checkpoints`.

        If that fails, the slot is empty, the sequence is removed from the catalog, and the result is False.
        """
        began = time.perf_counter()
        stored = self._stored.get(sequence)
        if stored is None or stored.region is None:
            return False
        region, sizes = stored.region, stored.sizes
        self._arena.prefault(region)
        state = region.array(sizes.state_at, sizes.state_bytes)
        streams = self._other_streams(slot, state)
        if streams:
            state = sequence_state.with_streams(
                state, streams, stored.partial_at, second_has_streams=self._form.has_window
            )
        taken = sequence_state.write(self._context.handle, slot, state.ctypes.data, state.size)
        last = sequence_state.bounds(self._context.memory, slot)[1]
        if taken != state.size or last != len(sequence.tokens) - 1:
            log.warning("stored sequence removed: llama.cpp rejects its state: tokens=%d", len(sequence.tokens))
            self._context.remove(slot)
            self._counts.invalid += 1
            self._remove(stored)
            return False
        places = {position: place for place, (position, _oldest) in enumerate(sequence.checkpoints)}
        for item in checkpoints:
            if (place := places.get(item.position)) is not None:
                saved = region.array(sizes.checkpoints_at[place], sizes.checkpoint_bytes[place])
                converts = streams and self._form.has_window
                item.state = sequence_state.with_streams(saved, streams) if converts else saved.copy()
        self._used(stored)
        self._counts.loads += 1
        self._counts.loaded_bytes += sizes.all_bytes
        self._counts.load_seconds += time.perf_counter() - began
        return True

    def fetch(self, sequence: StoredSequence) -> None:
        """Begins to read a sequence from disk. It is `fetching` until it is in host memory or was removed."""

    def run(self) -> None:
        """Applies the results of background work. Called before each step."""
        self._memory_jobs.apply()

    def pin(self, sequences: Collection[StoredSequence], until: float) -> None:
        """Keeps `sequences` until the Unix time `until`."""
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
        """Sets the limit of host memory; sequences beyond it are moved to disk or removed."""
        self._ram_bytes = ram_bytes
        self._shrink(ram_bytes)
        self._arena.trim(max(0, ram_bytes - self._arena.used_bytes))

    def counts(self) -> KvCounts:
        """Numbers for the heartbeat."""
        hits, own = self.hits, self._counts
        return KvCounts(
            hits_hot=hits.hits_hot, hits_ram=hits.hits_ram, hits_disk=hits.hits_disk, misses=hits.misses,
            **{name: getattr(own, name) for name in _Counts.__slots__},
        )  # fmt: skip

    # --- the life of the store ----------------------------------------------------------------------------------------
    def open(self) -> None:
        """Finds the sequences of earlier workers, now or when the worker ends that still uses them."""
        if self._arena.open():
            self._opened()
        else:
            log.info("another worker of the model uses the stored sequences: waiting for its end")
            self._memory_jobs.add(self._await_arena)

    def attach(self, context: llama.Context, grant: Grant, files: Fingerprint) -> None:
        """Goes on with another context of the model, after the earlier one was freed."""
        self._context = context
        self._policy = POLICIES[grant.kv.policy]
        key = sequence_key(grant, files)
        if key != self._key:
            self.drop(list(self._stored))
            self._key = key
        self.limit(grant.kv.ram_bytes)

    def close(self, seconds: float) -> None:
        """Ends the work in the background, which may take `seconds`; what is not done is abandoned.

        Sequences in inherited memory stay there for the next worker.
        """
        self._closing.set()
        if self._memory_jobs.close(seconds):
            self.run()
            for stored in self._stored.values():
                if stored.region is not None:
                    self._arena.unmap(stored.region)
        self._is_open = False
        self._catalog = Catalog()
        self._stored.clear()
        self._arena.close()

    def _await_arena(self) -> Apply | None:
        while not self._arena.open():
            if self._closing.wait(LOCK_SECONDS):
                return None
        return self._opened

    def _opened(self) -> None:
        self._is_open = True
        self._find_in_ram()
        self._shrink(self._ram_bytes)

    def _find_in_ram(self) -> None:
        foreign = 0
        for region in self._arena.scan():
            try:
                head = decode_head(region.view[: decode_prefix(region.view[:HEADER_BYTES]).state_at])
            except InvalidEntryError as error:
                log.warning("stored sequence removed from host memory: it is %s", error)
                self._counts.invalid += 1
                self._arena.release(region)
                continue
            if head.key != self._key or self._catalog.same(head.sequence.tokens, head.sequence.tenant) is not None:
                foreign += 1
                self._arena.release(region)
                continue
            stored = _Stored(head.sequence, head.sizes, head.partial_at)
            self._add(stored)
            self._enter_ram(stored, region)
        if foreign:
            self._counts.invalid += foreign
            log.info("stored sequences removed from host memory: count=%d: made for another form of the model", foreign)

    # --- places -------------------------------------------------------------------------------------------------------
    def _add(self, stored: _Stored) -> None:
        self._stored[stored.sequence] = stored
        self._catalog.add(stored.sequence)

    def _remove(self, stored: _Stored) -> None:
        """Removes a sequence everywhere."""
        self._stored.pop(stored.sequence, None)
        self._catalog.remove(stored.sequence)
        self._leave_ram(stored)

    def _enter_ram(self, stored: _Stored, region: Region) -> None:
        sequence = stored.sequence
        stored.region, sequence.in_ram, sequence.count_bytes = region, True, stored.sizes.all_bytes
        self._counts.ram_sequences += 1
        self._counts.ram_bytes += region.size
        self._counts.ram_tokens += len(sequence.tokens)

    def _leave_ram(self, stored: _Stored) -> None:
        if (region := stored.region) is None:
            return
        stored.region, stored.sequence.in_ram = None, False
        self._counts.ram_sequences -= 1
        self._counts.ram_bytes -= region.size
        self._counts.ram_tokens -= len(stored.sequence.tokens)
        self._arena.release(region, spare=True)

    def _evict(self, stored: _Stored) -> None:
        """Frees the host memory of a sequence."""
        self._counts.evicted += 1
        self._remove(stored)

    def _room(self, count_bytes: int) -> Region | None:
        """A region for a new entry, for which others are evicted; None if there is no room."""
        if count_bytes > self._ram_bytes:
            return None
        self._shrink(self._ram_bytes - count_bytes)
        try:
            return self._arena.allocate(count_bytes, self._ram_bytes)
        except MemoryError as error:
            log.warning("sequence not saved: %s", error)
            return None

    def _shrink(self, ram_bytes: int) -> None:
        """Evicts sequences until the others take at most `ram_bytes` of host memory."""
        if self._counts.ram_bytes <= ram_bytes:
            return
        now = self._clock()
        inside = [stored for stored in self._stored.values() if stored.region is not None]
        for stored in sorted(inside, key=lambda item: leaves_after(item.sequence, self._policy, now)):
            self._evict(stored)
            if self._counts.ram_bytes <= ram_bytes:
                return

    def _prepare(self, count_bytes: int) -> None:
        """Evicts ahead and prepares memory in the background, so that the next save only copies."""
        if SPARE_SHARE * count_bytes > self._ram_bytes:
            return
        self._shrink(self._ram_bytes - count_bytes)
        most_spare = min(2 * count_bytes, self._ram_bytes - self._counts.ram_bytes)
        self._memory_jobs.add(lambda: self._arena.prepare(count_bytes, most_spare))

    # --- sequences ----------------------------------------------------------------------------------------------------
    def _holds_only(self, slot: int, count: int) -> bool:
        """Removes surplus cells of a slot; returns whether it then holds exactly `count` tokens."""
        if sequence_state.bounds(self._context.memory, slot)[1] >= count:
            self._context.remove(slot, count)
        return sequence_state.bounds(self._context.memory, slot)[1] == count - 1

    def _replaces(self, sequence: StoredSequence) -> bool:
        """Whether the same tokens are in host memory already. `sequence` then takes their place in the catalog."""
        same = self._catalog.same(sequence.tokens, sequence.tenant)
        if same is None:
            return False
        stored = self._stored[same]
        if stored.region is None or len(same.checkpoints) < len(sequence.checkpoints):
            self._remove(stored)
            return False
        self._catalog.remove(same)
        del self._stored[same]
        sequence.checkpoints, sequence.count_bytes, sequence.hits = same.checkpoints, same.count_bytes, same.hits
        sequence.pinned_until = max(sequence.pinned_until, same.pinned_until)
        sequence.in_ram, sequence.on_disk = same.in_ram, same.on_disk
        same.in_ram = same.on_disk = False
        stored.sequence = sequence
        self._add(stored)
        self._record_times(stored)
        return True

    def _other_streams(self, slot: int, state: np.ndarray) -> int:
        """The number of streams of the context if a state was saved with another number, else 0."""
        if self._form.is_recurrent:
            return 0
        streams = sequence_state.empty_streams(self._context.handle, slot)
        return streams if streams != sequence_state.streams(state) else 0

    def _remove_prefixes(self, sequence: StoredSequence) -> None:
        """Removes sequences that `sequence` continues, if its end can be removed instead: they are never better."""
        if not self._context.can_trim or self._context.window:
            return
        now = self._clock()
        found = self._catalog.candidates(sequence.tokens, sequence.tenant, len(sequence.tokens))
        for other in [other for other, shared in found if shared == len(other.tokens) and other is not sequence]:
            if other.pinned_until <= now and not other.fetching:
                self._remove(self._stored[other])

    def _used(self, stored: _Stored) -> None:
        """Records that a sequence was loaded."""
        stored.sequence.hits += 1
        stored.sequence.used_at = self._clock()
        self._record_times(stored)

    def _record_times(self, stored: _Stored) -> None:
        if stored.region is not None:
            self._arena.touch(stored.region, stored.sequence.used_at, stored.sequence.pinned_until)


def _is_text(tokens: array[int]) -> bool:
    """Whether there are tokens, and none of them belongs to an image (negative numbers)."""
    return len(tokens) > 0 and int(np.frombuffer(tokens, np.int32).min()) >= 0
