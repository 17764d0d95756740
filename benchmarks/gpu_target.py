"""Where `gpu-check` measures and with which model, from the environment."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import is_quick
from benchmarks.models import SHAPES
from inference import settings
from inference.settings import InferenceConfig


@dataclass(frozen=True, slots=True)
class Target:
    """`devices` is INFERENCE_DEVICES; `shape` names the model of the parts with a service, `moe` that with experts."""

    devices: str
    shape: str
    moe: str
    environ: Mapping[str, str]

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Target:
        """Raises ValueError for an unknown shape. Simulated devices compute on the CPU, so they get small models."""
        devices = environ.get("INFERENCE_DEVICES", "auto")
        is_small = devices.startswith("sim")
        shape = environ.get("GPU_CHECK_SHAPE", "") or ("15m" if is_small else "135m" if is_quick(environ) else "1b")
        if shape not in SHAPES:
            raise ValueError(f"unknown GPU_CHECK_SHAPE {shape!r}; shapes: {', '.join(SHAPES)}")
        return cls(devices, shape, "moe-small" if is_small or is_quick(environ) else "moe", environ)

    @property
    def simulated(self) -> bool:
        """Whether the devices are simulated."""
        return self.devices.startswith("sim")

    def config(self) -> InferenceConfig:
        """A configuration of the inference service without models."""
        with tempfile.TemporaryDirectory(prefix="hg-gpu-") as directory:
            (Path(directory) / "models.yaml").write_text("models: {}\n")
            return settings.load(Path(directory), self.environ, {})
