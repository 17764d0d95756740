"""Keeps models of NVIDIA GPUs by the driver's own checkpoint of their process, where a test at start says it works.

Experimental. Decides neither who leaves nor who comes back. The driver copies what a process has on its device into
host memory of that process and lets go of the device; resumed, it is on the same device as before, with everything that
was computed. The calls are a helper's, each with a deadline (`inference.jobs.checkpoint`). A process that could not be
suspended or resumed is in no known state: it is killed, its model is cold, and this way is not tried again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from headgate.shared.units import format_bytes
from inference.children import HelperError, run_helper
from inference.core.lifecycle import Event
from inference.core.plan import Allocation, Placement, Result
from inference.core.warm import HOST, Mechanism
from inference.evictions import Action
from inference.model import Model, Running, Suspended
from inference.protocol import ModelState
from inference.worker.link import Offloaded, Ready

if TYPE_CHECKING:
    from inference.authority import Authority
    from inference.warm import WarmPool

log = logging.getLogger(__name__)

KIND = "cuda"
TEST_SECONDS = 60.0
"""For the whole test: three processes start, and a driver may need seconds for its first context."""
CALL_SECONDS = 15.0
"""For each call of the test."""
SPARE_SECONDS = 10.0
"""Of a helper beyond the deadline of its calls: it has to start."""
LEAST_SECONDS = 15.0
SLOWEST_COPY_BYTES_PER_SECOND = 500e6
"""Between device and host: far below what any bus between them does."""
_S, _E = ModelState, Event


def copy_seconds(count_bytes: int) -> float:
    """How long the driver may take for so many bytes before it is given up."""
    return LEAST_SECONDS + count_bytes / SLOWEST_COPY_BYTES_PER_SECOND


class Checkpoint:
    """One per pool. `obstacle` says why it is not used, None where it is."""

    def __init__(self, authority: Authority, pool: WarmPool) -> None:
        self._authority = authority
        self._pool = pool
        self.obstacle: str | None = "it was not tested yet"
        self.patience: Callable[[int], float] = copy_seconds
        """How many seconds a call may take that moves so many bytes."""

    async def test(self) -> None:
        """Finds out at start whether this machine can do it; says so in one line."""
        authority = self._authority
        if authority.settings.warm_checkpoint == "off":
            self.obstacle = "INFERENCE_WARM_CHECKPOINT is off"
            return
        if any(reading.kind == KIND for reading in authority.inventory.accelerators()):
            self.obstacle = await _asked({"operation": "test", "seconds": CALL_SECONDS}, TEST_SECONDS)
        else:
            self.obstacle = "there is no NVIDIA GPU"
        if self.obstacle is None:
            log.info("models of NVIDIA GPUs are kept by the driver's checkpoint: its test succeeded")
        else:
            log.warning("the driver's checkpoint is not used: %s", self.obstacle)

    def may_keep(self, running: Running) -> bool:
        """Whether it is how this one is kept: on one GPU, with memory of its own."""
        is_one = running.placement.devices == (running.device.id,)
        return self.obstacle is None and is_one and running.device.kind == KIND and not running.device.unified

    def begin(self, model: Model, running: Running) -> None:
        """Suspends the worker of a model that nobody uses; the host has room for all that it holds. Raises LedgerError.

        Until the driver is done the bytes are booked twice: it copies before it lets go.
        """
        authority = self._authority
        held = authority.ledger.holdings[running.holding].bytes
        assert running.ready is not None
        extra = f"{model.id}#{next(authority.ids)}"
        authority.ledger = authority.ledger.reserve(extra, model.id, {HOST: sum(held.values())}, aside=True)
        running.extra, running.suspended = extra, Suspended(dict(held), running.ready)
        authority.move(model, _E.OFFLOAD)
        running.worker.suspend()
        authority.background.spawn(self._suspend(model, running, running.suspended))

    async def _suspend(self, model: Model, running: Running, suspended: Suspended) -> None:
        error = await self._do("suspend", running, suspended)
        if model.running is not running or model.state is not _S.OFFLOADING:
            return  # it ended, or was given up
        if error is not None:
            self._give_up(model, running, f"could not be suspended: {error}")
            return
        self._is_suspended(model, running, suspended)

    def _is_suspended(self, model: Model, running: Running, suspended: Suspended) -> None:
        """From here on the process holds host memory alone; the device's is released once that shows it."""
        authority = self._authority
        host = authority.inventory.get(HOST)
        assert host is not None
        assert running.extra is not None
        need = {HOST: sum(suspended.need.values())}
        authority.ledger = authority.ledger.commit(running.extra, need).leave(running.holding)
        left = replace(running, extra=None, session=None)
        device, beat = running.device.id, running.worker.beat
        if running.session is not None:
            authority.background.finish(running.session.close())
        running.session = running.ready = running.departure = None
        running.holding, running.extra, running.grown_bytes = running.extra, None, 0
        running.placement, running.device = Placement(Result.FREE, Allocation.FRACTIONAL, HOST, need), host
        authority.loads.give_back(left)
        cells = sum(item.bytes for item in suspended.ready.buffers if item.kind == "kv")
        saved = Offloaded(cells, 0, beat.cells_retained if beat else 0)
        self._pool.keep(model, running, Mechanism.CHECKPOINT, device, saved)

    def resume(self, model: Model, running: Running, suspended: Suspended) -> None:
        """The device has room for what the worker had there."""
        self._authority.background.spawn(self._resume(model, running, suspended))

    async def _resume(self, model: Model, running: Running, suspended: Suspended) -> None:
        error = await self._do("resume", running, suspended)
        if model.running is not running or model.state is not _S.RESTORING:
            return
        if error is not None:
            self._give_up(model, running, f"could not be resumed: {error}")
            return
        running.suspended = None
        running.worker.resumed()
        ready: asyncio.Future[Ready] = self._authority.loop.create_future()
        ready.set_result(replace(suspended.ready, restored_tokens=0))
        self._authority.loads.on_ready(model, running, ready)

    async def _do(self, operation: str, running: Running, suspended: Suspended) -> str | None:
        """What went wrong, or None."""
        seconds = self.patience(sum(suspended.need.values()))
        job = {"operation": operation, "pid": running.worker.pid, "seconds": seconds}
        return await _asked(job, 3 * seconds + SPARE_SECONDS)

    def _give_up(self, model: Model, running: Running, why: str) -> None:
        self.obstacle = f"{model.id} {why}"
        log.warning(
            "%s (pid %d) %s; its %s are given up, and the driver's checkpoint is not used any more",
            model.id, running.worker.pid, why, format_bytes(sum(self._authority.ledger.owned_by(model.id).values())),
        )  # fmt: skip
        if running.departure is not None:
            running.departure = replace(running.departure, action=Action.UNLOAD)
        running.worker.stop()


async def _asked(job: dict[str, object], seconds: float) -> str | None:
    """What a helper says is wrong, or None."""
    try:
        answer = await run_helper("checkpoint", job, seconds=seconds)
    except HelperError as error:
        return str(error)
    return str(answer["error"]) if "error" in answer else None
