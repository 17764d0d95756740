"""Guarantees of breakers that several gateways share in Redis or Valkey."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from pathlib import Path

import pytest

from gateway.breaker.breakers import Lease
from gateway.breaker.outcome import Failure, Ignore, Reason, Scope, Success
from gateway.breaker.permits import BreakerState, Rule
from gateway.shared_state import breaker_sync
from gateway.shared_state.scripts import GATEWAYS
from tests.rigs.redis_server import RedisServer
from tests.rigs.shared_gateways import OPEN_SECONDS, PAIR, SharedGateway, until

pytestmark = pytest.mark.unmeasured

OPEN, CLOSED = BreakerState.OPEN, BreakerState.CLOSED


@pytest.fixture(autouse=True)
def _no_data(server: RedisServer) -> None:
    server.command("FLUSHALL")


async def test_open_period_and_recovery_reach_the_other_gateways(server: RedisServer, tmp_path: Path) -> None:
    async with SharedGateway(server.url, tmp_path) as one, SharedGateway(server.url, tmp_path) as two:
        await one.open()
        await until(lambda: two.is_state(OPEN), 1)
        entry = two.breakers.breaker("p", "m").describe()
        assert (entry["source"], entry["last_failure"]) == ("fleet", "it failed")
        await asyncio.sleep(OPEN_SECONDS)
        probe = await two.acquire()
        assert probe is not None
        assert probe.is_probe
        probe.settle(Success())
        await until(lambda: one.is_state(CLOSED), 1)
        assert one.breakers.breaker("p", "m").describe()["ramp"] is not None, "the recovery ramps up here as well"


async def test_gateway_that_cannot_reach_a_service_does_not_keep_others_from_it(
    server: RedisServer, tmp_path: Path
) -> None:
    """Openings of `local` are shared only if the service answered with a failure; those of other providers always."""
    lost = Failure(Scope.PAIR)
    async with SharedGateway(server.url, tmp_path) as one, SharedGateway(server.url, tmp_path) as two:
        for provider, model, failure in (("local", "lost", lost), ("local", "failing", PAIR), ("p", "lost", lost)):
            for _ in range(2):
                lease = await one.acquire(model, provider=provider)
                assert lease is not None
                lease.settle(failure, "it failed")
        await until(lambda: two.is_state(OPEN, "lost"), 1)
        states = {name: breaker.state for name, breaker in two.breakers.by_model("local").items()}
        assert states.get("lost", CLOSED) is CLOSED
        assert states["failing"] is OPEN
        assert one.breakers.by_model("local")["lost"].state is OPEN


async def test_breakers_in_different_databases_of_one_server_are_independent(
    server: RedisServer, tmp_path: Path
) -> None:
    """Redis publishes to the listeners of all databases."""
    other = server.url.removesuffix("/0") + "/1"
    async with (
        SharedGateway(server.url, tmp_path) as one, SharedGateway(server.url, tmp_path) as two,
        SharedGateway(other, tmp_path) as apart,
    ):  # fmt: skip
        await one.open()
        await until(lambda: two.is_state(OPEN), 1)
        assert apart.is_state(CLOSED)


async def test_gateway_forgets_old_entries_as_the_store_does(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Model names may come from clients, so there may be any number."""
    monkeypatch.setattr(breaker_sync, "FORGET_SECONDS", 0.2)
    async with SharedGateway(server.url, tmp_path) as one, SharedGateway(server.url, tmp_path) as two:
        await one.open("old")
        await until(lambda: two.is_state(OPEN, "old"))
        await asyncio.sleep(0.5)  # longer than FORGET_SECONDS and the open period
        await one.open("new")
        await until(lambda: ("p", "new") in two.sync._known)
        await until(lambda: not any(("p", "old") in gateway.sync._known for gateway in (one, two)))


async def test_gateway_that_starts_takes_over_open_breakers(server: RedisServer, tmp_path: Path) -> None:
    async with SharedGateway(server.url, tmp_path, rule=Rule(failures=2, open=30)) as one:
        await one.open()
        await asyncio.sleep(0.05)  # until the store has it
        async with SharedGateway(server.url, tmp_path) as two:
            assert two.breakers.open_for("p", "m") == pytest.approx(30, abs=0.5)


async def test_clocks_of_machines_may_differ(server: RedisServer, tmp_path: Path) -> None:
    long = Rule(failures=2, open=30)
    async with (
        SharedGateway(server.url, tmp_path, 30.0, long) as ahead,
        SharedGateway(server.url, tmp_path, -3000.0, long) as behind,
    ):
        for first, second, model in ((ahead, behind, "a"), (behind, ahead, "b")):
            await first.open(model)
            await until(lambda second=second, model=model: second.is_state(OPEN, model), 1)  # type: ignore[misc]
            assert second.breakers.open_for("p", model) == pytest.approx(30, abs=0.5)
            second.breakers.reset(f"p/{model}")
            await until(lambda first=first, model=model: first.is_state(CLOSED, model), 1)  # type: ignore[misc]


async def test_exactly_one_gateway_probes_a_half_open_breaker(server: RedisServer, tmp_path: Path) -> None:
    chance = random.Random(7)
    async with (
        SharedGateway(server.url, tmp_path) as one,
        SharedGateway(server.url, tmp_path, 30.0) as two,
        SharedGateway(server.url, tmp_path, -30.0) as three,
    ):
        gateways, running, most = (one, two, three), 0, 0

        async def request(gateway: SharedGateway, model: str) -> bool:
            nonlocal running, most
            await asyncio.sleep(chance.random() * 0.004)
            lease = await gateway.acquire(model)
            if lease is None or not lease.is_probe:
                if lease is not None:
                    lease.release()
                return False
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.003)
            running -= 1
            lease.settle(chance.choice((Success(), PAIR, Ignore(Reason.DEADLINE))), "it failed")
            return True

        probes = 0
        for round in range(150):
            model = f"m{round}"
            await chance.choice(gateways).open(model)
            await until(lambda model=model: all(one.is_state(OPEN, model) for one in gateways), 1)  # type: ignore[misc]
            for gateway in gateways:
                gateway.breakers.breaker("p", model).storage.open_until = gateway.clock() - 1
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(request(chance.choice(gateways), model)) for _ in range(6)]
            probes += sum(task.result() for task in tasks)
        assert most == 1
        assert probes >= 130, (
            "a round lacks a probe only if each request met a change that another gateway had just made"
        )


async def test_gateway_that_missed_messages_gets_no_second_probe(server: RedisServer, tmp_path: Path) -> None:
    async with SharedGateway(server.url, tmp_path) as one, SharedGateway(server.url, tmp_path) as two:
        await one.open()
        await until(lambda: two.is_state(OPEN), 1)
        two.state.on_message.clear()  # messages are lost
        await asyncio.sleep(OPEN_SECONDS)
        probe = await one.acquire()
        assert probe is not None
        assert await two.acquire() is None, "the probe is running"
        probe.settle(Success())
        async with asyncio.timeout(1):
            while (late := await two.acquire()) is None:
                await asyncio.sleep(0.005)
        assert not late.is_probe, "the reply to the claim says that the breaker is closed"


async def test_claim_ends_with_its_gateway(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker_sync, "CLAIM_SECONDS", 0.3)
    async with SharedGateway(server.url, tmp_path) as two:
        one = SharedGateway(server.url, tmp_path)
        await one.start()
        await one.open()
        await until(lambda: two.is_state(OPEN), 1)
        await asyncio.sleep(OPEN_SECONDS)
        assert await one.acquire() is not None
        assert await two.acquire() is None
        for task in one.state._tasks:  # killed: it does not release anything
            task.cancel()
        one.state.is_up = False
        await asyncio.sleep(0.35)  # longer than CLAIM_SECONDS
        probe = await two.acquire()
        assert probe is not None
        assert probe.is_probe
        await one.state.stop()


async def test_cancelled_probe_returns_its_claim(server: RedisServer, tmp_path: Path) -> None:
    async with SharedGateway(server.url, tmp_path) as one, SharedGateway(server.url, tmp_path) as two:
        await one.open()
        await until(lambda: two.is_state(OPEN), 1)
        await asyncio.sleep(OPEN_SECONDS)
        for yields in range(6):
            task = asyncio.create_task(one.acquire())
            for _ in range(yields):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                if (lease := await task) is not None:
                    lease.release()
        async with asyncio.timeout(1):
            while (lease := await two.acquire()) is None:
                await asyncio.sleep(0.01)
        assert lease.is_probe


async def test_lost_store_leaves_each_gateway_its_own_state(server: RedisServer, tmp_path: Path) -> None:
    async with SharedGateway(server.url, tmp_path) as one, SharedGateway(server.url, tmp_path) as two:
        await until(lambda: one.state.gateways == 2)
        server.kill()
        try:
            await until(lambda: not (one.state.is_up or two.state.is_up), 3)
            await one.open("while-lost")
            await two.open("other")
            await asyncio.sleep(OPEN_SECONDS)
            assert isinstance(await one.acquire("while-lost"), Lease), "its own probe"
            assert one.state.gateways == 2
            assert two.is_state(CLOSED, "while-lost")
        finally:
            server.start()
        long = Rule(failures=2, open=30)
        for gateway in (one, two):
            gateway.breakers.set_rule(long)
        await one.open("long")
        await until(lambda: one.state.is_up and two.state.is_up)
        await until(lambda: two.is_state(OPEN, "long"), 4)
        assert one.states.count(True) > 1
        assert False in one.states


async def test_change_during_an_outage_does_not_undo_a_later_change(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.shared_state.shared_state.FIRST_WAIT_SECONDS", 1.0)
    long = Rule(failures=2, open=30)
    async with (
        SharedGateway(server.url, tmp_path, rule=long) as one,
        SharedGateway(server.url, tmp_path, rule=long) as two,
    ):
        await one.open()
        await until(lambda: two.is_state(OPEN), 1)
        one.state._lost("a test")  # this gateway alone
        one.breakers.reset("p/m")
        await asyncio.sleep(0.3)  # the other reset is the later one
        two.breakers.reset("p/m")
        await two.open()
        await until(lambda: one.state.is_up)
        assert one.is_state(OPEN)
        assert two.is_state(OPEN)


async def test_server_that_hangs_costs_a_request_at_most_its_deadline(server: RedisServer, tmp_path: Path) -> None:
    async with SharedGateway(server.url, tmp_path) as one:
        await one.open()
        await asyncio.sleep(OPEN_SECONDS)
        server.pause(1.0)
        began = one.clock()
        probe = await one.acquire()
        assert probe is not None, "without the store the gateway probes alone"
        assert one.clock() - began < 0.8
        probe.release()
        await until(lambda: one.state.is_up, 6)


async def test_number_of_gateways_follows_their_heartbeats(server: RedisServer, tmp_path: Path) -> None:
    async with SharedGateway(server.url, tmp_path) as one:
        async with SharedGateway(server.url, tmp_path):
            await until(lambda: one.state.gateways == 2, 3)
        assert server.command("ZCARD", GATEWAYS) == b":1\r\n"


async def test_open_period_of_the_file_applies_where_the_store_has_nothing_newer(
    server: RedisServer, tmp_path: Path
) -> None:
    long = Rule(failures=2, open=30)
    before = SharedGateway(server.url, tmp_path, rule=long)
    for model in ("kept", "closed-since"):
        await before.open(model)
    await before.file.close()
    async with SharedGateway(server.url, tmp_path, rule=long) as other:
        await other.open("closed-since")
        await asyncio.sleep(0.05)  # until the store has it
        other.breakers.reset("p/closed-since")
        await asyncio.sleep(0.05)  # until the store has it
        again = SharedGateway(server.url, tmp_path, 3600.0, long)
        again.file._path = before.file._path
        again.file._wall = time.time
        await again.file.load(("p", "local"))
        again.breakers.restore()
        assert again.is_state(OPEN, "closed-since")
        async with again:
            await until(lambda: other.is_state(OPEN, "kept"), 2)
            assert again.is_state(OPEN, "kept")
            assert again.is_state(CLOSED, "closed-since")
