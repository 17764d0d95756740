"""Pressure on a device: models that leave, limits of workers, loads that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from inference.authority import events
from inference.authority.handlers.queries import pressure_view
from inference.authority.handlers.watching import advisor
from inference.authority.handlers.watching.governor import limits
from inference.authority.lifecycle import Reason
from inference.authority.pressure.levels import Level
from inference.authority.pressure.relief import Restriction
from inference.devices.signs import Sign
from inference.errors import MemoryLimitExceededError
from inference.protocol import ModelState
from tests.rigs.authority_world import configuration
from tests.rigs.step_world import MIB, StepWorld
from tests.rigs.step_world import begin as begin_world

pytestmark = pytest.mark.unmeasured

S = ModelState
GPU = "gpu-0"


def begin(
    models: dict[str, dict[str, Any]], sizes: dict[str, int], *, foreign_mib: int = 0, **settings: Any
) -> StepWorld:
    settings = {"pressure_check_interval_seconds": 5, **settings}
    world = begin_world(models, sizes, gpus=(GPU,), **settings)
    if foreign_mib:
        world.foreign_mib(GPU, foreign_mib)
        world.check_pressure()
    return world


def level(world: StepWorld) -> Level:
    return pressure_view.levels(world.state, world.now)[GPU][1]


def refused(world: StepWorld, model: str) -> MemoryLimitExceededError:
    ticket = world.want(model)
    world.live(1)
    error = world.errors[ticket]
    assert isinstance(error, MemoryLimitExceededError)
    return error


def test_no_model_leaves_for_memory_of_an_ended_worker_while_the_driver_does_not_answer() -> None:
    """The device was as full before, and nothing shows yet that the memory is free."""
    world = begin({"kept": {}, "gone": {}}, {"kept": 350, "gone": 480})
    world.used("kept", "gone")
    world.faults.readings = True
    world.command(events.Unload("gone", now=True))
    world.live(120)
    assert world.model("kept").state is S.READY
    assert world.state.ledger.balance(GPU).foreign_bytes == 480 * MIB
    world.faults.readings = False
    world.check_pressure()
    assert world.state.ledger.balance(GPU).foreign_bytes == 0


def test_idle_model_is_evicted_when_other_programs_take_memory() -> None:
    world = begin({"old": {}, "new": {}}, {"old": 300, "new": 300})
    world.used("old")
    world.live(200)
    world.used("new")
    world.foreign_mib(GPU, 100)
    world.live(5)
    assert world.model("new").state is S.READY
    record = world.state.evictions[-1]
    assert (record.model_name, record.reason) == ("old", Reason.PRESSURE)
    expected = "gpu-0 is at moderate: 700.0 MiB of 1000.0 MiB are in use, 100.0 MiB of it by other programs"
    assert expected in record.explanation[0]
    world.used("old")


def test_at_critical_pressure_idle_models_are_evicted_and_busy_or_pinned_ones_stay() -> None:
    world = begin({"a": {}, "b": {}, "p": {"pinned": True}}, dict.fromkeys("abp", 200))
    world.used("a", "p")
    world.leased("b")
    world.foreign_mib(GPU, 350)
    world.live(5)
    assert world.model("a").state in (S.COLD, S.WARM)
    assert (world.model("b").state, world.model("p").state) == (S.BUSY, S.READY)


def test_model_that_fills_its_budget_stays_until_other_programs_take_memory() -> None:
    world = begin({"a": {}}, {"a": 880}, foreign_mib=20, gpu_memory_max_percent=0.95)
    world.used("a")
    world.live(250)
    for foreign in (20, 25, 15, 30):
        world.foreign_mib(GPU, foreign)
        world.check_pressure()
    assert (level(world), world.model("a").state) == (Level.HIGH, S.READY)
    world.foreign_mib(GPU, 60)
    world.live(5)
    assert world.model("a").state in (S.COLD, S.WARM)


def test_without_the_governor_no_model_is_evicted_and_loads_are_refused() -> None:
    world = begin({"a": {}, "b": {}}, {"a": 300, "b": 500}, enable_memory_governor=False)
    world.used("a")
    world.live(200)
    world.foreign_mib(GPU, 690)
    world.check_pressure(8)
    assert (level(world), world.model("a").state) == (Level.EMERGENCY, S.READY)
    refused(world, "b")


@pytest.mark.parametrize(
    ("idle_seconds", "settings", "leaves"),
    [
        (200, {"pressure_eager": False}, False),
        (200, {"pressure_eager": True}, True),
        (100, {"pressure_eager": True, "eviction_idle_threshold_seconds": 120}, False),
        (100, {"pressure_eager": True, "eviction_idle_threshold_seconds": 50}, True),
    ],
)
def test_below_critical_a_model_is_evicted_only_if_eager_and_idle_for_long(
    idle_seconds: int, settings: dict[str, Any], leaves: bool
) -> None:
    world = begin({"a": {}}, {"a": 700}, **settings)
    world.used("a")
    world.live(idle_seconds)
    world.check_pressure()
    assert (world.model("a").state is not S.READY) == leaves


def test_restrictions_limit_workers_refuse_loads_and_end_again() -> None:
    world = begin({"busy": {"parallel": 16}, "b": {}}, {"busy": 300, "b": 80})
    world.leased("busy")
    world.foreign_mib(GPU, 690)
    world.check_pressure(5)
    assert pressure_view.restrictions(world.state) == {GPU: Restriction.NO_LOADS, "cpu": Restriction.NONE}
    world.foreign_mib(GPU, 510)
    world.check_pressure()
    error = refused(world, "b")
    assert "too full (high) for any load until its use is below HIGH" in error.message
    assert "810.0 MiB of 1000.0 MiB are in use, 510.0 MiB of it by other programs" in error.message
    plan = world.command(events.Plan("b", {"context_length": 512}))
    world.arrive()
    assert "too full" in world.answers[plan].outcome.reason
    world.foreign_mib(GPU, 100)
    world.check_pressure(5)
    assert pressure_view.restrictions(world.state)[GPU] is Restriction.NONE
    world.used("b")
    halved = [line.split(":")[0] for line in world.log if "admits at" in line]
    assert halved == [f"busy admits at most {count} sequences at a time" for count in (8, 4, 2, 1, 2, 4, 8, 16)]
    assert sum("drops its retained prefixes" in line for line in world.log) == 4
    (worst,) = [line for line in world.log if line.startswith("gpu-0 is at emergency (low before)")]
    assert "990.0 MiB of 1000.0 MiB are in use, 690.0 MiB of it by other programs" in worst


def test_models_with_vision_adapters_or_a_draft_model_are_refused_before_others() -> None:
    extras: dict[str, dict[str, Any]] = {
        "sees": {"mmproj": "/x.gguf"}, "adapted": {"lora": ["/x.gguf"]}, "quick": {"draft": "/x.gguf"},
    }  # fmt: skip
    sizes = {"busy": 300} | dict.fromkeys(["plain", *extras], 40)
    world = begin({"busy": {}, "plain": {}, **extras}, sizes)
    world.leased("busy")
    world.foreign_mib(GPU, 690)
    world.check_pressure(3)
    assert pressure_view.restrictions(world.state)[GPU] is Restriction.NO_EXTRAS
    world.foreign_mib(GPU, 510)
    world.check_pressure()
    for name in extras:
        why = refused(world, name).message
        assert "gpu-0 is too full (high) to load a model with vision, LoRA or a draft model" in why
    world.used("plain")
    world.foreign_mib(GPU, 100)
    world.check_pressure(2)
    world.used("sees")


def test_limit_of_sequences_applies_to_a_worker_that_starts_later() -> None:
    world = begin({"a": {"parallel": 8}}, {"a": 300})
    world.foreign_mib(GPU, 990)
    world.check_pressure(2)
    world.foreign_mib(GPU, 550)
    world.used("a")
    world.check_pressure()
    assert limits(world.state) == {"a": 4}


def test_load_on_a_full_device_is_refused_with_numbers() -> None:
    world = begin({"a": {}}, {"a": 300}, foreign_mib=930)
    expected = (
        "gpu-0 is at critical (low before): 930.0 MiB of 1000.0 MiB are in use, 930.0 MiB of it by other programs"
    )
    assert any(line.startswith(expected) for line in world.log)
    (shortage,) = refused(world, "a").shortages
    assert (shortage.device, shortage.need_bytes, shortage.free_bytes) == (GPU, 300 * MIB, 0)
    world.foreign_mib(GPU, 100)
    world.live(2)
    world.used("a")


def test_device_is_logged_as_an_error_from_critical_on() -> None:
    """Lower levels are warnings or information, and so is the end of a level."""
    world = begin({"a": {}}, {"a": 300})
    for foreign in (650, 850, 930, 990, 100):
        world.foreign_mib(GPU, foreign)
        world.check_pressure()
    found = [(line.split()[3], level) for line, level in world.levels.items() if line.startswith("gpu-0 is at")]
    assert found == [
        ("moderate", "INFO"), ("high", "WARNING"), ("critical", "ERROR"),
        ("emergency", "ERROR"), ("emergency", "ERROR"), ("low", "INFO"),
    ]  # fmt: skip


def test_lost_device_has_no_pressure() -> None:
    world = begin({"a": {}}, {"a": 300}, foreign_mib=990)
    alerts = advisor.alerts(world.state, world.now)
    assert GPU in [alert.subject for alert in alerts if alert.kind == "pressure"]
    world.put_sign(GPU, Sign.MISSING)
    world.check_pressure()
    assert set(pressure_view.restrictions(world.state)) == {"cpu"}
    alerts = advisor.alerts(world.state, world.now)
    assert GPU not in [alert.subject for alert in alerts if alert.kind == "pressure"]


def test_pressure_check_uses_the_last_figures_when_the_devices_cannot_be_read() -> None:
    world = begin({"a": {}}, {"a": 300}, pressure_check_interval_seconds=1)
    before = len(world.state.pressure.history)
    for _ in range(4):
        world.tick(1.0)
        world.arrive(events.DevicesRead)
        if world.later:
            world.later.clear()
            world.send(events.DevicesRead(world.readings(), "gone"))
    assert len(world.state.pressure.history) > before + 1
    assert any("could not read the devices" in line for line in world.log)


def test_changed_interval_applies_to_the_next_check() -> None:
    world = begin({}, {}, pressure_check_interval_seconds=3600)
    world.live(10)
    before = len(world.state.pressure.history)
    world.change(configuration({}, pressure_check_interval_seconds=5))
    world.live(1)
    assert len(world.state.pressure.history) == before + 1


def test_load_beyond_the_configured_share_of_a_device_is_refused() -> None:
    world = begin({"a": {}, "b": {}}, {"a": 300, "b": 420}, foreign_mib=500, gpu_memory_limit_mb=310)
    world.used("a")
    assert "limited by Headgate's share of the device" in refused(world, "b").message


@pytest.mark.parametrize("expected", [Level.MODERATE, Level.HIGH, Level.CRITICAL, Level.EMERGENCY])
def test_thresholds_of_the_pressure_levels_are_settings(expected: Level) -> None:
    names = ["moderate", "high", "critical", "emergency"]
    bounds = {f"pressure_{name}": 0.5 for name in names[: names.index(str(expected)) + 1]}
    world = begin({}, {}, foreign_mib=520, **bounds)
    assert level(world) is expected
