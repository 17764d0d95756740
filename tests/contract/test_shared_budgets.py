"""Guarantees of budgets over several gateways."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest

from gateway.access.budgets import Budget, Budgets, Spent
from gateway.shared_state.shared_state import SharedState
from gateway.usage.shared_budgets import SharedBudgets
from tests.rigs.redis_server import RedisServer
from tests.rigs.shared_gateways import until

pytestmark = pytest.mark.unmeasured

BUDGET = Budget(dollars=3.0)


class One:
    """The budgets of one gateway."""

    def __init__(self, url: str, name: str) -> None:
        self.state = SharedState(url)
        self.budgets = Budgets()
        self.keys = ["ann"]
        self.shared = SharedBudgets(self.state, name, lambda: self.keys, self.budgets.spent, time.time)

    def use(self, dollars: float, key: str = "ann") -> None:
        self.budgets.note(key, dollars, 10, time.time())

    @property
    def elsewhere(self) -> Spent:
        return self.shared.elsewhere("ann", time.time())

    @property
    def is_used_up(self) -> bool:
        return self.budgets.check("ann", BUDGET, time.time(), self.elsewhere) is not None


@pytest.fixture
async def two(server: RedisServer) -> AsyncIterator[tuple[One, One]]:
    server.command("FLUSHALL")
    gateways = One(server.url, "a"), One(server.url, "b")
    for gateway in gateways:
        await gateway.state.start()
    yield gateways
    for gateway in gateways:
        await gateway.state.stop()


async def test_use_at_one_gateway_counts_at_the_other_within_two_heartbeats(two: tuple[One, One]) -> None:
    one, other = two
    one.use(1.5)
    one.use(1.0)
    await until(lambda: other.elsewhere == Spent(2.5, 20), 3)
    assert not other.is_used_up
    other.use(0.5)
    assert other.is_used_up
    await until(lambda: one.is_used_up, 3)


async def test_store_that_lost_its_data_gets_the_totals_again(two: tuple[One, One], server: RedisServer) -> None:
    one, other = two
    one.use(1.0)
    await until(lambda: other.elsewhere.dollars == 1.0 and one.state.gateways == 2, 3)
    server.kill()
    try:
        await until(lambda: not one.state.is_up and not other.state.is_up)
        one.keys = other.keys = ["ann", "created-since"]
        one.use(0.5, "created-since")
        assert other.elsewhere.dollars == 1.0
        other.use(1.0)
        assert other.elsewhere.dollars == 2.0, "the other gateways are assumed to use as much"
        assert other.is_used_up
    finally:
        server.start()
    await until(lambda: one.state.is_up and other.state.is_up)
    await until(lambda: (one.elsewhere.dollars, other.elsewhere.dollars) == (1.0, 1.0), 3)
    assert not one.is_used_up
    created = other.shared.elsewhere("created-since", time.time())
    assert created == Spent(0.5, 10), "the use of a key that was created without the store is not lost"


def test_other_gateways_are_assumed_to_use_as_much_of_a_key_created_without_the_store() -> None:
    one = One("redis://127.0.0.1:1/0", "a")
    one.state.gateways, one.keys = 3, ["ann", "created-since"]
    one.use(1.0, "created-since")
    assert one.shared.elsewhere("created-since", time.time()) == Spent(2.0, 20)


def test_gateway_that_starts_without_the_store_assumes_that_the_others_use_as_much() -> None:
    one = One("redis://127.0.0.1:1/0", "a")
    one.state.gateways = 3
    one.use(1.0)
    assert one.elsewhere.dollars == 2.0
    assert one.is_used_up


def test_next_month_during_an_outage_counts_from_zero() -> None:
    one = One("redis://127.0.0.1:1/0", "a")
    one.state.gateways, later = 2, time.time() + 40 * 86400
    one.use(2.0)
    one.budgets.note("ann", 0.5, 10, later)
    assert one.shared.elsewhere("ann", later) == Spent(0.5, 10)
