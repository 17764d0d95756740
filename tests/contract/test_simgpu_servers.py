"""Servers of simulated devices: one spare is ready, and none remains after cancellations or exits."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from inference.devices.simgpu.backing import Servers
from tests.rigs.processes import command_of, descendants_of, wait_until


def running() -> set[int]:
    mine = descendants_of(os.getpid())
    return {pid for pid in mine if "simgpu.rpc_server" in command_of(pid)}


@pytest.fixture
async def servers() -> AsyncIterator[Servers]:
    servers = Servers()
    yield servers
    await servers.close()
    wait_until("no server is left", lambda: not running())


async def test_each_client_has_its_own_server_and_a_spare_is_started(servers: Servers) -> None:
    first, second = await asyncio.gather(servers.take(), servers.take())
    assert first.port != second.port
    assert {first.process.pid, second.process.pid} < running()
    await first.end()
    await second.end()


async def test_server_of_a_cancelled_request_is_kept_as_spare(servers: Servers) -> None:
    """A client that disconnects while its server starts causes no new server."""
    waiting = [asyncio.create_task(servers.take()) for _ in range(3)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    server = await servers.take()
    assert server.process.pid in running()
    await server.end()


async def test_ended_spare_server_is_replaced(servers: Servers) -> None:
    """The spare server may end before it has reported its port."""
    server = await servers.take()
    await server.end()
    (spare,) = running()
    os.kill(spare, signal.SIGKILL)
    async with asyncio.timeout(10):
        while spare in running() or Path(f"/proc/{spare}").exists():
            await asyncio.sleep(0.01)
    again = await servers.take()
    assert again.process.returncode is None
    assert again.process.pid != spare
    await again.end()


async def test_returned_server_is_used_next(servers: Servers) -> None:
    """Repeatedly, if its clients leave nothing in it; ended servers and more than two are not kept."""
    first, second, third = [await servers.take() for _ in range(3)]
    await servers.give_back(first)
    assert await servers.take() is first
    await servers.give_back(first)
    await servers.give_back(second)  # the starting server is a spare as well
    assert second.process.returncode is not None
    assert await servers.take() is first
    await first.end()
    await servers.give_back(first)
    other = await servers.take()
    assert other is not first
    await other.end()
    await third.end()
