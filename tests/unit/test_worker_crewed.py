"""Steps that only decode may leave a core to others; all others, and those whose sums would change, do not."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from inference.worker.backend import BatchRow, Decode
from inference.worker.cores.core_sparing_context import DIVIDED_FROM, CrewedBackend
from inference.worker.cpu_cores import GAP_SECONDS, LEAST_SECONDS, IdleCores, LostCores, idle_seconds, waited_seconds
from inference.worker.steps import Row
from tests.rigs.fake_backend import FakeBackend


@dataclass
class Machine:
    """A context on two cores that others use: a step takes a second with all threads, a tenth with one fewer. Once they
    have left it is as fast with all of them as it was with one fewer, and half as fast with that.
    """

    now: float = 0.0
    idle: float = 0.0
    waited: float = 0.0
    are_others_here: bool = True
    spared: int = 0
    steps: list[int] = field(default_factory=list)
    status: Decode = Decode.OK

    def spare(self, count: int) -> None:
        self.spared = count

    def backend(self) -> CrewedBackend:
        fake = FakeBackend()

        def decode(rows: Sequence[BatchRow]) -> tuple[Decode, list[int]]:
            self.steps.append(self.spared)
            crowded, alone = (1.0, 0.1), (0.1, 0.2)
            seconds = (crowded if self.are_others_here else alone)[self.spared]
            self.now += seconds
            self.idle += 0.0 if self.are_others_here else seconds * self.spared
            self.waited += seconds / 2 if self.are_others_here and not self.spared else 0.0
            return self.status, [0] * len(rows)

        fake.decode = decode  # type: ignore[method-assign]
        idle, lost = IdleCores(lambda: {0: 0.0, 1: self.idle}), LostCores(lambda: self.waited)
        return CrewedBackend(fake, self.spare, lambda: self.now, idle, lost)


def row(start: int = 5, tokens: tuple[int, ...] = (1,), slot: int = 0) -> Row:
    return Row(1, slot, start, list(tokens), True)


def test_a_crowded_machine_gets_a_core() -> None:
    """After some steps those that decode spare one."""
    machine = Machine()
    backend = machine.backend()
    for _ in range(400):
        backend.decode([row()])
    assert machine.steps[0] == 0
    assert machine.steps.count(0) < 100


def test_a_core_that_nobody_needs_any_more_is_taken_back() -> None:
    """Not after as many steps as the last trials in vain were apart."""
    machine = Machine()
    backend = machine.backend()
    for _ in range(3000):
        backend.decode([row()])
    machine.are_others_here = False
    machine.steps.clear()
    for _ in range(20):
        backend.decode([row()])
    assert machine.steps[-10:] == [0] * 10


def test_where_no_core_is_lost_nothing_is_tried() -> None:
    """Nor after others were there for a while."""
    machine = Machine(are_others_here=False)
    backend = machine.backend()
    for _ in range(500):
        backend.decode([row()])
    assert machine.steps == [0] * 500
    machine.are_others_here = True
    for _ in range(100):
        backend.decode([row()])
    assert machine.steps[-10:] == [1] * 10
    machine.are_others_here = False
    machine.steps.clear()
    for _ in range(500):
        backend.decode([row()])
    assert machine.steps[10:] == [0] * 490


def test_a_share_is_of_the_time_since_it_was_last_asked_for() -> None:
    waited = [0.0]
    lost = LostCores(lambda: waited[0])
    assert lost.share() is None
    waited[0] = 5.0
    lost.computed(1.0)
    assert lost.share() is None, "what was waited in the first step is not known"
    waited[0] = 5.5
    lost.computed(2.0)
    assert lost.share() == pytest.approx(0.25)
    lost.forget()
    lost.computed(1.0)
    lost.computed(1.0)
    assert lost.share() == pytest.approx(0.0)


def test_a_kernel_that_does_not_tell_is_no_quiet_one() -> None:
    lost = LostCores(lambda: None)
    for _ in range(3):
        lost.computed(1.0)
    assert lost.share() is None


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_the_kernel_counts_what_a_thread_waited_for_a_core() -> None:
    before, after = waited_seconds(), waited_seconds()
    assert before is not None
    assert after is not None
    assert 0 <= before <= after


def test_idle_cores_are_those_of_steps_in_a_row() -> None:
    """Before the first step, and after a pause, cores were idle because there was nothing to compute."""
    idle = {0: 0.0, 1: 0.0}
    cores = IdleCores(lambda: dict(idle))
    assert cores.over(10.0, 11.0) is None
    idle[1] = 0.05
    assert cores.over(11.0, 11.0 + LEAST_SECONDS / 2) is None, "too short to tell"
    idle[1] = 2.0
    assert cores.over(11.0 + LEAST_SECONDS / 2, 13.0) == pytest.approx(1.0)
    idle[1] = 5.0
    assert cores.over(13.0 + 2 * GAP_SECONDS, 16.0) is None, "it rested before"
    assert cores.over(16.0, 17.0) == pytest.approx(0.0)


def test_who_cannot_tell_says_so() -> None:
    cores = IdleCores(lambda: None)
    assert [cores.over(at, at + 1.0) for at in (0.0, 1.0, 2.0)] == [None] * 3


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_the_kernel_counts_the_idle_seconds_of_our_processors() -> None:
    seconds = idle_seconds()
    assert seconds is not None
    assert set(seconds) == os.sched_getaffinity(0)
    assert all(count >= 0 for count in seconds.values())


def test_prompts_use_every_thread() -> None:
    """Their steps neither spare a core nor are they compared."""
    machine = Machine()
    backend = machine.backend()
    while machine.steps[-12:] != [1] * 12:
        backend.decode([row()])
    backend.decode([row(tokens=(1, 2, 3))])
    assert machine.steps[-1] == 0
    backend.decode([row()])
    assert machine.steps[-1] == 1


def test_the_sums_of_a_lone_sequence_do_not_depend_on_the_machine() -> None:
    """Where llama.cpp divides attention over the threads their number stays; with others in the batch it does not."""
    machine = Machine()
    backend = machine.backend()
    for _ in range(120):
        backend.decode([row(DIVIDED_FROM)])
    assert set(machine.steps) == {0}
    machine.steps.clear()
    for _ in range(120):
        backend.decode([row(DIVIDED_FROM), row(DIVIDED_FROM, slot=1)])
    assert 1 in machine.steps


def test_steps_that_failed_teach_nothing() -> None:
    """A step without room is over at once, whatever the machine does."""
    machine = Machine(status=Decode.NO_ROOM)
    backend = machine.backend()
    for _ in range(120):
        assert backend.decode([row()]) == (Decode.NO_ROOM, [0])
    assert set(machine.steps) == {0}
