"""A known refusal is repeated without a new measurement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headgate.shared.state_directory import StateDir
from inference.errors import MemoryLimitExceededError
from inference.estimate.estimator import Estimate, Estimator
from tests.rigs import tiny_gguf
from tests.rigs.authority_rig import Start

LARGE = {"path": str(tiny_gguf.generative()), "context_length": 65536, "parallel": 8}
"""A cache of 128 MiB."""


class Counting(Estimator):
    """Counts its calls, which are the only ones that start helpers."""

    calls = 0

    async def get(self, *args: Any, **more: Any) -> Estimate:
        """As it was."""
        self.calls += 1
        return await super().get(*args, **more)


async def test_known_refusal_needs_no_estimate(start: Start, tmp_path: Path) -> None:
    estimator = Counting(StateDir.from_env({"HEADGATE_STATE_DIR": str(tmp_path / "estimates")}), seconds=60)
    service = await start({"a": LARGE}, estimator=estimator, MEMORY_LIMIT_GB="0.15")
    authority, model = service.authority, service.authority.resolve("a")
    with pytest.raises(MemoryLimitExceededError) as first:
        await authority.load(model, 20)
    assert set(first.value.fix) == {"parallel"}, "it was measured as well"
    calls = estimator.calls
    assert calls >= 2
    for _ in range(3):
        with pytest.raises(MemoryLimitExceededError) as again:
            await authority.load(model, 20)
        decision, _estimate = await authority.dry_run(model, {})
        assert again.value.fix == first.value.fix == getattr(decision, "fix", None)
    assert estimator.calls == calls
