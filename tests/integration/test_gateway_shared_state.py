"""Two gateways that share their state in a real Redis or Valkey server."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from gateway.shared_state.scripts import running_key
from headgate.shared.errors import HeadgateError
from tests.rigs.fake_inference import FakeInference
from tests.rigs.gateway_rig import CONFIG, Gateway
from tests.rigs.redis_server import RedisServer
from tests.rigs.stack import until

AS_TEAM = {"authorization": "Bearer key-of-a-team"}


def config_with_team(settings: str) -> str:
    """The configuration with a key `team`, whose requests have the headers AS_TEAM."""
    digest = hashlib.sha256(b"key-of-a-team").hexdigest()
    return f"{CONFIG}\nkeys:\n  - {{name: team, hash: 'sha256:{digest}', {settings}}}\n"


class Fleet:
    """Gateways with the same configuration."""

    def __init__(self, root: Path, fake: FakeInference, server: RedisServer) -> None:
        server.command("FLUSHALL")
        self._root, self._fake, self._server = root, fake, server

    @contextlib.asynccontextmanager
    async def two(self, config: str = CONFIG) -> AsyncIterator[tuple[Gateway, Gateway]]:
        """Two gateways that know each other."""
        config = f"{config}\nstate: {self._server.url}\n"
        for name in ("one", "two"):
            (self._root / name).mkdir()
        async with (
            Gateway(self._root / "one", self._fake.url, config) as one,
            Gateway(self._root / "two", self._fake.url, config) as two,
        ):
            await until(
                "both are alive", lambda: all(gateway.runtime.shared_state.gateways == 2 for gateway in (one, two))
            )
            yield one, two


@pytest.fixture
def fleet(tmp_path: Path, fake: FakeInference, server: RedisServer) -> Fleet:
    return Fleet(tmp_path, fake, server)


async def test_breaker_that_opens_at_one_gateway_is_open_at_the_other(fleet: Fleet) -> None:
    async with fleet.two(f"{CONFIG}\nbreaker: {{failures: 1, open: 30s}}\n") as (one, two):
        breaker = one.runtime.breakers.breaker("local", "demo")
        breaker.provider_answered = True
        breaker._machine.open(one.runtime.breakers.clock() + 30)
        async with asyncio.timeout(2):
            while (await two.breaker("local/demo"))["state"] != "open":
                await asyncio.sleep(0.01)
        assert (await two.chat("demo-mini")).status_code == 200
        await two.admin("POST", "/admin/breakers/local%2Fdemo/reset")
        async with asyncio.timeout(2):
            while (await one.breaker("local/demo"))["state"] != "closed":
                await asyncio.sleep(0.01)


async def test_requests_are_served_while_the_store_is_lost(fleet: Fleet, server: RedisServer) -> None:
    async with fleet.two() as (one, two):
        assert "gateway_shared_state_up 1.0" in (await one.client.get("/metrics")).text
        server.kill()
        try:
            for gateway in (one, two, one, two):
                assert (await gateway.chat()).status_code == 200
            await until("it is noticed", lambda: not one.runtime.shared_state.is_up)
            metrics = (await one.client.get("/metrics")).text
            assert "gateway_shared_state_up 0.0" in metrics
            assert "gateway_fleet_gateways 2.0" in metrics
        finally:
            server.start()
        await until("it is back", lambda: one.runtime.shared_state.is_up and two.runtime.shared_state.is_up)
        assert (await one.chat()).status_code == 200


async def test_gateway_starts_without_the_store(tmp_path: Path, fake: FakeInference) -> None:
    async with Gateway(tmp_path, fake.url, f"{CONFIG}\nstate: redis://:secret@127.0.0.1:1/0\n") as gateway:
        assert (await gateway.chat()).status_code == 200
        assert not gateway.runtime.shared_state.is_up


def test_missing_client_is_an_error_that_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in [
        name
        for name in sys.modules
        if name.startswith(("gateway.shared_state.sto", "gateway.shared_state.shared_state", "redis"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(HeadgateError, match=r"pip install 'headgate\[redis\]'"):
        Gateway(tmp_path, "http://127.0.0.1:1", f"{CONFIG}\nstate: redis://127.0.0.1/0\n")


async def test_conversation_continues_at_the_other_gateway(
    fleet: Fleet, fake: FakeInference, server: RedisServer
) -> None:
    async def respond(gateway: Gateway, **more: str) -> httpx2.Response:
        return await gateway.client.post("/v1/responses", json={"model": "demo", "input": "Hello!", **more})

    async with fleet.two() as (one, two):
        first = (await respond(one)).json()
        async with asyncio.timeout(2):
            while (second := await respond(two, previous_response_id=first["id"])).status_code != 200:
                await asyncio.sleep(0.01)
        assert "Hello there!" in str(fake.seen[-1].body), "the earlier answer is part of the conversation"
        assert (await two.client.get(f"/v1/responses/{first['id']}")).json() == first
        server.kill()
        try:
            own = await respond(two, previous_response_id=second.json()["id"])
            assert own.status_code == 200
            await until("it is noticed", lambda: not one.runtime.shared_state.is_up)
            unknown = await respond(one, previous_response_id=own.json()["id"])
            assert unknown.status_code == 400
            assert unknown.json()["error"]["code"] == "previous_response_not_found"
            assert "The store that gateways share does not answer" in unknown.json()["error"]["message"]
        finally:
            server.start()


async def test_request_limit_of_a_key_holds_over_both_gateways(fleet: Fleet) -> None:
    async with fleet.two(config_with_team("limits: {requests_per_minute: 3}")) as (one, two):
        statuses = [(await gateway.chat(headers=AS_TEAM)).status_code for gateway in (one, two, one, two)]
        assert statuses == [200, 200, 200, 429]
        assert (await two.chat()).status_code == 200


async def test_budget_of_a_key_holds_over_both_gateways(fleet: Fleet, fake: FakeInference) -> None:
    """One answer of the first gateway uses it up."""
    async with fleet.two(config_with_team("budget: {tokens_per_month: 5}")) as (one, two):
        assert (await one.chat(headers=AS_TEAM)).status_code == 200
        usage = two.runtime.usage
        await until("the other one knows", lambda: usage.spent_everywhere("team", time.time()).tokens > 5)
        refused = await two.chat(headers=AS_TEAM)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "budget_exceeded")
        assert (await two.chat()).status_code == 200
        assert len(fake.seen) == 2


async def test_store_that_is_killed_twice_under_load_fails_no_request(fleet: Fleet, server: RedisServer) -> None:
    config = config_with_team("limits: {requests_per_minute: 100000, concurrent: 50}")
    async with fleet.two(config) as (one, two):
        statuses: Counter[int] = Counter()
        slowest, is_over = 0.0, False

        async def client(gateway: Gateway) -> None:
            nonlocal slowest
            while not is_over:
                began = time.monotonic()
                statuses[(await gateway.chat(headers=AS_TEAM)).status_code] += 1
                slowest = max(slowest, time.monotonic() - began)
                await asyncio.sleep(0.02)  # a client's pause

        async with asyncio.TaskGroup() as group:
            for gateway in (one, two, one, two):
                group.create_task(client(gateway))
            for _ in range(2):
                await asyncio.sleep(0.2)  # requests with the store
                server.kill()
                await asyncio.sleep(0.3)  # requests without it
                server.start()
                states = [gateway.runtime.shared_state for gateway in (one, two)]
                await until("it is back", lambda states=states: all(state.is_up for state in states))
            is_over = True
        assert statuses.keys() == {200}
        assert statuses[200] > 40
        assert slowest < 3
        await until("every request has ended", lambda: server.command("ZCARD", running_key("team")) == b":0\r\n")


async def test_gateway_does_not_probe_while_another_has_the_claim(fleet: Fleet, fake: FakeInference) -> None:
    async with fleet.two() as (one, two):
        claim = await one.runtime.breakers.claims.claim([("local", "")])
        breaker = two.runtime.breakers.breaker("local")
        breaker._machine.open(two.runtime.breakers.clock() + 30)
        await until("a claim is refused", lambda: breaker.describe()["last_probe"] == "another gateway probes it")
        assert fake.probes == []
        claim.release("local", "")
        await until("it is probed", lambda: "was answered" in (breaker.describe()["last_probe"] or ""))
        assert "/readyz" in fake.probes


def test_unknown_option_of_the_address_is_an_error_without_the_password(tmp_path: Path) -> None:
    with pytest.raises(HeadgateError, match=r"`state: redis://127.0.0.1/0` .* unknown option 'timeout'") as refused:
        Gateway(tmp_path, "http://127.0.0.1:1", f"{CONFIG}\nstate: redis://:secret@127.0.0.1/0?timeout=1\n")
    assert "secret" not in str(refused.value)
