"""Guarantees of leases, of one gateway and of several with a shared state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from gateway.shared_state.shared_leases import Leases, LocalLeases, SharedLeases
from gateway.shared_state.shared_state import SharedState
from tests.rigs.redis_server import RedisServer
from tests.rigs.shared_gateways import until


@pytest.fixture(params=["local", "shared"])
async def two(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Leases, Leases]]:
    """Two users of the same leases: of one gateway, or of two gateways."""
    if request.param == "local":
        leases = LocalLeases()
        yield leases, leases
        return
    server = request.getfixturevalue("server")
    server.command("FLUSHALL")
    states = [SharedState(server.url) for _ in range(2)]
    for state in states:
        await state.start()
    yield SharedLeases(states[0]), SharedLeases(states[1])
    for state in states:
        await state.stop()


async def test_lease_has_one_holder_at_a_time(two: tuple[Leases, Leases]) -> None:
    one, other = two
    lease = await one.acquire("placement:demo", 5.0)
    assert lease is not None
    assert lease.is_exclusive
    assert await other.acquire("placement:demo", 5.0) is None
    assert await other.acquire("placement:mini", 5.0) is not None
    await one.release(lease)
    async with asyncio.timeout(1):
        while await other.acquire("placement:demo", 5.0) is None:
            await asyncio.sleep(0.005)


async def test_simultaneous_requests_for_a_lease_give_one_holder(two: tuple[Leases, Leases]) -> None:
    found = await asyncio.gather(*(two[number % 2].acquire("rebalance", 5.0) for number in range(20)))
    assert sum(lease is not None for lease in found) == 1


async def test_expired_lease_goes_to_another_holder_and_cannot_be_renewed(two: tuple[Leases, Leases]) -> None:
    one, other = two
    first = await one.acquire("rebalance", 0.05)
    assert first is not None
    await asyncio.sleep(0.08)  # longer than the lease
    second = await other.acquire("rebalance", 5.0)
    assert second is not None
    assert not await one.renew(first, 5.0)
    await one.release(first)
    assert await one.acquire("rebalance", 5.0) is None, "a late release does not end the lease of another holder"


async def test_renewed_lease_is_kept(two: tuple[Leases, Leases]) -> None:
    one, other = two
    lease = await one.acquire("rebalance", 0.1)
    assert lease is not None
    for _ in range(3):
        await asyncio.sleep(0.05)  # half of the lease
        assert await one.renew(lease, 0.1)
        assert await other.acquire("rebalance", 0.1) is None


async def test_lease_without_the_store_holds_in_one_gateway_only(server: RedisServer) -> None:
    server.command("FLUSHALL")
    state = SharedState(server.url)
    await state.start()
    leases = SharedLeases(state)
    shared = await leases.acquire("rebalance", 30.0)
    assert shared is not None
    server.kill()
    try:
        await until(lambda: not state.is_up)
        assert not await leases.renew(shared, 30.0)
        local = await leases.acquire("placement:demo", 30.0)
        assert local is not None
        assert not local.is_exclusive
        assert await leases.acquire("placement:demo", 30.0) is None
        assert await leases.renew(local, 30.0)
        await leases.release(local)
    finally:
        server.start()
    await until(lambda: state.is_up)
    again = await leases.acquire("rebalance", 30.0)
    assert again is not None
    await state.stop()


async def test_each_holder_has_a_larger_fence_also_after_the_server_lost_its_data(server: RedisServer) -> None:
    state = SharedState(server.url)
    await state.start()
    leases, fences = SharedLeases(state), list[int]()
    for number in range(60):
        if number % 20 == 0:
            server.command("FLUSHALL")
        lease = await leases.acquire("rebalance", 30.0)
        assert lease is not None
        assert lease.fence is not None
        fences.append(lease.fence)
        await leases.release(lease)
    await state.stop()
    assert fences == sorted(set(fences))


async def test_lease_of_one_gateway_has_no_fence() -> None:
    """It would be smaller after a restart, and nodes would refuse it."""
    lease = await LocalLeases().acquire("rebalance", 5.0)
    assert lease is not None
    assert lease.fence is None
