"""The way of a model from its device into the warm pool: saved, copied and booked step by step, or given up in time.

Decides neither who leaves nor who is dropped for it. A model on the CPU stays in its own process, which frees the
context. One of an accelerator leaves its process, because a device context costs memory; a fresh one, which has seen no
device, takes its file. What the sequences hold is saved first; memory is booked before anything is copied into it.
A process that the driver can suspend is not left at all (`inference.checkpoint`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from headgate.shared.errors import HeadgateError
from headgate.shared.units import format_bytes
from inference.authority.lifecycle.transitions import Event
from inference.authority.placement.plan import Allocation, Placement, Result
from inference.authority.warm.retention import HOST, Mechanism, Warm, copy_seconds, displaced
from inference.devices.device import HIDDEN
from inference.estimate.overheads import CPU_OVERHEAD_BYTES
from inference.evictions import Reason
from inference.model import Model, Running
from inference.protocol import ModelState
from inference.wishes import estimate_of
from inference.workers.worker_link import Offloaded
from inference.workers.worker_process import WorkerExit

if TYPE_CHECKING:
    from inference.authority.shell import Authority
    from inference.warm import WarmPool

log = logging.getLogger(__name__)

DROP_SECONDS = 5.0
"""How long a model that wants to be kept waits for those who are dropped for it."""
SPARE_BYTES = 2**20
"""Of saved sequences beyond their cells: tokens, tables, rounding."""
_S, _E = ModelState, Event


class Leaving:
    """One per pool."""

    def __init__(self, authority: Authority, pool: WarmPool) -> None:
        self._authority = authority
        self._pool = pool
        self.patience: Callable[[int], float] = copy_seconds
        """How many seconds saving or copying so many bytes may take."""

    def begin(self, model: Model) -> bool:
        """Nobody uses a draining model any more: begins to keep it. False where it has to be unloaded."""
        running = model.running
        assert running is not None
        if why := self._pool.obstacle(model):
            log.info("%s is not kept: %s", model.id, why)
            return False
        if self._pool.mechanism(model) is Mechanism.STANDBY:
            self._stand_by(model, running)
            return True
        warm = self.kept_as(model)
        missing, _ = self._authority.ledger.missing({HOST: warm.bytes})
        if missing[HOST]:
            return self._make_room(model, running, warm, missing[HOST])
        if self._pool.mechanism(model) is Mechanism.CHECKPOINT:
            self._pool.checkpoint.begin(model, running)
            return True
        return self._hold(model, running, warm.bytes)

    def kept_as(self, model: Model) -> Warm:
        """What keeping it would take and save; sequences come on top as far as there is room."""
        running = model.running
        assert running is not None
        mechanism = self._pool.mechanism(model)
        if mechanism is Mechanism.CHECKPOINT:
            size = sum(self._authority.ledger.holdings[running.holding].bytes.values())
        elif mechanism is Mechanism.RESIDENT:
            size = model.effective.path.stat().st_size + CPU_OVERHEAD_BYTES
        else:
            size = self._rest(model, running)[HOST]
        return Warm(model.id, size, model.reload_seconds - (model.restore_seconds or 0.0), model.last_used_at)

    def _rest(self, model: Model, running: Running) -> Mapping[str, int]:
        """What a process without its context still holds."""
        held = self._authority.ledger.holdings[running.holding].bytes.get(HOST, 0)
        weights = sum(item.bytes for item in running.ready.buffers if item.kind == "weights") if running.ready else 0
        overhead = estimate_of(model, running.placement).overhead_bytes.get(HOST, 0)
        return {HOST: min(held, weights + overhead)}

    def _make_room(self, model: Model, running: Running, warm: Warm, lacking: int) -> bool:
        """Drops warm models that are worth less, once; the model goes on leaving when they are gone."""
        if running.has_waited:
            return False
        now = self._authority.loop.time()
        names = displaced(warm, self._pool.droppable(), lacking, now)
        if not names:
            log.info("%s is not kept: %s are missing for it", model.id, format_bytes(lacking))
            return False
        running.has_waited = True
        ends = self._pool.drop(names, Reason.MEMORY_WANTED, f"room to keep {model.id} warm")
        self._authority.background.spawn(self._go_on(model, running, ends))
        return True

    async def _go_on(self, model: Model, running: Running, ends: list[asyncio.Future[WorkerExit]]) -> None:
        await asyncio.wait(ends, timeout=DROP_SECONDS)
        await asyncio.sleep(0)  # their memory is booked back now
        if model.running is running and model.state is _S.DRAINING and not running.leases:
            self._authority.loads.unload(model)

    def _most_bytes(self, running: Running, base: int) -> int:
        """What sequences may take: their cells, within what is left and is not wanted by others."""
        cells = sum(item.bytes for item in running.ready.buffers if item.kind == "kv") if running.ready else 0
        room = self._authority.ledger.room(HOST, aside=True)[0] - base - running.leaves_free
        return max(0, min(cells + SPARE_BYTES, room)) if cells else 0

    def _stand_by(self, model: Model, running: Running) -> None:
        authority, worker = self._authority, running.worker
        most = self._most_bytes(running, 0)
        if most:
            running.extra = f"{model.id}#{next(authority.ids)}"
            authority.ledger = authority.ledger.reserve(running.extra, model.id, {HOST: most}, aside=True)
        authority.move(model, _E.OFFLOAD)
        worker.offload(most, stays=True)
        worker.offloaded.add_done_callback(lambda _done: self._stands_by(model, running))
        self._limit(model, running, self.patience(most))

    def _stands_by(self, model: Model, running: Running) -> None:
        """The process has freed its context."""
        done = running.worker.offloaded
        if done.exception() is not None or model.running is not running or model.state is not _S.OFFLOADING:
            return
        authority, said = self._authority, done.result()
        ledger = authority.ledger
        before = sum(ledger.holdings[running.holding].bytes.values())
        rest = self._rest(model, running)
        ledger = ledger.shrink(running.holding, rest)
        if running.extra is not None:
            saved = {HOST: min(said.count_bytes, ledger.holdings[running.extra].bytes[HOST])}
            ledger = ledger.commit(running.extra, saved).absorb(running.holding, running.extra)
            running.extra = None
        authority.ledger = ledger
        if running.session is not None:
            authority.background.finish(running.session.close())
        running.session = running.ready = None
        departure, running.departure = running.departure, None
        if departure is not None:
            authority.evictions.add(model.id, departure, before - sum(ledger.holdings[running.holding].bytes.values()))
        self._pool.keep(model, running, Mechanism.STANDBY, HOST, said)

    def _hold(self, model: Model, leaving: Running, base: int) -> bool:
        """A fresh process takes the file; the leaving one saves its sequences where that finds them, and ends."""
        authority = self._authority
        most = self._most_bytes(leaving, base)
        holding = f"{model.id}#{next(authority.ids)}"
        need = {HOST: base + most}
        ledger = authority.ledger.reserve(holding, model.id, need, aside=True)
        try:
            worker = authority.loads.supervisor.spawn(
                model.id, HIDDEN, lambda: authority.teller.heard(model), after=leaving.worker
            )
        except HeadgateError as error:
            log.warning("%s is not kept: %s", model.id, error)
            return False
        authority.ledger = ledger.leave(leaving.holding)
        host = authority.inventory.get(HOST)
        assert host is not None
        placement = Placement(Result.FREE, Allocation.FRACTIONAL, HOST, need)
        keeper = Running(holding, placement, host, authority.loop.time(), worker, files=model.effective.files)
        model.running = keeper
        authority.move(model, _E.OFFLOAD)
        leaving.worker.offload(most, stays=False)
        path = str(model.effective.path)
        worker.hello.add_done_callback(lambda hello: None if hello.exception() else worker.hold(path))
        worker.exited.add_done_callback(lambda exited: authority.loads.on_exit(model, keeper, exited.result()))
        for promise in (worker.held, leaving.worker.exited):
            promise.add_done_callback(lambda _done: self._is_held(model, keeper, leaving))
        self._limit(model, keeper, self.patience(base))
        authority.loop.call_later(self.patience(most), self._too_late, leaving, None)
        return True

    def _is_held(self, model: Model, keeper: Running, leaving: Running) -> None:
        """The file is in memory or the leaving process is gone; the model is warm when both are true."""
        worker = keeper.worker
        if not (worker.held.done() and leaving.worker.exited.done()) or worker.held.exception() is not None:
            return
        if model.running is not keeper or model.state is not _S.OFFLOADING:
            return
        done = leaving.worker.offloaded
        said = done.result() if done.exception() is None else Offloaded(0, 0, 0)
        ledger = self._authority.ledger
        most = ledger.holdings[keeper.holding].bytes[HOST]
        actual = min(most, worker.held.result().count_bytes + CPU_OVERHEAD_BYTES + said.count_bytes)
        self._authority.ledger = ledger.commit(keeper.holding, {HOST: actual})
        self._pool.keep(model, keeper, Mechanism.RESIDENT, leaving.device.id, said)

    def _limit(self, model: Model, running: Running, seconds: float) -> None:
        self._authority.loop.call_later(seconds, self._too_late, running, model)

    def _too_late(self, running: Running, model: Model | None) -> None:
        """A step of leaving took too long; of a leaving process (no model) anything but its end is."""
        if model is None or (model.running is running and model.state is _S.OFFLOADING):
            running.worker.kill("it did not give its model up in time")
