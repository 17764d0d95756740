"""Devices that a model may be planned for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inference.authority.handlers.queries.device_view import candidates
from inference.devices.device import Reading
from inference.environment_settings import InferenceSettings
from inference.protocol import DeviceState
from inference.settings import ModelEntry, ModelSpec, _spec

GPUS = tuple(Reading(f"gpu-{number}", "cuda", "H200", 1000, 1000, 0) for number in range(2))
HOST = Reading("cpu", "cpu", "EPYC", 1000, 1000, 0)


def model(settings: InferenceSettings | None = None, **fields: object) -> ModelSpec:
    entry = ModelEntry.model_validate({"path": "/models/x.gguf", **fields})
    return _spec("x", entry, settings or InferenceSettings())


def ids(spec: ModelSpec, *readings: Reading, settings: InferenceSettings | None = None) -> list[str]:
    return [reading.id for reading in candidates(spec, readings, settings or InferenceSettings())]


def test_device_of_the_model_overrides_that_of_the_service_and_the_planner() -> None:
    pinned = InferenceSettings(gpu_index=1)
    assert ids(model(), *GPUS, HOST) == ["gpu-0", "gpu-1"]
    assert ids(model(pinned), *GPUS, HOST, settings=pinned) == ["gpu-1"]
    assert ids(model(pinned, gpu_index=0), *GPUS, HOST, settings=pinned) == ["gpu-0"]


def test_cpu_is_a_candidate_without_accelerators_or_on_request() -> None:
    assert ids(model(), HOST) == ["cpu"]
    assert ids(model(gpu_layers=0), *GPUS, HOST) == ["cpu"]
    forced = InferenceSettings(force_cpu_mode=True)
    assert ids(model(), *GPUS, HOST, settings=forced) == ["cpu"]
    assert ids(model(oom_policy="cpu"), *GPUS, HOST) == ["gpu-0", "gpu-1", "cpu"]


@pytest.mark.parametrize("state", [DeviceState.LOST, DeviceState.QUARANTINED])
def test_lost_accelerator_is_not_replaced_by_the_cpu(state: DeviceState) -> None:
    lost = [replace(gpu, state=state) for gpu in GPUS]
    assert ids(model(), *lost, HOST) == []
    assert ids(model(), lost[0], GPUS[1], HOST) == ["gpu-1"]
