"""Memory pressure: no protected model leaves, every action has a reason, and restrictions change one at a time."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.authority.placement.stage import EVICTABLE, EvictionState
from inference.authority.pressure.levels import Bounds, Gauge, Level, Use, updated_gauge
from inference.authority.pressure.relief import (
    DevicePressure,
    DevicePressures,
    Leave,
    LimitSequences,
    ModelUse,
    PressureInput,
    Restriction,
    Rules,
    refusal,
    step,
)

pytestmark = pytest.mark.unmeasured

DEVICES = ("gpu-0", "gpu-1", "cpu")
TOTAL = 1000


@st.composite
def scenes(draw: st.DrawFn) -> PressureInput:
    models = tuple(
        ModelUse(
            f"m{number}",
            draw(st.sampled_from(list(EvictionState))),
            draw(st.dictionaries(st.sampled_from(DEVICES), st.integers(0, 300), min_size=1)),
            draw(st.floats(0, 400)),
            parallel := draw(st.integers(1, 32)),
            draw(st.none() | st.integers(1, parallel)),
        )
        for number in range(draw(st.integers(0, 5)))
    )
    uses = tuple(
        Use(device, TOTAL, sum(item.bytes.get(device, 0) for item in models), draw(st.integers(0, TOTAL)))
        for device in DEVICES[: draw(st.integers(0, 3))]
    )
    return PressureInput(uses, models, draw(st.sets(st.sampled_from(DEVICES))))


rules = st.builds(Rules, idle_seconds=st.floats(0, 300), eager=st.booleans(), enabled=st.booleans())
checks = st.lists(st.tuples(scenes(), st.booleans()), min_size=1, max_size=8)


@given(checks, rules)
@settings(max_examples=50)
def test_only_idle_models_are_evicted_and_every_action_has_a_reason(
    story: list[tuple[PressureInput, bool]], rules: Rules
) -> None:
    state: DevicePressures = {}
    for scene, regular in story:
        before = state
        state, actions = step(before, scene, rules, regular=regular)
        again = step(before, scene, rules, regular=regular)
        assert (state, actions) == again, "the decision is deterministic"
        models = {item.model: item for item in scene.models}
        assert all(action.reason for action in actions)
        gone = [action for action in actions if isinstance(action, Leave)]
        assert len({action.model for action in gone}) == len(gone)
        for leave in gone:
            item = models[leave.model]
            assert item.eviction_state in EVICTABLE
            worst = max(state[device].gauge.level for device, count in item.bytes.items() if count and device in state)
            assert worst > Level.LOW
            assert not (leave.offload and (item.warm or worst >= Level.CRITICAL))
        limited = {action.model for action in actions} - {action.model for action in gone}
        assert all(not models[name].warm for name in limited)
        assert {leave.model for leave in gone}.isdisjoint(limited)
        for limit in (action for action in actions if isinstance(action, LimitSequences)):
            assert 1 <= limit.sequences <= models[limit.model].parallel
        if not rules.enabled:
            assert all(
                isinstance(action, LimitSequences) and action.sequences == models[action.model].parallel
                for action in actions
            )
            assert all(pressure.restriction is Restriction.NONE for pressure in state.values())


@given(checks)
@settings(max_examples=50)
def test_restrictions_change_one_at_a_time_and_only_by_the_level(
    story: list[tuple[PressureInput, bool]],
) -> None:
    state: DevicePressures = {}
    for scene, regular in story:
        after, _ = step(state, scene, Rules(), regular=regular)
        for device, pressure in after.items():
            before = state.get(device, DevicePressure()).restriction
            assert abs(pressure.restriction - before) <= 1
            if pressure.restriction > before:
                assert pressure.gauge.level is Level.EMERGENCY
                assert regular or pressure.restriction is Restriction.WARN
            if pressure.restriction < before:
                assert regular
                assert pressure.gauge.level < Level.HIGH or pressure.gauge.planned
            assert (refusal(after, device, extras=False) is not None) == (pressure.restriction is Restriction.NO_LOADS)
        state = after


@given(st.integers(0, 250), st.lists(st.integers(0, 5), max_size=20))
def test_idle_model_that_fills_the_budget_stays_while_foreign_use_varies_slightly(
    foreign: int, noise: list[int]
) -> None:
    """The model uses all memory that other programs leave."""
    model = ModelUse("a", EvictionState.IDLE, {"gpu-0": TOTAL - foreign}, 9999.0)
    state, _ = step({}, PressureInput((Use("gpu-0", TOTAL, 0, foreign),)), Rules())
    state, actions = step(state, PressureInput((Use("gpu-0", TOTAL, TOTAL - foreign, foreign),), (model,)), Rules())
    for more in noise:
        use = Use("gpu-0", TOTAL, TOTAL - foreign, max(0, foreign - more))
        state, actions = step(state, PressureInput((use,), (model,)), Rules())
        assert actions == ()


@given(st.integers(100, 900), st.lists(st.integers(-9, 9), min_size=1, max_size=30))
def test_noise_changes_a_level_at_most_once(foreign: int, noise: list[int]) -> None:
    gauge, levels = Gauge(), []
    for more in noise:
        gauge = updated_gauge(gauge, Use("gpu-0", TOTAL, 0, foreign + more), Bounds())
        levels.append(gauge.level)
    assert sum(left != right for left, right in itertools.pairwise(levels)) <= 1
