"""Guarantees of stored responses, at one gateway and over two that share their state."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.errors import RefusedError
from gateway.shared_state import shared_responses
from gateway.shared_state.shared_responses import SharedResponses
from gateway.shared_state.shared_state import SharedState
from tests.rigs.redis_server import RedisServer
from tests.rigs.shared_gateways import until

OWNER = "a" * 64


@pytest.fixture
async def two(server: RedisServer) -> AsyncIterator[tuple[SharedResponses, SharedResponses]]:
    server.command("FLUSHALL")
    states = [SharedState(server.url) for _ in range(2)]
    stores = [SharedResponses(state, server.url, 10**6, 60.0) for state in states]
    for state in states:
        await state.start()
    yield stores[0], stores[1]
    for store, state in zip(stores, states, strict=True):
        await state.stop()
        await store.aclose()


def put(store: SharedResponses, id: str, owner: str = OWNER, size: int = 10, ids: tuple[str, ...] = ()) -> None:
    store.put(owner, id, b"\x00\n{" + b"x" * (size - 3), b"[1]", time.monotonic(), ids=ids, outputs=1)


async def find(store: SharedResponses, id: str, owner: str = OWNER) -> bytes | None:
    """The response as a request at this gateway finds it."""
    await store.fetch(owner, id)
    found = store.get(owner, id, time.monotonic())
    return None if found is None else found.response


async def written(store: SharedResponses) -> None:
    await until(lambda: not store._writes, 2)


async def test_response_is_readable_at_the_other_gateway_by_its_owner(two: tuple[SharedResponses, ...]) -> None:
    one, other = two
    put(one, "resp_1", ids=("msg_1", "msg_2"))
    await written(one)
    assert await find(other, "resp_1", "another owner") is None
    assert await find(other, "resp_1") == b"\x00\n{" + b"x" * 7
    kept = other.get(OWNER, "resp_1", time.monotonic())
    assert kept is not None
    assert (kept.items, kept.ids, kept.outputs) == (b"[1]", ("msg_1", "msg_2"), 1)
    assert 55 < kept.until - time.monotonic() <= 60


@pytest.mark.parametrize("value", ["", "{", "{}", '{"response": null, "ids": [], "outputs": 0}', "[]"])
async def test_value_of_another_version_is_no_response(
    server: RedisServer, two: tuple[SharedResponses, ...], value: str
) -> None:
    server.command("SET", f"headgate:responses:value:{OWNER}:resp_1", value, "EX", "60")
    assert await find(two[0], "resp_1") is None


async def test_referenced_items_are_found_at_the_other_gateway(two: tuple[SharedResponses, ...]) -> None:
    one, other = two
    put(one, "resp_1", ids=("msg_1",))
    await written(one)
    await other.fetch_items(OWNER, ["msg_1", "msg_unknown"])
    assert other.find_by_item(OWNER, "msg_1", time.monotonic()) is not None


async def test_deleted_response_is_gone_everywhere(two: tuple[SharedResponses, ...]) -> None:
    one, other = two
    put(one, "resp_1")
    put(one, "resp_2")
    await written(one)
    assert await find(other, "resp_1") is not None
    assert await other.forget(OWNER, "resp_1", time.monotonic())
    await until(lambda: one.get(OWNER, "resp_1", time.monotonic()) is None, 2)
    assert await find(one, "resp_1") is None
    one._state.on_message.clear()  # messages are lost
    assert await other.forget(OWNER, "resp_2", time.monotonic()), "it deletes a response of the other gateway"
    assert await find(one, "resp_2") is None
    assert not await other.forget(OWNER, "resp_2", time.monotonic())


async def test_size_of_all_responses_is_bounded_and_the_largest_owner_loses_its_oldest(
    two: tuple[SharedResponses, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_responses, "SHARED_BYTES", 2000)
    one, other = two
    put(one, "small", owner="b", size=200)
    for number in range(8):
        put(one, f"resp_{number}", size=400)
        await written(one)
    assert await find(other, "small", "b") is not None
    assert [await find(other, f"resp_{number}") is not None for number in (0, 3, 6, 7)] == [False, False, True, True]


async def test_response_is_found_while_its_gateway_still_writes_it(
    two: tuple[SharedResponses, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client may continue at another gateway as soon as it has the end of the answer."""
    one, other = two
    write = one._write

    async def slow(*arguments: Any) -> None:
        await asyncio.sleep(0.1)
        await write(*arguments)

    monkeypatch.setattr(one, "_write", slow)
    put(one, "resp_1")
    assert await find(other, "resp_1") is not None
    began = time.monotonic()
    assert await find(other, "resp_2") is None
    assert time.monotonic() - began < 1


async def test_deletion_without_the_store_is_refused_until_it_is_complete(
    two: tuple[SharedResponses, ...], server: RedisServer
) -> None:
    """Otherwise the response would be there again when the store is."""
    one = two[0]
    put(one, "resp_1")
    await written(one)
    server.pause(4.0)
    await until(lambda: not one.is_up, 4)
    with pytest.raises(RefusedError):
        await one.forget(OWNER, "resp_1", time.monotonic())
    await until(lambda: one.is_up, 10)
    assert await find(one, "resp_1") is not None
    assert await one.forget(OWNER, "resp_1", time.monotonic())
    assert [await find(store, "resp_1") for store in two] == [None, None]


async def test_responses_expire(two: tuple[SharedResponses, ...], server: RedisServer) -> None:
    one, other = two
    one._seconds = 0.05
    put(one, "resp_1")
    await written(one)
    await asyncio.sleep(0.08)  # longer than it is kept
    assert await find(other, "resp_1") is None
    put(one, "resp_2")
    await written(one)
    assert server.command("HGET", "headgate:responses:owners", OWNER).startswith(b"$2\r\n"), "bytes of one response"


async def test_gateway_without_the_store_serves_its_own_responses(
    two: tuple[SharedResponses, ...], server: RedisServer
) -> None:
    one, other = two
    server.kill()
    try:
        put(one, "resp_1")
        assert await find(one, "resp_1") is not None
        assert await find(other, "resp_1") is None
        await until(lambda: not other.is_up, 3)
        began = time.monotonic()
        assert await find(other, "resp_1") is None
        assert time.monotonic() - began < 0.1
        put(other, "resp_2")
        for _ in range(2):
            with pytest.raises(RefusedError) as refused:
                await other.forget(OWNER, "resp_2", time.monotonic())
            assert refused.value.status == 503
            assert other.get(OWNER, "resp_2", time.monotonic()) is None
    finally:
        server.start()
