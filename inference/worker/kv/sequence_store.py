"""The interface of the store that moves sequences between the context, host memory and disk."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from inference.worker.kv.catalog import Catalog
from inference.worker.steps import Checkpoint, StoredSequence
from inference.worker_link import KvCounts


class SequenceStore(Protocol):
    """Moves sequences between the context, host memory and disk. All methods are called on the engine thread.

    `add` and `load` copy at once; the rest of the work is done in the background.
    """

    @property
    def catalog(self) -> Catalog:
        """The sequences that can be restored."""
        ...

    @property
    def enabled(self) -> bool:
        """Whether sequences can be added at present."""
        ...

    def add(self, slot: int, sequence: StoredSequence, checkpoints: Sequence[Checkpoint]) -> bool:
        """Copies the state of `slot` to host memory and adds `sequence` to the catalog; False if it is not stored.

        `checkpoints` have the states for `sequence.checkpoints`, which keeps only the positions with a state.
        """
        ...

    def load(self, slot: int, sequence: StoredSequence, checkpoints: Sequence[Checkpoint]) -> bool:
        """Restores a sequence that is in host memory into the empty `slot` and fills the states of `checkpoints`.

        If that fails, the slot is empty and the result is False. A sequence whose state is rejected is removed from
        the catalog; one that has left host memory may still be on disk.
        """
        ...

    def fetch(self, sequence: StoredSequence) -> None:
        """Begins to read a sequence from disk. It is `fetching` until it is in host memory, was removed, or took too
        long."""
        ...

    def run(self) -> None:
        """Applies the results of background work. Called before each step."""
        ...

    def pin(self, sequences: Collection[StoredSequence], until: float) -> None:
        """Pins `sequences` until the Unix time `until`. Sequences without a pin are removed before pinned ones."""
        ...

    def drop(self, sequences: Collection[StoredSequence]) -> None:
        """Removes `sequences` from the catalog, from host memory and from disk."""
        ...

    def limit(self, ram_bytes: int) -> None:
        """Sets the limit of host memory; sequences beyond it are removed, or stay only on disk if they are there."""
        ...

    def slot_bytes(self, slot: int) -> int:
        """Bytes of the state of `slot`."""
        ...

    def counts(self) -> KvCounts:
        """Numbers for the heartbeat."""
        ...
