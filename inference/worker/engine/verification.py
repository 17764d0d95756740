"""Verifies the proposed tokens of a step: draws after each of them until the drawn token differs from the next one.

The sampler draws from the same logits in the same order as without proposals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from inference.worker.backend import Backend
from inference.worker.engine.scheduler import Propose, Scheduler
from inference.worker.engine.speculation import Speculation
from inference.worker.engine_stats import EngineCounters
from inference.worker.steps import Candidate, Row, Step


class Verification:
    """Proposals of one engine and their verification. Without `speculation` every row gets one token."""

    def __init__(
        self, speculation: Speculation | None, scheduler: Scheduler, backend: Backend, counters: EngineCounters
    ) -> None:
        self._speculation = speculation
        self._scheduler = scheduler
        self._backend = backend
        self._counters = counters

    @property
    def propose(self) -> Propose | None:
        """The source of proposals for `Scheduler.plan`."""
        return None if self._speculation is None else self._propose

    def _propose(self, candidates: Sequence[Candidate], sequences: int) -> Sequence[Sequence[int]]:
        assert self._speculation is not None
        self._counters.begin(sequences)  # a draft model that hangs is a step that hangs
        try:
            return self._speculation.propose(candidates, sequences)
        finally:
            self._counters.step_started = None

    def computed(self, step: Step, seconds: float) -> None:
        """Notes the time of a step."""
        if self._speculation is not None and not step.prefill:
            self._speculation.note_step(len(step.rows), step.proposed, seconds)

    def draw(self, row: Row, index: int, sample: Callable[[int], int | None]) -> None:
        """Draws the next tokens of a computed row; `index` is the batch index of its last token.

        `sample` draws and accepts the token after a batch index; it returns None if the answer ends with it.
        """
        drawn: list[int] = []
        first = index - row.proposed
        proposals = row.tokens[len(row.tokens) - row.proposed :] if row.proposed else ()
        for at, proposed in enumerate((*proposals, None)):
            token = sample(first + at)
            if token is not None:
                drawn.append(token)
            if token is None or token != proposed:
                break
        if row.proposed:
            self._counters.proposed_tokens += row.proposed
            self._counters.accepted_tokens += at
        if self._speculation is not None:
            self._speculation.note_drawn(row.job, drawn)

    def remove_rejected(self, step: Step) -> None:
        """Removes from the slots the proposals that were not drawn."""
        for row in step.rows if step.proposed else ():
            if row.proposed and (kept := self._scheduler.slots.computed(row.slot)) < row.start + len(row.tokens):
                self._backend.remove(row.slot, kept)

    def removed(self, slot: int, start: int) -> None:
        """The tokens of `slot` from `start` on were removed from the context."""
        if self._speculation is not None:
            self._speculation.removed(slot, start)

    def end(self, job: int) -> None:
        """Forgets a job, which may be unknown."""
        if self._speculation is not None:
            self._speculation.end(job)
