"""What operators see of the sequences of a model, and what they do with them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class SequenceRow:
    """A sequence without its text.

    `id`: a hash of its tokens and its tenant in hexadecimal, the same in all tiers. `tiers`: where it is, of `hot`,
    `ram` and `disk`. `bytes`: what it takes in one tier, 0 in a slot of an engine without a store. `idle_seconds`:
    since its last use. `hits`: how often it was restored. `pinned_until`: Unix time; None without a pin.
    """

    id: str
    tiers: tuple[str, ...]
    tokens: int
    bytes: int
    tenant: str
    idle_seconds: float
    hits: int = 0
    pinned_until: float | None = None


class SequenceControl(Protocol):
    """Runs the requests of operators on the engine thread between two steps. Thread-safe.

    After the engine has ended, a future gets the reason as its error. The caller may cancel a future that takes too
    long.
    """

    def kv_sequences(self) -> Future[Sequence[SequenceRow]]:
        """Sequences in slots, in host memory and on disk, the last used first."""
        ...

    def clear_kv(self, tenant: str | None) -> Future[int]:
        """Removes stored sequences, pinned ones too, and those in slots that no request uses.

        The result is their number. `tenant`: only those of this tenant.
        """
        ...

    def pin_kv(self, ids: Collection[str], seconds: float) -> Future[int]:
        """Pins sequences for `seconds` from now; 0 ends their pins. The result is the number of sequences found."""
        ...
