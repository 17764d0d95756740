"""A model that would have been reduced to fit was told not to fit, so the gateway never asked for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from inference.authority.placement.plan import Refusal
from tests.rigs.authority_rig import FakeAccelerator, FakeEstimator, Start, services


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    async with services(tmp_path, monkeypatch) as make:
        yield make


async def test_whether_it_fits_reduced_is_not_known_before(start: Start) -> None:
    estimator = FakeEstimator()
    estimator.sizes = {"bends": 5000, "breaks": 5000}
    models = {"bends": {"oom_policy": "reduce"}, "breaks": {}}
    service = await start(models, accelerator=FakeAccelerator(), estimator=estimator)
    authority = service.authority
    for name in models:
        await authority.measure(name)
    assert authority.prospect("bends") is None
    assert isinstance(authority.prospect("breaks"), Refusal)
