"""Growth of models on accelerators: a model pays for its own growth, and no other model does."""

from __future__ import annotations

from functools import partial

import pytest

from inference.authority import events
from inference.authority.lifecycle import Reason
from inference.authority.placement.device_growth import Evidence
from inference.protocol import ModelState
from tests.rigs import step_world
from tests.rigs.authority_world import configuration
from tests.rigs.step_world import MIB, StepWorld

GIB = 1024
CARD = "gpu-0"
SIZES = {"big": 16 * GIB, "small": 3 * GIB}
begin = partial(step_world.begin, gpus=(CARD,))


def card(*, tells_processes: bool, foreign_mib: int = 800) -> StepWorld:
    """A card of 24 GiB with `big`, which is in use, `small`, which is idle, and another program."""
    models = {name: {"parallel": 1, "min_residency": 0} for name in SIZES}
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
    world.send(events.DeviceNoticed())
    world.arrive()


def growth(world: StepWorld, name: str) -> tuple[int, Evidence] | None:
    """MiB of growth of a model, and why it is the model's."""
    worker = world.state.worker_of(world.model(name))
    found = None if worker is None else worker.device_growth.get(CARD)
    return None if found is None else (found.bytes // MIB, found.evidence)


@pytest.mark.parametrize(
    ("tells", "evidence"), [(True, Evidence.PROCESS), (False, Evidence.ONLY_ACTIVE)], ids=["told", "not told"]
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
