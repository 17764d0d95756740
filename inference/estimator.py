"""Gets the estimate of a model from a helper and remembers it; never opens a GGUF itself and never reserves anything.

Remembered per (file fingerprint, parameters, device, library version) in the state directory, shared by all who ask at
once, bounded by a deadline. When the exact way fails the header formula answers; when the file is bad, nobody does.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.metadata
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headgate.shared.state import StateDir, write_atomic
from inference.children import HelperError, run_helper
from inference.core.estimate import Parameters, Parts
from inference.devices.base import HIDDEN, Reading
from inference.devices.cpu import CPU
from inference.errors import ModelFailed
from inference.settings import ModelSpec

log = logging.getLogger(__name__)

CPU_OVERHEAD_BYTES = 64 * 2**20
"""Of a worker process on the CPU beyond llama.cpp's buffers: interpreter, libraries, HTTP app, threads (measured)."""

GPU_OVERHEAD_BYTES = 512 * 2**20
"""First figure for what no buffer shows on an accelerator: device context, pools, graphs (CUDA: 300-500 MiB)."""

FIRST_OVERHEAD_BYTES = {"sim": 0}
"""By kind of device, where it is known to differ: a simulated device holds buffers and nothing else."""

HEADER_SECONDS = 20.0
_VERSION = 6
_KEPT = ("parts", "source", "note", "output_bytes", "projector_bytes", "facts", "capabilities")
"""What is remembered of a helper's answer."""
_MOST_ENTRIES = 2000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A model's bytes per device. `source` is `llama.cpp` or `header`; `overhead_bytes` is what neither sees."""

    parts: Mapping[str, Parts]
    overhead_bytes: Mapping[str, int]
    source: str
    note: str
    context_trained: int
    capabilities: tuple[str, ...] = ()
    """What the file can do; empty when only its header was read."""

    @property
    def need(self) -> dict[str, int]:
        """Bytes to reserve per device."""
        devices = {**dict.fromkeys(self.parts, 0), **dict.fromkeys(self.overhead_bytes, 0)}
        return {
            device: (self.parts[device].total_bytes if device in self.parts else 0) + self.overhead_bytes.get(device, 0)
            for device in devices
        }

    def to_json(self) -> dict[str, Any]:
        """As `/memory/plan` shows it."""
        return {
            "devices": {
                device: {**asdict(parts), "overhead_bytes": self.overhead_bytes.get(device, 0)}
                for device, parts in self.parts.items()
            },
            "total_bytes": sum(self.need.values()),
            "source": self.source,
            "note": self.note,
        }


class Estimator:
    """Estimates for models on devices; the cache survives restarts."""

    def __init__(self, state: StateDir, *, seconds: float) -> None:
        self._path = state.file("estimates.json")
        self._seconds = seconds
        self._cache: dict[str, dict[str, Any]] = _read_cache(self._path)
        self._running: dict[str, asyncio.Task[Estimate]] = {}
        self._library = importlib.metadata.version("llama-cpp-python")

    async def get(self, spec: ModelSpec, device: Reading) -> Estimate:
        """The estimate of `spec` on `device`; raises ModelFailed naming the file and what is wrong with it.

        A cancelled caller leaves the shared work running for the others.
        """
        try:
            key = self._key(spec, device)
        except OSError as error:
            raise ModelFailed(f"the model {spec.id!r} has no file {spec.path} ({error.strerror})") from error
        if (remembered := self._remembered(key, spec, device)) is not None:
            return remembered
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.create_task(self._measure(key, spec, device))
            task.add_done_callback(lambda done: self._forget(key, done))
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Ends what still runs."""
        for task in list(self._running.values()):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, ModelFailed):  # nobody waits for it any more
                await task

    def _forget(self, key: str, done: asyncio.Task[Estimate]) -> None:
        self._running.pop(key, None)
        if not done.cancelled():
            done.exception()  # seen, whoever still waits

    async def _measure(self, key: str, spec: ModelSpec, device: Reading) -> Estimate:
        job = {
            "path": str(spec.path),
            "parameters": asdict(_parameters(spec, device)),
            "capabilities": spec.capabilities,
            "mmproj": spec.mmproj,
            "accelerator": None
            if device.id == CPU
            else {"id": device.id, "ggml_name": device.ggml_name, "rpc_endpoint": device.rpc_endpoint},
        }
        environment = HIDDEN if device.id == CPU else device.environment
        try:
            answer = await run_helper("estimate", job, seconds=self._seconds, environment=environment)
        except HelperError as error:
            log.warning("estimate of %s: %s; its header is used instead", spec.id, error)
            try:
                answer = await run_helper("estimate", {**job, "exact": False}, seconds=HEADER_SECONDS)
            except HelperError as second:
                raise ModelFailed(f"the model {spec.id!r} cannot be measured: {second}") from second
            answer["note"] = str(error)
        if "error" in answer:
            raise ModelFailed(f"the model {spec.id!r} cannot be loaded: {answer['error']}")
        entry = {name: answer[name] for name in _KEPT}
        if not entry["note"]:
            self._remember(key, entry)
        else:
            log.warning("estimate of %s: %s", spec.id, entry["note"])
        found = _estimate(entry, spec, device)
        log.info("estimate of %s on %s: %d bytes (%s)", spec.id, device.id, sum(found.need.values()), found.source)
        return found

    def _remembered(self, key: str, spec: ModelSpec, device: Reading) -> Estimate | None:
        """What the cache says; an entry that does not make sense is dropped, to be measured again."""
        if key not in self._cache:
            return None
        try:
            found = _estimate(self._cache[key], spec, device)
            if any(not isinstance(count, int) or count < 0 for count in found.need.values()):
                raise ValueError("bytes that are no amounts")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            log.warning("a remembered estimate of %s is damaged (%r); it is measured again", spec.id, error)
            del self._cache[key]
            return None
        return found

    def _remember(self, key: str, entry: dict[str, Any]) -> None:
        self._cache[key] = entry
        while len(self._cache) > _MOST_ENTRIES:
            self._cache.pop(next(iter(self._cache)))
        try:
            write_atomic(self._path, json.dumps({"version": _VERSION, "entries": self._cache}).encode())
        except OSError as error:
            log.warning("estimates cannot be kept in %s (%s)", self._path, error.strerror)

    def _key(self, spec: ModelSpec, device: Reading) -> str:
        said = {
            "file": _stamp(spec.path),
            "parameters": asdict(_parameters(spec, device)),
            "capabilities": spec.capabilities,
            "mmproj": None if spec.mmproj is None else _stamp(Path(spec.mmproj)),
            "device": [device.id, device.kind, device.name] if device.id != CPU else [CPU],
            "library": self._library,
        }
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _stamp(path: Path) -> list[str | int]:
    """What changes when a file does."""
    status = path.stat()
    return [str(path), status.st_size, status.st_mtime_ns, status.st_ino]


def _parameters(spec: ModelSpec, device: Reading) -> Parameters:
    return Parameters(
        context_length=spec.context_length,
        parallel=spec.parallel,
        kv_type=spec.kv_type,
        batch=spec.batch,
        ubatch=spec.ubatch,
        gpu_layers=0 if device.id == CPU else spec.gpu_layers,
        flash_attention=spec.flash_attention,
    )


def _estimate(entry: Mapping[str, Any], spec: ModelSpec, device: Reading) -> Estimate:
    parts = {name: Parts(**figures) for name, figures in entry["parts"].items()}
    if spec.memory_overhead is not None:
        overhead = {device.id: spec.memory_overhead}
    else:
        overhead = {CPU: CPU_OVERHEAD_BYTES}
        if device.id != CPU:
            overhead[device.id] = FIRST_OVERHEAD_BYTES.get(device.kind, GPU_OVERHEAD_BYTES)
    overhead[CPU] = overhead.get(CPU, 0) + int(entry["output_bytes"])
    for where, count in entry["projector_bytes"].items():
        overhead[where] = overhead.get(where, 0) + int(count)
    extra = sum(_size(path) for path in spec.lora)
    if extra:
        overhead[device.id] = overhead.get(device.id, 0) + extra
    return Estimate(
        parts,
        overhead,
        entry["source"],
        entry["note"],
        int(entry["facts"]["context_trained"]),
        tuple(entry["capabilities"]),
    )


def _size(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError:
        return 0


def _read_cache(path: Path) -> dict[str, dict[str, Any]]:
    """The remembered estimates; a missing, damaged or outdated file counts as empty."""
    try:
        data = json.loads(path.read_bytes())
        return dict(data["entries"]) if data["version"] == _VERSION else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
