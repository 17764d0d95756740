"""What changed while a model was measured was not looked at again: plans failed with a 500, and two moves crossed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from inference import settings
from inference.errors import InvalidRequestError
from tests.integration.test_inference_moving import TwoAccelerators
from tests.rigs.authority_rig import FakeAccelerator, FakeEstimator, Start, rewrite, services


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    async with services(tmp_path, monkeypatch) as make:
        yield make


async def test_a_dry_run_outlives_a_reload(start: Start, tmp_path: Path) -> None:
    """Other settings while it is measured: it is measured by them."""
    estimator = FakeEstimator()
    estimator.gate = asyncio.Event()
    service = await start({"a": {}}, estimator=estimator)
    authority = service.authority
    asked = asyncio.create_task(authority.dry_run(authority.resolve("a"), {}))
    await asyncio.sleep(0)
    rewrite(tmp_path, {"a": {"context_length": 512}})
    authority.reload(settings.load(tmp_path, {"INFERENCE_FORCE_CPU_MODE": "true"}, {}))
    estimator.gate.set()
    decision, estimate = await asyncio.wait_for(asked, 10)
    assert decision.result == "FREE"
    assert estimate is not None


async def test_a_device_that_comes_while_another_is_measured_is_measured_too(start: Start) -> None:
    """The question was what fits now."""

    class Growing(FakeAccelerator):
        grown = False

        def readings(self):  # type: ignore[no-untyped-def]
            return TwoAccelerators().readings() if self.grown else super().readings()

    estimator, accelerator = FakeEstimator(), Growing()
    service = await start({"a": {}}, estimator=estimator, accelerator=accelerator)
    authority = service.authority
    estimator.gate = asyncio.Event()
    asked = asyncio.create_task(authority.dry_run(authority.resolve("a"), {"parallel": 1}))
    await asyncio.sleep(0)
    accelerator.grown = True
    estimator.gate.set()
    decision, _ = await asyncio.wait_for(asked, 10)
    assert decision.result == "FREE"


async def test_of_two_moves_at_once_one_is_refused(start: Start) -> None:
    """The second cleared what the first one had set."""
    estimator = FakeEstimator()
    estimator.gate = asyncio.Event()
    service = await start({"a": {}}, estimator=estimator, accelerator=TwoAccelerators())
    authority, model = service.authority, service.authority.resolve("a")
    moves = [asyncio.create_task(authority.move(model, device)) for device in ("gpu-0", "gpu-1")]
    await asyncio.sleep(0)
    estimator.gate.set()
    first, second = await asyncio.gather(*moves, return_exceptions=True)
    assert first is None
    assert isinstance(second, InvalidRequestError)
    assert authority.status(model).devices == ("gpu-0",)
