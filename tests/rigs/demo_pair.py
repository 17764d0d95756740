"""Two bundled models on one simulated device of 400 MiB, whose pressure is checked often."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.rigs.stack import Stack

MODELS = """
models:
  demo: {path: bundled:demo, context_length: 1024, parallel: 1, min_residency: 0}
  demo-mini: {path: bundled:demo-mini, context_length: 512, parallel: 1, min_residency: 0}
"""
TOTAL_BYTES = 400 * 2**20
CHECK_SECONDS = 0.2


@contextmanager
def demo_pair(root: Path) -> Iterator[Stack]:
    """The inference service with both models, ready."""
    started = Stack(
        root,
        models=MODELS,
        inference_env={
            "INFERENCE_DEVICES": "sim:400MiB",
            "INFERENCE_WARM_CHECKPOINT": "off",
            "INFERENCE_PRESSURE_CHECK_INTERVAL_SECONDS": str(CHECK_SECONDS),
            "INFERENCE_EVICTION_IDLE_THRESHOLD_SECONDS": "0.1",
        },
    )
    try:
        started.inference.start(wait_for="/readyz")
        yield started
    finally:
        started.kill()
