"""Guarantees of the connection to Redis or Valkey: every call ends, and a broken connection is made again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.errors import StoreLostError
from gateway.shared_state import store as store_module
from gateway.shared_state.scripts import GATEWAYS, usage_key
from gateway.shared_state.shared_state import SharedState
from gateway.shared_state.store import CALL_SECONDS, GRACE_SECONDS
from tests.rigs.certificates import HAS_OPENSSL, Authority
from tests.rigs.redis_server import RedisServer
from tests.rigs.shared_gateways import until

pytestmark = pytest.mark.unmeasured


@pytest.fixture
def errors() -> list[str]:
    """The operations that failed."""
    return []


@pytest.fixture
async def state(server: RedisServer, errors: list[str]) -> AsyncIterator[SharedState]:
    server.command("FLUSHALL")
    state = SharedState(server.url, on_error=errors.append)
    await state.start()
    yield state
    await state.stop()


async def test_commands_of_many_tasks_are_answered_in_order(state: SharedState) -> None:
    replies = await asyncio.gather(*(state.call("test", "now", []) for _ in range(600)))
    times = [float(reply) for reply in replies]
    assert times == sorted(times)


@pytest.mark.skipif(not HAS_OPENSSL, reason="needs the openssl command")
async def test_address_may_have_tls_or_be_a_unix_socket(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    server = RedisServer(tmp_path, (authority.certificate, *authority.issue("redis")))
    wrong = server.url.replace(str(authority.certificate), str(other.certificate))
    try:
        for url, is_up in ((server.url, True), (server.unix_url, True), (wrong, False)):
            state = SharedState(url)
            await state.start()
            assert state.is_up is is_up
            await state.stop()
    finally:
        server.kill()
    assert "certificate verify failed" in caplog.text


async def test_server_that_forgot_the_scripts_gets_them_again(state: SharedState, server: RedisServer) -> None:
    server.command("SCRIPT", "FLUSH")
    with pytest.raises(StoreLostError):
        await state.call("test", "now", [])
    await until(lambda: state.is_up)
    assert float(await state.call("test", "now", [])) > 0


async def test_error_of_one_command_does_not_break_the_connection(
    state: SharedState, server: RedisServer, errors: list[str]
) -> None:
    server.command("SET", usage_key("team"), "of another program")
    results = await asyncio.gather(
        state.call("limits", "reserve", [usage_key("team")], ["", "10", 1]), state.call("test", "now", []),
        return_exceptions=True,
    )  # fmt: skip
    assert isinstance(results[0], StoreLostError)
    assert "WRONGTYPE" in str(results[0])
    assert float(results[1]) > 0
    assert state.is_up
    assert errors == ["limits"]


async def test_server_that_refuses_writes_counts_as_lost(server: RedisServer, state: SharedState) -> None:
    server.command("CONFIG", "SET", "maxmemory", "1")
    try:
        await until(lambda: not state.is_up, 3)
    finally:
        server.command("CONFIG", "SET", "maxmemory", "0")
    await until(lambda: state.is_up)


async def test_each_change_is_logged_once(
    server: RedisServer, state: SharedState, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gateway.shared_state")
    server.kill()
    try:
        await until(lambda: not state.is_up, 3)
        await asyncio.sleep(0.6)  # it tries to connect several times
    finally:
        server.start()
    await until(lambda: state.is_up)
    lost, back = (record for record in caplog.records if record.name == "gateway.shared_state")
    assert (lost.levelname, back.levelname) == ("WARNING", "INFO")
    assert "does not answer" in lost.getMessage()
    assert "answers again" in back.getMessage()


async def test_calls_that_wait_end_with_the_connection(state: SharedState, server: RedisServer) -> None:
    server.pause(1.0)
    calls = [asyncio.create_task(state.call("test", "now", [])) for _ in range(5)]
    await asyncio.sleep(0.02)  # until the commands are sent
    await state._store.close()
    async with asyncio.timeout(2):
        results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(result, StoreLostError) for result in results)
    state._lost("a test")
    await until(lambda: state.is_up)


async def test_commands_beyond_the_limit_of_waiting_ones_are_refused(
    state: SharedState, errors: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_WAITING", 10)
    results = await asyncio.gather(*(state.call("test", "now", []) for _ in range(30)), return_exceptions=True)
    assert sum(isinstance(result, StoreLostError) for result in results) == 20
    assert errors == ["test"] * 20
    assert state.is_up


async def test_busy_gateway_does_not_consider_the_server_lost(state: SharedState) -> None:
    call = asyncio.create_task(state.call("test", "now", []))
    for _ in range(2):
        await asyncio.sleep(0)  # until the command is sent
    time.sleep(CALL_SECONDS + 2 * GRACE_SECONDS)  # blocks the event loop for longer than the deadline of the call
    assert float(await call) > 0
    assert state.is_up


async def test_gateway_that_stops_is_not_counted_any_more(state: SharedState, server: RedisServer) -> None:
    other = SharedState(server.url)
    await other.start()
    assert server.command("ZCARD", GATEWAYS) == b":2\r\n"
    await other.stop()
    assert server.command("ZCARD", GATEWAYS) == b":1\r\n"


async def test_messages_are_received_on_a_new_connection_after_a_silence(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection may be dead without an error."""
    monkeypatch.setattr(store_module, "LISTEN_SECONDS", 0.1)
    state, received = SharedState(server.url), list[str]()
    state.on_message["greeting"] = received.append
    await state.start()
    await asyncio.sleep(0.5)  # a silence of several LISTEN_SECONDS

    def is_received() -> bool:
        server.command("PUBLISH", state.channel, '["another gateway", "greeting", "hello"]')
        return bool(received)

    await until(is_received)
    assert state.is_up
    await state.stop()
