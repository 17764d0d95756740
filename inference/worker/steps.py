"""What the scheduler takes and gives: jobs, limits, steps, and the phases a job passes; decides nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from inference.protocol import Priority

HEAD_START_SECONDS: Mapping[Priority, float] = {Priority.HIGH: 0.0, Priority.NORMAL: 10.0, Priority.LOW: 60.0}
"""A class waits this much longer than the next; a fixed offset on the arrival time, so that no class ever starves."""


class Phase(StrEnum):
    """Where a job is."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"


WAITING, PREFILL, DECODE, ENDED = Phase
"""Every step asks for them once per sequence, and Python 3.11 looks members of enums up through their class."""

TRANSITIONS: Mapping[tuple[Phase, str], Phase] = {
    (WAITING, "admit"): PREFILL,
    (WAITING, "end"): ENDED,
    (PREFILL, "computed"): DECODE,
    (PREFILL, "preempt"): WAITING,
    (PREFILL, "end"): ENDED,
    (DECODE, "preempt"): WAITING,
    (DECODE, "end"): ENDED,
}


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes: `slots` sequence ids, each with KV cells of its own for `context` tokens, `batch` tokens per step, `queue`
    waiting jobs. `can_trim`: the tail of a slot can be removed and its head copied (not with running states).
    `outputs`: tokens per step whose logits can be read, at least one per slot; 0 stands for exactly that.
    `copied`: the fewest tokens that are copied from another slot sooner than computed.
    """

    slots: int
    context: int
    batch: int
    queue: int
    can_trim: bool = True
    outputs: int = 0
    copied: int = 1

    def __post_init__(self) -> None:
        fits = 0 < self.slots <= self.batch and self.context > 0 and self.copied > 0
        if not (fits and self.queue >= 0 and (self.outputs == 0 or self.outputs >= self.slots)):
            raise ValueError(f"no engine can run with {self}")


@dataclass(frozen=True, slots=True)
class Job:
    """One sequence to generate. Times are seconds on the caller's clock.

    `deadline` bounds the wait for the first token of a `request`, whichever of its jobs has it; without one a job is a
    request of its own. Jobs of one `group` share their prompt (its choices): the first computes it, the others copy it.
    `score` asks for logits at every token of the prompt, so nothing of it is copied and a step takes less of it.
    """

    id: int
    prompt: Sequence[int]
    tenant: str = ""
    priority: Priority = Priority.NORMAL
    arrival: float = 0.0
    deadline: float | None = None
    group: int | None = None
    score: bool = False
    request: int | None = None

    @property
    def key(self) -> tuple[float, int]:
        """Order of service, smallest first."""
        return (self.arrival + HEAD_START_SECONDS[self.priority], self.id)


@dataclass(frozen=True, slots=True)
class Remove:
    """Forget the tokens of `slot` from position `start` on."""

    slot: int
    start: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Let the empty `target` hold the first `count` tokens of `source` too."""

    source: int
    target: int
    count: int


class Row(NamedTuple):
    """Tokens of one job to compute from position `start` on; `sample` when a token follows from the last one, `every`
    when the logits at all of them are wanted. A tuple, because a step makes one per sequence.
    """

    job: int
    slot: int
    start: int
    tokens: Sequence[int]
    sample: bool
    every: bool = False


class Step(NamedTuple):
    """Memory operations to run in order, then one batch, its rows in the order of their slots: one token each for what
    decodes, and pieces of prompts, which have `prefill` tokens in all; `tokens` counts both. `expired` jobs ended
    because their deadline passed.
    """

    operations: Sequence[Remove | Copy] = ()
    rows: Sequence[Row] = ()
    expired: Sequence[int] = ()
    prefill: int = 0
    tokens: int = 0
