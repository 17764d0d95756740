"""The door: bounds hold, nobody is forgotten, nobody is answered twice."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.access import admission_queue as core
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
            assert isinstance(effect, core.Admit) or effect.wait >= 1, "nobody is told to come back at once"
            self.fate[effect.number] = "in" if isinstance(effect, core.Admit) else effect.why.value

    @rule(priority=st.sampled_from(Priority), patience=st.floats(0.5, 5))
    def arrive(self, priority: Priority, patience: float) -> None:
        self.number += 1
        self.fate[self.number] = "waits"
        self.priority[self.number] = priority
        self._take(core.arrive(self.door, self.bounds, self.number, priority, self.now + patience, self.now))

    @precondition(lambda self: self.door.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.door.running)))
        self.fate[number] = "done"
        self._take(core.leave(self.door, self.bounds, number, self.now))

    @precondition(lambda self: self.door.waiting)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(waiter.number for waiter in self.door.waiting)))
        self.fate[number] = "done"
        self._take(core.leave(self.door, self.bounds, number, self.now))

    @rule(seconds=st.floats(0.1, 3))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self._take(core.expire(self.door, self.bounds, self.now))
        due = core.next_deadline(self.door)
        assert due is None or due > self.now

    @rule(in_flight=st.integers(1, 3))
    def resize(self, in_flight: int) -> None:
        self.bounds = core.Bounds(in_flight, self.bounds.queue)
        self._take(core.resize(self.door, self.bounds, self.now))

    @rule()
    def a_stranger_leaves(self) -> None:
        self._take(core.leave(self.door, self.bounds, -1, self.now))

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


def _come(
    door: core.Door, bounds: core.Bounds, number: int, priority: Priority, deadline: float = 9.0, now: float = 0.0
) -> tuple[core.Door, tuple[core.Effect, ...]]:
    return core.arrive(door, bounds, number, priority, deadline, now)


def test_a_higher_class_is_served_first_and_takes_the_place_of_the_lowest() -> None:
    bounds = core.Bounds(1, 2)
    door, _ = _come(core.Door(), bounds, 1, Priority.NORMAL)
    door, _ = _come(door, bounds, 2, Priority.LOW)
    door, _ = _come(door, bounds, 3, Priority.NORMAL)
    door, effects = _come(door, bounds, 4, Priority.HIGH)
    assert effects == (core.TurnAway(2, core.Why.FULL),)
    door, effects = _come(door, bounds, 5, Priority.NORMAL)
    assert effects == (core.TurnAway(5, core.Why.FULL),)
    door, effects = core.leave(door, bounds, 1, 0.0)
    assert effects == (core.Admit(4),)


def test_without_a_queue_the_second_is_turned_away_at_once() -> None:
    bounds = core.Bounds(1, 0)
    door, _ = _come(core.Door(), bounds, 1, Priority.LOW)
    assert _come(door, bounds, 2, Priority.HIGH)[1] == (core.TurnAway(2, core.Why.FULL),)


def test_the_longest_waiter_starts_after_at_most_so_many_departures() -> None:
    """However many of a higher class keep coming, each eighth place goes by the time that somebody waited."""
    bounds = core.Bounds(1, 1000)
    door, _ = _come(core.Door(), bounds, 0, Priority.HIGH)
    door, _ = _come(door, bounds, 1, Priority.LOW)
    running = 0
    for departures in range(1, 2 * core.FAIR_TURN):
        for more in (2 * departures, 2 * departures + 1):
            door, _ = _come(door, bounds, more, Priority.HIGH)
        door, effects = core.leave(door, bounds, running, float(departures))
        assert isinstance(effects[0], core.Admit)
        running = effects[0].number
        if running == 1:
            break
    assert (running, departures) == (1, core.FAIR_TURN)


def test_a_full_queue_says_when_somebody_inside_ends_or_somebody_in_it_gives_up() -> None:
    bounds = core.Bounds(2, 1)
    door = core.leave(_come(core.Door(), bounds, 1, Priority.HIGH)[0], bounds, 1, 20.0)[0]
    assert door.mean_seconds == 20.0
    for number, now in ((2, 21.0), (3, 25.0), (4, 26.0)):
        door, _ = _come(door, bounds, number, Priority.NORMAL, 99.0, now)
    assert _come(door, bounds, 5, Priority.NORMAL, 99.0, 30.0)[1] == (core.TurnAway(5, core.Why.FULL, 11.0),)
    door, _ = core.leave(door, bounds, 4, 30.0)
    door, _ = _come(door, bounds, 6, Priority.NORMAL, 33.0, 30.0)
    assert _come(door, bounds, 7, Priority.NORMAL, 99.0, 30.0)[1] == (core.TurnAway(7, core.Why.FULL, 3.0),)
    door, _ = core.leave(door, bounds, 3, 37.0)
    assert door.mean_seconds == 20.0 + (12.0 - 20.0) / 16


def test_who_waited_in_vain_learns_how_long_those_take_who_wait_still() -> None:
    bounds = core.Bounds(2, 9)
    door = core.leave(_come(core.Door(), bounds, 1, Priority.HIGH)[0], bounds, 1, 20.0)[0]
    for number, deadline in ((2, 99.0), (3, 99.0), (4, 30.0), (5, 99.0), (6, 99.0)):
        door, _ = _come(door, bounds, number, Priority.NORMAL, deadline, 21.0)
    assert core.expire(door, bounds, 30.0)[1] == (core.TurnAway(4, core.Why.LATE, 30.0),)
