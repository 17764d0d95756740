"""Learned overhead: the bytes that workers use on a device beyond llama.cpp's buffers.

Learned per (device model, driver, backend, shape of the model) from readings after loads and after first full batches,
and stored in the state directory. The largest of the last observations counts, because too small an overhead causes
failed loads. A shape without enough observations has those of all shapes on the device.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from headgate.shared.state_directory import StateDir
from headgate.shared.state_files import StateFileWriter, load_state_file
from headgate.shared.units import MIB
from inference.devices.device import Reading
from inference.estimate.layers import Sizes

log = logging.getLogger(__name__)

CPU_OVERHEAD_BYTES = 64 * MIB
"""Host memory of a worker process: interpreter, libraries, HTTP app, threads (measured)."""

DRIVER_HOST_BYTES = {"cuda": 160 * MIB}
"""Host memory that the driver of accelerators takes in a worker process, by kind of device and for all devices of the
kind together (CUDA 13 with an H200: 150 MiB)."""

GPU_OVERHEAD_BYTES = 512 * MIB
"""Initial overhead on an accelerator: device context, pools, graphs (CUDA: 300-500 MiB, on an H200 590-600 MiB)."""

MAX_BYTES = 2048 * MIB
"""A larger observation is foreign memory and is ignored."""
KEPT = 8
"""Observations of one key that are kept."""
ENOUGH = 3
"""With fewer observations the initial overhead is the minimum: foreign memory that was freed at the same time can make
a single observation too small."""
SAFETY_FACTOR = 1.1
"""Factor on the largest observation, because pools grow with the first large batches."""
_MAX_KEYS = 256
_VERSION = 1


class Overheads:
    """The observations by `key_of`, newest last, in memory and in a file."""

    def __init__(self, state: StateDir) -> None:
        self._path = state.file("overheads.json")
        self._files = StateFileWriter("learned overheads")
        self._seen = load_state_file(self._path, _observations, "memory overheads of devices are learned again") or {}

    def of(self, device: Reading, shape: str = "") -> int:
        """The overhead of a worker with a model of this shape on this accelerator, in bytes."""
        first = context_bytes(device)
        seen = self._seen.get(key_of(device, shape), [])
        if len(seen) < ENOUGH:
            own = key_of(device)
            seen = [count for key, counts in self._seen.items() if _is_of(key, own) for count in counts]
        least = first if len(seen) < ENOUGH else 0
        return max(least, int(max(seen, default=0) * SAFETY_FACTOR))

    def learn(self, device: Reading, observed_bytes: int, shape: str = "") -> None:
        """Adds an observation. Ignores values above MAX_BYTES, and simulated devices, which report their overhead."""
        if device.context_bytes is not None or not is_learnable(observed_bytes):
            return
        key = key_of(device, shape)
        before = self.of(device, shape)
        self._seen[key] = [*self._seen.pop(key, ()), max(0, observed_bytes)][-KEPT:]
        while len(self._seen) > _MAX_KEYS:
            self._seen.pop(next(iter(self._seen)))
        if (now := self.of(device, shape)) != before:
            log.info("the overhead of a worker on %s (%s) is now %d MiB", device.name, shape, now // MIB)
        self._files.write(self._path, {"version": _VERSION, "seen": self._seen})


def is_learnable(observed_bytes: int) -> bool:
    """Whether an observation of this size counts as overhead."""
    return observed_bytes <= MAX_BYTES


def host_bytes(accelerators: Iterable[Reading]) -> int:
    """Host memory of a worker on these accelerators, in bytes, besides buffers of llama.cpp."""
    return CPU_OVERHEAD_BYTES + sum(DRIVER_HOST_BYTES.get(kind, 0) for kind in {item.kind for item in accelerators})


def context_bytes(device: Reading) -> int:
    """The initial overhead of a process on an accelerator: what the device reports, else GPU_OVERHEAD_BYTES."""
    return GPU_OVERHEAD_BYTES if device.context_bytes is None else device.context_bytes


def key_of(device: Reading, shape: str = "") -> str:
    """The key of an overhead: device model, driver, backend, shape of the model if known."""
    return " / ".join((device.name, device.driver, device.kind, *([shape] if shape else [])))


def _is_of(key: str, device: str) -> bool:
    """Whether a key belongs to the device with the key `device`."""
    return key == device or key.startswith(f"{device} / ")


def shape_of(architecture: str, quantization: str, layers: Sequence[Sizes], ubatch: int) -> str:
    """What the pools of a model depend on: its kind, the size of its layers, and the tokens of a batch."""
    largest = max((layer.weights_bytes for layer in layers), default=0)
    return f"{architecture} {quantization}, {len(layers)} layers of {largest // MIB} MiB, {ubatch} tokens"


def _observations(data: Any) -> dict[str, list[int]]:
    """The valid observations in the file; empty for a file of another version."""
    if data["version"] != _VERSION:
        return {}
    return {
        str(key): [count for count in seen if type(count) is int and 0 <= count <= MAX_BYTES][-KEPT:]
        for key, seen in list(data["seen"].items())[-_MAX_KEYS:]
    }
