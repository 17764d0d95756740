"""Decides which slot holds which tokens, what a prompt reuses and what is forgotten first; never who runs.

A slot is one llama.cpp sequence id. When its job ends it keeps the tokens it holds, so that a later prompt of the same
tenant that begins alike skips them. Every slot has cells of its own: what one holds takes room from no other, and
sharing a beginning means copying it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from inference.worker.kv.saved_sequences import Retained
from inference.worker.steps import Copy, Limits, Remove

MOST_MOVED = 64
"""Where a copy is worth more computed tokens than these, nothing is moved so that sequences stand side by side: a gap
between them costs a step about as much as one or two tokens, and few answers have so many steps."""


@dataclass(slots=True, eq=False)
class Slot:
    """The first `computed` of `tokens` are in KV cells. The list is the job's own while the slot is taken, so that a
    token is stored once.
    """

    number: int
    tokens: array[int] = field(default_factory=lambda: array("i"))
    computed: int = 0
    tenant: str = ""
    taken: bool = False
    used_at: int = 0


class Slots:
    """All slots and the memory operations that the next step has to begin with."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._slots = [Slot(number) for number in range(limits.slots)]
        self._operations: list[Remove | Copy] = []
        self._clock = 0

    @property
    def used(self) -> int:
        """KV cells that slots hold, retained prefixes included."""
        return sum([slot.computed for slot in self._slots])

    @property
    def pending(self) -> bool:
        """Whether operations wait for a step."""
        return bool(self._operations)

    @property
    def cells(self) -> tuple[int, int]:
        """Cells that hold something: of taken slots, and of free ones."""
        taken = sum(slot.computed for slot in self._slots if slot.taken)
        return taken, sum(slot.computed for slot in self._slots) - taken

    def operations(self) -> tuple[Remove | Copy, ...]:
        """What llama.cpp has to do before the next batch; handed out once."""
        operations, self._operations = self._operations, []
        return tuple(operations)

    def take(self, tokens: array[int], tenant: str, reusable: int) -> Slot:
        """A free slot (there must be one) for `tokens`, of which up to `reusable` may come from what a slot of the same
        tenant holds; those are computed already. Copying one slot to another costs as much as all cells of a sequence,
        so short beginnings are not copied, nothing that was kept is lost for them, and short tails are not spared.
        """
        self._clock += 1
        best, shared = self._longest_prefix(tokens, tenant, reusable)
        free = [slot for slot in self._slots if not slot.taken]
        target = min(free, key=self._dispensable)
        pays = shared >= self._limits.copied
        if best is not None and not best.taken:
            loses_little = best.computed - shared < self._limits.copied
            if loses_little or (target.computed and pays):  # some prefix is lost anyway: then this one's tail
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
        """Its job left; what it holds is retained."""
        self._clock += 1
        slot.tokens, slot.taken, slot.used_at = slot.tokens[: slot.computed], False, self._clock

    def empty(self, slot: Slot) -> None:
        """Its job left, and so does what it holds."""
        self._forget(slot, 0)
        slot.taken = False

    def invalidate(self, slot: Slot) -> None:
        """llama.cpp may hold anything of this sequence: all of it is removed, whatever was reported."""
        slot.computed = 0
        self._operations.append(Remove(slot.number, 0))

    def _dispensable(self, slot: Slot) -> tuple[bool, int, bool, int]:
        """Smallest for the slot to give away first: an empty one beside one that is taken, because llama.cpp computes
        neighbours together, or else the one that was used longest ago.
        """
        held = slot.computed > 0
        return (held, slot.used_at if held else 0, not self._neighbors(slot), slot.number)

    def _neighbors(self, slot: Slot) -> int:
        """How many of the two beside it are taken."""
        beside = self._slots[max(0, slot.number - 1) : slot.number + 2]
        return sum([other.taken for other in beside if other is not slot])

    def _nearer(self, target: Slot, free: Sequence[Slot]) -> Slot | None:
        """A free slot with more neighbors that run than `target` has, where a move costs less than it brings."""
        if not self._limits.can_trim or self._limits.copied > MOST_MOVED:
            return None
        near = min(free, key=lambda slot: (-self._neighbors(slot), self._dispensable(slot)))
        return near if self._neighbors(near) > self._neighbors(target) else None

    def _clear(self, slot: Slot, best: Slot | None, free: Sequence[Slot]) -> Slot | None:
        """Empties `slot`. What it holds goes where something is that was used longer ago, or nothing, other than in
        `best`; returns where what `best` holds is now.
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
        """What the free slots hold, by the count of this side."""
        return [
            Retained(slot.number, slot.tokens[: slot.computed], slot.tenant, slot.used_at)
            for slot in self._slots
            if not slot.taken and slot.computed
        ]

    def adopt(self, held: Retained) -> None:
        """An empty free slot holds this now: llama.cpp was given it."""
        self._clock += 1
        slot = self._slots[held.slot]
        slot.tokens, slot.computed, slot.tenant, slot.used_at = held.tokens, len(held.tokens), held.tenant, self._clock

    def forget(self) -> None:
        """Drops what is retained in free slots."""
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
    """Length of the longest common beginning of two token lists, at most `limit`.

    Compares halves of slices, which C does, instead of token by token.
    """
    low, high = 0, max(0, min(len(left), len(right), limit))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
