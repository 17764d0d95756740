"""Requests that wait: places, deadlines, and the expected time until a model answers."""

from __future__ import annotations

import pytest

from inference.authority import events
from inference.authority.views import model_status
from inference.errors import DeadlineExceeded, MemoryLimitExceededError, ModelLoading, QueueFull, ShuttingDown
from inference.protocol import FULL_FOR, ExitCause, ModelState, ModelStatus, Priority
from inference.worker_link import Heartbeat
from tests.rigs.step_world import MIB, StepWorld, begin

pytestmark = pytest.mark.unmeasured

S = ModelState


def status(world: StepWorld, name: str = "a") -> ModelStatus:
    return model_status.status(world.state, world.model(name), world.now)


def load(world: StepWorld, name: str, seconds: float) -> None:
    """Loads a model, which takes `seconds`, and unloads it."""
    ticket = world.want(name)
    world.live(seconds, events.Loaded)
    world.arrive()
    world.finish(world.grants[ticket])
    world.command(events.Unload(name))
    world.live(2)
    assert world.model(name).state is S.COLD


def queue_full(world: StepWorld, name: str = "a", priority: Priority = Priority.NORMAL) -> QueueFull:
    error = world.errors[world.want(name, priority=priority)]
    assert isinstance(error, QueueFull)
    return error


def test_each_priority_has_its_own_queue_limit() -> None:
    world = begin({"a": {}}, queue_high=1, queue_normal=2, queue_low=3)
    for priority, places in ((Priority.HIGH, 1), (Priority.NORMAL, 2), (Priority.LOW, 3)):
        for _ in range(places):
            assert world.want("a", priority=priority) not in world.errors
        error = queue_full(world, priority=priority)
        assert f"INFERENCE_QUEUE_{priority.upper()}" in error.message
        assert (error.status, error.details) == (429, {FULL_FOR: [priority]})


def test_request_that_is_retried_after_the_given_time_is_admitted() -> None:
    world = begin({"a": {}}, queue_normal=1)
    load(world, "a", 1.5)
    first = world.want("a")
    retry_after = queue_full(world).retry_after
    assert retry_after == 2
    world.live(1.5, events.Loaded)
    world.arrive()
    assert first in world.grants
    world.live(0.5)
    assert world.want("a") in world.grants


def test_retry_after_is_estimated_from_earlier_requests_and_the_last_rate() -> None:
    world = begin({"a": {}}, queue_normal=4, queue_low=0)
    ticket = world.want("a")
    world.live(60, events.Loaded)
    world.arrive()
    world.tick(5)
    world.finish(world.grants[ticket])
    world.command(events.Unload("a"))
    world.live(2)
    for _ in range(4):
        world.want("a")
    assert queue_full(world).retry_after == pytest.approx(80, abs=1)


def test_error_of_a_passed_deadline_names_the_wait_or_the_load() -> None:
    world = begin({"a": {}, "b": {}}, memory_limit_gb=0.3)
    world.leased("a")
    waiting = world.want("b", seconds=0.5)
    world.live(1)
    assert isinstance(world.errors[waiting], DeadlineExceeded)
    world = begin({"a": {}})
    loading = world.want("a", seconds=0.5)
    world.live(1, events.Loaded)
    error = world.errors[loading]
    assert isinstance(error, ModelLoading)
    assert (error.retry_after or 0) >= 1


def test_deadline_while_a_model_is_restored_is_a_model_loading_error() -> None:
    world = begin({"a": {}})
    world.used("a")
    world.command(events.Offload("a"))
    world.live(1)
    assert world.model("a").state is S.WARM
    ticket = world.want("a", seconds=30)
    assert world.model("a").state is S.RESTORING
    world.live(31, events.Loaded)
    error = world.errors[ticket]
    assert isinstance(error, ModelLoading)
    assert (error.retry_after or 0) >= 1


def test_requests_share_one_load_in_the_order_of_their_priority() -> None:
    world = begin({"a": {}})
    tickets = [world.want("a") for _ in range(32)]
    urgent = world.want("a", priority=Priority.HIGH)
    assert world.model("a").queue.waiters[0].id == urgent
    world.live(1)
    assert world.grants.keys() >= {*tickets, urgent}
    assert (world.model("a").loads, world.state.in_flight(world.model("a"))) == (1, 33)
    for ticket in [*tickets, urgent]:
        world.finish(world.grants[ticket])
    assert world.model("a").state is S.READY


def test_cancelled_request_leaves_its_queue_and_the_load_finishes() -> None:
    world = begin({"a": {}})
    ticket = world.want("a")
    world.arrive(events.Loaded)
    world.withdraw(ticket)
    assert not world.model("a").queue.waiters
    world.live(1)
    assert world.model("a").state is S.READY
    assert not world.leases


def test_request_that_must_run_alone_has_its_own_time_limit() -> None:
    """Not that of an earlier request that was withdrawn."""
    world = begin({"a": {"parallel": 4}})
    seconds = world.state.timing.alone_seconds
    world.leased("a")
    withdrawn = world.want("a", alone=True)
    world.live(0.8 * seconds)
    world.withdraw(withdrawn)
    alone = world.want("a", alone=True)
    other = world.want("a")
    world.live(0.8 * seconds)
    assert not {alone, other} & world.grants.keys()
    world.live(0.4 * seconds)
    assert {alone, other} <= world.grants.keys()


def test_release_of_a_lease_of_an_ended_worker_does_not_touch_its_successor() -> None:
    world = begin({"a": {}})
    old = world.leased("a")
    worker = world.leases[old]
    world.end(worker, ExitCause.KILLED)
    world.live(5)
    world.leased("a")
    world.send(events.Released(worker, old, completed=True))
    assert world.state.in_flight(world.model("a")) == 1


def test_refusal_for_lack_of_memory_has_numbers() -> None:
    world = begin({"a": {}, "p": {"pinned": True}}, memory_limit_gb=0.3)
    world.used("p")
    ticket = world.want("a")
    world.live(1)
    error = world.errors[ticket]
    assert isinstance(error, MemoryLimitExceededError)
    (shortage,) = error.shortages
    assert (shortage.need_bytes, shortage.bound) == (200 * MIB, "INFERENCE_MEMORY_LIMIT_GB")
    assert shortage.short_bytes > 0


def test_retry_delay_doubles_with_each_failed_load() -> None:
    world = begin({"a": {}})
    for failures in (1, 2, 3):
        ticket = world.want("a")
        world.arrive(events.Loaded)
        world.end(world.model("a").worker or "", ExitCause.STARTUP, was_ready=False)
        world.arrive()
        assert world.errors[ticket].retry_after == pytest.approx(2 ** (failures - 1), abs=0.1)
        assert (world.model("a").state, world.model("a").backoff.failures) == (S.FAILED, failures)
        assert status(world).retry_after_seconds == pytest.approx(2 ** (failures - 1), abs=0.1)
        assert not world.state.ledger.holdings
        world.live(2 ** (failures - 1))


def test_requests_fail_at_the_end_of_the_service() -> None:
    world = begin({"a": {}})
    ticket = world.want("a")
    world.arrive(events.Loaded)
    world.send(events.Closing(stops_workers=True))
    assert isinstance(world.errors[ticket], ShuttingDown)
    assert isinstance(world.errors[world.want("a")], ShuttingDown)
    world.live(2)
    assert not world.state.ledger.holdings


@pytest.mark.parametrize(
    "request_", [events.Refresh(), events.Defragment(), events.Plan("a", {})], ids=lambda one: type(one).__name__
)
def test_commands_that_need_readings_fail_at_the_end_of_the_service(request_: events.Request) -> None:
    world = begin({"a": {}})
    world.send(events.Closing(stops_workers=True))
    id = world.command(request_)
    assert isinstance(world.errors[id], ShuttingDown)


def test_models_are_loaded_at_start_as_far_as_there_is_room() -> None:
    world = begin({"a": {}, "b": {}, "c": {}}, enable_lazy_model_loading=False, memory_limit_gb=0.5)
    world.live(2)
    assert [world.model(name).state for name in "abc"] == [S.READY, S.READY, S.COLD]
    assert any("c is not loaded at start: it does not fit" in line for line in world.log)
    assert not world.state.evictions


def test_idle_timeout_of_zero_unloads_at_once() -> None:
    world = begin({"a": {"idle_timeout": 0, "warm": False}})
    world.used("a")
    world.live(2)
    assert world.model("a").state is S.COLD
    assert not world.state.ledger.holdings


def test_status_has_measured_times_of_load_answer_and_queue() -> None:
    world = begin({"a": {"parallel": 2}})
    found = status(world)
    assert (found.load_seconds, found.queue_seconds, found.prefill_tokens_per_second) == (None, 0, None)
    ticket = world.want("a")
    world.live(2, events.Loaded)
    world.arrive()
    assert status(world).load_seconds == 0
    leases = [world.grants[ticket], *(world.grants[world.want("a")] for _ in range(3))]
    assert status(world).queue_seconds is None
    beat = Heartbeat(None, 0, 0, 0, 0, 0, prefill_tokens_per_second=250.0)
    world.send(events.Progressed(world.leases[leases[0]], 1.0, beat))
    assert status(world).prefill_tokens_per_second == 250
    world.tick(4)
    world.finish(leases.pop())
    assert (status(world).answer_seconds, status(world).queue_seconds) == (4, 8)
    for lease in leases:
        world.finish(lease)
    world.command(events.Unload("a"))
    world.live(2)
    assert status(world).load_seconds == pytest.approx(2)
    assert status(world).prefill_tokens_per_second == 250


def test_status_of_a_load_has_the_time_that_is_left() -> None:
    world = begin({"a": {}})
    load(world, "a", 60)
    world.want("a")
    world.live(10, events.Loaded)
    assert status(world).load_seconds == pytest.approx(50)


def test_status_shows_whether_a_model_fits_under_its_oom_policy() -> None:
    models = {"fast": {}, "reduce": {"oom_policy": "reduce"}, "cpu": {"oom_policy": "cpu"}, "small": {}}
    world = begin(models, dict.fromkeys(("fast", "reduce", "cpu"), 1500) | {"small": 500}, gpus=("gpu-0",))
    assert status(world, "fast").fits is False
    assert "gpu-0" in (status(world, "fast").reason or "")
    assert [status(world, name).fits for name in ("reduce", "cpu", "small")] == [None, True, True]
