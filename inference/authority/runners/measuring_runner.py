"""Performs the effects that read and try devices, measure models, and learn from loads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from inference.authority import effects, events
from inference.authority.state import EstimateKey
from inference.devices.inventory import Inventory
from inference.errors import InferenceError, ModelFailed, Shortage
from inference.estimate.estimator import Estimator
from inference.estimate.headroom import extra_bytes
from inference.estimate.headrooms import Headrooms
from inference.workers.arenas import Arenas
from inference.workers.helper_client import HelperError

log = logging.getLogger("inference.authority")


class MeasuringRunner:
    """Results go to `dispatch` as events. Effects that a coroutine performs run in the background."""

    def __init__(
        self,
        inventory: Inventory,
        estimator: Estimator,
        headrooms: Headrooms,
        arenas: Arenas,
        build_computes: Callable[[], Awaitable[bool]],
        dispatch: Callable[[events.Event], None],
    ) -> None:
        self._inventory = inventory
        self._estimator = estimator
        self._headrooms = headrooms
        self._arenas = arenas
        self._build_computes = build_computes
        self._dispatch = dispatch
        self._is_checking_files = False
        self.performers: Mapping[type, Callable[[Any], Coroutine[Any, Any, None] | None]] = {
            effects.Observe: self._observe,
            effects.ReadDevices: self._read_devices,
            effects.TryDevice: self._try_device,
            effects.RenewProbes: self._renew_probes,
            effects.CheckSuspension: self._check_suspension,
            effects.Estimate: self._estimate,
            effects.CheckFiles: self._check_files,
            effects.CheckBuild: self._check_build,
            effects.LearnShortage: self._learn_shortage,
            effects.LearnGoodEnd: self._learn_good_end,
            effects.CheckHeadrooms: self._check_headrooms,
            effects.LearnOverhead: self._learn_overhead,
        }

    # --- devices -----------------------------------------------------------------------------------------------------
    def _observe(self, effect: effects.Observe) -> None:
        files = {spec.id: spec.files for spec in effect.specs}
        self._dispatch(events.Observed(self._inventory.measured(), files, self._arenas.used_bytes()))

    async def _read_devices(self, effect: effects.ReadDevices) -> None:
        del effect
        problem: str | None = None
        try:
            await self._inventory.refresh()
        except Exception as error:  # noqa: BLE001, RUF100 - after any exception, decisions use the last figures
            problem = repr(error)
        self._dispatch(events.DevicesRead(self._inventory.measured(), problem, self._arenas.used_bytes()))

    async def _try_device(self, effect: effects.TryDevice) -> None:
        failure: str | None = None
        try:
            await self._inventory.trial(effect.device)
        except HelperError as error:
            failure = str(error)
        except Exception as error:
            log.exception("internal error in the trial of %s", effect.device)
            failure = f"internal error in the trial ({type(error).__name__})"
        self._dispatch(events.TrialEnded(effect.device, effect.trial, failure))

    async def _renew_probes(self, effect: effects.RenewProbes) -> None:
        try:
            await self._inventory.renew()
        except Exception:
            log.exception("the helpers that read the devices could not be restarted")
        self._dispatch(events.ProbesRenewed(effect.command))

    async def _check_suspension(self, effect: effects.CheckSuspension) -> None:
        problem: str | None = None
        try:
            failure = await self._inventory.suspenders[effect.kind].test(effect.device)
            problem = None if failure is None else failure.why
        except Exception as error:
            log.exception("internal error in the suspension test on %s", effect.device.id)
            problem = f"internal error in its test ({type(error).__name__})"
        self._dispatch(events.SuspensionTested(effect.kind, problem))

    # --- models ------------------------------------------------------------------------------------------------------
    async def _estimate(self, effect: effects.Estimate) -> None:
        key = effect.key
        try:
            found = await self._estimator.get(key.spec, *effect.devices, counts=key.counts)
            found = self._headrooms.added(key.spec, effect.devices, found, effect.capacities)
        except InferenceError as error:
            self._dispatch(events.Estimated(key, error))
        except Exception as error:
            log.exception("internal error in the estimate of %s on %s", key.spec.id, ", ".join(key.devices))
            self._dispatch(events.Estimated(key, _unmeasurable(key, error)))
        else:
            self._dispatch(events.Estimated(key, found))

    async def _check_files(self, effect: effects.CheckFiles) -> None:
        if self._is_checking_files:
            return
        self._is_checking_files = True
        try:
            found = await asyncio.to_thread(lambda: {spec.id: spec.files for spec in effect.specs})
        finally:
            self._is_checking_files = False
        self._dispatch(events.FilesChecked(found))

    async def _check_build(self, effect: effects.CheckBuild) -> None:
        self._dispatch(events.BuildChecked(effect.model, await self._build_computes(), effect.error))

    def _learn_shortage(self, effect: effects.LearnShortage) -> None:
        found = []
        for item in effect.short:
            before = self._headrooms.of(effect.spec, item.device)
            need = item.planned_bytes - min(
                item.planned_bytes, extra_bytes(before, item.planned_bytes, item.capacity_bytes)
            )
            more = self._headrooms.short(effect.spec, item.device, need, computing=effect.computing)
            bound = "the device, which refused the memory"
            found.append(Shortage(item.device.id, need + more, item.device.free_bytes, bound))
        self._dispatch(events.ShortageLearned(effect.worker, effect.exit, tuple(found)))

    def _learn_good_end(self, effect: effects.LearnGoodEnd) -> None:
        if self._headrooms.ended_well(effect.spec, effect.devices):
            self._dispatch(events.HeadroomChanged((effect.spec,)))

    def _check_headrooms(self, effect: effects.CheckHeadrooms) -> None:
        specs = [
            spec for spec, device, planned in effect.planned if planned > self._headrooms.of(spec, device).total_bytes
        ]
        if specs:
            self._dispatch(events.HeadroomChanged(tuple(dict.fromkeys(specs))))

    def _learn_overhead(self, effect: effects.LearnOverhead) -> None:
        self._estimator.learn(effect.device, effect.observed_bytes, effect.shape)


def _unmeasurable(key: EstimateKey, error: Exception) -> ModelFailed:
    return ModelFailed(
        f"the model {key.spec.id!r} cannot be measured ({type(error).__name__}); see the log of the inference service"
    )
