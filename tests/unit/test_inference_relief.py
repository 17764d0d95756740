"""Who leaves a full device and who is slowed down: by level, by idle time, by want; a rung at a time, and back."""

from __future__ import annotations

import pytest

from inference.authority.placement.stage import EVICTABLE, Standing
from inference.authority.pressure.levels import Level, Use
from inference.authority.pressure.relief import (
    Forget,
    Leave,
    Limit,
    Relief,
    Rules,
    Rung,
    Scene,
    State,
    Tenant,
    refusal,
    step,
)

GPU = "gpu-0"
RULES = Rules()


def idle(model: str, seconds: float, count: int = 100) -> Tenant:
    return Tenant(model, Standing.IDLE, {GPU: count}, seconds)


def scene(*tenants: Tenant, foreign: int = 0, wanted: bool = False, total: int = 1000) -> Scene:
    ours = sum(tenant.bytes.get(GPU, 0) for tenant in tenants)
    return Scene((Use(GPU, total, ours, foreign),), tenants, (GPU,) if wanted else ())


def after(*scenes: Scene, rules: Rules = RULES) -> tuple[State, tuple[Relief, ...]]:
    state: State = {}
    actions: tuple[Relief, ...] = ()
    for one in scenes:
        state, actions = step(state, one, rules)
    return state, actions


def leaving(actions: tuple[Relief, ...]) -> dict[str, bool]:
    """Who leaves, and whether into host memory."""
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
def test_each_level_asks_for_its_idle_time_and_critical_for_none(foreign: int, expected: dict[str, bool]) -> None:
    tenants = (idle("old", 121, 40), idle("mid", 31, 130), idle("new", 1, 100))
    _, actions = after(scene(*tenants), scene(*tenants, foreign=foreign))
    assert leaving(actions) == expected


def test_below_critical_nobody_leaves_while_nobody_wants_memory() -> None:
    tenants = (idle("old", 500, 400), idle("mid", 400, 400))
    assert after(scene(*tenants), scene(*tenants))[1] == ()
    assert leaving(after(scene(*tenants), scene(*tenants), rules=Rules(eager=True))[1]) == {"old": True}
    assert leaving(after(scene(*tenants), scene(*tenants, wanted=True))[1]) == {"old": True}


def test_a_model_that_was_busy_when_others_took_memory_leaves_once_it_is_idle() -> None:
    then, now = Tenant("a", Standing.BUSY, {GPU: 500}, 0.0), idle("a", 31, 500)
    assert leaving(after(scene(then), scene(then, foreign=320), scene(now, foreign=320))[1]) == {"a": True}
    assert after(scene(then, foreign=320), scene(now, foreign=320))[1] == (), "they had it when it was loaded"


def test_no_more_leave_than_bring_the_use_below_the_level() -> None:
    tenants = (idle("a", 300, 200), idle("b", 200, 200), idle("c", 150, 200), idle("d", 130, 200))
    assert leaving(after(scene(*tenants, wanted=True))[1]) == {"a": True}
    assert leaving(after(scene(*tenants, wanted=True, foreign=95))[1]) == {"a": True}


def test_warm_models_go_first_and_for_good() -> None:
    tenants = (idle("loaded", 500, 400), Tenant("warm", Standing.WARM, {GPU: 400}, 130))
    assert leaving(after(scene(*tenants, wanted=True))[1]) == {"warm": False}


@pytest.mark.parametrize("standing", [item for item in Standing if item not in EVICTABLE])
def test_whoever_is_not_idle_stays_whatever_the_level(standing: Standing) -> None:
    tenant = Tenant("a", standing, {GPU: 500}, 1000.0)
    assert leaving(after(scene(), scene(tenant, foreign=499))[1]) == {}


def test_a_model_on_two_devices_leaves_once_and_for_good_where_one_of_them_is_critical() -> None:
    tenant = Tenant("a", Standing.IDLE, {GPU: 100, "cpu": 100}, 500.0)
    for order in ((GPU, "cpu"), ("cpu", GPU)):
        full = {GPU: 850, "cpu": 550}
        uses = tuple(Use(device, 1000, 100, full[device]) for device in order)
        before = Scene(tuple(Use(device, 1000, 100, 0) for device in order), (tenant,))
        _, actions = after(before, Scene(uses, (tenant,)))
        assert leaving(actions) == {"a": False}


def test_an_idle_model_elsewhere_is_left_alone() -> None:
    tenant = Tenant("a", Standing.IDLE, {"gpu-1": 100}, 500.0)
    scenes = Scene((Use(GPU, 1000, 0, 950), Use("gpu-1", 1000, 100, 0)), (tenant,))
    assert after(scenes)[1] == ()


def busy(model: str = "a", parallel: int = 16, limit: int | None = None) -> Tenant:
    return Tenant(model, Standing.BUSY, {GPU: 500}, 0.0, parallel, limit)


def test_the_ladder_is_climbed_a_rung_per_check_and_left_a_rung_per_check() -> None:
    state, _ = step({}, scene(busy()), RULES)
    limit: int | None = None
    said = []
    for foreign in (490, 490, 490, 490, 490, 490, 350, 250, 250, 250, 250, 250, 250):
        state, actions = step(state, scene(busy(limit=limit), foreign=foreign), RULES)
        limits = [action.sequences for action in actions if isinstance(action, Limit)]
        limit = limits[0] if limits else limit
        forgot = any(isinstance(action, Forget) for action in actions)
        said.append((state[GPU].rung, limit, forgot))
    assert said == [
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


def test_the_ladder_is_left_when_only_what_was_admitted_remains() -> None:
    model = Tenant("a", Standing.FIXED, {GPU: 850}, 0.0, 4)
    state, _ = step({}, scene(model, foreign=40), RULES)
    for _ in range(3):
        state, _ = step(state, scene(model, foreign=140), RULES)
    assert state[GPU].rung is Rung.FORGET
    for _ in range(3):
        state, _ = step(state, scene(model, foreign=40), RULES)
    assert (state[GPU].rung, state[GPU].gauge.level) == (Rung.NONE, Level.HIGH)


def test_a_check_out_of_turn_warns_at_most() -> None:
    state, _ = step({}, scene(busy()), RULES)
    for _ in range(3):
        state, actions = step(state, scene(busy(), foreign=490), RULES, regular=False)
    assert state[GPU].rung is Rung.WARN
    assert actions == ()
    state, _ = step(state, scene(busy()), RULES, regular=False)
    assert state[GPU].rung is Rung.WARN, "and comes down by none"


def test_the_ladder_refuses_models_with_extras_and_then_all() -> None:
    state: State = {}
    assert refusal(state, GPU, extras=True) is None
    refused = []
    for _ in range(5):
        state, _ = step(state, scene(foreign=990), RULES)
        refused.append((bool(refusal(state, GPU, extras=True)), bool(refusal(state, GPU, extras=False))))
    assert refused == [(False, False)] * 3 + [(True, False), (True, True)]
    assert "emergency" in str(refusal(state, GPU, extras=False))


def test_only_workers_that_answer_are_told_anything() -> None:
    tenants = (
        Tenant("loading", Standing.LOADING, {GPU: 100}, 0.0, 8),
        Tenant("leaving", Standing.LEAVING, {GPU: 100}, 0.0, 8),
        Tenant("warm", Standing.WARM, {"cpu": 100, GPU: 0}, 0.0, 8),
        Tenant("elsewhere", Standing.BUSY, {"gpu-1": 100}, 0.0, 8),
        Tenant("here", Standing.BUSY, {GPU: 100}, 0.0, 8),
    )
    _, actions = after(scene(*tenants), *[scene(*tenants, foreign=690)] * 3)
    assert {action.model for action in actions} == {"here"}


def test_a_model_on_a_device_that_vanished_is_admitted_in_full_again() -> None:
    _, actions = step({}, Scene((), (busy(limit=4),)), RULES)
    assert actions == (Limit("a", 16, "nothing is held back any more"),)


def test_without_the_governor_levels_are_known_and_nothing_is_done() -> None:
    off = Rules(enabled=False)
    tenants = (idle("a", 500, 100), busy("b", 4))
    state, actions = after(*[scene(*tenants, foreign=399)] * 4, rules=off)
    assert (state[GPU].gauge.level, state[GPU].rung, actions) == (Level.HIGH, Rung.NONE, ())
    state, _ = after(scene(), *[scene(*tenants, foreign=395)] * 4)
    state, actions = step(state, scene(idle("a", 500, 100), busy("b", 4, 2), foreign=395), off)
    assert actions == (Limit("b", 4, f"{GPU}: nothing is held back any more"),)
