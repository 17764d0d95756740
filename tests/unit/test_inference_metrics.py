"""Metrics have the documented labels and HELP texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference.protocol import ModelState
from tests.rigs.authority_rig import FakeAccelerator, services

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "api.md"


async def test_state_of_models_and_devices_is_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with services(tmp_path, monkeypatch) as start:
        service = await start({"a": {}, "b": {}}, accelerator=FakeAccelerator())
        await service.authority.load(service.authority.resolve("a"))
        lines = service.metrics.render().decode().splitlines()
    ready, cold = list(ModelState).index(ModelState.READY), list(ModelState).index(ModelState.COLD)
    states = [line for line in lines if line.startswith(("inference_model_state", "inference_device_state"))]
    assert sorted(states) == [
        'inference_device_state{device="cpu"} 0.0',
        'inference_device_state{device="gpu-0"} 0.0',
        f'inference_model_state{{model="a"}} {ready:.1f}',
        f'inference_model_state{{model="b"}} {cold:.1f}',
    ]
    for name in ("inference_model_state", "inference_device_state"):
        (help_line,) = [line for line in lines if line.startswith(f"# HELP {name} ")]
        numbers = help_line.removeprefix(f"# HELP {name} ")
        assert numbers.startswith("0 ")
        label = name.split("_")[1]
        assert f"| `{name}` | `{label}` | {numbers} |" in DOCUMENT.read_text(encoding="utf-8")
