"""Keeps models by a checkpoint of their process, where a test at start says that their kind of device can do it.

Experimental on NVIDIA GPUs. Decides neither who leaves nor who comes back. Whoever drives the device copies what a
process has on it into host memory and lets go of it; resumed, the process is on the same device as before, with
everything that was computed. The calls are others' (`inference.devices.checkpoint_support`), each with a deadline. A
process
that could not be suspended or resumed is in no known state: it is killed, its model is cold, and this way is not tried
again on devices of that kind, unless it was the state of the device that was in the way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from headgate.shared.units import format_bytes
from inference.authority.lifecycle.transitions import Event
from inference.authority.placement.plan import Allocation, Placement, Result
from inference.authority.warm.retention import HOST, Mechanism
from inference.devices.checkpoint_support import Trouble
from inference.evictions import Action
from inference.model import Model, Running, Suspended
from inference.protocol import ModelState
from inference.workers.worker_link import Offloaded, Ready

if TYPE_CHECKING:
    from inference.authority.shell import Authority
    from inference.warm import WarmPool

log = logging.getLogger(__name__)

LEAST_SECONDS = 15.0
SLOWEST_COPY_BYTES_PER_SECOND = 500e6
"""Between device and host: far below what any bus between them does."""
TESTED = frozenset({"sim"})
"""Kinds of devices whose way was tested with all of it in place (INFERENCE_WARM_CHECKPOINT=simulated)."""
_S, _E = ModelState, Event


def copy_seconds(count_bytes: int) -> float:
    """How long a copy of so many bytes may take before it is given up."""
    return LEAST_SECONDS + count_bytes / SLOWEST_COPY_BYTES_PER_SECOND


class Checkpoint:
    """One per pool. `obstacles` say why it is not used, by kind of device, None where it is."""

    def __init__(self, authority: Authority, pool: WarmPool) -> None:
        self._authority = authority
        self._pool = pool
        self.obstacles: dict[str, str | None] = {}
        self.patience: Callable[[int], float] = copy_seconds
        """How many seconds a call may take that moves so many bytes."""

    async def prove(self) -> None:
        """Has devices tested at start: simulated ones, which takes a moment, before any load; others beside."""
        carriers = self._authority.inventory.carriers
        await self.test([kind for kind in carriers if kind in TESTED])
        self._authority.background.spawn(self.test([kind for kind in carriers if kind not in TESTED]))

    async def test(self, kinds: Sequence[str]) -> None:
        """Finds out which devices of this machine can do it; says so in one line for each kind."""
        said = self._authority.settings.warm_checkpoint
        devices = {reading.kind: reading for reading in reversed(self._authority.inventory.accelerators())}
        for kind in kinds:
            carrier = self._authority.inventory.carriers[kind]
            if said == "off" or (said == "simulated" and kind not in TESTED):
                self.obstacles[kind] = f"INFERENCE_WARM_CHECKPOINT is {said}"
            elif kind not in devices:
                self.obstacles[kind] = "there is no such device"
            else:
                trouble = await carrier.test(devices[kind])
                self.obstacles[kind] = None if trouble is None else trouble.why
                if trouble is None:
                    log.info("models are kept by a checkpoint of %s: its test succeeded", carrier.who)
                else:
                    log.warning("the checkpoint of %s is not used: %s", carrier.who, trouble.why)

    def may_keep(self, running: Running) -> bool:
        """Whether it is how this one is kept: on one GPU, with memory of its own."""
        is_one = running.placement.devices == (running.device.id,)
        is_proven = self.obstacles.get(running.device.kind, "it was not tested") is None
        return is_proven and is_one and not running.device.unified

    def begin(self, model: Model, running: Running) -> None:
        """Suspends the worker of a model that nobody uses; the host has room for all that it holds. Raises LedgerError.

        Until that is done the bytes are booked twice: the copy is whole before the device is let go.
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
        trouble = await self._do("suspend", running, suspended)
        if model.running is not running or model.state is not _S.OFFLOADING:
            return  # it ended, or was given up
        if trouble is not None:
            self._give_up(model, running, "could not be suspended", trouble)
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
        trouble = await self._do("resume", running, suspended)
        if model.running is not running or model.state is not _S.RESTORING:
            return
        if trouble is not None:
            self._give_up(model, running, "could not be resumed", trouble)
            return
        running.suspended = None
        running.worker.resumed()
        ready: asyncio.Future[Ready] = self._authority.loop.create_future()
        ready.set_result(replace(suspended.ready, restored_tokens=0))
        self._authority.loads.on_ready(model, running, ready)

    async def _do(self, operation: str, running: Running, suspended: Suspended) -> Trouble | None:
        """What went wrong, or None."""
        device = running.device
        seconds = self.patience(sum(suspended.need.values()))
        return await self._authority.inventory.carriers[device.kind].carry(
            operation, device.id, running.worker.pid, seconds
        )

    def _give_up(self, model: Model, running: Running, what: str, trouble: Trouble) -> None:
        kind, then = running.device.kind, ""
        if not trouble.of_state:
            self.obstacles[kind] = f"{model.id} {what}: {trouble.why}"
            then = f", and the checkpoint of {self._authority.inventory.carriers[kind].who} is not used any more"
        log.warning(
            "%s (pid %d) %s: %s; its %s are given up%s",
            model.id, running.worker.pid, what, trouble.why,
            format_bytes(sum(self._authority.ledger.owned_by(model.id).values())), then,
        )  # fmt: skip
        if running.departure is not None:
            running.departure = replace(running.departure, action=Action.UNLOAD)
        running.worker.stop()
