"""What is known of a sequence outside the context."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from inference.protocol import Priority


@dataclass(slots=True, eq=False)
class StoredSequence:
    """A sequence in host memory, on disk, or both. Times are Unix seconds.

    `checkpoints` are pairs of a position and the first position that the sliding-window layers had there, ascending.
    `compute_seconds`: the estimated time to compute the tokens again. `count_bytes`: tokens, state and checkpoints.
    `hits`: how often it was restored. `fetching`: it is being read from disk to host memory.
    """

    tokens: array[int]
    tenant: str
    checkpoints: Sequence[tuple[int, int]] = ()
    priority: Priority = Priority.NORMAL
    used_at: float = 0.0
    pinned_until: float = 0.0
    compute_seconds: float = 0.0
    count_bytes: int = 0
    hits: int = 0
    in_ram: bool = False
    on_disk: bool = False
    fetching: bool = False
