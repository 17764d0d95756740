"""Restart policy of a supervised process, as a pure state machine: the container policy `unless-stopped`.

    stopped --Begin--> running --Exited--> waiting --Due--> running
                          |                   |
                          +--Exited, status of a usage error--> given_up --Begin--> running
    any --Stop--> stopped

The delays are Docker's: 100 ms, doubled after each exit up to one minute, and 100 ms again after a run of ten seconds.
Times are seconds of one monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from headgate.shared.errors import Exit


class Phase(StrEnum):
    """The phase of a supervised process."""

    STOPPED = "stopped"
    RUNNING = "running"
    WAITING = "waiting"
    GIVEN_UP = "given_up"


@dataclass(frozen=True, slots=True)
class Policy:
    """`final`: exit statuses after which a restart would fail in the same way."""

    first_seconds: float = 0.1
    factor: float = 2.0
    cap_seconds: float = 60.0
    healthy_seconds: float = 10.0
    final: frozenset[int] = frozenset({int(Exit.USAGE)})


@dataclass(frozen=True, slots=True)
class ProcessState:
    """One supervised process. `exits` counts exits since the last healthy run; `due_at` is set while waiting."""

    phase: Phase = Phase.STOPPED
    started_at: float = 0.0
    exits: int = 0
    due_at: float | None = None


@dataclass(frozen=True, slots=True)
class Begin:
    """The process shall run."""

    now: float


@dataclass(frozen=True, slots=True)
class Exited:
    """The process ended with `status`: an exit code, or minus the signal's number."""

    now: float
    status: int


@dataclass(frozen=True, slots=True)
class Due:
    """The delay is over."""

    now: float


@dataclass(frozen=True, slots=True)
class Stop:
    """The process shall not run any more. A later exit changes nothing."""


ProcessEvent = Begin | Exited | Due | Stop


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start the process now."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Send Due after `seconds`."""

    seconds: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not start the process again, because of its exit `status`."""

    status: int


Effect = Spawn | Wait | GiveUp


def step(state: ProcessState, event: ProcessEvent, policy: Policy) -> tuple[ProcessState, tuple[Effect, ...]]:
    """The next state and the effects. An event that does not fit the phase changes nothing."""
    match state.phase, event:
        case _, Stop():
            return ProcessState(), ()
        case ((Phase.STOPPED | Phase.GIVEN_UP), Begin(now)):
            return ProcessState(Phase.RUNNING, started_at=now), (Spawn(),)
        case Phase.WAITING, Due(now) if state.due_at is not None and now >= state.due_at:
            return replace(state, phase=Phase.RUNNING, started_at=now, due_at=None), (Spawn(),)
        case Phase.RUNNING, Exited(now, status):
            if status in policy.final:
                return replace(state, phase=Phase.GIVEN_UP), (GiveUp(status),)
            healthy = now - state.started_at >= policy.healthy_seconds
            exits = 1 if healthy else state.exits + 1
            seconds = delay(exits, policy)
            return replace(state, phase=Phase.WAITING, exits=exits, due_at=now + seconds), (Wait(seconds),)
        case _:
            return state, ()


def delay(exits: int, policy: Policy) -> float:
    """Seconds to wait after `exits` (1 or more) exits in a row."""
    seconds = policy.first_seconds
    for _ in range(exits - 1):
        if seconds >= policy.cap_seconds:
            break
        seconds *= policy.factor
    return min(seconds, policy.cap_seconds)
