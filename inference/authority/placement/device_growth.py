"""Which model a change of device memory belongs to, from two readings and the bookings between them.

The driver's figure for a process decides where it is known. Otherwise a rise of the unexplained bytes belongs to the
model that computed or loaded there since the last reading; of several, to the one that did so last. A rise while no
model was active, or one that is too large for the pools of the model, is foreign.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

SLACK_BYTES = 64 * 2**20
TOLERATED_SHARE = 0.01
"""The share of a device by which unexplained use may vary without effect (as FOREIGN_TOLERANCE of the levels)."""
MAX_UNPROVEN_BYTES = 2048 * 2**20
UNPROVEN_SHARE = 1 / 8
"""Without a figure of its process, a model grows by at most this share of its bytes (at least SLACK_BYTES, at most
MAX_UNPROVEN_BYTES). A larger rise is the memory of another program.
"""


class Evidence(StrEnum):
    """Why growth belongs to a model, as its explanation names it."""

    PROCESS = "the driver reports it for its process"
    ONLY_ACTIVE = "no other model was active on the device meanwhile"
    LAST_ACTIVE = "of several active models it was the last to load, or to begin or end a request"


@dataclass(frozen=True, slots=True)
class Grown:
    """The bytes of a model on a device beyond its plan."""

    bytes: int
    evidence: Evidence


@dataclass(frozen=True, slots=True)
class Mark:
    """The last reading of a device that decided about growth. It began at `at`.

    `foreign_bytes`: use that no model explains. `overheads`: planned overhead of the models there, by holding.
    """

    foreign_bytes: int
    at: float
    overheads: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Occupant:
    """A loaded model on the device. `grown_bytes` is the part of `booked_bytes` that was growth.

    `process_bytes`: the driver's figure for its process, None if unknown. `active_at`: when its load ended, or a
    request last began or ended; None if it was not active since the last reading.
    """

    holding: str
    booked_bytes: int
    grown_bytes: int = 0
    process_bytes: int | None = None
    active_at: float | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """Bytes that a holding gains, or loses if negative."""

    holding: str
    bytes: int
    evidence: Evidence


@dataclass(frozen=True, slots=True)
class Attribution:
    """The changes of holdings, and the bytes that no model explains and that count as foreign from now on.

    `small_bytes`: growth of all models that is too small to be booked.
    """

    changes: tuple[Change, ...]
    foreign_bytes: int
    small_bytes: int = 0


def slack_bytes(total_bytes: int) -> int:
    """Changes up to this size are not booked. It is at most `tolerated_bytes`, so growth is booked before it counts as
    a rise of foreign use.

    Growth of several models counts together.
    """
    return min(SLACK_BYTES, tolerated_bytes(total_bytes))


def tolerated_bytes(total_bytes: int) -> int:
    """Growth without room in the ledger stays unbooked up to this sum of all models; beyond it the model leaves."""
    return int(total_bytes * TOLERATED_SHARE)


def plausible_bytes(planned_bytes: int) -> int:
    """The most growth of a model with these planned bytes, without a figure of its process."""
    return min(MAX_UNPROVEN_BYTES, max(SLACK_BYTES, int(planned_bytes * UNPROVEN_SHARE)))


def attribute(
    unexplained_bytes: int, foreign_bytes: int, occupants: Sequence[Occupant], slack: int, *, is_settled: bool
) -> Attribution:
    """Attributes a reading of one device.

    `unexplained_bytes`: used minus booked, negative if less is in use than booked. `foreign_bytes`: the last result.
    Without `is_settled`, memory of a loading or ending worker makes `unexplained_bytes` too small: only rises count.
    """
    grown = [more for item in occupants if (more := _more(item)) > 0]
    most = slack if sum(grown) <= slack else slack // len(grown)
    found = [change for item in occupants if (change := _by_process(item, most, slack)) is not None]
    small = sum(more for more in grown if more <= most)
    rest = unexplained_bytes - sum(change.bytes for change in found) - small
    unproven = [item for item in occupants if item.process_bytes is None]
    active = [item for item in unproven if item.active_at is not None]
    rise = rest - foreign_bytes
    if rise > slack:
        by_activity = _by_activity(active, rise)
        return Attribution((*found, *by_activity), foreign_bytes if by_activity else rest, small)
    if rise > 0 and active:
        return Attribution(tuple(found), foreign_bytes, small + rise)
    if rise > 0:
        return Attribution(tuple(found), rest, small)
    if not is_settled:
        return Attribution(tuple(found), foreign_bytes, small)
    return Attribution((*found, *_shrunk(unproven, -rest)), max(0, rest), small)


def _more(item: Occupant) -> int:
    """What the process of a model uses beyond its bookings; 0 where its figure is unknown."""
    return 0 if item.process_bytes is None else item.process_bytes - item.booked_bytes


def _by_process(item: Occupant, most: int, slack: int) -> Change | None:
    """The change of a model by the figure of its process: growth above `most`, or a loss above `slack`.

    Its bookings never fall below its plan.
    """
    more = _more(item)
    if -slack <= more <= most:
        return None
    more = max(more, -item.grown_bytes)
    return Change(item.holding, more, Evidence.PROCESS) if more else None


def _by_activity(active: Sequence[Occupant], rise: int) -> list[Change]:
    """Attributes `rise` to the last active model up to its plausible growth, the rest to the one before it, and so on.

    Nothing if a rest is left in the end.
    """
    evidence = Evidence.ONLY_ACTIVE if len(active) == 1 else Evidence.LAST_ACTIVE
    found = []
    for item in sorted(active, key=lambda item: (item.active_at or 0.0, item.holding), reverse=True):
        if (more := min(rise, plausible_bytes(item.booked_bytes - item.grown_bytes) - item.grown_bytes)) > 0:
            found.append(Change(item.holding, more, evidence))
            rise -= more
    return [] if rise else found


def _shrunk(unproven: Sequence[Occupant], missing: int) -> list[Change]:
    """Takes back growth that is not in use, the largest first."""
    found = []
    for item in sorted(unproven, key=lambda item: (-item.grown_bytes, item.holding)):
        less = min(item.grown_bytes, missing)
        if less > 0:
            found.append(Change(item.holding, -less, Evidence.ONLY_ACTIVE))
            missing -= less
    return found


def forfeited(marks: Mapping[str, Mark], lost: Mapping[str, int]) -> Mapping[str, Mark]:
    """The marks by device after booked bytes became foreign."""
    return {
        device: replace(mark, foreign_bytes=mark.foreign_bytes + lost.get(device, 0)) for device, mark in marks.items()
    }
