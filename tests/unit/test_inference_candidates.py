"""Which devices a model may be planned for: its own, the service's choice, else any; never the CPU for a lost one."""

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


def model(settings: InferenceSettings | None = None, **said: object) -> ModelSpec:
    entry = ModelEntry.model_validate({"path": "/models/x.gguf", **said})
    return _spec("x", entry, settings or InferenceSettings())


def ids(spec: ModelSpec, *readings: Reading, settings: InferenceSettings | None = None) -> list[str]:
    return [reading.id for reading in candidates(spec, readings, settings or InferenceSettings())]


def test_its_own_choice_counts_before_the_services_and_that_before_the_planners() -> None:
    pinned = InferenceSettings(gpu_index=1)
    assert ids(model(), *GPUS, HOST) == ["gpu-0", "gpu-1"]
    assert ids(model(pinned), *GPUS, HOST, settings=pinned) == ["gpu-1"]
    assert ids(model(pinned, gpu_index=0), *GPUS, HOST, settings=pinned) == ["gpu-0"]


def test_the_cpu_is_a_device_where_there_is_no_other_or_it_is_asked_for() -> None:
    assert ids(model(), HOST) == ["cpu"]
    assert ids(model(gpu_layers=0), *GPUS, HOST) == ["cpu"]
    forced = InferenceSettings(force_cpu_mode=True)
    assert ids(model(), *GPUS, HOST, settings=forced) == ["cpu"]
    assert ids(model(oom_policy="cpu"), *GPUS, HOST) == ["gpu-0", "gpu-1", "cpu"]


@pytest.mark.parametrize("state", [DeviceState.LOST, DeviceState.QUARANTINED])
def test_a_lost_accelerator_never_turns_into_the_cpu(state: DeviceState) -> None:
    lost = [replace(gpu, state=state) for gpu in GPUS]
    assert ids(model(), *lost, HOST) == []
    assert ids(model(), lost[0], GPUS[1], HOST) == ["gpu-1"]
