"""Decides which tokens of which sequences go into the next step; never touches llama.cpp.

A sans-io state machine: events come in as method calls, a `Step` goes out, and the shell reports how it went. The state
is changed in place instead of copied, because a step runs every few milliseconds over sequences of thousands of tokens;
nothing outside sees it but through steps and ended jobs.

    submit -> WAITING -> PREFILL -> DECODE -> (finish, abort, deadline, failure) ENDED
                 ^----------+---------+   suspended because nobody reads, or put back because llama.cpp had no room;
                                          what was generated is kept and computed again as far as its cells are gone

The order of service is arrival plus the head start of the priority: the oldest job is the first in it, the youngest the
last. Which slot holds what, and what a prompt reuses of it, is `slots`' decision.
"""

from __future__ import annotations

import math
from array import array
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from inference.worker.kv.saved_sequences import Retained
from inference.worker.kv.slots import Slot, Slots
from inference.worker.prompt.image_tokens import undivided
from inference.worker.steps import DECODE, PREFILL, TRANSITIONS, WAITING, Job, Limits, Phase, Row, Step

OLDEST_PART = 4
"""The prompt that came first gets at least one part in so many of a step's budget."""

STRETCH_PART = 4
"""A step exceeds its budget by one part in so many for a prompt that is complete then: a remainder would hold up once
more everybody who had a first token in this step."""

LAST_PART = 2
"""It exceeds it by one part in so many where more wait for a first token than for a next one, and none of them is left
then: whoever has a first token is held up no more."""

WORTH_PART = 2
"""A prompt that cannot be completed is read on with what is left of the budget where that is one part in so many of it.
llama.cpp computes rows together as far as they have the same length (`llama_batch_allocr::split_equal`), so pieces of
odd lengths cost a pass over all weights each, now and when they are completed."""


@dataclass(slots=True, eq=False)
class _Run:
    """`deadline` is the job's until its request has a first token. `scored` counts the tokens of the prompt whose
    logits were handed out. `passed`: an image did not fit into what the last step had left for it.
    """

    job: Job
    key: tuple[float, int]
    tokens: array[int]
    deadline: float | None
    phase: Phase = WAITING
    slot: Slot | None = None
    generated: int = 0
    scored: int = 0
    passed: bool = False


def _order(run: _Run) -> tuple[float, int]:
    return run.key


_by_slot = attrgetter("slot")


class Scheduler:
    """The state. One call of `plan`, then exactly one of `computed`, `no_room` or `failed` for a step with rows."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._most = limits.slots
        self._slots = Slots(limits)
        self._runs: dict[int, _Run] = {}
        # Both in the order of service. Suspended jobs are in neither.
        self._waiting: list[_Run] = []
        self._running: list[_Run] = []
        self._pending: Sequence[Row] = ()
        self._earliest = math.inf
        self._crowded = False

    # --- what others may know ----------------------------------------------------------------------------------------
    @property
    def active(self) -> int:
        """Jobs that hold a slot."""
        return len(self._running)

    @property
    def load(self) -> tuple[int, int]:
        """How many jobs generate, and so wait for every step to end, and how many prompts are there or find a slot."""
        decoding = sum([run.phase is DECODE for run in self._running])
        return decoding, min(self.limits.slots, len(self._running) + len(self._waiting)) - decoding

    @property
    def just_begun(self) -> bool:
        """Whether nobody who generates has had more than a first token."""
        return all(run.generated <= 1 for run in self._running if run.phase is DECODE)

    @property
    def only_decodes(self) -> bool:
        """Whether the next step draws a token for every job that runs and reads no prompt."""
        if not self._running or (self._waiting and self._free > 0):
            return False
        return self.load[0] == len(self._running)

    @property
    def queued(self) -> int:
        """Jobs without a slot."""
        return len(self._runs) - len(self._running)

    @property
    def room(self) -> int:
        """How many more jobs `submit` takes: those that free slots will hold are not in the queue for long."""
        return self.limits.slots + self.limits.queue - len(self._runs)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of jobs without a slot, also those that need not be computed again."""
        return sum([len(run.tokens) for run in self._waiting])

    @property
    def cells_used(self) -> int:
        """KV cells that slots hold, retained prefixes included."""
        return self._slots.used

    @property
    def cells(self) -> tuple[int, int]:
        """KV cells that hold something: of jobs with a slot, and retained ones."""
        return self._slots.cells

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._running or self._waiting or self._slots.pending)

    def progress(self) -> list[tuple[int, Phase, int, int]]:
        """Per job that waits or prefills: phase, place in the queue (1 = next) or tokens done, tokens in all."""
        places = [(run.job.id, run.phase, place, len(run.tokens)) for place, run in enumerate(self._waiting, 1)]
        return places + [
            (run.job.id, run.phase, run.slot.computed, len(run.tokens))
            for run in self._running
            if run.phase is PREFILL and run.slot is not None
        ]

    # --- events ------------------------------------------------------------------------------------------------------
    def submit(self, jobs: Sequence[Job]) -> bool:
        """Takes all of `jobs` or, when the queue has no room for them beyond free slots, none and returns False."""
        if len(jobs) > self.room:
            return False
        for job in jobs:
            if not 0 < len(job.prompt) <= self.limits.context or job.id in self._runs:
                raise ValueError(f"job {job.id} was not validated: {len(job.prompt)} tokens")
        for job in jobs:
            prompt = job.prompt if isinstance(job.prompt, array) else array("i", job.prompt)
            run = self._runs[job.id] = _Run(job, job.key, prompt, job.deadline)
            insort(self._waiting, run, key=_order)
            if job.deadline is not None:
                self._earliest = min(self._earliest, job.deadline)
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
        if run.deadline is not None:
            self._has_begun(run)

    def finish(self, job: int) -> None:
        """`job` is complete; its slot keeps what it holds."""
        run = self._runs[job]
        if run.deadline is not None:
            self._has_begun(run)
        self._end(run)

    def suspend(self, job: int) -> None:
        """`job` gives its slot to others until `resume`; what it holds is retained until another takes the slot."""
        run = self._runs[job]
        if run.slot is not None:
            self._leave(run)
            self._move(run, "preempt")
        elif run in self._waiting:
            self._waiting.remove(run)

    def resume(self, job: int) -> None:
        """A suspended `job` takes its old place in the queue; jobs that are not suspended stay as they are."""
        run = self._runs.get(job)
        if run is not None and run.slot is None and run not in self._waiting:
            insort(self._waiting, run, key=_order)

    def limit(self, sequences: int) -> None:
        """Gives out at most so many slots (1 or more) from now on; a job that has one keeps it."""
        self._most = sequences

    def forget(self) -> None:
        """Drops what slots retain of jobs that ended."""
        self._slots.forget()

    def plan(self, now: float, prefill_budget: int) -> Step:
        """The next step: a token for every decoding job, and at most `prefill_budget` (1 or more) tokens of prompts, or
        a quarter more where these complete one, or half where they complete all and more prompts than streams wait.
        """
        assert not self._pending, "the last step was not reported"
        expired = self._expire(now) if now >= self._earliest else ()
        if self._waiting:
            self._admit()
        rows = self._decoding()
        decoding = len(rows)
        if decoding < len(self._running):
            self._prefilling(rows, prefill_budget)
        prefill = sum([len(row.tokens) for row in rows[decoding:]])
        rows.sort(key=_by_slot)
        self._pending = rows
        return Step(self._slots.operations(), rows, expired, prefill, decoding + prefill)

    def computed(self) -> None:
        """The step's batch was computed."""
        for row in self._pending:
            run = self._runs[row.job]
            self._slot_of(run).computed += len(row.tokens)
            if row.every:
                run.scored = row.start + len(row.tokens)
            if row.sample and run.phase is not DECODE:
                self._move(run, "computed")
        self._pending = ()

    def no_room(self) -> tuple[int, ...]:
        """llama.cpp found no cells, although every slot has its own, and computed nothing: puts the youngest job back.

        Returns the jobs that ended because they cannot run even alone.
        """
        self._pending = ()
        if len(self._running) > 1:
            self._put_back(self._running[-1])
            self._crowded = True  # admitted again at once, it would be put back in the next step, for ever
            return ()
        ended = tuple(self._running)
        for run in ended:
            self._slots.invalidate(self._slot_of(run))
            self._end(run)
        return tuple(run.job.id for run in ended)

    def failed(self) -> tuple[int, ...]:
        """The step's batch failed half-way: its jobs end and their slots are emptied. Returns the jobs.

        After `computed` it was the shell that failed: jobs whose next token was never reported end.
        """
        rows, self._pending = self._pending, ()
        lost = [self._runs[row.job] for row in rows]
        for run in lost:
            self._slots.invalidate(self._slot_of(run))
        lost = lost or [run for run in self._running if self._left(run) == 0]
        for run in lost:
            self._end(run)
        return tuple(run.job.id for run in lost)

    # --- between steps -----------------------------------------------------------------------------------------------
    def retained(self) -> list[Retained]:
        """What slots hold that no job has."""
        return self._slots.retained()

    def adopt(self, held: Sequence[Retained]) -> None:
        """Before the first step: the context holds these sequences already. The last one counts as used last."""
        for item in held:
            self._slots.adopt(item)

    # --- parts of a step ---------------------------------------------------------------------------------------------
    def _expire(self, now: float) -> tuple[int, ...]:
        """Ends whose deadline passed before their request's first token."""
        late = []
        self._earliest = math.inf
        for run in list(self._runs.values()):
            if run.deadline is None:
                continue
            if run.deadline <= now:
                self._end(run)
                late.append(run.job.id)
            else:
                self._earliest = min(self._earliest, run.deadline)
        return tuple(late)

    def _has_begun(self, run: _Run) -> None:
        """The first token of a request is there: its other answers may wait for their turn as long as they have to."""
        run.deadline = None
        if run.job.request is not None:
            for other in self._runs.values():
                if other.job.request == run.job.request:
                    other.deadline = None

    def _admit(self) -> None:
        """Gives free slots to those who wait, in order: nobody passes a job that could not be placed yet."""
        for run in self._waiting[: self._free]:
            if self._is_prefilled_by_sibling(run):
                continue  # its slot is kept for it
            self._waiting.remove(run)
            if run.tokens is run.job.prompt:
                run.tokens = run.tokens[:]  # only now: choices that wait hold their prompt once
            run.slot = self._slots.take(run.tokens, run.job.tenant, self._reusable(run))
            insort(self._running, run, key=_order)
            self._move(run, "admit")

    @property
    def _free(self) -> int:
        """Slots that may be given out now."""
        if self._crowded and self._running:
            return 0
        return max(0, min(self.limits.slots, self._most) - len(self._running))

    def _is_prefilled_by_sibling(self, run: _Run) -> bool:
        """Whether another choice of the same prompt is about to have computed what this one can copy."""
        group = run.job.group
        if group is None or not self.limits.can_trim or self._reusable(run) < self.limits.copied:
            return False
        return any(
            other.phase is PREFILL and other.job.group == group and self._left(other) > 1 for other in self._running
        )

    def _reusable(self, run: _Run) -> int:
        """The last token is computed again in any case, because its logits are needed; so is what is to be scored."""
        if run.job.score and run.scored < len(run.job.prompt):
            return min(run.scored, len(run.tokens) - 1)
        return len(run.tokens) - 1

    def _decoding(self) -> list[Row]:
        """A row for every job that lacks one token only."""
        rows: list[Row] = []
        for run in self._running:
            slot = run.slot
            if slot is not None and len(run.tokens) - slot.computed == 1:
                rows.append(self._row(run, slot, 1))
        return rows

    def _prefilling(self, rows: list[Row], budget: int) -> None:
        """Gives `budget` to the prompts with the least left, so that first tokens come one after the other, and a part
        of it to the one that came first, so that it cannot be kept waiting by shorter ones for ever. Whole prompts are
        preferred to pieces.

        Where outputs are too few it takes what there is. An image is computed as a whole, however small the
        rest of the budget; one that the batch had no room left for is first in the next.
        """
        prompts = sorted(
            [(not run.passed, self._left(run), run.key, run) for run in self._running if self._left(run) > 1]
        )
        most = self.limits.batch - len(rows)
        room = min(most, budget)
        everything = sum([left for _passed, left, _key, _run in prompts])
        if len(prompts) > len(rows) and everything <= min(most, room + room // LAST_PART):
            room = max(room, everything)
        stretch = min(most - room, room // STRETCH_PART)
        worth = -(-room // WORTH_PART)
        outputs = (self.limits.outputs or self.limits.slots) - len(rows) - len(prompts)
        planned = len(rows)
        *_, oldest = min(prompts, key=lambda entry: entry[2])
        part = kept = min(self._left(oldest), max(1, room // OLDEST_PART))
        for _first, left, _key, run in prompts:
            if run is oldest:
                kept = 0
            slot = self._slot_of(run)
            free = room - kept
            piece = max(free, part) if run is oldest else free if free >= worth else 0
            count = left if left <= free + stretch else piece
            if run.job.score:
                count = min(count, self._scorable(run, slot, outputs + 1))
            count = min(count, self.limits.batch - planned)  # an image may have taken what was kept for the oldest
            if 0 < count < left:
                count = self._undivided(run, slot, count, planned)
            if count > 0:
                rows.append(row := self._row(run, slot, count))
                planned += count
                room -= count
                outputs -= count - 1 if row.every else 0

    def _undivided(self, run: _Run, slot: Slot, count: int, planned: int) -> int:
        """`count` moved to where it divides no image, 0 when the image it begins with has to wait."""
        start = slot.computed
        end = undivided(run.tokens, start, start + count, self.limits.batch - planned)
        run.passed = end == start
        return end - start

    def _scorable(self, run: _Run, slot: Slot, outputs: int) -> int:
        """How many tokens of a scored job's rest may go into one row."""
        if slot.computed < run.scored:
            return run.scored - slot.computed
        return outputs if slot.computed < len(run.job.prompt) else len(run.tokens)

    def _row(self, run: _Run, slot: Slot, count: int) -> Row:
        start = slot.computed
        end = start + count
        every = run.job.score and run.scored <= start < len(run.job.prompt)
        return Row(run.job.id, slot.number, start, run.tokens[start:end], end == len(run.tokens), every)

    # --- who leaves --------------------------------------------------------------------------------------------------
    def _put_back(self, run: _Run) -> None:
        self._slots.empty(self._slot_of(run))
        run.slot = None
        self._running.remove(run)
        self._move(run, "preempt")
        insort(self._waiting, run, key=_order)

    def _leave(self, run: _Run) -> None:
        self._slots.release(self._slot_of(run))
        run.slot = None
        self._running.remove(run)
        self._crowded = False

    def _end(self, run: _Run) -> None:
        if run.slot is not None:
            self._leave(run)
        elif run in self._waiting:
            self._waiting.remove(run)
        self._move(run, "end")
        del self._runs[run.job.id]

    def _left(self, run: _Run) -> int:
        """Tokens of an active job that are not computed yet."""
        return len(run.tokens) - self._slot_of(run).computed

    def _move(self, run: _Run, event: str) -> None:
        run.phase = TRANSITIONS[run.phase, event]

    def _slot_of(self, run: _Run) -> Slot:
        assert run.slot is not None
        return run.slot
