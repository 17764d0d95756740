"""What becomes of a model that memory was refused to: what is learned of it, and what its `oom_policy` tries next.

Never books, places or starts anything: it changes what the next plan is made with, and says whether there is one.
`fail_fast` tries nothing. `reduce` goes down the core's steps once. `cpu` loads it on the CPU for a while.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headgate.shared.units import format_bytes
from inference import cleanup, views
from inference.authority.placement.headroom import asked
from inference.authority.placement.plan import Refusal
from inference.authority.placement.reduction import REST_SECONDS, Step, next_step, smaller_context, smaller_ubatch
from inference.devices.device import Reading
from inference.devices.host import CPU
from inference.errors import Shortage
from inference.estimate.estimator import Estimate
from inference.estimate.headrooms import Headrooms
from inference.model import Model, Running
from inference.protocol import ExitCause, ModelState
from inference.settings import ModelSpec
from inference.workers.worker_process import WorkerExit

if TYPE_CHECKING:
    from inference.authority.shell import Authority

log = logging.getLogger(__name__)

EASE_SECONDS = 60.0
"""How often it is looked whether what was learned counts less by now."""
_OOM = (ExitCause.OOM_LOAD, ExitCause.OOM_COMPUTE)


class Shortages:
    """One per authority, on its loop."""

    def __init__(self, authority: Authority, headrooms: Headrooms) -> None:
        self._authority = authority
        self.headrooms = headrooms
        self._ease_at = 0.0

    # --- what plans are made with ------------------------------------------------------------------------------------
    def added(self, spec: ModelSpec, devices: Sequence[Reading], estimate: Estimate) -> Estimate:
        """`estimate` with the head-room that was learned for these devices."""
        return self.headrooms.added(spec, devices, estimate, self._capacities())

    def _capacities(self) -> Mapping[str, int]:
        """What all models together may have of each device, bytes; host memory where a device has none of its own."""
        readings = self._authority.inventory.readings()
        found = {reading.id: budget for reading, (_, budget) in views.allowances(readings, self._authority.settings)}
        return {reading.id: found.get(reading.id, found.get(CPU, 0)) for reading in readings}

    def options(self, model: Model, devices: tuple[Reading, ...]) -> tuple[Reading, ...]:
        """`devices`, or the CPU alone while the model keeps away from accelerators."""
        host = tuple(device for device in devices if device.id == CPU)
        return host if host and self._authority.loop.time() < model.sheltered_until else devices

    def is_fallback(self, model: Model) -> bool:
        """Whether the model is on the CPU only because accelerators had no room for it (`oom_policy: cpu`)."""
        running, spec, settings = model.running, model.spec, self._authority.settings
        if running is None or running.by_hand or running.placement.devices != (CPU,) or spec.oom_policy != "cpu":
            return False
        return spec.gpu_layers != 0 and not settings.force_cpu_mode and bool(self._authority.inventory.accelerators())

    # --- refused by the plan -----------------------------------------------------------------------------------------
    def may_bend(self, model: Model, refusal: Refusal) -> bool:
        """Whether the policy has something left to try when the plan refuses the model."""
        if not refusal.lacks or model.spec.oom_policy != "reduce":
            return False
        now = self._authority.loop.time()
        descent = model.descent if model.reduced is not None else model.descent.rested(now)
        return next_step(descent, now)[1] is not None

    def refused(self, model: Model, refusal: Refusal) -> bool:
        """The plan refuses the model for good as things are. True: something is tried, and another plan follows."""
        if not refusal.lacks or model.spec.oom_policy != "reduce":
            model.unreduce()
            return False
        if model.estimating is not None and not model.estimating.done():
            return True
        on_host = any(lack.device == CPU for lack in refusal.lacks)
        if not self._step_down(model, refusal.fix, on_host=on_host):
            return False
        self._authority.background.estimate(model)
        return True

    # --- refused to a worker -----------------------------------------------------------------------------------------
    def exited(self, model: Model, running: Running, exit: WorkerExit) -> bool:
        """A worker of the model ended, and is in no list any more. True: the load is tried again at once, otherwise."""
        if exit.cause not in _OOM and not exit.starved:
            self._learn_from_good_end(model, running, exit)
            model.shortages = ()
            if not model.descent.rest(self._authority.loop.time()):
                model.unreduce()
            return False
        computing = exit.cause is ExitCause.OOM_COMPUTE or (exit.starved and exit.was_ready)
        short = [CPU] if exit.starved else running.placement.devices
        shortages = self._learn(model, running, short, computing=computing)
        model.shortages = () if computing else shortages
        if model.target is not None or model.removed:
            return False
        if model.spec.oom_policy == "cpu" and CPU not in short:
            return self._shelter(model, running)
        if model.spec.oom_policy != "reduce":
            return False
        on_host = CPU in short
        bends = self._step_down(model, {}, on_host=on_host, cleans=not computing)
        return bends and model.state is ModelState.LOADING

    def _learn_from_good_end(self, model: Model, running: Running, exit: WorkerExit) -> None:
        if exit.cause is not ExitCause.REQUESTED or not exit.was_ready:
            return
        if self.headrooms.ended_well(model.effective, self._devices([*running.placement.devices, CPU])):
            model.estimates.clear()

    def _learn(self, model: Model, running: Running, short: Sequence[str], *, computing: bool) -> tuple[Shortage, ...]:
        """The next load is planned with more on every device that may have been `short`; what is known of that."""
        spec = model.effective
        capacities = self._capacities()
        shortages = []
        for device in self._devices(short):
            planned = running.placement.need.get(device.id, 0)
            before = self.headrooms.of(spec, device)
            need = planned - min(planned, asked(before, planned, capacities.get(device.id, 0)))
            more = self.headrooms.short(spec, device, need, computing=computing)
            shortages.append(Shortage(device.id, need + more, device.free_bytes, "the device refused it"))
        model.estimates.clear()
        return tuple(shortages)

    def _devices(self, names: Sequence[str]) -> list[Reading]:
        """These devices as they are now."""
        found = (self._authority.inventory.get(name) for name in names)
        return [reading for reading in found if reading is not None]

    def tick(self, now: float) -> None:
        """Called often: configured sizes count again for models that are not loaded and have rested."""
        for model in self._authority.models.values():
            if model.reduced is not None and model.running is None and not model.descent.rest(now):
                model.unreduce()
        if now >= self._ease_at:
            self._ease_at = now + EASE_SECONDS
            self._ease()

    def _ease(self) -> None:
        """Who was planned with more than still counts is measured again."""
        for model in self._authority.models.values():
            if model.running is None and any(self._is_too_much(model, item) for item in model.estimates.values()):
                model.estimates.clear()
                self._authority.background.estimate(model)

    def _is_too_much(self, model: Model, estimate: Estimate) -> bool:
        for name, count in estimate.headroom_bytes.items():
            reading = self._authority.inventory.get(name)
            if reading is not None and count > self.headrooms.of(model.effective, reading).total_bytes:
                return True
        return False

    # --- what the policies do ----------------------------------------------------------------------------------------
    def _shelter(self, model: Model, running: Running) -> bool:
        model.sheltered_until = self._authority.loop.time() + REST_SECONDS
        log.warning("%s goes to the CPU: %s had no memory for it", model.id, ", ".join(running.placement.devices))
        if model.state is not ModelState.LOADING:
            return False
        self._authority.metrics.alloc_retries.inc()
        return True

    def _step_down(self, model: Model, fix: Mapping[str, Any], *, on_host: bool, cleans: bool = True) -> bool:
        """Takes the next step that changes anything; False when none is left, and the configured sizes count again."""
        now = self._authority.loop.time()
        if model.reduced is None:
            model.descent = model.descent.rested(now)
        while True:
            model.descent, step = next_step(model.descent, now, () if cleans else (Step.CLEAN,))
            if step is None:
                model.unreduce()
                return False
            if step is Step.CLEAN:
                log.warning("%s lacks memory: everybody drops what is only retained", model.id)
                model.estimating = self._authority.background.spawn(self._clean_then_pump(model, on_host=on_host))
                return True
            if smaller := _smaller(model.effective, step, fix):
                model.reduced = replace(model.effective, **smaller)
                model.estimates.clear()
                self._authority.metrics.alloc_retries.inc()
                log.warning("%s is reduced to fit: %s", model.id, ", ".join(model.spec.changed(model.reduced)))
                return True

    async def _clean_then_pump(self, model: Model, *, on_host: bool) -> None:
        try:
            freed = await cleanup.relieve(self._authority, on_host=on_host)
            log.info("cleaning up for %s gave %s back", model.id, format_bytes(freed))
        finally:
            model.estimating = None
        self._authority.pump()


def _smaller(spec: ModelSpec, step: Step, fix: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that `step` changes; empty when they are as small as they get.

    Instead of half the context the planner's nearest fix counts, but for fewer layers on accelerators: only
    `oom_policy: cpu` lets anything of a model land on the CPU unasked.
    """
    if step is Step.UBATCH:
        ubatch = smaller_ubatch(spec.ubatch)
        return {} if ubatch is None else {"ubatch": ubatch}
    if kept := {name: value for name, value in fix.items() if name != "gpu_layers"}:
        return kept
    context = smaller_context(spec.context_length)
    return {} if context is None else {"context_length": context}
