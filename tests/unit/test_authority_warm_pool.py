"""The warm pool: what a model holds while it is warm, what leaves it, and what follows from each failure on the way."""

from __future__ import annotations

from typing import Any

import pytest

from inference.authority import events
from inference.authority.effects import CheckSuspension
from inference.authority.events import DevicesFound
from inference.authority.handlers.running.keeping import CPU_OVERHEAD_BYTES
from inference.authority.lifecycle import Action, Reason
from inference.authority.state import State
from inference.authority.step import step
from inference.authority.views.figures import offloaded
from inference.devices.device import Reading
from inference.devices.signs import Sign
from inference.errors import InvalidRequestError
from inference.protocol import ExitCause, ModelState
from tests.rigs.authority_world import configuration
from tests.rigs.step_world import MIB, StepWorld, begin

pytestmark = pytest.mark.unmeasured

S = ModelState
GPU = ("gpu-0",)


def offload(world: StepWorld, name: str = "a") -> int:
    command = world.command(events.Offload(name))
    world.live(5)
    return command


def kept(world: StepWorld) -> list[dict[str, Any]]:
    return offloaded(world.state, world.now)


def process(world: StepWorld, name: str = "a") -> str:
    worker = world.model(name).worker
    assert worker is not None
    return worker


def test_model_of_the_cpu_keeps_its_process_and_is_restored() -> None:
    world = begin({"a": {"idle_timeout": 0}})
    lease = world.leased("a")
    pid, before = world.state.workers[process(world)].pid, world.booked("cpu")
    world.finish(lease)
    world.live(2)
    assert world.model("a").state is S.WARM
    (found,) = kept(world)
    assert (found["mechanism"], found["original_device"]) == ("standby", "cpu")
    assert found["bytes"] == world.state.ledger.balance("cpu").ours_bytes
    record = world.state.evictions[-1]
    assert (record.action, record.reason) == (Action.OFFLOAD, Reason.IDLE)
    world.leased("a")
    assert (world.model("a").state, world.state.workers[process(world)].pid) == (S.BUSY, pid)
    assert world.booked("cpu") == before
    assert (world.state.restorations, world.model("a").loads, kept(world)) == (1, 1, [])


def test_model_of_an_accelerator_is_offloaded_and_kept_by_another_process() -> None:
    world = begin({"a": {}}, gpus=GPU)
    world.used("a")
    first, before = process(world), world.booked("gpu-0")
    offload(world)
    assert world.model("a").state is S.WARM
    assert world.booked("gpu-0") == 0
    keeper = process(world)
    assert keeper != first
    assert first not in world.alive
    (found,) = kept(world)
    assert (found["mechanism"], found["original_device"]) == ("resident", "gpu-0")
    assert found["bytes"] == world.state.ledger.balance("cpu").ours_bytes
    assert found["locked_bytes"] == found["bytes"] - CPU_OVERHEAD_BYTES
    world.used("a")
    assert process(world) == keeper
    assert (world.booked("gpu-0"), world.booked("cpu")) == (before, 0)


@pytest.mark.parametrize("gpus", [(), GPU])
def test_model_that_becomes_idle_while_the_service_stops_is_unloaded(gpus: tuple[str, ...]) -> None:
    """No process is started after the others were stopped."""
    world = begin({"a": {}}, gpus=gpus)
    lease = world.leased("a")
    world.command(events.Offload("a"))
    assert world.model("a").state is S.DRAINING
    world.send(events.Closing())
    world.finish(lease)
    world.live(5)
    assert world.model("a").state is S.COLD
    assert not world.state.workers
    assert not world.state.ledger.holdings


@pytest.mark.parametrize("how", ["dies", "hangs"])
@pytest.mark.parametrize(
    ("gpus", "step"), [((), events.ContextFreed), (GPU, events.ContextFreed), (GPU, events.FileHeld)]
)
def test_failed_offload_releases_every_byte(gpus: tuple[str, ...], how: str, step: type) -> None:
    world = begin({"a": {}}, gpus=gpus)
    world.used("a")
    world.command(events.Offload("a"))
    world.arrive(step)
    if how == "dies" and world.model("a").worker in world.alive:
        world.end(process(world), ExitCause.KILLED)
    world.live(60, step)
    assert world.model("a").state in (S.WARM, S.FAILED, S.COLD)
    assert gpus == () or world.booked("gpu-0") == 0
    world.live(60)
    world.used("a")
    world.command(events.Unload("a"))
    world.live(5)
    assert not world.state.ledger.holdings


@pytest.mark.parametrize(
    ("gpus", "held"), [((), events.ContextFreed), (GPU, events.ContextFreed), (GPU, events.FileHeld)]
)
def test_worker_that_does_not_release_or_hold_its_model_in_time_is_killed(gpus: tuple[str, ...], held: type) -> None:
    world = begin({"a": {}}, gpus=gpus)
    world.used("a")
    serving = process(world)
    world.command(events.Offload("a"))
    world.live(60, held, events.Exited)
    late = process(world) if held is events.FileHeld else serving
    assert world.model("a").state is S.OFFLOADING
    assert world.alive[late].is_killed
    world.live(0.5, held)
    assert world.model("a").state is (S.WARM if gpus and held is events.ContextFreed else S.FAILED)
    world.live(60)
    world.used("a")


def test_worker_that_holds_the_file_is_not_killed_while_its_predecessor_saves_sequences() -> None:
    world = begin({"a": {}}, gpus=GPU)
    world.used("a")
    world.command(events.Offload("a"))
    world.live(60, events.ContextFreed, events.Exited)
    assert not world.alive[process(world)].is_killed
    world.live(1)
    assert world.model("a").state is S.WARM


def test_worker_that_is_stopped_while_it_releases_its_model_is_not_killed() -> None:
    world = begin({"a": {}})
    world.used("a")
    world.command(events.Offload("a"))
    world.command(events.Unload("a", now=True))
    world.live(60, events.ContextFreed, events.Exited)
    assert not world.alive[process(world)].is_killed
    world.live(1)
    assert world.model("a").state is S.COLD


@pytest.mark.parametrize("gpus", [(), GPU])
def test_worker_that_dies_while_it_is_restored_is_loaded_from_its_file(gpus: tuple[str, ...]) -> None:
    world = begin({"a": {}}, gpus=gpus)
    world.used("a")
    offload(world)
    world.want("a")
    world.arrive(events.Loaded)
    assert world.model("a").state is S.RESTORING
    world.end(process(world), ExitCause.KILLED)
    world.live(60)
    world.used("a")
    assert world.model("a").loads == 2


@pytest.mark.parametrize("gpus", [(), GPU])
def test_warm_model_whose_process_is_killed_is_cold(gpus: tuple[str, ...]) -> None:
    world = begin({"a": {}}, gpus=gpus)
    world.used("a")
    offload(world)
    world.end(process(world), ExitCause.KILLED)
    world.live(5)
    assert not world.state.ledger.holdings
    assert kept(world) == []
    world.used("a")
    assert world.model("a").loads == 2


def test_evicted_models_go_into_the_warm_pool_while_it_has_room() -> None:
    world = begin({"a": {}, "b": {}}, {"a": 500, "b": 500}, gpus=GPU)
    for _ in range(2):
        world.used("b", "a")
        world.live(5)
        assert (world.model("b").state, world.model("a").state) == (S.WARM, S.READY)
    assert world.state.restorations == 2
    assert {record.action for record in world.state.evictions} == {Action.OFFLOAD}


def test_warm_models_are_dropped_before_a_loaded_one_is_evicted() -> None:
    world = begin({"a": {}, "b": {}, "c": {}}, dict.fromkeys("abc", 300), cpu_memory_max_percent=0.16)
    world.used("a")
    offload(world)
    world.used("b")
    assert world.model("a").state is S.WARM
    world.used("c")
    assert [world.model(name).state for name in "abc"] == [S.COLD, S.READY, S.READY]


def test_disabled_offload_keeps_no_model_and_its_command_is_refused() -> None:
    world = begin({"a": {}}, enable_cpu_offload=False)
    world.used("a")
    error = world.errors[offload(world)]
    assert isinstance(error, InvalidRequestError)
    assert "INFERENCE_ENABLE_CPU_OFFLOAD" in error.message
    assert world.model("a").state is S.READY
    world.live(300)
    assert world.model("a").state is S.COLD
    record = world.state.evictions[-1]
    assert (record.action, record.reason) == (Action.UNLOAD, Reason.IDLE)


def test_warm_model_is_dropped_when_its_file_changes() -> None:
    world = begin({"a": {}})
    world.used("a")
    offload(world)
    world.versions["a"] += 1
    world.used("a")
    world.live(5)
    assert (world.model("a").loads, world.state.restorations) == (2, 0)
    assert world.state.evictions[-1].explanation == ("its file changed: /models/a.gguf",)


# --- records of departures ------------------------------------------------------------------------------------------
def test_memory_that_does_not_become_free_is_not_recorded_as_freed() -> None:
    world = begin({"a": {}}, gpus=GPU)
    world.used("a")
    world.faults.linger_seconds = 1000.0
    world.command(events.Unload("a"))
    world.live(60)
    (record,) = world.state.evictions
    assert (record.reason, record.memory_freed_mb) == (Reason.BY_HAND, 0)


def test_load_that_is_stopped_is_recorded_once() -> None:
    world = begin({"a": {}})
    ticket = world.want("a")
    world.arrive(events.Loaded)
    world.withdraw(ticket)
    world.command(events.Unload("a"))
    change(world, {"a": {"context_length": 512}})
    world.live(2)
    assert [record.reason for record in world.state.evictions] == [Reason.BY_HAND]


# --- suspended processes --------------------------------------------------------------------------------------------
def suspending(*, gpus: tuple[str, ...] = GPU) -> StepWorld:
    """A model that was used on an accelerator whose driver suspends processes."""
    world = begin({"a": {}}, gpus=gpus, warm_checkpoint="auto")
    world.send(events.SuspensionTested("cuda", None))
    world.used("a")
    return world


def test_suspended_model_uses_only_host_memory_and_its_process_is_resumed() -> None:
    world = suspending()
    first, size = process(world), world.booked("gpu-0")
    offload(world)
    assert world.model("a").state is S.WARM
    assert (world.booked("gpu-0"), world.booked("cpu")) == (0, size)
    (found,) = kept(world)
    assert (found["mechanism"], found["original_device"]) == ("checkpoint", "gpu-0")
    world.used("a")
    assert (process(world), world.model("a").loads, world.state.restorations) == (first, 1, 1)
    assert (world.booked("gpu-0"), world.booked("cpu")) == (size, 0)


def test_growth_before_a_suspension_is_foreign_on_the_host_and_booked_on_the_device_again() -> None:
    """No reading has shown it before the model was suspended."""
    world = suspending()
    size = world.booked("gpu-0")
    world.grow_pools(process(world), "gpu-0", 40 * MIB)
    offload(world)
    assert world.model("a").state is S.WARM
    assert (world.booked("cpu"), world.state.ledger.balance("cpu").foreign_bytes) == (size, 40 * MIB)
    world.leased("a")
    world.live(60)
    assert (world.booked("gpu-0"), world.booked("cpu")) == (size + 40, 0)
    assert world.state.ledger.balance("cpu").foreign_bytes == 0


@pytest.mark.parametrize("by_device_state", [True, False])
@pytest.mark.parametrize("operation", ["suspend", "resume"])
def test_failed_suspension_is_tried_again_only_if_the_state_of_the_device_caused_it(
    operation: str, by_device_state: bool
) -> None:
    world = suspending()
    first = process(world)
    if operation == "resume":
        offload(world)
    world.faults.suspension = "state" if by_device_state else "driver"
    if operation == "suspend":
        offload(world)
        assert world.model("a").state is S.COLD
        assert not world.state.ledger.holdings
        assert [record.action for record in world.state.evictions] == [Action.UNLOAD]
    world.want("a")
    world.live(60)
    assert (world.model("a").loads, world.model("a").failure) == (2, None)
    assert first not in world.alive
    world.faults.suspension = None
    for lease in list(world.leases):
        world.finish(lease)
    offload(world)
    assert kept(world)[0]["mechanism"] == ("checkpoint" if by_device_state else "resident")


@pytest.mark.parametrize("moment", ["offloading", "warm", "restoring"])
def test_memory_of_a_suspended_process_that_dies_is_released(moment: str) -> None:
    world = suspending()
    command = world.command(events.Offload("a"))
    world.arrive(events.CheckpointEnded)
    if moment != "offloading":
        world.live(2)
        assert command in world.answers
    if moment == "restoring":
        ticket = world.want("a")
        world.arrive(events.CheckpointEnded)
        world.withdraw(ticket)
    world.end(process(world), ExitCause.KILLED)
    world.live(60)
    assert not world.state.ledger.holdings
    assert command not in world.commands


@pytest.mark.parametrize("operation", ["suspend", "resume"])
def test_process_whose_suspension_or_resumption_does_not_end_is_killed(operation: str) -> None:
    world = suspending()
    first = process(world)
    if operation == "suspend":
        command = world.command(events.Offload("a"))
    else:
        offload(world)
        ticket = world.want("a")
    world.live(30, events.CheckpointEnded, events.Exited)
    assert not world.alive[first].is_killed
    world.live(60, events.CheckpointEnded, events.Exited)
    assert world.alive[first].is_killed
    world.live(0.5 if operation == "suspend" else 10, events.CheckpointEnded)
    if operation == "suspend":
        assert command not in world.commands
        assert (world.model("a").state, world.booked("gpu-0"), world.booked("cpu")) == (S.FAILED, 0, 0)
    else:
        assert ticket in world.grants
        assert world.model("a").loads == 2


def test_limit_of_a_worker_that_was_suspended_is_lifted_when_the_pressure_is_over() -> None:
    world = begin({"a": {"parallel": 8}}, gpus=GPU, warm_checkpoint="auto")
    world.send(events.SuspensionTested("cuda", None))
    lease = world.leased("a")
    world.foreign_mib("gpu-0", 990)
    world.check_pressure()
    assert world.alive[process(world)].limit == 4
    world.foreign_mib("gpu-0", 0)
    world.finish(lease)
    offload(world)
    world.leased("a")
    world.check_pressure(3)
    assert (world.model("a").loads, world.alive[process(world)].limit) == (1, 8)


def test_unload_ends_a_suspended_process() -> None:
    world = suspending()
    first = process(world)
    offload(world)
    world.command(events.Unload("a"))
    world.live(2)
    assert first not in world.alive
    assert (world.model("a").state, len(world.state.ledger.holdings)) == (S.COLD, 0)


def test_suspended_model_whose_device_is_lost_is_loaded_on_another() -> None:
    world = suspending(gpus=("gpu-0", "gpu-1"))
    home = world.state.workers[process(world)].placement.devices[0]
    offload(world)
    world.signs[home] = Sign.FAILED
    world.send(events.DeviceNoticed())
    world.live(2)
    world.used("a")
    assert world.state.workers[process(world)].placement.devices != (home,)
    assert world.model("a").loads == 2


@pytest.mark.parametrize(
    ("setting", "kind", "known"),
    [("simulated", "sim", {"sim": None}), ("simulated", "cuda", {"cuda": "INFERENCE_WARM_CHECKPOINT is simulated"}),
     ("auto", "sim", {"sim": None}), ("auto", "cuda", {}), ("off", "sim", {"sim": "INFERENCE_WARM_CHECKPOINT is off"})],
)  # fmt: skip
def test_setting_decides_on_which_devices_processes_can_be_suspended(
    setting: str, kind: str, known: dict[str, str | None]
) -> None:
    gpu = Reading("gpu-0", kind, "fake", 1000 * MIB, 1000 * MIB, 0)
    found = step(State(configuration({}, warm_checkpoint=setting)), DevicesFound((gpu,), {kind: "driver"}, 0.0), 1.0)
    assert any(isinstance(effect, CheckSuspension) for effect in found[1]) == (not known)
    assert found[0].devices.suspension == known
    assert found[0].started


# --- limits that are lowered ----------------------------------------------------------------------------------------
def change(world: StepWorld, models: dict[str, dict[str, Any]], **settings: Any) -> None:
    found = {name: {"parallel": 1, "min_residency": 0, **keys} for name, keys in models.items()}
    world.change(configuration(found, **settings))


def test_lowered_limit_evicts_an_idle_model_at_once_and_a_busy_one_after_its_request() -> None:
    models: dict[str, dict[str, Any]] = {"a": {"pinned": True}, "b": {}, "c": {}}
    world = begin(models, enable_cpu_offload=False)
    world.used("a", "b")
    lease = world.leased("c")
    change(world, models, enable_cpu_offload=False, memory_limit_gb=0.45)
    world.live(2)
    assert [world.model(name).state for name in "abc"] == [S.READY, S.COLD, S.BUSY]
    record = world.state.evictions[-1]
    assert (record.reason, record.action) == (Reason.LOWERED, Action.UNLOAD)
    assert "more than the new INFERENCE_MEMORY_LIMIT_GB" in record.explanation[0]
    change(world, models, enable_cpu_offload=False, memory_limit_gb=0.05)
    assert world.model("c").state is S.DRAINING
    ticket = world.want("c")
    world.finish(lease)
    world.live(2)
    assert ticket in world.errors
    assert not world.state.ledger.holdings


@pytest.mark.parametrize(
    "lower", [{"gpu_memory_max_percent": 0.25}, {"gpu_memory_limit_mb": 250}, {"max_models_per_device": 1}]
)
def test_lowered_limit_evicts_the_cheaper_model(lower: dict[str, Any]) -> None:
    models: dict[str, dict[str, Any]] = {"a": {}, "b": {}}
    world = begin(models, {"a": 150, "b": 200}, gpus=GPU)
    for name in models:
        ticket = world.want(name)
        world.live(1, events.Loaded)
        world.arrive()
        world.finish(world.grants[ticket])
    change(world, models, **lower)
    world.live(5)
    assert [world.model(name).state for name in "ab"] == [S.WARM, S.READY]
    assert world.state.ledger.excess("gpu-0") == 0


def test_models_do_not_stay_in_host_memory_whose_limit_is_lowered() -> None:
    models: dict[str, dict[str, Any]] = {"a": {}, "b": {}}
    world = begin(models)
    world.used("a", "b")
    world.command(events.Offload("a"))
    assert world.model("a").state is S.OFFLOADING
    change(world, models, cpu_memory_max_percent=0.01)
    world.live(5)
    assert [world.model(name).state for name in "ab"] == [S.COLD, S.COLD]
    assert world.state.ledger.excess("cpu") == 0


def test_lowered_limit_drops_the_least_valuable_warm_models() -> None:
    models: dict[str, dict[str, Any]] = {"a": {}, "b": {}}
    world = begin(models)
    for name, seconds in (("a", 1.0), ("b", 20.0)):
        ticket = world.want(name)
        world.live(seconds, events.Loaded)
        world.arrive()
        world.finish(world.grants[ticket])
        offload(world, name)
    held = world.state.ledger.balance("cpu").ours_bytes
    change(world, models, cpu_memory_max_percent=held * 0.75 / world.readings()[-1].total_bytes)
    world.live(5)
    assert [world.model(name).state for name in "ab"] == [S.COLD, S.WARM]
    assert world.state.ledger.excess("cpu") == 0


def test_warm_model_counts_for_the_memory_limit_once_it_is_loaded() -> None:
    world = begin({"a": {}, "b": {}}, memory_limit_gb=0.3)
    world.used("a", "b")
    for leaver, other in (("b", "a"), ("a", "b")):
        world.used(other)
        world.live(2)
        assert (world.model(leaver).state, world.model(other).state) == (S.WARM, S.READY)
    assert [world.model(name).loads for name in "ab"] == [1, 1]


@pytest.mark.parametrize("is_removed", [False, True])
def test_draining_model_whose_settings_changed_is_unloaded(is_removed: bool) -> None:
    world = begin({"a": {}, "b": {}}, memory_limit_gb=0.3)
    lease = world.leased("a")
    wish = world.want("b")
    world.live(30)
    assert world.model("a").state is S.DRAINING
    models = {"b": {}} if is_removed else {"a": {"context_length": 512}, "b": {}}
    change(world, models, memory_limit_gb=0.3)
    world.withdraw(wish)
    world.finish(lease)
    world.live(5)
    assert not world.state.ledger.holdings
    assert ("a" in world.state.models) != is_removed


def test_model_on_the_cpu_by_its_oom_policy_is_loaded_on_the_accelerator_after_the_policy_changed() -> None:
    world = begin({"a": {"oom_policy": "cpu"}}, gpus=GPU)
    world.foreign_mib("gpu-0", 1000)
    world.used("a")
    assert world.state.workers[process(world)].placement.devices == ("cpu",)
    offload(world)
    world.foreign_mib("gpu-0", 0)
    change(world, {"a": {"oom_policy": "fail_fast"}})
    world.live(5)
    world.used("a")
    assert world.state.workers[process(world)].placement.devices == ("gpu-0",)
