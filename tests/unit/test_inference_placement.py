"""Cost of eviction, shares of threads, reductions, and the ledger."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.authority.handlers.running.thread_shares import shares
from inference.authority.placement.ledger import Account, Ledger, LedgerError
from inference.authority.placement.plan import EvictionState, Held, Option, Placement, Policy, Request, plan
from inference.authority.placement.smaller_settings import (
    MIN_REDUCED_CONTEXT,
    MIN_UBATCH,
    REST_SECONDS,
    Reduction,
    Step,
    next_step,
    smaller_context,
    smaller_ubatch,
    steps_of,
)
from inference.authority.retention import HOST, EvictedModel, Warm, displaced, kept_of

NOW = 10_000.0
SIZE = 500
Look = tuple[float, float]
"""Seconds to restore the model, and seconds since its last use."""

CHOICES = [
    ((5.0, 0.0), (1.0, 0.0), "b"),  # slower to restore: stays
    ((1.0, 0.0), (5.0, 0.0), "a"),
    ((1.0, 600.0), (1.0, 30.0), "a"),  # longer idle: leaves
    ((1.0, 30.0), (1.0, 600.0), "b"),
    ((7.0, 300.0), (1.0, 0.0), "b"),  # seven times as slow, but worth a sixth after five minutes
    ((5.0, 300.0), (1.0, 0.0), "a"),
]


def evicted(looks: Sequence[Look]) -> tuple[str, ...]:
    """The model that leaves for another one of the same size, on a full device."""
    ledger, held = Ledger().open(Account("gpu-0", SIZE * len(looks), SIZE * len(looks))), []
    for name, (seconds, idle) in zip("abc", looks, strict=False):
        need = {"gpu-0": SIZE}
        ledger = ledger.reserve(name, name, need).commit(name, need)
        held.append(Held(name, name, EvictionState.IDLE, need, NOW - idle, seconds))
    decision = plan(Request("new", (Option("gpu-0", {"gpu-0": SIZE}),)), ledger, held, Policy(NOW))
    assert isinstance(decision, Placement)
    return decision.evict


def warm(name: str, look: Look) -> Warm:
    seconds, idle = look
    return Warm(name, SIZE, seconds, NOW - idle)


@pytest.mark.parametrize(("a", "b", "goes"), CHOICES)
def test_loaded_model_that_is_cheaper_to_restore_is_evicted(a: Look, b: Look, goes: str) -> None:
    assert evicted((a, b)) == (goes,)


@pytest.mark.parametrize(("a", "b", "goes"), CHOICES)
def test_warm_model_that_is_cheaper_to_restore_is_dropped(a: Look, b: Look, goes: str) -> None:
    assert displaced(warm("new", (100.0, 0.0)), [warm("a", a), warm("b", b)], SIZE, NOW) == (goes,)


@pytest.mark.parametrize(("a", "b", "goes"), CHOICES)
def test_evicted_model_that_is_more_expensive_to_restore_is_kept_warm(a: Look, b: Look, goes: str) -> None:
    """The host has memory for one."""
    ledger = Ledger().open(Account("gpu-0", 2 * SIZE, 2 * SIZE)).open(Account(HOST, SIZE, SIZE))
    evicted = []
    for name, look in (("a", a), ("b", b)):
        ledger = ledger.reserve(name, name, {"gpu-0": SIZE})
        evicted.append(EvictedModel(name, name, warm(name, look)))
    assert kept_of(evicted, {"gpu-0": 2 * SIZE}, ledger, NOW) == {"a", "b"} - {goes}


def test_warm_model_is_not_dropped_for_one_that_loads_faster() -> None:
    kept = [warm("a", (2.0, 0.0))]
    assert displaced(warm("new", (3.0, 0.0)), kept, SIZE, NOW) == ("a",)
    assert displaced(warm("new", (1.0, 0.0)), kept, SIZE, NOW) is None


@pytest.mark.parametrize(
    ("eviction_state", "seconds", "idle", "cost"),
    [
        (EvictionState.IDLE, 2.0, 0.0, 2_000.0),
        (EvictionState.IDLE, 2.0, 60.0, 1_000.0),
        (EvictionState.IDLE, 2.0, 540.0, 200.0),
        (EvictionState.IDLE, 0.0, 0.0, 10.0),
        (EvictionState.IDLE, 2.0, -5.0, 2_000.0),
        (EvictionState.WARM, 2.0, 60.0, 1e-9),
    ],
)
def test_cost_of_eviction_follows_from_size_reload_time_and_idle_time(
    eviction_state: EvictionState, seconds: float, idle: float, cost: float
) -> None:
    """Of 1,000 bytes; halved after a minute of idle time."""
    held = Held("a", "a", eviction_state, {"gpu-0": 600, "cpu": 400}, NOW - idle, seconds)
    assert held.cost(NOW) == pytest.approx(cost)
    if eviction_state is EvictionState.IDLE:
        assert Warm("a", 1000, seconds, NOW - idle).worth(NOW) == pytest.approx(cost)


ALL_STEPS = steps_of(("cleanup", "reduce", "cpu"))


@pytest.mark.parametrize(
    ("policy", "steps"),
    [
        ((), []),
        (("cleanup", "reduce", "cpu"), [Step.CLEAN, Step.UBATCH, Step.CONTEXT, Step.CPU]),
        (("reduce",), [Step.UBATCH, Step.CONTEXT]),
        (("cleanup", "cpu"), [Step.CLEAN, Step.CPU]),
    ],
)
def test_steps_of_a_policy_are_taken_once_in_order(policy: tuple[str, ...], steps: list[Step]) -> None:
    reduction = Reduction()
    taken = []
    for _ in steps:
        reduction, step = next_step(reduction, steps_of(policy), 10.0)
        taken.append(step)
    assert taken == steps
    assert next_step(reduction, steps_of(policy), 20.0) == (reduction, None)


@given(st.sets(st.sampled_from(Step)), st.lists(st.sets(st.sampled_from(Step)), min_size=5, max_size=5))
def test_no_step_is_repeated_or_taken_after_a_later_one(allowed: set[Step], left_out: list[set[Step]]) -> None:
    """Whatever is left out at each time; a step that was left out is not taken later."""
    steps = [step for step in ALL_STEPS if step in allowed]
    reduction, taken = Reduction(), []
    for without in left_out:
        reduction, step = next_step(reduction, steps, 0.0, without)
        if step is not None:
            assert step not in without
            taken.append(step)
    places = [steps.index(step) for step in taken]
    assert places == sorted({*places})


def test_failure_while_computing_skips_cleaning() -> None:
    """The same sizes would fail again."""
    _, step = next_step(Reduction(), ALL_STEPS, 0.0, without=(Step.CLEAN,))
    assert step is Step.UBATCH


def test_each_step_restarts_the_rest() -> None:
    reduction, _ = next_step(Reduction(), ALL_STEPS, 5.0)
    reduction, _ = next_step(reduction, ALL_STEPS, 9.0)
    assert reduction.rest(10.0) == REST_SECONDS - 1
    assert reduction.rested(10.0) is reduction
    assert reduction.rest(9.0 + REST_SECONDS) == 0
    assert reduction.rested(9.0 + REST_SECONDS) == Reduction()


def test_sizes_have_a_minimum() -> None:
    """A quarter of the batch, half of the context; None below the minimum."""
    assert [smaller_ubatch(count) for count in (512, 64, MIN_UBATCH, 1)] == [128, MIN_UBATCH, None, None]
    assert [smaller_context(count) for count in (4096, 300, MIN_REDUCED_CONTEXT)] == [
        2048,
        MIN_REDUCED_CONTEXT,
        None,
    ]


def test_models_share_the_cores() -> None:
    assert shares(4, {"a": None}) == {"a": 4}
    assert shares(5, {"a": None, "b": None}) == {"a": 3, "b": 2}
    assert shares(4, {}) == {}


def test_configured_threads_are_kept_and_the_rest_is_shared() -> None:
    assert shares(4, {"a": 3, "b": None}) == {"a": 3, "b": 1}
    assert shares(4, {"a": 9, "b": None, "c": None}) == {"a": 9, "b": 1, "c": 1}


@given(st.integers(1, 256), st.dictionaries(st.text(max_size=3), st.none() | st.integers(1, 64), max_size=12))
def test_cores_are_not_assigned_twice_while_there_are_enough(cores: int, busy: dict[str, int | None]) -> None:
    found = shares(cores, busy)
    assert found.keys() == busy.keys()
    free = {name: found[name] for name, count in busy.items() if count is None}
    assert all(found[name] == count for name, count in busy.items() if count is not None)
    left = cores - sum(count for count in busy.values() if count is not None)
    if free:
        assert min(free.values()) >= 1
        assert max(free.values()) - min(free.values()) <= 1
        assert sum(free.values()) == max(left, len(free))


def test_holding_shrinks_to_a_part_of_itself_only() -> None:
    ledger = Ledger().open(Account("gpu-0", 100, 100)).open(Account("cpu", 100, 100))
    ledger = ledger.reserve("a", "a", {"gpu-0": 60, "cpu": 10}).commit("a", {"gpu-0": 60, "cpu": 10})
    with pytest.raises(LedgerError, match="a cannot shrink to more than it holds"):
        ledger.shrink("a", {"cpu": 11})
    left = ledger.shrink("a", {"cpu": 10})
    assert (left.balance("gpu-0").resident_bytes, left.balance("cpu").resident_bytes) == (0, 10)


def test_part_is_absorbed_by_the_holding_of_the_same_owner() -> None:
    ledger = Ledger().open(Account("gpu-0", 100, 100)).open(Account("cpu", 100, 100))
    for id, owner, need in (
        ("a", "a", {"gpu-0": 60}),
        ("a-part", "a", {"gpu-0": 5, "cpu": 10}),
        ("b", "b", {"cpu": 1}),
    ):
        ledger = ledger.reserve(id, owner, need).commit(id, need)
    whole = ledger.absorb("a", "a-part")
    assert dict(whole.holdings["a"].bytes) == {"gpu-0": 65, "cpu": 10}
    assert "a-part" not in whole.holdings
    for other in ("a", "b"):
        with pytest.raises(LedgerError, match=f"{other} cannot become a part of a"):
            ledger.absorb("a", other)


MIB = 2**20


def books() -> Ledger:
    ledger = Ledger(limit_bytes=5000 * MIB)
    for name in ("gpu-0", "gpu-1", "cpu"):
        ledger = ledger.open(Account(name, 1000 * MIB, 1000 * MIB))
    ledger = ledger.reserve("a#1", "a", {"gpu-0": 100 * MIB, "cpu": 10 * MIB})
    ledger = ledger.reserve("b#2", "b", {"gpu-0": 200 * MIB, "gpu-1": 300 * MIB}).leave("b#2")
    return ledger.observe("gpu-0", 700 * MIB, 300 * MIB)


def test_write_off_removes_all_bytes_on_the_lost_device() -> None:
    ledger = books().write_off("gpu-0")
    balance = ledger.balance("gpu-0")
    assert (balance.ours_bytes, balance.foreign_bytes, balance.free_bytes) == (0, 0, 1000 * MIB)
    assert ledger.balance("gpu-1").releasing_bytes == 300 * MIB
    assert ledger.balance("cpu").reserved_bytes == 10 * MIB
    assert ledger.owned_by("a") == {"cpu": 10 * MIB}
    assert ledger.write_off("gpu-0") == ledger


def test_rest_after_a_write_off_is_released_once() -> None:
    ledger = books().write_off("gpu-0").release("a#1").forfeit("b#2")
    assert not ledger.holdings
    assert ledger.balance("gpu-0").free_bytes == 1000 * MIB
    assert ledger.balance("gpu-1").foreign_bytes == 300 * MIB


def test_shared_host_memory_is_not_written_off() -> None:
    ledger = Ledger().open(Account("cpu", 1000, 1000)).share("gpu-0", "cpu").reserve("a#1", "a", {"gpu-0": 400})
    assert ledger.write_off("gpu-0") == ledger
