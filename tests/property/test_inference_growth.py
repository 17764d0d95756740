"""Growth of models on an accelerator evicts no other model, whatever grows, how much, and when it is noticed."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inference.authority import events
from inference.authority.lifecycle import Reason
from inference.authority.placement.device_growth import tolerated_bytes
from inference.protocol import ModelState
from tests.rigs.authority_world import configuration
from tests.rigs.step_world import MIB, StepWorld

pytestmark = pytest.mark.unmeasured

CARD = "gpu-0"
SIZES = {"large": 12 * 1024, "medium": 6 * 1024, "idle": 2 * 1024}
"""MiB on a card of 24 GiB. With the other program, 0.8 GiB of the usable memory are left."""
CARD_MIB, FOREIGN_MIB = 24 * 1024, 800
MAX_GROWTHS, MAX_MIB = 5, 300
"""Together less than an eighth of `large`, which is the most that is believed without figures of processes."""
Growth = tuple[str, int, int]
"""A model, MiB on a card of 24 GiB, and the seconds until the next one."""
FULL: list[Growth] = [("large", 300, 2), ("large", 300, 2), ("large", 225, 2)]


@settings(max_examples=20, deadline=None)
@given(
    tells=st.booleans(),
    scale=st.sampled_from((1, 8)),
    growths=st.lists(
        st.tuples(st.sampled_from(("large", "medium")), st.integers(1, MAX_MIB), st.sampled_from((0, 2, 20))),
        min_size=1,
        max_size=MAX_GROWTHS,
    ),
)
@example(tells=False, scale=1, growths=[("large", MAX_MIB, 2)] * MAX_GROWTHS)
@example(tells=True, scale=8, growths=[("medium", MAX_MIB, 20)] * MAX_GROWTHS)
@example(tells=True, scale=1, growths=[*FULL, ("medium", 230, 2), ("large", 230, 20)])
@example(tells=True, scale=8, growths=[*FULL, ("medium", 240, 20), ("large", 240, 20)])
def test_growth_of_a_model_evicts_no_other_model(tells: bool, scale: int, growths: list[Growth]) -> None:
    """A busy model grows several times. Growth that does not fit unloads that model and no other. The growth of all
    models that is not booked stays within the tolerated bytes. Without memory figures of processes only one model is
    busy.
    """
    card_bytes = CARD_MIB // scale * MIB
    sizes = {name: size // scale for name, size in SIZES.items()}
    models = {name: {"parallel": 1, "min_residency": 0} for name in SIZES}
    world = StepWorld(configuration(models), sizes, (CARD,), tells_processes=tells, gpu_bytes=card_bytes)
    world.arrive()
    world.foreign_mib(CARD, FOREIGN_MIB // scale)
    for name in ("idle", "medium"):
        world.used(name)
    busy = ("large", "medium") if tells else ("large",)
    for name in busy:
        world.leased(name)
    world.live(20)
    foreign = world.state.ledger.balance(CARD).foreign_bytes
    grown = set()
    for name, mib, seconds in growths:
        worker = world.model(name).worker
        if name in busy and worker is not None and world.model(name).state is ModelState.BUSY:
            world.grow_pools(worker, CARD, mib * MIB // scale)
            grown.add(name)
        world.send(events.DeviceNoticed())
        world.arrive()
        world.live(seconds)
        assert world.state.ledger.balance(CARD).foreign_bytes <= foreign + tolerated_bytes(card_bytes)
    for lease in list(world.leases):
        world.finish(lease)
    world.live(60)
    assert {(record.model_name, record.reason) for record in world.state.evictions} <= {
        (name, Reason.OUTGREW) for name in grown
    }
    for name in SIZES.keys() - grown:
        assert world.model(name).state is ModelState.READY, name
