"""State machine of device health, and the signs of a broken device."""

from __future__ import annotations

import itertools
import math

import pytest

from inference.authority.device_health import (
    AGAIN_SECONDS,
    LAST_READ_SECONDS,
    STOP_SECONDS,
    SUSPECT_SECONDS,
    TABLE,
    TRIAL_SECONDS,
    DeviceHealth,
    Effect,
    HealthEvent,
    Read,
    Seen,
    Suspected,
    Tick,
    TrialResult,
    pause,
    step,
)
from inference.devices import signs
from inference.devices.signs import Sign, sign_of_action, sign_of_nvml, sign_of_xid, worst, xid_words
from inference.protocol import DeviceState
from inference.tools.state_diagrams import DOCUMENT, HEALTH_BEGIN, HEALTH_END, rewritten

DRAIN_SECONDS = 30.0
S = DeviceState


class Device:
    """A case with its own clock."""

    def __init__(self) -> None:
        self.case = DeviceHealth()
        self.now = 100.0

    def sees(self, seen: Seen, after: float = 0.0) -> tuple[DeviceState, list[Effect]]:
        """The new state and the effects."""
        self.now += after
        self.case, effects = step(self.case, seen, self.now, DRAIN_SECONDS)
        return self.case.state, list(effects)

    def reads(self, sign: Sign, note: str = "", after: float = 0.0) -> tuple[DeviceState, list[Effect]]:
        return self.sees(Read(sign, note), after)

    def waits(self, seconds: float, *, empty: bool = True) -> tuple[DeviceState, list[Effect]]:
        return self.sees(Tick(empty), seconds)

    def tried(self, failure: str | None = None) -> tuple[DeviceState, list[Effect]]:
        return self.sees(TrialResult(self.case.trial, failure))


@pytest.fixture
def device() -> Device:
    return Device()


def test_lost_device_is_read_until_it_is_back_and_has_passed_a_trial(device: Device) -> None:
    assert device.reads(Sign.HEALTHY) == (S.HEALTHY, [])
    assert device.reads(Sign.FAILED, "it was cut") == (S.LOST, [Effect.LOSE])
    assert (device.case.note, device.case.usable) == ("it was cut", False)
    assert device.case.seconds_to_verdict(device.now) == 1
    assert device.waits(0.5) == (S.LOST, [])
    assert device.case.seconds_to_verdict(device.now) == 0.5
    assert device.waits(0.5) == (S.LOST, [Effect.READ])
    assert device.reads(Sign.FAILED, "it was cut") == (S.LOST, [])
    assert device.reads(Sign.HEALTHY, after=0.3) == (S.PROBING, [Effect.PROBE])
    assert device.case.seconds_to_verdict(device.now) == 0
    assert device.tried() == (S.HEALTHY, [Effect.RELOAD])
    assert device.case == DeviceHealth(trial=1)
    assert device.case.seconds_to_verdict(device.now) is None


def test_device_that_fails_its_trial_stays_lost(device: Device) -> None:
    """It is tried again after each pause, not at each reading."""
    device.reads(Sign.FAILED)
    device.reads(Sign.HEALTHY)
    assert device.tried("wrong result") == (S.LOST, [])
    assert device.case.note == "wrong result"
    assert device.reads(Sign.HEALTHY) == (S.LOST, [])
    assert device.waits(1) == (S.LOST, [Effect.READ])
    assert device.reads(Sign.HEALTHY) == (S.PROBING, [Effect.PROBE])
    assert device.reads(Sign.FAILED, "gone again") == (S.LOST, [])
    assert device.tried() == (S.LOST, [])


def test_pauses_grow_with_the_outage_up_to_a_limit() -> None:
    assert [pause(seconds) for seconds in (0, 9, 20, 55, 100, 1e6)] == [1, 1, 2, 5.5, 10, LAST_READ_SECONDS]


def test_reading_of_a_lost_device_is_repeated(device: Device) -> None:
    device.reads(Sign.FAILED)
    looks = [device.waits(0.5)[1] for _ in range(40)]
    assert looks.count([Effect.READ]) == 16  # ten in the first ten seconds, then fewer


def test_unhealthy_device_is_drained_before_it_is_quarantined(device: Device) -> None:
    assert device.reads(Sign.DEGRADED, "Xid 63") == (S.DRAINING, [Effect.DRAIN])
    assert device.case.seconds_to_verdict(device.now) == DRAIN_SECONDS + STOP_SECONDS
    assert device.reads(Sign.HEALTHY) == (S.DRAINING, [])
    assert device.waits(5, empty=False) == (S.DRAINING, [])
    assert device.waits(1) == (S.QUARANTINED, [])
    assert device.reads(Sign.DEGRADED, "Xid 63") == (S.QUARANTINED, [])
    assert device.waits(1) == (S.QUARANTINED, [Effect.READ])
    assert device.reads(Sign.DEGRADED, "Xid 63") == (S.QUARANTINED, [])
    assert device.reads(Sign.HEALTHY) == (S.PROBING, [Effect.PROBE])
    assert device.reads(Sign.DEGRADED, "again") == (S.DRAINING, [])
    assert device.waits(1) == (S.QUARANTINED, [])
    assert device.reads(Sign.FAILED) == (S.LOST, [])


def test_models_that_are_not_unloaded_in_time_are_stopped(device: Device) -> None:
    device.reads(Sign.DEGRADED)
    assert device.waits(DRAIN_SECONDS, empty=False) == (S.DRAINING, [])
    assert device.waits(STOP_SECONDS, empty=False) == (S.QUARANTINED, [Effect.LOSE])


def test_device_that_fails_while_draining_is_lost(device: Device) -> None:
    device.reads(Sign.DEGRADED)
    assert device.reads(Sign.MISSING) == (S.LOST, [Effect.LOSE])


def test_unreadable_device_is_suspect_for_a_while(device: Device) -> None:
    assert device.reads(Sign.UNCERTAIN, "timeout") == (S.SUSPECT, [])
    assert device.case.usable
    assert device.waits(SUSPECT_SECONDS - 1) == (S.SUSPECT, [])
    assert device.reads(Sign.HEALTHY) == (S.HEALTHY, [])
    assert device.case.note == ""


def test_unreadable_device_that_passes_its_trial_stays_in_use(device: Device) -> None:
    device.reads(Sign.UNCERTAIN, "timeout")
    assert device.waits(SUSPECT_SECONDS, empty=False) == (S.PROBING, [Effect.PROBE])
    assert device.tried() == (S.SUSPECT, [])
    assert device.waits(SUSPECT_SECONDS, empty=False) == (S.SUSPECT, [])
    assert device.waits(AGAIN_SECONDS, empty=False) == (S.PROBING, [Effect.PROBE])
    assert device.tried("no answer") == (S.LOST, [Effect.LOSE])


def test_suspect_device_may_be_drained_or_lost(device: Device) -> None:
    device.reads(Sign.UNCERTAIN)
    assert device.reads(Sign.DEGRADED) == (S.DRAINING, [Effect.DRAIN])
    other = Device()
    other.reads(Sign.UNCERTAIN)
    assert other.reads(Sign.FAILED) == (S.LOST, [Effect.LOSE])


@pytest.mark.parametrize("sign", [Sign.HEALTHY, Sign.UNCERTAIN])
def test_exit_of_a_worker_with_a_device_error_starts_a_trial(device: Device, sign: Sign) -> None:
    device.reads(sign)
    assert device.sees(Suspected("a worker ended")) == (S.PROBING, [Effect.PROBE])
    assert device.sees(Suspected("another")) == (S.PROBING, [])
    assert device.reads(sign) == (S.PROBING, [])
    assert device.tried() == ({Sign.HEALTHY: S.HEALTHY, Sign.UNCERTAIN: S.SUSPECT}[sign], [])


def test_trial_without_a_result_fails_and_its_late_result_is_ignored(device: Device) -> None:
    device.sees(Suspected("a worker ended"))
    assert device.waits(TRIAL_SECONDS, empty=False) == (S.LOST, [Effect.LOSE])
    assert device.tried() == (S.LOST, [])
    assert device.sees(Suspected("command of an operator")) == (S.PROBING, [Effect.PROBE])
    assert device.sees(TrialResult(1, None)) == (S.PROBING, [])
    assert device.tried() == (S.HEALTHY, [Effect.RELOAD])


def test_device_that_new_processes_cannot_reach_requests_one_restart(device: Device) -> None:
    """Running requests may finish; without a restart the device is drained and tried like any other."""
    assert device.reads(Sign.UNREACHABLE, "Unknown Error") == (S.PROBING, [Effect.PROBE])
    assert device.tried("no CUDA-capable device") == (S.DRAINING, [Effect.DRAIN, Effect.RESTART])
    assert device.waits(DRAIN_SECONDS + STOP_SECONDS, empty=False) == (S.QUARANTINED, [Effect.LOSE])
    assert device.waits(LAST_READ_SECONDS) == (S.QUARANTINED, [Effect.READ])
    assert device.reads(Sign.UNREACHABLE) == (S.PROBING, [Effect.PROBE])
    assert device.tried("still none") == (S.LOST, [])


def test_device_with_a_broken_nvml_stays_in_use_after_its_trial(device: Device) -> None:
    device.reads(Sign.UNREACHABLE, "Unknown Error")
    assert device.tried() == (S.SUSPECT, [])
    assert device.reads(Sign.UNREACHABLE) == (S.SUSPECT, [])
    assert device.reads(Sign.UNCERTAIN) == (S.SUSPECT, [])
    assert device.reads(Sign.HEALTHY) == (S.HEALTHY, [])


def test_all_states_can_be_reached_and_left() -> None:
    reached = {S.HEALTHY}
    while (more := {to for (at, _), (to, _) in TABLE.items() if at in reached} | reached) != reached:
        reached = more
    assert reached == set(S)
    assert {at for at, _ in TABLE} == set(S)
    assert {event for _, event in TABLE} == set(HealthEvent)


@pytest.mark.parametrize(
    ("state", "seen"),
    list(
        itertools.product(
            S,
            [
                *(Read(sign) for sign in Sign),
                Suspected(""),
                TrialResult(0, None),
                TrialResult(0, "x"),
                Tick(True),
                Tick(False),
            ],
        )
    ),
    ids=str,
)
def test_transitions_are_those_of_the_table(state: DeviceState, seen: Seen) -> None:
    after, effects = step(DeviceHealth(state, unhealthy_since=0, due_at=math.inf), seen, 1.0, DRAIN_SECONDS)
    assert after.state is state or after.state in {to for (at, _), (to, _) in TABLE.items() if at is state}
    assert after.state is not state or not effects


def test_documentation_contains_the_current_table() -> None:
    """`make reference` writes it."""
    text = DOCUMENT.read_text(encoding="utf-8")
    assert (text.count(HEALTH_BEGIN), text.count(HEALTH_END)) == (1, 1)
    assert text == rewritten(text)


def test_worst_sign_is_the_last_of_the_enumeration() -> None:
    for some in itertools.permutations(Sign, 3):
        assert list(Sign).index(worst(some)) == max(list(Sign).index(sign) for sign in some)
    assert worst([]) is Sign.HEALTHY


@pytest.mark.parametrize(
    ("code", "sign"),
    [
        (0, Sign.HEALTHY),
        (6, Sign.MISSING),
        (9, Sign.FAILED),
        (10, Sign.UNCERTAIN),
        (15, Sign.FAILED),
        (16, Sign.FAILED),
        (18, Sign.DEGRADED),
        (999, Sign.UNCERTAIN),
        (12345, Sign.UNCERTAIN),
    ],
)
def test_each_nvml_code_has_its_sign(code: int, sign: Sign) -> None:
    assert sign_of_nvml(code) is sign


def test_single_code_does_not_make_a_device_unreachable() -> None:
    """Such codes also occur briefly while a driver is replaced."""
    assert Sign.UNREACHABLE not in {sign_of_nvml(code) for code in range(1000)}
    assert {17, 18, 999} == signs.OUT_OF_REACH


@pytest.mark.parametrize(
    ("action", "sign"),
    [
        (0, Sign.HEALTHY),
        (1, Sign.FAILED),
        (2, Sign.FAILED),
        (3, Sign.DEGRADED),
        (4, Sign.DEGRADED),
        (6, Sign.FAILED),
        (99, Sign.UNCERTAIN),
    ],
)
def test_each_recovery_action_has_its_sign(action: int, sign: Sign) -> None:
    assert sign_of_action(action) is sign


@pytest.mark.parametrize(
    ("number", "sign"),
    [
        (45, Sign.HEALTHY),  # from each killed worker
        (43, Sign.HEALTHY),
        (63, Sign.HEALTHY),
        (13, Sign.HEALTHY),
        (31, Sign.HEALTHY),
        (94, Sign.HEALTHY),
        (130, Sign.HEALTHY),
        (48, Sign.DEGRADED),
        (64, Sign.DEGRADED),
        (79, Sign.FAILED),
        (95, Sign.FAILED),
        (119, Sign.FAILED),
        (74, Sign.UNCERTAIN),
        (154, Sign.UNCERTAIN),
        (9999, Sign.UNCERTAIN),
    ],
)
def test_each_xid_event_has_its_sign(number: int, sign: Sign) -> None:
    """Unknown and ambiguous numbers are a reason to look."""
    assert sign_of_xid(number) is sign


def test_each_xid_has_one_meaning() -> None:
    buckets = [signs._IGNORE, signs._RESTART_APP, signs._DRAIN, signs._RESET]
    assert sum(map(len, buckets)) == len(frozenset().union(*buckets))


def test_xid_events_are_described() -> None:
    assert xid_words(79) == "Xid 79 (fallen off the bus)"
    assert xid_words(9999) == "Xid 9999"
