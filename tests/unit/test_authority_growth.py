"""Growth of models on accelerators is booked to the model that grew, and evicts no other model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from inference.authority import events
from inference.authority.handlers.watching import advisor
from inference.authority.lifecycle import Reason
from inference.authority.placement.device_growth import (
    SLACK_BYTES,
    Evidence,
    Mark,
    Occupant,
    attribute,
    forfeited,
    plausible_bytes,
    slack_bytes,
    tolerated_bytes,
)
from inference.authority.pressure.advice import Kind
from inference.authority.pressure.levels import FOREIGN_TOLERANCE
from inference.authority.views import model_status
from inference.devices.device import CPU
from inference.protocol import ExitCause, ModelState
from tests.rigs import step_world
from tests.rigs.authority_world import OVERHEAD_BYTES, configuration
from tests.rigs.step_world import MIB, StepWorld

GIB = 1024
CARD = "gpu-0"
SIZES = {"big": 16 * GIB, "small": 3 * GIB}
begin = partial(step_world.begin, gpus=(CARD,))


def card(*, tells_processes: bool, foreign_mib: int = 800, **more: Any) -> StepWorld:
    """A card of 24 GiB with `big`, which is in use, `small`, which is idle, and another program. `more`: settings."""
    models = {name: {"parallel": 1, "min_residency": 0, **more} for name in SIZES}
    world = StepWorld(configuration(models), SIZES, (CARD,), tells_processes=tells_processes, gpu_bytes=24 * GIB * MIB)
    world.arrive()
    world.foreign_mib(CARD, foreign_mib)
    world.used("small")
    world.leased("big")
    world.live(20)
    return world


def grow(world: StepWorld, name: str, mib: int) -> None:
    """The pools of a model grow, and that is read."""
    worker = world.model(name).worker
    assert worker is not None
    world.grow_pools(worker, CARD, mib * MIB)
    assert world.alive[worker].pools[CARD] >= mib * MIB
    world.send(events.DeviceNoticed())
    world.arrive()


def growth(world: StepWorld, name: str) -> tuple[int, Evidence] | None:
    """MiB of growth of a model, and why it is the model's."""
    worker = world.state.worker_of(world.model(name))
    found = None if worker is None else worker.device_growth.get(CARD)
    return None if found is None else (found.bytes // MIB, found.evidence)


@pytest.mark.parametrize(
    ("tells", "evidence"), [(True, Evidence.PROCESS), (False, Evidence.ONLY_ACTIVE)], ids=["figures", "no figures"]
)
def test_growth_of_a_busy_model_is_booked_to_it_and_its_idle_neighbor_stays(tells: bool, evidence: Evidence) -> None:
    world = card(tells_processes=tells)
    foreign = world.state.ledger.balance(CARD).foreign_bytes
    grow(world, "big", 1843)
    world.live(60)
    assert growth(world, "big") == (1843, evidence)
    assert world.state.ledger.balance(CARD).foreign_bytes == foreign
    assert {name: world.model(name).state for name in SIZES} == {"big": ModelState.BUSY, "small": ModelState.READY}
    assert not world.state.evictions
    assert any("big uses 1.8 GiB of gpu-0 more than planned" in line and evidence in line for line in world.log)


@pytest.mark.parametrize("tells", [True, False])
def test_model_that_outgrows_the_share_of_the_device_leaves_and_not_its_neighbor(tells: bool) -> None:
    world = card(tells_processes=tells, foreign_mib=1500)
    grow(world, "big", 1843)
    assert world.model("big").state is ModelState.DRAINING
    world.live(20)
    assert world.model("small").state is ModelState.READY
    for lease in list(world.leases):
        world.finish(lease)
    world.live(20)
    (record,) = world.state.evictions
    assert (record.model_name, record.reason) == ("big", Reason.OUTGREW)
    assert any("of gpu-0 more than planned" in text for text in record.explanation)


def outgrown(world: StepWorld) -> list[tuple[str, tuple[str, ...]]]:
    """Models with an alert because of their growth, and the settings that it recommends."""
    found = [alert for alert in advisor.alerts(world.state, world.now) if alert.kind is Kind.OUTGROWN]
    return [(alert.subject, tuple(change.setting for change in alert.changes)) for alert in found]


@pytest.mark.parametrize(
    ("configured_mib", "grown_mib", "is_recommended"), [(None, 1843, False), (None, 2300, True), (100, 1843, True)]
)
def test_alert_recommends_an_overhead_on_accelerators_only_where_it_is_not_learned(
    configured_mib: int | None, grown_mib: int, is_recommended: bool
) -> None:
    """It is not learned if it is configured, or too large to be the model's."""
    world = card(tells_processes=True, memory_overhead=None if configured_mib is None else configured_mib * MIB)
    grow(world, "big", grown_mib)
    assert outgrown(world) == ([("big", ("models.big.memory_overhead",))] if is_recommended else [])


def grow_on_the_host(world: StepWorld) -> None:
    """The process of `big` takes host memory, and that is read."""
    worker = world.model("big").worker
    assert worker is not None
    world.alive[worker].bytes.setdefault(CPU, 0)
    world.grow(worker, 300 * MIB)
    world.live(60)


def test_alert_of_host_memory_growth_of_a_model_on_an_accelerator_recommends_nothing() -> None:
    """No setting would change it."""
    world = card(tells_processes=True)
    grow_on_the_host(world)
    assert outgrown(world) == [("big", ())]


@pytest.mark.parametrize("host_first", [True, False])
def test_recommended_overhead_does_not_contain_host_memory(host_first: bool) -> None:
    world = card(tells_processes=True, memory_overhead=100 * MIB)
    if host_first:
        grow_on_the_host(world)
    grow(world, "big", 1843)
    if not host_first:
        grow_on_the_host(world)
    (alert,) = (alert for alert in advisor.alerts(world.state, world.now) if alert.kind is Kind.OUTGROWN)
    assert [change.value for change in alert.changes] == [f"{OVERHEAD_BYTES // MIB + 1843}MiB"]


def test_recommended_overhead_counts_memory_once_that_is_released_and_taken_again() -> None:
    world = card(tells_processes=True, memory_overhead=100 * MIB)
    for mib in (1843, -1843, 1800):
        grow(world, "big", mib)
        world.live(60)
        assert growth(world, "big") == (None if mib < 0 else (mib, Evidence.PROCESS))
    (alert,) = (alert for alert in advisor.alerts(world.state, world.now) if alert.kind is Kind.OUTGROWN)
    assert [change.value for change in alert.changes] == [f"{OVERHEAD_BYTES // MIB + 1843}MiB"]


# --- which model a change belongs to ---------------------------------------------------------------------------------
SLACK = slack_bytes(24 * GIB * MIB)


def occupant(holding: str, booked_mib: int, **more: Any) -> Occupant:
    return Occupant(holding, booked_mib * MIB, **more)


def attributed(
    unexplained_mib: int, foreign_mib: int, *occupants: Occupant, is_settled: bool = True
) -> tuple[dict[str, int], int]:
    """MiB by holding, and the foreign MiB after that."""
    found = attribute(unexplained_mib * MIB, foreign_mib * MIB, occupants, SLACK, is_settled=is_settled)
    return {change.holding: change.bytes // MIB for change in found.changes}, found.foreign_bytes // MIB


def test_slack_is_below_the_tolerance_of_the_pressure_levels() -> None:
    """Otherwise growth that is not booked would raise the level."""
    for total in (100 * MIB, 4 * GIB * MIB, 80 * GIB * MIB):
        assert slack_bytes(total) <= tolerated_bytes(total) <= FOREIGN_TOLERANCE * total


def test_memory_figure_of_a_process_attributes_growth_to_an_idle_model() -> None:
    idle = occupant("a", 1000, process_bytes=1500 * MIB)
    busy = occupant("b", 8000, process_bytes=8001 * MIB, active_at=1.0)
    assert attributed(700, 200, idle, busy) == ({"a": 500}, 199), "1 MiB is the small growth of b"


def test_small_growth_of_several_models_is_booked_when_it_is_large_together() -> None:
    """Else it would look like growth of other programs."""
    grown = [occupant(name, 1000, process_bytes=(1000 + more) * MIB) for name, more in (("a", 25), ("b", 39))]
    assert attributed(64, 0, *grown) == ({}, 0)
    found = attribute(64 * MIB, 0, grown, SLACK, is_settled=True)
    assert found.small_bytes == 64 * MIB
    third = occupant("c", 1000, process_bytes=1010 * MIB)
    assert attributed(74, 0, *grown, third) == ({"a": 25, "b": 39}, 0)


def test_small_growth_known_from_figures_is_not_booked_to_a_model_without_a_figure() -> None:
    known = occupant("a", 1000, process_bytes=1040 * MIB)
    assert attributed(70, 0, known, occupant("b", 8000, active_at=1.0)) == ({}, 0)
    found = attribute(100 * MIB, 0, [known, occupant("b", 8000, active_at=1.0)], SLACK, is_settled=True)
    assert (found.changes, found.small_bytes) == ((), 100 * MIB), "all growth together is too small to be booked"
    assert attributed(140, 0, known, occupant("b", 8000, active_at=1.0)) == ({"b": 100}, 0)


def test_small_decrease_of_a_model_is_not_booked_because_others_grow() -> None:
    grown = [occupant(name, 1000, process_bytes=1040 * MIB) for name in ("a", "b")]
    shrunk = occupant("c", 1000, grown_bytes=100 * MIB, process_bytes=950 * MIB)
    assert attributed(30, 0, *grown, shrunk)[0] == {"a": 40, "b": 40}


def test_rise_without_figures_belongs_to_the_active_model() -> None:
    assert attributed(700, 200, occupant("a", 8000), occupant("b", 8000, active_at=1.0)) == ({"b": 500}, 200)


def test_rise_belongs_to_the_model_that_was_active_last_and_the_excess_to_the_one_before() -> None:
    first, last = occupant("a", 8000, active_at=1.0), occupant("b", 4000, active_at=2.0)
    assert attributed(400, 0, first, last) == ({"b": 400}, 0)
    assert attributed(900, 0, first, last) == ({"b": 500, "a": 400}, 0)
    found = attribute(400 * MIB, 0, [first, last], SLACK, is_settled=True)
    assert {change.evidence for change in found.changes} == {Evidence.LAST_ACTIVE}


def test_rise_that_is_too_large_for_all_active_models_is_foreign() -> None:
    assert attributed(1100, 0, occupant("b", 8000, active_at=1.0)) == ({}, 1100)
    grown = occupant("b", 8900, grown_bytes=900 * MIB, active_at=1.0)
    assert attributed(200, 0, grown) == ({}, 200), "growth adds up"
    assert attributed(60 * GIB, 0, occupant("b", 70 * GIB, active_at=1.0)) == ({}, 60 * GIB)
    assert plausible_bytes(MIB) == SLACK_BYTES


def test_rise_while_no_model_is_active_is_foreign() -> None:
    assert attributed(500, 200, occupant("a", 8000)) == ({}, 500)


def test_small_rises_add_up_while_a_model_is_active() -> None:
    active = occupant("a", 8000, active_at=1.0)
    assert attributed(250, 200, active) == ({}, 200)
    assert attributed(300, 200, active) == ({"a": 100}, 200)
    assert attributed(250, 200, occupant("a", 8000)) == ({}, 250)


def test_decrease_of_foreign_use_counts_only_while_no_model_loads_or_ends() -> None:
    assert attributed(100, 200, is_settled=False) == ({}, 200)
    assert attributed(100, 200) == ({}, 100)
    assert attributed(-50, 200) == ({}, 0)


def test_unused_growth_is_released_but_planned_bytes_stay_booked() -> None:
    first, second = occupant("a", 900, grown_bytes=300 * MIB), occupant("b", 900, grown_bytes=100 * MIB)
    assert attributed(-350, 0, first, second, occupant("c", 900)) == ({"a": -300, "b": -50}, 0)
    assert attributed(-350, 0, replace(first, process_bytes=200 * MIB)) == ({"a": -300}, 0)
    assert attributed(-350, 0, replace(first, process_bytes=200 * MIB, grown_bytes=0)) == ({}, 0)


def test_forfeited_memory_is_foreign_and_no_growth() -> None:
    marks = forfeited({CARD: Mark(5, 1.0, {}), "gpu-1": Mark(7, 1.0, {})}, {CARD: 100})
    assert {device: mark.foreign_bytes for device, mark in marks.items()} == {CARD: 105, "gpu-1": 7}


# --- in the authority ------------------------------------------------------------------------------------------------
def test_released_pools_are_no_longer_booked() -> None:
    world = card(tells_processes=True)
    grow(world, "big", 1000)
    worker = world.model("big").worker
    assert worker is not None
    world.alive[worker].bytes[CARD] -= 600 * MIB
    world.alive[worker].pools[CARD] -= 600 * MIB
    world.send(events.DeviceNoticed())
    world.arrive()
    assert growth(world, "big") == (400, Evidence.PROCESS)


def test_figure_that_does_not_cover_the_buffers_belongs_to_another_process() -> None:
    """Process ids of another namespace may be the same by chance."""
    world = card(tells_processes=True)
    for process in world.alive.values():
        process.pid += 1000
    grow(world, "big", 1000)
    assert growth(world, "big") == (1000, Evidence.ONLY_ACTIVE)


def test_small_growth_that_does_not_fit_is_tolerated() -> None:
    """Up to a hundredth of the device, which has no effect on the pressure level."""
    world = card(tells_processes=False, foreign_mib=2550)
    grow(world, "big", 200)
    world.live(20)
    assert growth(world, "big") is None
    assert {world.model(name).state for name in SIZES} == {ModelState.BUSY, ModelState.READY}
    grow(world, "big", 100)
    assert world.model("big").state is ModelState.DRAINING


def test_growth_is_booked_and_shown_in_the_status() -> None:
    world = begin({"a": {}}, {"a": 400}, kind="sim")
    world.leased("a")
    grow(world, "a", 40)
    shown = model_status.status(world.state, world.model("a"), world.now)
    assert shown.growth == (
        "uses 40.0 MiB of gpu-0 more than planned (no other model was active on the device meanwhile)",
    )
    assert world.booked(CARD) == 440


def test_unload_of_a_model_that_used_less_than_planned_is_no_growth_of_another() -> None:
    """The bytes that it did not use made the foreign use look smaller."""
    world = begin({"a": {}, "b": {}}, {"a": 200, "b": 400})
    world.foreign_mib(CARD, 100)
    world.used("a")
    worker = world.model("a").worker
    assert worker is not None
    world.alive[worker].bytes[CARD] -= 10 * MIB  # all of its overhead
    world.leased("b")
    world.live(10)
    world.command(events.Unload("a", now=True))
    world.live(10)
    assert growth(world, "b") is None
    assert world.state.ledger.balance(CARD).foreign_bytes == 100 * MIB


def test_old_reading_after_a_load_does_not_look_like_growth_of_other_programs() -> None:
    """Bookings that are newer than the reading would make foreign use too small until the next reading."""
    world = begin({"a": {}, "b": {}}, {"a": 300, "b": 300})
    world.foreign_mib(CARD, 100)
    world.want("a")
    world.arrive()
    world.want("b")
    for _ in range(20):
        world.arrive(events.DevicesRead)
        world.tick(0.5)
        assert world.state.ledger.balance(CARD).foreign_bytes == 100 * MIB


# --- what is learned -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tells", [True, False])
def test_overhead_is_learned_again_after_the_first_full_batch(tells: bool) -> None:
    """From the process if the driver reports its bytes, else from the readings before the load and now."""
    world = begin({"a": {}, "b": {}}, {"a": 300, "b": 300}, tells_processes=tells)
    world.foreign_mib(CARD, 50)
    world.leased("b")
    world.leased("a")
    assert world.overheads == [10, 10]
    worker = world.model("a").worker
    assert worker is not None
    world.beat(worker, 2000, 1, largest_step=511)
    world.live(1)
    assert world.overheads == [10, 10]
    world.grow_pools(worker, CARD, 8 * MIB)
    world.beat(worker, 2512, 1, largest_step=512)
    world.live(1)
    world.beat(worker, 4000, 1, largest_step=600)
    world.live(1)
    assert world.overheads == [10, 10, 18]


def test_growth_long_after_the_load_is_learned_as_it_was_booked() -> None:
    world = begin({"a": {}}, {"a": 300})
    world.leased("a")
    world.live(200)
    grow(world, "a", 40)
    assert world.overheads == [10, 50]


def test_model_that_grew_is_measured_again_after_its_unload() -> None:
    """The next load reserves what was learned."""
    world = begin({"a": {}}, {"a": 300})
    spec = world.model("a").spec
    before = world.state.estimates_of(spec)
    world.finish(world.leased("a"))
    assert world.state.estimates_of(spec) is before
    grow(world, "a", 40)
    world.command(events.Unload("a", now=True))
    world.live(5)
    assert world.state.estimates_of(spec).keys() == before.keys()
    assert world.state.estimates_of(spec) is not before


# --- helper processes ------------------------------------------------------------------------------------------------
def helped(context_mib: int, sizes: dict[str, int]) -> StepWorld:
    """Models on a card where each process takes some memory; the first measurement is under way."""
    models = {name: {"parallel": 1, "min_residency": 0} for name in sizes}
    world = StepWorld(configuration(models), sizes, (CARD,), context_bytes=context_mib * MIB)
    world.arrive(events.Estimated)
    return world


def test_context_of_a_helper_is_reserved_while_it_runs() -> None:
    world = helped(100, {"a": 300})
    assert world.booked(CARD) == 100
    world.arrive()
    assert world.booked(CARD) == 0
    assert not world.state.helpers


def test_helper_on_a_full_device_reserves_what_is_left() -> None:
    world = begin({"a": {}}, {"a": 850}, context_bytes=100 * MIB)
    world.leased("a")
    world.command(events.Plan("a", {"parallel": 2}))
    world.arrive(events.Estimated)
    assert world.booked(CARD) == 900
    world.arrive()
    assert world.booked(CARD) == 850


def test_no_model_is_evicted_and_no_request_fails_because_of_a_helper() -> None:
    """The request waits until the helper has ended."""
    world = begin({"a": {}, "b": {}}, {"a": 500, "b": 400}, context_bytes=100 * MIB)
    world.used("a")
    world.command(events.Plan("a", {"parallel": 2}))
    world.arrive(events.Estimated)
    ticket = world.want("b")
    world.live(1, events.Estimated)
    assert (world.model("a").state, world.model("b").state) == (ModelState.READY, ModelState.COLD)
    world.live(1)
    assert (world.model("a").state, world.model("b").state) == (ModelState.READY, ModelState.BUSY)
    assert ticket in world.grants


def test_context_of_a_trial_is_reserved_while_it_runs() -> None:
    world = begin({"a": {}}, {"a": 300}, context_bytes=100 * MIB)
    world.leased("a")
    worker = world.model("a").worker
    assert worker is not None
    world.end(worker, ExitCause.DEVICE_LOST)
    world.arrive(events.TrialEnded)
    assert world.booked(CARD) == 100
    world.arrive(events.Loaded)
    assert world.state.ledger.balance(CARD).reserved_bytes == 300 * MIB or not world.booked(CARD)
