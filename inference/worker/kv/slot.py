"""A slot and the sequence that it holds."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from headgate.shared.kv_hint import KvHint
from inference.protocol import KvTier, Priority
from inference.worker.steps import Checkpoint, StoredSequence


@dataclass(slots=True)
class Hits:
    """How many prompts were continued from a slot, from host memory, from disk, or not at all."""

    hot: int = 0
    ram: int = 0
    disk: int = 0
    misses: int = 0

    def count(self, reused: int, loaded: StoredSequence | None) -> KvTier | None:
        """A prompt reuses `reused` tokens, of `loaded` or of a slot. Returns where they were."""
        if reused == 0:
            self.misses += 1
            return None
        if loaded is None:
            self.hot += 1
            return "hot"
        if loaded.fetched:
            self.disk += 1
            return "disk"
        self.ram += 1
        return "ram"


@dataclass(slots=True, eq=False)
class Slot:
    """A sequence: the first `computed` of `tokens` are in KV cells. A taken slot shares the array of its job.

    `checkpoints` are in the order of their positions. `oldest` and `freed` bound which tokens the window layers have:
    the position from which on they were complete when the slot was filled, and the cells that were freed since.
    `stored`: the stored sequence that holds its first tokens, or None. `tried`: when storing the slot
    was last tried; `used_at` and `tried` count uses of slots. `released_at`: the caller's time at the end of the last
    job. `restored`: where the tokens were that its present job did not compute. `labels`: as of a stored sequence.
    """

    number: int
    tokens: array[int] = field(default_factory=lambda: array("i"))
    computed: int = 0
    tenant: str = ""
    taken: bool = False
    used_at: int = 0
    checkpoints: list[Checkpoint] = field(default_factory=list)
    oldest: int = 0
    freed: int = 0
    stored: StoredSequence | None = None
    priority: Priority = Priority.NORMAL
    hint: KvHint | None = None
    released_at: float = 0.0
    tried: int = -1
    restored: KvTier | None = None
    labels: Mapping[str, int] = field(default_factory=dict)

    @property
    def unstored(self) -> int:
        """Tokens that are lost with the slot, 0 if there is a copy of all of them."""
        copy = self.stored
        has_copy = copy is not None and len(copy.tokens) == self.computed and (copy.in_ram or copy.on_disk)
        return 0 if has_copy else self.computed


class Reuse(NamedTuple):
    """The first `tokens` tokens of `slot` can be reused, after going back to `checkpoint` if there is one.

    `slot` is None for tokens of a stored sequence, and without any tokens.
    """

    slot: Slot | None
    tokens: int = 0
    checkpoint: Checkpoint | None = None
