"""Decides which tokens of which sequences go into the next step and which slots keep what; never touches llama.cpp.

A sans-io state machine: events come in as method calls, a `Step` goes out, and the shell reports how it went. The state
is changed in place instead of copied, because a step runs every few milliseconds over sequences of thousands of tokens;
nothing outside sees it but through steps and ended jobs.

    submit -> WAITING -> PREFILL -> DECODE -> (finish, abort, deadline, failure) ENDED
                 ^----------+---------+   preempted when no cell is free; what was generated is kept and prefilled again

A slot is one llama.cpp sequence id. When its job ends it keeps the tokens it holds, so that a later prompt of the same
tenant that begins alike skips them. Cells are counted per slot, so shared ones count once for each holder: the count
may exceed what llama.cpp uses, never the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from inference.worker.core.steps import TRANSITIONS, Copy, Job, Limits, Phase, Remove, Row, Step


@dataclass(slots=True)
class _Slot:
    tokens: list[int] = field(default_factory=list)
    tenant: str = ""
    job: int | None = None
    used_at: int = 0


@dataclass(slots=True)
class _Run:
    job: Job
    tokens: list[int]
    phase: Phase = Phase.WAITING
    slot: int | None = None
    generated: int = 0


class Scheduler:
    """The state. One call of `plan`, then exactly one of `computed`, `no_room` or `failed` for a step with rows."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._runs: dict[int, _Run] = {}
        self._slots = [_Slot() for _ in range(limits.slots)]
        self._operations: list[Remove | Copy] = []
        self._pending: tuple[Row, ...] = ()
        self._clock = 0

    # --- what others may know ----------------------------------------------------------------------------------------
    @property
    def active(self) -> int:
        """Jobs that hold a slot."""
        return sum(slot.job is not None for slot in self._slots)

    @property
    def decoding(self) -> int:
        """Jobs that generate."""
        return sum(run.phase is Phase.DECODE for run in self._runs.values())

    @property
    def queued(self) -> int:
        """Jobs that wait for a slot."""
        return len(self._runs) - self.active

    @property
    def cells_used(self) -> int:
        """KV cells that slots hold, retained prefixes included."""
        return sum(len(slot.tokens) for slot in self._slots)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything, now or after the next event."""
        return bool(self._runs or self._operations)

    def progress(self) -> list[tuple[int, Phase, int, int]]:
        """Per job that waits or prefills: phase, place in the queue (1 = next) or tokens done, tokens in all."""
        waiting = sorted(
            (run for run in self._runs.values() if run.phase is Phase.WAITING), key=lambda run: run.job.key
        )
        places = [(run.job.id, run.phase, place, len(run.tokens)) for place, run in enumerate(waiting, 1)]
        return places + [
            (run.job.id, run.phase, len(self._slot_of(run).tokens), len(run.tokens))
            for run in self._runs.values()
            if run.phase is Phase.PREFILL
        ]

    # --- events ------------------------------------------------------------------------------------------------------
    def submit(self, jobs: Sequence[Job]) -> bool:
        """Takes all of `jobs` or, when the queue has no room for them beyond free slots, none and returns False."""
        free = self.limits.slots - self.active
        if self.queued + len(jobs) > self.limits.queue + free:
            return False
        for job in jobs:
            if not 0 < len(job.prompt) <= self.limits.context or job.id in self._runs:
                raise ValueError(f"job {job.id} was not validated: {len(job.prompt)} tokens")
        self._runs.update({job.id: _Run(job, list(job.prompt)) for job in jobs})
        return True

    def abort(self, job: int) -> None:
        """Ends a job that nobody waits for any more; unknown ones have ended already."""
        if (run := self._runs.get(job)) is not None:
            self._end(run)

    def extend(self, job: int, token: int) -> None:
        """The token that was sampled for `job`, which goes on."""
        run = self._runs[job]
        run.tokens.append(token)
        run.generated += 1

    def finish(self, job: int) -> None:
        """`job` is complete; its slot keeps what it holds."""
        self._end(self._runs[job])

    def plan(self, now: float, prefill_budget: int) -> Step:
        """The next step: a token for every decoding job, and at most `prefill_budget` (1 or more) tokens of prompts."""
        assert not self._pending, "the last step was not reported"
        self._clock += 1
        expired = self._expire(now)
        self._admit()
        rows = self._rows(prefill_budget)
        operations = tuple(self._operations)
        self._operations.clear()
        self._pending = rows
        return Step(operations, rows, expired)

    def computed(self) -> None:
        """The step's batch was computed."""
        for row in self._pending:
            run = self._runs[row.job]
            self._slots[row.slot].tokens.extend(row.tokens)
            if row.sample:
                self._move(run, "computed")
        self._pending = ()

    def no_room(self) -> tuple[int, ...]:
        """llama.cpp found no cells and computed nothing: frees retained prefixes, or else preempts the youngest job.

        Returns the jobs that ended because they cannot run even alone.
        """
        self._pending = ()
        if self._drop_retained():
            return ()
        running = [run for run in self._runs.values() if run.slot is not None]
        if len(running) > 1:
            self._preempt(max(running, key=lambda run: run.job.key))
            return ()
        for run in running:
            self._forget(self._slot_number(run), 0)
            self._end(run)
        return tuple(run.job.id for run in running)

    def failed(self) -> tuple[int, ...]:
        """The step's batch failed half-way: its jobs end and their slots are emptied. Returns the jobs."""
        rows, self._pending = self._pending, ()
        for row in rows:
            # llama.cpp may hold more of this sequence than was ever reported, so the removal is asked for regardless.
            self._slots[row.slot].tokens.clear()
            self._operations.append(Remove(row.slot, 0))
            self._end(self._runs[row.job])
        return tuple(row.job for row in rows)

    # --- parts of a step ---------------------------------------------------------------------------------------------
    def _expire(self, now: float) -> tuple[int, ...]:
        late = [
            run
            for run in self._runs.values()
            if run.generated == 0 and run.job.deadline is not None and run.job.deadline <= now
        ]
        for run in late:
            self._end(run)
        return tuple(run.job.id for run in late)

    def _admit(self) -> None:
        waiting = sorted(
            (run for run in self._runs.values() if run.phase is Phase.WAITING), key=lambda run: run.job.key
        )
        for run in waiting:
            if all(slot.job is not None for slot in self._slots):
                return
            if self._is_prefilled_by_sibling(run):
                continue
            if not self._can_hold(min(len(run.tokens) + 1, self.limits.context)):
                return  # in order: a smaller job behind must not keep a larger one out for ever
            self._place(run)

    def _is_prefilled_by_sibling(self, run: _Run) -> bool:
        """Whether another choice of the same prompt is about to have computed what this one can copy."""
        group = run.job.group
        if group is None or not self.limits.can_trim:
            return False
        return any(
            other.phase is Phase.PREFILL and other.job.group == group and self._left(other) > 1
            for other in self._runs.values()
        )

    def _can_hold(self, cells: int) -> bool:
        """Whether `cells` more fit once every retained prefix is dropped, room for what active jobs still compute
        included, so that a job just admitted is not the next one preempted."""
        held = sum(len(self._runs[slot.job].tokens) for slot in self._slots if slot.job is not None)
        return held + cells <= self.limits.cells

    def _place(self, run: _Run) -> None:
        """Gives `run` a free slot, with as much of its prompt already computed as a slot of the same tenant holds."""
        best, shared = self._longest_prefix(run)
        free = [number for number, slot in enumerate(self._slots) if slot.job is None]
        target = min(free, key=lambda number: (bool(self._slots[number].tokens), self._slots[number].used_at))
        if best is not None and self._slots[best].job is None:
            wasted = len(self._slots[best].tokens) - shared
            if wasted == 0 or self._slots[target].tokens:
                target = best  # nothing of it is lost, or some retained prefix is lost anyway: then this one's tail
        if target == best:
            self._forget(target, shared)
        else:
            self._forget(target, 0)
            if best is not None and self._make_room(shared, sparing=best):
                self._operations.append(Copy(best, target, shared))
                self._slots[target].tokens = self._slots[best].tokens[:shared]
        slot = self._slots[target]
        slot.job, slot.tenant, slot.used_at = run.job.id, run.job.tenant, self._clock
        run.slot = target
        self._move(run, "admit")

    def _longest_prefix(self, run: _Run) -> tuple[int | None, int]:
        best: int | None = None
        longest = 0
        for number, slot in enumerate(self._slots):
            if slot.tenant != run.job.tenant or len(slot.tokens) <= longest:
                continue
            # The last token is computed again in any case: its logits are needed.
            shared = common_prefix(slot.tokens, run.tokens, len(run.tokens) - 1)
            whole = shared == len(slot.tokens) and slot.job is None
            if shared > longest and (self.limits.can_trim or whole):
                best, longest = number, shared
        return best, longest

    def _rows(self, prefill_budget: int) -> tuple[Row, ...]:
        running = sorted((run for run in self._runs.values() if run.slot is not None), key=lambda run: run.job.key)
        decoding = [run for run in running if self._left(run) == 1]
        planned = 0
        rows: list[Row] = []
        for run in decoding:
            if run.slot is not None and self._make_room(planned + 1, sparing=run.slot, youngest_first=run):
                rows.append(self._row(run, 1))
                planned += 1
        # Making room may have preempted jobs, also such as had their row already.
        rows = [row for row in rows if self._runs[row.job].slot is not None]
        prefilling = [run for run in running if run.slot is not None and self._left(run) > 1]
        planned = len(rows)
        room = min(self.limits.batch - planned, prefill_budget)
        prefilling.sort(key=lambda run: (self._left(run), run.job.key))
        for index, run in enumerate(prefilling):
            if room <= 0:
                break
            share = max(1, room // (len(prefilling) - index))
            count = min(self._left(run), share)
            if self._make_room(planned + count, sparing=self._slot_number(run)):
                rows.append(self._row(run, count))
                planned += count
                room -= count
        return tuple(rows)

    def _row(self, run: _Run, count: int) -> Row:
        start = len(self._slot_of(run).tokens)
        end = start + count
        return Row(run.job.id, self._slot_number(run), start, run.tokens[start:end], end == len(run.tokens))

    # --- cells and slots ---------------------------------------------------------------------------------------------
    def _make_room(self, cells: int, *, sparing: int, youngest_first: _Run | None = None) -> bool:
        """Frees cells until `cells` more fit: retained prefixes by age, then, for `youngest_first`, younger jobs."""
        while self.cells_used + cells > self.limits.cells:
            if self._drop_retained(sparing=sparing):
                continue
            if youngest_first is None:
                return False
            running = [run for run in self._runs.values() if run.slot is not None]
            youngest = max(running, key=lambda run: run.job.key)
            self._preempt(youngest)
            if youngest is youngest_first:
                return False
        return True

    def _drop_retained(self, sparing: int | None = None) -> bool:
        """Empties the free slot that was used longest ago; False when none holds anything."""
        kept = [n for n, slot in enumerate(self._slots) if slot.job is None and slot.tokens and n != sparing]
        if not kept:
            return False
        self._forget(min(kept, key=lambda number: self._slots[number].used_at), 0)
        return True

    def _forget(self, number: int, start: int) -> None:
        slot = self._slots[number]
        if len(slot.tokens) > start:
            del slot.tokens[start:]
            self._operations.append(Remove(number, start))

    def _preempt(self, run: _Run) -> None:
        number = self._slot_number(run)
        self._forget(number, 0)
        self._slots[number].job = None
        run.slot = None
        self._move(run, "preempt")

    def _end(self, run: _Run) -> None:
        if run.slot is not None:
            slot = self._slots[run.slot]
            slot.job, slot.used_at = None, self._clock
            run.slot = None
        self._move(run, "end")
        del self._runs[run.job.id]

    def _left(self, run: _Run) -> int:
        """Tokens of an active job that are not computed yet."""
        return len(run.tokens) - len(self._slot_of(run).tokens)

    def _move(self, run: _Run, event: str) -> None:
        run.phase = TRANSITIONS[run.phase, event]

    def _slot_number(self, run: _Run) -> int:
        assert run.slot is not None
        return run.slot

    def _slot_of(self, run: _Run) -> _Slot:
        return self._slots[self._slot_number(run)]


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
