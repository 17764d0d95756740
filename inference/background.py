"""Work that takes time and comes back as an event: estimates, fresh readings; decides nothing when it comes back."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from inference.authority.placement.plan import Placement, Refusal
from inference.devices.device import Reading
from inference.devices.host import CPU
from inference.errors import InferenceError, ModelFailed
from inference.estimate.estimator import Estimate, Estimator
from inference.estimate.file_stamp import changed
from inference.estimate.overheads import FIRST_OVERHEAD_BYTES
from inference.model import Model, Running
from inference.protocol import DeviceState
from inference.settings import ModelSpec
from inference.wishes import candidates, placement_key
from inference.workers.worker_link import Ready

if TYPE_CHECKING:
    from inference.authority.shell import Authority

log = logging.getLogger(__name__)


class Background:
    """The authority's tasks; every failure is logged, none is lost."""

    def __init__(self, authority: Authority, estimator: Estimator) -> None:
        self._authority = authority
        self._tasks: set[asyncio.Task[None]] = set()
        self._finishing: set[asyncio.Task[None]] = set()
        self._refreshing = False
        self._looking: asyncio.Task[None] | None = None
        self.refreshed_at = -math.inf
        self.estimator = estimator

    def cancel(self) -> None:
        """Gives up everything that runs."""
        for task in self._tasks - self._finishing:
            task.cancel()

    async def join(self) -> None:
        """Returns when nothing runs any more."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def look(self, model: Model) -> None:
        """Looks whether the files of the model are still those that its estimates belong to; a plan needs this."""
        if found := model.see_files():
            log.warning("the file of %s changed: %s; it is measured again", model.id, found)

    def look_at_files(self) -> None:
        """Looks at the files of all models, off the loop: a file system may hang."""
        if self._looking is None or self._looking.done():
            self._looking = self.spawn(self._look_at_files())

    async def _look_at_files(self) -> None:
        models = list(self._authority.models.values())
        specs = [model.effective for model in models]
        seen = await asyncio.to_thread(lambda: [spec.files for spec in specs])
        for model, files in zip(models, seen, strict=True):
            running = model.running
            if running is None and files != model.files:
                self.look(model)
                self.estimate(model)
            elif running is not None and files not in (running.files, running.reported_files):
                running.reported_files = files
                log.warning(
                    "the file of %s changed: %s; the loaded model is served until it is unloaded",
                    model.id, changed(running.files, files),
                )  # fmt: skip

    def estimate(self, model: Model) -> None:
        """Measures the model and pumps again; one task per model, however many ask."""
        if model.estimating is None or model.estimating.done():
            model.estimating = self.spawn(self._estimate_then_pump(model))

    def divide(self, model: Model, placement: Placement) -> None:
        """Measures the model as `placement` divides it over devices, and pumps again."""
        if model.estimating is None or model.estimating.done():
            model.divisions += 1
            model.estimating = self.spawn(self._estimate_then_pump(model, placement))

    def learn(self, running: Running, ready: Ready) -> None:
        """Looks what the worker took of its accelerators beyond its buffers, for the next estimate."""
        if teaches := [
            name for name in running.before if name != CPU and running.device.kind not in FIRST_OVERHEAD_BYTES
        ]:
            self.spawn(self._learn(running, ready, teaches))

    async def _learn(self, running: Running, ready: Ready, devices: Sequence[str]) -> None:
        inventory = self._authority.inventory
        await inventory.refresh()
        self.refreshed_at = self._authority.loop.time()
        for name in devices:
            reading = inventory.get(name)
            buffers = sum(buffer.bytes for buffer in ready.buffers if buffer.device == name)
            if reading is not None and reading.state is DeviceState.HEALTHY:
                ledger = self._authority.ledger
                seen = running.before[name].observed(reading, ledger, running.holding, buffers)
                if seen is not None:
                    self.estimator.learn(reading, seen)

    def check(self, model: Model, refusal: Refusal) -> None:
        """Checks what the refusal suggests, and pumps again."""
        if model.estimating is None or model.estimating.done():
            model.estimating = self.spawn(self._check_then_pump(model, refusal))

    async def _check_then_pump(self, model: Model, refusal: Refusal) -> None:
        try:
            await self._authority.fixes.check(model, refusal)
        finally:
            model.estimating = None
        self._authority.pump()

    async def _estimate_then_pump(self, model: Model, placement: Placement | None = None) -> None:
        try:
            await self.measure(model)
            if placement is not None:
                await self.measure_division(model, placement)
        except InferenceError as error:
            model.failure = error.message
            self._authority.waiting.fail(model, error)
            self._authority.teller.changed()
            return
        finally:
            model.estimating = None
        self._authority.teller.changed()
        self._authority.pump()

    async def measure(self, model: Model) -> None:
        """Fills in the estimates that the model lacks; raises ModelFailed when its file cannot be used."""
        self.look(model)
        while (device := self._unmeasured(model)) is not None:
            await self.measure_on(model, device)

    def _unmeasured(self, model: Model) -> Reading | None:
        """Devices come and go and settings change while others are measured, so this is asked again and again."""
        authority = self._authority
        devices = candidates(model.effective, authority.inventory.readings(), authority.settings)
        return next((item for item in authority.moving.options(model, devices) if item.id not in model.estimates), None)

    async def measure_on(self, model: Model, device: Reading) -> None:
        """Fills in the estimate for one device, by the settings there are at the end; raises ModelFailed."""
        while device.id not in model.estimates:
            spec = model.effective
            found = await self._estimate(spec, device)
            if model.effective is spec:
                if not model.estimates and 0 < found.context_trained < spec.context_length:
                    log.warning(
                        "%s: context_length %d is more than the %d tokens that the model was trained with; "
                        "answers may become poor beyond that", model.id, spec.context_length, found.context_trained,
                    )  # fmt: skip
                model.estimates[device.id] = found
                model.capabilities = model.capabilities or found.capabilities

    async def measure_division(self, model: Model, placement: Placement) -> None:
        """Fills in the estimate of the model divided as `placement` says; raises ModelFailed."""
        spec = model.effective
        readings = {reading.id: reading for reading in self._authority.inventory.readings()}
        devices = [readings[name] for name in placement.devices if name in readings]
        if len(devices) == len(placement.devices):
            counts = tuple(map(int, placement.tensor_split))
            found = await self._estimate(spec, *devices, counts=counts)
            if model.effective is spec:
                model.remember_division(placement_key(placement.devices, counts), found)

    async def _estimate(self, spec: ModelSpec, *devices: Reading, counts: Sequence[int] = ()) -> Estimate:
        """The estimator's answer; what nobody foresaw is a failed model as well, so that those who wait are told."""
        try:
            found = await self.estimator.get(spec, *devices, counts=counts)
        except InferenceError:
            raise
        except Exception as error:
            where = ", ".join(device.id for device in devices)
            log.exception("the estimate of %s on %s failed in the service", spec.id, where)
            raise ModelFailed(
                f"the model {spec.id!r} cannot be measured ({type(error).__name__}); the service's log says more"
            ) from error
        return self._authority.shortages.added(spec, devices, found)

    async def foresee(self) -> None:
        """Measures every model while nobody waits, so that what cannot fit is known before it is asked for."""
        for model in list(self._authority.models.values()):
            try:
                await self.measure(model)
            except InferenceError as error:
                model.failure = error.message
                log.warning("%s", error.message)
            self._authority.teller.changed()

    def refresh(self) -> None:
        """Reads the devices anew and pumps again."""
        if not self._refreshing:
            self._refreshing = True
            self.spawn(self._refresh_then_pump())

    async def _refresh_then_pump(self) -> None:
        try:
            await self._authority.inventory.refresh()
        except Exception as error:  # noqa: BLE001, RUF100 - any at all: those who wait are decided on the last figures
            log.warning("the devices could not be read for a plan: %r", error)
        finally:
            self._refreshing = False
            self.refreshed_at = self._authority.loop.time()
        self._authority.pump()

    def finish(self, work: Any) -> None:
        """Runs a coroutine that closes something: quick, and never given up."""
        self._finishing.add(self.spawn(work))

    def spawn(self, work: Any) -> asyncio.Task[None]:
        """Runs a coroutine as one of these tasks."""
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._finishing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background work failed", exc_info=error)
