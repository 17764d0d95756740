"""Cost of eviction: bytes x seconds to restore x recency, for loaded and for warm models."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from inference.authority.placement.ledger import Account, Ledger
from inference.authority.placement.plan import Held, Option, Placement, Policy, Request, Standing, plan
from inference.authority.retention import HOST, Leaver, Warm, displaced, kept_of

NOW = 10_000.0
SIZE = 500
Look = tuple[float, float]
"""Seconds to restore the model, and seconds since its last use."""

CHOICES = [
    ((5.0, 0.0), (1.0, 0.0), "b"),  # slower to restore: stays
    ((1.0, 0.0), (5.0, 0.0), "a"),
    ((1.0, 600.0), (1.0, 30.0), "a"),  # longer idle: leaves
    ((1.0, 30.0), (1.0, 600.0), "b"),
    ((7.0, 300.0), (1.0, 0.0), "b"),  # seven times as slow, but worth a sixth after five minutes
    ((5.0, 300.0), (1.0, 0.0), "a"),
]


def evicted(looks: Sequence[Look]) -> tuple[str, ...]:
    """The model that leaves for another one of the same size, on a full device."""
    ledger, held = Ledger().open(Account("gpu-0", SIZE * len(looks), SIZE * len(looks))), []
    for name, (seconds, idle) in zip("abc", looks, strict=False):
        need = {"gpu-0": SIZE}
        ledger = ledger.reserve(name, name, need).commit(name, need)
        held.append(Held(name, name, Standing.IDLE, need, NOW - idle, seconds))
    decision = plan(Request("new", (Option("gpu-0", {"gpu-0": SIZE}),)), ledger, held, Policy(NOW))
    assert isinstance(decision, Placement)
    return decision.evict


def warm(name: str, look: Look) -> Warm:
    seconds, idle = look
    return Warm(name, SIZE, seconds, NOW - idle)


@pytest.mark.parametrize(("a", "b", "goes"), CHOICES)
def test_loaded_model_that_is_cheaper_to_restore_is_evicted(a: Look, b: Look, goes: str) -> None:
    assert evicted((a, b)) == (goes,)


@pytest.mark.parametrize(("a", "b", "goes"), CHOICES)
def test_warm_model_that_is_cheaper_to_restore_is_dropped(a: Look, b: Look, goes: str) -> None:
    assert displaced(warm("new", (100.0, 0.0)), [warm("a", a), warm("b", b)], SIZE, NOW) == (goes,)


@pytest.mark.parametrize(("a", "b", "goes"), CHOICES)
def test_leaving_model_that_is_more_expensive_to_restore_is_kept_warm(a: Look, b: Look, goes: str) -> None:
    """The host has memory for one."""
    ledger = Ledger().open(Account("gpu-0", 2 * SIZE, 2 * SIZE)).open(Account(HOST, SIZE, SIZE))
    leavers = []
    for name, look in (("a", a), ("b", b)):
        ledger = ledger.reserve(name, name, {"gpu-0": SIZE})
        leavers.append(Leaver(name, name, warm(name, look)))
    assert kept_of(leavers, {"gpu-0": 2 * SIZE}, ledger, NOW) == {"a", "b"} - {goes}


def test_warm_model_is_not_dropped_for_one_that_loads_faster() -> None:
    kept = [warm("a", (2.0, 0.0))]
    assert displaced(warm("new", (3.0, 0.0)), kept, SIZE, NOW) == ("a",)
    assert displaced(warm("new", (1.0, 0.0)), kept, SIZE, NOW) is None


@pytest.mark.parametrize(
    ("standing", "seconds", "idle", "cost"),
    [
        (Standing.IDLE, 2.0, 0.0, 2_000.0),
        (Standing.IDLE, 2.0, 60.0, 1_000.0),
        (Standing.IDLE, 2.0, 540.0, 200.0),
        (Standing.IDLE, 0.0, 0.0, 10.0),
        (Standing.IDLE, 2.0, -5.0, 2_000.0),
        (Standing.WARM, 2.0, 60.0, 1e-9),
    ],
)
def test_cost_of_eviction(standing: Standing, seconds: float, idle: float, cost: float) -> None:
    """Of 1,000 bytes; halved after a minute of idle time."""
    held = Held("a", "a", standing, {"gpu-0": 600, "cpu": 400}, NOW - idle, seconds)
    assert held.cost(NOW) == pytest.approx(cost)
    if standing is Standing.IDLE:
        assert Warm("a", 1000, seconds, NOW - idle).worth(NOW) == pytest.approx(cost)
