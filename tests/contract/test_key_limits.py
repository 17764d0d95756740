"""Guarantees of the limits of keys, at one gateway and over two that share their state."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.access import rate_limits as core
from gateway.access.authentication import Key
from gateway.access.key_usage import Limiter, Meter
from gateway.access.rate_limits import Limits
from gateway.access.shared_limits import Outage, SharedLimits, share_of
from gateway.errors import RefusedError, StoreLostError
from gateway.shared_state.gateway_count import HOLD_SECONDS, NAME, GatewayCountFile
from gateway.shared_state.scripts import usage_key
from gateway.shared_state.shared_state import SharedState
from gateway.telemetry.gateway_metrics import Telemetry
from headgate.shared.state_directory import StateDir
from tests.rigs.redis_server import RedisServer
from tests.rigs.shared_gateways import until

pytestmark = pytest.mark.unmeasured


class Gateways:
    """Limiters, and the key that clients use at them."""

    def __init__(self, limiters: list[Limiter], states: list[SharedState]) -> None:
        self.limiters = limiters
        self.states = states
        self.headers: dict[str, str] = {}

    async def enter(self, limits: Limits, at: int = 0, name: str = "team") -> Meter:
        """A request at one of the gateways; raises RefusedError."""
        exchange: Any = SimpleNamespace(limits=())
        key = Key(name, b"", frozenset({"use"}), limits=limits)
        try:
            meter = await self.limiters[at % len(self.limiters)].enter(key, exchange)
        finally:
            self.headers = dict(exchange.limits)
        assert meter is not None
        return meter

    async def reserve(self, meter: Meter, tokens: int) -> None:
        """Reserves tokens for a request; raises RefusedError."""
        await meter._limiter.reserve(meter._key, meter._exchange, meter._number, tokens)

    async def leave(self, meter: Meter, tokens: int = 0) -> None:
        """Ends a request that took `tokens`; returns when every gateway knows."""
        meter._limiter.leave(meter._key, meter._number, tokens)
        for state in self.states:
            if state.is_up:
                await state.call("test", "now", [])

    async def accepted(self, limits: Limits, tries: int, at: int | None = None) -> int:
        """How many of `tries` requests start, spread over the gateways or at one of them."""
        count = 0
        for number in range(tries):
            with contextlib.suppress(RefusedError):
                await self.enter(limits, number if at is None else at)
                count += 1
        return count


@contextlib.asynccontextmanager
async def shared_gateways(server: RedisServer, count: int = 2) -> AsyncIterator[Gateways]:
    """Gateways that share their state."""
    server.command("FLUSHALL")
    states = [SharedState(server.url) for _ in range(count)]
    limiters = [Limiter(Telemetry(), shared=SharedLimits(state)) for state in states]
    for state in states:
        await state.start()
    await until(lambda: all(state.gateways == count for state in states))
    yield Gateways(limiters, states)
    for state in states:
        await state.stop()


@pytest.fixture(params=["local", "shared"])
async def gateways(request: pytest.FixtureRequest) -> AsyncIterator[Gateways]:
    if request.param == "local":
        yield Gateways([Limiter(Telemetry())], [])
    else:
        async with shared_gateways(request.getfixturevalue("server")) as found:
            yield found


async def test_limit_of_requests_per_minute_is_exact(gateways: Gateways) -> None:
    limits = Limits(requests_per_minute=6)
    assert await gateways.accepted(limits, 10) == 6
    with pytest.raises(RefusedError) as refused:
        await gateways.enter(limits, 1)
    assert refused.value.retry_after == pytest.approx(10.0, abs=1)
    assert "(requests a minute: 6)" in refused.value.message
    assert gateways.headers["x-ratelimit-limit-requests"] == "6"
    assert gateways.headers["x-ratelimit-remaining-requests"] == "0"


async def test_used_requests_drain_with_time(gateways: Gateways) -> None:
    limits = Limits(requests_per_minute=600)
    began = time.monotonic()
    accepted = await gateways.accepted(limits, 700)
    assert accepted <= 600 + 10 * (time.monotonic() - began) + 1
    await asyncio.sleep(0.12)  # one request drains in 0.1 s
    await gateways.enter(limits, 1)


async def test_simultaneous_requests_do_not_exceed_the_limit_together(gateways: Gateways) -> None:
    limits = Limits(requests_per_minute=9, concurrent=5)

    async def one(at: int) -> bool:
        try:
            await gateways.enter(limits, at)
        except RefusedError:
            return False
        return True

    assert sum(await asyncio.gather(*(one(at) for at in range(30)))) == 5


async def test_ended_request_makes_room_for_the_next(gateways: Gateways) -> None:
    limits = Limits(concurrent=2)
    first, _ = await gateways.enter(limits, 0), await gateways.enter(limits, 1)
    with pytest.raises(RefusedError, match="requests at a time: 2"):
        await gateways.enter(limits, 1)
    await gateways.leave(first)
    await gateways.enter(limits, 1)


async def test_tokens_are_reserved_and_charged(gateways: Gateways) -> None:
    limits = Limits(tokens_per_minute=60)
    first = await gateways.enter(limits, 0)
    await gateways.reserve(first, 50)
    second = await gateways.enter(limits, 1)
    with pytest.raises(RefusedError, match="tokens a minute: 60") as refused:
        await gateways.reserve(second, 40)
    assert refused.value.retry_after == pytest.approx(30.0, abs=1)
    await gateways.leave(first, 20)
    await gateways.reserve(second, 40)
    await gateways.leave(second, 45)
    third = await gateways.enter(limits, 0)
    with pytest.raises(RefusedError):
        await gateways.reserve(third, 1)
    assert gateways.headers["x-ratelimit-limit-tokens"] == "60"


async def test_scripts_decide_as_the_pure_core_does(server: RedisServer) -> None:
    chance, limits = random.Random(3), Limits(7, 1000, 3)
    async with shared_gateways(server, 1) as found:
        shared, account = SharedLimits(found.states[0]), core.Account()
        running: dict[int, int] = {}
        for number in range(300):
            now = time.monotonic()
            if running and chance.random() < 0.4:
                ended = chance.choice(list(running))
                tokens = chance.randrange(400)
                shared.leave("team", limits, ended, tokens, running.pop(ended))
                account = core.leave(account, limits, ended, tokens, now)
                continue
            outcome = await shared.enter("team", limits, number)
            account, refusal = core.enter(account, limits, number, now)
            assert outcome is not None
            assert outcome.is_accepted is (refusal is None)
            assert outcome.account.requests == pytest.approx(account.requests, abs=0.05)
            assert outcome.account.tokens == pytest.approx(account.tokens, abs=5)
            if refusal is None:
                wanted = chance.randrange(500)
                reserved = await shared.reserve("team", limits, wanted)
                account, refusal = core.reserve(account, limits, number, wanted, now)
                assert reserved is not None
                assert reserved.is_accepted is (refusal is None)
                running[number] = wanted if refusal is None else 0
            if number % 40 == 0:  # time passes for both
                server.command("DEL", usage_key("team"))
                account = core.Account(running=account.running)


async def test_requests_of_a_gateway_that_ended_do_not_count_as_running(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.access.shared_limits.DEAD_SECONDS", 0.3)
    limits = Limits(concurrent=2)
    async with shared_gateways(server) as found:
        assert await found.accepted(limits, 3, at=0) == 2
        for task in found.states[0]._tasks:
            task.cancel()
        with pytest.raises(RefusedError):
            await found.enter(limits, 1)
        await asyncio.sleep(0.4)  # longer than DEAD_SECONDS
        await found.states[1].call("test", "heartbeat", ["headgate:gateways"], [found.states[1].gateway, 6])
        assert await found.accepted(limits, 3, at=1) == 2


async def test_without_the_store_each_gateway_allows_its_share_of_what_is_left(server: RedisServer) -> None:
    limits, unknown = Limits(requests_per_minute=12), Limits(requests_per_minute=12, concurrent=4)
    async with shared_gateways(server, 3) as found:
        assert await found.accepted(limits, 6, at=0) == 6
        await asyncio.sleep(1.2)  # the others learn of it with a heartbeat
        server.kill()
        try:
            await until(lambda: not any(state.is_up for state in found.states))
            assert [state.gateways for state in found.states] == [3, 3, 3]
            assert await found.accepted(limits, 24) == 6, "12 in all: half of each gateway's share was used before"
            for at in range(3):
                await found.enter(unknown, at, name="another")
                with pytest.raises(RefusedError, match="requests at a time: 1"):
                    await found.enter(unknown, at, name="another")
        finally:
            server.start()
        await until(lambda: all(state.is_up for state in found.states))
        assert await found.accepted(limits, 12) <= 2, "the new store has the requests before and of the outage"
        with pytest.raises(RefusedError):  # the running requests are listed again
            await found.enter(unknown._replace(concurrent=3), 0, name="another")


async def test_gateway_that_starts_without_the_store_allows_its_share_of_the_last_known_number(
    server: RedisServer, tmp_path: Path
) -> None:
    limits = Limits(requests_per_minute=12)
    async with shared_gateways(server, 2) as found:
        state = SharedState(server.url, count_file=GatewayCountFile(StateDir(tmp_path)))
        await state.start()
        await until(lambda: (tmp_path / NAME).is_file() and all(one.gateways == 3 for one in [state, *found.states]))
        await state.stop()
        server.kill()
        try:
            for directory, share in ((tmp_path, 4), (tmp_path / "new", 12)):
                state = SharedState(server.url, count_file=GatewayCountFile(StateDir(directory)))
                alone = Gateways([Limiter(Telemetry(), shared=SharedLimits(state))], [state])
                await state.start()
                assert not state.is_up
                assert await alone.accepted(limits, 13) == share
                await state.stop()
        finally:
            server.start()


async def test_smaller_number_of_gateways_is_stored_only_after_a_hold_time(tmp_path: Path) -> None:
    """Gateways that stop together leave one after the other, and must not start as if each were alone."""
    now = 0.0
    file = GatewayCountFile(StateDir(tmp_path), clock=lambda: now)
    await file.load()

    def stored(count: int, expected: int) -> bool:
        file.note(count)
        return (tmp_path / NAME).is_file() and json.loads((tmp_path / NAME).read_text())["gateways"] == expected

    await until(lambda: stored(3, 3))
    now += 1
    await asyncio.sleep(0.1)  # as long as several writes
    assert stored(1, 3)
    now += HOLD_SECONDS
    await until(lambda: stored(2, 2))
    await file.close()


async def test_request_that_ends_while_the_accounts_are_merged_is_not_listed_again() -> None:
    """It would count as running for ever."""

    class Shared:
        def __init__(self) -> None:
            self.state = SimpleNamespace(on_down=[], on_up=[], on_tick=[], gateways=1)
            self.running: dict[str, int] = {}

        async def enter(self, *_: Any) -> None:
            return None  # the store is lost

        def leave(self, name: str, *_: Any) -> None:
            self.running[name] = 0

        async def merge(self, name: str, limits: Limits, added: object, running: tuple[Any, ...]) -> None:
            self.running[name] = len(running)
            if name == "a":
                await found.leave(meters["b"])

    shared: Any = Shared()
    found = Gateways([Limiter(Telemetry(), shared=shared)], [])
    meters = {name: await found.enter(Limits(concurrent=2), name=name) for name in ("a", "b")}
    await shared.state.on_up[0]()
    assert shared.running == {"a": 1, "b": 0}


async def test_use_of_an_outage_is_merged_after_another_one_interrupts_the_merge() -> None:
    class Shared:
        def __init__(self) -> None:
            self.state = SimpleNamespace(on_down=[], on_up=[], on_tick=[], gateways=2)
            self.added: dict[str, float] = {}
            self.fails = True

        async def enter(self, *_: Any) -> None:
            return None  # the store is lost

        async def merge(self, name: str, limits: Limits, outage: Outage, running: object) -> None:
            if name == "b" and self.fails:
                raise StoreLostError("gone again")
            self.added[name] = outage.added[0]

    shared: Any = Shared()
    found = Gateways([Limiter(Telemetry(), shared=shared)], [])
    limits = Limits(requests_per_minute=12)
    shared.state.on_down[0]()
    for name in ("a", "a", "b", "b"):
        await found.enter(limits, name=name)
    with pytest.raises(StoreLostError):
        await shared.state.on_up[0]()
    shared.state.on_down[0]()
    shared.fails = False
    await found.enter(limits, name="b")
    await shared.state.on_up[0]()
    assert {name: round(count) for name, count in shared.added.items()} == {"a": 0, "b": 3}


async def test_one_gateway_without_the_store_adds_at_most_its_share(server: RedisServer) -> None:
    limits = Limits(requests_per_minute=12)
    async with shared_gateways(server, 3) as found:
        found.states[0]._lost("a test")
        found.states[0]._store._connection = None
        assert await found.accepted(limits, 12, at=0) == 4
        assert await found.accepted(limits, 20, at=1) == 12
        await until(lambda: found.states[0].is_up)
        with pytest.raises(RefusedError) as refused:
            await found.enter(limits, 2)
        assert refused.value.retry_after is not None
        assert refused.value.retry_after > 20, "the requests of the outage were added"


async def test_tokens_that_were_released_during_an_outage_of_one_gateway_stay_released(server: RedisServer) -> None:
    """The server kept its data, so the use that the gateway knew before does not count again."""
    limits = Limits(tokens_per_minute=100)
    async with shared_gateways(server) as found:
        first, second = await found.enter(limits, 0), await found.enter(limits, 1)
        await found.reserve(first, 80)
        with pytest.raises(RefusedError):
            await found.reserve(second, 80)  # now it knows
        found.states[1]._lost("a test")
        found.states[1]._store._connection = None
        await found.leave(first, 10)
        await until(lambda: found.states[1].is_up)
        await found.reserve(second, 80)


def test_share_of_limits_is_at_least_one() -> None:
    assert share_of(Limits(10, None, 2), 3) == Limits(3, None, 1)
