"""Latency limits of the engine (docs/decisions.md), over steps whose cost a model gives; no clock is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inference.worker.engine.prefill_pacing import (
    CREDIT_SECONDS,
    DEBT_SECONDS,
    LARGEST_DISCOUNT,
    LONGEST_SECONDS,
    MIN_STEP_TOKENS,
    MIXED_SECONDS,
    STEP_SECONDS,
    TOKEN_SECONDS,
    Pace,
)
from inference.worker.engine.scheduler import LAST_PART, OLDEST_PART, STRETCH_PART, WORTH_PART, Scheduler
from inference.worker.steps import Job, Limits, Step

pytestmark = pytest.mark.unmeasured

SLOTS, CONTEXT, BATCH = 4, 3000, 2048


def stretch(decoding: int, prompts: int) -> float:
    """How many times its budget a step may take."""
    return 1 + 1 / (LAST_PART if prompts > decoding else STRETCH_PART)


@dataclass(frozen=True)
class Machine:
    """The cost of a step in seconds. A decoded token costs as much as one of a prompt, and `decoded` more."""

    step: float
    decoded: float
    prompt: float

    def decoding(self, count: int) -> float:
        return self.step + (self.prompt + self.decoded) * count

    def seconds(self, step: Step) -> float:
        return self.decoding(step.tokens - step.prefill) + self.prompt * step.prefill

    @property
    def leeway(self) -> float:
        """How many times longer the limits are on a slow machine."""
        return min(LARGEST_DISCOUNT, max(1.0, self.prompt / TOKEN_SECONDS))


MACHINES = st.builds(Machine, st.floats(1e-4, 0.03), st.floats(1e-5, 0.03), st.floats(1e-6, 0.03))
REQUESTS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 2500), st.integers(1, 60)), min_size=1, max_size=12)
"""(step of arrival, tokens of the prompt, tokens of the answer)"""


class Drive:
    """The loop of the engine over a cost model."""

    def __init__(self, requests: Sequence[tuple[int, int, int]]) -> None:
        self.scheduler = Scheduler(Limits(SLOTS, CONTEXT, BATCH, 20))
        self.pace = Pace.first(BATCH)
        self.arrivals = sorted((at, number, prompt, answer) for number, (at, prompt, answer) in enumerate(requests))
        self.left: dict[int, int] = {}
        self.answered: dict[int, int] = {}
        self.now = 0.0
        self.steps = 0

    def turn(self, machine: Machine) -> tuple[tuple[int, int, bool], Step] | None:
        """One step. Returns the number of decoding jobs, the number of prompts, whether no decoding job has more than
        its first token, and the step; None when everything has ended.
        """
        while self.arrivals and (self.arrivals[0][0] <= self.steps or not self.left):
            _at, number, prompt, answer = self.arrivals.pop(0)
            self.scheduler.submit([Job(number, [number] * prompt, arrival=self.now)])
            self.left[number] = answer
        if not self.left:
            return None
        decoding, prompts = self.scheduler.load
        just_begun = all(self.answered.get(job, 0) <= 1 for job in self.left)
        allowed = self.pace.seconds(decoding, prompts, just_begun=self.scheduler.just_begun)
        step = self.scheduler.plan(self.now, self.pace.budget(allowed))
        seconds = machine.seconds(step)
        self.now += seconds
        self.steps += 1
        self.scheduler.computed()
        for row in step.rows:
            if row.sample:
                self.answered[row.job] = self.answered.get(row.job, 0) + 1
                self.left[row.job] -= 1
                if self.left[row.job]:
                    self.scheduler.extend(row.job, 1)
                else:
                    self.scheduler.finish(row.job)
                    del self.left[row.job]
        self.pace = self.pace.observe(step.prefill, step.tokens, seconds, allowed, decoding=decoding, prompts=prompts)
        return (decoding, prompts, just_begun), step


@settings(max_examples=60, deadline=None)
@given(MACHINES, REQUESTS)
def test_stream_waits_for_prompts_within_the_documented_limits(
    machine: Machine, requests: list[tuple[int, int, int]]
) -> None:
    """The prompts of a step take at most

    - 0.4 s; up to 1 s in proportion to the number of prompts per stream; 1 s while no stream has had more than its
      first token,
    - and a quarter more, or half more if there are more prompts than streams,
    - or the time of 32 tokens if that is longer.

    Over any run of steps they take at most 80 ms per step and 4.5 s in addition. The more prompts there are per stream,
    the less a second counts. The limits hold from the first step on. If a token takes longer than 2 ms, they are longer
    in proportion, up to six times.
    """
    drive = Drive(requests)
    least = machine.prompt * MIN_STEP_TOKENS / machine.leeway
    held_up = 0.0
    while (turn := drive.turn(machine)) is not None:
        (decoding, prompts, just_begun), step = turn
        took = machine.prompt * step.prefill / machine.leeway
        proportion = LONGEST_SECONDS if just_begun else STEP_SECONDS * max(1.0, prompts / max(1, decoding))
        bound = min(LONGEST_SECONDS, proportion) if decoding else LONGEST_SECONDS
        assert took <= max(bound, least) * stretch(decoding, prompts) * 1.001
        counts = took * min(1.0, decoding / max(1, prompts))
        held_up = max(0.0, held_up + counts - max(MIXED_SECONDS, least)) if decoding else 0.0
        assert held_up <= (CREDIT_SECONDS + DEBT_SECONDS) * 1.001


def test_simultaneous_requests_wait_for_each_other_once() -> None:
    """Eight prompts that exceed a step of a slow model take two steps, and then no request is delayed."""
    drive = Drive([(0, 80, 4)] * 3)
    drive.scheduler = Scheduler(Limits(8, CONTEXT, BATCH, 20))
    machine = Machine(0.045, 0.008, 0.0195)
    while drive.turn(machine) is not None:
        pass  # learns the cost of a prompt
    drive.arrivals = [(drive.steps, 10 + number, 80, 4) for number in range(8)]
    prefills = []
    while (turn := drive.turn(machine)) is not None:
        prefills.append(turn[1].prefill)
    assert prefills == [320, 320, 0, 0, 0]


@example(Machine(1 / 64, 1 / 64, 1 / 64), [*[(0, 1, 1)] * 5, (0, 52, 1)], 0, 1.0)
@settings(max_examples=60, deadline=None)
@given(MACHINES, REQUESTS, st.integers(0, 40), st.floats(1.0, 20.0))
def test_only_one_step_is_too_long_after_the_machine_slows_down(
    machine: Machine, requests: list[tuple[int, int, int]], when: int, factor: float
) -> None:
    """One step after the change may be too long by that factor; the next one is not."""
    slow = Machine(machine.step * factor, machine.decoded * factor, machine.prompt * factor)
    drive = Drive(requests)
    paid = False
    while True:
        used = slow if drive.steps >= when else machine
        pace = drive.pace
        if (turn := drive.turn(used)) is None:
            return
        (decoding, prompts, just_begun), step = turn
        took = used.prompt * step.prefill / used.leeway
        least = used.prompt * MIN_STEP_TOKENS / used.leeway
        bound = max(pace.seconds(decoding, prompts, just_begun=just_begun), least) * stretch(decoding, prompts) * 1.001
        if took > bound:
            assert used is slow
            assert took <= bound * factor
            assert not paid, "a second step was too long"
            paid = True


@settings(max_examples=60, deadline=None)
@given(MACHINES, REQUESTS)
def test_all_jobs_end_within_a_limited_number_of_steps(machine: Machine, requests: list[tuple[int, int, int]]) -> None:
    """A job takes one step per token of its answer, and before that at most one per 8 tokens of its own prompt and of
    the earlier ones, because the oldest prompt gets a quarter of a budget of at least 32 tokens.
    """
    drive = Drive(requests)
    began: dict[int, int] = {}
    while True:
        before = set(drive.left)
        if (turn := drive.turn(machine)) is None:
            return
        for row in turn[1].rows:
            began.setdefault(row.job, drive.steps)
        for job in before - set(drive.left):
            before_it = [
                other for other in range(len(requests)) if (requests[other][0], other) <= (requests[job][0], job)
            ]
            pieces = sum(-(-requests[other][1] // (MIN_STEP_TOKENS // OLDEST_PART)) for other in before_it)
            assert drive.steps - began[job] < pieces + requests[job][2]


@given(
    st.lists(st.integers(2, 400), min_size=1, max_size=SLOTS),
    st.integers(0, SLOTS - 1),
    st.integers(1, 600),
)
def test_shortest_remaining_prompt_is_first_and_the_oldest_always_progresses(
    prompts: list[int], decoding: int, budget: int
) -> None:
    """The prompt with the fewest remaining tokens is completed first. The first one that cannot be completed gets half
    of the budget or more, or nothing; the ones after it get nothing. The oldest prompt gets a quarter in any case. Less
    than half of the budget is left over.
    """
    scheduler = Scheduler(Limits(SLOTS, CONTEXT, BATCH, 20))
    decoding = min(decoding, SLOTS - len(prompts))
    scheduler.submit([Job(100 + number, [100 + number]) for number in range(decoding)])
    if decoding:
        for row in scheduler.plan(0.0, budget).rows:
            scheduler.extend(row.job, 7)
        scheduler.computed()
    scheduler.submit([Job(number, [number] * length) for number, length in enumerate(prompts)])
    step = scheduler.plan(0.0, budget)
    given_to = {row.job: len(row.tokens) for row in step.rows}
    assert all(given_to[100 + number] == 1 for number in range(decoding))
    room = min(budget, BATCH - decoding)
    most = min(BATCH - decoding, room + room // STRETCH_PART)
    if len(prompts) > decoding and sum(prompts) <= min(BATCH - decoding, room + room // LAST_PART):
        most = max(most, sum(prompts))
        assert step.prefill == sum(prompts)
    assert given_to.get(0, 0) >= min(prompts[0], max(1, room // OLDEST_PART))
    in_turn = sorted(range(1, len(prompts)), key=lambda number: (prompts[number], number))
    unfinished = [number for number in in_turn if given_to.get(number, 0) < prompts[number]]
    assert not any(number in given_to for number in unfinished[1:])
    assert all(given_to[number] * WORTH_PART >= room for number in unfinished[:1] if number in given_to)
    assert step.prefill == sum(given_to.get(number, 0) for number in range(len(prompts)))
    assert step.prefill <= most
    is_whole = all(given_to.get(number, 0) == length for number, length in enumerate(prompts))
    assert is_whole or (room - step.prefill) * WORTH_PART < room
    assert is_whole or step.prefill <= room or any(given_to.get(n, 0) == length for n, length in enumerate(prompts))
    assert is_whole or all(step.prefill + prompts[number] > most for number in unfinished if number not in given_to)
