"""The warm pool: which models are kept in host memory, which may be, and how they come back; books every byte.

The decisions are in `inference.authority.warm.retention` and `inference.authority.placement.plan`. The mechanisms
differ in the process that keeps a model (`inference.leaving`, `inference.checkpoint`).
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headgate.shared.units import format_bytes
from inference.authority.device_health.health import USABLE
from inference.authority.lifecycle.transitions import Event
from inference.authority.placement.ledger import Ledger
from inference.authority.placement.plan import Option, Placement, Refusal, Request
from inference.authority.warm.retention import HOST, Leaver, Mechanism, Warm, kept_of
from inference.checkpoint import Checkpoint
from inference.devices.device import Reading
from inference.errors import InvalidRequestError
from inference.estimate.file_stamp import parts_of
from inference.evictions import Action, Reason
from inference.leaving import Leaving
from inference.model import Model, Running
from inference.protocol import ModelState
from inference.wishes import grant_for
from inference.workers.device_pinning import environment_of
from inference.workers.worker_link import Offloaded, Ready
from inference.workers.worker_process import WorkerExit

if TYPE_CHECKING:
    from inference.authority.shell import Authority

log = logging.getLogger(__name__)

_S, _E = ModelState, Event


@dataclass(frozen=True, slots=True)
class Kept:
    """A model that is warm. Times are of the loop's clock but `since`, which is Unix seconds."""

    mechanism: Mechanism
    original_device: str
    since: float
    count_bytes: int
    saved_bytes: int
    """of it, what its sequences take"""
    sequences: int
    tokens: int


class WarmPool:
    """Who is kept, from the moment nobody uses a model any more until it is loaded again or dropped."""

    def __init__(self, authority: Authority) -> None:
        self._authority = authority
        self._kept: dict[str, Kept] = {}
        self._watching: list[asyncio.Future[None]] = []
        self.restorations = 0
        self.leaving = Leaving(authority, self)
        self.checkpoint = Checkpoint(authority, self)

    # --- asking ----------------------------------------------------------------------------------------------------
    def obstacle(self, model: Model) -> str | None:
        """Why a loaded model could not be kept however much memory there is, or None."""
        if not self._authority.settings.enable_cpu_offload:
            return "INFERENCE_ENABLE_CPU_OFFLOAD is false"
        if not model.spec.warm:
            return "the model says warm: false"
        if model.removed or (model.running is not None and model.running.files != model.effective.files):
            return "its file or its configuration is not what was loaded"
        if self.mechanism(model) is Mechanism.RESIDENT:
            if sys.platform != "linux":
                return "models of accelerators are kept on Linux only"
            if len(parts_of(model.effective.path)) > 1:
                return "its file is one of several"
        return None

    def mechanism(self, model: Model) -> Mechanism:
        """How a model that is loaded, or warm, is kept."""
        if kept := self._kept.get(model.id):
            return kept.mechanism
        if model.running is not None and self.checkpoint.may_keep(model.running):
            return Mechanism.CHECKPOINT
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
            leavers.append(Leaver(name, model.running.holding, self.leaving.kept_as(model) if may else None))
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

    def saved_bytes(self, model: Model) -> int | None:
        """What the sequences of a warm model take in host memory; None for one that is not warm."""
        kept = self._kept.get(model.id)
        return None if kept is None else kept.saved_bytes

    def drops_stale(self, model: Model, devices: Iterable[Reading]) -> bool:
        """Drops a warm model that is not what a load would give any more: another file, or a process where none may be.

        `devices` are those it may be loaded onto.
        """
        assert model.running is not None
        home = self._home(model)
        is_stranded = home is not None and all(device.id != home for device in devices)
        if not is_stranded and model.running.files == model.effective.files:
            return False
        reading = None if home is None else self._authority.inventory.get(home)
        if not is_stranded or (reading is not None and reading.state in USABLE):
            self._authority.loads.leave(model, Reason.CHANGED)
        else:
            why = f"{home} is {'gone' if reading is None else reading.state}"
            self._authority.loads.leave(model, Reason.DEVICE, explanation=(why,))
        return True

    def _home(self, model: Model) -> str | None:
        """The only device that a warm model can come back onto, if there is but one."""
        kept = self._kept[model.id]
        return None if kept.mechanism is Mechanism.RESIDENT else kept.original_device

    def adapted(self, model: Model, request: Request) -> Request:
        """What a warm model has to ask the planner for: one that kept its process needs only the rest."""
        if model.running is not None and model.running.suspended is not None:
            option = Option(self._kept[model.id].original_device, model.running.suspended.need)
            return replace(request, options=(option,), spread=None)
        if self.mechanism(model) is not Mechanism.STANDBY or model.running is None:
            return request
        held = self._authority.ledger.holdings[model.running.holding].bytes
        option = next(option for option in request.options if option.device == HOST)
        rest = {name: max(0, count - held.get(name, 0)) for name, count in option.need.items()}
        return replace(request, options=(Option(HOST, rest),), spread=None)

    def counted(self, model: Model) -> Ledger:
        """The books in which the return of a warm model is planned: what stays in its process is loaded again then."""
        ledger = self._authority.ledger
        if self.mechanism(model) is not Mechanism.STANDBY or model.running is None:
            return ledger
        return ledger.put_aside(model.running.holding, aside=False)

    def gives_up(self, model: Model, refusal: Refusal) -> bool:
        """Drops a warm model that stands in its own way: without what it keeps there may be room."""
        if model.state is not _S.WARM or refusal.waits_for:
            return False
        is_bound = self.mechanism(model) is Mechanism.CHECKPOINT
        if not is_bound and all(lack.device != HOST for lack in refusal.lacks):
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
        authority = self._authority
        for name in list(self._kept):
            model = authority.models[name]
            if model.state is _S.WARM and self.obstacle(model):
                authority.loads.leave(model, Reason.CHANGED)

    def bereave(self, device: str, why: str) -> None:
        """A device is lost, and with it whatever was to come back onto it alone: drops those models."""
        for name, kept in list(self._kept.items()):
            model = self._authority.models[name]
            if model.state is _S.WARM and kept.mechanism is Mechanism.CHECKPOINT and kept.original_device == device:
                self._authority.loads.leave(model, Reason.DEVICE, explanation=(f"{device}: {why}",))

    # --- kept and dropped --------------------------------------------------------------------------------------------
    def keep(self, model: Model, running: Running, mechanism: Mechanism, device: str, saved: Offloaded) -> None:
        """A model has left its device and holds no more than it keeps; `saved` of that are its sequences."""
        ledger = self._authority.ledger = self._authority.ledger.put_aside(running.holding)
        size = sum(ledger.holdings[running.holding].bytes.values())
        self._kept[model.id] = Kept(
            mechanism, device, time.time(), size, saved.count_bytes, saved.sequences, saved.tokens
        )
        log.info(
            "%s is warm (%s, pid %d): %s in host memory, %d tokens of %d sequences",
            model.id, mechanism, running.worker.pid, format_bytes(size), saved.tokens, saved.sequences,
        )  # fmt: skip
        self._authority.move(model, _E.OFFLOADED)
        if ledger.excess(HOST):  # a limit was lowered while it left
            self._authority.loads.leave(model, Reason.LOWERED)
        self._authority.pump()

    def droppable(self) -> list[Warm]:
        """Those that are warm and not wanted."""
        models = [self._authority.models[name] for name in self._kept]
        return [
            Warm(
                model.id,
                self._kept[model.id].count_bytes,
                model.reload_seconds - (model.restore_seconds or 0.0),
                model.last_used_at,
            )
            for model in models
            if model.state is _S.WARM and not model.queue.waiters
        ]

    def drop(self, names: Sequence[str], reason: Reason, why: str) -> list[asyncio.Future[WorkerExit]]:
        """Ends warm models; the futures of their processes' ends."""
        ends = []
        for name in names:
            model = self._authority.models[name]
            assert model.running is not None
            ends.append(model.running.worker.exited)
            self._authority.loads.leave(model, reason, explanation=(why,))
        return ends

    # --- coming back -----------------------------------------------------------------------------------------------
    def restore(self, model: Model, placement: Placement) -> None:
        """Takes a warm model up again where it was planned; from here on it is like a load."""
        authority, running = self._authority, model.running
        assert running is not None
        readings = {reading.id: reading for reading in authority.inventory.readings()}
        devices = [readings[name] for name in placement.devices]
        booked = f"{model.id}#{next(authority.ids)}"
        ledger = self.counted(model).reserve(booked, model.id, placement.need)
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
        if running.suspended is not None:
            self.checkpoint.resume(model, running, running.suspended)
            return
        environment = dict(environment_of(devices))
        grant = replace(grant_for(model.effective, devices, placement), environment=environment)
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

    def restored(self, model: Model, seconds: float, ready: Ready) -> None:
        """A warm model is ready."""
        tokens = ready.restored_tokens
        if tokens:
            self._authority.metrics.kv_restore_seconds.observe(ready.restore_seconds)
        model.restore_seconds = seconds
        self.restorations += 1
        self._authority.metrics.restorations.inc()
        log.info("%s came back within %.2f s with %d tokens of its sequences", model.id, seconds, tokens)
