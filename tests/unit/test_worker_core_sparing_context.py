"""Decode steps may leave a core to other programs; prefill and steps whose sums would change use all threads."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from inference.worker.backend import BatchRow, Decode
from inference.worker.engine.core_sparing_context import (
    DIVIDED_FROM,
    GAP_SECONDS,
    LEAST_SECONDS,
    CoreSparingBackend,
    IdleCores,
    LostCores,
    idle_seconds,
    waited_seconds,
)
from inference.worker.steps import Row
from tests.rigs.fake_backend import FakeBackend


@dataclass
class Machine:
    """Two cores. While other programs use them, a step takes 1 s with all threads and 0.1 s with one fewer. Later it
    takes 0.1 s with all threads and 0.2 s with one fewer.
    """

    now: float = 0.0
    idle: float = 0.0
    waited: float = 0.0
    is_shared: bool = True
    spared: int = 0
    steps: list[int] = field(default_factory=list)
    status: Decode = Decode.OK

    def spare(self, count: int) -> None:
        self.spared = count

    def backend(self) -> CoreSparingBackend:
        fake = FakeBackend()

        def decode(rows: Sequence[BatchRow]) -> tuple[Decode, list[int]]:
            self.steps.append(self.spared)
            crowded, alone = (1.0, 0.1), (0.1, 0.2)
            seconds = (crowded if self.is_shared else alone)[self.spared]
            self.now += seconds
            self.idle += 0.0 if self.is_shared else seconds * self.spared
            self.waited += seconds / 2 if self.is_shared and not self.spared else 0.0
            return self.status, [0] * len(rows)

        fake.decode = decode  # type: ignore[method-assign]
        idle, lost = IdleCores(lambda: {0: 0.0, 1: self.idle}), LostCores(lambda: self.waited)
        return CoreSparingBackend(fake, self.spare, lambda: self.now, idle, lost)


def row(start: int = 5, tokens: tuple[int, ...] = (1,), slot: int = 0) -> Row:
    return Row(1, slot, start, list(tokens), True)


def test_decode_steps_spare_a_core_that_other_programs_use() -> None:
    machine = Machine()
    backend = machine.backend()
    for _ in range(400):
        backend.decode([row()])
    assert machine.steps[0] == 0
    assert machine.steps.count(0) < 100


def test_spared_core_that_is_idle_is_used_again_within_20_steps() -> None:
    """The longer pauses between earlier trials do not delay it."""
    machine = Machine()
    backend = machine.backend()
    for _ in range(3000):
        backend.decode([row()])
    machine.is_shared = False
    machine.steps.clear()
    for _ in range(20):
        backend.decode([row()])
    assert machine.steps[-10:] == [0] * 10


def test_no_core_is_spared_while_none_is_lost() -> None:
    machine = Machine(is_shared=False)
    backend = machine.backend()
    for _ in range(500):
        backend.decode([row()])
    assert machine.steps == [0] * 500
    machine.is_shared = True
    for _ in range(100):
        backend.decode([row()])
    assert machine.steps[-10:] == [1] * 10
    machine.is_shared = False
    machine.steps.clear()
    for _ in range(500):
        backend.decode([row()])
    assert machine.steps[10:] == [0] * 490


def test_lost_share_counts_from_the_last_reset() -> None:
    waited = [0.0]
    lost = LostCores(lambda: waited[0])
    assert lost.share() is None
    waited[0] = 5.0
    lost.computed(1.0)
    assert lost.share() is None, "the wait before the first step is unknown"
    waited[0] = 5.5
    lost.computed(2.0)
    assert lost.share() == pytest.approx(0.25)
    lost.forget()
    lost.computed(1.0)
    lost.computed(1.0)
    assert lost.share() == pytest.approx(0.0)


def test_lost_share_is_unknown_without_kernel_statistics() -> None:
    lost = LostCores(lambda: None)
    for _ in range(3):
        lost.computed(1.0)
    assert lost.share() is None


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc of Linux")
def test_waited_seconds_of_the_kernel_do_not_decrease() -> None:
    before, after = waited_seconds(), waited_seconds()
    assert before is not None
    assert after is not None
    assert 0 <= before <= after


def test_idle_cores_are_counted_over_consecutive_steps_only() -> None:
    idle = {0: 0.0, 1: 0.0}
    cores = IdleCores(lambda: dict(idle))
    assert cores.over(10.0, 11.0) is None
    idle[1] = 0.05
    assert cores.over(11.0, 11.0 + LEAST_SECONDS / 2) is None, "the measurement is too short"
    idle[1] = 2.0
    assert cores.over(11.0 + LEAST_SECONDS / 2, 13.0) == pytest.approx(1.0)
    idle[1] = 5.0
    assert cores.over(13.0 + 2 * GAP_SECONDS, 16.0) is None, "there was a pause before"
    assert cores.over(16.0, 17.0) == pytest.approx(0.0)


def test_idle_cores_are_unknown_without_kernel_statistics() -> None:
    cores = IdleCores(lambda: None)
    assert [cores.over(at, at + 1.0) for at in (0.0, 1.0, 2.0)] == [None] * 3


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc of Linux")
def test_idle_seconds_cover_every_cpu_of_the_affinity_mask() -> None:
    seconds = idle_seconds()
    assert seconds is not None
    assert set(seconds) == os.sched_getaffinity(0)
    assert all(count >= 0 for count in seconds.values())


def test_prefill_uses_every_thread() -> None:
    machine = Machine()
    backend = machine.backend()
    while machine.steps[-12:] != [1] * 12:
        backend.decode([row()])
    backend.decode([row(tokens=(1, 2, 3))])
    assert machine.steps[-1] == 0
    backend.decode([row()])
    assert machine.steps[-1] == 1


def test_single_long_sequence_always_uses_every_thread() -> None:
    """Its sums would depend on the number of threads; those of a batch do not."""
    machine = Machine()
    backend = machine.backend()
    for _ in range(120):
        backend.decode([row(DIVIDED_FROM)])
    assert set(machine.steps) == {0}
    machine.steps.clear()
    for _ in range(120):
        backend.decode([row(DIVIDED_FROM), row(DIVIDED_FROM, slot=1)])
    assert 1 in machine.steps


def test_failed_steps_are_not_measured() -> None:
    machine = Machine(status=Decode.NO_ROOM)
    backend = machine.backend()
    for _ in range(120):
        assert backend.decode([row()]) == (Decode.NO_ROOM, [0])
    assert set(machine.steps) == {0}
