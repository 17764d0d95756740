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
TICK_SECONDS = 0.5
_MAX_PAUSES = 16


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


class HangWatch:
    """Observes one worker from `now` on. Times are seconds of one monotonic clock."""

    def __init__(self, timeouts: HangTimeouts, now: float) -> None:
        self._timeouts = timeouts
        self._began = self._last_message = now
        self._task_began: float | None = now
        """Start of the current task (`Grant` or `Hold`), None without one."""
        self._next_tick = now + TICK_SECONDS
        self._pauses: deque[Pause] = deque(maxlen=_MAX_PAUSES)

    @property
    def has_task(self) -> bool:
        """Whether the worker has an unfinished task: it starts, loads, or reads a file into memory."""
        return self._task_began is not None

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
        """Must be called every TICK_SECONDS. A call that is later by more than that shows a pause of this service."""
        late_seconds = now - self._next_tick
        self._next_tick = now + TICK_SECONDS
        if late_seconds <= TICK_SECONDS:
            return
        self._pauses.append(Pause(now, late_seconds))
        self._last_message = now
        self._began += late_seconds
        if self._task_began is not None:
            self._task_began += late_seconds

    def hang_reason(self, now: float, beat: Heartbeat | None, *, hello_received: bool) -> str | None:
        """Why the worker hangs, or None. `hello_received`: whether it has sent a message since its start."""
        limits = self._timeouts
        age_seconds = now - (self._began if self._task_began is None else self._task_began)
        silent_seconds = now - self._last_message
        if not hello_received:
            late = age_seconds > limits.start_seconds
            return f"no sign of life within {age_seconds:.0f} s of its start" if late else None
        if silent_seconds > limits.silence_seconds:
            return f"silent for {silent_seconds:.0f} s"
        if self.has_task:
            return f"not loaded within {age_seconds:.0f} s" if age_seconds > limits.load_seconds else None
        if beat is None or beat.step_seconds is None:
            return None
        allowed = limits.step_seconds + limits.step_seconds_per_token * beat.step_tokens
        if beat.prompt_tokens == 0 and beat.generated_tokens == 0:
            allowed *= FIRST_STEP_FACTOR
        if without_pauses(beat.step_seconds, self._last_message, self._pauses) > allowed:
            return f"a step of {beat.step_tokens} tokens takes longer than {allowed:.0f} s"
        return None
