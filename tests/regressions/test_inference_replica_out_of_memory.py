"""Requests that wait for a replica whose process has run out of memory."""

from __future__ import annotations

from typing import Any

from inference.protocol import ExitCause
from tests.rigs.authority_checks import CheckedWorld
from tests.rigs.authority_world import configuration


def test_requests_of_a_replica_that_ran_out_of_memory_go_to_another_at_once() -> None:
    """Before, they waited until its memory need had been measured again, although another replica was loaded."""
    model: dict[str, Any] = {"min_residency": 0, "parallel": 4, "replicas": "1..2", "warm": False}
    world = CheckedWorld(configuration({"a": model}), {"a": 200}, ("gpu-0", "gpu-1"), "sim")
    world.want("a", alone=True)  # nothing runs beside it
    for number in range(12):
        world.want("a", conversation=f"{(2 + number) % 4}")
    world.want("a@2", any_replica=False)
    for _ in range(8):
        world.deliver_all(3)
        world.tick(0.5)
    first, second = world.state.models["a"], world.state.models["a@2"]
    assert first.queue.waiters
    assert second.worker is not None
    assert first.worker is not None
    world.end(first.worker, ExitCause.OOM_COMPUTE, was_ready=True, unexplained=False)
    assert not world.state.models["a"].queue.waiters
    world.settle(60)
    assert not world.pending
