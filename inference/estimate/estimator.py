"""Estimates the memory of models with helper processes, and caches exact results in the state directory.

The cache key is the file fingerprint, the parameters, the kinds of devices and the library version. Concurrent calls
share one measurement. When the exact measurement fails, the header formula is used; an invalid file is an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.metadata
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headgate.shared.state_directory import StateDir
from headgate.shared.state_files import StateFileWriter, load_state_file
from inference.devices.device import CPU, HIDDEN, Reading, environment_of, grants_of
from inference.errors import ModelFailed
from inference.estimate.header_formula import Parts
from inference.estimate.layers import Sizes
from inference.estimate.model_estimate import Estimate, parameters_of
from inference.estimate.overheads import Overheads, host_bytes, shape_of
from inference.file_stamp import NO_FILE, Fingerprint, changed
from inference.settings import ModelSpec
from inference.workers.helper_client import HelperError, run_helper

log = logging.getLogger(__name__)

HEADER_SECONDS = 20.0
_VERSION = 14
_KEPT = (
    "parts",
    "source",
    "note",
    "output_bytes",
    "checkpoint_bytes",
    "projector_bytes",
    "draft_bytes",
    "layers",
    "facts",
    "capabilities",
    "host_bytes_per_second",
    "split_problem",
)
"""The cached fields of a helper's answer."""
_MAX_ENTRIES = 2000
_MAX_TRIES = 3
"""Attempts to measure a model whose files change during the measurement."""


@dataclass(frozen=True, slots=True)
class _Subject:
    """A model on one device, or on several with `counts` layers each."""

    spec: ModelSpec
    devices: tuple[Reading, ...]
    counts: tuple[int, ...]

    @property
    def accelerators(self) -> list[Reading]:
        """The devices without the CPU."""
        return [device for device in self.devices if device.id != CPU]

    def settings(self) -> dict[str, Any]:
        """What determines the size, besides files and devices."""
        return {
            "parameters": asdict(parameters_of(self.spec, self.devices[0].id)),
            "capabilities": self.spec.capabilities,
            "mmproj": self.spec.mmproj,
            "draft": self.spec.draft,
            "counts": self.counts,
            "split_mode": self.spec.split_mode if self.accelerators else "layer",
        }


class Estimator:
    """Estimates for models on devices. The cache survives restarts."""

    def __init__(self, state: StateDir, *, seconds: float) -> None:
        self._path = state.file("estimates.json")
        self._files = StateFileWriter("estimates")
        self._seconds = seconds
        self._cache: dict[str, dict[str, Any]] = (
            load_state_file(self._path, _entries, "models are measured again") or {}
        )
        self._running: dict[str, asyncio.Task[dict[str, Any]]] = {}
        self._host_bytes_per_second = 0.0
        """measured once, because that takes host memory which is not booked"""
        self._library = importlib.metadata.version("llama-cpp-python")
        self.overheads = Overheads(state)

    async def get(self, spec: ModelSpec, *devices: Reading, counts: Sequence[int] = ()) -> Estimate:
        """The estimate of `spec` on one device, or on several with `counts` layers each, in order.

        Raises ModelFailed with the file and its problem. Cancelling a call does not stop the shared measurement.
        """
        subject = _Subject(spec, devices, tuple(counts))
        for _ in range(_MAX_TRIES):
            files = spec.files
            if missing := next((path for path, seen in files if seen == NO_FILE), None):
                raise ModelFailed(f"the model {spec.id!r} has no file {missing} ({_why_missing(missing)})")
            key = self._key(files, subject)
            if (remembered := self._remembered(key, subject)) is not None:
                return remembered
            entry = await asyncio.shield(self._measuring(key, files, subject))
            if spec.files == files:
                found = self._estimate(entry, subject)
                where = ", ".join(device.id for device in devices)
                log.info("estimate of %s on %s: %d bytes (%s)", spec.id, where, sum(found.need.values()), found.source)
                return found
            log.info("%s changed while %s was measured; measuring again", changed(files, spec.files), spec.id)
        raise ModelFailed(
            f"the model {spec.id!r} cannot be measured: {spec.path} keeps changing; try again when the file is complete"
        )

    def learn(self, device: Reading, observed_bytes: int, shape: str = "") -> None:
        """Learns the bytes that a worker with a model of this shape used on an accelerator beyond its buffers."""
        self.overheads.learn(device, observed_bytes, shape)

    async def close(self) -> None:
        """Cancels running measurements."""
        for task in list(self._running.values()):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, ModelFailed):  # the result is not needed any more
                await task

    def _measuring(self, key: str, files: Fingerprint, subject: _Subject) -> asyncio.Task[dict[str, Any]]:
        """The shared measurement for `key`."""
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.create_task(self._measure(key, files, subject))
            task.add_done_callback(lambda done: self._forget(key, done))
        return task

    def _forget(self, key: str, done: asyncio.Task[dict[str, Any]]) -> None:
        self._running.pop(key, None)
        if not done.cancelled():
            done.exception()  # marks it as retrieved

    async def _measure(self, key: str, files: Fingerprint, subject: _Subject) -> dict[str, Any]:
        spec, grants = subject.spec, grants_of(subject.accelerators)
        accelerators = [asdict(grant) | {"id": str(at)} for at, grant in enumerate(grants)]
        job = {
            "path": str(spec.path),
            "accelerators": accelerators,
            "host_bytes_per_second": self._host_bytes_per_second,
            **subject.settings(),
        }
        environment = environment_of(subject.devices) if accelerators else HIDDEN
        try:
            answer = await run_helper("estimate", job, seconds=self._seconds, environment=environment)
        except HelperError as error:
            log.warning("%s cannot be measured (%s); its estimate is computed from its header", spec.id, error)
            try:
                answer = await run_helper("estimate", {**job, "exact": False}, seconds=HEADER_SECONDS)
            except HelperError as second:
                raise ModelFailed(f"the model {spec.id!r} cannot be measured: {second}") from second
            answer["note"] = str(error)
        else:
            if note := answer.get("note"):
                log.warning("estimate of %s: %s", spec.id, note)
        if "error" in answer:
            raise ModelFailed(f"the model {spec.id!r} cannot be loaded: {answer['error']}")
        entry = {name: answer[name] for name in _KEPT}
        if not entry["note"] and spec.files == files:
            self._remember(key, entry)
        return entry

    def _remembered(self, key: str, subject: _Subject) -> Estimate | None:
        """The cached estimate, or None. A damaged entry is removed."""
        if key not in self._cache:
            return None
        try:
            found = self._estimate(self._cache[key], subject)
            if any(not isinstance(count, int) or count < 0 for count in found.need.values()):
                raise ValueError("invalid number of bytes")
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            log.warning("a cached estimate of %s is damaged (%r); measuring again", subject.spec.id, error)
            del self._cache[key]
            return None
        return found

    def _remember(self, key: str, entry: dict[str, Any]) -> None:
        self._cache[key] = entry
        while len(self._cache) > _MAX_ENTRIES:
            self._cache.pop(next(iter(self._cache)))
        self._files.write(self._path, {"version": _VERSION, "entries": self._cache})

    def _key(self, files: Fingerprint, subject: _Subject) -> str:
        parts = {
            "files": files,
            "devices": [[device.kind, device.name] for device in subject.accelerators],
            "library": self._library,
            **subject.settings(),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def _estimate(self, entry: Mapping[str, Any], subject: _Subject) -> Estimate:
        """A cached entry, which has no device names, applied to these devices."""
        spec, devices, here = subject.spec, subject.devices, subject.accelerators
        names = {str(at): device.id for at, device in enumerate(here)} | {CPU: CPU}
        layers = tuple(
            Sizes(int(weights), int(kv), bool(grows), int(experts)) for weights, kv, grows, experts in entry["layers"]
        )
        architecture = str(entry["facts"].get("architecture", ""))
        quantization = str(entry["facts"].get("quantization", ""))
        shape = shape_of(architecture, quantization, layers, spec.ubatch)
        host_rate = float(entry["host_bytes_per_second"])
        self._host_bytes_per_second = max(self._host_bytes_per_second, host_rate)
        overhead = {device.id: self.overheads.of(device, shape) for device in here} | {CPU: host_bytes(here)}
        if spec.memory_overhead is not None:
            overhead |= {device.id: spec.memory_overhead for device in devices}
        overhead[CPU] = overhead.get(CPU, 0) + int(entry["output_bytes"]) + int(entry["checkpoint_bytes"])
        for where, count in entry["projector_bytes"].items():
            overhead[names[where]] = overhead.get(names[where], 0) + int(count)
        if extra := sum(_size(path) for path in spec.lora):
            for device in devices:  # the devices of its layers are unknown
                overhead[device.id] = overhead.get(device.id, 0) + extra
        return Estimate(
            {names[where]: Parts(**figures) for where, figures in entry["parts"].items()},
            overhead,
            entry["source"],
            entry["note"],
            int(entry["facts"]["context_trained"]),
            tuple(entry["capabilities"]),
            layers,
            {device.id: count for device, count in zip(here, subject.counts, strict=True)} if subject.counts else {},
            draft_bytes={names[where]: int(count) for where, count in entry["draft_bytes"].items()},
            architecture=architecture,
            quantization=quantization,
            expert_share=_share(entry["facts"]),
            host_bytes_per_second=host_rate,
            shape=shape,
            split_problem=entry["split_problem"],
        )


def _share(facts: Mapping[str, Any]) -> float:
    """The share of the experts that compute a token; 1 for a dense model."""
    experts, used = int(facts["experts"]), int(facts["experts_used"])
    return used / experts if 0 < used < experts else 1.0


def _why_missing(path: str) -> str:
    """The system's message for the missing file `path`."""
    try:
        Path(path).stat()
    except OSError as error:
        return error.strerror or str(error)
    return "it has just appeared; try again"


def _size(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError:
        return 0


def _entries(data: Any) -> dict[str, dict[str, Any]]:
    """The estimates in the file; empty for a file of another version."""
    return dict(data["entries"]) if data["version"] == _VERSION else {}
