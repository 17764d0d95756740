"""Relief of a full device: idle models leave by level and idle time; the ladder limits busy ones step by step."""

from __future__ import annotations

import pytest

from inference.authority.placement.stage import EVICTABLE, Standing
from inference.authority.pressure.levels import Level, Use
from inference.authority.pressure.relief import (
    Forget,
    Leave,
    Limit,
    PressureInput,
    Relief,
    Rules,
    Rung,
    Tenant,
    Watches,
    refusal,
    step,
)

GPU = "gpu-0"
RULES = Rules()


def idle(model: str, seconds: float, count: int = 100) -> Tenant:
    return Tenant(model, Standing.IDLE, {GPU: count}, seconds)


def scene(*tenants: Tenant, foreign: int = 0, wanted: bool = False, total: int = 1000) -> PressureInput:
    ours = sum(tenant.bytes.get(GPU, 0) for tenant in tenants)
    return PressureInput((Use(GPU, total, ours, foreign),), tenants, (GPU,) if wanted else ())


def after(*scenes: PressureInput, rules: Rules = RULES) -> tuple[Watches, tuple[Relief, ...]]:
    state: Watches = {}
    actions: tuple[Relief, ...] = ()
    for one in scenes:
        state, actions = step(state, one, rules)
    return state, actions


def leaving(actions: tuple[Relief, ...]) -> dict[str, bool]:
    """The models that leave, and whether into host memory."""
    return {action.model: action.offload for action in actions if isinstance(action, Leave)}


@pytest.mark.parametrize(
    ("foreign", "expected"),
    [
        (0, {}),
        (350, {"old": True}),
        (550, {"old": True, "mid": True}),
        (650, {"old": False, "mid": False, "new": False}),
    ],
)
def test_idle_time_before_leaving_depends_on_the_level(foreign: int, expected: dict[str, bool]) -> None:
    tenants = (idle("old", 121, 40), idle("mid", 31, 130), idle("new", 1, 100))
    _, actions = after(scene(*tenants), scene(*tenants, foreign=foreign))
    assert leaving(actions) == expected


def test_below_critical_models_leave_only_if_memory_is_wanted() -> None:
    tenants = (idle("old", 500, 400), idle("mid", 400, 400))
    assert after(scene(*tenants), scene(*tenants))[1] == ()
    assert leaving(after(scene(*tenants), scene(*tenants), rules=Rules(eager=True))[1]) == {"old": True}
    assert leaving(after(scene(*tenants), scene(*tenants, wanted=True))[1]) == {"old": True}


def test_busy_model_leaves_when_idle_if_foreign_use_grew_since_its_load() -> None:
    then, now = Tenant("a", Standing.BUSY, {GPU: 500}, 0.0), idle("a", 31, 500)
    assert leaving(after(scene(then), scene(then, foreign=320), scene(now, foreign=320))[1]) == {"a": True}
    assert after(scene(then, foreign=320), scene(now, foreign=320))[1] == (), "the use was the same at the load"


def test_only_as_many_models_leave_as_needed() -> None:
    tenants = (idle("a", 300, 200), idle("b", 200, 200), idle("c", 150, 200), idle("d", 130, 200))
    assert leaving(after(scene(*tenants, wanted=True))[1]) == {"a": True}
    assert leaving(after(scene(*tenants, wanted=True, foreign=95))[1]) == {"a": True}


def test_warm_models_are_unloaded_first() -> None:
    tenants = (idle("loaded", 500, 400), Tenant("warm", Standing.WARM, {GPU: 400}, 130))
    assert leaving(after(scene(*tenants, wanted=True))[1]) == {"warm": False}


@pytest.mark.parametrize("standing", [item for item in Standing if item not in EVICTABLE])
def test_models_that_are_not_idle_stay_at_each_level(standing: Standing) -> None:
    tenant = Tenant("a", standing, {GPU: 500}, 1000.0)
    assert leaving(after(scene(), scene(tenant, foreign=499))[1]) == {}


def test_model_on_two_devices_is_unloaded_once_if_one_is_critical() -> None:
    tenant = Tenant("a", Standing.IDLE, {GPU: 100, "cpu": 100}, 500.0)
    for order in ((GPU, "cpu"), ("cpu", GPU)):
        full = {GPU: 850, "cpu": 550}
        uses = tuple(Use(device, 1000, 100, full[device]) for device in order)
        before = PressureInput(tuple(Use(device, 1000, 100, 0) for device in order), (tenant,))
        _, actions = after(before, PressureInput(uses, (tenant,)))
        assert leaving(actions) == {"a": False}


def test_idle_model_on_another_device_stays() -> None:
    tenant = Tenant("a", Standing.IDLE, {"gpu-1": 100}, 500.0)
    scenes = PressureInput((Use(GPU, 1000, 0, 950), Use("gpu-1", 1000, 100, 0)), (tenant,))
    assert after(scenes)[1] == ()


def busy(model: str = "a", parallel: int = 16, limit: int | None = None) -> Tenant:
    return Tenant(model, Standing.BUSY, {GPU: 500}, 0.0, parallel, limit)


def test_ladder_moves_one_rung_per_check() -> None:
    state, _ = step({}, scene(busy()), RULES)
    limit: int | None = None
    seen = []
    for foreign in (490, 490, 490, 490, 490, 490, 350, 250, 250, 250, 250, 250, 250):
        state, actions = step(state, scene(busy(limit=limit), foreign=foreign), RULES)
        limits = [action.sequences for action in actions if isinstance(action, Limit)]
        limit = limits[0] if limits else limit
        forgot = any(isinstance(action, Forget) for action in actions)
        seen.append((state[GPU].rung, limit, forgot))
    assert seen == [
        (Rung.WARN, None, False),
        (Rung.HALVE, 8, False),
        (Rung.FORGET, 4, True),
        (Rung.NO_EXTRAS, 2, True),
        (Rung.NO_LOADS, 1, True),
        (Rung.NO_LOADS, 1, True),
        (Rung.NO_LOADS, 1, False),  # high: neither better nor worse
        (Rung.NO_EXTRAS, 2, False),
        (Rung.FORGET, 4, False),
        (Rung.HALVE, 8, False),
        (Rung.WARN, 16, False),
        (Rung.NONE, 16, False),
        (Rung.NONE, 16, False),
    ]


def test_ladder_is_left_when_only_admitted_use_remains() -> None:
    model = Tenant("a", Standing.FIXED, {GPU: 850}, 0.0, 4)
    state, _ = step({}, scene(model, foreign=40), RULES)
    for _ in range(3):
        state, _ = step(state, scene(model, foreign=140), RULES)
    assert state[GPU].rung is Rung.FORGET
    for _ in range(3):
        state, _ = step(state, scene(model, foreign=40), RULES)
    assert (state[GPU].rung, state[GPU].gauge.level) == (Rung.NONE, Level.HIGH)


def test_irregular_check_warns_at_most() -> None:
    state, _ = step({}, scene(busy()), RULES)
    for _ in range(3):
        state, actions = step(state, scene(busy(), foreign=490), RULES, regular=False)
    assert state[GPU].rung is Rung.WARN
    assert actions == ()
    state, _ = step(state, scene(busy()), RULES, regular=False)
    assert state[GPU].rung is Rung.WARN, "an irregular check does not leave a rung"


def test_ladder_rejects_models_with_extras_and_then_all_models() -> None:
    state: Watches = {}
    assert refusal(state, GPU, extras=True) is None
    refused = []
    for _ in range(5):
        state, _ = step(state, scene(foreign=990), RULES)
        refused.append((bool(refusal(state, GPU, extras=True)), bool(refusal(state, GPU, extras=False))))
    assert refused == [(False, False)] * 3 + [(True, False), (True, True)]
    assert "emergency" in str(refusal(state, GPU, extras=False))


def test_only_running_models_of_the_device_get_limits() -> None:
    tenants = (
        Tenant("loading", Standing.LOADING, {GPU: 100}, 0.0, 8),
        Tenant("leaving", Standing.LEAVING, {GPU: 100}, 0.0, 8),
        Tenant("warm", Standing.WARM, {"cpu": 100, GPU: 0}, 0.0, 8),
        Tenant("elsewhere", Standing.BUSY, {"gpu-1": 100}, 0.0, 8),
        Tenant("here", Standing.BUSY, {GPU: 100}, 0.0, 8),
    )
    _, actions = after(scene(*tenants), *[scene(*tenants, foreign=690)] * 3)
    assert {action.model for action in actions} == {"here"}


def test_limit_of_a_model_on_a_lost_device_is_removed() -> None:
    _, actions = step({}, PressureInput((), (busy(limit=4),)), RULES)
    assert actions == (Limit("a", 16, "no restrictions"),)


def test_disabled_governor_computes_levels_without_acting() -> None:
    off = Rules(enabled=False)
    tenants = (idle("a", 500, 100), busy("b", 4))
    state, actions = after(*[scene(*tenants, foreign=399)] * 4, rules=off)
    assert (state[GPU].gauge.level, state[GPU].rung, actions) == (Level.HIGH, Rung.NONE, ())
    state, _ = after(scene(), *[scene(*tenants, foreign=395)] * 4)
    state, actions = step(state, scene(idle("a", 500, 100), busy("b", 4, 2), foreign=395), off)
    assert actions == (Limit("b", 4, f"{GPU}: no restrictions"),)
