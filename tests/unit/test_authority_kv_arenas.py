"""Budgets for stored sequences: how they are divided, when they shrink and grow, and when arenas end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from inference.authority import events
from inference.authority.lifecycle import Action, Reason
from inference.authority.views import kv_figures
from inference.protocol import ExitCause, ModelState
from inference.worker_link import Grant, Heartbeat, KvCounts
from tests.rigs.authority_world import configuration
from tests.rigs.step_world import MIB, StepWorld, begin

S = ModelState
GPU = ("gpu-0",)
WHOLE = 192
"""MiB: a tenth of the half of 4,000 MiB, in steps of 16 MiB."""
HALF = WHOLE // 2


def budget(world: StepWorld, name: str) -> int | None:
    """The budget in the ledger in MiB; None without an arena."""
    cache = world.state.ledger.caches.get(name)
    return None if cache is None else cache.bytes["cpu"] // MIB


def granted(world: StepWorld, name: str) -> int:
    """What the worker may store, in MiB."""
    return world.alive[world.model(name).worker or ""].kv_bytes // MIB


def store(world: StepWorld, name: str, count: int) -> None:
    """The worker of a model stores that many MiB, and the host is read."""
    world.store(world.model(name).worker or "", count * MIB)
    world.live(0.5)


def change(world: StepWorld, models: dict[str, dict[str, Any]], **settings: Any) -> None:
    found = {name: {"parallel": 1, "min_residency": 0, **keys} for name, keys in models.items()}
    world.change(configuration(found, **settings))
    world.live(1)


def test_models_with_sequences_on_disk_only_have_figures() -> None:
    world = begin({"a": {}, "b": {}})
    counts = KvCounts(disk_sequences=2, disk_tokens=9, disk_bytes=3 * MIB)
    state = replace(world.state, models={**world.state.models, "a": replace(world.model("a"), kv_counts=counts)})
    found = kv_figures.kv(state)
    assert [one["model_name"] for one in found["models"]] == ["a"]
    assert {name: found["total"]["tiers"]["disk"][name] for name in ("sequences", "tokens", "mb")} == {
        "sequences": 2, "tokens": 9, "mb": 3.0,
    }  # fmt: skip


def test_loaded_models_get_equal_budgets_at_once() -> None:
    world = begin({"a": {}, "b": {}, "c": {}})
    world.used("a")
    assert (budget(world, "a"), granted(world, "a")) == (HALF, HALF)
    world.used("b")
    assert [granted(world, name) for name in "ab"] == [HALF, HALF]
    world.used("c")
    assert [granted(world, name) for name in "abc"] == [WHOLE // 3] * 3
    assert world.state.ledger.balance("cpu").cached_bytes == WHOLE * MIB
    order = world.alive[world.model("c").worker or ""].order
    assert isinstance(order, Grant)
    assert order.kv.ram_bytes == WHOLE // 3 * MIB


def test_only_model_gets_the_whole_budget() -> None:
    world = begin({"a": {}}, kv_ram_gb=1.0)
    world.used("a")
    assert granted(world, "a") == 1024


def test_stored_sequences_survive_the_worker_and_their_size_is_booked() -> None:
    world = begin({"a": {}, "b": {}})
    world.used("a")
    store(world, "a", 40)
    world.store(world.model("a").worker or "", 10 * MIB)
    world.end(world.model("a").worker or "", ExitCause.KILLED)
    assert (world.model("a").state, budget(world, "a")) == (S.FAILED, 50)
    world.live(30)
    world.used("a")
    assert (world.arenas["a"], granted(world, "a")) == (50 * MIB, HALF)


def test_arena_without_sequences_ends_with_its_worker() -> None:
    world = begin({"a": {"warm": False}})
    world.used("a")
    world.command(events.Unload("a"))
    world.live(2)
    assert budget(world, "a") is None
    assert not world.state.ledger.holdings


def test_sequences_that_a_worker_stores_before_it_ends_are_kept() -> None:
    """Until then its arena may be empty."""
    world = begin({"a": {"warm": False}})
    world.stored_at_stop = 7 * MIB
    world.used("a")
    world.command(events.Unload("a"))
    assert (world.model("a").state, budget(world, "a")) == (S.UNLOADING, WHOLE)
    world.live(2)
    assert (world.model("a").state, budget(world, "a")) == (S.COLD, 7)


def test_load_takes_the_memory_of_stored_sequences_at_once() -> None:
    """Budgets grow again at a regular check after the model has left."""
    world = begin({"a": {}, "b": {"warm": False}}, {"a": 200, "b": 1600}, kv_ram_gb=1.5)
    world.used("a")
    assert granted(world, "a") == 768
    store(world, "a", 700)
    lease = world.leased("b")
    assert (world.model("b").state, world.model("a").state) == (S.BUSY, S.READY)
    assert sum(granted(world, name) for name in "ab") <= 2000 - 1800
    assert world.arenas["a"] == granted(world, "a") * MIB
    assert f"a may keep {granted(world, 'a'):.1f} MiB of its 700.0 MiB of stored sequences in host memory" in world.log
    world.finish(lease)
    world.command(events.Unload("b"))
    world.live(1)
    assert granted(world, "a") < 100
    world.live(15)
    assert granted(world, "a") == 768


def test_stored_sequences_of_the_least_recently_used_model_are_dropped_first() -> None:
    world = begin({name: {"warm": False} for name in "abc"})
    for name in "ab":
        world.used(name)
        store(world, name, 60)
        world.command(events.Unload(name))
        world.live(1)
    assert (budget(world, "a"), budget(world, "b")) == (60, 60)
    world.used("c")
    assert (budget(world, "a"), budget(world, "b")) == (None, 60)
    assert world.arenas.keys() == {"b"}
    assert (
        "60.0 MiB of stored sequences of a are dropped: those of all models may take 192.0 MiB of host memory"
        in world.log
    )


def test_use_by_other_programs_takes_the_memory_of_stored_sequences() -> None:
    world = begin({"a": {}, "b": {}}, kv_ram_gb=1.5)
    world.used("a")
    store(world, "a", 500)
    assert world.state.ledger.balance("cpu").foreign_bytes == 0
    world.foreign_mib("cpu", 3000)
    assert (granted(world, "a"), world.arenas["a"]) == (0, 0)
    assert world.state.ledger.balance("cpu").shortfall_bytes == 0
    assert world.model("a").state is S.READY


def test_removed_model_loses_its_arena() -> None:
    world = begin({"a": {}, "b": {}})
    world.used("a")
    store(world, "a", 60)
    change(world, {"b": {}})
    assert "a" not in world.state.models
    assert not world.arenas
    assert "60.0 MiB of stored sequences of a are dropped: the model was removed" in world.log


def test_disabled_storage_of_sequences_books_and_grants_nothing() -> None:
    world = begin({"a": {}}, kv_enabled=False)
    world.used("a")
    assert (budget(world, "a"), world.alive[world.model("a").worker or ""].has_arena) == (None, False)


def test_reload_that_ends_or_resizes_budgets_applies_at_once() -> None:
    world = begin({"a": {}, "b": {"warm": False}})
    world.used("b", "a")
    store(world, "b", 50)
    world.command(events.Unload("b"))
    world.live(1)
    change(world, {"a": {}, "b": {}}, kv_ram_gb=0.0625)
    assert (granted(world, "a"), budget(world, "b")) == (32, None)
    change(world, {"a": {}, "b": {}}, kv_enabled=False)
    assert (granted(world, "a"), world.arenas["a"]) == (0, 0)
    change(world, {"a": {}, "b": {}}, kv_ram_gb=0.125)
    assert granted(world, "a") == 64


def test_warm_model_of_the_cpu_keeps_its_sequences_until_their_limit_is_lowered() -> None:
    world = begin({"a": {}, "b": {}})
    world.used("a")
    store(world, "a", 80)
    world.command(events.Offload("a"))
    world.live(2)
    assert (world.model("a").state, budget(world, "a")) == (S.WARM, 80)
    world.used("b")
    assert (budget(world, "a"), granted(world, "b")) == (80, HALF)
    change(world, {"a": {}, "b": {}}, kv_ram_gb=0.0625)
    assert (budget(world, "a"), world.arenas["a"]) == (None, 0)
    world.used("a")
    assert (granted(world, "a"), budget(world, "a")) == (32, 32)


def test_dropped_arena_of_a_process_that_holds_the_file_is_used_again_after_the_restoration() -> None:
    world = begin({"a": {}, "b": {}}, gpus=GPU)
    world.used("a")
    store(world, "a", 80)
    world.command(events.Offload("a"))
    world.live(2)
    assert (world.model("a").state, budget(world, "a")) == (S.WARM, 80)
    change(world, {"a": {}, "b": {}}, kv_ram_gb=0.0)
    assert (budget(world, "a"), world.arenas["a"]) == (None, 0)
    change(world, {"a": {}, "b": {}}, kv_ram_gb=0.0625)
    world.used("a")
    assert (world.state.restorations, granted(world, "a"), budget(world, "a")) == (1, 32, 32)


def test_suspended_model_leaves_when_its_stored_sequences_do_not_fit() -> None:
    """Its process cannot remove sequences."""
    world = begin({"a": {}, "b": {}}, gpus=GPU, warm_checkpoint="auto")
    world.send(events.SuspensionTested("cuda", None))
    world.used("a")
    store(world, "a", 80)
    world.command(events.Offload("a"))
    world.live(2)
    assert (world.model("a").state, budget(world, "a")) == (S.WARM, 80)
    change(world, {"a": {}, "b": {}}, kv_ram_gb=0.0625)
    assert (world.model("a").state, budget(world, "a"), world.arenas["a"]) == (S.COLD, None, 0)
    record = world.state.evictions[-1]
    assert (record.reason, record.action) == (Reason.MEMORY_WANTED, Action.UNLOAD)
    assert record.explanation == ("its process holds 80.0 MiB of stored sequences",)


@pytest.mark.parametrize("state", [S.LOADING, S.RESTORING])
def test_worker_that_is_loading_gets_a_smaller_budget_when_it_is_ready(state: ModelState) -> None:
    world = begin({"a": {}, "b": {}})
    if state is S.RESTORING:
        world.used("a")
        world.command(events.Offload("a"))
        world.live(2)
    ticket = world.want("a")
    world.arrive(events.Loaded)
    assert (world.model("a").state, granted(world, "a")) == (state, HALF)
    world.change(configuration({name: {"parallel": 1} for name in "ab"}, kv_ram_gb=0.0625))
    assert (budget(world, "a"), granted(world, "a")) == (32, HALF)
    world.live(1)
    assert ticket in world.grants
    assert granted(world, "a") == 32


def test_pages_of_an_arena_are_not_growth_of_its_worker() -> None:
    """The measured memory of workers comes without their arenas; what they store is not foreign either."""
    world = begin({"a": {}}, kv_ram_gb=1.0)
    world.used("a")
    store(world, "a", 900)
    world.live(5)
    assert world.state.ledger.balance("cpu").foreign_bytes == 0
    assert world.state.ledger.balance("cpu").resident_bytes == 200 * MIB
    assert not any("more than reserved" in line for line in world.log)


# --- counters --------------------------------------------------------------------------------------------------------
def report(world: StepWorld, **counts: Any) -> None:
    """The worker of `a` sends a heartbeat."""
    beat = Heartbeat(None, 0, 0, 0, 0, 0, kv=KvCounts(**counts))
    world.send(events.Progressed(world.model("a").worker or "", 1.0, beat))


def test_counters_of_a_model_go_on_when_those_of_its_worker_begin_again() -> None:
    """Sizes are those of the last report. A worker in standby reports zeros, which is no restart."""
    world = begin({"a": {}})
    world.used("a")
    report(world, ram_sequences=4, hits_hot=3, misses=1, saved_bytes=100)
    report(world, ram_sequences=2, hits_hot=5, misses=1, saved_bytes=150)
    report(world)
    assert world.model("a").kv_counts == KvCounts(ram_sequences=2, hits_hot=5, misses=1, saved_bytes=150)
    report(world, ram_sequences=3, hits_hot=2, misses=0, saved_bytes=160)
    assert world.model("a").kv_counts == KvCounts(ram_sequences=3, hits_hot=7, misses=1, saved_bytes=160)
    world.end(world.model("a").worker or "", ExitCause.KILLED)
    world.live(30)
    world.used("a")
    report(world, ram_sequences=1, hits_hot=1)
    assert world.model("a").kv_counts == KvCounts(ram_sequences=1, hits_hot=8, misses=1, saved_bytes=160)
