"""The scheduler under random traffic: no cell leaks, nobody starves, every job ends once, memory is as believed."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inference.protocol import Priority
from inference.worker.core.scheduler import Scheduler
from inference.worker.core.slots import common_prefix
from inference.worker.core.steps import Copy, Job, Limits, Phase, Remove, Step

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)


class Memory:
    """What llama.cpp would hold: tokens per slot, and every mistake is an assertion."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.slots: list[list[int]] = [[] for _ in range(limits.slots)]

    def run(self, step: Step) -> None:
        for operation in step.operations:
            if isinstance(operation, Remove):
                if not self.limits.can_trim:
                    assert operation.start == 0, "a running state cannot be cut"
                del self.slots[operation.slot][operation.start :]
            else:
                assert isinstance(operation, Copy)
                assert self.limits.can_trim, "a running state cannot be shared"
                assert not self.slots[operation.target], "copied over tokens"
                assert operation.count <= len(self.slots[operation.source])
                self.slots[operation.target] = self.slots[operation.source][: operation.count]

    def decode(self, step: Step) -> None:
        seen = set()
        for row in step.rows:
            assert row.slot not in seen, "one slot twice in a batch"
            seen.add(row.slot)
            assert row.start == len(self.slots[row.slot]), "a hole in the positions"
            assert row.tokens
            self.slots[row.slot] += row.tokens
        assert sum(len(row.tokens) for row in step.rows) <= self.limits.batch
        assert sum(map(len, self.slots)) <= self.limits.cells


class Traffic(RuleBasedStateMachine):
    """Submits, aborts, steps, failures and cell shortages in any order."""

    @initialize(
        slots=st.integers(1, 4),
        context=st.integers(14, 24),
        spare=st.integers(0, 40),
        batch=st.integers(4, 16),
        can_trim=st.booleans(),
    )
    def begin(self, slots: int, context: int, spare: int, batch: int, can_trim: bool) -> None:
        self.limits = Limits(slots, context + spare, context, batch, queue=6, can_trim=can_trim)
        self.scheduler = Scheduler(self.limits)
        self.memory = Memory(self.limits)
        self.now = 0.0
        self.next_id = 1
        self.live: dict[int, list[int]] = {}
        self.wanted: dict[int, int] = {}
        self.tenants: dict[int, str] = {}
        self.slot_tenants: dict[int, str] = {}

    @rule(
        prompt=TOKENS,
        tenant=st.sampled_from("xy"),
        priority=st.sampled_from(Priority),
        choices=st.integers(1, 3),
        wait=st.none() | st.floats(0.0, 5.0),
        answer=st.integers(1, 8),
    )
    def submit(
        self, prompt: list[int], tenant: str, priority: Priority, choices: int, wait: float | None, answer: int
    ) -> None:
        ids = list(range(self.next_id, self.next_id + choices))
        self.next_id += choices
        deadline = None if wait is None else self.now + wait
        jobs = [Job(id, tuple(prompt), tenant, priority, self.now, deadline, ids[0]) for id in ids]
        before = self.scheduler.queued
        free = self.limits.slots - self.scheduler.active
        taken = self.scheduler.submit(jobs)
        assert taken == (before + choices <= self.limits.queue + free)
        if taken:
            for id in ids:
                self.live[id] = list(prompt)
                self.wanted[id] = answer
                self.tenants[id] = tenant

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(sorted(self.live)))
        self.scheduler.abort(job)
        self.end(job)

    @rule(budget=st.integers(1, 16), fate=st.sampled_from(["ok"] * 8 + ["no room", "failed"]))
    def step(self, budget: int, fate: str) -> None:
        self.advance(budget, fate)

    @rule(seconds=st.floats(0.0, 3.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    def advance(self, budget: int, fate: str = "ok") -> int:
        """One step as the engine runs it; returns how many tokens it computed."""
        step = self.scheduler.plan(self.now, budget)
        for job in step.expired:
            assert len(self.live[job]) >= 1
            self.end(job)
        for operation in step.operations:
            if isinstance(operation, Copy):
                self.slot_tenants.setdefault(operation.source, "")
        self.memory.run(step)
        for row in step.rows:
            known = self.live[row.job]
            assert list(row.tokens) == known[row.start : row.start + len(row.tokens)]
            assert self.memory.slots[row.slot] == known[: row.start], "reused tokens are not the prompt's own"
            assert row.sample == (row.start + len(row.tokens) == len(known))
        prompts = [row for row in step.rows if len(row.tokens) > 1]
        assert sum(len(row.tokens) for row in prompts) <= budget
        if not step.rows:
            return 0
        if fate == "failed":
            for job in self.scheduler.failed():
                self.end(job)
            return 0
        if fate == "no room":
            for job in self.scheduler.no_room():
                self.end(job)
            return 0
        self.memory.decode(step)
        self.scheduler.computed()
        for row in step.rows:
            if row.sample:
                self.wanted[row.job] -= 1
                if self.wanted[row.job] <= 0 or len(self.live[row.job]) >= self.limits.context:
                    self.scheduler.finish(row.job)
                    self.end(row.job)
                else:
                    token = (row.job + len(self.live[row.job])) % 3
                    self.live[row.job].append(token)
                    self.scheduler.extend(row.job, token)
        return sum(len(row.tokens) for row in step.rows)

    def end(self, job: int) -> None:
        del self.live[job]
        del self.wanted[job]

    @invariant()
    def every_live_job_is_known_and_no_other(self) -> None:
        if hasattr(self, "scheduler"):
            assert self.scheduler.active + self.scheduler.queued == len(self.live)
            assert 0 <= self.scheduler.active <= self.limits.slots
            assert self.scheduler.cells_used <= self.limits.cells

    def teardown(self) -> None:
        """Whatever happened before, everything ends in bounded time, and all cells can be had back."""
        if not hasattr(self, "scheduler"):
            return
        total = sum(len(tokens) + self.wanted[job] for job, tokens in self.live.items())
        # A preempted job computes its tokens again, once for every job that ends before it at most.
        bound = (total + 1) * (len(self.live) + 1) + 10
        steps = 0
        while self.live:
            self.advance(4)
            steps += 1
            assert steps <= bound, "somebody starves"
        whole = Job(self.next_id, (2,) * self.limits.context, "z")
        assert self.scheduler.submit([whole])
        self.live[whole.id], self.wanted[whole.id], self.tenants[whole.id] = [2] * self.limits.context, 1, "z"
        while self.live:
            assert self.advance(16) > 0
        assert self.scheduler.cells_used <= self.limits.cells


TestTraffic = Traffic.TestCase
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
    """A row may only start beyond 0 when an earlier request of the same tenant began alike."""
    limits = Limits(slots=2, cells=200, context=50, batch=16, queue=1)
    scheduler = Scheduler(limits)
    for number, (prompt, tenant) in enumerate(requests):
        scheduler.submit([Job(number, tuple(prompt), tenant)])
        (row,) = scheduler.plan(0.0, 16).rows
        own = [earlier for earlier, other in requests[:number] if other == tenant]
        assert row.start <= max((common_prefix(earlier, prompt, len(prompt) - 1) for earlier in own), default=0)
        scheduler.computed()
        scheduler.finish(number)


def test_low_priority_is_served_although_high_keeps_coming() -> None:
    """The head start of a class is a fixed time, so that a stream of high priority cannot hold up low for ever."""
    scheduler = Scheduler(Limits(slots=1, cells=50, context=50, batch=8, queue=10))
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
    scheduler = Scheduler(Limits(slots=3, cells=300, context=100, batch=64, queue=5))
    prompt = tuple(range(20))
    scheduler.submit([Job(number, prompt, group=7) for number in (1, 2, 3)])
    first = scheduler.plan(0.0, 64)
    assert [(row.job, len(row.tokens)) for row in first.rows] == [(1, 20)]
    scheduler.computed()
    scheduler.extend(1, 5)
    second = scheduler.plan(0.0, 64)
    assert sorted((row.job, row.start, len(row.tokens)) for row in second.rows) == [(1, 20, 1), (2, 19, 1), (3, 19, 1)]
    assert [type(operation) for operation in second.operations] == [Copy, Copy]


def test_long_prompts_share_the_budget_and_never_delay_decoding() -> None:
    """Every step serves all decoding jobs; short prompts do not wait for a long one."""
    scheduler = Scheduler(Limits(slots=3, cells=900, context=300, batch=64, queue=5))
    scheduler.submit([Job(1, (1, 2))])
    scheduler.plan(0.0, 8)
    scheduler.computed()
    scheduler.extend(1, 9)
    scheduler.submit([Job(2, (3,) * 200), Job(3, (4,) * 6)])
    step = scheduler.plan(0.0, 8)
    assert {row.job: len(row.tokens) for row in step.rows} == {1: 1, 2: 4, 3: 4}
    assert [entry[:2] for entry in scheduler.progress()] == [(2, Phase.PREFILL), (3, Phase.PREFILL)]
