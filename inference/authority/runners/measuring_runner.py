"""Performs the effects that measure models, look at their files and learn from loads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from inference.authority import effects, events
from inference.authority.runners.background_tasks import BackgroundTasks
from inference.authority.state import EstimateKey
from inference.errors import InferenceError, ModelFailed, Shortage
from inference.estimate.estimator import Estimator
from inference.estimate.headroom import extra_bytes
from inference.estimate.headrooms import Headrooms

log = logging.getLogger("inference.authority")


class MeasuringRunner:
    """Results go to `dispatch` as events."""

    def __init__(
        self,
        estimator: Estimator,
        headrooms: Headrooms,
        build_holds: Callable[[], Awaitable[bool]],
        tasks: BackgroundTasks,
        dispatch: Callable[[events.Event], None],
    ) -> None:
        self._estimator = estimator
        self._headrooms = headrooms
        self._build_holds = build_holds
        self._tasks = tasks
        self._dispatch = dispatch
        self._looking: asyncio.Task[None] | None = None
        self.performers: Mapping[type, Callable[[Any], object]] = {
            effects.Estimate: self._estimate,
            effects.ReadFiles: self._read_files,
            effects.LookAtFiles: self._look_at_files,
            effects.CheckBuild: self._check_build,
            effects.LearnShortage: self._learn_shortage,
            effects.LearnGoodEnd: self._learn_good_end,
            effects.EaseHeadrooms: self._ease_headrooms,
            effects.LearnOverhead: self._learn_overhead,
        }

    def _estimate(self, effect: effects.Estimate) -> None:
        self._tasks.start(self._measure(effect))

    async def _measure(self, effect: effects.Estimate) -> None:
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

    def _read_files(self, effect: effects.ReadFiles) -> None:
        self._dispatch(events.FilesRead(effect.model, effect.spec.files))

    def _look_at_files(self, effect: effects.LookAtFiles) -> None:
        if self._looking is None or self._looking.done():
            self._looking = self._tasks.start(self._look(effect))

    async def _look(self, effect: effects.LookAtFiles) -> None:
        found = await asyncio.to_thread(lambda: {spec.id: spec.files for spec in effect.specs})
        self._dispatch(events.FilesSeen(found))

    def _check_build(self, effect: effects.CheckBuild) -> None:
        self._tasks.start(self._check(effect))

    async def _check(self, effect: effects.CheckBuild) -> None:
        self._dispatch(events.BuildChecked(effect.model, await self._build_holds(), effect.error))

    def _learn_shortage(self, effect: effects.LearnShortage) -> None:
        found = []
        for item in effect.short:
            before = self._headrooms.of(effect.spec, item.device)
            need = item.planned_bytes - min(
                item.planned_bytes, extra_bytes(before, item.planned_bytes, item.capacity_bytes)
            )
            more = self._headrooms.short(effect.spec, item.device, need, computing=effect.computing)
            found.append(Shortage(item.device.id, need + more, item.device.free_bytes, "the device refused it"))
        self._dispatch(events.ShortageLearned(effect.worker, effect.exit, tuple(found)))

    def _learn_good_end(self, effect: effects.LearnGoodEnd) -> None:
        if self._headrooms.ended_well(effect.spec, effect.devices):
            self._dispatch(events.HeadroomChanged((effect.spec,)))

    def _ease_headrooms(self, effect: effects.EaseHeadrooms) -> None:
        specs = [spec for spec, device, count in effect.planned if count > self._headrooms.of(spec, device).total_bytes]
        if specs:
            self._dispatch(events.HeadroomChanged(tuple(dict.fromkeys(specs))))

    def _learn_overhead(self, effect: effects.LearnOverhead) -> None:
        self._estimator.learn(effect.device, effect.observed_bytes)


def _unmeasurable(key: EstimateKey, error: Exception) -> ModelFailed:
    return ModelFailed(
        f"the model {key.spec.id!r} cannot be measured ({type(error).__name__}); see the log of the inference service"
    )
