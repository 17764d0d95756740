"""Detects that a cloud went silent before its attempts time out, from the stages at which they wait.

An attempt waits for its first byte, then for its first token, then for the rest of its answer. It counts as silent when
it shows no sign of life for too long and no attempt has passed that stage since it arrived there. Times are monotonic
seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Protocol

SILENT_SECONDS = 7.5
"""Shorter silence is normal. An attempt times out much later."""

SILENCE_FACTOR = 2.0
"""After the first byte a model may be thinking: this multiple of the longest silence of earlier attempts is normal."""

MIN_SAMPLES, MAX_SAMPLES = 3, 16
"""Number of earlier attempts that the longest silence is taken from. With fewer, silence after the first byte is not
judged."""


class StreamActivity(Protocol):
    """The signs of life of one attempt's stream."""

    longest_silence: float
    """The longest silence that ended with a sign of life, in seconds; reset when a stage is passed."""

    def silent_seconds(self) -> float:
        """Seconds since the last sign of life; 0 while nothing reads the stream."""
        ...


class _Stage:
    """A stage after the first byte. `waiting`: attempts that reached it after the last one that passed it."""

    def __init__(self) -> None:
        self.waiting: dict[int, tuple[float, StreamActivity]] = {}
        self._silences: deque[float] = deque(maxlen=MAX_SAMPLES)

    def passed(self, activity: StreamActivity) -> None:
        """One attempt passed the stage."""
        self.waiting.clear()
        self._silences.append(activity.longest_silence)
        activity.longest_silence = 0.0

    def verdicts(self, now: float) -> Iterator[bool]:
        """For each attempt that arrived long enough ago, whether it is silent."""
        if len(self._silences) >= MIN_SAMPLES:
            allowed = max(SILENT_SECONDS, SILENCE_FACTOR * max(self._silences))
            for since, activity in self.waiting.values():
                if now - since < allowed:
                    return  # all further attempts are more recent
                yield activity.silent_seconds() >= allowed


class SilenceDetector:
    """The running attempts at one provider or model. Numbers are those of permits; unknown ones are ignored."""

    def __init__(self, *, is_model: bool) -> None:
        """Stages after the first byte are judged per model: another model of the provider may think for longer."""
        self._stages = (_Stage(), _Stage()) if is_model else ()
        self._connecting: dict[int, tuple[float, float]] = {}
        self._running: dict[int, StreamActivity | None] = {}

    def started(self, number: int, now: float, expires: float) -> None:
        """An attempt begins; it times out at `expires`."""
        self._connecting[number] = now, expires
        self._running[number] = None

    def first_byte(self, number: int, now: float, activity: StreamActivity) -> None:
        """The first byte of the attempt has arrived."""
        if number in self._running:
            self._connecting.clear()
            self._running[number] = activity
            if self._stages:
                self._stages[0].waiting[number] = now, activity

    def first_token(self, number: int, now: float) -> None:
        """The first token of the attempt has arrived."""
        if self._stages and (activity := self._running.get(number)) is not None:
            first, rest = self._stages
            first.passed(activity)
            rest.waiting[number] = now, activity

    def ended(self, number: int, *, answered: bool) -> None:
        """The attempt ended. `answered`: it got a complete answer."""
        if number not in self._running:
            return
        activity = self._running.pop(number)
        self._connecting.pop(number, None)
        for stage in self._stages:
            stage.waiting.pop(number, None)
        if answered:
            self._connecting.clear()
            if self._stages and activity is not None:
                self._stages[-1].passed(activity)

    def clear(self) -> None:
        """Ignore the attempts that run now."""
        self._connecting.clear()
        self._running.clear()
        for stage in self._stages:
            stage.waiting.clear()

    def silent_attempts(self, now: float, enough: int) -> int:
        """The number of silent attempts, counted up to `enough`."""
        found = 0
        for is_silent in self._verdicts(now):
            found += is_silent
            if found >= enough:
                break
        return found

    def _verdicts(self, now: float) -> Iterator[bool]:
        for since, expires in self._connecting.values():
            if now - since < SILENT_SECONDS:
                break
            yield now < expires
        for stage in self._stages:
            yield from stage.verdicts(now)
