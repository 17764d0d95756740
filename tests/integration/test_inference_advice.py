"""Every recommendation works as written: the alert ends, and the affected model works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headgate.shared.state_directory import StateDir
from inference import settings
from inference.app import Service
from inference.authority.pressure.advice import SWAPS, Kind
from inference.authority.state import Timing
from inference.devices.device import CPU
from inference.errors import MemoryLimitExceededError
from inference.estimate.estimator import Estimator
from inference.protocol import ModelState
from tests.rigs import tiny_gguf
from tests.rigs.authority_rig import MIB, Start, rewrite

LARGE = {"path": str(tiny_gguf.generative()), "context_length": 65536, "parallel": 8}
"""A cache of 128 MiB."""

QUICK = {"timing": Timing(watch_seconds=0.1)}


class Site:
    """A service whose recommendations can be applied."""

    def __init__(self, root: Path, start: Start, models: dict[str, dict[str, Any]], **environ: str) -> None:
        self.root, self._start, self.models = root, start, models
        self.environ = {"PRESSURE_CHECK_INTERVAL_SECONDS": "3600", **environ}

    async def begin(self, behavior: dict[str, Any] | None = None, **parts: Any) -> Service:
        self.forced = {} if "accelerator" in parts else {"INFERENCE_FORCE_CPU_MODE": "true"}
        self.service: Service = await self._start(self.models, behavior, **parts, **self.environ)
        return self.service

    def alerts(self) -> dict[Kind, dict[str, str]]:
        """What is recommended, by the kind of alert."""
        found = self.service.authority.alerts()
        return {alert.kind: {change.setting: change.value for change in alert.changes} for alert in found}

    def apply(self, recommended: dict[str, str]) -> None:
        """Writes every setting where it belongs, and reloads."""
        assert recommended
        for name, value in recommended.items():
            if name.startswith("INFERENCE_"):
                self.environ[name.removeprefix("INFERENCE_")] = value
            else:
                _, model, setting = name.split(".")
                self.models[model][setting] = value
        rewrite(self.root, self.models)
        environ = self.forced | {f"INFERENCE_{key}": value for key, value in self.environ.items()}
        self.service.authority.reload(settings.load(self.root, environ, {}))

    async def load(self, *names: str) -> None:
        for name in names:
            await self.service.authority.load(self.service.authority.resolve(name))

    def state(self, name: str) -> ModelState:
        return self.service.authority.resolve(name).state


def real_estimator(root: Path) -> Estimator:
    state = StateDir.from_env({"HEADGATE_STATE_DIR": str(root / "estimates")})
    return Estimator(state, seconds=60)


async def test_recommendation_makes_swapping_models_fit_together(tmp_path: Path, start: Start) -> None:
    site = Site(tmp_path, start, {"a": {**LARGE}, "b": {**LARGE}}, MEMORY_LIMIT_GB="0.42")
    await site.begin(estimator=real_estimator(tmp_path))
    for _ in range(SWAPS // 2):
        await site.load("a", "b")
    await site.load("a")
    (alert,) = site.alerts().items()
    assert alert[0] is Kind.THRASH
    assert {name.rpartition(".")[2] for name in alert[1]} <= {"parallel", "context_length", "kv_type"}
    site.apply(alert[1])
    await site.load("a", "b")
    assert site.alerts() == {}
    assert (site.state("a"), site.state("b")) == (ModelState.READY, ModelState.READY)


async def test_recommendation_makes_a_refused_model_fit(tmp_path: Path, start: Start) -> None:
    site = Site(tmp_path, start, {"a": {**LARGE}}, MEMORY_LIMIT_GB="0.15")
    await site.begin(estimator=real_estimator(tmp_path))
    with pytest.raises(MemoryLimitExceededError):
        await site.load("a")
    recommended = site.alerts()[Kind.REFUSED]
    assert set(recommended) == {"models.a.parallel"}
    site.apply(recommended)
    await site.load("a")
    assert site.alerts() == {}


async def test_recommended_overhead_covers_the_growth_of_a_worker(tmp_path: Path, start: Start) -> None:
    site = Site(tmp_path, start, {"a": {**LARGE}})
    service = await site.begin({"a": {"grow": 600 * MIB}}, estimator=real_estimator(tmp_path), parts=QUICK)
    await site.load("a")
    await service.authority.reached(lambda: Kind.OUTGROWN in site.alerts())
    (setting,) = recommended = site.alerts()[Kind.OUTGROWN]
    assert setting == "models.a.memory_overhead"
    site.apply(recommended)
    assert site.alerts() == {}
    await service.authority.reached(lambda: site.state("a") is ModelState.COLD)
    await site.load("a")
    await service.clock.advance(1.0)
    assert site.alerts() == {}, "and it does not outgrow this"
    running = service.authority.resolve("a").running
    assert running is not None
    assert running.placement.need[CPU] > 600 * MIB
    assert running.grown_bytes == 0
