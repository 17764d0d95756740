"""The life of a worker from reservation to exit: every reservation made here ends here, exactly once.

Decides neither who is loaded nor who leaves; it does what the authority decided and books what happens.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import aiohttp

from headgate.shared.errors import HeadgateError
from headgate.shared.units import format_bytes
from inference.authority.lifecycle.transitions import Event
from inference.authority.placement.ledger import LedgerError, Phase
from inference.authority.placement.plan import Placement
from inference.authority.pressure.growth import growth
from inference.devices.host import CPU
from inference.errors import BrokenBuild, InferenceError, MemoryRefused, ModelFailed
from inference.estimate.file_stamp import changed
from inference.estimate.overheads import Before
from inference.evictions import Action, Departure, Reason
from inference.model import Model, Running
from inference.protocol import ExitCause, ModelState
from inference.wishes import estimate_of, excess, grant_for
from inference.workers.device_pinning import environment_of
from inference.workers.os_api import private_bytes
from inference.workers.worker_link import Ready
from inference.workers.worker_process import WorkerExit
from inference.workers.worker_supervisor import Supervisor

if TYPE_CHECKING:
    from inference.authority.shell import Authority

log = logging.getLogger(__name__)

RETURN_SECONDS = 5.0
"""An accelerator must show a gone worker's memory within this; what is missing then counts as foreign."""
RETURN_FIRST_SECONDS = 0.02
RETURN_EVERY_SECONDS = 0.25
"""Mostly it does at once, and somebody waits for it: the first looks follow each other sooner."""
RETRY_REPLACED_SECONDS = 1.0
"""Until a load is worth another try whose files changed meanwhile."""
RETURN_SLACK_BYTES = 64 * 2**20
WORKER_IDLE_SECONDS = 2.0
"""A connection to a worker that is idle for so long is closed; a new one over a Unix socket costs little."""

_S, _E = ModelState, Event
_WAY_OUT = {
    _S.LOADING: (_E.UNLOAD, _E.EXITED),
    _S.READY: (_E.DRAIN, _E.UNLOAD, _E.EXITED),
    _S.BUSY: (_E.DRAIN, _E.UNLOAD, _E.EXITED),
    _S.DRAINING: (_E.UNLOAD, _E.EXITED),
    _S.OFFLOADING: (_E.UNLOAD, _E.EXITED),
    _S.WARM: (_E.UNLOAD, _E.EXITED),
    _S.RESTORING: (_E.UNLOAD, _E.EXITED),
    _S.UNLOADING: (_E.EXITED,),
}
"""What is left of the way to cold when a worker ended as it was asked to, or left by itself in good order."""


class Loads:
    """Starts and ends the workers of models."""

    def __init__(self, authority: Authority, supervisor: Supervisor) -> None:
        self._authority = authority
        self.supervisor = supervisor
        self.bytes_per_second: float | None = None
        """Of the last load of any model, from reservation to ready."""

    def begin(self, model: Model, placement: Placement) -> None:
        """Reserves, then starts a worker; from here on its exit is what gives the reservation back."""
        readings = {reading.id: reading for reading in self._authority.inventory.readings()}
        devices = [readings[name] for name in placement.devices]
        device = devices[0]
        holding = f"{model.id}#{next(self._authority.ids)}"
        self._authority.ledger = self._authority.ledger.reserve(holding, model.id, placement.need)
        self._authority.governor.booked()
        try:
            environment = environment_of(devices)
            worker = self.supervisor.spawn(model.id, environment, lambda: self._authority.teller.heard(model))
        except HeadgateError as error:
            self._authority.ledger = self._authority.ledger.release(holding)
            self._authority.move(model, _E.LOAD)
            self.failed(model, str(error))
            self._give_up(model, self.resting(model))
            return
        files = model.files or model.effective.files
        running = Running(holding, placement, device, self._authority.loop.time(), worker, files=files)
        running.by_hand = model.target is not None and model.target != model.home
        running.before = {item.id: Before.of(item, self._authority.ledger, holding) for item in devices}
        model.running = running
        self._authority.move(model, _E.LOAD)
        log.info("loading %s on %s (pid %d)", model.id, ", ".join(placement.devices), worker.pid)
        grant = grant_for(model.effective, devices, placement)
        worker.hello.add_done_callback(lambda hello: None if hello.exception() else worker.grant(grant))
        worker.ready.add_done_callback(lambda ready: self.on_ready(model, running, ready))
        worker.exited.add_done_callback(lambda exited: self.on_exit(model, running, exited.result()))

    def on_ready(self, model: Model, running: Running, future: asyncio.Future[Ready]) -> None:
        """A worker has loaded its model, or has taken it up again."""
        if future.exception() is not None or model.state not in (_S.LOADING, _S.RESTORING):
            return
        if model.running is not running:  # it lost its device in this moment
            return
        is_back = model.state is _S.RESTORING
        ready = future.result()
        estimate = estimate_of(model, running.placement)
        actual = dict(estimate.overhead_bytes)
        for buffer in ready.buffers:
            actual[buffer.device] = actual.get(buffer.device, 0) + buffer.bytes
        predicted = sum(running.placement.need.values())
        complaint = excess(estimate, ready)
        try:
            if complaint is None:
                self._authority.warm.committed(running, actual)
        except LedgerError as error:
            complaint = str(error)
        replaced = "" if is_back else _replaced(model, running)
        if complaint is not None or replaced:
            running.failure = ModelFailed(
                f"the load of {model.id!r} was stopped: {replaced or complaint}",
                retry_after=RETRY_REPLACED_SECONDS if replaced else None,
            )
            running.worker.kill()
            return
        running.ready, running.ready_at = ready, self._authority.loop.time()
        running.session = aiohttp.ClientSession(
            "http://worker",
            connector=aiohttp.UnixConnector(
                path=str(running.worker.socket_path), limit=0, keepalive_timeout=WORKER_IDLE_SECONDS
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
            auto_decompress=False,
            raise_for_status=False,
        )
        seconds = self._authority.loop.time() - running.began_at
        if is_back:
            self._authority.warm.restored(model, seconds, ready)
        else:
            model.reload_seconds = seconds
            model.loads += 1
            self._authority.background.learn(running, ready)
            self.bytes_per_second = sum(actual.values()) / max(seconds, 1e-3)
        model.capabilities = ready.capabilities
        model.failure = None
        model.shortages = ()
        model.last_used_at = self._authority.loop.time()
        self._authority.metrics.load_seconds.labels(model.id, "warm" if is_back else "cold").observe(seconds)
        if predicted and not is_back:
            self._authority.metrics.estimate_error.observe(sum(actual.values()) / predicted)
        if model.backoff.failures:
            self._authority.metrics.recoveries.labels("reload").inc()
        log.info(
            "%s is ready on %s after %.2f s: %s of %s reserved",
            model.id, ", ".join(running.placement.devices), seconds, format_bytes(sum(actual.values())),
            format_bytes(predicted),
        )  # fmt: skip
        self._authority.move(model, _E.RESTORED if is_back else _E.LOADED)
        self._authority.waiting.serve(model)
        self._authority.pump()

    def watch(self) -> None:
        """Looks at the memory of every worker that is ready; growth is reserved, or the model has to leave."""
        self._authority.observe()
        for model in list(self._authority.models.values()):
            running = model.running
            if running is None or running.ready is None or model.state not in (_S.READY, _S.BUSY):
                continue
            seen = private_bytes(running.worker.pid)
            found = seen and growth(self._authority.ledger, running.holding, CPU, seen)
            if not found:
                continue
            self._authority.governor.adviser.outgrew(model, running, found.bytes)
            if found.ledger is not None:
                self._authority.ledger = found.ledger
                running.grown_bytes += found.bytes
                self._authority.teller.changed()
                log.warning("%s grew by %s beyond its reservation; reserved", model.id, format_bytes(found.bytes))
                continue
            log.error("%s grew by %s, and has to leave: %s", model.id, format_bytes(found.bytes), found.reason)
            self.leave(model, Reason.OUTGREW, explanation=(found.reason,))
            self._authority.loop.call_later(self._authority.settings.drain_seconds, running.worker.stop)

    def leave(
        self, model: Model, reason: Reason, action: Action = Action.UNLOAD, explanation: tuple[str, ...] = ()
    ) -> None:
        """Begins a model's way out, the only one there is: what runs may finish. Its record follows with its memory.

        One that leaves already and might have stayed, or been kept warm, leaves for the weightier reason.
        """
        running = model.running
        if running is None or model.state is _S.UNLOADING:
            return
        why = "; ".join((str(reason), *explanation))
        if model.state is _S.DRAINING:
            self._overrule(model, running, Departure(reason, action, explanation), why)
            return
        if model.state not in (_S.READY, _S.BUSY):
            log.info("%s is %s and is given up (%s)", model.id, model.state, why)
            running.departure = Departure(reason, Action.UNLOAD, explanation)
            self.unload(model)
            return
        running.departure = Departure(reason, action, explanation)
        log.info("%s leaves (%s)", model.id, why)
        self._authority.move(model, _E.DRAIN)
        if not running.leases:
            self.unload(model)

    def _overrule(self, model: Model, running: Running, departure: Departure, why: str) -> None:
        if running.departure is not None and not departure.overrules(running.departure):
            return
        log.info("%s leaves all the same (%s)", model.id, why)
        running.departure = departure
        if not running.leases:
            self.unload(model)

    def stay(self, model: Model) -> None:
        """Takes back `leave` before the model is gone: the reason is."""
        running = model.running
        assert running is not None
        log.info("%s stays: nobody waits for its room any more", model.id)
        running.departure, running.leaves_free, running.has_waited = None, 0, False
        self._authority.move(model, _E.STAY)
        self._authority.waiting.serve(model)
        if not running.leases:
            self._authority.move(model, _E.IDLE)

    def unload(self, model: Model) -> None:
        """Nothing is in flight any more: the model is kept warm if it was told so and can be, else its worker ends."""
        assert model.running is not None
        departure = model.running.departure
        if model.state is _S.DRAINING and departure is not None and departure.action is Action.OFFLOAD:
            if self._authority.warm.leaving.begin(model):
                return
            model.running.departure = replace(departure, action=Action.UNLOAD)
        self._authority.move(model, _E.UNLOAD)
        self._authority.ledger = self._authority.ledger.leave(model.running.holding)
        model.running.worker.stop()

    def on_exit(self, model: Model, running: Running, exit: WorkerExit) -> None:
        """The one place where a worker's memory goes back, however it ended."""
        self._authority.health.exited(running, exit)
        if running.session is not None:
            self._authority.background.finish(running.session.close())
        shapes = [lease.shape for lease in running.leases]
        if model.running is not running:  # another process keeps its model warm, or its device is lost
            self._has_left(model, running, exit, shapes)
            return
        model.running = None
        if model.state is not _S.UNLOADING:
            self._authority.ledger = self._authority.ledger.leave(running.holding)
        self.give_back(running)
        replaced = _replaced(model, running) if model.state is _S.LOADING else ""
        tries_again = not replaced and self._authority.shortages.exited(model, running, exit)
        self._authority.metrics.exits.labels(model.id, str(exit.cause)).inc()
        if exit.cause is ExitCause.REQUESTED:
            for event in _WAY_OUT[model.state]:
                self._authority.move(model, event)
            log.info("%s is unloaded", model.id)
        else:
            log.error("%s (pid %d): %s", model.id, running.worker.pid, exit.message)
            self._authority.crashes.add(model.id, running.worker.pid, exit, shapes)
            was_loading = model.state is _S.LOADING
            if replaced and running.failure is None:
                running.failure = ModelFailed(
                    f"the load of {model.id!r} failed: {replaced} ({exit.message})", retry_after=RETRY_REPLACED_SECONDS
                )
            message = running.failure.message if running.failure else exit.message
            if was_loading and str(model.spec.path) not in message:
                message += f"; its file is {model.spec.path}"
            counts = not (tries_again or replaced) and self._authority.quarantine.charges(model, running, exit)
            self.failed(model, message, counts=counts)
            error = (
                running.failure or self._load_error(model, running, exit) if was_loading and not tries_again else None
            )
            if exit.cause is ExitCause.BROKEN_BUILD:
                self._authority.background.spawn(self._give_up_checked(model, error))
            elif error is not None:
                self._give_up(model, error)
        if model.removed:
            self._authority.models.pop(model.id, None)
        self._authority.pump()

    def cast_off(self, model: Model) -> None:
        """The model has lost its device: it goes on without its worker, whose exit gives back what that still holds."""
        running = model.running
        assert running is not None
        model.running = None
        ledger = self._authority.ledger
        if ledger.holdings[running.holding].phase is not Phase.RELEASING:
            self._authority.ledger = ledger.leave(running.holding)
        if model.removed:
            self._authority.models.pop(model.id, None)

    def _has_left(self, model: Model, running: Running, exit: WorkerExit, shapes: Sequence[dict[str, Any]]) -> None:
        self.give_back(running)
        self._authority.metrics.exits.labels(model.id, str(exit.cause)).inc()
        if exit.cause is not ExitCause.REQUESTED:
            when = "" if running.failure else " while its model was offloaded"
            log.error("%s (pid %d)%s: %s", model.id, running.worker.pid, when, exit.message)
            self._authority.crashes.add(model.id, running.worker.pid, exit, shapes)
        self._authority.pump()

    def _give_up(self, model: Model, error: InferenceError) -> None:
        """A load failed: those who wait are told, unless the model was being moved and goes back."""
        if not self._authority.moving.turns_back(model, error):
            self._authority.waiting.fail(model, error)

    async def _give_up_checked(self, model: Model, error: InferenceError | None) -> None:
        """Answer those that wait for a worker that died at its first step, when the build was checked again."""
        if not await self._authority.build_holds():
            self._authority.waiting.fail(model, BrokenBuild())
        elif error is not None and model.state is _S.FAILED:  # else it is loaded again already
            self._give_up(model, error)

    def hurry(self, model: Model, running: Running) -> None:
        """The time in which a model may finish what it does is over."""
        if model.running is running and model.state is _S.DRAINING:
            running.worker.stop()

    def _load_error(self, model: Model, running: Running, exit: WorkerExit) -> InferenceError:
        if exit.cause is ExitCause.DEVICE_LOST:
            said = f"it could not be loaded: {exit.message}"
            return self._authority.health.loss(model, running.placement.devices, said)
        return self.resting(model, str(exit.cause))

    def failed(self, model: Model, message: str, *, counts: bool = True) -> None:
        """One more failure of the model; it rests, unless this one does not count."""
        if counts:
            model.backoff = model.backoff.failed()
        model.retry_at = self._authority.loop.time() + (model.backoff.delay_seconds if counts else 0.0)
        model.failure = message
        self._authority.move(model, _E.FAIL)

    def resting(self, model: Model, cause: str | None = None) -> InferenceError:
        """What those are told who ask for a failed model, with the rest of its backoff."""
        rest = math.ceil(max(0.0, model.retry_at - self._authority.loop.time()) * 10) / 10
        if model.shortages:
            said = model.failure or "refused"
            return MemoryRefused(model.id, model.shortages, said, retry_after=rest, cause=str(ExitCause.OOM_LOAD))
        return ModelFailed(
            f"the model {model.id!r} failed: {model.failure}",
            retry_after=rest,
            details={"cause": cause, "failures": model.backoff.failures},
        )

    def give_back(self, running: Running) -> None:
        """Books back what a worker held that has left: at once in host memory, elsewhere when the device shows it."""
        self._authority.warm.forget(running)
        if all(device == CPU for device in running.placement.need):
            self._release(running)
        else:
            self._authority.background.spawn(self._await_return(running))

    async def _await_return(self, running: Running) -> None:
        """Releases a gone worker's memory once the device shows it free, or counts what is missing as foreign.

        Whatever goes wrong with the readings, the holding has ended RETURN_SECONDS and one reading later.
        """
        devices = running.placement.devices
        before = {name: self._authority.ledger.balance(name).foreign_bytes for name in devices}
        deadline = self._authority.loop.time() + RETURN_SECONDS
        back = told = False
        pause = min(RETURN_FIRST_SECONDS, RETURN_EVERY_SECONDS)
        while not back and self._authority.loop.time() < deadline:
            try:
                async with asyncio.timeout_at(deadline):
                    await self._authority.inventory.refresh()
                back = all(self._is_back(running, name, foreign) for name, foreign in before.items())
            except Exception as error:  # noqa: BLE001, RUF100 - any at all: the memory must come off the books
                if not told:
                    log.warning("%s could not be read while %s left: %r", devices[0], running.worker.name, error)
                told = True
            else:
                self._authority.background.refreshed_at = self._authority.loop.time()
            if not back:
                await asyncio.sleep(pause)
                pause = min(2 * pause, RETURN_EVERY_SECONDS)
        if back:
            self._release(running)
        else:
            log.warning(
                "%s did not get back all memory of %s; it counts as foreign", ", ".join(devices), running.worker.name
            )
            self._authority.ledger = self._authority.ledger.forfeit(running.holding)
            self._record(running, 0)
        self._authority.teller.changed()
        self._authority.pump()

    def _release(self, running: Running) -> None:
        freed_bytes = sum(self._authority.ledger.holdings[running.holding].bytes.values())
        self._authority.ledger = self._authority.ledger.release(running.holding)
        self._record(running, freed_bytes)

    def _record(self, running: Running, freed_bytes: int) -> None:
        if running.departure is not None:
            self._authority.evictions.add(running.worker.name, running.departure, freed_bytes)

    def _is_back(self, running: Running, device: str, foreign_bytes: int) -> bool:
        reading = self._authority.inventory.get(device)
        ledger = self._authority.ledger
        ours = ledger.balance(device).ours_bytes - ledger.holdings[running.holding].bytes.get(device, 0)
        return reading is None or reading.used_bytes <= foreign_bytes + ours + RETURN_SLACK_BYTES


def _replaced(model: Model, running: Running) -> str:
    """Which of the model's files changed since the load began, as a sentence; empty for none."""
    found = changed(running.files, model.effective.files)
    return f"{found} changed while the model was loaded; the next load reads the new file" if found else ""
