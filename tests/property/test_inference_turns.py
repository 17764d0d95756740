"""Models that do not fit together all get a turn within the promised time, and no answer is cut."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random

import hypothesis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.authority.placement.ledger import Account, Ledger
from inference.authority.placement.plan import EvictionState, Held, Option, Placement, Policy, Refusal, Request, Result
from inference.authority.placement.turns import (
    MAX_SWAP_SECONDS,
    Claim,
    Decision,
    Demand,
    Occupancy,
    Resident,
    age_rank,
    decide,
    turn_ends_at,
)
from inference.authority.wait_queue import Waiter
from inference.protocol import Priority

RELEASE_SECONDS = 0.5
LONGEST_ANSWER_SECONDS = 8.0


@dataclass
class Simulated:
    """One model of the simulation: clients that repeat their request as soon as it is answered."""

    name: str
    size: int
    load_seconds: float
    min_residency: float
    state: str = "cold"
    ready_at: float = 0.0
    last_used_at: float = 0.0
    in_flight: int = 0
    waiting: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    called: float = math.inf
    turns: int = 0

    def eviction_state(self, now: float) -> EvictionState:
        if self.state in ("draining", "releasing"):
            return EvictionState.LEAVING
        if self.state == "loading":
            return EvictionState.LOADING
        if self.in_flight:
            return EvictionState.BUSY
        return EvictionState.YOUNG if now - self.last_used_at < self.min_residency else EvictionState.IDLE


class World:
    """The behaviour of the authority without processes: events in order of time, with a decision after each."""

    def __init__(self, models: list[Simulated], capacity: int, random: Random, pause: float) -> None:
        self.models = {model.name: model for model in models}
        self.ledger = Ledger().open(Account("gpu", capacity, capacity)).observe("gpu", 0, capacity)
        self.random = random
        self.pause = pause
        self.now = 0.0
        self.numbers = itertools.count()
        self.events: list[tuple[float, int, str, str]] = []
        self.wake_at = math.inf
        self.answered = 0

    def at(self, seconds: float, kind: str, model: Simulated) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.numbers), kind, model.name))

    def run(self, until: float) -> None:
        while self.events and self.events[0][0] <= until:
            self.now, _, kind, name = heapq.heappop(self.events)
            getattr(self, f"on_{kind}")(self.models[name])
            self.reconcile()

    def on_ask(self, model: Simulated) -> None:
        if model.state == "ready":
            self.serve(model, self.now)
        else:
            model.waiting.append(self.now)

    def serve(self, model: Simulated, since: float) -> None:
        model.waits.append(self.now - since)
        model.in_flight += 1
        model.last_used_at = self.now
        self.at(self.random.uniform(0.05, LONGEST_ANSWER_SECONDS), "answered", model)

    def on_answered(self, model: Simulated) -> None:
        model.in_flight -= 1
        model.last_used_at = self.now
        self.answered += 1
        self.at(self.random.uniform(0, self.pause), "ask", model)
        if model.state == "draining" and not model.in_flight:
            self.gone(model)

    def gone(self, model: Simulated) -> None:
        model.state = "releasing"
        self.ledger = self.ledger.leave(model.name)
        self.at(RELEASE_SECONDS, "released", model)

    def on_released(self, model: Simulated) -> None:
        self.ledger = self.ledger.release(model.name)
        model.state = "cold"
        self.observe()

    def observe(self) -> None:
        used = sum(sum(holding.bytes.values()) for holding in self.ledger.holdings.values())
        capacity = self.ledger.accounts["gpu"].capacity_bytes
        self.ledger = self.ledger.observe("gpu", used, capacity - used)

    def on_loaded(self, model: Simulated) -> None:
        self.ledger = self.ledger.commit(model.name, {"gpu": model.size})
        model.state, model.ready_at, model.last_used_at = "ready", self.now, self.now
        model.turns += 1
        for since in model.waiting:
            self.serve(model, since)
        model.waiting = []

    def wake(self, due: float, model: Simulated) -> None:
        at = max(due, self.now) + 1e-6
        if at < self.wake_at - 1e-9:
            self.wake_at = at
            self.at(self.wake_at - self.now, "wake", model)

    def on_wake(self, _model: Simulated) -> None:
        if self.now >= self.wake_at - 1e-9:  # else an earlier timer replaced it
            self.wake_at = math.inf

    def reconcile(self) -> None:
        wanted = [item for item in self.models.values() if item.waiting and item.state == "cold"]
        ahead: list[Claim] = []
        for model in sorted(
            wanted, key=lambda item: (item.called, age_rank([Waiter(0, Priority.NORMAL, item.waiting[0])]))
        ):
            if claim := self.advance(model, ahead):
                ahead.append(claim)

    def advance(self, model: Simulated, ahead: list[Claim]) -> Claim | None:
        residents = {
            item.name: Resident(item.ready_at, item.min_residency, item.load_seconds)
            for item in self.models.values()
            if item.state == "ready"
        }
        held = [
            Held(
                item.name, item.name, item.eviction_state(self.now), self.ledger.holdings[item.name].bytes,
                item.last_used_at, item.load_seconds,
            )
            for item in self.models.values()
            if item.state != "cold"
        ]  # fmt: skip
        demand = Demand(model.waiting[0], model.load_seconds)
        request = Request(model.name, (Option("gpu", {"gpu": model.size}),))
        decision = decide(request, demand, Occupancy(self.ledger, tuple(held), residents, Policy(self.now)), ahead)
        if isinstance(decision.outcome, Refusal):
            assert decision.outcome.waits_for, "each model fits alone, so every refusal is a wait"
            young = [
                item.last_used_at + item.min_residency
                for item in self.models.values()
                if item.eviction_state(self.now) is EvictionState.YOUNG
            ]
            self.wake(min((*young, decision.again_at or math.inf)), model)
        elif decision.outcome.result is Result.FULL:
            model.called = min(model.called, self.now)
            for name in decision.outcome.evict:
                self.evict(self.models[name], demand, residents)
        else:
            model.called = math.inf
            self.ledger = self.ledger.reserve(model.name, model.name, decision.outcome.need)
            self.observe()
            model.state = "loading"
            self.at(model.load_seconds, "loaded", model)
        return decision.claim

    def evict(self, victim: Simulated, demand: Demand, residents: Mapping[str, Resident]) -> None:
        assert victim.state == "ready"
        if victim.eviction_state(self.now) is not EvictionState.IDLE:
            assert turn_ends_at(residents[victim.name], demand) <= self.now
            assert self.now - victim.ready_at >= victim.min_residency
        victim.state = "draining"
        if not victim.in_flight:
            self.gone(victim)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[World, int]:
    count = draw(st.integers(2, 5))
    models = [
        Simulated(
            f"m{number}",
            draw(st.integers(20, 100)),
            draw(st.floats(0.1, 25)),
            draw(st.sampled_from([0.0, 0.5, 5.0, 20.0])),
        )
        for number in range(count)
    ]
    clients = draw(st.integers(1, 3))
    random = Random(draw(st.integers(0, 2**16)))
    return World(models, 100, random, draw(st.sampled_from([0.01, 1.0, 30.0]))), clients


@pytest.mark.unmeasured
@settings(deadline=None, max_examples=12, phases=[hypothesis.Phase.generate])
@given(worlds())
def test_every_request_is_answered_within_the_promised_time(made: tuple[World, int]) -> None:
    world, clients = made
    models = list(world.models.values())
    for model in models:
        for _ in range(clients):
            world.at(world.random.uniform(0, 5), "ask", model)
    pair = max(
        max(one.min_residency, min(MAX_SWAP_SECONDS, one.load_seconds + other.load_seconds))
        for one in models
        for other in models
    )
    slowest = max(model.load_seconds for model in models)
    one_turn = pair + LONGEST_ANSWER_SECONDS + RELEASE_SECONDS + slowest
    bound = len(models) * one_turn
    world.run(400)
    for model in models:
        assert model.turns
        assert max(model.waits, default=0.0) <= bound
        assert all(world.now - since <= bound for since in model.waiting)
    ours = sum(model.size for model in models if model.state != "cold")
    assert ours == sum(sum(holding.bytes.values()) for holding in world.ledger.holdings.values()) <= 100


def test_waiting_model_gets_its_claimed_room_and_a_smaller_one_only_the_rest() -> None:
    ledger = Ledger().open(Account("gpu", 100, 100)).reserve("a", "a", {"gpu": 60}).commit("a", {"gpu": 60})
    held = [Held("a", "a", EvictionState.LEAVING, {"gpu": 60}, 0.0)]

    def ask(name: str, count: int, ahead: list[Claim]) -> Decision:
        request = Request(name, (Option("gpu", {"gpu": count}),))
        return decide(request, Demand(0.0, 1.0), Occupancy(ledger, tuple(held), {}, Policy(0.0)), ahead)

    first = ask("b", 80, [])
    assert isinstance(first.outcome, Refusal)
    assert first.claim == Claim("b", {"gpu": 80}, ("a",))
    assert isinstance(ask("s", 20, [first.claim]).outcome, Placement)
    behind = ask("s", 30, [first.claim])
    assert isinstance(behind.outcome, Refusal)
    assert behind.outcome.waits_for == ("b",)
    assert behind.claim is None
    assert isinstance(ask("s", 30, []).outcome, Placement)


def test_claim_is_on_the_models_whose_turns_end_first() -> None:
    ledger = Ledger().open(Account("gpu", 100, 100))
    held, residents = [], {}
    for name, ready_at in (("late", 20.0), ("early", 10.0), ("later", 30.0)):
        ledger = ledger.reserve(name, name, {"gpu": 30}).commit(name, {"gpu": 30})
        held.append(Held(name, name, EvictionState.BUSY, {"gpu": 30}, 40.0))
        residents[name] = Resident(ready_at, 15.0, 1.0)
    request = Request("b", (Option("gpu", {"gpu": 65}),))

    def at(now: float, models: list[Held]) -> Decision:
        return decide(request, Demand(0.0, 1.0), Occupancy(ledger, tuple(models), residents, Policy(now)), [])

    waiting = at(24.0, held)
    assert waiting.claim is not None
    assert set(waiting.claim.victims) == {"late", "early"}
    assert waiting.again_at == 35
    leaving = at(35.0, held)
    assert isinstance(leaving.outcome, Placement)
    assert set(leaving.outcome.evict) == {"late", "early"}
    assert leaving.claim == Claim("b", {"gpu": 65}, leaving.outcome.evict)
    assert at(24.0, [replace(item, eviction_state=EvictionState.LOADING) for item in held]).again_at is None


def test_load_without_waiting_requests_is_cancelled_only_for_a_model_that_needs_its_room() -> None:
    ledger = Ledger().open(Account("x", 100, 100)).open(Account("y", 100, 100))
    for name, device in (("a", "x"), ("b", "y"), ("c", "y")):
        ledger = ledger.reserve(name, name, {device: 50})
    held = tuple(Held(name, name, EvictionState.LOADING, ledger.holdings[name].bytes, 0.0) for name in "abc")
    occupancy = Occupancy(ledger, held, {}, Policy(0.0), frozenset("ab"))
    request = Request("d", (Option("y", {"y": 40}),))
    decision = decide(request, Demand(0.0, 1.0), occupancy, [])
    assert isinstance(decision.outcome, Refusal)
    assert decision.give_up == ("b",)
    assert decision.again_at is None
    assert decide(request, Demand(0.0, 1.0), replace(occupancy, abandoned=frozenset()), []).give_up == ()


def test_another_device_is_used_if_the_first_one_is_claimed() -> None:
    ledger = Ledger().open(Account("x", 100, 100)).open(Account("y", 200, 200))
    request = Request("s", (Option("x", {"x": 60}), Option("y", {"y": 70})))
    occupancy = Occupancy(ledger, (), {}, Policy(0.0))
    alone = decide(request, Demand(0.0, 1.0), occupancy, []).outcome
    beside = decide(request, Demand(0.0, 1.0), occupancy, [Claim("b", {"x": 50})]).outcome
    assert isinstance(alone, Placement)
    assert isinstance(beside, Placement)
    assert (alone.device, beside.device) == ("x", "y")
    both = [Claim("b", {"x": 50}), Claim("c", {"y": 140})]
    nowhere = decide(request, Demand(0.0, 1.0), occupancy, both).outcome
    assert isinstance(nowhere, Refusal)
    assert nowhere.waits_for == ("b", "c")


def test_request_waits_for_an_unfinished_load_and_is_refused_if_it_cannot_fit() -> None:
    ledger = Ledger().open(Account("gpu", 100, 100)).reserve("a", "a", {"gpu": 40})
    ledger = ledger.observe("gpu", 70, 30)  # 30 more than a's: its context, or another program

    def ask(count: int, books: Ledger) -> Placement | Refusal:
        held = (Held("a", "a", EvictionState.FIXED, {"gpu": 40}, 0.0),)
        request = Request("b", (Option("gpu", {"gpu": count}),))
        return decide(request, Demand(0.0, 1.0), Occupancy(books, held, {}, Policy(0.0)), []).outcome

    waiting = ask(50, ledger)
    assert isinstance(waiting, Refusal)
    assert waiting.waits_for == ("a",)
    final = ask(50, ledger.commit("a", {"gpu": 40}))
    assert isinstance(final, Refusal)
    assert not final.waits_for
    never = ask(101, ledger)
    assert isinstance(never, Refusal)
    assert not never.waits_for


def test_turn_lasts_as_long_as_a_swap_with_an_upper_limit() -> None:
    def ends(min_residency: float, load_seconds: float, since: float = 0.0) -> float:
        return turn_ends_at(Resident(100.0, min_residency, load_seconds), Demand(since, load_seconds))

    assert ends(5, 1) == 105
    assert ends(5, 8) == 116
    assert ends(5, 300) == 100 + MAX_SWAP_SECONDS
    assert ends(60, 300) == 160
    assert ends(5, 1, since=200) == 205


def test_priorities_order_models_without_starvation() -> None:
    def rank(priority: Priority, arrived_at: float) -> float:
        return age_rank([Waiter(1, priority, arrived_at)])

    assert rank(Priority.HIGH, 9) < rank(Priority.NORMAL, 0) < rank(Priority.HIGH, 11)
    assert rank(Priority.NORMAL, 49) < rank(Priority.LOW, 0) < rank(Priority.NORMAL, 51)
    both = [Waiter(1, Priority.LOW, 0.0), Waiter(2, Priority.HIGH, 30.0)]
    assert age_rank(both) == 30
