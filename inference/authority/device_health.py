"""The state machine of a device's health: `step(health, seen, now, drain_seconds)` returns the new state and effects.

TABLE has the transitions; an event without a transition does not change the state. `step` adds the times: when to read
again and how long to wait. The effects that give up the models of a device and request a restart happen once per
incident.

A quarantined or lost device is read again after a tenth of the time since the incident began, within
FIRST_READ_SECONDS and LAST_READ_SECONDS. A reading alone does not make it healthy: a trial must compute on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from inference.devices.signs import Sign
from inference.protocol import DeviceState

FIRST_READ_SECONDS = 1.0
LAST_READ_SECONDS = 10.0
SUSPECT_SECONDS = 10.0
"""How long a doubtful device stays usable; then a trial decides."""
AGAIN_SECONDS = 60.0
"""Time between trials of a device that passes them but stays doubtful."""
TRIAL_SECONDS = 90.0
"""A trial without a result after this time has failed; the trial itself has a shorter deadline."""
STOP_SECONDS = 10.0
"""Time for workers to end, in addition to the drain time."""

USABLE = (DeviceState.HEALTHY, DeviceState.SUSPECT)
"""Models may be loaded only onto devices in these states."""


class HealthEvent(StrEnum):
    """Events of a device."""

    DOUBTFUL = "doubtful"
    """the reading is uncertain, or there is none"""
    TRIAL_NEEDED = "trial needed"
    """a worker hung or ended with the loss of the device, no process can reach it, or an operator requested a trial"""
    CLEARED = "cleared"
    """read again, without problems"""
    DEGRADED = "degraded"
    """still computes, but has to be emptied"""
    LOST = "lost"
    """does not compute, or is missing"""
    EMPTY = "empty"
    """no model is left on it"""
    OVERDUE = "overdue"
    """the time of the state is over"""
    TRIAL_ALLOWED = "trial allowed"
    """a new reading allows a trial, or an operator requested it"""
    TRIAL_PASSED = "trial passed"
    COMPUTES = "computes"
    """a trial passed, but the device is doubtful"""
    TRIAL_FAILED = "trial failed"
    UNREACHABLE = "unreachable"
    """a trial failed, and only a restart of the service helps"""


class Effect(StrEnum):
    """What the caller has to do."""

    LOSE = "lose"
    """all its models become cold at once, and its bookings are removed"""
    DRAIN = "drain"
    """all its models leave after their running requests"""
    PROBE = "probe"
    """run a trial and report its result"""
    READ = "read"
    """read the devices again"""
    RESTART = "restart"
    """end the service, so that its supervisor restarts it"""
    RELOAD = "reload"
    """the empty device is usable again"""


_S, _E, _F = DeviceState, HealthEvent, Effect
TABLE: Mapping[tuple[DeviceState, HealthEvent], tuple[DeviceState, tuple[Effect, ...]]] = MappingProxyType(
    {
        (_S.HEALTHY, _E.DOUBTFUL): (_S.SUSPECT, ()),
        (_S.HEALTHY, _E.TRIAL_NEEDED): (_S.PROBING, (_F.PROBE,)),
        (_S.HEALTHY, _E.DEGRADED): (_S.DRAINING, (_F.DRAIN,)),
        (_S.HEALTHY, _E.LOST): (_S.LOST, (_F.LOSE,)),
        (_S.SUSPECT, _E.CLEARED): (_S.HEALTHY, ()),
        (_S.SUSPECT, _E.TRIAL_NEEDED): (_S.PROBING, (_F.PROBE,)),
        (_S.SUSPECT, _E.OVERDUE): (_S.PROBING, (_F.PROBE,)),
        (_S.SUSPECT, _E.DEGRADED): (_S.DRAINING, (_F.DRAIN,)),
        (_S.SUSPECT, _E.LOST): (_S.LOST, (_F.LOSE,)),
        (_S.DRAINING, _E.EMPTY): (_S.QUARANTINED, ()),
        (_S.DRAINING, _E.OVERDUE): (_S.QUARANTINED, (_F.LOSE,)),
        (_S.DRAINING, _E.LOST): (_S.LOST, (_F.LOSE,)),
        (_S.QUARANTINED, _E.TRIAL_ALLOWED): (_S.PROBING, (_F.PROBE,)),
        (_S.QUARANTINED, _E.LOST): (_S.LOST, ()),
        (_S.PROBING, _E.TRIAL_PASSED): (_S.HEALTHY, (_F.RELOAD,)),
        (_S.PROBING, _E.COMPUTES): (_S.SUSPECT, (_F.RELOAD,)),
        (_S.PROBING, _E.TRIAL_FAILED): (_S.LOST, (_F.LOSE,)),
        (_S.PROBING, _E.OVERDUE): (_S.LOST, (_F.LOSE,)),
        (_S.PROBING, _E.UNREACHABLE): (_S.DRAINING, (_F.DRAIN, _F.RESTART)),
        (_S.PROBING, _E.DEGRADED): (_S.DRAINING, (_F.DRAIN,)),
        (_S.PROBING, _E.LOST): (_S.LOST, (_F.LOSE,)),
        (_S.LOST, _E.TRIAL_ALLOWED): (_S.PROBING, (_F.PROBE,)),
    }
)


@dataclass(frozen=True, slots=True)
class DeviceHealth:
    """The health of one device. Times are monotonic seconds.

    `sign` is that of the newest reading, `note` the reason why the device is not healthy. `unhealthy_since`: start of
    the incident. `due_at`: when the time of the state is over; a quarantined or lost device is then read again.
    `emptied`: no model is left on the device. `restart_requested`: the effect RESTART was returned. Both last until the
    end of the incident. `trial` is the number of the newest trial; results of older ones do not count.
    `reading_requested`: no reading has come since the request.
    """

    state: DeviceState = DeviceState.HEALTHY
    sign: Sign = Sign.HEALTHY
    note: str = ""
    unhealthy_since: float = math.inf
    due_at: float = math.inf
    emptied: bool = False
    restart_requested: bool = False
    trial: int = 0
    reading_requested: bool = False

    @property
    def usable(self) -> bool:
        """Whether models may be loaded onto it."""
        return self.state in USABLE

    def seconds_to_verdict(self, now: float) -> float | None:
        """Seconds until the device may be usable, None if it is: until the next reading or the end of draining.

        0 during a trial.
        """
        if self.usable:
            return None
        return 0.0 if self.state is _S.PROBING else max(0.0, self.due_at - now)


@dataclass(frozen=True, slots=True)
class Read:
    """A new reading."""

    sign: Sign
    note: str = ""


@dataclass(frozen=True, slots=True)
class Suspected:
    """A reason for a trial, in `note`: a worker hung or ended with the loss of the device, or an operator wants it."""

    note: str


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The result of trial number `trial`: `failure` is None if it passed."""

    trial: int
    failure: str | None


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. `empty`: nothing is booked on the device."""

    empty: bool


Seen = Read | Suspected | TrialResult | Tick
_AWAY = (_S.QUARANTINED, _S.LOST)
_DOUBTFUL_SIGNS = (Sign.UNCERTAIN, Sign.UNREACHABLE)
_LOST_SIGNS = (Sign.FAILED, Sign.MISSING)


def step(health: DeviceHealth, seen: Seen, now: float, drain_seconds: float) -> tuple[DeviceHealth, tuple[Effect, ...]]:
    """The health after `seen` at `now`, and the effects. `drain_seconds`: time for models to drain."""
    match seen:
        case Read():
            event = _of_reading(health, seen, now)
            health = replace(health, sign=seen.sign, reading_requested=False)
            note = seen.note
        case Suspected(note):
            event = _E.TRIAL_NEEDED if health.usable else _E.TRIAL_ALLOWED
        case TrialResult(trial, failure):
            event, note = _of_trial(health, trial, failure), failure or health.note
        case _:
            if health.state in _AWAY and now >= health.due_at:
                return replace(health, due_at=now + pause(now - health.unhealthy_since), reading_requested=True), (
                    _F.READ,
                )
            event, note = _of_time(health, now, empty=seen.empty), health.note
    if event is None or (health.state, event) not in TABLE:
        return health, ()
    return _moved(health, event, note, now, drain_seconds)


def pause(unhealthy_seconds: float) -> float:
    """Seconds until the next reading of a device that has been unhealthy for `unhealthy_seconds`."""
    return min(LAST_READ_SECONDS, max(FIRST_READ_SECONDS, unhealthy_seconds / 10))


def _of_reading(health: DeviceHealth, seen: Read, now: float) -> HealthEvent | None:
    if seen.sign in _LOST_SIGNS:
        return _E.LOST
    if seen.sign is Sign.DEGRADED:
        return _E.DEGRADED
    if health.state in _AWAY:
        returned = seen.sign is Sign.HEALTHY and health.sign is not Sign.HEALTHY
        return _E.TRIAL_ALLOWED if returned or health.reading_requested else None
    if seen.sign is Sign.HEALTHY:
        return _E.CLEARED
    if seen.sign is Sign.UNREACHABLE and health.sign is not Sign.UNREACHABLE:
        return _E.TRIAL_NEEDED
    return _E.DOUBTFUL


def _of_trial(health: DeviceHealth, trial: int, failure: str | None) -> HealthEvent | None:
    if trial != health.trial:
        return None
    if failure is None:
        return _E.COMPUTES if health.sign in _DOUBTFUL_SIGNS else _E.TRIAL_PASSED
    return _E.UNREACHABLE if health.sign is Sign.UNREACHABLE and not health.restart_requested else _E.TRIAL_FAILED


def _of_time(health: DeviceHealth, now: float, *, empty: bool) -> HealthEvent | None:
    if health.state is _S.DRAINING and empty:
        return _E.EMPTY
    return _E.OVERDUE if now >= health.due_at else None


def _moved(
    health: DeviceHealth, event: HealthEvent, note: str, now: float, drain_seconds: float
) -> tuple[DeviceHealth, tuple[Effect, ...]]:
    state, effects = TABLE[health.state, event]
    effects = tuple(effect for effect in effects if _is_left_to_do(health, effect))
    after = replace(
        health,
        state=state,
        note=note or health.note,
        unhealthy_since=min(health.unhealthy_since, now),
        trial=health.trial + (_F.PROBE in effects),
        restart_requested=health.restart_requested or _F.RESTART in effects,
        emptied=health.emptied or event is _E.EMPTY or _F.LOSE in effects,
        reading_requested=False,
    )
    if state in USABLE:
        after = replace(
            after, emptied=False, restart_requested=False, unhealthy_since=math.inf if state is _S.HEALTHY else now
        )
    if state is _S.HEALTHY:
        after = replace(after, note="")
    return replace(after, due_at=now + _state_seconds(after, event, now, drain_seconds)), effects


def _is_left_to_do(health: DeviceHealth, effect: Effect) -> bool:
    """Whether an effect is still due: a device is emptied once, and RELOAD needs an emptied device."""
    if effect in (_F.LOSE, _F.DRAIN):
        return not health.emptied
    return health.emptied if effect is _F.RELOAD else True


def _state_seconds(health: DeviceHealth, event: HealthEvent, now: float, drain_seconds: float) -> float:
    """Seconds until `due_at`."""
    match health.state:
        case _S.HEALTHY:
            return math.inf
        case _S.SUSPECT:
            return AGAIN_SECONDS if event is _E.COMPUTES else SUSPECT_SECONDS
        case _S.DRAINING:
            return drain_seconds + STOP_SECONDS
        case _S.PROBING:
            return TRIAL_SECONDS
        case _:
            return pause(now - health.unhealthy_since)
