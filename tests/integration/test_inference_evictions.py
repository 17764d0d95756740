"""Every model that had to leave is on record once, with the memory that really came back, and counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from inference.authority.lifecycle import Action, Reason
from inference.authority.state import Timing
from tests.rigs.authority_rig import FakeAccelerator, Start, services


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    async with services(tmp_path, monkeypatch) as make:
        yield make


async def test_eviction_is_recorded_with_its_plan(start: Start) -> None:
    service = await start({"a": {}, "b": {}}, MEMORY_LIMIT_GB="0.15", ENABLE_CPU_OFFLOAD="false")
    authority = service.authority
    listening = service.authority.bus.listen()
    await anext(listening)
    for name in ("a", "b"):
        lease = await authority.ask(authority.resolve(name)).wait(10)
        assert lease is not None
        lease.release()
    (record,) = authority.state.evictions
    assert (record.model_name, record.reason, record.action) == ("a", Reason.MEMORY_WANTED, Action.UNLOAD)
    assert record.memory_freed_mb == 100
    assert record.explanation[0] == "room for b"
    assert "fits once a left" in record.explanation[-1]
    assert authority.state.departures == {Action.UNLOAD: 1}
    sample = {"action": "unload", "reason": "memory wanted"}
    assert service.metrics.registry.get_sample_value("inference_evictions_total", sample) == 1
    async for frame in listening:
        if frame.startswith(b"event: eviction"):
            assert b'"memory_freed_mb":100.0' in frame
            break


async def test_memory_that_was_not_released_is_not_counted_as_freed(start: Start) -> None:
    accelerator = FakeAccelerator()
    service = await start({"a": {}}, accelerator=accelerator, parts={"timing": Timing(return_seconds=0.3)})
    authority, model = service.authority, service.authority.resolve("a")
    lease = await authority.ask(model).wait(10)
    assert lease is not None
    lease.release()
    accelerator.used_bytes = 900 * 2**20
    await asyncio.wait_for(authority.unload(model), 10)
    await authority.reached(lambda: len(authority.state.evictions) == 1)
    assert authority.state.evictions[0].reason is Reason.BY_HAND
    assert authority.state.evictions[0].memory_freed_mb == 0


async def test_cancelled_load_is_recorded(start: Start) -> None:
    service = await start({"a": {}}, {"a": {"load_seconds": 5}})
    authority, model = service.authority, service.authority.resolve("a")
    authority.ask(model).close()
    ticket = authority.ask(model)
    await authority.reached(lambda: model.running is not None)
    ticket.close()
    authority.leave(model, Reason.IDLE)
    authority.leave(model, Reason.BY_HAND)
    await authority.reached(lambda: model.running is None)
    assert [record.reason for record in authority.state.evictions] == [Reason.IDLE]
