"""Decides which state of a device follows from what is seen of it, and what has to be done; never touches a device.

The table is the whole machine: what is seen becomes one of its events, and an event that does not belong to a state
changes nothing. `step` adds what only time and memory of this incident decide: when to look again, how long to wait,
and that the models of a device are given up once and a restart is asked for once, however often it is seen to be lost.

A device that is not usable is looked at again and again, for ever: after a tenth of the time that the trouble has
lasted, but not sooner than FIRST_LOOK_SECONDS and not later than LAST_LOOK_SECONDS. A reading alone never makes it
healthy again: something has to be computed on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from inference.devices.signs import Sign
from inference.protocol import DeviceState

FIRST_LOOK_SECONDS = 1.0
LAST_LOOK_SECONDS = 10.0
DOUBT_SECONDS = 10.0
"""A device that cannot be read is believed so long; then a trial decides."""
AGAIN_SECONDS = 60.0
"""After that trial was passed, so long until the next one, while it still cannot be read."""
TRIAL_SECONDS = 90.0
"""A trial that says nothing for so long has failed; whoever runs it has a shorter deadline."""
STOP_SECONDS = 10.0
"""Beyond the time to drain, in which workers end that were told to."""

USABLE = (DeviceState.HEALTHY, DeviceState.SUSPECT)
"""Models may be loaded onto a device in these states, and onto no other."""


class HealthEvent(StrEnum):
    """What can happen to a device."""

    UNREADABLE = "unreadable"
    """it cannot be read now"""
    DOUBT = "doubt"
    """it was doubted: a worker ended with its loss, no process can reach it, or an operator asks"""
    CLEARED = "cleared"
    """it can be read again, and is fine"""
    ILL = "ill"
    """it still computes, and has to be emptied"""
    DEAD = "dead"
    """nothing computes on it, or it is not there"""
    EMPTY = "empty"
    """no model is on it any more"""
    OVERDUE = "overdue"
    """what it waited for did not come in time"""
    PROMISING = "promising"
    """another look found nothing that speaks against a trial"""
    PASSED = "passed"
    COMPUTES = "computes"
    """a trial was passed, and it still cannot be read"""
    FAILED = "failed"
    OUT_OF_REACH = "out of reach"
    """a trial failed, and only a restart of the service can help"""


class Effect(StrEnum):
    """What has to be done."""

    LOSE = "lose"
    """every model on it goes cold at once, and nothing is booked on it any more"""
    DRAIN = "drain"
    """every model on it leaves; what runs may finish"""
    PROBE = "probe"
    """run a trial, and tell how it ended"""
    LOOK = "look"
    """read the devices anew"""
    RESTART = "restart"
    """end the service, so that whoever started it starts it again"""
    WELCOME = "welcome"
    """it is back, and empty"""


_S, _E, _F = DeviceState, HealthEvent, Effect
TABLE: Mapping[tuple[DeviceState, HealthEvent], tuple[DeviceState, tuple[Effect, ...]]] = MappingProxyType(
    {
        (_S.HEALTHY, _E.UNREADABLE): (_S.SUSPECT, ()),
        (_S.HEALTHY, _E.DOUBT): (_S.PROBING, (_F.PROBE,)),
        (_S.HEALTHY, _E.ILL): (_S.DRAINING, (_F.DRAIN,)),
        (_S.HEALTHY, _E.DEAD): (_S.LOST, (_F.LOSE,)),
        (_S.SUSPECT, _E.CLEARED): (_S.HEALTHY, ()),
        (_S.SUSPECT, _E.DOUBT): (_S.PROBING, (_F.PROBE,)),
        (_S.SUSPECT, _E.OVERDUE): (_S.PROBING, (_F.PROBE,)),
        (_S.SUSPECT, _E.ILL): (_S.DRAINING, (_F.DRAIN,)),
        (_S.SUSPECT, _E.DEAD): (_S.LOST, (_F.LOSE,)),
        (_S.DRAINING, _E.EMPTY): (_S.QUARANTINED, ()),
        (_S.DRAINING, _E.OVERDUE): (_S.QUARANTINED, (_F.LOSE,)),
        (_S.DRAINING, _E.DEAD): (_S.LOST, (_F.LOSE,)),
        (_S.QUARANTINED, _E.PROMISING): (_S.PROBING, (_F.PROBE,)),
        (_S.QUARANTINED, _E.DEAD): (_S.LOST, ()),
        (_S.PROBING, _E.PASSED): (_S.HEALTHY, (_F.WELCOME,)),
        (_S.PROBING, _E.COMPUTES): (_S.SUSPECT, (_F.WELCOME,)),
        (_S.PROBING, _E.FAILED): (_S.LOST, (_F.LOSE,)),
        (_S.PROBING, _E.OVERDUE): (_S.LOST, (_F.LOSE,)),
        (_S.PROBING, _E.OUT_OF_REACH): (_S.DRAINING, (_F.DRAIN, _F.RESTART)),
        (_S.PROBING, _E.ILL): (_S.DRAINING, (_F.DRAIN,)),
        (_S.PROBING, _E.DEAD): (_S.LOST, (_F.LOSE,)),
        (_S.LOST, _E.PROMISING): (_S.PROBING, (_F.PROBE,)),
    }
)


@dataclass(frozen=True, slots=True)
class Case:
    """What is known of one device. Times are seconds of one monotonic clock.

    `sign` is the newest reading's and `note` says why the device is not healthy; `ill_since` is when it stopped to be.
    `due_at` is when time alone changes something. `emptied` says that no model can be on it, `asked` that a restart
    was asked for; both end with the incident. `trial` is the number of the newest trial: what an older one says late
    does not count. `looking` says that a look was asked for and no reading came since.
    """

    state: DeviceState = DeviceState.HEALTHY
    sign: Sign = Sign.FINE
    note: str = ""
    ill_since: float = math.inf
    due_at: float = math.inf
    emptied: bool = False
    asked: bool = False
    trial: int = 0
    looking: bool = False

    @property
    def usable(self) -> bool:
        """Whether models may be loaded onto it."""
        return self.state in USABLE

    def seconds_to_verdict(self, now: float) -> float | None:
        """When it may be usable again at the earliest: until the next look, or 0 while a trial runs; None if it is."""
        if self.usable:
            return None
        return 0.0 if self.state is _S.PROBING else max(0.0, self.due_at - now)


@dataclass(frozen=True, slots=True)
class Read:
    """A fresh reading."""

    sign: Sign
    note: str = ""


@dataclass(frozen=True, slots=True)
class Doubted:
    """A worker ended with the loss of the device, or an operator asks; `note` says which."""

    note: str


@dataclass(frozen=True, slots=True)
class Tried:
    """How trial number `trial` ended: None when it was passed, else a sentence."""

    trial: int
    failure: str | None


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; `empty` says whether nothing is booked on the device."""

    empty: bool


Seen = Read | Doubted | Tried | Tick
_AWAY = (_S.QUARANTINED, _S.LOST)
_NO_READING = (Sign.UNSURE, Sign.BEYOND)
_NOT_THERE = (Sign.DEAD, Sign.GONE)


def step(case: Case, seen: Seen, now: float, drain_seconds: float) -> tuple[Case, tuple[Effect, ...]]:
    """The case after what was seen at `now`, and what to do; models that drain have `drain_seconds`."""
    match seen:
        case Read():
            event = _of_reading(case, seen, now)
            case = replace(case, sign=seen.sign, looking=False)
            note = seen.note
        case Doubted(note):
            event = _E.DOUBT if case.usable else _E.PROMISING
        case Tried(trial, failure):
            event, note = _of_trial(case, trial, failure), failure or case.note
        case _:
            if case.state in _AWAY and now >= case.due_at:
                return replace(case, due_at=now + pause(now - case.ill_since), looking=True), (_F.LOOK,)
            event, note = _of_time(case, now, empty=seen.empty), case.note
    if event is None or (case.state, event) not in TABLE:
        return case, ()
    return _moved(case, event, note, now, drain_seconds)


def pause(ill_seconds: float) -> float:
    """Seconds until the next look at a device that has been ill for so long."""
    return min(LAST_LOOK_SECONDS, max(FIRST_LOOK_SECONDS, ill_seconds / 10))


def _of_reading(case: Case, seen: Read, now: float) -> HealthEvent | None:
    if seen.sign in _NOT_THERE:
        return _E.DEAD
    if seen.sign is Sign.ILL:
        return _E.ILL
    if case.state in _AWAY:
        returned = seen.sign is Sign.FINE and case.sign is not Sign.FINE
        return _E.PROMISING if returned or case.looking else None
    if seen.sign is Sign.FINE:
        return _E.CLEARED
    if seen.sign is Sign.BEYOND and case.sign is not Sign.BEYOND:
        return _E.DOUBT
    return _E.UNREADABLE


def _of_trial(case: Case, trial: int, failure: str | None) -> HealthEvent | None:
    if trial != case.trial:
        return None
    if failure is None:
        return _E.COMPUTES if case.sign in _NO_READING else _E.PASSED
    return _E.OUT_OF_REACH if case.sign is Sign.BEYOND and not case.asked else _E.FAILED


def _of_time(case: Case, now: float, *, empty: bool) -> HealthEvent | None:
    if case.state is _S.DRAINING and empty:
        return _E.EMPTY
    return _E.OVERDUE if now >= case.due_at else None


def _moved(
    case: Case, event: HealthEvent, note: str, now: float, drain_seconds: float
) -> tuple[Case, tuple[Effect, ...]]:
    state, effects = TABLE[case.state, event]
    effects = tuple(effect for effect in effects if _is_left_to_do(case, effect))
    after = replace(
        case,
        state=state,
        note=note or case.note,
        ill_since=min(case.ill_since, now),
        trial=case.trial + (_F.PROBE in effects),
        asked=case.asked or _F.RESTART in effects,
        emptied=case.emptied or event is _E.EMPTY or _F.LOSE in effects,
        looking=False,
    )
    if state in USABLE:
        after = replace(after, emptied=False, asked=False, ill_since=math.inf if state is _S.HEALTHY else now)
    if state is _S.HEALTHY:
        after = replace(after, note="")
    return replace(after, due_at=now + _patience(after, event, now, drain_seconds)), effects


def _is_left_to_do(case: Case, effect: Effect) -> bool:
    """What empties a device is done once; who was never away is not welcomed."""
    if effect in (_F.LOSE, _F.DRAIN):
        return not case.emptied
    return case.emptied if effect is _F.WELCOME else True


def _patience(case: Case, event: HealthEvent, now: float, drain_seconds: float) -> float:
    """How long the state that was just entered lasts by itself."""
    match case.state:
        case _S.HEALTHY:
            return math.inf
        case _S.SUSPECT:
            return AGAIN_SECONDS if event is _E.COMPUTES else DOUBT_SECONDS
        case _S.DRAINING:
            return drain_seconds + STOP_SECONDS
        case _S.PROBING:
            return TRIAL_SECONDS
        case _:
            return pause(now - case.ill_since)
