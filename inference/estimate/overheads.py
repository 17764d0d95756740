"""Remembers what workers take of a device beyond llama.cpp's buffers, and says what the next one is planned with.

Learned per (device model, driver, backend) from what a device showed after a load, kept in the state directory. The
largest of the last few observations counts: whoever plans with too little pays with a refused load or a lost device.
Never measures anything itself.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from headgate.shared.state import StateDir
from headgate.shared.state_files import StateFileWriter, load_state_file
from inference.devices.device import Reading

log = logging.getLogger(__name__)

MIB = 2**20
CPU_OVERHEAD_BYTES = 64 * MIB
"""Of a worker process in host memory: interpreter, libraries, HTTP app, threads (measured)."""

GPU_OVERHEAD_BYTES = 512 * MIB
"""First figure for what no buffer shows on an accelerator: device context, pools, graphs (CUDA: 300-500 MiB)."""

FIRST_OVERHEAD_BYTES = {"sim": 0}
"""By kind of device, where it is known to differ: a simulated device holds buffers and nothing else."""

MOST_BYTES = 2048 * MIB
"""An observation above this is no overhead but somebody else's memory."""
KEPT = 8
ENOUGH = 3
"""With fewer observations than these the first figure still counts: one alone may have met somebody else's leaving."""
SPARE = 1.1
"""Planned is a tenth more than was ever seen of late: pools grow with the first large batches."""
_MOST_KEYS = 64
_VERSION = 1


class Overheads:
    """What was observed, the newest last; a damaged or foreign file counts as none."""

    def __init__(self, state: StateDir) -> None:
        self._path = state.file("overheads.json")
        self._files = StateFileWriter("learned overheads")
        self._seen = load_state_file(self._path, _observations, "memory overheads of devices are learned again") or {}
        self.host = CPU_OVERHEAD_BYTES

    def of(self, device: Reading) -> int:
        """Bytes that a worker on this accelerator is planned to take beside its buffers."""
        first = FIRST_OVERHEAD_BYTES.get(device.kind, GPU_OVERHEAD_BYTES)
        seen = self._seen.get(key_of(device), ())
        least = first if len(seen) < ENOUGH else 0
        return max(least, int(max(seen, default=0) * SPARE))

    def learn(self, device: Reading, observed_bytes: int) -> None:
        """Takes what a worker was seen to have beyond its buffers; what cannot be an overhead is passed over."""
        if device.kind in FIRST_OVERHEAD_BYTES or observed_bytes > MOST_BYTES:
            return
        key = key_of(device)
        before = self.of(device)
        self._seen[key] = [*self._seen.get(key, ()), max(0, observed_bytes)][-KEPT:]
        while len(self._seen) > _MOST_KEYS:
            self._seen.pop(next(iter(self._seen)))
        if self.of(device) != before:
            log.info("a worker on %s is planned with %d MiB beside its buffers", device.name, self.of(device) // MIB)
        self._files.write(lambda: self._path, json.dumps({"version": _VERSION, "seen": self._seen}).encode())


def key_of(device: Reading) -> str:
    """What an overhead depends on: device model, driver, backend."""
    return " / ".join((device.name, device.driver, device.kind))


def _observations(data: Any) -> dict[str, list[int]]:
    """The observations in the file's content, without those that are no amounts; none of another version."""
    if data["version"] != _VERSION:
        return {}
    return {
        str(key): [count for count in seen if type(count) is int and 0 <= count <= MOST_BYTES][-KEPT:]
        for key, seen in list(data["seen"].items())[-_MOST_KEYS:]
    }
