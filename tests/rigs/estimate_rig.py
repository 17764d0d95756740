"""Compares the estimate of a model with the allocations of a real worker and its device."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headgate.shared.state_directory import StateDir
from inference import worker_link
from inference.devices.device import CPU, Reading, environment_of, grants_of
from inference.devices.host import CpuProbe
from inference.devices.simgpu.probe import SimProbe
from inference.environment_settings import InferenceSettings
from inference.estimate.estimator import Estimate, Estimator
from inference.settings import ModelEntry, ModelSpec, _spec
from tests.rigs.tiny_families import Form, path
from tests.rigs.worker_rig import WorkerRig

MIB = 2**20
SHARE, MIN_BYTES = 0.01, 16 * MIB
"""Allowed difference between allocated and estimated bytes: the larger of the two."""


@dataclass(frozen=True, slots=True)
class Case:
    """One model with one set of settings; `counts` are layers per simulated device, empty for one device or the CPU."""

    form: Form
    context_length: int
    parallel: int = 1
    kv_type: str = "f16"
    gpu_layers: int = 0
    counts: tuple[int, ...] = ()
    ubatch: int = 512
    kv_cells: int | None = None
    experts: str | int = "device"
    split_mode: str = "layer"
    draft: Form | None = None

    @property
    def name(self) -> str:
        """Short and stable."""
        where = "x".join(map(str, self.counts)) or f"gpu{self.gpu_layers}"
        apart = "" if self.experts == "device" else f"-experts-{self.experts}"
        where += "" if self.split_mode == "layer" else f"-{self.split_mode}"
        return f"{self.form.family}-{self.context_length}x{self.parallel}-{self.kv_type}-{where}{apart}"

    def spec(self) -> ModelSpec:
        """As the configuration has it."""
        entry = ModelEntry(
            path=str(path(self.form)),
            context_length=self.context_length,
            parallel=self.parallel,
            kv_cells=self.kv_cells,
            kv_type=self.kv_type,  # type: ignore[arg-type]
            gpu_layers=self.gpu_layers,
            ubatch=self.ubatch,
            experts=self.experts,  # type: ignore[arg-type]
            split_mode=self.split_mode,  # type: ignore[arg-type]
            draft=None if self.draft is None else str(path(self.draft)),
        )
        return _spec(self.form.family, entry, InferenceSettings())


@dataclass(frozen=True, slots=True)
class Outcome:
    """Bytes per device: estimated, reported by the worker, and counted by the simulated devices (without the host)."""

    predicted: Mapping[str, int]
    allocated: Mapping[str, int]
    counted: Mapping[str, int]
    source: str

    def errors(self) -> Iterator[tuple[str, int, float]]:
        """(device, difference in bytes, difference relative to the allowed one) for both sources."""
        for seen in (self.allocated, self.counted):
            for device, count in seen.items():
                planned = self.predicted.get(device, 0)
                yield device, count - planned, abs(count - planned) / max(SHARE * planned, MIN_BYTES)

    @property
    def worst(self) -> float:
        """The largest relative difference; 1 is the limit."""
        return max(error for _device, _bytes, error in self.errors())


class EstimateRig:
    """A state directory, an estimator and simulated devices of `device_bytes`."""

    def __init__(self, root: Path, device_bytes: Sequence[int]) -> None:
        self._root = root
        self.state = StateDir.from_env({"HEADGATE_STATE_DIR": str(root / "state")})
        self.estimator = Estimator(self.state, seconds=60)
        self.sims = SimProbe(device_bytes) if device_bytes else None

    async def __aenter__(self) -> EstimateRig:
        if self.sims is not None:
            await self.sims.start()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.estimator.close()
        if self.sims is not None:
            await self.sims.close()

    async def estimate(self, case: Case) -> Estimate:
        """The estimate that the service would use."""
        return await self.estimator.get(case.spec(), *self.devices(case), counts=case.counts)

    def devices(self, case: Case) -> tuple[Reading, ...]:
        """The devices of the case."""
        if case.gpu_layers == 0 or self.sims is None:
            return CpuProbe().readings()
        return self.sims.readings()[: max(1, len(case.counts))]

    async def load(self, case: Case) -> Outcome:
        """Estimates, loads in a real worker, measures, ends it, and waits until the devices are empty."""
        estimate = await self.estimate(case)
        allocated, counted = await asyncio.to_thread(self._load, case, asyncio.get_running_loop())
        predicted = {device: parts.total_bytes for device, parts in estimate.parts.items()}
        for device in {CPU, *estimate.draft_bytes}:
            predicted[device] = predicted.get(device, 0) + estimate.draft_bytes.get(device, 0)
        return Outcome(predicted, allocated, counted, estimate.source)

    def _load(self, case: Case, loop: asyncio.AbstractEventLoop) -> tuple[dict[str, int], dict[str, int]]:
        devices, spec = self.devices(case), case.spec()
        grant = worker_link.Grant(
            model_id=spec.id,
            path=str(spec.path),
            devices=grants_of(devices),
            gpu_layers=0 if devices[0].id == CPU else spec.gpu_layers,
            tensor_split=tuple(map(float, case.counts)),
            split_mode=spec.split_mode,
            host_expert_layers=spec.host_expert_layers,
            context_length=spec.context_length,
            parallel=spec.parallel,
            kv_cells=spec.kv_cells,
            kv_type=spec.kv_type,
            batch=spec.batch,
            ubatch=spec.ubatch,
            threads=1,
            draft=spec.draft,
        )
        allocated: dict[str, int] = {}
        with WorkerRig(self._root, grant, dict(environment_of(devices))) as worker:
            for buffer in worker.ready().buffers:
                if buffer.kind != "other":  # outputs on the host are estimated separately
                    allocated[buffer.device] = allocated.get(buffer.device, 0) + buffer.bytes
            counted = {name: item["used_bytes"] for name, item in self._status(loop).items()} if case.gpu_layers else {}
        return allocated, {name: count for name, count in counted.items() if name in {item.id for item in devices}}

    def _status(self, loop: asyncio.AbstractEventLoop) -> dict[str, dict[str, Any]]:
        assert self.sims is not None
        return asyncio.run_coroutine_threadsafe(self.sims.send("status"), loop).result(10)
