"""Steps that only decode may leave a core to others; all others, and those whose sums would change, do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from inference.worker.backend import BatchRow, Decode
from inference.worker.core.steps import Row
from inference.worker.crewed import DIVIDED_FROM, CrewedBackend
from tests.rigs.fake_backend import FakeBackend


@dataclass
class Machine:
    """A context on cores that others use: a step takes a second with all threads, a tenth with one fewer."""

    now: float = 0.0
    spared: int = 0
    steps: list[int] = field(default_factory=list)
    status: Decode = Decode.OK

    def spare(self, count: int) -> None:
        self.spared = count

    def backend(self) -> CrewedBackend:
        fake = FakeBackend()

        def decode(rows: Sequence[BatchRow]) -> tuple[Decode, list[int]]:
            self.steps.append(self.spared)
            self.now += 0.1 if self.spared else 1.0
            return self.status, [0] * len(rows)

        fake.decode = decode  # type: ignore[method-assign]
        return CrewedBackend(fake, self.spare, lambda: self.now)


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
