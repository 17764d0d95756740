"""Counters of the engine for the heartbeat. The engine thread writes them; any thread may read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from inference.worker.prefill_rate import UNKNOWN, PrefillRate
from inference.worker_link import Heartbeat

HUNG_STEP_SECONDS = 10.0
"""Waiting requests get no progress messages during a step that takes longer, so that a hung step is recognizable."""


@dataclass(slots=True)
class EngineCounters:
    """Numbers that are each written atomically; a reader may see slightly old values."""

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
        """Records the start of a step with `tokens` tokens."""
        self.step_tokens = tokens
        self.step_started = self.clock()

    def end(self) -> float:
        """Records the end of the step; returns its duration in seconds."""
        started, self.step_started = self.step_started, None
        self.steps += 1
        return self.clock() - (started if started is not None else self.clock())

    @property
    def is_computing(self) -> bool:
        """Whether a step runs that has not exceeded HUNG_STEP_SECONDS."""
        started = self.step_started
        return started is not None and self.clock() - started < HUNG_STEP_SECONDS

    def beat(self) -> Heartbeat:
        """The current heartbeat message."""
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
