"""Decides when the sequences of an engine are stored, and carries out transfers. Runs on the engine thread."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from inference.protocol import KvTier
from inference.worker.engine.scheduler import Scheduler
from inference.worker.engine_stats import EngineCounters
from inference.worker.kv.sequence_store import SequenceStore
from inference.worker.steps import Fetch, Load, Operation, Store
from inference.worker_link import KvCounts

IDLE_SECONDS = 0.2
"""After so long without a step retained sequences are stored. The next prompt of an agent comes earlier."""

AHEAD_SHARE = 0.02
"""The largest share of the time that is spent with storing sequences while others run."""

LAST = 8
"""The expected time of a transfer is that of the longest one of this number of last transfers."""

SHORTEST_SECONDS = 0.001
"""The least expected time of a transfer."""

LOOK_SECONDS = 0.05
"""Interval of the search for sequences to store while others run."""


class SequenceTransfers:
    """Moves sequences between the slots of `scheduler` and `store`; without a store nothing is moved."""

    def __init__(
        self,
        scheduler: Scheduler,
        store: SequenceStore | None,
        counters: EngineCounters,
        clock: Callable[[], float],
    ) -> None:
        self.store = store
        self._scheduler = scheduler
        self._counters = counters
        self._clock = clock
        self._idle_since: float | None = clock()
        self._again_at = -math.inf
        self._load_seconds: dict[int, float] = {}
        self._last_seconds: deque[float] = deque(maxlen=LAST)

    # --- when ---------------------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Applies the results of background work. Called before each step."""
        if self.store is not None:
            self.store.run()

    def ahead(self, operations: Sequence[Operation]) -> None:
        """Stores a retained sequence while others run, if slots are scarce and no job waits for one.

        `operations` were performed before the next batch. If they store or load a sequence, nothing is stored here.
        """
        self._idle_since = None
        if self.store is None or (began := self._clock()) < self._again_at:
            return
        if any(isinstance(operation, Store | Load) for operation in operations):
            return
        scheduler = self._scheduler
        is_scarce = scheduler.slots.occupied >= scheduler.limits.threshold and not scheduler.queued
        seconds = self._clock() - began if is_scarce and self.store_one() else 0.0
        self._again_at = began + max(LOOK_SECONDS, seconds / AHEAD_SHARE)

    def idle(self) -> float | None:
        """Stores a retained sequence if the engine has been idle for a while.

        Returns the seconds until it is to be called again, None if nothing is left that can be stored.
        """
        if self.store is None:
            return None
        now = self._clock()
        self._idle_since = now if self._idle_since is None else self._idle_since
        if (wait := self._idle_since + IDLE_SECONDS - now) > 0:
            return wait
        return 0.0 if self.store_one() else None

    def store_all(self, seconds: float) -> None:
        """Stores the retained sequences, for at most `seconds` and one transfer more."""
        deadline = self._clock() + seconds
        while self._clock() < deadline and self.store_one():
            pass

    def store_one(self) -> bool:
        """Stores a retained sequence; returns False if all are stored, or none can be stored at present."""
        if self.store is None or not self.store.enabled or (operation := self._scheduler.slots.store_one()) is None:
            return False
        self.store_sequence(operation)
        return True

    def number_in(self, seconds: float) -> int:
        """How many transfers are expected to take at most `seconds`; at least 1."""
        return max(1, int(seconds / max(SHORTEST_SECONDS, max(self._last_seconds, default=math.inf))))

    # --- transfers ----------------------------------------------------------------------------------------------------
    def store_sequence(self, operation: Store) -> None:
        """Copies a slot to the store."""
        assert self.store is not None
        sequence = operation.sequence
        rate = self._counters.prefill.tokens_per_second
        sequence.compute_seconds = len(sequence.tokens) / rate if rate else 0.0
        sequence.used_at = time.time()
        if (hint := sequence.hint) is not None and hint.kind == "pin":
            sequence.pinned_until = sequence.used_at + hint.seconds
        began = self._clock()
        self.store.add(operation.slot, sequence, operation.checkpoints)
        self._last_seconds.append(self._clock() - began)

    def load(self, operation: Load) -> bool:
        """Copies a stored sequence to its slot; returns False, with an empty slot, if that fails."""
        assert self.store is not None
        sequence = operation.sequence
        fetch_seconds = sequence.fetch_seconds if sequence.fetched else 0.0
        began = self._clock()
        is_loaded = self.store.load(operation.slot, sequence, operation.checkpoints)
        seconds = self._clock() - began
        self._last_seconds.append(seconds)
        self._load_seconds[operation.slot] = fetch_seconds + seconds
        return is_loaded

    def fetch(self, operation: Fetch) -> None:
        """Begins to read a stored sequence from disk."""
        assert self.store is not None
        self.store.fetch(operation.sequence)

    def seconds_of(self, slot: int, tier: KvTier) -> float:
        """How long it took to restore the tokens of `slot` from `tier`."""
        return 0.0 if tier == "hot" else self._load_seconds.get(slot, 0.0)

    def counts(self) -> KvCounts:
        """Numbers for the heartbeat."""
        hits = self._scheduler.slots.hits
        return replace(
            KvCounts() if self.store is None else self.store.counts(),
            hot_sequences=len(self._scheduler.slots.held()),
            hits_hot=hits.hot,
            hits_ram=hits.ram,
            hits_disk=hits.disk,
            misses=hits.misses,
        )
