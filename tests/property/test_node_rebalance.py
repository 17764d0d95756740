"""Copies of models reach a fixed point after the last change of demand, nodes or settings."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.nodes.node_table import NodeTable
from gateway.nodes.rebalance import RebalanceState, cheapest, protected, rebalance
from inference.protocol import ModelState, ModelStatus

pytestmark = pytest.mark.unmeasured

STEP_SECONDS, IDLE_SECONDS, PARALLEL = 5.0, 60.0, 4
MODELS = ("m0", "m1", "m2", "m3")


@dataclass
class World:
    """Nodes with room for a number of models; each model is on some of them and has a number of running requests."""

    rooms: dict[str, int]
    listed: dict[str, frozenset[str]]
    demand: dict[str, int] = field(default_factory=dict)
    replicas: dict[str, int] = field(default_factory=dict)
    idle: dict[tuple[str, str], float] = field(default_factory=dict)
    """Seconds for which each copy (node, model) has not been used; negative while it is loaded."""
    down: set[str] = field(default_factory=set)
    state: RebalanceState = field(default_factory=RebalanceState)
    now: float = 0.0

    def copies(self, model: str) -> list[str]:
        return sorted(node for node, other in self.idle if other == model)

    def requests(self) -> dict[tuple[str, str], int]:
        """The running requests of each copy: one after the other goes to the node with the fewest."""
        found = dict.fromkeys(self.idle, 0)
        loads = dict.fromkeys(self.rooms, 0)
        for model, demand in sorted(self.demand.items()):
            nodes = [node for node in self.copies(model) if self.idle[node, model] >= 0]
            for _ in range(demand if nodes else 0):
                node = min(nodes, key=lambda node: (found[node, model] >= PARALLEL, loads[node], node))
                found[node, model] += 1
                loads[node] += 1
        return found

    def plan(self, node: str, used: dict[tuple[str, str], int]) -> dict[str, object]:
        held = [(seconds, model) for (other, model), seconds in self.idle.items() if other == node]
        if len(held) < self.rooms[node]:
            return {"result": "FREE"}
        idle = [(seconds, model) for seconds, model in held if seconds >= 0 and not used.get((node, model))]
        return {"result": "FULL", "evict": [max(idle)[1]]} if idle else {"result": "NO_FIT"}

    def load(self, node: str, model: str, used: dict[tuple[str, str], int]) -> bool:
        plan = self.plan(node, used)
        if plan["result"] == "NO_FIT":
            return False
        for evicted in plan.get("evict", ()):  # type: ignore[attr-defined]
            del self.idle[node, evicted]
        self.idle[node, model] = -STEP_SECONDS
        return True

    def step(self) -> int:
        """One decision and what follows from it; returns the number of copies that are loaded."""
        used = self.requests()
        table = NodeTable()
        for node in self.rooms.keys() - self.down:
            for model in MODELS:
                if node in self.listed[model]:
                    table.update_model(node, self.status(node, model, used))
        found = rebalance(table, self.replicas, self.state, self.now)
        self.state, loads = found.state, 0
        for copy in found.copies:
            plans = {node: self.plan(node, used) for node in copy.nodes}
            node = cheapest(copy, plans, protected(table, self.replicas))
            if node is None:
                self.state = self.state.after_refusal(copy.model, copy.nodes, self.now)
            else:
                loads += self.load(node, copy.model, used)
        for model, node in found.kept:
            if (node, model) in self.idle:
                self.idle[node, model] = 0.0
        for model, demand in self.demand.items():  # a request loads its model where none has it
            if demand and not self.copies(model):
                nodes = sorted(self.listed[model] - self.down)
                loads += any(self.load(node, model, used) for node in nodes)
        for key in list(self.idle):
            self.idle[key] = 0.0 if used.get(key) else self.idle[key] + STEP_SECONDS
            if self.idle[key] > IDLE_SECONDS:
                del self.idle[key]
        self.now += STEP_SECONDS
        return loads

    def status(self, node: str, model: str, used: dict[tuple[str, str], int]) -> ModelStatus:
        seconds = self.idle.get((node, model))
        if seconds is None:
            return ModelStatus(model, ModelState.COLD)
        state = ModelState.LOADING if seconds < 0 else ModelState.READY
        requests = used.get((node, model), 0)
        return ModelStatus(model, state, parallel=PARALLEL, in_flight=requests, idle_seconds=max(0.0, seconds))


ROOMS = st.lists(st.integers(1, 3), min_size=2, max_size=5)
CHANGES = st.one_of(
    st.tuples(st.just("demand"), st.sampled_from(MODELS), st.integers(0, 14)),
    st.tuples(st.just("replicas"), st.sampled_from(MODELS), st.integers(0, 3)),
    st.tuples(st.just("node"), st.integers(0, 4), st.just(0)),
    st.tuples(st.just("wait"), st.integers(1, 12), st.just(0)),
)


@given(ROOMS, st.lists(st.frozensets(st.integers(0, 4)), min_size=4, max_size=4), st.lists(CHANGES, max_size=8))
@settings(max_examples=60)
def test_copies_reach_a_fixed_point(
    rooms: list[int], listed: list[frozenset[int]], changes: list[tuple[str, object, int]]
) -> None:
    names = [f"n{number}" for number in range(len(rooms))]
    on = {model: frozenset(names[place % len(names)] for place in places)
          for model, places in zip(MODELS, listed, strict=True)}  # fmt: skip
    world = World(dict(zip(names, rooms, strict=True)), on)
    for what, which, amount in changes:
        if what == "demand":
            world.demand[str(which)] = amount
        elif what == "replicas":
            world.replicas[str(which)] = amount
        elif what == "wait":
            for _ in range(int(str(which))):
                world.step()
        else:
            node = names[int(str(which)) % len(names)]
            world.down ^= {node}
            world.idle = {key: seconds for key, seconds in world.idle.items() if key[0] != node}
    for _ in range(120):
        world.step()
    copies = set(world.idle)
    assert sum(world.step() for _ in range(40)) == 0
    assert set(world.idle) == copies
