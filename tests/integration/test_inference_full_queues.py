"""A full queue says when to come back, and whoever does is let in; each priority has places of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from inference.errors import QueueFull
from inference.protocol import FULL_FOR, ModelState, Priority
from tests.rigs.authority_rig import Start, services
from tests.rigs.instant_workers import InstantSupervisor


def slow() -> dict[str, InstantSupervisor]:
    """A model that never is loaded."""
    return {"supervisor": InstantSupervisor({"a": 60.0})}


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    async with services(tmp_path, monkeypatch) as make:
        yield make


async def test_every_priority_has_its_own_places(start: Start) -> None:
    service = await start({"a": {}}, QUEUE_HIGH="1", QUEUE_NORMAL="2", QUEUE_LOW="3", parts=slow())
    authority, model = service.authority, service.authority.resolve("a")
    for priority, places in ((Priority.HIGH, 1), (Priority.NORMAL, 2), (Priority.LOW, 3)):
        for _ in range(places):
            authority.ask(model, priority=priority)
        with pytest.raises(QueueFull, match=f"INFERENCE_QUEUE_{priority.upper()}") as caught:
            authority.ask(model, priority=priority)
        assert caught.value.status == 429
        assert caught.value.details == {FULL_FOR: [priority]}
    authority.quiesce()


async def test_whoever_comes_back_when_he_was_told_to_is_let_in(start: Start) -> None:
    service = await start({"a": {}}, QUEUE_NORMAL="1", parts={"supervisor": InstantSupervisor({"a": 1.2})})
    authority, model = service.authority, service.authority.resolve("a")
    await authority.load(model)
    await authority.unload(model)
    first = authority.ask(model)
    with pytest.raises(QueueFull) as caught:
        authority.ask(model)
    told = caught.value.retry_after
    assert told == 2, "the last load took 1.2 s, in whole seconds"
    asked_at = authority.now
    await authority.reached(lambda: model.state is not ModelState.LOADING and model.running is not None, seconds=20)
    assert authority.now - asked_at <= told
    assert await authority.ask(model).wait(1) is not None
    first.close()


async def test_those_before_him_count_with_what_an_answer_took_lately(start: Start) -> None:
    service = await start({"a": {}}, QUEUE_NORMAL="4", QUEUE_LOW="0", parts=slow())
    authority, model = service.authority, service.authority.resolve("a")
    first = authority.ask(model)
    await model.becomes(ModelState.LOADING)
    await service.clock.advance(60.0)
    lease = await first.wait(1)
    assert lease is not None
    await service.clock.advance(5.0)
    lease.release(completed=True)
    await authority.unload(model)
    for _ in range(4):
        authority.ask(model)
    with pytest.raises(QueueFull) as caught:
        authority.ask(model)
    assert caught.value.retry_after == pytest.approx(80, abs=1)
    authority.quiesce()
