"""Recommendations of alerts: each is applied as it is written, and the alert ends."""

from __future__ import annotations

from typing import Any

import pytest

from inference.authority.handlers.watching import advisor
from inference.authority.pressure.advice import REJECTIONS, SWAPS, Kind
from inference.errors import MemoryLimitExceededError, QueueFull
from inference.protocol import Priority
from tests.rigs.authority_world import configuration
from tests.rigs.step_world import begin

GPU = "gpu-0"


class Site:
    """A service whose operator applies recommendations."""

    def __init__(
        self, *models: str, sizes: dict[str, int] | None = None, gpus: tuple[str, ...] = (GPU,), **settings: Any
    ) -> None:
        self.models: dict[str, dict[str, Any]] = {name: {"parallel": 1, "min_residency": 0} for name in models}
        self.settings = {"pressure_check_interval_seconds": 5, "enable_cpu_offload": False, **settings}
        self.world = begin(self.models, sizes, gpus=gpus, **self.settings)

    def alerts(self) -> dict[Kind, dict[str, str]]:
        """What is recommended, by the kind of alert."""
        found = advisor.alerts(self.world.state, self.world.now)
        return {alert.kind: {change.setting: change.value for change in alert.changes} for alert in found}

    def apply(self, recommended: dict[str, str]) -> None:
        """Reloads with the recommended settings."""
        assert recommended
        for name, value in recommended.items():
            if name.startswith("INFERENCE_"):
                self.settings[name.removeprefix("INFERENCE_").lower()] = value
            else:
                _, model, setting = name.split(".")
                self.models[model][setting] = value
        self.world.change(configuration(self.models, **self.settings))
        self.world.arrive()

    def refuse(self, name: str) -> None:
        """A request for a model that does not fit."""
        ticket = self.world.want(name)
        self.world.live(1)
        assert isinstance(self.world.errors[ticket], MemoryLimitExceededError)


def test_alert_suggests_a_lower_share_of_a_gpu_filled_by_other_programs() -> None:
    site = Site("a", sizes={"a": 400})
    lease = site.world.leased("a")
    site.world.foreign_mib(GPU, 550)
    site.world.check_pressure()
    expected = {Kind.PRESSURE: {}, Kind.FOREIGN_USE: {"INFERENCE_GPU_MEMORY_LIMIT_MB": "330"}}
    assert site.alerts() == expected
    site.apply(expected[Kind.FOREIGN_USE])
    assert site.alerts() == {Kind.PRESSURE: {}}
    site.world.finish(lease)
    site.world.check_pressure()
    site.world.live(5)
    assert site.alerts() == {}
    site.refuse("a")


def test_nothing_is_recommended_where_other_programs_alone_fill_a_device() -> None:
    site = Site("a")
    site.world.foreign_mib(GPU, 930)
    site.world.check_pressure()
    assert site.alerts() == {Kind.PRESSURE: {}, Kind.FOREIGN_USE: {}}
    site.world.foreign_mib(GPU, 100)
    site.world.check_pressure()
    assert site.alerts() == {Kind.FOREIGN_USE: {}}


def test_alert_suggests_a_lower_share_of_host_memory_filled_by_other_programs() -> None:
    site = Site("a", sizes={"a": 400}, gpus=())
    site.models["a"]["pinned"] = True
    site.apply({"INFERENCE_CPU_MEMORY_MAX_PERCENT": "0.9"})
    site.world.used("a")
    site.world.foreign_mib("cpu", 3280)
    site.world.check_pressure()
    site.world.foreign_mib("cpu", 2000)
    site.world.check_pressure()
    (recommended,) = site.alerts().items()
    assert recommended[0] is Kind.FOREIGN_USE
    assert set(recommended[1]) == {"INFERENCE_CPU_MEMORY_MAX_PERCENT"}
    site.apply(recommended[1])
    assert site.alerts() == {}


def test_longer_residency_is_recommended_for_models_that_swap_and_do_not_fit_together() -> None:
    site = Site("a", "b", gpus=(), memory_limit_gb=0.3)
    site.world.used(*["a", "b"] * (SWAPS // 2), "a")
    recommended = site.alerts()[Kind.THRASH]
    assert set(recommended) == {"models.a.min_residency", "models.b.min_residency"}
    site.apply(recommended)
    assert site.alerts() == {}


def test_swaps_of_models_that_are_in_use_raise_the_alert() -> None:
    """Each has a running request when it must leave for the other."""
    site = Site("a", "b", gpus=(), memory_limit_gb=0.3)
    lease = site.world.leased("a")
    for name in ["b", "a"] * (SWAPS // 2):
        ticket = site.world.want(name)
        site.world.live(5)
        site.world.finish(lease)
        site.world.live(5)
        lease = site.world.grants[ticket]
    assert len(site.world.state.evictions) == SWAPS
    assert set(site.alerts()[Kind.THRASH]) == {"models.a.min_residency", "models.b.min_residency"}


@pytest.mark.parametrize(
    ("settings", "gpus", "setting"),
    [
        ({"memory_limit_gb": 0.05}, (GPU,), "INFERENCE_MEMORY_LIMIT_GB"),
        ({"gpu_memory_limit_mb": 60}, (GPU,), "INFERENCE_GPU_MEMORY_LIMIT_MB"),
        ({"gpu_memory_max_percent": 0.05}, (GPU,), "INFERENCE_GPU_MEMORY_MAX_PERCENT"),
        ({"cpu_memory_max_percent": 0.02}, (), "INFERENCE_CPU_MEMORY_MAX_PERCENT"),
    ],
)
def test_alert_recommends_a_higher_limit_if_a_limit_prevents_a_load(
    settings: dict[str, Any], gpus: tuple[str, ...], setting: str
) -> None:
    site = Site("a", gpus=gpus, **settings)
    site.refuse("a")
    assert set(site.alerts()[Kind.REFUSED]) == {setting}
    site.apply(site.alerts()[Kind.REFUSED])
    site.world.used("a")
    assert site.alerts() == {}


def test_no_setting_is_recommended_for_a_device_that_is_too_small() -> None:
    site = Site("a", sizes={"a": 5000})
    site.refuse("a")
    assert site.alerts() == {Kind.REFUSED: {}}


@pytest.mark.parametrize("priority", Priority)
def test_alert_recommends_more_places_for_a_queue_that_is_often_full(priority: Priority) -> None:
    setting = f"queue_{priority}"
    site = Site("a", **{setting: 0})
    for _ in range(REJECTIONS):
        assert site.alerts() == {}
        assert isinstance(site.world.errors[site.world.want("a", priority=priority)], QueueFull)
    assert site.alerts() == {Kind.QUEUE_FULL: {f"INFERENCE_{setting.upper()}": str(REJECTIONS)}}
    site.apply(site.alerts()[Kind.QUEUE_FULL])
    assert site.alerts() == {}
    tickets = [site.world.want("a", priority=priority) for _ in range(REJECTIONS)]
    assert not site.world.errors.keys() & set(tickets)


def test_alert_is_logged_at_its_start_and_its_end() -> None:
    site = Site("a", queue_normal=0)
    for _ in range(REJECTIONS):
        site.world.want("a")
    site.world.check_pressure(2)
    site.apply({"INFERENCE_QUEUE_NORMAL": "5"})
    site.world.check_pressure()
    begun, over = (line for line in site.world.log if line.startswith("alert"))
    assert begun.startswith("alert queue_full: ")
    assert begun.endswith("; recommended: INFERENCE_QUEUE_NORMAL=5")
    assert over == "alert queue_full is over: normal"


def test_no_alert_when_alerts_are_disabled() -> None:
    site = Site("a", enable_memory_alerts=False)
    site.world.foreign_mib(GPU, 930)
    site.world.check_pressure()
    assert site.alerts() == {}
    assert not any("alert" in line for line in site.world.log)
