"""Warm models outlived a configuration: beyond a lowered limit, or where they may not be loaded any more."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from inference.protocol import ModelState
from tests.rigs.authority_rig import FakeAccelerator, Start, reload, services

S = ModelState


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    async with services(tmp_path, monkeypatch) as make:
        yield make


async def test_a_lowered_limit_is_kept_by_dropping_the_least_worthy(start: Start, tmp_path: Path) -> None:
    """Two are warm, equally large; there is room for one of them from now on."""
    models: dict[str, dict[str, Any]] = {"a": {}, "b": {}}
    service = await start(models, {"a": {"buffers": 0}, "b": {"buffers": 0, "load_seconds": 0.5}})
    authority = service.authority
    for name in models:
        await authority.load(authority.resolve(name))
        await authority.offload(authority.resolve(name))
    held = authority.ledger.balance("cpu").ours_bytes
    total = authority.readings()[-1].total_bytes
    reload(service, tmp_path, models, FORCE_CPU_MODE="true", CPU_MEMORY_MAX_PERCENT=str(held * 0.75 / total))
    await authority.resolve("a").becomes(S.COLD)
    assert authority.resolve("b").state is S.WARM
    assert authority.ledger.excess("cpu") == 0


async def test_who_stands_by_on_the_cpu_is_loaded_where_it_may_be(start: Start, tmp_path: Path) -> None:
    """`oom_policy: cpu` put it there; with another policy it has to begin anew."""
    accelerator = FakeAccelerator()
    accelerator.used_bytes = 1000 * 2**20
    service = await start({"a": {"oom_policy": "cpu"}}, accelerator=accelerator)
    authority, model = service.authority, service.authority.resolve("a")
    await authority.load(model)
    assert authority.status(model).devices == ("cpu",)
    await authority.offload(model)
    assert model.state is S.WARM
    accelerator.used_bytes = 0
    reload(service, tmp_path, {"a": {"oom_policy": "fail_fast"}})
    await authority.load(model)
    assert authority.status(model).devices == ("gpu-0",)
