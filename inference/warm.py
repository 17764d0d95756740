"""The warm pool: models give their device back and keep what makes them quick to load; books every byte they keep.

Decides neither who leaves nor who is dropped for another (`inference.core.warm`, `inference.core.plan`). Two mechanisms
behind one door. A model on the CPU stays in its own process, which frees the context. A model of an accelerator leaves
its process, because a device context costs memory; a fresh one, which has seen no device, takes its file into memory.
Either way what the sequences hold is saved first, and host memory is booked before anything is copied into it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headgate.shared.errors import HeadgateError
from headgate.shared.units import format_bytes
from inference.core.lifecycle import Event
from inference.core.plan import Allocation, Option, Placement, Refusal, Request, Result
from inference.core.warm import HOST, Leaver, Mechanism, Warm, copy_seconds, displaced, kept_of
from inference.devices.base import HIDDEN
from inference.errors import InvalidRequestError
from inference.evictions import Action, Reason
from inference.model import Model, Running
from inference.overheads import CPU_OVERHEAD_BYTES
from inference.pinning import environment_of
from inference.process import WorkerExit
from inference.protocol import ModelState
from inference.wishes import estimate_of, grant_for

if TYPE_CHECKING:
    from inference.authority import Authority

log = logging.getLogger(__name__)

DROP_SECONDS = 5.0
"""How long a model that wants to be kept waits for those who are dropped for it."""
SPARE_BYTES = 2**20
"""Of saved sequences beyond their cells: tokens, tables, rounding."""
ENGINE_QUEUE = 512
_PART_OF_SEVERAL = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_S, _E = ModelState, Event


@dataclass(frozen=True, slots=True)
class Kept:
    """A model that is warm. Times are of the loop's clock but `since`, which is Unix seconds."""

    mechanism: Mechanism
    original_device: str
    since: float
    count_bytes: int
    sequences: int
    tokens: int


class WarmPool:
    """Who is kept, from the moment nobody uses a model any more until it is loaded again or dropped."""

    def __init__(self, authority: Authority) -> None:
        self._authority = authority
        self._kept: dict[str, Kept] = {}
        self._watching: list[asyncio.Future[None]] = []
        self.restorations = 0
        self.patience: Callable[[int], float] = copy_seconds
        """How many seconds saving or copying so many bytes may take."""

    # --- asking ----------------------------------------------------------------------------------------------------
    def obstacle(self, model: Model) -> str | None:
        """Why a loaded model could not be kept however much memory there is, or None."""
        if not self._authority.settings.enable_cpu_offload:
            return "INFERENCE_ENABLE_CPU_OFFLOAD is false"
        if not model.spec.warm:
            return "the model says warm: false"
        if model.removed or (model.running is not None and model.running.stamp != stamp(model.effective.path)):
            return "its file or its configuration is not what was loaded"
        if self.mechanism(model) is Mechanism.RESIDENT:
            if sys.platform != "linux":
                return "models of accelerators are kept on Linux only"
            if _PART_OF_SEVERAL.search(model.effective.path.name):
                return "its file is one of several"
        return None

    def mechanism(self, model: Model) -> Mechanism:
        """How a model that is loaded, or warm, is kept."""
        if kept := self._kept.get(model.id):
            return kept.mechanism
        on_host = model.running is None or set(model.running.placement.devices) == {HOST}
        return Mechanism.STANDBY if on_host else Mechanism.RESIDENT

    def action(self, model: Model) -> Action:
        """What becomes of a model that leaves for no other model's sake."""
        return Action.UNLOAD if self.obstacle(model) else Action.OFFLOAD

    def kept_of(self, decision: Placement) -> frozenset[str]:
        """Those of the models which leave for this placement that are kept."""
        authority = self._authority
        leavers = []
        for name in decision.evict:
            model = authority.models[name]
            assert model.running is not None
            may = model.state in (_S.READY, _S.BUSY) and not self.obstacle(model)
            leavers.append(Leaver(name, model.running.holding, self._warm(model) if may else None))
        return kept_of(leavers, decision.need, authority.ledger, authority.loop.time())

    def offloaded(self) -> list[dict[str, Any]]:
        """As `/memory/offloaded` shows them: bytes, Unix seconds, seconds."""
        now = time.time()
        return [
            {
                "model_key": name,
                "original_device": kept.original_device,
                "offload_time": kept.since,
                "seconds_offloaded": round(max(0.0, now - kept.since), 3),
                "bytes": kept.count_bytes,
                "mechanism": str(kept.mechanism),
                "sequences": kept.sequences,
                "tokens": kept.tokens,
            }
            for name, kept in self._kept.items()
        ]

    def is_stale(self, model: Model) -> bool:
        """Whether a warm model is not what a load would give any more."""
        assert model.running is not None
        return model.running.stamp != stamp(model.effective.path)

    def adapted(self, model: Model, request: Request) -> Request:
        """What a warm model has to ask the planner for: one that kept its process needs only the rest."""
        if self.mechanism(model) is not Mechanism.STANDBY or model.running is None:
            return request
        held = self._authority.ledger.holdings[model.running.holding].bytes
        option = next(option for option in request.options if option.device == HOST)
        rest = {name: max(0, count - held.get(name, 0)) for name, count in option.need.items()}
        return replace(request, options=(Option(HOST, rest),), spread=None)

    def gives_up(self, model: Model, refusal: Refusal) -> bool:
        """Drops a warm model that stands in its own way: without what it keeps there may be host memory for it."""
        if model.state is not _S.WARM or all(lack.device != HOST for lack in refusal.lacks) or refusal.waits_for:
            return False
        self._authority.loads.leave(model, Reason.MEMORY_WANTED, explanation=(refusal.reason,))
        return True

    async def settled(self, model: Model) -> None:
        """Returns once a model that was told to leave is warm, or gone."""
        while model.state in (_S.DRAINING, _S.OFFLOADING):
            watching = self._authority.loop.create_future()
            self._watching.append(watching)
            await watching

    def moved(self, model: Model) -> None:
        """Some model changed its state."""
        if model.state not in (_S.WARM, _S.UNLOADING, _S.RESTORING):
            self._kept.pop(model.id, None)
        watching, self._watching = self._watching, []
        for future in watching:
            if not future.done():
                future.set_result(None)

    def refuse(self, model: Model) -> None:
        """Raises InvalidRequestError where a model cannot be offloaded by hand."""
        if model.state not in (_S.READY, _S.BUSY):
            raise InvalidRequestError(f"the model {model.id!r} is {model.state}; only a loaded one can be offloaded")
        if why := self.obstacle(model):
            raise InvalidRequestError(f"the model {model.id!r} cannot be offloaded: {why}")

    def review(self) -> None:
        """The configuration changed: drops who may not be warm any more."""
        for name in list(self._kept):
            model = self._authority.models[name]
            if model.state is _S.WARM and self.obstacle(model):
                self._authority.loads.leave(model, Reason.CHANGED)

    # --- leaving the device ----------------------------------------------------------------------------------------
    def begin(self, model: Model) -> bool:
        """Nobody uses a draining model any more: begins to keep it. False where it has to be unloaded."""
        running = model.running
        assert running is not None
        if why := self.obstacle(model):
            log.info("%s is not kept: %s", model.id, why)
            return False
        if self.mechanism(model) is Mechanism.STANDBY:
            self._stand_by(model, running)
            return True
        warm = self._warm(model)
        missing, altogether = self._authority.ledger.missing({HOST: warm.bytes})
        lacking = max(missing[HOST], altogether)
        return self._make_room(model, running, warm, lacking) if lacking else self._hold(model, running, warm.bytes)

    def _warm(self, model: Model) -> Warm:
        """What keeping it would take and save; sequences come on top as far as there is room."""
        running = model.running
        assert running is not None
        if self.mechanism(model) is Mechanism.RESIDENT:
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
        others = [self._authority.models[name] for name in self._kept]
        kept = [self._kept_warm(other) for other in others if other.state is _S.WARM and not other.queue.waiters]
        names = displaced(warm, kept, lacking, now)
        if not names:
            log.info("%s is not kept: %s are missing for it", model.id, format_bytes(lacking))
            return False
        running.has_waited = True
        ends = []
        for name in names:
            other = self._authority.models[name]
            assert other.running is not None
            ends.append(other.running.worker.exited)
            self._authority.loads.leave(other, Reason.MEMORY_WANTED, explanation=(f"room to keep {model.id} warm",))
        self._authority.background.spawn(self._go_on(model, running, ends))
        return True

    async def _go_on(self, model: Model, running: Running, ends: list[asyncio.Future[WorkerExit]]) -> None:
        await asyncio.wait(ends, timeout=DROP_SECONDS)
        await asyncio.sleep(0)  # their memory is booked back now
        if model.running is running and model.state is _S.DRAINING and not running.leases:
            self._authority.loads.unload(model)

    def _kept_warm(self, model: Model) -> Warm:
        saves = model.reload_seconds - (model.restore_seconds or 0.0)
        return Warm(model.id, self._kept[model.id].count_bytes, saves, model.last_used_at)

    def _most_bytes(self, running: Running, base: int) -> int:
        """What sequences may take: their cells, within what is left and is not wanted by others."""
        cells = sum(item.bytes for item in running.ready.buffers if item.kind == "kv") if running.ready else 0
        room = self._authority.ledger.balance(HOST).room_bytes - base - running.leaves_free
        return max(0, min(cells + SPARE_BYTES, room)) if cells else 0

    def _stand_by(self, model: Model, running: Running) -> None:
        authority, worker = self._authority, running.worker
        most = self._most_bytes(running, 0)
        if most:
            running.extra = f"{model.id}#{next(authority.ids)}"
            authority.ledger = authority.ledger.reserve(running.extra, model.id, {HOST: most})
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
        self._is_warm(model, running, Mechanism.STANDBY, HOST, said.sequences, said.tokens)

    def _hold(self, model: Model, leaving: Running, base: int) -> bool:
        """A fresh process takes the file; the leaving one saves its sequences where that finds them, and ends."""
        authority = self._authority
        most = self._most_bytes(leaving, base)
        holding = f"{model.id}#{next(authority.ids)}"
        need = {HOST: base + most}
        ledger = authority.ledger.reserve(holding, model.id, need)
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
        keeper = Running(holding, placement, host, authority.loop.time(), worker, stamp=stamp(model.effective.path))
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
        said = done.result() if done.exception() is None else None
        saved = said.count_bytes if said else 0
        ledger = self._authority.ledger
        most = ledger.holdings[keeper.holding].bytes[HOST]
        actual = min(most, worker.held.result().count_bytes + CPU_OVERHEAD_BYTES + saved)
        self._authority.ledger = ledger.commit(keeper.holding, {HOST: actual})
        sequences, tokens = (said.sequences, said.tokens) if said else (0, 0)
        self._is_warm(model, keeper, Mechanism.RESIDENT, leaving.device.id, sequences, tokens)

    def _is_warm(
        self, model: Model, running: Running, mechanism: Mechanism, device: str, sequences: int, tokens: int
    ) -> None:
        size = sum(self._authority.ledger.holdings[running.holding].bytes.values())
        self._kept[model.id] = Kept(mechanism, device, time.time(), size, sequences, tokens)
        log.info(
            "%s is warm (%s, pid %d): %s in host memory, %d tokens of %d sequences",
            model.id, mechanism, running.worker.pid, format_bytes(size), tokens, sequences,
        )  # fmt: skip
        self._authority.move(model, _E.OFFLOADED)
        self._authority.pump()

    def _limit(self, model: Model, running: Running, seconds: float) -> None:
        self._authority.loop.call_later(seconds, self._too_late, running, model)

    def _too_late(self, running: Running, model: Model | None) -> None:
        """A step of leaving took too long; of a leaving process (no model) anything but its end is."""
        if model is None or (model.running is running and model.state is _S.OFFLOADING):
            running.worker.kill("it did not give its model up in time")

    # --- coming back -----------------------------------------------------------------------------------------------
    def restore(self, model: Model, placement: Placement) -> None:
        """Takes a warm model up again where it was planned; from here on it is like a load."""
        authority, running = self._authority, model.running
        assert running is not None
        readings = {reading.id: reading for reading in authority.inventory.readings()}
        devices = [readings[name] for name in placement.devices]
        booked = f"{model.id}#{next(authority.ids)}"
        ledger = authority.ledger.reserve(booked, model.id, placement.need)
        if self.mechanism(model) is Mechanism.STANDBY:
            running.extra = booked
            held = ledger.holdings[running.holding].bytes
            whole = {name: count + held.get(name, 0) for name, count in placement.need.items()}
            placement = replace(placement, need=whole)
        else:
            running.extra, running.holding = running.holding, booked
        authority.ledger = ledger
        authority.governor.booked()
        authority.governor.renewed(running.holding)
        running.placement, running.device, running.began_at = placement, devices[0], authority.loop.time()
        authority.move(model, _E.RESTORE)
        log.info("restoring %s on %s (pid %d)", model.id, ", ".join(placement.devices), running.worker.pid)
        environment = dict(environment_of(devices))
        grant = replace(grant_for(model.effective, devices, placement, ENGINE_QUEUE), environment=environment)
        running.worker.grant(grant)
        running.worker.ready.add_done_callback(lambda ready: authority.loads.on_ready(model, running, ready))

    def committed(self, running: Running, actual: Mapping[str, int]) -> None:
        """Books what a worker that is ready really took, and ends what it was kept in. Raises LedgerError."""
        ledger = self._authority.ledger
        if running.extra is None:
            ledger = ledger.commit(running.holding, actual)
        elif self._kept[running.worker.name].mechanism is Mechanism.STANDBY:
            held = ledger.holdings[running.holding].bytes
            rest = {name: max(0, count - held.get(name, 0)) for name, count in actual.items()}
            ledger = ledger.commit(running.extra, rest).absorb(running.holding, running.extra)
        else:
            ledger = ledger.commit(running.holding, actual).release(running.extra)
        self._authority.ledger = ledger
        running.extra = None

    def forget(self, running: Running) -> None:
        """The process is gone: what it held beside its own holding is free."""
        if running.extra is not None:
            self._authority.ledger = self._authority.ledger.release(running.extra)
            running.extra = None

    def restored(self, model: Model, seconds: float, tokens: int) -> None:
        """A warm model is ready."""
        model.restore_seconds = seconds
        self.restorations += 1
        self._authority.metrics.restorations.inc()
        log.info("%s came back within %.2f s with %d tokens of its sequences", model.id, seconds, tokens)


def stamp(path: Path) -> tuple[int, int, int]:
    """What changes when a file does; (0, 0, 0) for none."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0, 0
    return status.st_size, status.st_mtime_ns, status.st_ino
