"""Carries out what the health of devices asks for: trials, looks, models that go cold or leave; decides no state.

`inference.authority.device_health.health` decides; this feeds it every new reading, the ends of workers and what an
operator asks, and overlays its answer on the readings, so that all who look see one state of a device.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from inference.authority.device_health.health import Case, Doubted, Effect, Read, Seen, Tick, Tried, step
from inference.authority.device_health.signs import Sign
from inference.authority.lifecycle.transitions import Event
from inference.devices.device import Reading
from inference.devices.host import CPU
from inference.errors import DeviceLost, InferenceError, InvalidRequestError, ShuttingDown
from inference.evictions import Reason
from inference.helpers.helper_client import HelperError
from inference.model import Model, Running
from inference.protocol import DeviceState, ExitCause, ModelState, Priority
from inference.wishes import candidates
from inference.workers.worker_process import WorkerExit

if TYPE_CHECKING:
    from inference.authority.shell import Authority

log = logging.getLogger(__name__)

PATIENT_SECONDS = 2.0
"""A verdict that comes so soon is waited out by those who ask."""
_DOUBTFUL = (ExitCause.DEVICE_LOST, ExitCause.HANG)
_IN_USE = (ModelState.LOADING, ModelState.READY, ModelState.BUSY, ModelState.RESTORING)


class Health:
    """One per authority, on its loop. `restart` is called with a sentence when only a new service can help."""

    def __init__(self, authority: Authority) -> None:
        self._authority = authority
        self._cases: dict[str, Case] = {}
        self._fed: dict[str, tuple[int, Sign, str]] = {}
        self._homeless: dict[str, set[str]] = {}
        """Models that lost their place with a device and were in use, by device, until they are loaded again."""
        self._looking = self._has_news = False
        self._settled: dict[str, asyncio.Future[None]] = {}
        self.restart: Callable[[str], None] = _log_only

    def begin(self) -> None:
        """The devices are known: from now on they are shown in the state that follows from what is seen."""
        self._authority.inventory.overlay = self.shown
        self._authority.inventory.listen(self._noticed)
        self._authority.inventory.refreshed = self.take
        self.take()

    def quiesce(self) -> None:
        """No verdict comes any more: those who wait for one are told."""
        for settled in self._settled.values():
            settled.set_exception(ShuttingDown())
            settled.exception()  # whoever asked may have left
        self._settled.clear()

    # --- seeing ----------------------------------------------------------------------------------------------------
    def tick(self) -> None:
        """Called often: takes new readings, and does what time alone asks for."""
        self.take()
        for device in list(self._cases):
            self._see(device, Tick(not self._tenants(device) and not self._is_booked(device)))

    def take(self) -> None:
        """Takes every reading that was not seen yet; a device that is not listed any more is gone."""
        inventory = self._authority.inventory
        readings = {reading.id: reading for reading in inventory.measured() if reading.id != CPU}
        for device in {**self._cases, **readings}:
            reading = readings.get(device)
            sign, note = (Sign.GONE, "it is not there any more") if reading is None else (reading.sign, reading.note)
            news = (inventory.refreshes, sign, note)
            if self._fed.get(device) != news:
                self._fed[device] = news
                self._see(device, Read(sign, note))

    def exited(self, running: Running, exit: WorkerExit) -> None:
        """A worker has ended: by the loss of its device or in a hang, which is reason to doubt the device."""
        if exit.cause not in _DOUBTFUL or running.failure is not None:
            return
        for device in running.placement.devices:
            if device != CPU and self._case(device).usable:
                self._remember(device, running.worker.name, running)
                self._see(device, Doubted(f"{running.worker.name}: {exit.message}"))

    def shown(self, reading: Reading) -> Reading:
        """The reading as everybody sees it; what a dead device last said of its memory is not true any more."""
        case = self._cases.get(reading.id)
        if case is None or case.state is DeviceState.HEALTHY:
            return reading
        if case.sign is Sign.DEAD:
            reading = replace(reading, free_bytes=0, used_bytes=0)
        seconds = case.seconds_to_verdict(self._authority.loop.time())
        return replace(reading, state=case.state, note=case.note or reading.note, verdict_seconds=seconds)

    # --- asking ----------------------------------------------------------------------------------------------------
    def is_in_doubt(self, device: str) -> bool:
        """Whether it was well a moment ago and is being tried: those who ask for it may wait for the verdict."""
        case = self._case(device)
        is_new = self._authority.loop.time() - case.ill_since < PATIENT_SECONDS
        return is_new and case.state is DeviceState.PROBING and not case.emptied

    async def recover(self, device: str) -> Reading:
        """Reads and tries a device now, whatever it was; returns when its state is decided.

        Raises InvalidRequestError for a device that is not there, and for the CPU, and ShuttingDown.
        """
        inventory = self._authority.inventory
        known = [reading.id for reading in inventory.readings() if reading.id != CPU]
        if device not in known:
            names = ", ".join(known) or "none"
            raise InvalidRequestError(f"there is no accelerator {device!r}; there are: {names}", param="device")
        await inventory.renew()
        if self._authority.closing:
            raise ShuttingDown()
        self._see(device, Doubted("an operator asked for a trial"))
        if self._case(device).state is DeviceState.PROBING:
            await asyncio.shield(self._settled.setdefault(device, self._authority.loop.create_future()))
        found = inventory.get(device)
        if found is None:
            raise InvalidRequestError(f"the device {device!r} is gone", param="device")
        return found

    def loss(self, model: Model, devices: Sequence[str], said: str) -> DeviceLost:
        """What those are told whose model was on these devices; names them, and says when coming back may help."""
        authority = self._authority
        places = candidates(model.effective, authority.inventory.readings(), authority.settings)
        waits = [1.0, model.backoff.delay_seconds]
        if not places:
            now = authority.loop.time()
            waits += [self._case(device).seconds_to_verdict(now) or 0.0 for device in devices]
        return DeviceLost(
            f"the model {model.id!r} lost {', '.join(devices)}: {said}",
            retry_after=max(waits),
            details={"cause": str(ExitCause.DEVICE_LOST), "devices": list(devices)},
        )

    # --- what is done ----------------------------------------------------------------------------------------------
    def _case(self, device: str) -> Case:
        return self._cases.get(device, Case())

    def _see(self, device: str, seen: Seen) -> None:
        authority = self._authority
        before = self._case(device)
        case, effects = step(before, seen, authority.loop.time(), authority.settings.drain_seconds)
        self._cases[device] = case
        if case.state is not before.state:
            self._tell(device, before, case)
        for effect in effects:
            self._carry_out(device, case, effect)
        if case.usable:
            self._homeless.pop(device, None)
        if case.state is not before.state:
            authority.loop.call_soon(authority.pump)

    def _tell(self, device: str, before: Case, case: Case) -> None:
        level = logging.INFO if case.usable else logging.WARNING if before.usable else logging.INFO
        log.log(
            level, "%s is %s (%s before)%s", device, case.state, before.state, f": {case.note}" if case.note else ""
        )
        if case.state is not DeviceState.PROBING and (settled := self._settled.pop(device, None)) is not None:
            settled.set_result(None)
        self._authority.teller.look_at_devices()
        self._authority.teller.changed()

    def _carry_out(self, device: str, case: Case, effect: Effect) -> None:
        authority = self._authority
        match effect:
            case Effect.LOSE:
                self._lose(device, case.note)
            case Effect.DRAIN:
                self._drain(device, case.note)
            case Effect.PROBE if not authority.closing:
                authority.background.spawn(self._try(device, case.trial))
            case Effect.LOOK:
                self._noticed()
            case Effect.RESTART:
                self.restart(f"no new process reaches {device} ({case.note})")
            case Effect.WELCOME:
                authority.metrics.recoveries.labels("device").inc()
                self._welcome(device)

    def _lose(self, device: str, why: str) -> None:
        """Every model on the device goes cold at once, whether its process has ended yet or not."""
        authority = self._authority
        for model in self._tenants(device):
            running = model.running
            assert running is not None
            self._remember(device, model.id, running)
            said = f"{device} is lost ({why})"
            log.error("%s goes cold: %s", model.id, said)
            running.failure = self.loss(model, running.placement.devices, said)
            running.worker.lose(said)
            authority.loads.cast_off(model)
            authority.move(model, Event.FAIL)
            authority.move(model, Event.RETRY)
            model.failure = running.failure.message
        authority.warm.bereave(device, why)
        authority.ledger = authority.ledger.write_off(device)

    def _drain(self, device: str, why: str) -> None:
        authority = self._authority
        for model in self._tenants(device):
            running = model.running
            assert running is not None
            self._remember(device, model.id, running)
            authority.loads.leave(model, Reason.DEVICE, explanation=(f"{device}: {why}",))
            authority.loop.call_later(authority.settings.drain_seconds, authority.loads.hurry, model, running)

    def _welcome(self, device: str) -> None:
        """Models that were in use when the device went, and found no other place, come back."""
        for name in self._homeless.pop(device, ()):
            self._authority.background.spawn(self._load_again(name))

    async def _try(self, device: str, trial: int) -> None:
        """One trial, after a fresh reading: that may say enough."""
        await self._refresh()
        case = self._case(device)
        if case.state is not DeviceState.PROBING or case.trial != trial:
            return
        failure: str | None = None
        try:
            await self._authority.inventory.trial(device)
        except HelperError as error:
            failure = str(error)
        except Exception as error:
            log.exception("the trial of %s failed in the service", device)
            failure = f"the trial failed in the service ({type(error).__name__})"
        self._see(device, Tried(trial, failure))

    def _noticed(self) -> None:
        """Something may be seen: the devices are read anew, and once more for what happened meanwhile."""
        self._has_news = True
        if not (self._looking or self._authority.closing):
            self._looking = True
            self._authority.background.spawn(self._look())

    async def _look(self) -> None:
        try:
            while self._has_news:
                self._has_news = False
                await self._refresh()
        finally:
            self._looking = False

    async def _refresh(self) -> None:
        try:
            await self._authority.inventory.refresh()
        except Exception as error:  # noqa: BLE001, RUF100 - any at all: the next look is not far
            log.warning("the devices could not be read: %r", error)
        self.take()

    # --- whose models ----------------------------------------------------------------------------------------------
    def _tenants(self, device: str) -> list[Model]:
        models = self._authority.models.values()
        return [model for model in models if model.running and device in model.running.placement.devices]

    def _is_booked(self, device: str) -> bool:
        return any(holding.bytes.get(device) for holding in self._authority.ledger.holdings.values())

    def _remember(self, device: str, name: str, running: Running) -> None:
        """Has a model that somebody would miss loaded again: elsewhere if that can be, or when the device is back."""
        authority = self._authority
        model = authority.models.get(name)
        if model is None or model.removed or model.state not in _IN_USE:
            return
        idle = authority.loop.time() - max(model.last_used_at, running.ready_at)
        recent = idle < authority.settings.eviction_idle_threshold_seconds
        if model.spec.pinned or model.in_flight or recent:
            self._homeless.setdefault(device, set()).add(name)
            authority.background.spawn(self._load_again(name))

    async def _load_again(self, name: str) -> None:
        """Asks for the model as anybody might, behind all others; what it meets is told by the model itself."""
        await asyncio.sleep(0)  # whoever loses or drains it has done so then
        model = self._authority.models.get(name)
        if model is None or model.removed or self._authority.closing:
            return
        try:
            with self._authority.ask(model, priority=Priority.LOW, counts=False) as ticket:
                await ticket.wait()
        except InferenceError as error:
            log.info("%s is not loaded again: %s", name, error.message)
            return
        for names in self._homeless.values():
            names.discard(name)


def _log_only(why: str) -> None:
    log.error("the service should be restarted: %s", why)
