"""Loads that evict nothing (`evict=false`), for gateways that choose among nodes, and the costs that a plan names."""

from __future__ import annotations

from inference.authority import events
from inference.errors import MemoryLimitExceededError, ModelLoading
from inference.protocol import ModelState
from tests.rigs.step_world import MIB, StepWorld, begin

S = ModelState


def limited() -> StepWorld:
    """Room for one of two models."""
    return begin({"a": {}, "b": {}}, memory_limit_gb=0.3)


def refusal(world: StepWorld, ticket: int) -> MemoryLimitExceededError:
    error = world.errors[ticket]
    assert isinstance(error, MemoryLimitExceededError)
    return error


def test_second_of_two_loads_for_the_same_memory_is_refused_with_numbers() -> None:
    world = limited()
    first, second = world.want("a", evicts=False), world.want("b", evicts=False)
    world.arrive(events.Loaded)
    assert world.model("a").state is S.LOADING
    error = refusal(world, second)
    assert error.status == 503
    assert "cpu needs 200.0 MiB" in error.message
    world.live(1)
    assert first in world.grants
    assert world.model("b").state is S.COLD


def test_idle_model_stays_and_the_refusal_names_it() -> None:
    world = limited()
    world.used("a")
    ticket = world.want("b", evicts=False)
    world.live(1)
    assert "short" in refusal(world, ticket).message
    assert world.model("a").state is S.READY
    ticket = world.want("b")
    world.live(2)
    assert ticket in world.grants, "an ordinary request evicts it"


def test_request_without_eviction_shares_the_load_of_an_ordinary_request() -> None:
    world = limited()
    world.used("a")
    tickets = [world.want("b"), world.want("b", evicts=False)]
    world.live(2)
    assert world.grants.keys() >= set(tickets)


def test_loaded_model_and_one_that_fits_are_not_refused() -> None:
    world = begin({"a": {}})
    tickets = [world.want("a", evicts=False)]
    world.live(1)
    tickets.append(world.want("a", evicts=False))
    assert world.grants.keys() >= set(tickets)


def test_request_without_eviction_waits_for_memory_that_is_being_released() -> None:
    world = limited()
    world.used("a")
    world.command(events.Unload("a"))
    ticket = world.want("b", evicts=False)
    world.live(2)
    assert ticket in world.grants


def test_deadline_that_passes_during_the_load_is_a_model_loading_error() -> None:
    world = begin({"a": {}})
    ticket = world.want("a", evicts=False, seconds=0.1)
    world.live(1, events.Loaded)
    assert isinstance(world.errors[ticket], ModelLoading)


def test_plan_names_the_cost_of_evictions_and_what_is_free_afterwards() -> None:
    world = begin({"a": {}, "b": {}}, gpus=("gpu-0",), gpu_memory_limit_mb=300)
    world.used("a")
    planned = world.answers[world.command(events.Plan("b", {}))]
    assert [(held.model, sum(held.bytes.values())) for held in planned.evictions] == [("a", 200 * MIB)]
    assert planned.evictions[0].reload_seconds == world.model("a").reload_seconds
    assert planned.load_seconds is not None
    assert planned.free_bytes == {"gpu-0": 100 * MIB}
    loaded = world.answers[world.command(events.Plan("a", {}))]
    assert (loaded.load_seconds, loaded.evictions, loaded.free_bytes) == (0.0, [], {"gpu-0": 100 * MIB})
