"""A dry run of a loaded model: other settings plan a reload at that size, the same settings find it deployed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from inference.authority.placement.plan import Placement, Result
from inference.estimate.model_estimate import Estimate
from tests.rigs.authority_rig import MIB, FakeEstimator, Start, services


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    async with services(tmp_path, monkeypatch) as make:
        yield make


class _ByContext(FakeEstimator):
    """A model needs 100 MiB, and 100 MiB more for a context other than 4096."""

    async def get(self, spec: Any, device: Any, *others: Any, counts: Any = ()) -> Estimate:
        self.sizes[spec.id] = 100 if spec.context_length == 4096 else 200
        return await super().get(spec, device, *others, counts=counts)


async def test_other_settings_plan_a_reload_and_the_same_ones_do_not(start: Start) -> None:
    service = await start({"a": {"context_length": 4096}}, estimator=_ByContext(), MEMORY_LIMIT_GB="0.25")
    authority = service.authority
    model = authority.resolve("a")
    (await authority.ask(model).wait(10)).release(completed=True)

    async def outcome(**changes: Any) -> tuple[Result, int, bool]:
        decision, _ = await authority.dry_run(model, changes)
        assert isinstance(decision, Placement)
        told = "a is on cpu with other settings, and would be loaded anew" in decision.trace
        return decision.result, sum(decision.need.values()) // MIB, told

    assert await outcome() == (Result.DEPLOYED, 100, False)
    assert await outcome(context_length=4096) == (Result.DEPLOYED, 100, False)
    assert await outcome(context_length=8192) == (Result.FREE, 200, True)
    assert model.running is not None
    assert model.spec.context_length == 4096
