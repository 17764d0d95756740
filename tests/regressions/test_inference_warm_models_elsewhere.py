"""Models in the warm pool whose next device is another one, and workers whose end is not booked yet.

Two earlier defects: a model that was restored onto the CPU could not be offloaded again, because its worker was killed
after the deadline; and a model that was offloaded from the CPU and belongs on an accelerator made every decision fail,
for all models.
"""

from __future__ import annotations

from typing import Any

from inference.authority import events
from inference.authority.retention import Mechanism
from inference.devices.signs import Sign
from inference.protocol import ExitCause, ModelState
from tests.rigs.authority_checks import CheckedWorld
from tests.rigs.authority_world import configuration

SIZES = {"a": 200, "b": 300}


def world_of(**keys: Any) -> CheckedWorld:
    """A world with one accelerator and two models."""
    found = {name: {"min_residency": 0, "parallel": 1, **keys} for name in SIZES}
    return CheckedWorld(configuration(found), SIZES, ("gpu-0",))


def test_model_restored_onto_the_cpu_can_be_offloaded_again() -> None:
    """It is kept in its process this time."""
    world = world_of(oom_policy="cpu")
    world.want("a")
    world.settle(1)
    world.command(events.Offload("a"))
    world.settle(1)
    assert world.state.models["a"].state is ModelState.WARM
    world.put_sign("gpu-0", Sign.FAILED)
    world.settle(1)
    world.want("a")
    world.settle(1)
    assert world.state.models["a"].state is ModelState.READY
    world.command(events.Offload("a"))
    world.settle(1)
    kept = world.state.models["a"].kept
    assert kept is not None
    assert kept.mechanism is Mechanism.STANDBY


def test_model_offloaded_from_the_cpu_is_loaded_onto_its_accelerator() -> None:
    """Its warm copy on the CPU is dropped, and the other model is loaded too."""
    world = world_of()
    world.want("a")
    world.settle(1)
    world.command(events.Move("a", "cpu", 20))
    world.settle(1)
    world.command(events.Offload("a"))
    world.settle(1)
    assert world.state.models["a"].state is ModelState.WARM
    world.command(events.Refresh())
    while world.later:
        world.deliver()
    world.want("a")
    world.want("b")
    world.settle(2)
    assert not world.pending
    assert not world.failures
    worker = world.state.worker_of(world.state.models["a"])
    assert worker is not None
    assert worker.placement.devices == ("gpu-0",)


def test_worker_whose_end_is_not_booked_gets_no_request() -> None:
    """After an out-of-memory error its memory need is measured again before its end is booked."""
    world = world_of()
    world.want("a")
    world.settle(1)
    world.end(world.state.models["a"].worker or "", ExitCause.OOM_COMPUTE)
    world.want("a")
    assert not world.leases
    world.settle(5)
    assert not world.pending


def test_wanted_warm_models_that_exclude_each_other_do_not_wait_for_each_other() -> None:
    """Before, each waited until its deadline for the other to leave. The one that has waited longest comes first."""
    sizes = {"owner": 200, "guest": 200, "other": 200}
    models: dict[str, dict[str, Any]] = {name: {"min_residency": 0, "parallel": 1} for name in sizes}
    models["owner"]["dedicated"] = True
    world = CheckedWorld(configuration(models), sizes, ())
    for name in ("other", "guest", "owner"):
        world.want(name)
        world.settle(1)
        world.command(events.Offload(name))
        world.settle(1)
        assert world.state.models[name].state is ModelState.WARM
    world.want("other")
    world.deliver_all()
    for name in ("owner", "guest"):  # they wait for the request that runs
        world.want(name)
        world.deliver_all()
        world.tick(0.1)
    world.settle(10)
    assert not world.pending
    assert not world.failures


def test_released_memory_of_a_wanted_warm_model_is_no_warm_copy() -> None:
    """Before, a decision failed when a warm model was wanted while its accelerator memory was still being released."""
    sizes = {"a": 200, "b": 400}
    models = {name: {"min_residency": 0, "parallel": 1} for name in sizes}
    world = CheckedWorld(configuration(models, memory_limit_gb=0.6), sizes, ("gpu-0",), "sim")
    world.want("b")
    world.settle(1)
    world.want("a")
    for _ in range(40):
        world.want("b")
        world.deliver()
        world.tick(0.1)
        world.want("a")
    world.settle(60)
    assert not world.pending


def test_drained_model_stays_after_the_last_optional_load_was_refused() -> None:
    """Before, it continued draining for a request that had been withdrawn."""
    sizes = {"a": 200, "b": 400}
    models = {name: {"min_residency": 0, "parallel": 1} for name in sizes}
    config = configuration(models, memory_limit_gb=0.6, enable_lazy_model_loading=False)
    world = CheckedWorld(config, sizes, ())
    world.want("a", counts_as_use=False)
    ticket = world.want("b", counts_as_use=False)
    world.want("a")
    for _ in range(8):
        world.deliver_all(3)
        world.tick(0.5)
    world.withdraw(ticket)
    world.settle(5)
    assert not world.pending
    assert world.state.models["a"].state is ModelState.READY
