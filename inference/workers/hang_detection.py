"""Decides when a worker hangs: no messages, no end of loading, or a step that takes too long for its batch.

Time in which this service could not receive messages does not count: a suspended machine, a stopped process, a
blocked event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from inference.worker_link import Heartbeat

FIRST_STEP_FACTOR = 4.0
"""Factor on the timeout of the first step, which compiles kernels and allocates memory."""


@dataclass(frozen=True, slots=True)
class WorkerVitals:
    """The state of a worker. `step_seconds` is None between steps and without a heartbeat."""

    greeted: bool
    ready: bool
    age_seconds: float
    silent_seconds: float
    step_seconds: float | None = None
    step_tokens: int = 0
    first_step: bool = False


@dataclass(frozen=True, slots=True)
class Pause:
    """`seconds` until `ended_at` in which this service received no messages."""

    ended_at: float
    seconds: float


def without_pauses(step_seconds: float, reported_at: float, pauses: Iterable[Pause]) -> float:
    """The part of `step_seconds`, as reported at `reported_at`, that is outside of `pauses`."""
    began_at = reported_at - step_seconds
    paused = (min(pause.seconds, pause.ended_at - began_at) for pause in pauses if pause.ended_at > began_at)
    return max(0.0, step_seconds - sum(paused))


@dataclass(frozen=True, slots=True)
class HangTimeouts:
    """The timeouts of a worker."""

    start_seconds: float = 60.0
    load_seconds: float = 1800.0
    silence_seconds: float = 10.0
    step_seconds: float = 60.0
    step_seconds_per_token: float = 1.0

    def hang_reason(self, vitals: WorkerVitals) -> str | None:
        """Why the worker hangs, or None when it does not."""
        if not vitals.greeted:
            late = vitals.age_seconds > self.start_seconds
            return f"no sign of life within {vitals.age_seconds:.0f} s of its start" if late else None
        if vitals.silent_seconds > self.silence_seconds:
            return f"silent for {vitals.silent_seconds:.0f} s"
        if not vitals.ready:
            late = vitals.age_seconds > self.load_seconds
            return f"not loaded within {vitals.age_seconds:.0f} s" if late else None
        if vitals.step_seconds is None:
            return None
        allowed = self.step_seconds + self.step_seconds_per_token * vitals.step_tokens
        if vitals.first_step:
            allowed *= FIRST_STEP_FACTOR
        if vitals.step_seconds > allowed:
            return f"a step of {vitals.step_tokens} tokens takes longer than {allowed:.0f} s"
        return None


TICK_SECONDS = 0.5


_MOST_PAUSES = 16


class HangWatch:
    """Observes one worker from `now` on. Times are seconds of one monotonic clock."""

    def __init__(self, timeouts: HangTimeouts, now: float) -> None:
        self._timeouts = timeouts
        self._began = self._last_message = now
        self._task_began: float | None = now
        """Start of the current task (loading or holding a file), None without one."""
        self._next_tick = now + TICK_SECONDS
        self._pauses: deque[Pause] = deque(maxlen=_MOST_PAUSES)

    @property
    def is_ready(self) -> bool:
        """Whether the worker has no unfinished task."""
        return self._task_began is None

    def note_message(self, now: float) -> None:
        """A message arrived."""
        self._last_message = now

    def begin_task(self, now: float) -> None:
        """The worker got a task that takes time."""
        self._task_began = now

    def end_task(self) -> None:
        """The worker finished its task."""
        self._task_began = None

    def tick(self, now: float) -> None:
        """Must be called every TICK_SECONDS. The delay of a call is the length of a pause of this service."""
        late_seconds = now - self._next_tick
        self._next_tick = now + TICK_SECONDS
        if late_seconds <= TICK_SECONDS:
            return
        self._pauses.append(Pause(now, late_seconds))
        self._last_message = now
        self._began += late_seconds
        if self._task_began is not None:
            self._task_began += late_seconds

    def hang_reason(self, now: float, beat: Heartbeat | None, *, greeted: bool) -> str | None:
        """Why the worker hangs, or None."""
        step_seconds = beat.step_seconds if beat is not None else None
        vitals = WorkerVitals(
            greeted=greeted,
            ready=self.is_ready,
            age_seconds=now - (self._began if self._task_began is None else self._task_began),
            silent_seconds=now - self._last_message,
            step_seconds=None
            if step_seconds is None
            else without_pauses(step_seconds, self._last_message, self._pauses),
            step_tokens=beat.step_tokens if beat else 0,
            first_step=beat is not None and beat.prompt_tokens == 0 and beat.generated_tokens == 0,
        )
        return self._timeouts.hang_reason(vitals)
