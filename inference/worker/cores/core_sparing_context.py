"""A context on the CPU whose steps leave a core to others where that is faster; measures steps, decides nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from inference.worker.backend import OK, Backend, BatchRow, Decode
from inference.worker.cores.core_sparing import Crew
from inference.worker.cores.thread_placement import Companions
from inference.worker.cpu_cores import IdleCores, LostCores

DIVIDED_FROM = 256
"""Cells of a lone sequence from which llama.cpp divides its attention over the threads, so that their number changes
how sums are rounded (ggml-cpu `ops.cpp`: one query and 512 cells or more, counted in blocks of 256)."""


class CrewedBackend:
    """`Backend` over another one. Steps that only decode are timed; all others use every thread, and so do steps whose
    results depend on how many there are: the same request alone has the same answer, whatever else the cores do.

    `spare(n)` has the next steps computed with `n` threads fewer than they may use, but with one at least.
    """

    def __init__(
        self,
        backend: Backend,
        spare: Callable[[int], None],
        clock: Callable[[], float] = time.perf_counter,
        idle: IdleCores | None = None,
        lost: LostCores | None = None,
        companions: Companions | None = None,
    ) -> None:
        self.can_trim = backend.can_trim
        self.remove = backend.remove
        self.copy = backend.copy
        self.logits = backend.logits
        self._backend = backend
        self._leave = spare
        self._clock = clock
        self._idle = idle or IdleCores()
        self._lost = lost or LostCores()
        self._companions = companions or Companions()
        self._crew = Crew()
        self._spared = 0

    def decode(self, rows: Sequence[BatchRow]) -> tuple[Decode, list[int]]:
        """Computes a step with as many threads as are worth it."""
        if any(len(row.tokens) != 1 for row in rows) or (len(rows) == 1 and rows[0].start >= DIVIDED_FROM):
            self._spare(0)
            began, ended, status, last = self._computed(rows)
            self._lost.computed(ended - began)
            return status, last
        crew = self._crew
        self._spare(crew.spared)
        began, ended, status, last = self._computed(rows)
        if status is OK:
            self._lost.computed(ended - began)
            idle = self._idle.over(began, ended) if crew.spared else None
            is_due = crew.is_due
            crew.observe(len(rows), ended - began, idle, self._lost.share() if is_due else None)
            if crew.spared or (is_due and not crew.is_due):
                self._lost.forget()  # what was waited for with a thread fewer says nothing of all of them
        return status, last

    def _computed(self, rows: Sequence[BatchRow]) -> tuple[float, float, Decode, list[int]]:
        """When it began and ended, and what came of it."""
        began = self._clock()
        self._companions.begin(began)
        try:
            status, last = self._backend.decode(rows)
        finally:
            ended = self._clock()
            self._companions.end(ended)
        return began, ended, status, last

    def _spare(self, count: int) -> None:
        if count != self._spared:
            self._spared = count
            self._leave(count)
