"""Models that several devices share (`split_mode`): placed where llama.cpp supports it, refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from inference.authority.handlers.queries.decode_speed import expected
from inference.authority.state import EstimateKey
from inference.devices.device import CPU, Reading
from inference.errors import InferenceError, MemoryLimitExceededError
from inference.estimate.header_formula import Parts
from inference.estimate.layers import Sizes
from inference.estimate.model_estimate import Estimate
from tests.rigs.authority_world import configuration
from tests.rigs.step_world import MIB, OVERHEAD_BYTES, StepWorld

LAYER_MIB, LAYERS = 300, 4
WHY = "no split buffers; set split_mode: layer"


class SharedWorld(StepWorld):
    """A model of four layers that needs two devices. The devices do not support mode `row`."""

    def _estimate(self, key: EstimateKey, devices: tuple[Reading, ...]) -> Estimate | InferenceError:
        counts = dict(zip(key.devices, key.counts, strict=True)) if key.counts else {key.devices[0]: LAYERS + 1}
        parts = {name: Parts(LAYER_MIB * LAYERS * MIB * count // (LAYERS + 1), 0, 0) for name, count in counts.items()}
        return Estimate(
            parts,
            dict.fromkeys((*parts, CPU), OVERHEAD_BYTES),
            "llama.cpp",
            "",
            4096,
            sizes=(Sizes(LAYER_MIB * MIB, 0),) * LAYERS,
            counts=counts if key.counts else {},
            split_problem=WHY if key.spec.split_mode == "row" else "",
        )


def begin(**keys: Any) -> SharedWorld:
    world = SharedWorld(configuration({"a": {"parallel": 1, **keys}}), {"a": 100}, ("gpu-0", "gpu-1"))
    world.arrive()
    return world


@pytest.mark.parametrize("split_mode", ["layer", "tensor"])
def test_two_devices_share_a_model_in_the_configured_mode(split_mode: str) -> None:
    """The speed is unknown if they share each layer."""
    world = begin(split_mode=split_mode)
    ticket = world.want("a")
    world.arrive()
    assert ticket in world.grants
    worker = world.state.worker_of(world.model("a"))
    assert worker is not None
    assert worker.placement.devices == ("gpu-0", "gpu-1")
    first = world.state.estimates_of(worker.spec)["gpu-0"]
    speed = expected({}, worker.spec, first, worker.placement)
    assert (speed is None) == (split_mode == "tensor")


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"split_mode": "row"}, WHY),
        ({"split_mode": "tensor", "lora": ("/adapter.gguf",)}, "llama.cpp does not divide LoRA adapters by tensor"),
    ],
)
def test_unsupported_split_mode_is_refused_with_the_reason(keys: dict[str, Any], why: str) -> None:
    world = begin(**keys)
    ticket = world.want("a")
    world.arrive()
    error = world.errors[ticket]
    assert isinstance(error, MemoryLimitExceededError)
    assert f"; several devices cannot share it: {why}" in error.message
    assert "set split_mode: layer" in error.message
