"""What is known of a sequence outside the context."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from headgate.shared.kv_hint import KvHint
from inference.protocol import Priority


def sequence_id(tokens: array[int], tenant: str) -> str:
    """A hash that identifies the sequence of a model in all tiers, 32 hexadecimal digits."""
    return hashlib.blake2b(tenant.encode() + b"\0" + tokens.tobytes(), digest_size=16).hexdigest()


@dataclass(slots=True, eq=False)
class StoredSequence:
    """A sequence in host memory, on disk, or both. Times are Unix seconds.

    `checkpoints` are pairs of a position and the first position that the sliding-window layers had there, ascending.
    `compute_seconds`: the estimated time to compute the tokens again. `count_bytes`: tokens, state and checkpoints.
    `hits`: how often it was loaded. `fetching`: it is being read from disk to host memory. `fetched`: it was read, and
    has not been loaded since. `hint`: what the request wants to happen to it.
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
    fetched: bool = False
    hint: KvHint | None = None
