"""Room in host memory: which stored sequences it holds, and which leave it first."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from inference.worker.kv.arena import Arena, Region, rounded
from inference.worker.kv.background_jobs import BackgroundJobs
from inference.worker.kv.entry_format import Sizes
from inference.worker.kv.retention_policies import Policy, removal_key
from inference.worker.steps import StoredSequence
from inference.worker_link import KvCounts

log = logging.getLogger("headgate.worker.kv")

FETCHED_SECONDS = 30.0
"""A sequence read from disk is among the last to be evicted for this long, until it is loaded into a slot."""
TRANSIT_BYTES = 2**28
"""Host memory beyond the limit for sequences that are being written to disk or were read from it; a single sequence
may be larger than this."""
SPARE_SHARE = 4
"""Memory for the next sequence is prepared if the limit has room for at least this number of such sequences."""


@dataclass(slots=True, eq=False)
class Stored:
    """Where a sequence is stored. `partial_at`: see `Head`. `file`: the name of its file.

    `fetched_at`: when it was fetched (monotonic), until it is loaded. `being_written`: the thread that writes files may
    read the region. `to_release`: a region to release when the write has ended.
    """

    sequence: StoredSequence
    sizes: Sizes
    partial_at: int
    region: Region | None = None
    file: str | None = None
    fetched_at: float | None = None
    write_queued: bool = False
    being_written: bool = False
    to_release: Region | None = None


class MemoryTier:
    """The sequences in an arena, at most `limit_bytes` of them, except those in transit to or from the disk.

    One thread at a time may use it, but `begin_write` may be called on another. `evict` is called with the sequences
    that have to leave, and calls `leave`. The fields `ram_*` of `counts` are kept up to date.
    """

    def __init__(
        self,
        arena: Arena,
        limit_bytes: int,
        policy: Policy,
        clock: Callable[[], float],
        counts: KvCounts,
        jobs: BackgroundJobs,
        evict: Callable[[Stored], None],
    ) -> None:
        """`clock` gives Unix seconds. `jobs`: the thread that prepares and frees memory."""
        self.arena = arena
        self.limit_bytes = limit_bytes
        self.is_closing = False
        """Set when the store closes: memory is then freed on the calling thread."""
        self._policy = policy
        self._clock = clock
        self._counts = counts
        self._jobs = jobs
        self._evict = evict
        self._inside: dict[Stored, None] = {}
        self._in_transit: set[Stored] = set()
        self._reserved_bytes = 0
        self._lock = threading.Lock()

    def close(self, *, unmaps: bool) -> None:
        """Hands the sequences over to the next worker, which inherits their memory.

        `unmaps`: no other thread uses them.
        """
        for stored in self._inside:
            if unmaps and stored.region is not None:
                self.arena.unmap(stored.region)
        self._inside.clear()
        self._in_transit.clear()
        self.arena.close()

    # --- sequences ----------------------------------------------------------------------------------------------------
    def enter(self, stored: Stored, region: Region) -> None:
        """Adds a sequence, whose entry in `region` is complete."""
        with self._lock:
            stored.region = region
        stored.sequence.in_ram = True
        self._inside[stored] = None
        self._counts.ram_sequences += 1
        self._counts.ram_bytes += region.size
        self._counts.ram_tokens += len(stored.sequence.tokens)

    def leave(self, stored: Stored) -> None:
        """Removes a sequence if it is there; its memory is freed when it is not being written any more."""
        with self._lock:
            region, stored.region = stored.region, None
            if stored.being_written:
                stored.to_release = stored.to_release or region
        if region is None:
            return
        del self._inside[stored]
        stored.sequence.in_ram = False
        stored.fetched_at, stored.sequence.fetched = None, False
        self._counts.ram_sequences -= 1
        self._counts.ram_bytes -= region.size
        self._counts.ram_tokens -= len(stored.sequence.tokens)
        self._in_transit.discard(stored)
        if stored.to_release is not region:
            self.release(region)

    def begin_write(self, stored: Stored) -> Region | None:
        """The region of a sequence, which stays valid until `end_write`; None if it has left."""
        with self._lock:
            stored.being_written = stored.region is not None
            return stored.region

    def end_write(self, stored: Stored) -> None:
        """Ends what `begin_write` began."""
        with self._lock:
            stored.being_written = stored.write_queued = False
            region, stored.to_release = stored.to_release, None
        if region is not None:
            self.release(region)

    # --- room ---------------------------------------------------------------------------------------------------------
    @property
    def used_bytes(self) -> int:
        """Memory of sequences, and what reads from disk will take, without sequences in transit."""
        in_transit_bytes = sum([stored.region.size for stored in self._in_transit if stored.region is not None])
        return self._counts.ram_bytes + self._reserved_bytes - in_transit_bytes

    def allocate(self, stored: Stored, *, may_pass_through: bool) -> Region | None:
        """A region for a new sequence; None without room. `may_pass_through`: see `_make_room`."""
        size = rounded(stored.sizes.all_bytes)
        if not self._make_room(size, stored, may_pass_through=may_pass_through):
            return None
        try:
            return self.arena.allocate(size, self.limit_bytes)
        except MemoryError as error:
            log.warning("sequence not saved: %s", error)
            self._in_transit.discard(stored)
            return None

    def give_back(self, stored: Stored, region: Region) -> None:
        """Returns memory that its sequence does not use."""
        self.release(region)
        if stored.region is None:
            self._in_transit.discard(stored)

    def reserve(self, stored: Stored, *, may_pass_through: bool) -> bool:
        """Makes room for a sequence that is read from disk. Returns whether there is any."""
        size = rounded(stored.sizes.all_bytes)
        if not self._make_room(size, stored, may_pass_through=may_pass_through):
            return False
        if stored not in self._in_transit:
            self._reserved_bytes += size
        return True

    def end_reserve(self, stored: Stored, *, is_read: bool) -> None:
        """Ends what `reserve` began. If `is_read`, the sequence enters afterwards."""
        if stored not in self._in_transit:
            self._reserved_bytes -= rounded(stored.sizes.all_bytes)
        elif not is_read:
            self._in_transit.discard(stored)

    def release(self, region: Region) -> None:
        """Removes an entry. Running sequences do not wait until the system has freed its memory."""
        if region.size <= self.limit_bytes - self.used_bytes - self.arena.spare_bytes:
            self.arena.release(region, spare=True)
        else:
            self.arena.remove(region)
            self._in_background(lambda: self.arena.release(region))

    def limit(self, limit_bytes: int) -> None:
        """Sets the limit; sequences beyond it leave."""
        self.limit_bytes = limit_bytes
        self.shrink(limit_bytes)
        self._in_background(lambda: self.arena.trim(max(0, limit_bytes - self.arena.used_bytes)))

    def shrink(self, max_bytes: int | None = None, apart: Stored | None = None) -> None:
        """Evicts sequences, but not `apart`, until all that remain, `apart` included, take at most `max_bytes`, by
        default the limit.

        Those that a request waits for leave last; before them those that are pinned; before them those that are
        not on disk yet. Those that are being written stay.
        """
        most = self.limit_bytes if max_bytes is None else max_bytes
        if self.used_bytes <= most:
            return
        now, fetched_after = self._clock(), time.monotonic() - FETCHED_SECONDS

        def place(stored: Stored) -> tuple[bool, bool, bool, bool, float]:
            is_pinned, keeps, worth = removal_key(stored.sequence, self._policy, now)
            is_expected = stored.sequence.wanted or (stored.fetched_at or 0.0) > fetched_after
            return is_expected, is_pinned, stored.file is None, keeps, worth

        inside = [
            stored
            for stored in self._inside
            if not stored.being_written and stored is not apart and stored not in self._in_transit
        ]
        for stored in sorted(inside, key=place):
            self._evict(stored)
            if self.used_bytes <= most:
                return

    def end_transit(self) -> None:
        """Removes sequences that have passed through host memory."""
        for stored in list(self._in_transit):
            if stored.region is None or stored.being_written:
                continue
            waits = stored.fetched_at is not None and time.monotonic() - stored.fetched_at < FETCHED_SECONDS
            if not waits and not stored.write_queued:  # it is on disk, or has no chance to get there
                self._evict(stored)

    def prepare(self, newest: Stored) -> None:
        """Evicts ahead and prepares memory in the background, so that the next save or fetch only copies.

        The next sequence is expected to be as large as `newest`.
        """
        size = rounded(newest.sizes.all_bytes)
        if SPARE_SHARE * size > self.limit_bytes:
            return
        self.shrink(self.limit_bytes - size, apart=newest)
        max_spare = min(2 * size, self.limit_bytes - self.used_bytes)
        self._jobs.add(lambda: self.arena.prepare(size, max_spare))

    def _make_room(self, size: int, stored: Stored, *, may_pass_through: bool) -> bool:
        """Evicts others so that `size` bytes fit. Returns whether they fit, or may exceed the limit for a while.

        A sequence that does not fit, because it is larger than the limit or others are being written, can pass through
        host memory to or from the disk if it `may_pass_through`. It is not kept in host memory.
        """
        if size <= self.limit_bytes:
            self.shrink(self.limit_bytes - size)
            if self.used_bytes + size <= self.limit_bytes:
                return True
        passing = sum([item.sizes.all_bytes for item in self._in_transit])
        if not may_pass_through or (self._in_transit and passing + size > TRANSIT_BYTES):
            return False
        self._in_transit.add(stored)
        return True

    def _in_background(self, job: Callable[[], None]) -> None:
        if self.is_closing:
            job()
        else:
            self._jobs.add(job)
