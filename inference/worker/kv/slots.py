"""Decides which slot holds which tokens, which prefix a prompt reuses, and which prefix is dropped first.

A slot is one llama.cpp sequence id. It retains its tokens when its job ends, so that a later prompt of the same tenant
with the same beginning need not compute them. Each slot has its own cells, so a prefix of another slot is copied.

Recurrent layers keep only the newest state, and sliding-window layers only the newest tokens. A slot of such a model
goes back to an earlier position by a checkpoint.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from inference.worker.kv.catalog import common_prefix
from inference.worker.kv.checkpoints import least_useful
from inference.worker.kv.saved_sequences import Retained
from inference.worker.steps import Checkpoint, Copy, Limits, Operation, Remove, Restore, Save

MOST_MOVED = 64
"""Sequences are moved to neighboring slots only if a copy costs at most this many computed tokens. A gap between
sequences costs a step about as much as one or two tokens, and few answers have enough steps to repay more."""


@dataclass(slots=True, eq=False)
class Slot:
    """A sequence: the first `computed` of `tokens` are in KV cells. A taken slot shares the array of its job.

    `checkpoints` are in the order of their positions. `oldest` and `freed` bound which tokens the window layers have:
    the position from which on they were complete when the slot was filled, and the cells that were freed since.
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
    arriving: bool = False
    """Whether it is a copy whose window cells llama.cpp moves with the next batch; until then they are not usable."""


class Reuse(NamedTuple):
    """The first `tokens` tokens of `slot` can be reused, after going back to `checkpoint` if there is one."""

    slot: Slot | None
    tokens: int = 0
    checkpoint: Checkpoint | None = None


class Slots:
    """All slots, and the memory operations at the beginning of the next step."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._slots = [Slot(number) for number in range(limits.slots)]
        self._operations: list[Operation] = []
        self._clock = 0

    @property
    def used(self) -> int:
        """KV cells in use, including retained prefixes."""
        return sum([slot.computed for slot in self._slots])

    @property
    def pending(self) -> bool:
        """Whether there are operations for the next step."""
        return bool(self._operations)

    @property
    def cells(self) -> tuple[int, int]:
        """Cells in use: of taken slots, and of free ones."""
        taken = sum(slot.computed for slot in self._slots if slot.taken)
        return taken, sum(slot.computed for slot in self._slots) - taken

    def operations(self) -> tuple[Operation, ...]:
        """Returns and clears the memory operations to run before the next batch."""
        operations, self._operations = self._operations, []
        return tuple(operations)

    def take(self, tokens: array[int], tenant: str, reusable: int) -> Slot:
        """Assigns a free slot (there must be one) to `tokens`. Up to `reusable` tokens may come from a shared prefix.

        A copy costs as much as moving all cells of a sequence. Short prefixes are therefore not copied and displace no
        retained prefix, and short retained tails are dropped.
        """
        self._clock += 1
        best, shared, checkpoint = self._longest_prefix(tokens, tenant, reusable)
        free = [slot for slot in self._slots if not slot.taken]
        target = min(free, key=self._dispensable)
        pays = shared >= self._limits.copied
        if best is not None and not best.taken:
            loses_little = best.computed - shared < self._limits.copied
            stays = checkpoint is not None and self._limits.window > 0  # not into a copy, which arrives later
            if loses_little or stays or (target.computed and pays):
                target = best  # a prefix is lost anyway: drop the tail of this one
        moves = False
        if checkpoint is None and (near := self._nearer(target, free)) is not None:
            moves = target is best and pays
            best = self._clear(near, best, free)
            target = near
        if target is best:
            self._go_back(target, shared, checkpoint)
        else:
            self._forget(target, 0)
            if best is not None and pays:
                self._copy(best, target, shared)
                if checkpoint is not None:
                    self._restore(target, checkpoint)
                if moves:
                    self._forget(best, 0)
        target.tokens, target.tenant, target.taken = tokens, tenant, True
        return target

    def arrived(self) -> None:
        """Records that a batch was computed, so that llama.cpp has copied what was to be copied."""
        for slot in self._slots:
            slot.arriving = False

    def release(self, slot: Slot) -> None:
        """Frees the slot and retains its tokens."""
        self._clock += 1
        slot.tokens, slot.taken, slot.used_at = slot.tokens[: slot.computed], False, self._clock

    def empty(self, slot: Slot) -> None:
        """Frees the slot and drops its tokens."""
        self._forget(slot, 0)
        slot.taken = False

    def invalidate(self, slot: Slot) -> None:
        """Removes all tokens of a sequence whose state in llama.cpp is unknown."""
        slot.computed = 0
        self._operations.append(Remove(slot.number, 0))
        self._emptied(slot)

    def save(self, slot: Slot) -> None:
        """Takes a checkpoint of the present state, unless an earlier one is near. Replaces the least useful one."""
        kept = slot.checkpoints
        last = kept[-1].position if kept else 0
        if not self._limits.checkpoints or slot.arriving or slot.computed < last + self._limits.checkpoint_gap:
            return
        if len(kept) >= self._limits.checkpoints:
            del kept[least_useful([item.position for item in kept], slot.computed)]
        oldest = max(self._first_position(slot), slot.computed - self._limits.window) if self._limits.window else 0
        kept.append(Checkpoint(slot.computed, oldest))
        self._operations.append(Save(slot.number, kept[-1]))

    def _dispensable(self, slot: Slot) -> tuple[bool, int, bool, int]:
        """Sort key; the smallest slot is assigned first: an empty one, else the least recently used one.

        Among empty slots a neighbor of a taken slot comes first, because llama.cpp computes neighbors together.
        """
        held = slot.computed > 0
        return (held, slot.used_at if held else 0, not self._neighbors(slot), slot.number)

    def _neighbors(self, slot: Slot) -> int:
        """Number of taken slots among its two neighbors."""
        beside = self._slots[max(0, slot.number - 1) : slot.number + 2]
        return sum([other.taken for other in beside if other is not slot])

    def _nearer(self, target: Slot, free: Sequence[Slot]) -> Slot | None:
        """A free slot with more taken neighbors than `target`, or None if there is none or a move costs too much."""
        if not self._limits.can_trim or self._limits.copied > MOST_MOVED:
            return None
        near = min(free, key=lambda slot: (-self._neighbors(slot), self._dispensable(slot)))
        return near if self._neighbors(near) > self._neighbors(target) else None

    def _clear(self, slot: Slot, best: Slot | None, free: Sequence[Slot]) -> Slot | None:
        """Empties `slot`; its tokens move to an empty or less recently used slot other than `best`, or are dropped.

        Returns the slot that now holds the tokens of `best`.
        """
        shelters = [other for other in free if other is not slot and other is not best]
        shelter = min(shelters, key=self._dispensable, default=slot)
        if slot.computed < self._limits.copied or self._dispensable(shelter) >= self._dispensable(slot):
            self._forget(slot, 0)
            return None if slot is best else best
        self._forget(shelter, 0)
        self._copy(slot, shelter, slot.computed)
        shelter.tokens, shelter.tenant, shelter.used_at = slot.tokens, slot.tenant, slot.used_at
        self._forget(slot, 0)
        return shelter if slot is best else best

    def retained(self) -> list[Retained]:
        """The tokens in free slots."""
        return [
            Retained(slot.number, slot.tokens[: slot.computed], slot.tenant, slot.used_at)
            for slot in self._slots
            if not slot.taken and slot.computed
        ]

    def adopt(self, held: Retained) -> None:
        """Registers a sequence that the context already holds in a free slot, with the newest window of its tokens."""
        self._clock += 1
        slot = self._slots[held.slot]
        slot.tokens, slot.computed, slot.tenant, slot.used_at = held.tokens, len(held.tokens), held.tenant, self._clock
        self._holds_only(slot, max(0, slot.computed - self._limits.window))

    def forget(self) -> None:
        """Drops the tokens in free slots."""
        for slot in self._slots:
            if not slot.taken:
                self._forget(slot, 0)

    # --- positions of a slot ------------------------------------------------------------------------------------------
    def _first_position(self, slot: Slot) -> int:
        """The position from which on the window layers have all tokens; cells are overwritten oldest first."""
        if not self._limits.window:
            return 0
        return max(slot.oldest, slot.computed + slot.freed - self._limits.window_cells)

    def _holds_only(self, slot: Slot, oldest: int) -> None:
        """Records that the window layers have the tokens from `oldest` on, and that their next token may overwrite."""
        if self._limits.window:
            slot.oldest, slot.freed = oldest, self._limits.window_cells - (slot.computed - oldest)

    def _emptied(self, slot: Slot) -> None:
        slot.tokens = array("i")
        slot.checkpoints, slot.oldest, slot.freed, slot.arriving = [], 0, 0, False

    def _forget(self, slot: Slot, start: int) -> None:
        if slot.computed > start:
            slot.freed += slot.computed - start
            slot.computed = start
            self._operations.append(Remove(slot.number, start))
            slot.checkpoints = [item for item in slot.checkpoints if item.position <= start]
        if start == 0:
            self._emptied(slot)

    def _restore(self, slot: Slot, checkpoint: Checkpoint) -> None:
        slot.computed = checkpoint.position
        slot.checkpoints = [item for item in slot.checkpoints if item.position <= checkpoint.position]
        self._holds_only(slot, checkpoint.oldest)
        self._operations.append(Restore(slot.number, checkpoint))

    def _go_back(self, slot: Slot, count: int, checkpoint: Checkpoint | None) -> None:
        """Makes `slot` hold its first `count` tokens. They get a checkpoint, because later prompts may depart here."""
        if checkpoint is not None:
            self._restore(slot, checkpoint)
        else:
            self._forget(slot, count)
            self.save(slot)

    def _copy(self, source: Slot, target: Slot, count: int) -> None:
        self._operations.append(Copy(source.number, target.number, count))
        target.computed = count
        target.arriving = self._limits.window > 0
        target.oldest, target.freed = source.oldest, source.freed + source.computed - count
        target.checkpoints = [item for item in source.checkpoints if item.position <= count]

    def _longest_prefix(self, tokens: array[int], tenant: str, reusable: int) -> Reuse:
        best = Reuse(None)
        for slot in self._slots:
            if slot.tenant != tenant or slot.computed < max(1, best.tokens):
                continue
            found = self._resumable(slot, common_prefix(slot.tokens, tokens, min(slot.computed, reusable)))
            spares_copy = best.slot is not None and best.slot.taken and not slot.taken
            if found.slot is not None and found.tokens >= best.tokens + (not spares_copy):
                best = found
        return best

    def _resumable(self, slot: Slot, shared: int) -> Reuse:
        """The most of the first `shared` tokens of `slot` from which a job can go on."""
        has_window = self._first_position(slot) <= max(0, shared - self._limits.window)
        if (self._limits.can_trim and has_window) or (shared == slot.computed and not slot.taken):
            return Reuse(slot, shared)
        if slot.arriving or (slot.taken and self._limits.window):
            return Reuse(None)
        saved = [item for item in slot.checkpoints if item.position <= shared and item.state is not None]
        return Reuse(slot, saved[-1].position, saved[-1]) if saved else Reuse(None)
