"""Memory pressure: levels and admitted use, growth, relief, lowered limits, recommendations."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.authority.handlers.running.worker_memory import GROWTH_SLACK_BYTES, growth_bytes
from inference.authority.placement.ledger import Account, Ledger, LedgerError, Phase
from inference.authority.placement.stage import EVICTABLE, EvictionState, Held, Policy
from inference.authority.pressure.advice import (
    MIB,
    REJECTIONS,
    RESIDENCY_SECONDS,
    SWAPS,
    Alert,
    Kind,
    foreign_use_alert,
    outgrown_alert,
    pressure_alert,
    queue_alert,
    swapping_alert,
    swaps,
)
from inference.authority.pressure.levels import (
    Bounds,
    Gauge,
    Level,
    Use,
    grew,
    updated_gauge,
    with_accepted_use,
    with_forfeited,
)
from inference.authority.pressure.lowered_limits import Limits, surplus
from inference.authority.pressure.relief import (
    DevicePressures,
    DropPrefixes,
    Leave,
    LimitSequences,
    ModelUse,
    PressureInput,
    Relief,
    Restriction,
    Rules,
    refusal,
    step,
)

BOUNDS = Bounds()


def use(ours: int, foreign: int, total: int = 1000) -> Use:
    return Use("gpu-0", total, ours, foreign)


def settled(*uses: Use) -> Gauge:
    gauge = Gauge()
    for one in uses:
        gauge = updated_gauge(gauge, one, BOUNDS)
    return gauge


@pytest.mark.parametrize(
    ("foreign", "level"),
    [(0, "low"), (599, "low"), (600, "moderate"), (799, "moderate"), (800, "high"), (900, "critical"),
     (979, "critical"), (980, "emergency"), (1000, "emergency")],
)  # fmt: skip
def test_level_follows_from_the_foreign_use(foreign: int, level: str) -> None:
    assert str(settled(use(0, foreign)).level) == level


def test_booked_memory_that_becomes_foreign_is_no_growth() -> None:
    gauge = settled(use(400, 50), use(800, 50))
    assert grew(gauge, use(400, 450))
    assert not grew(with_forfeited(gauge, 400), use(400, 450))
    assert updated_gauge(with_forfeited(gauge, 400), use(400, 450), BOUNDS).level is Level.HIGH
    assert with_forfeited(Gauge(), 400).lowest_bytes is None


def test_device_without_a_size_is_low() -> None:
    assert settled(use(100, 100, total=0)).level is Level.LOW


def test_plan_that_fills_its_budget_is_not_critical() -> None:
    assert settled(use(0, 20), use(975, 20)).level is Level.HIGH
    assert settled(use(0, 20), use(975, 20), use(975, 30)).level is Level.HIGH, "foreign use varies a little"


def test_foreign_growth_on_top_of_a_plan_is_critical() -> None:
    assert settled(use(0, 20), use(880, 20), use(880, 31)).level is Level.CRITICAL
    assert settled(use(0, 20), use(880, 20), use(880, 100)).level is Level.EMERGENCY


def test_more_foreign_use_after_a_reservation_raises_the_level() -> None:
    booked = with_accepted_use(settled(use(0, 20)), use(880, 20))
    assert updated_gauge(booked, use(880, 60), BOUNDS).level is Level.CRITICAL
    assert settled(use(0, 20), use(880, 60)).level is Level.HIGH, "the booking was not reported"


def test_plan_does_not_hide_critical_foreign_use() -> None:
    assert settled(use(0, 930), use(20, 930)).level is Level.CRITICAL


def test_level_falls_to_high_when_foreign_use_returns_to_its_accepted_value() -> None:
    before = (use(0, 20), use(880, 20), use(880, 40))
    assert settled(*before, use(880, 29)).level is Level.CRITICAL
    assert settled(*before, use(880, 20)).level is Level.HIGH


def test_level_is_left_only_well_below_its_bound() -> None:
    assert settled(use(0, 800), use(0, 790)).level is Level.HIGH
    assert settled(use(0, 800), use(0, 779)).level is Level.MODERATE
    assert settled(use(0, 980), use(0, 100)).level is Level.LOW


def test_use_that_varies_around_a_bound_changes_the_level_once() -> None:
    gauge, levels = Gauge(), []
    for foreign in (795, 805, 795, 805, 790, 810):
        gauge = updated_gauge(gauge, use(0, foreign), BOUNDS)
        levels.append(gauge.level)
    assert levels == [Level.MODERATE, *[Level.HIGH] * 5]


def test_foreign_growth_accumulates_and_is_reported_once() -> None:
    gauge = Gauge()
    assert not grew(gauge, use(0, 500)), "there is nothing to compare with before the first reading"
    reported = []
    for foreign in (500, 506, 512, 512, 400, 409, 411):
        reported.append(grew(gauge, use(0, foreign)))
        gauge = updated_gauge(gauge, use(0, foreign), BOUNDS)
    assert reported == [False, False, True, False, False, False, True]


def test_own_growth_is_no_foreign_growth() -> None:
    assert not grew(settled(use(0, 100)), use(800, 100))


HELD = 100 * MIB
SLACK = GROWTH_SLACK_BYTES + HELD // 10


def ledger(*, capacity: int = 1000, budget: int = 500, limit: int | None = None, seen: int = 0) -> Ledger:
    """One resident model of 100 MiB, and `seen` MiB of foreign use."""
    books = Ledger(limit_bytes=None if limit is None else limit * MIB)
    books = books.open(Account("cpu", capacity * MIB, budget * MIB)).reserve("a", "a", {"cpu": HELD})
    used = HELD + seen * MIB
    return books.commit("a", {"cpu": HELD}).observe("cpu", used, capacity * MIB - used)


@pytest.mark.parametrize("seen", [0, HELD, HELD + SLACK])
def test_growth_within_the_slack_is_ignored(seen: int) -> None:
    assert growth_bytes(ledger(), "a", "cpu", seen) == 0


def test_growth_that_fits_is_booked_to_its_model() -> None:
    more = growth_bytes(ledger(seen=200), "a", "cpu", 300 * MIB)
    grown = ledger(seen=200).grow("a", "cpu", more)
    balance = grown.balance("cpu")
    assert (more, balance.resident_bytes, balance.foreign_bytes) == (200 * MIB, 300 * MIB, 0)
    assert growth_bytes(grown, "a", "cpu", 300 * MIB) == 0, "it is reported once"


@pytest.mark.parametrize(
    ("books", "bound"),
    [
        (ledger(seen=600, budget=600), "share of the device"),
        (ledger(seen=600, capacity=650, budget=2000), "the device"),
        (ledger(seen=600, budget=2000, limit=400), "INFERENCE_MEMORY_LIMIT_GB"),
    ],
)
def test_growth_that_does_not_fit_names_the_limit(books: Ledger, bound: str) -> None:
    with pytest.raises(LedgerError, match=bound):
        books.grow("a", "cpu", growth_bytes(books, "a", "cpu", 700 * MIB))


def test_only_resident_models_grow() -> None:
    books = ledger().leave("a")
    with pytest.raises(LedgerError):
        books.grow("a", "cpu", 1)


GPU = "gpu-0"
RULES = Rules()


def idle(model: str, seconds: float, count: int = 100) -> ModelUse:
    return ModelUse(model, EvictionState.IDLE, {GPU: count}, seconds)


def scene(*models: ModelUse, foreign: int = 0, wanted: bool = False, total: int = 1000) -> PressureInput:
    ours = sum(item.bytes.get(GPU, 0) for item in models)
    return PressureInput((Use(GPU, total, ours, foreign),), models, (GPU,) if wanted else ())


def after(*scenes: PressureInput, rules: Rules = RULES) -> tuple[DevicePressures, tuple[Relief, ...]]:
    state: DevicePressures = {}
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
    models = (idle("old", 121, 40), idle("mid", 31, 130), idle("new", 1, 100))
    _, actions = after(scene(*models), scene(*models, foreign=foreign))
    assert leaving(actions) == expected


def test_below_critical_models_are_evicted_only_if_memory_is_needed() -> None:
    models = (idle("old", 500, 400), idle("mid", 400, 400))
    assert after(scene(*models), scene(*models))[1] == ()
    assert leaving(after(scene(*models), scene(*models), rules=Rules(eager=True))[1]) == {"old": True}
    assert leaving(after(scene(*models), scene(*models, wanted=True))[1]) == {"old": True}


def test_busy_model_is_evicted_when_idle_if_foreign_use_grew_since_its_load() -> None:
    then, now = ModelUse("a", EvictionState.BUSY, {GPU: 500}, 0.0), idle("a", 31, 500)
    assert leaving(after(scene(then), scene(then, foreign=320), scene(now, foreign=320))[1]) == {"a": True}
    assert after(scene(then, foreign=320), scene(now, foreign=320))[1] == (), "the use was the same at the load"


def test_only_as_many_models_are_evicted_as_needed() -> None:
    models = (idle("a", 300, 200), idle("b", 200, 200), idle("c", 150, 200), idle("d", 130, 200))
    assert leaving(after(scene(*models, wanted=True))[1]) == {"a": True}
    assert leaving(after(scene(*models, wanted=True, foreign=95))[1]) == {"a": True}


def test_warm_models_are_unloaded_first() -> None:
    models = (idle("loaded", 500, 400), ModelUse("warm", EvictionState.WARM, {GPU: 400}, 130))
    assert leaving(after(scene(*models, wanted=True))[1]) == {"warm": False}


@pytest.mark.parametrize("eviction_state", [item for item in EvictionState if item not in EVICTABLE])
def test_models_that_are_not_idle_stay_at_each_level(eviction_state: EvictionState) -> None:
    item = ModelUse("a", eviction_state, {GPU: 500}, 1000.0)
    assert leaving(after(scene(), scene(item, foreign=499))[1]) == {}


def test_model_on_two_devices_is_unloaded_once_if_one_is_critical() -> None:
    item = ModelUse("a", EvictionState.IDLE, {GPU: 100, "cpu": 100}, 500.0)
    for order in ((GPU, "cpu"), ("cpu", GPU)):
        full = {GPU: 850, "cpu": 550}
        uses = tuple(Use(device, 1000, 100, full[device]) for device in order)
        before = PressureInput(tuple(Use(device, 1000, 100, 0) for device in order), (item,))
        _, actions = after(before, PressureInput(uses, (item,)))
        assert leaving(actions) == {"a": False}


def test_idle_model_on_another_device_stays() -> None:
    item = ModelUse("a", EvictionState.IDLE, {"gpu-1": 100}, 500.0)
    scenes = PressureInput((Use(GPU, 1000, 0, 950), Use("gpu-1", 1000, 100, 0)), (item,))
    assert after(scenes)[1] == ()


def busy(model: str = "a", parallel: int = 16, limit: int | None = None) -> ModelUse:
    return ModelUse(model, EvictionState.BUSY, {GPU: 500}, 0.0, parallel, limit)


def test_restrictions_change_by_one_per_check() -> None:
    state, _ = step({}, scene(busy()), RULES)
    limit: int | None = None
    seen = []
    for foreign in (490, 490, 490, 490, 490, 490, 350, 250, 250, 250, 250, 250, 250):
        state, actions = step(state, scene(busy(limit=limit), foreign=foreign), RULES)
        limits = [action.sequences for action in actions if isinstance(action, LimitSequences)]
        limit = limits[0] if limits else limit
        forgot = any(isinstance(action, DropPrefixes) for action in actions)
        seen.append((state[GPU].restriction, limit, forgot))
    assert seen == [
        (Restriction.WARN, None, False),
        (Restriction.HALVE, 8, False),
        (Restriction.FORGET, 4, True),
        (Restriction.NO_EXTRAS, 2, True),
        (Restriction.NO_LOADS, 1, True),
        (Restriction.NO_LOADS, 1, True),
        (Restriction.NO_LOADS, 1, False),  # high: neither better nor worse
        (Restriction.NO_EXTRAS, 2, False),
        (Restriction.FORGET, 4, False),
        (Restriction.HALVE, 8, False),
        (Restriction.WARN, 16, False),
        (Restriction.NONE, 16, False),
        (Restriction.NONE, 16, False),
    ]


def test_restrictions_end_when_only_admitted_use_remains() -> None:
    model = ModelUse("a", EvictionState.FIXED, {GPU: 850}, 0.0, 4)
    state, _ = step({}, scene(model, foreign=40), RULES)
    for _ in range(3):
        state, _ = step(state, scene(model, foreign=140), RULES)
    assert state[GPU].restriction is Restriction.FORGET
    for _ in range(3):
        state, _ = step(state, scene(model, foreign=40), RULES)
    assert (state[GPU].restriction, state[GPU].gauge.level) == (Restriction.NONE, Level.HIGH)


def test_irregular_check_warns_at_most() -> None:
    state, _ = step({}, scene(busy()), RULES)
    for _ in range(3):
        state, actions = step(state, scene(busy(), foreign=490), RULES, regular=False)
    assert state[GPU].restriction is Restriction.WARN
    assert actions == ()
    state, _ = step(state, scene(busy()), RULES, regular=False)
    assert state[GPU].restriction is Restriction.WARN, "an irregular check does not remove a restriction"


def test_restrictions_reject_models_with_extras_and_then_all_models() -> None:
    state: DevicePressures = {}
    assert refusal(state, GPU, extras=True) is None
    refused = []
    for _ in range(5):
        state, _ = step(state, scene(foreign=990), RULES)
        refused.append((bool(refusal(state, GPU, extras=True)), bool(refusal(state, GPU, extras=False))))
    assert refused == [(False, False)] * 3 + [(True, False), (True, True)]
    assert "emergency" in str(refusal(state, GPU, extras=False))


def test_only_running_models_of_the_device_get_limits() -> None:
    models = (
        ModelUse("loading", EvictionState.LOADING, {GPU: 100}, 0.0, 8),
        ModelUse("leaving", EvictionState.LEAVING, {GPU: 100}, 0.0, 8),
        ModelUse("warm", EvictionState.WARM, {"cpu": 100, GPU: 0}, 0.0, 8),
        ModelUse("elsewhere", EvictionState.BUSY, {"gpu-1": 100}, 0.0, 8),
        ModelUse("here", EvictionState.BUSY, {GPU: 100}, 0.0, 8),
    )
    _, actions = after(scene(*models), *[scene(*models, foreign=690)] * 3)
    assert {action.model for action in actions} == {"here"}


def test_limit_of_a_model_on_a_lost_device_is_removed() -> None:
    _, actions = step({}, PressureInput((), (busy(limit=4),)), RULES)
    assert actions == (LimitSequences("a", 16, "no restrictions"),)


def test_disabled_governor_computes_levels_without_acting() -> None:
    off = Rules(enabled=False)
    models = (idle("a", 500, 100), busy("b", 4))
    state, actions = after(*[scene(*models, foreign=399)] * 4, rules=off)
    assert (state[GPU].gauge.level, state[GPU].restriction, actions) == (Level.HIGH, Restriction.NONE, ())
    state, _ = after(scene(), *[scene(*models, foreign=395)] * 4)
    state, actions = step(state, scene(idle("a", 500, 100), busy("b", 4, 2), foreign=395), off)
    assert actions == (LimitSequences("b", 4, f"{GPU}: no restrictions"),)


NOW = 100.0
KINDS = (EvictionState.WARM, EvictionState.IDLE, EvictionState.YOUNG, EvictionState.BUSY, EvictionState.FIXED)


def books(*models: tuple[str, EvictionState, dict[str, int]], limit: int | None = None) -> tuple[Limits, list[Held]]:
    """Two devices and a host of 1,000 bytes each, and the holdings of models."""
    ledger = Ledger(limit_bytes=limit)
    for device in ("gpu-0", "gpu-1", "cpu"):
        ledger = ledger.open(Account(device, 1000, 1000))
    held = []
    for name, eviction_state, need in models:
        ledger = ledger.reserve(name, name, need).commit(name, need)
        if eviction_state is EvictionState.WARM:
            ledger = ledger.set_exempt(name)
        if eviction_state is EvictionState.LEAVING:
            ledger = ledger.leave(name)
        held.append(Held(name, name, eviction_state, need, NOW - 10, 1.0))
    return Limits(ledger, Policy(NOW)), held


def lowered(before: Limits, *accounts: Account, limit: int | None = None, policy: Policy | None = None) -> Limits:
    """Other limits for the same holdings."""
    ledger = before.ledger
    for account in accounts:
        ledger = ledger.open(account)
    return Limits(replace(ledger, limit_bytes=limit or ledger.limit_bytes), policy or before.policy)


def names(before: Limits, now: Limits, held: list[Held]) -> list[str]:
    return sorted(item.model for item in surplus(before, now, held).evicted)


def test_models_stay_while_no_limit_is_lowered() -> None:
    """Use above an unchanged or raised limit, and new devices, are handled elsewhere."""
    before, held = books(("a", EvictionState.IDLE, {"gpu-0": 600}), limit=1000)
    over = Limits(before.ledger.observe("gpu-0", 1500, 0), before.policy)
    assert surplus(over, over, held).evicted == ()
    assert names(over, lowered(over, Account("gpu-0", 1100, 1100), limit=1100), held) == []
    fresh = Limits(Ledger().open(Account("cpu", 1000, 1000)), before.policy)
    assert names(fresh, lowered(before, limit=None), held) == []


def test_idle_models_are_evicted_before_busy_ones_and_pinned_ones_last() -> None:
    sizes = {kind: 20 * (place + 1) for place, kind in enumerate(KINDS)}
    before, held = books(*((str(kind), kind, {"cpu": size}) for kind, size in reversed(sizes.items())))
    gone: list[EvictionState] = []
    for kind in KINDS:
        gone.append(kind)
        left = sum(size for other, size in sizes.items() if other not in gone)
        assert names(before, lowered(before, Account("cpu", 1000, left)), held) == sorted(map(str, gone))


def test_limit_on_loaded_models_does_not_affect_warm_ones() -> None:
    before, held = books(("a", EvictionState.IDLE, {"gpu-0": 400}), ("b", EvictionState.WARM, {"cpu": 300}))
    found = surplus(before, lowered(before, limit=500), held)
    assert (found.evicted, found.reasons) == ((), ())
    found = surplus(before, lowered(before, limit=399), held)
    assert [item.model for item in found.evicted] == ["a"]
    assert found.reasons == ("loaded models hold 1 B more than the new INFERENCE_MEMORY_LIMIT_GB",)


def test_warm_copy_of_a_wanted_model_releases_nothing_of_a_limit_on_loaded_models() -> None:
    before, held = books(("pinned", EvictionState.FIXED, {"gpu-0": 400}), ("wanted", EvictionState.WARM, {"cpu": 300}))
    held[1] = replace(held[1], eviction_state=EvictionState.BUSY, is_warm_copy=True)
    found = surplus(before, lowered(before, limit=300), held)
    assert [item.model for item in found.evicted] == ["pinned"]


def test_model_that_is_being_unloaded_counts_as_unloaded() -> None:
    before, held = books(("a", EvictionState.LEAVING, {"gpu-0": 400}), ("b", EvictionState.IDLE, {"gpu-0": 400}))
    assert names(before, lowered(before, Account("gpu-0", 1000, 400)), held) == []


def test_lowered_limits_on_the_number_of_models_evict() -> None:
    """In total and per device; a warm model is not loaded."""
    before, held = books(
        ("a", EvictionState.IDLE, {"gpu-0": 10}),
        ("b", EvictionState.IDLE, {"gpu-0": 400}),
        ("c", EvictionState.BUSY, {"gpu-1": 10}),
        ("d", EvictionState.WARM, {"cpu": 1}),
    )
    assert names(before, lowered(before, policy=Policy(NOW, max_models=2)), held) == ["a"]
    assert names(before, lowered(before, policy=Policy(NOW, max_models=3)), held) == []
    assert names(before, lowered(before, policy=Policy(NOW, max_models_per_device=1)), held) == ["a"]


def test_foreign_use_reduces_a_lowered_device_limit() -> None:
    """Foreign use is 300: of a limit of 600 models may use 300, and of 200 nothing."""
    before, held = books(("a", EvictionState.IDLE, {"gpu-0": 100}), ("b", EvictionState.BUSY, {"gpu-0": 300}))
    before = Limits(before.ledger.observe("gpu-0", 700, 300), before.policy)
    assert names(before, lowered(before, Account("gpu-0", 600, 600)), held) == ["a"]
    assert names(before, lowered(before, Account("gpu-0", 200, 200)), held) == ["a", "b"]


models = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 80), st.integers(0, 80), st.integers(0, 80)), max_size=8
)


@given(models, st.integers(0, 300), st.integers(0, 300), st.integers(1, 600))
def test_lowered_limits_hold_without_needless_evictions(
    drawn: list[tuple[EvictionState, int, int, int]], on_gpu: int, on_host: int, limit: int
) -> None:
    """All lowered limits hold afterwards, and would not hold with any one of the leaving models."""
    described = [
        (f"m{at}", kind, {"cpu": host} if kind is EvictionState.WARM else {"gpu-0": gpu, "gpu-1": other, "cpu": host})
        for at, (kind, gpu, other, host) in enumerate(drawn)
    ]
    before, held = books(*described)
    now = lowered(before, Account("gpu-0", 1000, on_gpu), Account("cpu", 1000, on_host), limit=limit)
    gone = [item.holding for item in surplus(before, now, held).evicted]

    def holds(without: list[str]) -> bool:
        after = now.ledger.without(without)
        return not after.excess("gpu-0") and not after.excess("cpu") and after.loaded_bytes <= limit

    assert holds(gone)
    assert all(not holds([other for other in gone if other != name]) for name in gone)


def test_exempt_memory_counts_on_its_device_and_not_for_the_limit() -> None:
    ledger = Ledger(limit_bytes=100).open(Account("cpu", 1000, 500)).reserve("a", "a", {"cpu": 100})
    assert ledger.lacks({"cpu": 1})
    exempt = ledger.set_exempt("a")
    assert (exempt.loaded_bytes, exempt.balance("cpu").ours_bytes, exempt.lacks({"cpu": 100})) == (0, 100, ())
    both = exempt.reserve("b", "b", {"cpu": 400}, exempt=True)
    assert both.holdings["b"].exempt
    assert both.commit("b", {"cpu": 300}).leave("b").holdings["b"].phase is Phase.RELEASING
    assert both.lacks({"cpu": 1}, exempt=True)
    back = exempt.reserve("c", "c", {"cpu": 60}).set_exempt("a", exempt=False)
    assert (back.loaded_bytes, back.spare_altogether) == (160, -60)


@pytest.mark.parametrize("exempt", [True, False])
def test_growth_of_exempt_memory_is_bounded_by_the_device_only(exempt: bool) -> None:
    ledger = Ledger(limit_bytes=100).open(Account("cpu", 1000, 500)).reserve("a", "a", {"cpu": 90}, exempt=exempt)
    assert bool(ledger.lacks({"cpu": 20}, exempt=exempt)) is not exempt


TOTAL = 1000 * MIB
FULL = Use("gpu-0", TOTAL, 330 * MIB, 600 * MIB)
foreign_use = partial(
    foreign_use_alert, "gpu-0", peak_bytes=450 * MIB, budget_bytes=900 * MIB, total_bytes=TOTAL, bounds=Bounds()
)
swapping = partial(
    swapping_alert, ("a", "b"), count=SWAPS, residency_seconds=5.0, fix={"parallel": 1, "context_length": 512}
)
outgrown = partial(outgrown_alert, "a", 100 * MIB + 1, 64 * MIB)


def changes(alert: Alert | None) -> tuple[Kind, dict[str, str]]:
    assert alert is not None
    assert alert.message
    return alert.kind, {change.setting: change.value for change in alert.changes}


def test_pressure_alert_has_its_numbers() -> None:
    assert changes(pressure_alert(FULL, Level.CRITICAL, Restriction.NONE)) == (Kind.PRESSURE, {})
    alert = pressure_alert(FULL, Level.HIGH, Restriction.HALVE)
    assert alert is not None
    assert alert.message.endswith("600.0 MiB of it by other programs; 1/2 of the sequences are admitted at a time")
    assert pressure_alert(FULL, Level.HIGH, Restriction.NONE) is None


def test_limit_recommended_for_foreign_use_is_sufficient() -> None:
    assert changes(foreign_use()) == (Kind.FOREIGN_USE, {"INFERENCE_GPU_MEMORY_LIMIT_MB": "430"})
    assert foreign_use(budget_bytes=430 * MIB) is None
    assert changes(foreign_use(host=True)) == (Kind.FOREIGN_USE, {"INFERENCE_CPU_MEMORY_MAX_PERCENT": "0.43"})
    assert foreign_use(host=True, budget_bytes=430 * MIB) is None


@pytest.mark.parametrize("host", [False, True])
def test_no_setting_is_recommended_if_foreign_use_fills_a_device(host: bool) -> None:
    assert changes(foreign_use(peak_bytes=950 * MIB, host=host)) == (Kind.FOREIGN_USE, {})


def test_settings_for_swapping_models_make_them_fit_or_stay() -> None:
    fix = {"models.b.parallel": "1", "models.b.context_length": "512"}
    assert changes(swapping()) == (Kind.THRASH, fix)
    stay = {f"models.{name}.min_residency": f"{RESIDENCY_SECONDS}s" for name in ("a", "b")}
    assert changes(swapping(fix={})) == (Kind.THRASH, stay)
    assert swapping(fix={}, residency_seconds=RESIDENCY_SECONDS) is None
    assert swapping(count=SWAPS - 1) is None


def test_recommended_overhead_covers_the_growth() -> None:
    assert changes(outgrown()) == (Kind.OUTGROWN, {"models.a.memory_overhead": "165MiB"})
    assert changes(outgrown(configured_bytes=100 * MIB))[0] is Kind.OUTGROWN
    assert outgrown(configured_bytes=165 * MIB) is None
    assert changes(outgrown_alert("a", 100 * MIB, None)) == (Kind.OUTGROWN, {})


def test_recommended_queue_would_have_held_all_rejected_requests() -> None:
    assert changes(queue_alert("normal", 50, REJECTIONS)) == (Kind.QUEUE_FULL, {"INFERENCE_QUEUE_NORMAL": "55"})
    assert queue_alert("normal", 50, REJECTIONS - 1) is None


def test_alert_is_encoded_as_json() -> None:
    alert = queue_alert("normal", 50, REJECTIONS)
    assert alert is not None
    assert alert.to_json() == {"kind": "queue_full", "subject": alert.subject, "message": alert.message}
    about = {"kind": "queue_full", "subject": alert.subject}
    assert alert.recommendations() == [{**about, "setting": "INFERENCE_QUEUE_NORMAL", "value": "55"}]
    alert = pressure_alert(FULL, Level.CRITICAL, Restriction.NONE)
    assert alert is not None
    assert alert.recommendations() == []


def test_swaps_count_evictions_of_two_models_for_each_other() -> None:
    assert swaps([]) is None
    assert swaps([("a", "b"), ("a", "b"), ("c", "a")]) is None
    assert swaps([("a", "b"), ("b", "a"), ("a", "b"), ("c", "a"), ("a", "c")]) == (("a", "b"), 3)
