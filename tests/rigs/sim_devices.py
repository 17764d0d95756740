"""Starts the real simulator of GPUs for tests, without a service around it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from inference.devices.simgpu.control import Control
from inference.worker_link import DeviceGrant


class SimDevices:
    """Devices of the given sizes in bytes, `gpu-0` and so on; a context manager."""

    def __init__(self, *sizes: int) -> None:
        self._sizes = sizes

    def __enter__(self) -> SimDevices:
        self._directory = tempfile.TemporaryDirectory(
            prefix="hg-sim-"
        )  # the path of a Unix socket has at most 108 bytes
        self.socket_path = Path(self._directory.name) / "control"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "inference.devices.simgpu", str(self.socket_path), *map(str, self._sizes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        json.loads(self.process.stdout.readline())  # all devices listen
        self.control = Control(self.socket_path)
        return self

    def __exit__(self, *_error: object) -> None:
        self.control.close()
        self.process.kill()
        self.process.communicate(timeout=10)
        self._directory.cleanup()

    def send(self, do: str, device: str = "gpu-0", **amount: float) -> dict[str, Any]:
        """Sends a command; returns the status of `device` after it."""
        return self.control.send(do, device, **amount)[device]

    def status(self, device: str = "gpu-0") -> dict[str, Any]:
        """Figures, faults and counters."""
        return self.send("status", device)

    def grant(self, device: str = "gpu-0") -> DeviceGrant:
        """The grant of the device for a worker."""
        return DeviceGrant(device, "gpu", rpc_endpoint=self.status(device)["endpoint"])
