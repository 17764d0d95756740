"""A lowered memory limit while a model leaves for another one, whose requests then end."""

from __future__ import annotations

from typing import Any

from inference.protocol import ModelState
from tests.rigs.authority_checks import CheckedWorld
from tests.rigs.authority_world import configuration


def test_model_that_drains_for_others_leaves_for_a_lowered_memory_limit() -> None:
    """Before, it counted as gone: when the other model was not wanted any more, it stayed and exceeded the limit."""
    sizes = {"a": 400, "b": 600}
    models: dict[str, dict[str, Any]] = {name: {"min_residency": 0, "parallel": 1} for name in sizes}
    world = CheckedWorld(configuration(models), sizes, ("gpu-0",), "sim")
    world.want("a")
    world.settle(1)
    world.want("a")
    ticket = world.want("b")
    while world.state.models["a"].state is not ModelState.DRAINING:
        world.deliver_all()
        world.tick(0.1)
    world.change(configuration(models, memory_limit_gb=0.3))
    world.withdraw(ticket)
    world.settle(60)
    limit = world.state.ledger.limit_bytes
    assert limit is not None
    assert world.state.ledger.loaded_bytes <= limit
