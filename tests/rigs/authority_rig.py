"""An inference service inside the test: the real authority over fake workers, estimates and, if given, accelerators."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from headgate.shared.state_directory import StateDir
from inference import settings
from inference.app import Service
from inference.authority.placement.ledger import Phase
from inference.devices.checkpoint_support import Suspender
from inference.devices.device import Reading
from inference.devices.host import CpuProbe
from inference.devices.inventory import Inventory
from inference.estimate.header_formula import Parts
from inference.estimate.layers import Sizes
from inference.estimate.model_estimate import Estimate
from tests.rigs.fake_clock import FakeClock
from tests.rigs.instant_workers import InstantSupervisor
from tests.rigs.live_authority import LiveAuthority

MIB = 2**20
TOTAL_BYTES = 1000 * MIB
COMMAND = (sys.executable, "-m", "tests.rigs.fake_worker")
Start = Callable[..., Any]


class FakeEstimator:
    """Estimates `sizes` (MiB by model, default 100), of which 64 MiB are the overhead of the worker."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.gate: asyncio.Event | None = None
        self.learned: list[tuple[str, int]] = []

    async def get(self, spec: Any, device: Reading, *_others: Reading, counts: Any = ()) -> Estimate:
        if self.gate is not None:
            await self.gate.wait()
        size = self.sizes.get(spec.id, 100) * MIB
        return Estimate({device.id: Parts(0, size - 64 * MIB, 0)}, {device.id: 64 * MIB}, "llama.cpp", "", 4096)

    def learn(self, device: Reading, observed_bytes: int, shape: str = "") -> None:
        self.learned.append((device.id, observed_bytes))

    async def close(self) -> None:
        return None


class CacheEstimator(FakeEstimator):
    """Its models have one layer with a cache of `mib` MiB per 4,096 tokens, and 64 MiB of overhead."""

    def __init__(self, mib: int) -> None:
        super().__init__()
        self._mib = mib

    async def get(self, spec: Any, device: Reading, *_others: Reading, counts: Any = ()) -> Estimate:
        cache = spec.context_length * self._mib * MIB // 4096
        parts, sizes = {device.id: Parts(0, cache, 0)}, (Sizes(0, cache),)
        return Estimate(parts, {device.id: 64 * MIB}, "llama.cpp", "", 4096, sizes=sizes)


class FakeAccelerator:
    """A probe with GPUs of 1,000 MiB, `gpus` by id; while `failure` is set, `refresh` raises it."""

    def __init__(self, count: int = 1, kind: str = "cuda") -> None:
        names = (f"gpu-{number}" for number in range(count))
        self.gpus = {name: Reading(name, kind, "fake", TOTAL_BYTES, TOTAL_BYTES, 0, context_bytes=0) for name in names}
        self.failure: Exception | None = None

    @property
    def used_bytes(self) -> int:
        """Bytes of the first GPU that are in use."""
        return self.gpus["gpu-0"].used_bytes

    @used_bytes.setter
    def used_bytes(self, count: int) -> None:
        self.change(used_bytes=count, free_bytes=TOTAL_BYTES - count)

    def change(self, device: str = "gpu-0", **fields: Any) -> None:
        """Changes fields of the readings of a GPU."""
        self.gpus[device] = replace(self.gpus[device], **fields)

    async def start(self) -> None:
        return None

    async def refresh(self) -> None:
        if self.failure is not None:
            raise self.failure

    def listen(self, on_event: Callable[[], None]) -> None:
        return None

    async def renew(self) -> None:
        return None

    async def trial(self, device: str) -> None:
        return None

    async def close(self) -> None:
        return None

    def readings(self) -> tuple[Reading, ...]:
        return tuple(self.gpus.values())


class SharedDevice(FakeAccelerator):
    """Devices of 1,000 MiB, by default one GPU. The holdings of `service` and `foreign_mib` of each are in use."""

    def __init__(self, foreign_mib: int = 0, *, count: int = 1, id: str = "gpu-0", kind: str = "cuda") -> None:
        super().__init__(count, kind)
        if id != "gpu-0":
            self.gpus = {id: replace(self.gpus["gpu-0"], id=id)}
        self.foreign_mib = foreign_mib
        self.service: Any = None

    def readings(self) -> tuple[Reading, ...]:
        for name in self.gpus:
            used_bytes = self._ours_bytes(name) + self.foreign_mib * MIB
            self.change(name, used_bytes=used_bytes, free_bytes=TOTAL_BYTES - used_bytes)
        return super().readings()

    def _ours_bytes(self, device: str) -> int:
        holdings = self.service.authority.ledger.holdings.values() if self.service is not None else ()
        return sum(holding.bytes.get(device, 0) for holding in holdings if holding.phase is not Phase.RELEASING)


def rewrite(directory: Path, models: dict[str, dict[str, Any]]) -> None:
    """Writes models.yaml; every model has the same file and may be evicted at once."""
    (directory / "x.gguf").write_bytes(b"GGUF")
    entries = {name: {"path": str(directory / "x.gguf"), "min_residency": 0, **more} for name, more in models.items()}
    (directory / "models.yaml").write_text(json.dumps({"models": entries}))


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    return {f"INFERENCE_{key}": value for key, value in environ.items()}


def reload(service: LiveService, directory: Path, models: dict[str, dict[str, Any]], **environ: str) -> None:
    """Replaces models.yaml and reloads; the model file does not change. `environ`: INFERENCE_* without the prefix."""
    file = directory / "x.gguf"
    before = file.stat()
    rewrite(directory, models)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    service.authority.reload(settings.load(directory, _variables(environ), {}))


@contextlib.asynccontextmanager
async def services(directory: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """A function that starts services with (models, behavior of workers, INFERENCE_*); all are closed at the end."""
    started: list[LiveService] = []

    async def make(
        models: dict[str, dict[str, Any]],
        behavior: dict[str, Any] | None = None,
        *,
        accelerator: FakeAccelerator | None = None,
        estimator: Any = None,
        suspenders: Mapping[str, Suspender] | None = None,
        probes: Sequence[Any] = (),
        parts: Mapping[str, Any] = MappingProxyType({}),
        begins: bool = True,
        **environ: str,
    ) -> LiveService:
        """`parts` are given to Service. Without `begins` the authority is not started and finds no devices."""
        monkeypatch.setenv("FAKE_WORKER", json.dumps(behavior or {}))
        rewrite(directory, models)
        forced = {"INFERENCE_FORCE_CPU_MODE": "true"} if accelerator is None else {}
        config = settings.load(directory, forced | _variables(environ), {})
        state = StateDir.from_env({"HEADGATE_STATE_DIR": str(directory / "state")})
        probes = probes or ([CpuProbe()] if accelerator is None else [accelerator, CpuProbe()])
        service = LiveService(
            config,
            state,
            "token",
            command=COMMAND,
            inventory=Inventory(probes, suspenders),
            estimator=estimator or FakeEstimator(),
            **parts,
        )
        started.append(service)
        if begins:
            await service.authority.start()
        return service

    yield make
    for service in started:
        async with asyncio.timeout(30):
            await service.authority.close()
        assert not list(directory.rglob("*.sock"))


class LiveService:
    """A service whose `authority` shows models and workers as they are now; everything else is the service's."""

    def __init__(self, *args: Any, **parts: Any) -> None:
        self.clock = FakeClock()
        supervisor = parts.get("supervisor")
        if isinstance(supervisor, InstantSupervisor):
            supervisor.clock = self.clock
        self.service = Service(*args, clock=self.clock, **parts)
        self.authority = LiveAuthority(self.service.authority)
        self.estimator = parts["estimator"]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.service, name)

    async def check_pressure(self) -> None:
        """Time passes until a regular check of the pressure is done."""
        before = self.authority.state.pressure.history
        await self.clock.advance(self.authority.state.settings.pressure_check_interval_seconds)
        await self.authority.reached(lambda: self.authority.state.pressure.history != before)


def empty(service: LiveService) -> bool:
    """Whether nothing is booked."""
    return not service.authority.ledger.holdings
