"""Decides which slot holds which tokens, which prefix a prompt reuses, and which prefix is dropped first.

A slot is one llama.cpp sequence id. It retains its tokens when its job ends, so that a later prompt of the same tenant
with the same beginning need not compute them. A prefix of another slot is copied. Each slot has its own KV cells, or
all share `Limits.cells` cells, where the cells of a common prefix count once per slot.

Recurrent layers keep only the newest state, and sliding-window layers only the newest tokens. A slot of such a model
goes back to an earlier position by a checkpoint.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from inference.worker.kv.catalog import Catalog, common_prefix
from inference.worker.kv.checkpoints import least_useful
from inference.worker.kv.labels import Labels, with_labels
from inference.worker.kv.slot import Hits, Reuse, Slot
from inference.worker.steps import (
    Checkpoint,
    Copy,
    Fetch,
    Limits,
    Load,
    Operation,
    Remove,
    RestoreCheckpoint,
    SaveCheckpoint,
    Store,
    StoredSequence,
)

MAX_COPY_COST_TOKENS = 64
"""Sequences are moved to neighboring slots only if a copy costs no more than computing this many tokens. A gap between
sequences costs a step about as much as one or two tokens, and few answers have enough steps to repay more."""

NOT_LOADED = "not loaded"
"""Stands for the state of a checkpoint until its sequence is loaded."""


class _Choice(NamedTuple):
    """How a prompt gets a slot.

    `target` first moves its tokens to `relocation`, if there is one. Then `stored` is loaded into it, or `reuse` is
    copied to it or continued in it. `moves`: the slot of `reuse` is emptied after the copy.
    """

    target: Slot
    reuse: Reuse
    stored: StoredSequence | None = None
    relocation: Slot | None = None
    moves: bool = False


class Slots:
    """All slots, and the memory operations at the beginning of the next step.

    `catalog`: the sequences outside the context; None if there is no store for them. `begin` limits the sequences that
    a step stores and loads, because running sequences wait meanwhile.
    """

    def __init__(self, limits: Limits, catalog: Catalog | None = None) -> None:
        self._limits = limits
        self._catalog = catalog
        self._slots = [Slot(number) for number in range(limits.slots)]
        self._operations: list[Operation] = []
        self._clock = 0
        self._transfers = 1
        self._wanted: list[StoredSequence] = []
        # Slots that llama.cpp copies to and from with the next batch.
        self._arriving: set[int] = set()
        self._departing: set[int] = set()
        self.hits = Hits()
        self.labels = Labels() if catalog is None else catalog.labels
        """Of the sequences in slots and in the catalog."""

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

    def begin(self, transfers: int) -> None:
        """Begins a step that stores and loads at most `transfers` sequences."""
        self._transfers = transfers
        for sequence in self._wanted:
            sequence.wanted = False
        self._wanted.clear()

    def operations(self) -> tuple[Operation, ...]:
        """Returns and clears the memory operations to run before the next batch."""
        operations, self._operations = self._operations, []
        return tuple(operations)

    def take(self, tokens: array[int], tenant: str, reusable: int) -> Slot | None:
        """Assigns a free slot (there must be one) to `tokens`. Up to `reusable` tokens may come from a shared prefix.

        A copy costs as much as moving all cells of a sequence. Short prefixes are therefore not copied and displace no
        retained prefix, and short retained tails are dropped. Tokens that would be lost are stored first. Returns None
        if that, or loading, has to wait for the next step.
        """
        choice = self._choose(tokens, tenant, reusable)
        if choice.stored is not None:
            choice.stored.wanted = True  # until it is loaded, so that storing another sequence does not remove it
            self._wanted.append(choice.stored)
        for slot, kept in self._displaced(choice):
            if self._can_store_later(slot, kept) or not self._store_lost_tokens(slot, kept):
                return None
        target, (best, shared, checkpoint) = choice.target, choice.reuse
        if choice.stored is not None:
            if not self._clear_cells(target, len(choice.stored.tokens)) or self._transfers < 1:
                return None
            self._load(target, choice.stored)
        elif best is not target and shared >= self._limits.min_copied and not self._clear_cells(target, shared):
            return None
        self._clock += 1
        if choice.stored is not None:
            found = self._resumable(target, shared)
            self._go_back(target, found.tokens, found.checkpoint)
        elif target is best and choice.relocation is None:
            self._go_back(target, shared, checkpoint)
        else:
            if choice.relocation is not None:
                self._forget(choice.relocation, 0)
                self._copy(target, choice.relocation, target.computed)
                self._pass_on(target, choice.relocation)
                best = choice.relocation if best is target else best
            self._forget(target, 0)
            if best is not None and shared >= self._limits.min_copied:
                self._copy(best, target, shared)
                if checkpoint is not None:
                    self._restore(target, checkpoint)
                if choice.moves:
                    self._forget(best, 0)
        target.restored = self.hits.count(target.computed, choice.stored)
        target.tokens, target.tenant, target.taken = tokens, tenant, True
        return target

    def shed(self, slot: Slot | None = None) -> bool:
        """Empties the free `slot`, by default the least recently used one; False if that has to wait or none is left.

        Its tokens are stored first, if that is possible.
        """
        free = [held for held in self._slots if held.computed and not held.taken]
        slot = slot or min(free, key=self._dispensable, default=None)
        if slot is None:
            return False
        if not self._store_lost_tokens(slot, 0):
            return False
        self._forget(slot, 0)
        return True

    def _store_lost_tokens(self, slot: Slot, kept: int) -> bool:
        """Stores `slot` before it loses the tokens behind the first `kept`, if they are worth it; False if that has to
        wait.
        """
        if slot.tried == self._clock or not (self._is_worth_storing(slot, kept) and self._can_store(slot)):
            return True
        if self._transfers < 1:
            return False
        self._transfers -= 1
        self._operations.append(self._store_operation(slot))
        return True

    def _clear_cells(self, target: Slot, count: int) -> bool:
        """Makes shared cells free for `count` tokens in `target`; False if that has to wait."""
        while self._limits.cells and self._needed(target) + count > self._limits.cells:
            if not self.shed():
                return False
        return True

    def _needed(self, target: Slot) -> int:
        """The cells of all slots but `target`, and one for the next token of each job."""
        return self.used - target.computed + sum(slot.taken for slot in self._slots)

    def on_disk(self, tokens: array[int], tenant: str, reusable: int) -> StoredSequence | None:
        """A sequence that is on disk only and shares more with `tokens` than all slots and sequences in host memory."""
        found, shared = self._best_stored(tokens, tenant, reusable, in_ram=False)
        if found is None or found.in_ram:
            return None
        here = max(
            self._longest_prefix(tokens, tenant, reusable).tokens, self._best_stored(tokens, tenant, reusable)[1]
        )
        return found if shared >= here + self._limits.min_copied else None

    def fetch(self, sequence: StoredSequence) -> None:
        """Begins to read `sequence` from disk."""
        sequence.fetching = True
        self._operations.append(Fetch(sequence))

    def store_one(self) -> Store | None:
        """The operation that stores the least recently used free slot whose tokens are not stored, or None.

        Each sequence is tried once after its use.
        """
        slots = [
            slot
            for slot in self._slots
            if not slot.taken and slot.tried < slot.used_at and slot.unstored >= self._limits.min_copied
        ]
        slot = min(filter(self._can_store, slots), key=lambda slot: slot.used_at, default=None)
        return None if slot is None else self._store_operation(slot)

    def store(self, slot: Slot) -> Store | None:
        """The operation that stores a free `slot`, None if that is impossible."""
        return self._store_operation(slot) if self._can_store(slot) else None

    def computed(self, number: int) -> int:
        """The number of tokens in a slot."""
        return self._slots[number].computed

    def held(self) -> list[Slot]:
        """The slots with tokens."""
        return [slot for slot in self._slots if slot.computed]

    @property
    def occupied(self) -> float:
        """The share of slots that hold tokens."""
        return sum(slot.computed > 0 for slot in self._slots) / len(self._slots)

    def arrived(self) -> None:
        """Records that llama.cpp has made all copies, as it does at the beginning of each batch."""
        self._arriving.clear()
        self._departing.clear()

    def label(self, slot: Slot, labels: Sequence[str], tokens: int) -> None:
        """The first `tokens` tokens of a slot are a prompt with these labels."""
        self._relabel(slot, with_labels(slot.labels, labels, tokens))

    def _relabel(self, slot: Slot, labels: Mapping[str, int]) -> None:
        if labels or slot.labels:
            self.labels.add(labels)
            self.labels.remove(slot.labels)
            slot.labels = labels

    def release(self, slot: Slot, now: float) -> None:
        """Frees the slot at time `now` and retains its tokens."""
        self._clock += 1
        slot.released_at = now
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

    def save_checkpoint(self, slot: Slot) -> None:
        """Takes a checkpoint of the present state, unless an earlier one is near.

        A slot with the maximum number of checkpoints drops its least useful one.
        """
        kept = slot.checkpoints
        last = kept[-1].position if kept else 0
        if (
            not self._limits.checkpoints
            or self._has_no_window(slot)
            or slot.computed < last + self._limits.checkpoint_gap
        ):
            return
        if len(kept) >= self._limits.checkpoints:
            del kept[least_useful([item.position for item in kept], slot.computed)]
        oldest = max(self._first_position(slot), slot.computed - self._limits.window) if self._limits.window else 0
        kept.append(Checkpoint(slot.computed, oldest))
        self._operations.append(SaveCheckpoint(slot.number, kept[-1]))

    def _dispensable(self, slot: Slot) -> tuple[bool, int, bool, int]:
        """Sort key; the slot with the smallest key is assigned first: an empty one, else the least recently used one.

        Among empty slots a neighbor of a taken slot comes first, because llama.cpp computes neighbors together.
        """
        held = slot.computed > 0
        return (held, slot.used_at if held else 0, not self._neighbors(slot), slot.number)

    def _neighbors(self, slot: Slot) -> int:
        """Number of taken slots among its two neighbors."""
        beside = self._slots[max(0, slot.number - 1) : slot.number + 2]
        return sum([other.taken for other in beside if other is not slot])

    def _nearer(self, target: Slot, free: Sequence[Slot]) -> Slot | None:
        """A free slot with more taken neighbors than `target`.

        None if there is none, if a move costs too much, or if the slots share their cells.
        """
        if not self._limits.can_trim or self._limits.min_copied > MAX_COPY_COST_TOKENS or self._limits.cells:
            return None
        near = min(free, key=lambda slot: (-self._neighbors(slot), self._dispensable(slot)))
        return near if self._neighbors(near) > self._neighbors(target) else None

    # --- decisions ----------------------------------------------------------------------------------------------------
    def _choose(self, tokens: array[int], tenant: str, reusable: int) -> _Choice:
        reuse = best, shared, checkpoint = self._longest_prefix(tokens, tenant, reusable)
        free = [slot for slot in self._slots if not slot.taken]
        target = min(free, key=self._dispensable)
        stored, usable = self._best_stored(tokens, tenant, reusable)
        if stored is not None and usable >= shared + self._limits.min_copied:
            unmoved = [slot for slot in free if not self._is_moving(slot)]
            if unmoved:
                return _Choice(min(unmoved, key=self._dispensable), Reuse(None, usable), stored)
        pays = shared >= self._limits.min_copied
        if best is not None and not best.taken:
            loses_little = best.computed - shared < self._limits.min_copied
            # Only its own slot can go back to a checkpoint: the window cells of a copy come with the next batch.
            stays = checkpoint is not None and self._limits.window > 0
            has_room = not self._limits.cells or self._needed(target) + shared <= self._limits.cells
            if loses_little or stays or (pays and (target.computed or not has_room)):
                target = best  # a prefix is lost anyway: drop the tail of this one
        if checkpoint is not None or (near := self._nearer(target, free)) is None:
            return _Choice(target, reuse)
        relocation = self._relocation(near, best, free)
        return _Choice(near, reuse, None, relocation, target is best and pays)

    def _displaced(self, choice: _Choice) -> list[tuple[Slot, int]]:
        """The slots that lose tokens, each with the number of tokens that it keeps."""
        best = choice.reuse.slot
        lost = [(choice.target, choice.reuse.tokens if choice.target is best else 0)]
        if choice.relocation is not None:
            lost = [(choice.relocation, 0)]
        if choice.moves and best is not None:
            lost.append((best, choice.reuse.tokens))
        return lost

    def _relocation(self, slot: Slot, best: Slot | None, free: Sequence[Slot]) -> Slot | None:
        """An empty or less recently used slot other than `best` that may take the tokens of `slot`, or None."""
        candidates = [other for other in free if other is not slot and other is not best]
        relocation = min(candidates, key=self._dispensable, default=slot)
        if slot.computed < self._limits.min_copied or self._dispensable(relocation) >= self._dispensable(slot):
            return None
        return relocation

    def _best_stored(
        self, tokens: array[int], tenant: str, reusable: int, *, in_ram: bool = True
    ) -> tuple[StoredSequence | None, int]:
        """The stored sequence with the most reusable tokens, and their number. `in_ram`: only in host memory."""
        best, most = None, 0
        if self._catalog is None:
            return best, most
        taken = [slot.computed + 1 for slot in self._slots if slot.taken]  # and the next token
        room = self._limits.cells - sum(taken) if self._limits.cells else self._limits.context
        for sequence, shared in self._catalog.candidates(tokens, tenant, reusable):
            if shared <= most:
                break
            if len(sequence.tokens) > room or (in_ram and not sequence.in_ram):
                continue
            usable = self._resumable(self._as_slot(sequence), shared).tokens
            if usable > most:
                best, most = sequence, usable
        return best, most

    def _as_slot(self, sequence: StoredSequence) -> Slot:
        """A slot as it is after `sequence` was loaded."""
        slot = Slot(-1, sequence.tokens, len(sequence.tokens), sequence.tenant)
        slot.checkpoints = [Checkpoint(position, oldest, NOT_LOADED) for position, oldest in sequence.checkpoints]
        self._holds_only(slot, max(0, slot.computed - self._limits.window))
        return slot

    def _can_store(self, slot: Slot) -> bool:
        return self._catalog is not None and slot.computed > 0 and slot.number not in self._arriving

    def _is_moving(self, slot: Slot) -> bool:
        """Whether llama.cpp will copy to or from `slot` with the next batch."""
        return slot.number in self._arriving or slot.number in self._departing

    def _can_store_later(self, slot: Slot, kept: int) -> bool:
        """Whether the tokens behind the first `kept` are worth storing, and can be stored only after the next batch."""
        is_arriving = self._catalog is not None and slot.number in self._arriving
        return is_arriving and self._is_worth_storing(slot, kept) and any(other.taken for other in self._slots)

    def _is_worth_storing(self, slot: Slot, kept: int) -> bool:
        """Whether storing `slot` saves enough computing, if it loses the tokens behind the first `kept`."""
        return slot.unstored - kept >= self._limits.min_copied

    def _has_no_window(self, slot: Slot) -> bool:
        """Whether `slot` is a copy whose window cells come with the next batch and are not usable before."""
        return self._limits.window > 0 and slot.number in self._arriving

    def forget(self, tenant: str | None = None) -> int:
        """Drops the tokens in free slots, of `tenant` or of all; returns the number of these slots."""
        slots = [slot for slot in self.held() if not slot.taken and tenant in (None, slot.tenant)]
        for slot in slots:
            self._forget(slot, 0)
        return len(slots)

    # --- positions of a slot ------------------------------------------------------------------------------------------
    def _first_position(self, slot: Slot) -> int:
        """The position from which on the window layers have all tokens; cells are overwritten oldest first."""
        if not self._limits.window:
            return 0
        return max(slot.oldest, slot.computed + slot.freed - self._limits.window_cells)

    def _holds_only(self, slot: Slot, oldest: int) -> None:
        """Records that the window layers have the tokens from `oldest` on, and that the next token overwrites the first
        of them."""
        if self._limits.window:
            slot.oldest, slot.freed = oldest, self._limits.window_cells - (slot.computed - oldest)

    def _emptied(self, slot: Slot) -> None:
        slot.tokens = array("i")
        slot.checkpoints, slot.oldest, slot.freed, slot.stored = [], 0, 0, None
        self._relabel(slot, {})

    def _forget(self, slot: Slot, start: int) -> None:
        if slot.computed > start:
            slot.freed += slot.computed - start
            self._cut(slot, start)
            self._operations.append(Remove(slot.number, start))
            slot.checkpoints = [item for item in slot.checkpoints if item.position <= start]
        if start == 0:
            self._emptied(slot)

    def _cut(self, slot: Slot, count: int) -> None:
        slot.computed = count
        if slot.stored is not None and len(slot.stored.tokens) > count:
            slot.stored = None
        self._relabel(slot, _within(slot, count))

    def _restore(self, slot: Slot, checkpoint: Checkpoint) -> None:
        self._cut(slot, checkpoint.position)
        slot.checkpoints = [item for item in slot.checkpoints if item.position <= checkpoint.position]
        self._holds_only(slot, checkpoint.oldest)
        self._operations.append(RestoreCheckpoint(slot.number, checkpoint))

    def _go_back(self, slot: Slot, count: int, checkpoint: Checkpoint | None) -> None:
        """Makes `slot` hold its first `count` tokens.

        They get a checkpoint unless they come from one, because later prompts may depart here.
        """
        if checkpoint is not None:
            self._restore(slot, checkpoint)
        else:
            self._forget(slot, count)
            self.save_checkpoint(slot)

    def _copy(self, source: Slot, target: Slot, count: int) -> None:
        self._operations.append(Copy(source.number, target.number, count))
        self._arriving.add(target.number)
        self._departing.add(source.number)
        target.computed = count
        self._relabel(target, _within(source, count))
        target.stored = source.stored if source.stored is not None and len(source.stored.tokens) <= count else None
        target.oldest, target.freed = source.oldest, source.freed + source.computed - count
        target.checkpoints = [item for item in source.checkpoints if item.position <= count]

    def _pass_on(self, source: Slot, target: Slot) -> None:
        """`target` has become a copy of the retained sequence of `source`."""
        target.tokens, target.tenant, target.used_at = source.tokens, source.tenant, source.used_at
        target.priority, target.hint, target.released_at = source.priority, source.hint, source.released_at

    def _store_operation(self, slot: Slot) -> Store:
        slot.tried = self._clock
        kept = list(slot.checkpoints)
        slot.stored = StoredSequence(
            slot.tokens[: slot.computed],
            slot.tenant,
            [(item.position, item.oldest) for item in kept],
            slot.priority,
            hint=slot.hint,
            labels=slot.labels,
        )
        return Store(slot.number, slot.stored, kept)

    def _load(self, slot: Slot, sequence: StoredSequence) -> None:
        self._forget(slot, 0)
        self._transfers -= 1
        found = self._as_slot(sequence)
        slot.tokens, slot.computed, slot.tenant = found.tokens, found.computed, found.tenant
        slot.checkpoints, slot.oldest, slot.freed = found.checkpoints, found.oldest, found.freed
        slot.stored = sequence
        self._relabel(slot, sequence.labels)
        self._operations.append(Load(slot.number, sequence, list(slot.checkpoints)))

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
        """The most of the first `shared` tokens of `slot` from which a job can continue."""
        has_window = self._first_position(slot) <= max(0, shared - self._limits.window)
        if (self._limits.can_trim and has_window) or (shared == slot.computed and not slot.taken):
            return Reuse(slot, shared)
        if self._has_no_window(slot) or (slot.taken and self._limits.window):
            return Reuse(None)
        saved = [item for item in slot.checkpoints if item.position <= shared and item.state is not None]
        return Reuse(slot, saved[-1].position, saved[-1]) if saved else Reuse(None)


def _within(slot: Slot, count: int) -> Mapping[str, int]:
    """The labels of the first `count` tokens of a slot."""
    return {label: tokens for label, tokens in slot.labels.items() if tokens <= count} if slot.labels else slot.labels
