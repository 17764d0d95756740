"""The door: bounds hold, nobody is forgotten, nobody is answered twice."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.core import admission as core
from inference.protocol import Priority


class Doors(RuleBasedStateMachine):
    @initialize(in_flight=st.integers(1, 3), queue=st.integers(0, 3))
    def start(self, in_flight: int, queue: int) -> None:
        self.bounds = core.Bounds(in_flight, queue)
        self.door = core.Door()
        self.now = 0.0
        self.number = 0
        self.fate: dict[int, str] = {}
        self.priority: dict[int, Priority] = {}

    def _take(self, outcome: tuple[core.Door, tuple[core.Effect, ...]]) -> None:
        self.door, effects = outcome
        for effect in effects:
            assert self.fate[effect.number] == "waits", "a request is answered once"
            self.fate[effect.number] = "in" if isinstance(effect, core.Admit) else effect.why.value

    @rule(priority=st.sampled_from(Priority), patience=st.floats(0.5, 5))
    def arrive(self, priority: Priority, patience: float) -> None:
        self.number += 1
        self.fate[self.number] = "waits"
        self.priority[self.number] = priority
        self._take(core.arrive(self.door, self.bounds, self.number, priority, self.now + patience))

    @precondition(lambda self: self.door.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.door.running)))
        self.fate[number] = "done"
        self._take(core.leave(self.door, self.bounds, number))

    @precondition(lambda self: self.door.waiting)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(waiter.number for waiter in self.door.waiting)))
        self.fate[number] = "done"
        self._take(core.leave(self.door, self.bounds, number))

    @rule(seconds=st.floats(0.1, 3))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self._take(core.expire(self.door, self.now))
        due = core.next_deadline(self.door)
        assert due is None or due > self.now

    @rule(in_flight=st.integers(1, 3))
    def resize(self, in_flight: int) -> None:
        self.bounds = core.Bounds(in_flight, self.bounds.queue)
        self._take(core.resize(self.door, self.bounds))

    @rule()
    def a_stranger_leaves(self) -> None:
        self._take(core.leave(self.door, self.bounds, -1))

    @invariant()
    def everybody_is_where_the_door_says(self) -> None:
        if not hasattr(self, "door"):
            return
        assert {n for n, fate in self.fate.items() if fate == "in"} == set(self.door.running)
        assert {n for n, fate in self.fate.items() if fate == "waits"} == {w.number for w in self.door.waiting}
        assert len(self.door.waiting) <= self.bounds.queue
        if self.door.waiting:
            assert len(self.door.running) >= self.bounds.in_flight, "nobody waits beside a free place"


TestDoors = Doors.TestCase


def test_a_higher_class_is_served_first_and_takes_the_place_of_the_lowest() -> None:
    bounds = core.Bounds(1, 2)
    door, _ = core.arrive(core.Door(), bounds, 1, Priority.NORMAL, 9)
    door, _ = core.arrive(door, bounds, 2, Priority.LOW, 9)
    door, _ = core.arrive(door, bounds, 3, Priority.NORMAL, 9)
    door, effects = core.arrive(door, bounds, 4, Priority.HIGH, 9)
    assert effects == (core.TurnAway(2, core.Why.FULL),)
    door, effects = core.arrive(door, bounds, 5, Priority.NORMAL, 9)
    assert effects == (core.TurnAway(5, core.Why.FULL),)
    door, effects = core.leave(door, bounds, 1)
    assert effects == (core.Admit(4),)


def test_without_a_queue_the_second_is_turned_away_at_once() -> None:
    bounds = core.Bounds(1, 0)
    door, _ = core.arrive(core.Door(), bounds, 1, Priority.LOW, 9)
    assert core.arrive(door, bounds, 2, Priority.HIGH, 9)[1] == (core.TurnAway(2, core.Why.FULL),)
