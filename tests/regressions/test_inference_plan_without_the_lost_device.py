"""`plan` said of a model whose GPU was lost that it cannot be placed, and not which GPU is missing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.regressions.test_inference_lost_device_told_as_memory import LosesTheSecond
from tests.rigs.asgi import ask
from tests.rigs.authority_rig import Start, services


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    async with services(tmp_path, monkeypatch) as make:
        yield make


async def test_the_device_is_named(start: Start) -> None:
    devices = LosesTheSecond()
    service = await start({"bound": {"gpu_index": 1}}, accelerator=devices)
    fits = (await ask(service.app, "POST", "/memory/plan", {"model": "bound"})).body
    assert fits["result"] == "FREE"
    devices.lost = True
    await service.authority.inventory.refresh()
    refused = (await ask(service.app, "POST", "/memory/plan", {"model": "bound"})).body
    assert refused["result"] == "CANT_ACCOMMODATE"
    assert "; gpu-1 is lost" in refused["reason"]
