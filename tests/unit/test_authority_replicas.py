"""A model with several replicas: placement, choice, crashes, scaling, reload."""

from __future__ import annotations

from typing import Any

import pytest

from inference.authority import events
from inference.authority.handlers.running.request_events import cases
from inference.authority.lifecycle import ACCEPTING, Reason
from inference.authority.placement.replica_choice import SPARE_SECONDS
from inference.authority.quarantine import Crash
from inference.authority.views import model_status
from inference.errors import InvalidRequestError, ModelFailed, ModelNotFound
from inference.protocol import ExitCause, ModelState, ModelStatus
from tests.rigs.authority_world import configuration
from tests.rigs.step_world import StepWorld, begin

pytestmark = pytest.mark.unmeasured

S = ModelState
TWO = ("gpu-0", "gpu-1")


def two(replicas: int | str = 2, gpus: tuple[str, ...] = TWO, **more: Any) -> StepWorld:
    return begin({"a": {"replicas": replicas, **more}}, gpus=gpus)


def both_loaded(replicas: int | str = 2, **more: Any) -> StepWorld:
    """Two replicas are loaded, and no request runs."""
    world = two(replicas, **more)
    for name in ("a", "a@2"):
        world.finish(world.leased(name, any_replica=False))
    assert [world.model(name).state for name in ("a", "a@2")] == [S.READY, S.READY]
    return world


def where(world: StepWorld, ticket: int) -> str:
    """The replica that serves a request."""
    lease = world.grants[ticket]
    return world.state.workers[world.leases[lease]].model


def device(world: StepWorld, name: str) -> tuple[str, ...]:
    worker = world.state.worker_of(world.model(name))
    return () if worker is None else worker.placement.devices


def status(world: StepWorld, name: str = "a") -> ModelStatus:
    return model_status.status(world.state, world.model(name), world.now)


def test_first_request_loads_the_minimum_number_of_replicas_on_different_devices() -> None:
    world = two()
    lease = world.leased("a")
    world.live(2)
    assert world.model("a").state is S.BUSY
    assert world.model("a@2").state is S.READY
    assert {*device(world, "a"), *device(world, "a@2")} == {*TWO}
    world.finish(lease)


def test_further_replica_without_a_device_of_its_own_is_not_loaded_and_shows_why() -> None:
    world = two(gpus=("gpu-0",))
    world.finish(world.leased("a"))
    world.finish(world.leased("a"))
    world.live(2)
    assert world.model("a@2").state is S.COLD
    reasons = {item.id: item.reason for item in status(world).replicas}
    assert "every possible device has a replica of 'a' already" in str(reasons["a@2"])
    loads = [line for line in world.log if "loading a@2" in line]
    assert len(loads) == 1, "it rests before it is tried again"


def test_further_replica_that_avoids_accelerators_shows_that_it_is_not_loaded_on_the_cpu() -> None:
    world = two(oom_policy="cpu")
    world.leased("a")
    worker = world.model("a@2").worker
    assert worker is not None
    world.end(worker, ExitCause.OOM_COMPUTE)
    world.live(2)
    assert world.model("a@2").state is S.COLD
    assert world.model("a@2").on_cpu_until > world.now
    reasons = {item.id: item.reason for item in status(world).replicas}
    assert "a further replica of 'a' is not loaded on the CPU" in str(reasons["a@2"])


def test_further_replica_does_not_take_the_memory_of_another_one() -> None:
    """Otherwise they would replace each other again and again."""
    world = begin({"a": {"replicas": 2, "min_residency": 0}}, gpus=TWO, memory_limit_gb=0.3)
    world.finish(world.leased("a"))
    first = world.model("a").worker
    assert first is not None
    world.live(31)
    world.finish(world.grants[world.want("a")])
    world.live(5)
    assert [world.model(name).loads for name in ("a", "a@2")] == [1, 0]
    assert world.model("a").worker == first


def test_further_replica_evicts_no_model_in_use_but_an_idle_one() -> None:
    sizes = {"a": 600, "b": 600}
    world = begin({"a": {"replicas": 2}, "b": {"min_residency": 5}}, sizes, gpus=TWO)
    busy = world.leased("b")
    world.leased("a")
    world.live(5)
    assert world.model("b").state is S.BUSY
    assert world.model("a@2").state is S.COLD
    world.finish(busy)
    world.live(40)
    assert world.model("a@2").state is S.READY
    assert world.model("b").state in (S.WARM, S.COLD)


def test_requests_are_divided_among_the_replicas() -> None:
    world = both_loaded(parallel=2)
    found = [where(world, world.want("a")) for _ in range(4)]
    assert sorted(found) == ["a", "a", "a@2", "a@2"]


def test_turns_of_a_conversation_go_to_the_same_replica() -> None:
    world = both_loaded(parallel=2)
    first = where(world, world.want("a", conversation="x"))
    other = where(world, world.want("a", conversation="y"))
    assert {first, other} == {"a", "a@2"}
    assert where(world, world.want("a", conversation="x")) == first
    assert where(world, world.want("a", conversation="y")) == other


def test_only_the_last_conversations_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference.authority.handlers.running.replicas.MAX_CONVERSATIONS", 2)
    world = both_loaded(parallel=8)
    for name in ("x", "y", "x", "z"):
        world.want("a", conversation=name)
    assert [*world.model("a").scaling.served] == ["x", "z"]


def test_request_that_moves_to_another_replica_keeps_the_deadline_that_a_pause_extended() -> None:
    world = two()
    tickets = []
    for _ in range(2):
        tickets += [world.want("a", seconds=20.0) for _ in range(4)]
        world.live(1.0, events.Loaded)
    assert {world.state.tickets[id].model for id in tickets} == {"a", "a@2"}
    world.stand_still(50.0)
    world.end(world.model("a@2").worker or "", ExitCause.KILLED)
    world.arrive(events.Loaded)
    assert {world.state.tickets[id].model for id in tickets} == {"a"}
    world.live(3.0)
    assert not world.errors
    assert world.grants.keys() == {*tickets}


def test_request_for_one_replica_by_its_id_goes_there() -> None:
    world = both_loaded(parallel=4)
    assert {where(world, world.want("a@2")) for _ in range(3)} == {"a@2"}


def test_crash_of_one_replica_leaves_the_other_and_new_requests_go_there() -> None:
    world = both_loaded(parallel=2)
    tickets = [world.want("a") for _ in range(2)]
    assert {where(world, ticket) for ticket in tickets} == {"a", "a@2"}
    world.end(str(world.model("a").worker), ExitCause.KILLED)
    assert world.model("a").state is S.FAILED
    assert world.model("a@2").state is S.BUSY
    assert where(world, world.want("a")) == "a@2"
    world.live(4)
    assert world.model("a").state in ACCEPTING, "a model in use gets its replica back"


def test_suspected_request_does_not_run_beside_those_of_the_other_replica() -> None:
    world = both_loaded(parallel=2)
    [world.want("a") for _ in range(2)]
    world.end(str(world.model("a").worker), ExitCause.ASSERT)
    ticket = world.want("a", alone=True, retries=1)
    assert world.state.tickets[ticket].model == "a"
    world.live(3)
    assert where(world, ticket) == "a"


@pytest.mark.parametrize("reported", ["a", "a@2"])
def test_replicas_share_the_quarantine_of_requests(reported: str) -> None:
    world = both_loaded()
    for alone in (False, True):
        crash = Crash(ExitCause.ASSERT, "it aborted", alone)
        world.send(events.CrashReported(reported, "key", crash))
    (case,) = cases(world.state, world.now)
    assert (case["model"], case["suspicion"]) == ("a", "confirmed")
    world.send(events.RequestAnswered("a@2" if reported == "a" else "a", "key", 0))
    assert cases(world.state, world.now) == []


def test_request_whose_replica_cannot_be_loaded_waits_for_the_other() -> None:
    world = two()
    tickets = [world.want("a") for _ in range(2)]
    world.live(1, events.Loaded)
    assert {world.state.tickets[ticket].model for ticket in tickets} == {"a"}
    world.want("a@2", any_replica=False)
    world.live(1, events.Loaded)
    world.end(str(world.model("a").worker), ExitCause.STARTUP, was_ready=False)
    assert {world.state.tickets[ticket].model for ticket in tickets} == {"a@2"}
    assert not world.errors
    world.live(1)
    assert {where(world, ticket) for ticket in tickets} == {"a@2"}


def test_ready_replica_takes_over_requests_that_wait_for_a_loading_one() -> None:
    world = two(parallel=2)
    ticket = world.want("a")
    world.live(2, events.Loaded)
    at = next(at for at, item in enumerate(world.later) if getattr(item, "worker", "") == world.model("a@2").worker)
    world.deliver(at)
    assert where(world, ticket) == "a@2"


def test_requests_fail_when_no_replica_can_be_loaded() -> None:
    world = two()
    ticket = world.want("a")
    world.live(1, events.Loaded)
    world.end(str(world.model("a").worker), ExitCause.STARTUP, was_ready=False)
    if ticket not in world.errors:
        world.end(str(world.model("a@2").worker), ExitCause.STARTUP, was_ready=False)
    assert isinstance(world.errors[ticket], ModelFailed)


def test_long_queue_loads_a_further_replica_and_an_unneeded_one_drains() -> None:
    world = two("1..2", parallel=2)
    first = [world.leased("a") for _ in range(4)]
    world.live(1)
    assert world.model("a@2").state is S.COLD
    world.live(3)
    assert world.model("a@2").state is S.READY
    long = world.grants[world.want("a")]
    assert world.state.workers[world.leases[long]].model == "a@2"
    for lease in first:
        world.finish(lease)
    world.live(SPARE_SECONDS + 5)
    names = [name for name in ("a", "a@2") if world.model(name).state in (S.READY, S.BUSY)]
    assert len(names) == 1
    world.finish(long)
    world.live(5)
    assert [record.reason for record in world.state.evictions] == [Reason.FEWER_REPLICAS]


def test_scale_down_finishes_running_requests_and_takes_no_new_ones() -> None:
    world = both_loaded("1..2", parallel=4, warm=False)
    busy = [world.grants[world.want("a@2", any_replica=False)], world.grants[world.want("a", any_replica=False)]]
    world.live(SPARE_SECONDS + 1)
    assert sorted(str(world.model(name).state) for name in ("a", "a@2")) == ["busy", "draining"]
    stays = "a" if world.model("a").state is S.BUSY else "a@2"
    assert where(world, world.want("a")) == stays
    assert {*busy} <= world.leases.keys(), "running requests continue"
    for lease in busy:
        world.finish(lease)
    world.live(3)
    assert S.COLD in (world.model("a").state, world.model("a@2").state)


def test_minimum_number_of_replicas_stays_loaded_while_one_of_them_is_used() -> None:
    world = both_loaded(parallel=4, idle_timeout=10)
    for _ in range(6):
        world.finish(world.grants[world.want("a@2")])
        world.live(4)
    assert world.model("a").state is S.READY
    world.live(12)
    assert not [name for name in ("a", "a@2") if world.model(name).state in ACCEPTING]


def test_reload_with_fewer_replicas_drains_one_and_with_more_allows_another() -> None:
    world = both_loaded(warm=False)
    lease = world.grants[world.want("a@2", any_replica=False)]
    world.change(configuration({"a": {"parallel": 1, "min_residency": 0, "replicas": 1, "warm": False}}))
    assert world.model("a@2").state is S.DRAINING
    assert [item.id for item in status(world).replicas] == ["a", "a@2"]
    assert where(world, world.want("a")) == "a"
    world.finish(lease)
    world.live(2)
    assert "a@2" not in world.state.models
    assert world.model("a").state is S.BUSY, "the first replica stays loaded"
    assert not status(world).replicas
    world.change(configuration({"a": {"parallel": 1, "min_residency": 0, "replicas": 3, "warm": False}}))
    world.live(3)
    assert world.model("a@2").state in ACCEPTING


def test_replica_is_not_moved_to_the_device_of_another() -> None:
    world = both_loaded()
    id = world.command(events.Move("a", device(world, "a@2")[0]))
    world.live(1)
    assert isinstance(world.errors[id], InvalidRequestError)
    assert "another replica of 'a'" in world.errors[id].message


def test_moved_replica_is_not_loaded_on_a_device_that_another_one_has_taken_meanwhile() -> None:
    world = two(gpus=("gpu-0",))
    world.faults.spawn = True
    world.want("a", any_replica=False)
    world.arrive()
    world.faults.spawn = False
    assert world.model("a").state is S.FAILED
    id = world.command(events.Move("a", "cpu"))
    world.arrive()
    world.command(events.Move("a@2", "cpu"))
    world.live(5)
    assert device(world, "a@2") == ("cpu",)
    assert "cpu has another replica of 'a'" in world.errors[id].message


def test_lost_device_ends_only_its_replica() -> None:
    from inference.devices.signs import Sign

    world = both_loaded(parallel=2)
    lost = device(world, "a")[0]
    world.put_sign(lost, Sign.FAILED)
    world.live(3)
    assert world.model("a").state not in ACCEPTING
    assert world.model("a@2").state is S.READY
    assert where(world, world.want("a")) == "a@2"


def test_status_of_a_model_sums_up_all_its_replicas() -> None:
    world = both_loaded(parallel=2)
    [world.want("a") for _ in range(3)]
    found = status(world)
    assert (found.id, found.state, found.in_flight, found.parallel) == ("a", S.BUSY, 3, 4)
    assert {*found.devices} == {*TWO}
    assert [item.id for item in found.replicas] == ["a", "a@2"]
    assert sum(item.in_flight for item in found.replicas) == 3
    assert ModelStatus.from_json(found.to_json()) == found
    assert [item.id for item in model_status.statuses(world.state, world.now)] == ["a"]
    one = status(world, "a@2")
    assert (one.id, one.parallel, one.replicas) == ("a@2", 2, ())
    assert not model_status.differs(found, found)


def test_models_loaded_at_start_include_the_minimum_number_of_replicas() -> None:
    found = {"a": {"replicas": "2..3"}, "b": {}}
    world = begin(found, gpus=TWO, enable_lazy_model_loading=False)
    world.live(5)
    assert [name for name, model in world.state.models.items() if model.state is S.READY] == ["a", "a@2", "b"]


def test_unknown_model_is_refused_with_the_configured_names() -> None:
    world = two(3)
    error = world.errors[world.want("x")]
    assert isinstance(error, ModelNotFound)
    assert "a@2" not in error.message


def test_failure_counts_only_for_the_replica_that_failed() -> None:
    world = both_loaded(parallel=2)
    [world.want("a") for _ in range(2)]
    world.end(str(world.model("a@2").worker), ExitCause.KILLED)
    assert [world.model(name).backoff.failures for name in ("a", "a@2")] == [0, 1]
