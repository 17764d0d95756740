"""Tells the workers that compute on the CPU how many threads to use as models become busy and idle; decides no number.

Who has to do with fewer is told at once, and so is a model that becomes busy. The others get back what became free once
nothing changed for CALM_SECONDS: between two short requests of a neighbor a change would cost more than it gives.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from inference.authority.placement.cpu_threads import shares
from inference.devices.host import CPU
from inference.model import Model
from inference.protocol import ModelState
from inference.worker.cpu_cores import usable_cores

if TYPE_CHECKING:
    from inference.authority.shell import Authority

log = logging.getLogger(__name__)

CALM_SECONDS = 1.0
_SERVING = (ModelState.READY, ModelState.BUSY, ModelState.DRAINING)


class Threads:
    """One per authority, on its loop. `cores` is what there is to divide."""

    def __init__(self, authority: Authority) -> None:
        self._authority = authority
        self._timer: asyncio.TimerHandle | None = None
        self.cores = usable_cores()

    def close(self) -> None:
        """Tells nobody any more."""
        if self._timer is not None:
            self._timer.cancel()

    def changed(self, model: Model) -> None:
        """A model became ready, busy or idle, or leaves."""
        if self._authority.closing or (model.running is not None and not self._computes_here(model)):
            return
        self._tell(model)
        self.close()
        self._timer = self._authority.loop.call_later(CALM_SECONDS, self._calm)

    def _calm(self) -> None:
        self._timer = None
        self._tell(None, grow=True)

    def _tell(self, newcomer: Model | None, *, grow: bool = False) -> None:
        models = self._authority.models
        busy = {
            model.id: model.effective.threads
            for model in models.values()
            if model.in_flight and model.state in _SERVING and self._computes_here(model)
        }
        for name, count in shares(self.cores, busy).items():
            running = models[name].running
            assert running is not None
            before = running.threads or models[name].effective.threads or self.cores
            if count == before or (count > before and not grow and models[name] is not newcomer):
                continue
            running.threads = count
            running.worker.use_threads(count)
            log.debug("%s computes with %d threads (before: %d)", name, count, before)

    @staticmethod
    def _computes_here(model: Model) -> bool:
        running = model.running
        return running is not None and running.placement.devices == (CPU,)
