"""Admission: bounds hold, and each request gets exactly one result."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.access import admission_queue as core
from inference.protocol import Priority


class AdmissionMachine(RuleBasedStateMachine):
    @initialize(in_flight=st.integers(1, 3), queue=st.integers(0, 3))
    def start(self, in_flight: int, queue: int) -> None:
        self.bounds = core.Bounds(in_flight, queue)
        self.queue = core.AdmissionQueue(self.bounds)
        self.now = 0.0
        self.number = 0
        self.fate: dict[int, str] = {}
        self.priority: dict[int, Priority] = {}

    def _take(self, effects: list[core.Effect]) -> None:
        for effect in effects:
            assert self.fate[effect.number] == "waits", "a request gets one result"
            assert isinstance(effect, core.Admit) or effect.wait >= 1, "every rejection has a wait"
            self.fate[effect.number] = "in" if isinstance(effect, core.Admit) else effect.why.value

    @rule(priority=st.sampled_from(Priority), client_timeout=st.floats(0.5, 5))
    def arrive(self, priority: Priority, client_timeout: float) -> None:
        self.number += 1
        self.fate[self.number] = "waits"
        self.priority[self.number] = priority
        self._take(self.queue.arrive(self.number, priority, self.now + client_timeout, self.now))

    @precondition(lambda self: self.queue.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.queue.running)))
        self.fate[number] = "done"
        self._take(self.queue.leave(number, self.now))

    @precondition(lambda self: self.queue.waiting)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(waiter.number for waiter in self.queue.waiting)))
        self.fate[number] = "done"
        self._take(self.queue.leave(number, self.now))

    @rule(seconds=st.floats(0.1, 3))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self._take(self.queue.expire(self.now))
        due = self.queue.next_deadline
        assert due is None or due > self.now

    @rule(in_flight=st.integers(1, 3))
    def resize(self, in_flight: int) -> None:
        self.bounds = core.Bounds(in_flight, self.bounds.queue)
        self._take(self.queue.resize(self.bounds, self.now))

    @rule()
    def unknown_request_leaves(self) -> None:
        self._take(self.queue.leave(-1, self.now))

    @invariant()
    def requests_are_running_or_waiting_once(self) -> None:
        if not hasattr(self, "queue"):
            return
        assert {n for n, fate in self.fate.items() if fate == "in"} == set(self.queue.running)
        assert {n for n, fate in self.fate.items() if fate == "waits"} == {w.number for w in self.queue.waiting}
        assert len(self.queue.waiting) <= self.bounds.queue
        if self.queue.waiting:
            assert len(self.queue.running) >= self.bounds.in_flight, "no request waits while a slot is free"


TestAdmission = AdmissionMachine.TestCase


def _arrive(
    queue: core.AdmissionQueue, number: int, priority: Priority, deadline: float = 9.0, now: float = 0.0
) -> list[core.Effect]:
    return queue.arrive(number, priority, deadline, now)


def _after_one_request(bounds: core.Bounds) -> core.AdmissionQueue:
    """A queue whose only request took 20 seconds."""
    queue = core.AdmissionQueue(bounds)
    _arrive(queue, 1, Priority.HIGH)
    queue.leave(1, 20.0)
    assert queue.mean_seconds == 20.0
    return queue


def test_request_of_high_priority_starts_first_and_replaces_the_lowest_in_a_full_queue() -> None:
    queue = core.AdmissionQueue(core.Bounds(1, 2))
    for number, priority in ((1, Priority.NORMAL), (2, Priority.LOW), (3, Priority.NORMAL)):
        _arrive(queue, number, priority)
    assert _arrive(queue, 4, Priority.HIGH) == [core.Reject(2, core.RejectReason.FULL)]
    assert _arrive(queue, 5, Priority.NORMAL) == [core.Reject(5, core.RejectReason.FULL)]
    assert queue.leave(1, 0.0) == [core.Admit(4)]


def test_request_beyond_the_limit_is_rejected_if_there_is_no_queue() -> None:
    queue = core.AdmissionQueue(core.Bounds(1, 0))
    _arrive(queue, 1, Priority.LOW)
    assert _arrive(queue, 2, Priority.HIGH) == [core.Reject(2, core.RejectReason.FULL)]


def test_longest_waiting_request_gets_every_eighth_place() -> None:
    """Every eighth place goes to the longest waiting request, also under a stream of higher priority."""
    queue = core.AdmissionQueue(core.Bounds(1, 1000))
    _arrive(queue, 0, Priority.HIGH)
    _arrive(queue, 1, Priority.LOW)
    running = 0
    for departures in range(1, 2 * core.FAIR_TURN):
        for more in (2 * departures, 2 * departures + 1):
            _arrive(queue, more, Priority.HIGH)
        effects = queue.leave(running, float(departures))
        assert isinstance(effects[0], core.Admit)
        running = effects[0].number
        if running == 1:
            break
    assert (running, departures) == (1, core.FAIR_TURN)


def test_rejection_by_a_full_queue_has_the_wait_until_a_place_is_free() -> None:
    queue = _after_one_request(core.Bounds(2, 1))
    for number, now in ((2, 21.0), (3, 25.0), (4, 26.0)):
        _arrive(queue, number, Priority.NORMAL, 99.0, now)
    assert _arrive(queue, 5, Priority.NORMAL, 99.0, 30.0) == [core.Reject(5, core.RejectReason.FULL, 11.0)]
    queue.leave(4, 30.0)
    _arrive(queue, 6, Priority.NORMAL, 33.0, 30.0)
    assert _arrive(queue, 7, Priority.NORMAL, 99.0, 30.0) == [core.Reject(7, core.RejectReason.FULL, 3.0)]
    queue.leave(3, 37.0)
    assert queue.mean_seconds == 20.0 + (12.0 - 20.0) / 16


def test_rejection_of_an_expired_request_has_the_wait_of_the_remaining_queue() -> None:
    queue = _after_one_request(core.Bounds(2, 9))
    for number, deadline in ((2, 99.0), (3, 99.0), (4, 30.0), (5, 99.0), (6, 99.0)):
        _arrive(queue, number, Priority.NORMAL, deadline, 21.0)
    assert queue.expire(30.0) == [core.Reject(4, core.RejectReason.LATE, 30.0)]
