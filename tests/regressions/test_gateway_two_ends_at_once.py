"""A tier found gone in the very moment that its deadline passed: two cancellations, of which one ended the request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.apis.openai.frames import Endpoint, Frame
from gateway.providers.provider import Call
from gateway.routing.budget import Budget, Due, Limits
from gateway.routing.stream_reader import ExpiredError, StreamReader
from tests.rigs.typed_bodies import call as typed_call

pytestmark = pytest.mark.timeout(20)


class Silent:
    """A provider that never answers."""

    name = "silent"
    is_local = True

    @asynccontextmanager
    async def stream(self, call: Call) -> AsyncIterator[AsyncIterator[Frame]]:
        await asyncio.Event().wait()
        yield  # type: ignore[misc]


@pytest.mark.parametrize("times", [1, 2])
async def test_whoever_listens_is_told_once(times: int) -> None:
    budget = Budget(Limits(30, 15, 300, 120, 2), asyncio.get_running_loop().time())
    listening = StreamReader(Silent(), typed_call(Endpoint.CHAT, "m", {}, "id"), budget, last=False)  # type: ignore[arg-type]
    opening = asyncio.create_task(listening.open())
    await asyncio.sleep(0)
    for _ in range(times):
        listening.abort()
    with pytest.raises(ExpiredError) as caught:
        await opening
    assert caught.value.due is Due.SILENCE
    await listening.close()
