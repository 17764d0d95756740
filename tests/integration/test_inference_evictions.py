"""Every model that had to leave is on record once, with the memory that really came back, and counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from inference import loads
from inference.evictions import MOST_RECORDS, Action, Departure, Reason
from tests.rigs.authority_rig import FakeAccelerator, Start, services, until


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    async with services(tmp_path, monkeypatch) as make:
        yield make


async def test_who_makes_room_is_recorded_with_the_plan_that_said_so(start: Start) -> None:
    service = await start({"a": {}, "b": {}}, MEMORY_LIMIT_GB="0.15", ENABLE_CPU_OFFLOAD="false")
    authority = service.authority
    listening = service.authority.bus.listen()
    await anext(listening)
    for name in ("a", "b"):
        lease = await authority.ask(authority.resolve(name)).wait(10)
        assert lease is not None
        lease.release()
    (record,) = authority.evictions.records
    assert (record.model_name, record.reason, record.action) == ("a", Reason.MEMORY_WANTED, Action.UNLOAD)
    assert record.memory_freed_mb == 100
    assert record.explanation[0] == "room for b"
    assert "fits once a left" in record.explanation[-1]
    assert authority.evictions.totals == {Action.UNLOAD: 1}
    sample = {"action": "unload", "reason": "memory wanted"}
    assert service.metrics.registry.get_sample_value("inference_evictions_total", sample) == 1
    async for frame in listening:
        if frame.startswith(b"event: eviction"):
            assert b'"memory_freed_mb":100.0' in frame
            break


async def test_memory_that_did_not_come_back_is_not_counted_as_freed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loads, "RETURN_SECONDS", 0.3)
    accelerator = FakeAccelerator()
    service = await start({"a": {}}, accelerator=accelerator)
    authority, model = service.authority, service.authority.resolve("a")
    lease = await authority.ask(model).wait(10)
    assert lease is not None
    lease.release()
    accelerator.used_bytes = 900 * 2**20
    await asyncio.wait_for(authority.unload(model), 10)
    await until("recorded", lambda: len(authority.evictions.records) == 1)
    assert authority.evictions.records[0].reason is Reason.BY_HAND
    assert authority.evictions.records[0].memory_freed_mb == 0


async def test_a_load_that_is_given_up_is_on_record(start: Start) -> None:
    service = await start({"a": {}}, {"a": {"load_seconds": 5}})
    authority, model = service.authority, service.authority.resolve("a")
    authority.ask(model).close()
    ticket = authority.ask(model)
    await until("loading", lambda: model.running is not None)
    ticket.close()
    authority.loads.leave(model, Reason.IDLE)
    authority.loads.leave(model, Reason.BY_HAND)
    await until("gone", lambda: model.running is None)
    assert [record.reason for record in authority.evictions.records] == [Reason.IDLE]


async def test_the_last_thousand_are_kept(start: Start) -> None:
    evictions = (await start({"a": {}})).authority.evictions
    for number in range(MOST_RECORDS + 1):
        evictions.add(str(number), Departure(Reason.IDLE), 2**20)
    assert len(evictions.records) == MOST_RECORDS
    assert evictions.records[0].model_name == "1"
    assert evictions.totals[Action.UNLOAD] == MOST_RECORDS + 1
