"""A damaged line in the file of remembered estimates left everybody who asked for its model waiting for 300 seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headgate.shared.state import StateDir
from inference.devices.host import CpuProbe
from inference.errors import ModelFailed
from inference.estimate.estimator import Estimator
from inference.settings import load
from tests.rigs import tiny_gguf
from tests.rigs.authority_rig import services


class BrokenEstimator:
    """Fails in a way nobody foresaw."""

    async def get(self, spec: Any, *devices: Any, counts: Any = ()) -> None:
        raise KeyError("weights_bytes")

    async def close(self) -> None:
        return None


async def test_an_unforeseen_failure_of_an_estimate_is_told_to_those_who_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with services(tmp_path, monkeypatch) as start:
        service = await start({"a": {}, "b": {}}, estimator=BrokenEstimator())
        tickets = [service.authority.ask(service.authority.resolve("a")) for _ in range(2)]
        for ticket in tickets:
            with pytest.raises(ModelFailed, match="cannot be measured"):
                await ticket.wait(5)
        with pytest.raises(ModelFailed):
            await service.authority.dry_run(service.authority.resolve("b"), {})
        assert "Traceback" in caplog.text


@pytest.mark.parametrize("damage", ["text", [], {}, {"parts": {"cpu": {"weights_bytes": "x"}}}, {"parts": None}])
async def test_a_damaged_entry_is_measured_again(tmp_path: Path, damage: Any) -> None:
    (tmp_path / "models.yaml").write_text(
        json.dumps({"models": {"a": {"path": str(tiny_gguf.generative(seed=1)), "context_length": 256}}})
    )
    spec = load(tmp_path, {}, {}).models["a"]
    state = StateDir.from_env({"HEADGATE_STATE_DIR": str(tmp_path / "state")})
    (device,) = CpuProbe().readings()
    first = Estimator(state, seconds=60)
    right = await first.get(spec, device)
    await first.close()
    path = state.file("estimates.json")
    kept = json.loads(path.read_bytes())
    (key,) = kept["entries"]
    whole = kept["entries"][key]
    kept["entries"][key] = {**whole, **damage} if isinstance(damage, dict) and damage else damage
    path.write_text(json.dumps(kept))
    second = Estimator(state, seconds=60)
    assert await second.get(spec, device) == right
    await second.close()
    assert json.loads(path.read_bytes())["entries"][key] == whole
