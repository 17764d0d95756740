"""What a model's status says of the wait for it: load and queue in measured seconds, and how fast it reads prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from inference.authority.events import Progressed
from inference.authority.views import model_status
from inference.protocol import ModelState, ModelStatus
from inference.worker_link import Heartbeat
from tests.rigs.authority_rig import FakeAccelerator, FakeEstimator, Start, services
from tests.rigs.instant_workers import InstantSupervisor


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    async with services(tmp_path, monkeypatch) as make:
        yield make


async def test_waits_are_told_once_they_were_measured(start: Start) -> None:
    service = await start(
        {"a": {"parallel": 2}, "b": {}}, parts={"supervisor": InstantSupervisor({"a": 0.2, "b": 30.0})}
    )
    authority, model = service.authority, service.authority.resolve("a")

    def told(name: str = "a") -> ModelStatus:
        return authority.status(name)

    assert (told().load_seconds, told().queue_seconds, told().prefill_tokens_per_second) == (None, 0, None)
    await authority.load(model)
    assert told().load_seconds == 0
    leases = [await authority.ask(model).wait(1) for _ in range(4)]
    assert told().queue_seconds is None, "no answer was timed yet"
    assert model.running is not None
    beat = Heartbeat(None, 0, 0, 0, 0, 0, prefill_tokens_per_second=250.0)
    authority.dispatch(Progressed(model.running.id, 1.0, beat))
    assert told().prefill_tokens_per_second == 250
    await service.clock.advance(4.0)
    first, *leases = leases
    assert first is not None
    first.release(completed=True)
    assert told().answer_seconds == pytest.approx(4, abs=0.1)
    assert told().queue_seconds == pytest.approx(8, abs=0.2), "two have to end before a third that waits has a place"
    for lease in leases:
        assert lease is not None
        lease.release(completed=True)
    await authority.unload(model)
    seconds = told().load_seconds
    assert seconds is not None
    assert seconds >= 0.2
    assert told().prefill_tokens_per_second == 250, "the next worker is expected to be as quick"


async def test_a_load_that_runs_is_told_by_what_is_left_of_it(start: Start) -> None:
    service = await start({"a": {}}, parts={"supervisor": InstantSupervisor({"a": 60.0})})
    authority, model = service.authority, service.authority.resolve("a")
    loading = asyncio.create_task(authority.load(model))
    await model.becomes(ModelState.LOADING)
    await service.clock.advance(60.0)
    await loading
    await authority.unload(model)
    with authority.ask(model):
        left = authority.status(model).load_seconds
        assert left is not None
        assert left == pytest.approx(60, abs=1)
        changed = authority.status(model)
        assert not model_status.differs(changed, changed)
    authority.quiesce()


async def test_what_cannot_fit_is_told_by_what_the_policy_leaves_to_try(start: Start) -> None:
    """A gateway skips only what is sure to be refused: what may be reduced, or may go to the CPU, is asked for."""
    estimator = FakeEstimator()
    estimator.sizes = dict.fromkeys(("fast", "reduce", "cpu"), 2000) | {"small": 500}
    service = await start(
        {
            "fast": {},
            "reduce": {"oom_policy": "reduce"},
            "cpu": {"oom_policy": "cpu"},
            "small": {},
        },
        accelerator=FakeAccelerator(),
        estimator=estimator,
        parts={"supervisor": InstantSupervisor({})},
    )
    authority = service.authority

    def told(name: str) -> ModelStatus:
        return authority.status(name)

    for name in ("fast", "reduce", "cpu", "small"):
        await authority.measure(name)
    assert told("fast").fits is False
    assert "gpu-0" in (told("fast").reason or "")
    assert told("reduce").fits is None, "with a smaller context it may"
    assert told("cpu").fits is True
    assert told("small").fits is True
