"""The authority with fake worker processes: whatever happens in whatever order, memory and places come back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from inference.errors import (
    ModelFailed,
    ShuttingDown,
)
from inference.protocol import ModelState
from tests.rigs.authority_rig import MIB, Start, empty, services


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    async with services(tmp_path, monkeypatch) as make:
        yield make


async def test_lease_of_an_ended_worker_does_not_affect_the_next_worker(start: Start) -> None:
    service = await start({"a": {}})
    authority, model = service.authority, service.authority.resolve("a")
    old = await authority.ask(model).wait(10)
    assert old is not None
    os.kill(old.process.pid, signal.SIGKILL)
    await authority.reached(lambda: model.running is None)
    assert empty(service)
    fresh = await authority.ask(model).wait(10)
    assert fresh is not None
    old.release(completed=True)
    assert model.in_flight == 1
    fresh.release(completed=True)
    assert (model.in_flight, model.backoff.failures) == (0, 0)


async def test_failing_loads_have_a_backoff_with_retry_after(start: Start) -> None:
    service = await start({"a": {}}, {"a": {"fail": "startup"}})
    authority, model = service.authority, service.authority.resolve("a")
    for failures in (1, 2, 3):
        with pytest.raises(ModelFailed) as caught:
            await authority.ask(model).wait(10)
        assert caught.value.retry_after == pytest.approx(2 ** (failures - 1), abs=0.3)
        assert empty(service)
        status = authority.status(model)
        assert (status.state, model.backoff.failures) == (ModelState.FAILED, failures)
        assert status.retry_after_seconds == pytest.approx(2 ** (failures - 1), abs=0.3)
        await service.clock.advance(2 ** (failures - 1) - 0.1)


async def test_load_that_allocates_more_than_planned_fails(start: Start) -> None:
    service = await start({"a": {}}, {"a": {"buffers": 900 * MIB}})
    authority = service.authority
    with pytest.raises(ModelFailed, match=r"900\.0 MiB on cpu where 36\.0 MiB were planned"):
        await authority.ask(authority.resolve("a")).wait(10)
    assert empty(service)


async def test_unload_of_a_busy_model_waits_for_running_answers(start: Start) -> None:
    service = await start({"a": {}})
    authority, model = service.authority, service.authority.resolve("a")
    lease = await authority.ask(model).wait(10)
    leaving = asyncio.create_task(authority.unload(model))
    await model.becomes(ModelState.DRAINING)
    waiting = authority.ask(model)
    assert await waiting.wait(0.2) is None
    lease.release(completed=True)
    await asyncio.wait_for(leaving, 10)
    assert await waiting.wait(10) is not None
    assert model.loads == 2
    waiting.close()


async def test_shutdown_fails_all_waiting_requests(start: Start) -> None:
    service = await start({"a": {}}, {"a": {"load_seconds": 5}})
    authority, model = service.authority, service.authority.resolve("a")
    ticket = authority.ask(model)
    await model.becomes(ModelState.LOADING)
    authority.stop_workers()
    with pytest.raises(ShuttingDown):
        await ticket.wait(1)
    with pytest.raises(ShuttingDown):
        authority.ask(model)
    await authority.emptied()
