"""Facts about the engine that the heartbeat publishes; written by the engine's thread, read by any; decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from inference.worker.prefill_rate import UNKNOWN, PrefillRate
from inference.workers.worker_link import Heartbeat

HUNG_STEP_SECONDS = 10.0
"""A step that takes longer is not explained any more to those who wait for it: a hung one must look hung to them."""


@dataclass(slots=True)
class EngineCounters:
    """Plain numbers, each written whole; a reader may see them a moment old."""

    clock: Callable[[], float]
    step_started: float | None = None
    step_tokens: int = 0
    steps: int = 0
    active: int = 0
    queued: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cells_used: int = 0
    cells_retained: int = 0
    prefill: PrefillRate = UNKNOWN

    def begin(self, tokens: int) -> None:
        """A step of that many tokens starts."""
        self.step_tokens = tokens
        self.step_started = self.clock()

    def end(self) -> float:
        """The step is over; returns its seconds."""
        started, self.step_started = self.step_started, None
        self.steps += 1
        return self.clock() - (started if started is not None else self.clock())

    @property
    def is_computing(self) -> bool:
        """Whether a step runs that can still be expected to end."""
        started = self.step_started
        return started is not None and self.clock() - started < HUNG_STEP_SECONDS

    def beat(self) -> Heartbeat:
        """The heartbeat now."""
        started = self.step_started
        return Heartbeat(
            step_seconds=None if started is None else max(0.0, self.clock() - started),
            step_tokens=self.step_tokens if started is not None else 0,
            active=self.active,
            queued=self.queued,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            cells_used=self.cells_used,
            cells_retained=self.cells_retained,
            prefill_tokens_per_second=self.prefill.tokens_per_second,
        )
