"""Decides which tokens of which sequences go into the next step.

A sans-io state machine: events come in as method calls, a `Step` goes out, and the engine reports its result. The state
is changed in place instead of copied, because a step runs every few milliseconds over sequences of thousands of tokens.

    submit -> WAITING -> PREFILL -> DECODE -> (finish, abort, deadline, failure) ENDED
                 ^----------+---------+   suspended because its outputs are not read, or put back because the KV cache
                                          had no room; generated tokens are kept and computed again where needed

The order of service is the arrival time plus the offset of the priority (PRIORITY_OFFSET_SECONDS): the oldest job comes
first, the youngest last. `Slots` decides which slot holds which tokens and which prefix a prompt reuses.
"""

from __future__ import annotations

import math
from array import array
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from inference.protocol import KvTier
from inference.worker.kv.catalog import Catalog
from inference.worker.kv.checkpoints import checkpoint_stops
from inference.worker.kv.slot import Slot
from inference.worker.kv.slots import Slots
from inference.worker.prompt.image_tokens import undivided
from inference.worker.steps import (
    DECODE,
    PREFILL,
    TRANSITIONS,
    WAITING,
    Candidate,
    Job,
    Limits,
    Phase,
    Row,
    Step,
    StoredSequence,
)

OLDEST_PART = 4
"""The oldest prompt gets at least the budget of a step divided by this number."""

STRETCH_PART = 4
"""A step may exceed its budget by the budget divided by this number, if that completes a prompt. The rest of the prompt
would otherwise delay all streams once more."""

LAST_PART = 2
"""A step may exceed its budget by the budget divided by this number, if that completes all prompts and there are
more prompts than streams. No later step then delays the streams."""

WORTH_PART = 2
"""A prompt that does not fit gets a piece only if the rest of the budget is at least the budget divided by this number.
llama.cpp computes rows together as far as they have the same length (`llama_batch_allocr::split_equal`), so each piece
of another length costs a pass over all weights, now and when the prompt is completed."""


Propose = Callable[[Sequence[Candidate], int], Sequence[Sequence[int]]]
"""(candidates, each with `most` of at least 1; number of jobs in the step) -> the next tokens proposed for each."""

MIN_FETCH_SECONDS = 1.0
"""A job waits this long for its sequence from disk, or longer if computing the sequence takes longer."""


@dataclass(slots=True, eq=False)
class _Run:
    """A job and its state.

    `deadline` is None once the request has a first token. `scored`: number of prompt tokens whose logits were read.
    `passed`: an image of the prompt did not fit into the last step. `proposed`: tokens that are computed already behind
    `computed`; their cells are kept as far as the next drawn tokens equal them. `stops`: positions at which a step
    ends, so that the slot gets a checkpoint there, ascending. `awaited`: a sequence on disk that the job waits for
    until `fetch_until`; `sought`: it was looked for.
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
    proposed: Sequence[int] = ()
    stops: Sequence[int] = ()
    awaited: StoredSequence | None = None
    fetch_until: float = 0.0
    sought: bool = False


def _order(run: _Run) -> tuple[float, int]:
    return run.key


_by_slot = attrgetter("slot")


class Scheduler:
    """The state. Each call of `plan` that returns rows requires exactly one of `computed`, `no_room`,
    `not_restored` or `failed`; `failed` may also follow `computed`."""

    def __init__(self, limits: Limits, catalog: Catalog | None = None) -> None:
        """`catalog`: the sequences outside the context; None if there is no store for them."""
        self.limits = limits
        self._most = limits.slots
        self._catalog = catalog
        self.slots = Slots(limits, catalog)
        """What is in the context."""
        self._runs: dict[int, _Run] = {}
        # Both in the order of service. Suspended jobs are in neither.
        self._waiting: list[_Run] = []
        self._running: list[_Run] = []
        self._pending: Sequence[Row] = ()
        self._earliest = math.inf
        self._now = 0.0
        self._crowded = False

    # --- state ------------------------------------------------------------------------------------------------------
    @property
    def active(self) -> int:
        """Jobs that hold a slot."""
        return len(self._running)

    @property
    def load(self) -> tuple[int, int]:
        """Number of decoding jobs, and number of prompts that have a slot or can get one."""
        decoding = sum([run.phase is DECODE for run in self._running])
        return decoding, min(self.limits.slots, len(self._running) + len(self._waiting)) - decoding

    @property
    def just_begun(self) -> bool:
        """Whether no decoding job has more than its first token."""
        return all(run.generated <= 1 for run in self._running if run.phase is DECODE)

    @property
    def only_decodes(self) -> bool:
        """Whether the next step decodes every running job and prefills no prompt."""
        if not self._running or (self._waiting and self._free > 0):
            return False
        return self.load[0] == len(self._running)

    @property
    def queued(self) -> int:
        """Jobs without a slot."""
        return len(self._runs) - len(self._running)

    @property
    def room(self) -> int:
        """How many more jobs `submit` accepts: free slots count, because their jobs leave the queue at once."""
        return self.limits.slots + self.limits.queue - len(self._runs)

    @property
    def has_work(self) -> bool:
        """Whether there is work for a step."""
        return bool(self._running or self._waiting or self.slots.pending)

    def progress(self) -> list[tuple[int, Phase, int, int]]:
        """Waiting and prefilling jobs: id, phase, place in the queue (1 = next) or computed tokens, all tokens."""
        places = [(run.job.id, run.phase, place, len(run.tokens)) for place, run in enumerate(self._waiting, 1)]
        return places + [
            (run.job.id, run.phase, run.slot.computed, len(run.tokens))
            for run in self._running
            if run.phase is PREFILL and run.slot is not None
        ]

    # --- events ------------------------------------------------------------------------------------------------------
    def submit(self, jobs: Sequence[Job]) -> bool:
        """Queues all of `jobs`. Returns False and queues none if `room` is too small for them.

        Raises ValueError for a job that is invalid.
        """
        if len(jobs) > self.room:
            return False
        for job in jobs:
            if not 0 < len(job.prompt) <= self.limits.context or job.id in self._runs:
                raise ValueError(
                    f"job {job.id} is invalid: its prompt has {len(job.prompt)} tokens, or its id is in use"
                )
        for job in jobs:
            prompt = job.prompt if isinstance(job.prompt, array) else array("i", job.prompt)
            run = self._runs[job.id] = _Run(job, job.key, prompt, job.deadline)
            insort(self._waiting, run, key=_order)
            if job.deadline is not None:
                self._earliest = min(self._earliest, job.deadline)
        return True

    def abort(self, job: int) -> None:
        """Ends a job. Jobs that have already ended are ignored."""
        if (run := self._runs.get(job)) is not None:
            self._end(run)

    def extend(self, job: int, token: int) -> None:
        """Appends the sampled token of `job`. If it was proposed, it is computed already."""
        run = self._runs[job]
        run.tokens.append(token)
        run.generated += 1
        if run.proposed:
            is_computed = run.proposed[0] == token and run.slot is not None
            run.proposed = run.proposed[1:] if is_computed else ()
            if is_computed:
                self._slot_of(run).computed += 1
        if run.deadline is not None:
            self._has_begun(run)

    def finish(self, job: int) -> None:
        """Ends a complete `job`; its slot retains its tokens, unless the hint of the job is `drop`."""
        run = self._runs[job]
        if run.deadline is not None:
            self._has_begun(run)
        self._end(run)

    def suspend(self, job: int) -> None:
        """Takes the slot from `job` until `resume`; its tokens are retained until another job takes the slot."""
        run = self._runs[job]
        if run.slot is not None:
            self._leave(run)
            self._move(run, "preempt")
        elif run in self._waiting:
            self._waiting.remove(run)

    def resume(self, job: int) -> None:
        """Queues a suspended `job` at its old place; a job that is not suspended is ignored."""
        run = self._runs.get(job)
        if run is not None and run.slot is None and run not in self._waiting:
            insort(self._waiting, run, key=_order)

    def limit(self, sequences: int) -> None:
        """Sets the maximum number (at least 1) of slots in use; jobs with a slot keep it."""
        self._most = sequences

    def plan(self, now: float, prefill_budget: int, transfers: int = 1, propose: Propose | None = None) -> Step:
        """The next step: one token of each decoding job, and at most `prefill_budget` (at least 1) prompt tokens.

        Before the step at most `transfers` sequences are stored or loaded.

        The budget may be exceeded by a quarter to complete a prompt, and by half to complete all prompts if there
        are more prompts than streams. A step without prompts also computes the tokens that `propose` returns; this
        requires that the end of a slot can be removed (`can_trim`, no window).
        """
        assert not self._pending, "the result of the last step was not reported"
        self._now = now
        self.slots.begin(transfers)
        expired = self._expire(now) if now >= self._earliest else ()
        if self._waiting:
            self._admit(now)
        if self.limits.cells:
            self._reclaim(prefill_budget)
        if self.limits.checkpoints:
            self._take_checkpoints()
        rows = self._decoding()
        free = self.limits.cells - self.slots.used if self.limits.cells else self.limits.batch
        rows = rows[: max(0, free)]  # the oldest jobs
        decoding = len(rows)
        budget = min(prefill_budget, free - decoding)
        if decoding < len(self._running) and budget > 0:
            self._prefilling(rows, budget, free - decoding)
        prefill = sum([len(row.tokens) for row in rows[decoding:]])
        proposed = 0
        if propose is not None and rows and not prefill:
            rows = self._with_proposals(rows, propose, free - decoding)
            proposed = sum([row.proposed for row in rows])
        rows.sort(key=_by_slot)
        self._pending = rows
        return Step(self.slots.operations(), rows, expired, prefill, decoding + prefill + proposed, proposed)

    def computed(self) -> None:
        """Records that the batch of the step was computed."""
        self.slots.arrived()
        for row in self._pending:
            run = self._runs[row.job]
            self._slot_of(run).computed += len(row.tokens) - row.proposed
            if row.proposed:
                run.proposed = row.tokens[-row.proposed :]
            elif row.every:
                run.scored = row.start + len(row.tokens)
            if row.sample and run.phase is not DECODE:
                self._move(run, "computed")
                if run.job.labels:
                    self.slots.label(self._slot_of(run), run.job.labels, len(run.job.prompt))
        self._pending = ()

    def no_room(self) -> tuple[int, ...]:
        """Records that llama.cpp had no free cells and computed nothing; puts the youngest job back into the queue.

        Returns the jobs that ended because they do not fit even alone.
        """
        self._pending = ()
        if len(self._running) > 1:
            self._put_back(self._running[-1])
            self._crowded = True  # no admission until a job leaves: the job would be put back in each step
            return ()
        ended = tuple(self._running)
        for run in ended:
            self.slots.invalidate(self._slot_of(run))
            self._end(run)
        return tuple(run.job.id for run in ended)

    def not_restored(self, slots: Sequence[int]) -> None:
        """Records that the last `plan` could not restore these slots: they are empty, and none of its rows is computed.

        The next plan computes their prompts from the beginning.
        """
        self._pending = ()
        for run in self._running:
            if self._slot_of(run).number in slots:
                self.slots.invalidate(self._slot_of(run))
                self._slot_of(run).tokens = run.tokens
                run.stops = checkpoint_stops(run.job, 0, self.limits)

    def failed(self) -> tuple[int, ...]:
        """Records that the batch failed in the middle: its jobs end and their slots are emptied. Returns these jobs.

        After `computed` it ends the jobs whose next token was not reported, because the engine failed after the batch.
        """
        rows, self._pending = self._pending, ()
        lost = [self._runs[row.job] for row in rows]
        for run in lost:
            self.slots.invalidate(self._slot_of(run))
        lost = lost or [run for run in self._running if self._left(run) == 0]
        for run in lost:
            self._end(run)
        return tuple(run.job.id for run in lost)

    def restored(self, job: int) -> KvTier | None:
        """Where the tokens were that a running job did not compute."""
        return self._slot_of(self._runs[job]).restored

    # --- parts of a step ---------------------------------------------------------------------------------------------
    def _expire(self, now: float) -> tuple[int, ...]:
        """Ends the jobs whose deadline has passed before the first token of their request."""
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
        """Removes the deadlines of a request once it has a first token; its other answers may wait longer."""
        run.deadline = None
        if run.job.request is not None:
            for other in self._runs.values():
                if other.job.request == run.job.request:
                    other.deadline = None

    def _admit(self, now: float) -> None:
        """Gives free slots to the first waiting jobs."""
        if self._catalog:
            self._seek(now)
        for run in self._waiting[: self._free]:
            if self._is_prefilled_by_sibling(run) or self._is_fetching(run, now):
                continue  # its slot stays free for it
            if self.limits.cells and not self._has_cells(run):
                return
            tokens = run.tokens[:] if run.tokens is run.job.prompt else run.tokens
            slot = self.slots.take(tokens, run.job.tenant, self._reusable(run))
            if slot is None:
                return  # sequences move first, in this step or in later ones
            self._waiting.remove(run)
            run.tokens, run.slot = tokens, slot  # copied not earlier, so that waiting choices share one prompt
            slot.priority, slot.hint = run.job.priority, run.job.kv
            if self.limits.checkpoints:
                run.stops = checkpoint_stops(run.job, slot.computed, self.limits)
            insort(self._running, run, key=_order)
            self._move(run, "admit")

    def _seek(self, now: float) -> None:
        """Begins to read the sequences from disk that waiting jobs can continue from."""
        for run in self._waiting[: self._free + self.limits.prefetched]:
            if run.sought:
                continue
            run.sought = True
            run.awaited = self.slots.on_disk(run.tokens, run.job.tenant, self._reusable(run))
            if run.awaited is not None:
                # A longer wait would take longer than computing the tokens again.
                run.fetch_until = now + max(MIN_FETCH_SECONDS, run.awaited.compute_seconds)
                self.slots.fetch(run.awaited)

    @staticmethod
    def _is_fetching(run: _Run, now: float) -> bool:
        return run.awaited is not None and run.awaited.fetching and now < run.fetch_until

    @property
    def _free(self) -> int:
        """Number of slots that may be assigned now."""
        if self._crowded and self._running:
            return 0
        return max(0, min(self.limits.slots, self._most) - len(self._running))

    def _is_prefilled_by_sibling(self, run: _Run) -> bool:
        """Whether another choice is prefilling the same prompt, so that this one can copy its cells later."""
        group = run.job.group
        can_share = self.limits.can_trim or self.limits.checkpoints
        if group is None or not can_share or self._reusable(run) < self.limits.min_copied:
            return False
        return any(
            other.phase is PREFILL and other.job.group == group and self._left(other) > 1 for other in self._running
        )

    def _reusable(self, run: _Run) -> int:
        """Tokens that may be reused. The logits of the last token and of tokens to be scored are needed."""
        if run.job.score and run.scored < len(run.job.prompt):
            return min(run.scored, len(run.tokens) - 1)
        return len(run.tokens) - 1

    def _take_checkpoints(self) -> None:
        """Saves the state of slots that have reached a stop, or have computed their prompt."""
        for run in self._running:
            slot = self._slot_of(run)
            if slot.computed in run.stops or (run.generated == 1 and slot.computed == len(run.job.prompt)):
                self.slots.save_checkpoint(slot)

    def _decoding(self) -> list[Row]:
        """A row for each job with exactly one token to compute."""
        rows: list[Row] = []
        for run in self._running:
            slot = run.slot
            if slot is not None and len(run.tokens) - slot.computed == 1:
                rows.append(self._row(run, slot, 1))
        return rows

    def _with_proposals(self, rows: Sequence[Row], propose: Propose, free: int) -> list[Row]:
        """`rows` with the proposed next tokens of their jobs, at most `free` in total.

        Each row gets an equal share, because llama.cpp computes rows together as far as they have the same length.
        """
        room = min(free, self.limits.batch - len(rows), (self.limits.outputs or self.limits.slots) - len(rows))
        found = list(rows)
        places, candidates = [], []
        for place, row in enumerate(rows):
            run = self._runs[row.job]
            most = min(room // len(rows), self.limits.context - len(run.tokens))
            if most > 0 and run.phase is DECODE and run.job.speculates:
                places.append(place)
                candidates.append(Candidate(row.job, row.slot, run.tokens, most))
        if candidates:
            for place, proposed in zip(places, propose(candidates, len(rows)), strict=True):
                if proposed:
                    row = rows[place]
                    found[place] = row._replace(tokens=[*row.tokens, *proposed], every=True, proposed=len(proposed))
        return found

    def _prefilling(self, rows: list[Row], budget: int, free: int) -> None:
        """Divides `budget` among the prompts and appends their rows. `free`: the maximum number of their tokens.

        The prompts with the fewest remaining tokens come first, so that first tokens come one after the other. The
        oldest prompt always gets a part, so that shorter ones cannot starve it. Complete prompts are preferred to
        pieces. Scored prompts are limited by the available outputs. An image is never divided, even if it exceeds the
        budget; an image that does not fit into the batch comes first in the next step.
        """
        prompts = sorted(
            [(not run.passed, self._left(run), run.key, run) for run in self._running if self._left(run) > 1]
        )
        most = min(self.limits.batch - len(rows), free)
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
            rest = room - kept
            piece = max(rest, part) if run is oldest else rest if rest >= worth else 0
            count = left if left <= rest + stretch else piece
            if run.job.score:
                count = min(count, self._scorable(run, slot, outputs + 1))
            count = min(count, self.limits.batch - planned)  # an image may have taken what was kept for the oldest
            if stop := next((stop for stop in run.stops if stop > slot.computed), 0):
                count = min(count, stop - slot.computed)
            if 0 < count < left:
                count = self._undivided(run, slot, count, planned)
            if count > 0:
                rows.append(row := self._row(run, slot, count))
                planned += count
                room -= count
                outputs -= count - 1 if row.every else 0

    def _undivided(self, run: _Run, slot: Slot, count: int, planned: int) -> int:
        """`count`, changed so that no image is divided; 0 if the image at its start does not fit."""
        start = slot.computed
        end = undivided(run.tokens, start, start + count, self.limits.batch - planned)
        run.passed = end == start
        return end - start

    def _scorable(self, run: _Run, slot: Slot, outputs: int) -> int:
        """How many of the remaining tokens of a scored job may go into one row."""
        if slot.computed < run.scored:
            return run.scored - slot.computed
        return outputs if slot.computed < len(run.job.prompt) else len(run.tokens)

    def _row(self, run: _Run, slot: Slot, count: int) -> Row:
        start = slot.computed
        end = start + count
        every = run.job.score and run.scored <= start < len(run.job.prompt)
        return Row(run.job.id, slot.number, start, run.tokens[start:end], end == len(run.tokens), every)

    # --- a pool of cells ---------------------------------------------------------------------------------------------
    def _has_cells(self, run: _Run) -> bool:
        """Whether another job and some tokens of each answer fit into the pool, when retained prefixes are dropped."""
        jobs = [*self._running, run]
        return len(jobs) == 1 or sum(len(job.tokens) + self.limits.answer_cells for job in jobs) <= self.limits.cells

    def _reclaim(self, budget: int) -> None:
        """Frees cells for the next step: of retained prefixes, then of running jobs, which continue later."""
        lefts = [self._left(run) for run in self._running]
        oldest = next((left for left in lefts if left > 1), 0)
        need = lefts.count(1) + min(budget, oldest)
        while self.slots.used + need > self.limits.cells:
            _, retained = self.slots.cells
            can_preempt = retained == 0 and len(self._running) > 1
            if not self.slots.shed() and not (can_preempt and self._preempt()):
                return

    def _preempt(self) -> bool:
        """Takes the slot from the running job with the fewest tokens and empties it; False if emptying has to wait.

        The oldest job keeps its slot, so that jobs end.
        """
        run = min(self._running[1:], key=lambda run: (self._slot_of(run).computed, -run.key[0]))
        slot = self._slot_of(run)
        self._leave(run)
        self._move(run, "preempt")
        insort(self._waiting, run, key=_order)
        return self.slots.shed(slot)

    # --- ends of jobs ----------------------------------------------------------------------------------------------
    def _put_back(self, run: _Run) -> None:
        self.slots.empty(self._slot_of(run))
        run.slot = None
        self._running.remove(run)
        self._move(run, "preempt")
        insort(self._waiting, run, key=_order)

    def _leave(self, run: _Run, *, keeps: bool = True) -> None:
        if keeps:
            self.slots.release(self._slot_of(run), self._now)
        else:
            self.slots.empty(self._slot_of(run))
        run.slot = None
        self._running.remove(run)
        self._crowded = False

    def _end(self, run: _Run) -> None:
        if run.slot is not None:
            self._leave(run, keeps=run.job.kv is None or run.job.kv.kind != "drop")
        elif run in self._waiting:
            self._waiting.remove(run)
        self._move(run, "end")
        del self._runs[run.job.id]

    def _left(self, run: _Run) -> int:
        """Tokens of an active job that are still to be computed."""
        return len(run.tokens) - self._slot_of(run).computed

    def _move(self, run: _Run, event: str) -> None:
        run.phase = TRANSITIONS[run.phase, event]

    def _slot_of(self, run: _Run) -> Slot:
        assert run.slot is not None
        return run.slot
