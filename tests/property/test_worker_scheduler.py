"""The scheduler under random traffic: no cell leaks, no job starves, every job ends once, memory matches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inference.protocol import Priority
from inference.worker.engine.scheduler import LAST_PART, Scheduler
from inference.worker.kv.catalog import Catalog, common_prefix
from inference.worker.steps import (
    Candidate,
    Copy,
    Fetch,
    Job,
    Limits,
    Load,
    Operation,
    Phase,
    Remove,
    RestoreCheckpoint,
    Row,
    SaveCheckpoint,
    Step,
    Store,
    StoredSequence,
    perform_all,
)

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@dataclass
class Window:
    """The cells of the sliding-window layers of a slot: a position each, None if it is empty.

    As llama.cpp does, a token takes the next cell that is empty or behind the window (`llama_kv_cache::find_slot`).
    """

    cells: list[int | None]
    head: int = 0

    def add(self, first: int, count: int, window: int) -> None:
        """Adds the tokens of a physical batch."""
        if self.head > sum(cell is not None for cell in self.cells) + 2 * count:
            self.head = 0
        for position in range(first, first + count):
            for _ in self.cells:
                at, self.head = self.head % len(self.cells), self.head % len(self.cells) + 1
                held = self.cells[at]
                if held is None or first - held >= window:
                    break
            else:
                raise AssertionError("no cell is free")
            self.cells[at] = position

    def remove(self, start: int) -> None:
        """Empties the cells from position `start` on."""
        freed = [at for at, held in enumerate(self.cells) if held is not None and held >= start]
        for at in freed:
            self.cells[at] = None
        self.head = min([self.head, *freed])

    def check(self, position: int, window: int) -> None:
        """A token at `position` attends to all positions of its window."""
        assert set(range(max(0, position - window + 1), position)) <= set(self.cells), "the window has a hole"


MOVES = ("sink", "read", "remove")

PHYSICAL = 2
"""Tokens of a physical batch in these tests."""


class Memory:
    """The cells of llama.cpp: per cell of a slot the token and its tenant.

    Every mistake is an assertion. `copied_states`: slots whose recurrent state is that of a longer sequence. `moving`:
    slots that are copied to or from with the next batch. `stored`: the cells of stored sequences. `refusals`: how many
    of the next transfers fail.
    """

    def __init__(self, limits: Limits, catalog: Catalog | None = None) -> None:
        self.limits = limits
        self.catalog = catalog
        self.stored: dict[StoredSequence, list[tuple[int, str]]] = {}
        self.moving: set[int] = set()
        self.arriving: set[int] = set()
        self.refusals = 0
        self.slots: list[list[tuple[int, str]]] = [[] for _ in range(limits.slots)]
        self.windows = [Window([None] * limits.window_cells) for _ in range(limits.slots)]
        self.copied_states: set[int] = set()

    def tokens(self, slot: int) -> list[int]:
        return [token for token, _tenant in self.slots[slot]]

    def run(self, step: Step, transfers: int = 1) -> list[int]:
        """Performs the operations, at most `transfers` of stores and loads; returns the slots that were not loaded."""
        moved = [operation for operation in step.operations if isinstance(operation, Store | Load)]
        assert len(moved) <= transfers, "too many transfers between two steps"
        return perform_all(step.operations, self.perform)

    def perform(self, operation: Operation) -> bool:
        copies = self.arriving if self.limits.window else set()
        match operation:
            case Remove(slot, start):
                assert start == 0 or self.limits.can_trim, "a running state cannot be cut"
                self.cut(slot, start)
                if start == 0:
                    copies.discard(slot)
            case Copy(source, target, count):
                assert not self.slots[target], "copied over tokens"
                assert self.limits.min_copied <= count <= len(self.slots[source])
                self.slots[target] = self.slots[source][:count]
                self.windows[target] = Window(self.windows[source].cells[:], self.windows[source].head)
                self.windows[target].remove(count)
                if not self.limits.can_trim:
                    self.copied_states.add(target)
                self.moving |= {source, target}
                self.arriving.add(target)
            case SaveCheckpoint(slot, checkpoint):
                assert checkpoint.position == len(self.slots[slot])
                checkpoint.state = self.slots[slot][:]
                self.windows[slot].check(checkpoint.position, self.limits.window)
                assert slot not in copies, "window cells of a copy come with the next batch"
            case RestoreCheckpoint(slot, checkpoint):
                assert self.slots[slot][: checkpoint.position] == checkpoint.state, "the state of other tokens"
                assert slot not in copies, "window cells of a copy come with the next batch"
                self.cut(slot, checkpoint.position)
                self.refill(slot, checkpoint.position)
                self.copied_states.discard(slot)
            case Store():
                self.store(operation)
            case Load(slot, sequence, checkpoints):
                assert slot not in self.moving, "a copy that comes with the next batch would overwrite it"
                assert not self.slots[slot] and sequence.in_ram
                if self.refuses():
                    self.forget(sequence)
                    return False
                self.slots[slot] = self.stored[sequence][:]
                self.check_cells()
                self.refill(slot, len(self.slots[slot]))
                sequence.fetched = False
                assert [(item.position, item.oldest) for item in checkpoints] == list(sequence.checkpoints)
                for checkpoint in checkpoints:
                    checkpoint.state = self.slots[slot][: checkpoint.position]
            case Fetch(sequence):
                assert sequence.fetching and not sequence.in_ram
        return True

    def store(self, operation: Store) -> None:
        slot, sequence, checkpoints = operation.slot, operation.sequence, operation.checkpoints
        assert slot not in self.arriving, "the cells of a copy come with the next batch"
        assert slot not in self.copied_states, "the state is that of later tokens"
        assert self.tokens(slot) == list(sequence.tokens)
        assert {tenant for _token, tenant in self.slots[slot]} == {sequence.tenant}
        if self.refuses():
            return
        assert self.catalog is not None
        saved = [(item, pair) for item, pair in zip(checkpoints, sequence.checkpoints, strict=True) if item.state]
        assert all(item.state == self.slots[slot][: item.position] for item, _pair in saved)
        sequence.checkpoints = [pair for _item, pair in saved]
        if (known := self.catalog.same(sequence.tokens, sequence.tenant)) is not None:
            self.forget(known)
        sequence.in_ram = True
        self.catalog.add(sequence)
        self.stored[sequence] = self.slots[slot][:]

    def move(self, sequence: StoredSequence, what: str) -> None:
        if what == "sink" and sequence.in_ram:
            sequence.in_ram, sequence.on_disk = False, True
        elif what == "read" and sequence.on_disk:
            sequence.in_ram, sequence.fetching, sequence.fetched = True, False, True
        elif what == "remove":
            self.forget(sequence)

    def refuses(self) -> bool:
        self.refusals -= 1
        return self.refusals >= 0

    def forget(self, sequence: StoredSequence) -> None:
        assert self.catalog is not None
        self.catalog.remove(sequence)
        self.stored.pop(sequence)
        sequence.in_ram = sequence.fetching = False

    def check_cells(self) -> None:
        if self.limits.cells:
            assert sum(map(len, self.slots)) <= self.limits.cells, "the pool has no more cells"

    def cut(self, slot: int, start: int) -> None:
        del self.slots[slot][start:]
        self.windows[slot].remove(start)
        if start == 0:
            self.copied_states.discard(slot)

    def refill(self, slot: int, count: int) -> None:
        """The window layers have only what the checkpoint has."""
        if self.limits.window:
            first = max(0, count - self.limits.window)
            self.windows[slot].remove(0)
            self.windows[slot].add(first, count - first, self.limits.window)

    def decode(self, step: Step, tenants: Mapping[int, str]) -> None:
        self.moving.clear()
        self.arriving.clear()
        slots = [row.slot for row in step.rows]
        if step.rows and self.limits.cells:
            assert sum(map(len, self.slots)) + step.tokens <= self.limits.cells, "the pool has no more cells"
        assert slots == sorted(set(slots)), "one slot twice in a batch, or rows that are not computed together"
        for row in step.rows:
            assert row.start == len(self.slots[row.slot]), "a hole in the positions"
            assert row.tokens
            assert row.slot not in self.copied_states, "the state is that of later tokens"
        total = sum(len(row.tokens) for row in step.rows)
        assert total == step.tokens <= self.limits.batch
        assert sum(len(row.tokens) if row.every else row.sample for row in step.rows) <= self.limits.outputs
        for row in step.rows:
            self.slots[row.slot] += [(token, tenants[row.job]) for token in row.tokens]
            assert len(self.slots[row.slot]) <= self.limits.context, "a sequence has no cells but its own"
            if self.limits.window:
                for first in range(row.start, row.start + len(row.tokens), PHYSICAL):
                    self.windows[row.slot].check(first, self.limits.window)
                    count = min(PHYSICAL, row.start + len(row.tokens) - first)
                    self.windows[row.slot].add(first, count, self.limits.window)


@dataclass
class Live:
    """The known state of a live job; `scored` counts prompt tokens whose logits were computed."""

    job: Job
    tokens: list[int]
    wanted: int
    decodes: bool = False
    suspended: bool = False
    scored: int = 0


class Traffic(RuleBasedStateMachine):
    """Submits, aborts, steps and failures in any order. llama.cpp may have no room although it reported some."""

    @initialize(
        slots=st.integers(1, 4),
        context=st.integers(14, 40),
        batch=st.integers(4, 16),
        outputs=st.integers(0, 3),
        can_trim=st.booleans(),
        min_copied=st.integers(1, 6),
        window=st.sampled_from((0, 0, 2, 3, 5)),
        checkpoints=st.integers(0, 3),
        apart=st.integers(2, 5),
        tiers=st.booleans(),
        pool=st.sampled_from((0, 0, 0, 1, 5, 20)),
        proposes=st.booleans(),
    )
    def begin(
        self,
        slots: int,
        context: int,
        batch: int,
        outputs: int,
        can_trim: bool,
        min_copied: int,
        window: int,
        checkpoints: int,
        apart: int,
        tiers: bool,
        pool: int,
        proposes: bool,
    ) -> None:
        self.tiers = tiers
        self.proposes = proposes and can_trim and not window
        if can_trim and not window:
            checkpoints = 0
        self.limits = Limits(
            slots, context, batch, 6, can_trim, slots + outputs, min_copied, window,
            window + PHYSICAL if window else 0, checkpoints, apart, min(apart, 2), apart % 3,
            cells=context + pool if pool else 0, answer_cells=1,
        )  # fmt: skip
        self.restart()

    proposes = False

    def restart(self) -> None:
        """A new scheduler with the present limits."""
        catalog = Catalog() if self.tiers else None
        self.scheduler = Scheduler(self.limits, catalog)
        self.memory = Memory(self.limits, catalog)
        self.now = 0.0
        self.next_id = 1
        self.live: dict[int, Live] = {}
        self.ended: list[int] = []
        self.begun: set[int | None] = set()
        self.past: list[tuple[list[int], str]] = []

    @precondition(lambda self: self.past)
    @rule(data=st.data(), more=TOKENS, answer=st.integers(1, 8), steps=st.integers(0, 12))
    def follow_up(self, data: st.DataObject, more: list[int], answer: int, steps: int) -> None:
        """A prompt that departs somewhere in an earlier sequence, and some steps."""
        tokens, tenant = data.draw(st.sampled_from(self.past))
        prompt = [*tokens[: len(tokens) - data.draw(st.integers(0, 8))], *more][: self.limits.context - 1]
        self.submit(prompt, tenant, Priority.NORMAL, 1, None, answer, score=False, alone=True)
        for _ in range(steps):
            self.advance(8)

    @rule(
        prompt=TOKENS,
        tenant=st.sampled_from("xy"),
        priority=st.sampled_from(Priority),
        choices=st.integers(1, 3),
        wait=st.none() | st.floats(0.0, 5.0),
        answer=st.integers(1, 8),
        score=st.booleans(),
        alone=st.booleans(),
    )
    def submit(
        self,
        prompt: list[int],
        tenant: str,
        priority: Priority,
        choices: int,
        wait: float | None,
        answer: int,
        score: bool,
        alone: bool,
    ) -> None:
        """The choices of one prompt, as one request or as one each."""
        ids = list(range(self.next_id, self.next_id + choices))
        self.next_id += choices
        deadline = None if wait is None else self.now + wait
        group = None if score else ids[0]
        request = None if alone else ids[0]
        starts = [at for at, token in enumerate(prompt) if token == 2]
        jobs = [
            Job(id, tuple(prompt), tenant, priority, self.now, deadline, group, score, request, starts) for id in ids
        ]
        before = self.scheduler.queued
        free = self.limits.slots - self.scheduler.active
        taken = self.scheduler.submit(jobs)
        assert taken == (before + choices <= self.limits.queue + free)
        if taken:
            self.live.update({job.id: Live(job, list(prompt), answer) for job in jobs})

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """A job that is aborted in any phase has no row in the next step."""
        job = data.draw(st.sampled_from(sorted(self.live)))
        self.scheduler.abort(job)
        self.end(job)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def suspend(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(sorted(self.live)))
        self.scheduler.suspend(job)
        self.live[job].suspended = True
        self.live[job].decodes = False

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(sorted(self.live)))
        self.scheduler.resume(job)
        self.live[job].suspended = False

    @precondition(lambda self: self.tiers)
    @rule(data=st.data(), what=st.sampled_from(MOVES))
    def move(self, data: st.DataObject, what: str) -> None:
        """Stored sequences leave host memory for the disk, come back, or are removed."""
        stored = list(self.memory.stored)
        for sequence in data.draw(st.lists(st.sampled_from(stored), unique_by=id)) if stored else []:
            self.memory.move(sequence, what)

    @precondition(lambda self: self.tiers)
    @rule(times=st.integers(1, 3))
    def refuse(self, times: int) -> None:
        """The next transfers fail."""
        self.memory.refusals = times

    @precondition(lambda self: self.tiers)
    @rule(times=st.integers(1, 3))
    def store(self, times: int) -> None:
        """Retained sequences are stored ahead of need."""
        for _ in range(times):
            if (operation := self.scheduler.slots.store_one()) is not None:
                self.memory.store(operation)

    @rule(
        budget=st.integers(1, 16),
        fate=st.sampled_from(["ok"] * 8 + ["no room", "failed", "lost"]),
        transfers=st.sampled_from([1, 1, 2, 5]),
    )
    def step(self, budget: int, fate: str, transfers: int) -> None:
        self.advance(budget, fate, transfers)

    @rule(seconds=st.floats(0.0, 3.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    def waiting(self) -> set[int]:
        return {job for job, phase, _at, _of in self.scheduler.progress() if phase is Phase.WAITING}

    def key(self, job: int) -> tuple[float, int]:
        return self.live[job].job.key

    def advance(self, budget: int, fate: str = "ok", transfers: int = 1) -> int:
        """One step as the engine runs it; returns the number of computed tokens."""
        waited = self.waiting()
        ran = [job for job, known in self.live.items() if job not in waited and not known.suspended]
        step = self.scheduler.plan(self.now, budget, transfers, self.propose if self.proposes else None)
        late = {job for job, known in self.live.items() if self.is_late(known)}
        assert set(step.expired) == late
        for job in step.expired:
            self.end(job)
        self.check_order(waited, ran)
        lost = self.memory.run(step, transfers)
        if lost:
            self.scheduler.not_restored(lost)
            return 0
        self.check_rows(step, budget)
        if not step.rows:
            waits = any(isinstance(item, Store | Load | Fetch) for item in step.operations) or self.is_fetching()
            waits = waits or (self.limits.cells > 0 and bool(step.operations))
            could_run = [job for job, known in self.live.items() if not known.suspended]
            assert waits or not could_run, "a job could run"
            streams = set(ran) & {job for job, known in self.live.items() if known.decodes}
            assert streams <= self.waiting(), "streams wait for more than one transfer"
            return 0
        if fate == "failed":
            for job in self.scheduler.failed():
                self.end(job)
            return 0
        if fate == "no room":
            self.run_out()
            return 0
        self.memory.decode(step, {job: known.job.tenant for job, known in self.live.items()})
        self.scheduler.computed()
        for row in step.rows:
            known = self.live[row.job]
            if row.every and not row.proposed:
                assert row.start <= known.scored, "tokens that were to be scored were skipped"
                known.scored = max(known.scored, row.start + len(row.tokens))
        if fate == "lost":
            self.remove_rejected(step)
            finished = {row.job for row in step.rows if row.sample}
            assert set(self.scheduler.failed()) == finished, "the shell failed before it reported a token"
            for job in finished:
                self.end(job)
            return step.tokens
        for row in step.rows:
            if row.sample:
                self.verify(row)
        self.remove_rejected(step)
        return step.tokens

    def propose(self, candidates: Sequence[Candidate], jobs: int) -> list[list[int]]:
        """The tokens that will be drawn, some of them wrong."""
        assert 0 < len(candidates) <= jobs
        found = []
        for job, _slot, tokens, most in candidates:
            assert list(tokens) == self.live[job].tokens
            assert most > 0
            count = (job + len(tokens)) % 5
            found.append([(job + at + (at % 4 == 0)) % 3 for at in range(len(tokens), len(tokens) + min(most, count))])
        return found

    def verify(self, row: Row) -> None:
        """Draws after each token of a row until one differs from the next. The job may be suspended meanwhile."""
        known = self.live[row.job]
        for proposed in (*row.tokens[len(row.tokens) - row.proposed :], None):
            self.sampled(row.job, known)
            if row.job not in self.live or known.tokens[-1] != proposed:
                return
            if len(known.tokens) % 7 == 0:
                self.scheduler.suspend(row.job)
                known.suspended, known.decodes = True, False

    def remove_rejected(self, step: Step) -> None:
        for row in step.rows:
            if row.proposed:
                self.memory.cut(row.slot, self.scheduler.slots.computed(row.slot))

    def is_fetching(self) -> bool:
        return any(sequence.fetching for sequence in self.memory.stored)

    def is_late(self, known: Live) -> bool:
        """Whether the deadline passed before the request had a first token from any of its jobs."""
        deadline, request = known.job.deadline, known.job.request
        has_begun = len(known.tokens) > len(known.job.prompt) or (request is not None and request in self.begun)
        return deadline is not None and deadline <= self.now and not has_begun

    def sampled(self, job: int, known: Live) -> None:
        self.begun.add(known.job.request)
        assert not known.job.score or known.scored >= len(known.job.prompt), "an answer began before the scores"
        known.wanted -= 1
        if known.wanted <= 0 or len(known.tokens) >= self.limits.context:
            self.scheduler.finish(job)
            self.end(job)
            return
        token = (job + len(known.tokens)) % 3
        known.tokens.append(token)
        known.decodes = not known.suspended
        self.scheduler.extend(job, token)

    def run_out(self) -> None:
        """llama.cpp had no room: the youngest running job is preempted, and only a job that is alone ends."""
        running = sorted(
            set(self.live) - self.waiting() - {job for job, k in self.live.items() if k.suspended}, key=self.key
        )
        waited = self.waiting()
        ended = self.scheduler.no_room()
        assert list(ended) == (running if len(running) == 1 else [])
        for job in ended:
            self.end(job)
        assert self.waiting() - waited == set(running[1:][-1:]), "not the youngest was preempted"
        for job in running[1:][-1:]:
            self.live[job].decodes = False

    def check_order(self, waited: set[int], ran: list[int]) -> None:
        """No job overtakes an earlier one, and running jobs keep running."""
        now_waiting = self.waiting()
        assert self.limits.cells or not now_waiting & set(ran), "a step preempted a job"
        for job in now_waiting & set(ran):
            self.live[job].decodes = False
        admitted = [job for job in waited - now_waiting if job in self.live]
        passed = [
            job
            for job in (now_waiting & waited)
            if job in self.live and any(self.key(job) < self.key(other) for other in admitted)
        ]
        for job in passed:
            if self.is_fetching():
                continue  # its slot stays free for it
            assert self.live[job].job.group is not None, "overtaken"
            assert any(self.live[other].job.group == self.live[job].job.group for other in self.live if other != job)
        assert len(passed) <= self.limits.slots - self.scheduler.active, "a choice lost its place"

    def check_rows(self, step: Step, budget: int) -> None:
        served = set()
        for row in step.rows:
            known = self.live[row.job]
            assert not known.suspended
            served.add(row.job)
            own = len(row.tokens) - row.proposed
            assert list(row.tokens[:own]) == known.tokens[row.start : row.start + own]
            assert not row.proposed or (own == 1 and not step.prefill)
            assert self.memory.tokens(row.slot) == known.tokens[: row.start], "reused tokens are not the prompt's own"
            assert row.sample == (row.start + own == len(known.tokens))
            assert {tenant for _token, tenant in self.memory.slots[row.slot]} <= {known.job.tenant}
        for job, known in self.live.items():
            assert not known.decodes or job in served or self.limits.cells, "a decoding sequence was left out"
        assert step.proposed == sum(row.proposed for row in step.rows)
        prompts = [len(row.tokens) for row in step.rows if not self.live[row.job].decodes]
        assert step.prefill <= max(budget + budget // LAST_PART, len(prompts))

    def end(self, job: int) -> None:
        known = self.live.pop(job)
        self.past = [*self.past[-5:], (known.tokens, known.job.tenant)]
        assert job not in self.ended
        self.ended.append(job)

    @invariant()
    def every_live_job_is_known_and_no_other(self) -> None:
        if hasattr(self, "scheduler"):
            assert self.scheduler.active + self.scheduler.queued == len(self.live)
            assert 0 <= self.scheduler.active <= self.limits.slots

    def teardown(self) -> None:
        """After any history everything ends within a limit, and a sequence finds all cells of its slot."""
        if not hasattr(self, "scheduler"):
            return
        total = sum(len(known.tokens) + known.wanted for known in self.live.values())
        bound = total + 2 * len(self.live) + 10 + self.tiers * (4 * len(self.live) + 4)
        bound *= 4 if self.limits.cells else 1
        steps = 0
        while self.live:
            for job, known in self.live.items():
                self.scheduler.resume(job)
                known.suspended = False
            self.advance(4)
            self.now += 0.5  # no job waits for long for a sequence from disk
            steps += 1
            assert steps <= bound, "a job starves"
        whole = Job(self.next_id, (2,) * self.limits.context, "z")
        assert self.scheduler.submit([whole])
        self.live[whole.id] = Live(whole, [2] * self.limits.context, 1)
        for _ in range(bound + 100):
            if self.live:
                assert self.advance(16) > 0 or self.tiers
                self.now += 0.5
        assert not self.live, "a job starves"
        assert sum(map(len, self.memory.slots)) == self.scheduler.slots.used, "a cell leaked"


TestTraffic = pytest.mark.unmeasured(Traffic.TestCase)
TestTraffic.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@given(st.lists(st.integers(0, 1)), st.lists(st.integers(0, 1)), st.integers(0, 30))
def test_common_prefix_is_the_longest(left: list[int], right: list[int], limit: int) -> None:
    length = common_prefix(left, right, limit)
    assert left[:length] == right[:length]
    assert length <= limit
    longer = length + 1
    assert longer > min(limit, len(left), len(right)) or left[:longer] != right[:longer]


@given(st.lists(st.tuples(TOKENS, st.sampled_from("xyz")), min_size=2, max_size=12))
def test_no_prefix_is_reused_across_tenants(requests: list[tuple[list[int], str]]) -> None:
    """A row starts beyond 0 only if an earlier request of the same tenant had the same prefix."""
    limits = Limits(slots=2, context=50, batch=16, queue=1)
    scheduler = Scheduler(limits)
    for number, (prompt, tenant) in enumerate(requests):
        scheduler.submit([Job(number, tuple(prompt), tenant)])
        (row,) = scheduler.plan(0.0, 16).rows
        own = [earlier for earlier, other in requests[:number] if other == tenant]
        assert row.start <= max((common_prefix(earlier, prompt, len(prompt) - 1) for earlier in own), default=0)
        scheduler.computed()
        scheduler.finish(number)


def test_low_priority_is_served_under_continuous_high_priority() -> None:
    """The head start of a class is a fixed time, so that high priority cannot block low priority."""
    scheduler = Scheduler(Limits(slots=1, context=50, batch=8, queue=10))
    scheduler.submit([Job(0, (1,), priority=Priority.LOW, arrival=0.0)])
    scheduler.submit([Job(1, (1,), priority=Priority.HIGH, arrival=0.0)])
    served = []
    now = 0.0
    for number in range(2, 100):
        (row,) = scheduler.plan(now, 8).rows
        scheduler.computed()
        scheduler.finish(row.job)
        served.append(row.job)
        now += 5.0
        scheduler.submit([Job(number, (1,), priority=Priority.HIGH, arrival=now)])
        if 0 in served:
            break
    assert served[0] == 1
    assert 0 in served
    assert now <= 70.0


def test_choices_of_one_prompt_compute_it_once() -> None:
    """The first choice prefills; the others copy all but the last token."""
    scheduler = Scheduler(Limits(slots=3, context=100, batch=64, queue=5))
    prompt = tuple(range(20))
    scheduler.submit([Job(number, prompt, group=7) for number in (1, 2, 3)])
    first = scheduler.plan(0.0, 64)
    assert [(row.job, len(row.tokens)) for row in first.rows] == [(1, 20)]
    scheduler.computed()
    scheduler.extend(1, 5)
    second = scheduler.plan(0.0, 64)
    assert sorted((row.job, row.start, len(row.tokens)) for row in second.rows) == [(1, 20, 1), (2, 19, 1), (3, 19, 1)]
    assert [type(operation) for operation in second.operations] == [Copy, Copy]


def test_long_prompts_share_the_budget_and_do_not_delay_decoding() -> None:
    """Every step serves all decoding jobs; short prompts do not wait for a long one."""
    scheduler = Scheduler(Limits(slots=3, context=300, batch=64, queue=5))
    scheduler.submit([Job(1, (1, 2))])
    scheduler.plan(0.0, 8)
    scheduler.computed()
    scheduler.extend(1, 9)
    scheduler.submit([Job(2, (3,) * 200), Job(3, (4,) * 6)])
    step = scheduler.plan(0.0, 8)
    assert {row.job: len(row.tokens) for row in step.rows} == {1: 1, 2: 2, 3: 6}
    assert [entry[:2] for entry in scheduler.progress()] == [(2, Phase.PREFILL), (3, Phase.PREFILL)]


@pytest.mark.unmeasured
@settings(max_examples=300, deadline=None)
@given(
    slots=st.integers(1, 3),
    can_trim=st.booleans(),
    window=st.sampled_from((0, 2, 3, 5)),
    checkpoints=st.integers(1, 4),
    apart=st.integers(2, 6),
    min_copied=st.integers(1, 6),
    turns=st.lists(
        st.tuples(
            st.integers(0, 3),
            st.integers(0, 20),
            TOKENS,
            st.integers(1, 8),
            st.booleans(),
            st.sampled_from(("", *MOVES)),
        ),
        min_size=4,
        max_size=25,
    ),
    tiers=st.booleans(),
)
def test_each_prompt_is_computed_with_the_state_of_its_own_tokens(
    slots: int,
    can_trim: bool,
    window: int,
    checkpoints: int,
    apart: int,
    min_copied: int,
    turns: list[tuple[int, int, list[int], int, bool, str]],
    tiers: bool,
) -> None:
    """Prompts differ from earlier sequences at any position; slots have windows, states and checkpoints."""
    traffic = Traffic()
    traffic.tiers = tiers
    traffic.limits = Limits(
        slots, 64, 16, 6, can_trim, slots + 1, min_copied, window, window + PHYSICAL if window else 0,
        checkpoints if window or not can_trim else 0, apart, 2,
    )  # fmt: skip
    traffic.restart()
    for which, back, more, answer, waits, move in turns:
        tokens, tenant = traffic.past[which % len(traffic.past)] if traffic.past else ([], "x")
        prompt = [*tokens[: max(0, len(tokens) - back)], *more][:60]
        traffic.submit(prompt, tenant, Priority.NORMAL, 1, None, answer, score=False, alone=True)
        while waits and traffic.live:
            traffic.advance(8)
            traffic.now += 0.1
        for sequence in list(traffic.memory.stored) if move else ():
            traffic.memory.move(sequence, move)
    traffic.teardown()


@pytest.mark.unmeasured
@settings(max_examples=200, deadline=None)
@given(
    slots=st.integers(1, 4),
    can_trim=st.booleans(),
    window=st.sampled_from((0, 3)),
    min_copied=st.integers(1, 4),
    rounds=st.lists(
        st.tuples(
            st.lists(
                st.tuples(st.integers(0, 5), st.integers(0, 20), TOKENS, st.integers(1, 8)), min_size=1, max_size=3
            ),
            st.booleans(),
        ),
        max_size=20,
    ),
)
def test_displaced_sequences_are_stored(
    slots: int,
    can_trim: bool,
    window: int,
    min_copied: int,
    rounds: list[tuple[list[tuple[int, int, list[int], int]], bool]],
) -> None:
    """Whatever was computed is in a slot or in the store, except for ends that are not worth a copy."""
    traffic = Traffic()
    traffic.tiers = True
    traffic.limits = Limits(
        slots, 64, 16, 6, can_trim, slots + 1, min_copied, window, window + PHYSICAL if window else 0,
        2 if window or not can_trim else 0, 3, 2,
    )  # fmt: skip
    traffic.restart()
    known: list[list[int]] = []
    for turns, ahead in rounds:
        for which, back, more, answer in turns:
            tokens = known[which % len(known)] if known else []
            prompt = [*tokens[: max(0, len(tokens) - back)], *more][:50]
            traffic.submit(prompt, "x", Priority.NORMAL, 1, None, answer, score=False, alone=True)
        together = list(traffic.live.values())
        while traffic.live:
            traffic.advance(8)
        known.extend(live.tokens[:-1] for live in together)  # the last token was not computed
        if ahead and (operation := traffic.scheduler.slots.store_one()) is not None:
            traffic.memory.store(operation)
    held = [traffic.memory.tokens(slot) for slot in range(slots)]
    held += [list(sequence.tokens) for sequence in traffic.memory.stored]
    for tokens in known:
        found = max((common_prefix(other, tokens, len(tokens)) for other in held), default=0)
        assert found > len(tokens) - min_copied, "computed tokens were lost"
