"""Learned overhead: the bytes that workers use on a device beyond llama.cpp's buffers.

Learned per (device model, driver, backend) from readings after loads, and stored in the state directory. The largest of
the last observations counts, because too small an overhead causes failed loads.
"""

from __future__ import annotations

import logging
from typing import Any

from headgate.shared.state_directory import StateDir
from headgate.shared.state_files import StateFileWriter, load_state_file
from headgate.shared.units import MIB
from inference.devices.device import Reading

log = logging.getLogger(__name__)

CPU_OVERHEAD_BYTES = 64 * MIB
"""Host memory of a worker process: interpreter, libraries, HTTP app, threads (measured)."""

GPU_OVERHEAD_BYTES = 512 * MIB
"""Initial overhead on an accelerator: device context, pools, graphs (CUDA: 300-500 MiB)."""

FIRST_OVERHEAD_BYTES = {"sim": 0}
"""Initial overhead by kind of device. Simulated devices contain only buffers."""

MOST_BYTES = 2048 * MIB
"""A larger observation is foreign memory and is ignored."""
KEPT = 8
ENOUGH = 3
"""With fewer observations the initial overhead is the minimum: foreign memory that was freed at the same time can make
a single observation too small.
"""
SAFETY_FACTOR = 1.1
"""Factor on the largest observation, because pools grow with the first large batches."""
_MOST_KEYS = 64
_VERSION = 1


class Overheads:
    """The observations, newest last."""

    def __init__(self, state: StateDir) -> None:
        self._path = state.file("overheads.json")
        self._files = StateFileWriter("learned overheads")
        self._seen = load_state_file(self._path, _observations, "memory overheads of devices are learned again") or {}
        self.host = CPU_OVERHEAD_BYTES

    def of(self, device: Reading) -> int:
        """The overhead of a worker on this accelerator, in bytes."""
        first = FIRST_OVERHEAD_BYTES.get(device.kind, GPU_OVERHEAD_BYTES)
        seen = self._seen.get(key_of(device), ())
        least = first if len(seen) < ENOUGH else 0
        return max(least, int(max(seen, default=0) * SAFETY_FACTOR))

    def learn(self, device: Reading, observed_bytes: int) -> None:
        """Adds an observation. Ignores values that cannot be an overhead."""
        if device.kind in FIRST_OVERHEAD_BYTES or observed_bytes > MOST_BYTES:
            return
        key = key_of(device)
        before = self.of(device)
        self._seen[key] = [*self._seen.get(key, ()), max(0, observed_bytes)][-KEPT:]
        while len(self._seen) > _MOST_KEYS:
            self._seen.pop(next(iter(self._seen)))
        if self.of(device) != before:
            log.info("the overhead of a worker on %s is now %d MiB", device.name, self.of(device) // MIB)
        self._files.write(self._path, {"version": _VERSION, "seen": self._seen})


def key_of(device: Reading) -> str:
    """The key of an overhead: device model, driver, backend."""
    return " / ".join((device.name, device.driver, device.kind))


def _observations(data: Any) -> dict[str, list[int]]:
    """The valid observations in the file; empty for a file of another version."""
    if data["version"] != _VERSION:
        return {}
    return {
        str(key): [count for count in seen if type(count) is int and 0 <= count <= MOST_BYTES][-KEPT:]
        for key, seen in list(data["seen"].items())[-_MOST_KEYS:]
    }
