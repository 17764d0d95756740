"""Which state of a device follows from what is seen of it, what is done about it, and when it is looked at again."""

from __future__ import annotations

import itertools
import math

import pytest

from inference.authority.device_health import (
    AGAIN_SECONDS,
    DOUBT_SECONDS,
    LAST_LOOK_SECONDS,
    STOP_SECONDS,
    TABLE,
    TRIAL_SECONDS,
    Case,
    Doubted,
    Effect,
    Event,
    Read,
    Seen,
    Tick,
    Tried,
    pause,
    step,
)
from inference.devices.signs import Sign
from inference.protocol import DeviceState
from inference.tools.state_diagrams import DOCUMENT, HEALTH_BEGIN, HEALTH_END, rewritten

DRAIN_SECONDS = 30.0
S = DeviceState


class Device:
    """A case that the test leads through what it sees, on a clock of its own."""

    def __init__(self) -> None:
        self.case = Case()
        self.now = 100.0

    def sees(self, seen: Seen, after: float = 0.0) -> tuple[DeviceState, list[Effect]]:
        """The state then, and what is to be done."""
        self.now += after
        self.case, effects = step(self.case, seen, self.now, DRAIN_SECONDS)
        return self.case.state, list(effects)

    def reads(self, sign: Sign, note: str = "", after: float = 0.0) -> tuple[DeviceState, list[Effect]]:
        return self.sees(Read(sign, note), after)

    def waits(self, seconds: float, *, empty: bool = True) -> tuple[DeviceState, list[Effect]]:
        return self.sees(Tick(empty), seconds)

    def tried(self, failure: str | None = None) -> tuple[DeviceState, list[Effect]]:
        return self.sees(Tried(self.case.trial, failure))


@pytest.fixture
def device() -> Device:
    return Device()


def test_a_lost_device_is_looked_at_until_it_is_back_and_has_computed(device: Device) -> None:
    assert device.reads(Sign.FINE) == (S.HEALTHY, [])
    assert device.reads(Sign.DEAD, "it was cut") == (S.LOST, [Effect.LOSE])
    assert (device.case.note, device.case.usable) == ("it was cut", False)
    assert device.case.seconds_to_verdict(device.now) == 1
    assert device.waits(0.5) == (S.LOST, [])
    assert device.case.seconds_to_verdict(device.now) == 0.5
    assert device.waits(0.5) == (S.LOST, [Effect.LOOK])
    assert device.reads(Sign.DEAD, "it was cut") == (S.LOST, [])
    assert device.reads(Sign.FINE, after=0.3) == (S.PROBING, [Effect.PROBE])
    assert device.case.seconds_to_verdict(device.now) == 0
    assert device.tried() == (S.HEALTHY, [Effect.WELCOME])
    assert device.case == Case(trial=1)
    assert device.case.seconds_to_verdict(device.now) is None


def test_a_device_that_does_not_compute_stays_lost_however_well_it_reads(device: Device) -> None:
    """Its models are given up once; it is tried again after each pause, and not at every reading."""
    device.reads(Sign.DEAD)
    device.reads(Sign.FINE)
    assert device.tried("wrong result") == (S.LOST, [])
    assert device.case.note == "wrong result"
    assert device.reads(Sign.FINE) == (S.LOST, [])
    assert device.waits(1) == (S.LOST, [Effect.LOOK])
    assert device.reads(Sign.FINE) == (S.PROBING, [Effect.PROBE])
    assert device.reads(Sign.DEAD, "gone again") == (S.LOST, [])
    assert device.tried() == (S.LOST, [])


def test_pauses_grow_with_the_outage_up_to_a_bound() -> None:
    assert [pause(seconds) for seconds in (0, 9, 20, 55, 100, 1e6)] == [1, 1, 2, 5.5, 10, LAST_LOOK_SECONDS]


def test_a_look_that_brought_nothing_is_asked_for_again(device: Device) -> None:
    device.reads(Sign.DEAD)
    looks = [device.waits(0.5)[1] for _ in range(40)]
    assert looks.count([Effect.LOOK]) == 16  # ten in the first ten seconds, fewer then


def test_an_ill_device_is_emptied_before_it_is_quarantined(device: Device) -> None:
    assert device.reads(Sign.ILL, "Xid 63") == (S.DRAINING, [Effect.DRAIN])
    assert device.case.seconds_to_verdict(device.now) == DRAIN_SECONDS + STOP_SECONDS
    assert device.reads(Sign.FINE) == (S.DRAINING, [])
    assert device.waits(5, empty=False) == (S.DRAINING, [])
    assert device.waits(1) == (S.QUARANTINED, [])
    assert device.reads(Sign.ILL, "Xid 63") == (S.QUARANTINED, [])
    assert device.waits(1) == (S.QUARANTINED, [Effect.LOOK])
    assert device.reads(Sign.ILL, "Xid 63") == (S.QUARANTINED, [])
    assert device.reads(Sign.FINE) == (S.PROBING, [Effect.PROBE])
    assert device.reads(Sign.ILL, "again") == (S.DRAINING, [])
    assert device.waits(1) == (S.QUARANTINED, [])
    assert device.reads(Sign.DEAD) == (S.LOST, [])


def test_what_does_not_leave_in_time_is_given_up(device: Device) -> None:
    device.reads(Sign.ILL)
    assert device.waits(DRAIN_SECONDS, empty=False) == (S.DRAINING, [])
    assert device.waits(STOP_SECONDS, empty=False) == (S.QUARANTINED, [Effect.LOSE])


def test_a_device_that_dies_while_it_drains_is_lost_with_what_is_left(device: Device) -> None:
    device.reads(Sign.ILL)
    assert device.reads(Sign.GONE) == (S.LOST, [Effect.LOSE])


def test_one_that_cannot_be_read_is_believed_for_a_while(device: Device) -> None:
    assert device.reads(Sign.UNSURE, "timeout") == (S.SUSPECT, [])
    assert device.case.usable
    assert device.waits(DOUBT_SECONDS - 1) == (S.SUSPECT, [])
    assert device.reads(Sign.FINE) == (S.HEALTHY, [])
    assert device.case.note == ""


def test_one_that_stays_unreadable_and_computes_is_used_and_tried_again(device: Device) -> None:
    """Nobody who uses it notices anything."""
    device.reads(Sign.UNSURE, "timeout")
    assert device.waits(DOUBT_SECONDS, empty=False) == (S.PROBING, [Effect.PROBE])
    assert device.tried() == (S.SUSPECT, [])
    assert device.waits(DOUBT_SECONDS, empty=False) == (S.SUSPECT, [])
    assert device.waits(AGAIN_SECONDS, empty=False) == (S.PROBING, [Effect.PROBE])
    assert device.tried("no answer") == (S.LOST, [Effect.LOSE])


def test_a_suspect_may_turn_out_ill_or_dead(device: Device) -> None:
    device.reads(Sign.UNSURE)
    assert device.reads(Sign.ILL) == (S.DRAINING, [Effect.DRAIN])
    other = Device()
    other.reads(Sign.UNSURE)
    assert other.reads(Sign.DEAD) == (S.LOST, [Effect.LOSE])


@pytest.mark.parametrize("sign", [Sign.FINE, Sign.UNSURE])
def test_a_worker_that_saw_the_loss_leads_to_a_trial_and_costs_nobody_else_anything(device: Device, sign: Sign) -> None:
    device.reads(sign)
    assert device.sees(Doubted("a worker ended")) == (S.PROBING, [Effect.PROBE])
    assert device.sees(Doubted("another")) == (S.PROBING, [])
    assert device.reads(sign) == (S.PROBING, [])
    assert device.tried() == ({Sign.FINE: S.HEALTHY, Sign.UNSURE: S.SUSPECT}[sign], [])


def test_a_trial_that_says_nothing_has_failed_and_what_it_says_later_does_not_count(device: Device) -> None:
    device.sees(Doubted("a worker ended"))
    assert device.waits(TRIAL_SECONDS, empty=False) == (S.LOST, [Effect.LOSE])
    assert device.tried() == (S.LOST, [])
    assert device.sees(Doubted("an operator asks")) == (S.PROBING, [Effect.PROBE])
    assert device.sees(Tried(1, None)) == (S.PROBING, [])
    assert device.tried() == (S.HEALTHY, [Effect.WELCOME])


def test_what_no_new_process_reaches_asks_for_a_restart_once(device: Device) -> None:
    """What runs may finish; without the restart the device is emptied, and tried as any other."""
    assert device.reads(Sign.BEYOND, "Unknown Error") == (S.PROBING, [Effect.PROBE])
    assert device.tried("no CUDA-capable device") == (S.DRAINING, [Effect.DRAIN, Effect.RESTART])
    assert device.waits(DRAIN_SECONDS + STOP_SECONDS, empty=False) == (S.QUARANTINED, [Effect.LOSE])
    assert device.waits(LAST_LOOK_SECONDS) == (S.QUARANTINED, [Effect.LOOK])
    assert device.reads(Sign.BEYOND) == (S.PROBING, [Effect.PROBE])
    assert device.tried("still none") == (S.LOST, [])


def test_what_a_new_process_reaches_needs_no_restart(device: Device) -> None:
    """NVML alone is broken: the device is used on, and nobody is asked at every reading."""
    device.reads(Sign.BEYOND, "Unknown Error")
    assert device.tried() == (S.SUSPECT, [])
    assert device.reads(Sign.BEYOND) == (S.SUSPECT, [])
    assert device.reads(Sign.UNSURE) == (S.SUSPECT, [])
    assert device.reads(Sign.FINE) == (S.HEALTHY, [])


def test_every_state_can_be_reached_and_left() -> None:
    """No state is a trap, and none is decoration."""
    reached = {S.HEALTHY}
    while (more := {to for (at, _), (to, _) in TABLE.items() if at in reached} | reached) != reached:
        reached = more
    assert reached == set(S)
    assert {at for at, _ in TABLE} == set(S)
    assert {event for _, event in TABLE} == set(Event)


@pytest.mark.parametrize(
    ("state", "seen"),
    list(
        itertools.product(
            S, [*(Read(sign) for sign in Sign), Doubted(""), Tried(0, None), Tried(0, "x"), Tick(True), Tick(False)]
        )
    ),
    ids=str,
)
def test_nothing_else_moves_a_device(state: DeviceState, seen: Seen) -> None:
    """From any state, whatever is seen, it goes where the table leads, or stays."""
    after, effects = step(Case(state, ill_since=0, due_at=math.inf), seen, 1.0, DRAIN_SECONDS)
    assert after.state is state or after.state in {to for (at, _), (to, _) in TABLE.items() if at is state}
    assert after.state is not state or not effects


def test_the_documentation_shows_the_table_as_it_is() -> None:
    """`make reference` writes it."""
    text = DOCUMENT.read_text(encoding="utf-8")
    assert (text.count(HEALTH_BEGIN), text.count(HEALTH_END)) == (1, 1)
    assert text == rewritten(text)
