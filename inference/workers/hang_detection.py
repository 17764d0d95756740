"""Decides when a worker counts as hung: silent, not loading, or in one step for longer than its batch explains."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

FIRST_STEP_FACTOR = 4.0
"""The first step compiles kernels and allocates lazily: it gets this many times a step's allowance."""


@dataclass(frozen=True, slots=True)
class Life:
    """What is known of a worker now. `step_seconds` is None between steps, and when nobody could be heard."""

    greeted: bool
    ready: bool
    age_seconds: float
    silent_seconds: float
    step_seconds: float | None = None
    step_tokens: int = 0
    first_step: bool = False


@dataclass(frozen=True, slots=True)
class Pause:
    """Nobody could listen for `seconds`, until `ended_at`."""

    ended_at: float
    seconds: float


def without_pauses(step_seconds: float, told_at: float, pauses: Iterable[Pause]) -> float:
    """How long a step, that was told at `told_at` to have taken so long, has taken outside of `pauses`."""
    began_at = told_at - step_seconds
    slept = (min(pause.seconds, pause.ended_at - began_at) for pause in pauses if pause.ended_at > began_at)
    return max(0.0, step_seconds - sum(slept))


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a worker may take, in seconds."""

    start_seconds: float = 60.0
    load_seconds: float = 1800.0
    silence_seconds: float = 10.0
    step_seconds: float = 60.0
    step_seconds_per_token: float = 1.0

    def complaint(self, life: Life) -> str | None:
        """Why the worker is hung, or None."""
        if not life.greeted:
            late = life.age_seconds > self.start_seconds
            return f"no sign of life within {life.age_seconds:.0f} s of its start" if late else None
        if life.silent_seconds > self.silence_seconds:
            return f"silent for {life.silent_seconds:.0f} s"
        if not life.ready:
            late = life.age_seconds > self.load_seconds
            return f"not loaded within {life.age_seconds:.0f} s" if late else None
        if life.step_seconds is None:
            return None
        allowed = self.step_seconds + self.step_seconds_per_token * life.step_tokens
        if life.first_step:
            allowed *= FIRST_STEP_FACTOR
        if life.step_seconds > allowed:
            return f"a step of {life.step_tokens} tokens takes longer than {allowed:.0f} s"
        return None
