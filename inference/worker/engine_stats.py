"""Counters of the engine for the heartbeat. The engine thread writes them; any thread may read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from inference.worker_link import Heartbeat, KvCounts

WINDOW_SECONDS = 20.0
"""Window of computing time; older measurements hardly count."""

MIN_TOKENS = 32
"""Minimum number of prompt tokens of a step that counts."""


@dataclass(frozen=True, slots=True)
class TokenRate:
    """Tokens and the seconds of their steps; older ones weigh less. Steps of fewer than `least` tokens are ignored.

    Prefill: reused prefix tokens count as computed in no time, because the next prompt can expect reuse too. Steps with
    few prompt tokens are ignored, because their duration depends on the step and not on the prompt.
    """

    tokens: float = 0.0
    seconds: float = 0.0
    least: int = MIN_TOKENS

    def with_step(self, tokens: int, seconds: float) -> TokenRate:
        """The rate with one more step that took `seconds`. `tokens`: its tokens, with the reused ones."""
        if tokens < self.least or seconds <= 0:
            return self
        kept = max(0.0, 1.0 - seconds / WINDOW_SECONDS)
        return TokenRate(self.tokens * kept + tokens, self.seconds * kept + seconds, self.least)

    @property
    def tokens_per_second(self) -> float | None:
        """The rate; None before the first step that counts."""
        return self.tokens / self.seconds if self.seconds else None


HUNG_STEP_SECONDS = 10.0
"""Waiting requests get no progress messages during a step that takes longer, so that a hung step is recognizable."""


@dataclass(slots=True)
class EngineCounters:
    """The numbers of a heartbeat. Each is written atomically; a reader may see slightly old values."""

    clock: Callable[[], float]
    step_started: float | None = None
    step_tokens: int = 0
    steps: int = 0
    largest_step: int = 0
    active: int = 0
    queued: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    cells_used: int = 0
    cells_retained: int = 0
    prefill: TokenRate = TokenRate()
    decode: TokenRate = TokenRate(least=1)
    """The rate of the steps that compute one token of one sequence."""
    kv: KvCounts = field(default_factory=KvCounts)

    def begin(self, tokens: int) -> None:
        """Records the start of a step with `tokens` tokens."""
        self.step_tokens = tokens
        self.step_started = self.clock()

    @property
    def elapsed(self) -> float:
        """Seconds since the start of the running step; 0 if none runs."""
        return 0.0 if self.step_started is None else self.clock() - self.step_started

    def end(self) -> float:
        """Records the end of the step; returns its duration in seconds."""
        seconds, self.step_started = self.elapsed, None
        self.steps += 1
        self.largest_step = max(self.largest_step, self.step_tokens)
        return seconds

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
            proposed_tokens=self.proposed_tokens,
            accepted_tokens=self.accepted_tokens,
            cells_used=self.cells_used,
            cells_retained=self.cells_retained,
            prefill_tokens_per_second=self.prefill.tokens_per_second,
            decode_tokens_per_second=self.decode.tokens_per_second,
            kv=self.kv,
            largest_step=self.largest_step,
        )
