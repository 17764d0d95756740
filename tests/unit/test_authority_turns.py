"""Models that do not fit together take turns, under load that does not pause, without a failed request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from inference.authority import events
from inference.authority.lifecycle import Reason
from inference.protocol import ModelState, Priority
from tests.rigs.authority_world import configuration
from tests.rigs.step_world import StepWorld, begin

pytestmark = pytest.mark.unmeasured

S = ModelState
ONE_FITS = {"memory_limit_gb": 0.3}


def keep_busy(world: StepWorld, *models: str, until: Callable[[], bool], seconds: int = 300) -> int:
    """Each model has a client that sends its next request before the last one ends. Returns the number of served
    requests.
    """
    tickets = {model: world.want(model) for model in models}
    served = 0
    for _ in range(2 * seconds):
        world.live(0.5)
        for model, ticket in list(tickets.items()):
            assert ticket not in world.errors
            if ticket in world.grants:
                tickets[model] = world.want(model)
                world.finish(world.grants[ticket])
                served += 1
        if until():
            for ticket in tickets.values():
                world.withdraw(ticket)
                if ticket in world.grants:
                    world.finish(world.grants[ticket])
            return served
    raise AssertionError("the condition `until` was not reached")


def test_model_that_is_never_idle_is_unloaded_for_another() -> None:
    world = begin({"a": {}, "b": {}}, **ONE_FITS, enable_cpu_offload=False)
    wishes: list[int] = []

    def is_served() -> bool:
        if world.now > 1010 and not wishes:
            wishes.append(world.want("b"))
        return bool(wishes) and wishes[0] in world.grants

    keep_busy(world, "a", until=is_served)
    assert world.model("a").loads == 1
    world.finish(world.grants[wishes[0]])
    keep_busy(world, "a", until=lambda: world.model("a").loads == 2)
    first = world.state.evictions[0]
    assert (first.model_name, first.reason) == ("a", Reason.MEMORY_WANTED)
    assert "the turn of a is over" in first.explanation[1]


def test_twenty_swaps_under_load_fail_no_request() -> None:
    world = begin({"a": {}, "b": {}}, **ONE_FITS, enable_cpu_offload=False)
    a, b = (lambda: world.model("a")), (lambda: world.model("b"))
    served = keep_busy(world, "a", "b", until=lambda: a().loads + b().loads >= 20)
    assert abs(a().loads - b().loads) <= 1
    assert served >= 20
    assert not world.errors


def test_running_requests_finish_and_new_ones_wait_while_a_model_drains() -> None:
    world = begin({"a": {}, "b": {}}, **ONE_FITS)
    long_request = world.leased("a")
    other = world.want("b")
    world.live(30)
    assert world.model("a").state is S.DRAINING
    newcomer = world.want("a")
    world.live(5)
    assert not {other, newcomer} & world.grants.keys()
    world.finish(long_request)
    world.live(5)
    world.finish(world.grants[other])
    world.live(60)
    assert newcomer in world.grants


def test_model_stays_when_the_request_that_it_drains_for_is_withdrawn() -> None:
    world = begin({"a": {}, "b": {}}, **ONE_FITS)
    lease = world.leased("a")
    other = world.want("b")
    world.live(30)
    assert world.model("a").state is S.DRAINING
    newcomer = world.want("a")
    world.withdraw(other)
    assert world.model("a").state is S.BUSY
    assert newcomer in world.grants
    world.finish(lease)
    assert world.model("a").loads == 1
    assert not world.state.evictions


def test_min_residency_applies_even_if_another_model_needs_the_memory() -> None:
    world = begin({"a": {"min_residency": 60}, "b": {}}, **ONE_FITS)
    world.used("a")
    ready_at = world.now
    other = world.want("b")
    keep_busy(world, "a", until=lambda: world.model("a").state not in (S.READY, S.BUSY))
    assert world.now - ready_at >= 55
    world.live(60)
    assert other in world.grants


def test_load_without_a_waiting_request_is_cancelled_only_for_another_model() -> None:
    world = begin({"a": {}, "b": {}}, **ONE_FITS)
    ticket = world.want("a")
    world.arrive(events.Loaded)
    world.withdraw(ticket)
    world.live(5, events.Loaded)
    assert world.model("a").state is S.LOADING
    other = world.want("b")
    world.arrive(events.Loaded)
    world.live(5)
    assert other in world.grants
    assert (world.model("a").state, world.model("a").loads) == (S.COLD, 0)


def test_smaller_model_does_not_take_the_room_of_an_earlier_request() -> None:
    world = begin({"a": {}, "big": {}, "small": {}}, {"a": 200, "big": 420, "small": 150}, memory_limit_gb=0.5)
    lease = world.leased("a")
    first = world.want("big")
    world.live(30)
    assert world.model("a").state is S.DRAINING
    second = world.want("small")
    world.live(5)
    assert second not in world.grants
    world.finish(lease)
    world.live(5)
    assert first in world.grants
    assert second not in world.grants
    world.finish(world.grants[first])
    world.live(60)
    assert second in world.grants
    assert (world.model("big").loads, world.model("small").loads) == (1, 1)


def test_request_with_the_higher_priority_decides_which_model_is_next() -> None:
    world = begin({"a": {}, "b": {}, "c": {}}, **ONE_FITS)
    first = world.want("a")
    world.arrive(events.Loaded)
    later = world.want("b", priority=Priority.LOW)
    sooner = world.want("c", priority=Priority.HIGH)
    world.live(1)
    world.finish(world.grants[first])
    world.live(30)
    assert sooner in world.grants
    assert world.model("b").loads == 0
    world.finish(world.grants[sooner])
    world.live(60)
    assert later in world.grants


def test_models_that_fit_together_load_at_the_same_time() -> None:
    world = begin({"a": {}, "b": {}})
    for model in "ab":
        world.want(model)
    world.arrive(events.Loaded)
    assert world.model("a").state is world.model("b").state is S.LOADING


def test_second_model_waits_for_a_busy_one_which_is_then_kept_warm() -> None:
    world = begin({"a": {}, "b": {}}, **ONE_FITS)
    lease = world.leased("a")
    ticket = world.want("b")
    world.live(1)
    assert ticket not in world.grants
    world.finish(lease)
    world.live(30)
    assert ticket in world.grants
    assert world.model("a").state is S.WARM


def test_load_beyond_max_models_evicts_another_model() -> None:
    world = begin({"a": {}, "b": {}}, max_models=1)
    world.used("a", "b", "a")
    assert [world.model(name).state for name in "ab"] == [S.READY, S.WARM]


def draining() -> tuple[StepWorld, int, int]:
    """`a` finishes a request because `b` is wanted and both do not fit."""
    world = begin({"a": {}, "b": {}}, **ONE_FITS)
    lease = world.leased("a")
    wish = world.want("b")
    world.live(30)
    assert world.model("a").state is S.DRAINING
    return world, lease, wish


def test_model_unloaded_by_hand_while_it_drains_is_unloaded_after_its_request() -> None:
    world, lease, wish = draining()
    command = world.command(events.Unload("a"))
    world.withdraw(wish)
    assert world.model("a").state is S.DRAINING
    world.finish(lease)
    world.live(5)
    assert command in world.answers
    assert world.model("a").state is S.COLD
    assert world.state.evictions[-1].reason is Reason.BY_HAND


def with_warm_model(pool: float) -> StepWorld:
    """`a` has no request; `w` is warm, has a lower value, and fills half of a pool of 600 MiB (0.15)."""
    world = begin({"w": {}, "a": {}, "b": {}}, {"b": 900}, gpus=("gpu-0",), cpu_memory_max_percent=pool)
    for name, seconds in (("w", 1.0), ("a", 20.0)):
        ticket = world.want(name)
        world.live(seconds, events.Loaded)
        world.arrive()
        world.finish(world.grants[ticket])
        if name == "w":
            world.command(events.Offload("w"))
            world.live(5)
            assert world.model("w").state is S.WARM
    return world


def shrink_pool(world: StepWorld, **keys: Any) -> None:
    """The pool has room for one model only; the model `a` gets these keys."""
    models = {name: {"parallel": 1, "min_residency": 0} for name in world.state.models}
    world.change(configuration(models | {"a": {**models["a"], **keys}}, cpu_memory_max_percent=0.075))


def test_model_that_waits_for_the_pool_is_unloaded_at_once_when_its_settings_change() -> None:
    world = with_warm_model(pool=0.075)
    world.command(events.Offload("a"))
    assert (world.model("w").state, world.model("a").state) == (S.UNLOADING, S.DRAINING)
    shrink_pool(world, context_length=512)
    assert world.model("a").state is S.UNLOADING
    world.live(5)
    assert world.model("a").state is S.COLD
    assert not world.state.ledger.holdings


def test_model_that_waits_for_the_pool_accepts_requests_and_finishes_them() -> None:
    world = with_warm_model(pool=0.15)
    lease, wish = world.leased("a"), world.want("b")
    world.live(30)
    shrink_pool(world)
    world.finish(lease)
    assert (world.model("w").state, world.model("a").state) == (S.UNLOADING, S.DRAINING)
    world.withdraw(wish)
    assert world.model("a").state is S.READY
    lease = world.grants[world.want("a")]
    world.command(events.Offload("a"))
    world.live(5)
    assert (world.model("w").state, world.model("a").state) == (S.COLD, S.DRAINING)
    world.finish(lease)
    world.live(5)
    assert world.model("a").state is S.WARM
