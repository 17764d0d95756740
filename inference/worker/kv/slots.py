"""Decides which slot holds which tokens, which prefix a prompt reuses, and which prefix is dropped first.

A slot is one llama.cpp sequence id. It retains its tokens when its job ends, so that a later prompt of the same tenant
with the same beginning need not compute them. Each slot has its own cells, so a prefix of another slot is copied.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from inference.worker.kv.saved_sequences import Retained
from inference.worker.steps import Copy, Limits, Remove

MOST_MOVED = 64
"""Sequences are moved to neighboring slots only if a copy costs at most this many computed tokens. A gap between
sequences costs a step about as much as one or two tokens, and few answers have enough steps to repay more."""


@dataclass(slots=True, eq=False)
class Slot:
    """A sequence: the first `computed` of `tokens` are in KV cells. A taken slot shares the array of its job."""

    number: int
    tokens: array[int] = field(default_factory=lambda: array("i"))
    computed: int = 0
    tenant: str = ""
    taken: bool = False
    used_at: int = 0


class Slots:
    """All slots, and the memory operations at the beginning of the next step."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._slots = [Slot(number) for number in range(limits.slots)]
        self._operations: list[Remove | Copy] = []
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

    def operations(self) -> tuple[Remove | Copy, ...]:
        """Returns and clears the memory operations to run before the next batch."""
        operations, self._operations = self._operations, []
        return tuple(operations)

    def take(self, tokens: array[int], tenant: str, reusable: int) -> Slot:
        """Assigns a free slot (there must be one) to `tokens`. Up to `reusable` tokens may come from a shared prefix.

        A copy costs as much as moving all cells of a sequence. Short prefixes are therefore not copied and displace no
        retained prefix, and short retained tails are dropped.
        """
        self._clock += 1
        best, shared = self._longest_prefix(tokens, tenant, reusable)
        free = [slot for slot in self._slots if not slot.taken]
        target = min(free, key=self._dispensable)
        pays = shared >= self._limits.copied
        if best is not None and not best.taken:
            loses_little = best.computed - shared < self._limits.copied
            if loses_little or (target.computed and pays):  # a prefix is lost anyway: drop the tail of this one
                target = best
        moves = False
        if (near := self._nearer(target, free)) is not None:
            moves = target is best and pays
            best = self._clear(near, best, free)
            target = near
        if target is best:
            self._forget(target, shared)
        else:
            self._forget(target, 0)
            if best is not None and pays:
                self._operations.append(Copy(best.number, target.number, shared))
                target.computed = shared
                if moves:
                    self._forget(best, 0)
        target.tokens, target.tenant, target.taken = tokens, tenant, True
        return target

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
        self._operations.append(Copy(slot.number, shelter.number, slot.computed))
        shelter.tokens, shelter.computed, shelter.tenant = slot.tokens, slot.computed, slot.tenant
        shelter.used_at = slot.used_at
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
        """Registers a sequence that the context already holds in a free slot."""
        self._clock += 1
        slot = self._slots[held.slot]
        slot.tokens, slot.computed, slot.tenant, slot.used_at = held.tokens, len(held.tokens), held.tenant, self._clock

    def forget(self) -> None:
        """Drops the tokens in free slots."""
        for slot in self._slots:
            if not slot.taken:
                self._forget(slot, 0)

    def _forget(self, slot: Slot, start: int) -> None:
        if slot.computed > start:
            slot.computed = start
            self._operations.append(Remove(slot.number, start))
        if start == 0:
            slot.tokens = array("i")

    def _longest_prefix(self, tokens: array[int], tenant: str, reusable: int) -> tuple[Slot | None, int]:
        best: Slot | None = None
        longest = 0
        for slot in self._slots:
            if slot.tenant != tenant or slot.computed < max(1, longest):
                continue
            shared = common_prefix(slot.tokens, tokens, min(slot.computed, reusable))
            whole = shared == slot.computed and not slot.taken
            spares_copy = best is not None and best.taken and not slot.taken
            if shared >= longest + (not spares_copy) and (self._limits.can_trim or whole):
                best, longest = slot, shared
        return best, longest


def common_prefix(left: Sequence[int], right: Sequence[int], limit: int) -> int:
    """Length of the longest common prefix of two token lists, at most `limit`.

    A binary search that compares slices in C instead of single tokens.
    """
    low, high = 0, max(0, min(len(left), len(right), limit))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
