"""The overhead beyond the buffers and the duration of a load are used in later decisions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from headgate.shared.state_directory import StateDir
from inference.authority.handlers.running.keeping import droppable
from inference.estimate.estimator import Estimator
from inference.protocol import ModelState
from inference.settings import load
from tests.rigs import tiny_gguf
from tests.rigs.authority_rig import MIB, FakeEstimator, SharedDevice, Start


async def test_overhead_beyond_the_buffers_is_learned_after_a_load(start: Start) -> None:
    estimator, device = FakeEstimator(), SharedDevice(foreign_mib=200)
    device.service = service = await start({"a": {}}, accelerator=device, estimator=estimator)
    await service.authority.load(service.authority.resolve("a"), 10)
    await service.authority.reached(lambda: bool(estimator.learned))
    assert estimator.learned == [("gpu-0", 64 * MIB)]


async def test_next_estimate_includes_the_learned_overhead(tmp_path: Path) -> None:
    """The estimate is from the header, which needs no CUDA."""
    (tmp_path / "models.yaml").write_text(json.dumps({"models": {"a": {"path": str(tiny_gguf.generative())}}}))
    spec = load(tmp_path, {}, {}).models["a"]
    estimator = Estimator(StateDir.from_env({"HEADGATE_STATE_DIR": str(tmp_path / "state")}), seconds=0.01)
    device = replace(SharedDevice().readings()[0], context_bytes=None)
    estimator.learn(device, 700 * MIB)
    found = await estimator.get(spec, device)
    assert found.overhead_bytes[device.id] == 770 * MIB
    await estimator.close()


async def test_model_that_loads_slower_stays_loaded(start: Start) -> None:
    """Although it was used longer ago: the model that loads faster becomes warm instead."""
    service = await start({"slow": {}, "quick": {}, "new": {}}, {"slow": {"load_seconds": 1.0}}, MEMORY_LIMIT_GB="0.25")
    authority = service.authority
    slow, quick, new = (authority.resolve(name) for name in ("slow", "quick", "new"))
    for model in (slow, quick, new):
        await authority.load(model, 10)
    assert (slow.state, new.state) == (ModelState.READY, ModelState.READY)
    await quick.becomes(ModelState.WARM)
    (kept,) = droppable(authority.state)
    assert (kept.model, kept.saves_seconds) == ("quick", quick.reload_seconds)
    assert 0 < quick.reload_seconds < slow.reload_seconds
