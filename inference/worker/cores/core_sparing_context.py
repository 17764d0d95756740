"""A context on the CPU that leaves a core to other programs where steps are faster that way."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from inference.worker.backend import OK, Backend, BatchRow, Decode
from inference.worker.cores.core_sparing import CoreSparing
from inference.worker.cpu_cores import IdleCores, LostCores

DIVIDED_FROM = 256
"""Cells from which llama.cpp divides the attention of a single sequence over the threads. From here on the number of
threads changes how sums are rounded (ggml-cpu `ops.cpp`: one query and 512 cells or more, in blocks of 256)."""


class CoreSparingBackend:
    """A `Backend` that wraps another one and measures its decode steps.

    Prefill uses every thread. So does a single sequence whose results depend on the number of threads: the same request
    alone has the same answer under any load. `spare(n)` removes `n` threads from the next steps, down to one thread.
    """

    def __init__(
        self,
        backend: Backend,
        spare: Callable[[int], None],
        clock: Callable[[], float] = time.perf_counter,
        idle: IdleCores | None = None,
        lost: LostCores | None = None,
    ) -> None:
        self.can_trim = backend.can_trim
        self.remove = backend.remove
        self.copy = backend.copy
        self.logits = backend.logits
        self._backend = backend
        self._set_spared = spare
        self._clock = clock
        self._idle = idle or IdleCores()
        self._lost = lost or LostCores()
        self._sparing = CoreSparing()
        self._spared = 0

    def decode(self, rows: Sequence[BatchRow]) -> tuple[Decode, list[int]]:
        """Computes a step with the number of threads that the policy chose."""
        if any(len(row.tokens) != 1 for row in rows) or (len(rows) == 1 and rows[0].start >= DIVIDED_FROM):
            self._spare(0)
            began, ended, status, last = self._computed(rows)
            self._lost.computed(ended - began)
            return status, last
        sparing = self._sparing
        self._spare(sparing.spared)
        began, ended, status, last = self._computed(rows)
        if status is OK:
            self._lost.computed(ended - began)
            idle = self._idle.over(began, ended) if sparing.spared else None
            is_due = sparing.is_due
            sparing.observe(len(rows), ended - began, idle, self._lost.share() if is_due else None)
            if sparing.spared or (is_due and not sparing.is_due):
                self._lost.forget()  # measured with one thread fewer: not comparable
        return status, last

    def _computed(self, rows: Sequence[BatchRow]) -> tuple[float, float, Decode, list[int]]:
        """Returns the times of begin and end, the status, and the outputs of the step."""
        began = self._clock()
        status, last = self._backend.decode(rows)
        return began, self._clock(), status, last

    def _spare(self, count: int) -> None:
        if count != self._spared:
            self._spared = count
            self._set_spared(count)
