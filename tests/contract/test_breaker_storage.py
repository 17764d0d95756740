"""Guarantees of every breaker storage: state, counters and the end of the open period are in one place."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gateway.breaker.breaker_file import BreakerFile
from gateway.breaker.breakers import Breakers, Lease
from gateway.breaker.outcome import Failure, Scope, Success
from gateway.breaker.permits import BreakerState, Refused, Rule
from gateway.breaker.state_machine import BreakerStore
from headgate.shared.state_directory import StateDir

PAIR = Failure(Scope.PAIR, reached=True)


class World:
    """The clocks of two consecutive gateways; a restart begins a new monotonic clock."""

    def __init__(self, directory: Path) -> None:
        self.directory = StateDir(directory)
        self.monotonic = 500.0
        self.wall = 1_700_000_000.0

    def file(self) -> BreakerFile:
        """The storage of a gateway that has not loaded it yet."""
        return BreakerFile(self.directory, lambda: self.monotonic, lambda: self.wall)

    def pass_time(self, seconds: float) -> None:
        """Advances both clocks."""
        self.monotonic += seconds
        self.wall += seconds


async def _reopen_file(world: World, store: BreakerStore) -> BreakerStore:
    assert isinstance(store, BreakerFile)
    await store.close()
    world.monotonic = 3.0
    again = world.file()
    await again.load(("p",))
    return again


STORES: dict[str, Callable[[World], BreakerStore]] = {"memory": lambda _: BreakerStore(), "file": World.file}
REOPEN: dict[str, Callable[[World, BreakerStore], Awaitable[BreakerStore]]] = {"file": _reopen_file}
"""Storages that keep open breakers across a restart, and how a new gateway opens them."""


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, world: World) -> BreakerStore:
    return STORES[request.param](world)


def _breakers(world: World, store: BreakerStore) -> Breakers:
    breakers = Breakers(Rule(), lambda: world.monotonic, store=store)
    breakers.restore()
    return breakers


def _lease(breakers: Breakers, model: str = "m") -> Lease:
    lease = breakers.acquire("p", model, 1e9)
    assert isinstance(lease, Lease), lease
    return lease


def _open(breakers: Breakers, model: str = "m", verdict: Failure = PAIR) -> None:
    for _ in range(5):
        _lease(breakers, model).settle(verdict, "it failed")


def test_new_storage_is_closed_and_counts_from_zero(store: BreakerStore) -> None:
    storage = store.storage("p", "m")
    assert (storage.state, storage.counter, storage.success_counter, storage.opened_at) == ("closed", 0, 0, None)


def test_storage_returns_what_was_stored(store: BreakerStore) -> None:
    storage, opened_at = store.storage("p", "m"), datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
    for state in ("open", "half-open", "closed"):
        storage.state = state
        assert storage.state == state
    storage.opened_at, storage.open_until = opened_at, 1234.5
    assert (storage.opened_at, storage.open_until) == (opened_at, 1234.5)


def test_counters_are_independent(store: BreakerStore) -> None:
    storage = store.storage("p", "m")
    for _ in range(3):
        storage.increment_counter()
    storage.increment_success_counter()
    assert (storage.counter, storage.success_counter) == (3, 1)
    storage.reset_counter()
    assert (storage.counter, storage.success_counter) == (0, 1)
    storage.reset_success_counter()
    assert storage.success_counter == 0


def test_breakers_with_the_same_name_share_their_state(store: BreakerStore) -> None:
    store.storage("p", "m").state = "open"
    assert store.storage("p", "m").state == "open"
    assert store.storage("p", "").state == store.storage("p", "other").state == "closed"
    assert set(store.stored()) == {("p", "m"), ("p", ""), ("p", "other")}


def test_discarded_state_is_removed(store: BreakerStore) -> None:
    store.storage("p", "m").state = "open"
    store.discard("p", "m")
    store.discard("p", "never stored")
    assert list(store.stored()) == []
    assert store.storage("p", "m").state == "closed"


def test_breaker_opens_probes_and_closes_in_the_storage(store: BreakerStore, world: World) -> None:
    breakers, storage = _breakers(world, store), store.storage("p", "m")
    _open(breakers)
    assert (storage.state, storage.counter, storage.open_until) == ("open", 5, world.monotonic + 30.0)
    assert isinstance(breakers.acquire("p", "m", 1e9), Refused)
    world.pass_time(30.0)
    probe = _lease(breakers)
    assert (storage.state, probe.is_probe) == ("half-open", True)
    probe.settle(Success())
    assert (storage.state, storage.counter, storage.success_counter) == ("closed", 0, 0)


def test_change_by_another_process_applies_at_once_and_makes_earlier_results_late(
    store: BreakerStore, world: World
) -> None:
    breakers, storage = _breakers(world, store), store.storage("p", "m")
    before = _lease(breakers)
    storage.open_until, storage.state = world.monotonic + 12.0, "open"
    assert breakers.open_for("p", "m") == 12.0
    assert breakers.acquire("p", "m", 1e9) == Refused("p/m", 12.0)
    storage.state = "closed"
    before.settle(PAIR, "late")
    assert (storage.state, storage.counter) == ("closed", 0)
    assert breakers.open_for("p", "m") is None


def test_late_failure_does_not_extend_an_open_period_of_another_process(store: BreakerStore, world: World) -> None:
    breakers, storage = _breakers(world, store), store.storage("p", "m")
    before = _lease(breakers)
    storage.open_until, storage.state = world.monotonic + 12.0, "open"
    before.settle(Failure(Scope.PAIR, 90.0, opens=True), "late")
    assert (storage.open_until, storage.counter) == (world.monotonic + 12.0, 0)


def test_removed_provider_is_discarded_and_its_late_results_are_not_stored(store: BreakerStore, world: World) -> None:
    breakers = _breakers(world, store)
    running = _lease(breakers)
    breakers.forget("p")
    assert list(store.stored()) == []
    running.settle(PAIR, "late")
    assert store.storage("p", "m").counter == 0


@pytest.mark.parametrize("name", REOPEN)
async def test_open_period_continues_after_a_restart(name: str, world: World) -> None:
    store = STORES[name](world)
    breakers = _breakers(world, store)
    _open(breakers)
    _open(breakers, "long", Failure(Scope.PAIR, 90.0, reached=True))
    _lease(breakers, "closed").settle(PAIR, "it failed")
    world.pass_time(12.0)
    again = _breakers(world, await REOPEN[name](world, store))
    assert again.open_for("p", "m") == pytest.approx(18.0, abs=0.01)
    assert again.open_for("p", "long") == pytest.approx(78.0, abs=0.01)
    assert again.breaker("p", "m").describe()["source"] == "restart"
    assert again.states() == {"p/m": BreakerState.OPEN, "p/long": BreakerState.OPEN}


@pytest.mark.parametrize("name", REOPEN)
async def test_half_open_breaker_admits_one_probe_after_a_restart(name: str, world: World) -> None:
    store = STORES[name](world)
    breakers = _breakers(world, store)
    _open(breakers)
    world.pass_time(30.0)
    _lease(breakers).release()
    assert breakers.states()["p/m"] is BreakerState.HALF_OPEN
    again = _breakers(world, await REOPEN[name](world, store))
    clients = [again.acquire("p", "m", 1e9) for _ in range(9)]
    assert [client.is_probe for client in clients if isinstance(client, Lease)] == [True]
