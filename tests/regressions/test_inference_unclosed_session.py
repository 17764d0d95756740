"""A service that ended right after a worker did gave up closing that worker's HTTP client."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from inference.authority.lifecycle.departures import Reason
from inference.protocol import ModelState
from tests.rigs.authority_rig import services


async def test_the_client_of_a_worker_is_closed_although_the_service_ends_in_the_same_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with services(tmp_path, monkeypatch) as start:
        authority = (await start({"a": {}})).authority
        model = authority.resolve("a")
        await authority.load(model)
        ticket = authority.ask(model)
        lease = await ticket.wait(10)
        assert lease is not None
        session = lease.session
        ticket.close()
        process = lease.process
        closing: list[asyncio.Task[None]] = []
        process.exited.add_done_callback(lambda _: closing.append(asyncio.create_task(authority.close())))
        authority.leave(model, Reason.BY_HAND)
        await process.exited
        await asyncio.sleep(0)
        await asyncio.gather(*closing)
    assert model.state is ModelState.COLD
    assert session.closed
