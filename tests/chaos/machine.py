"""The machine of the suite: simulated GPUs that outlive every service, and an NVIDIA driver that reports about them.

The suite holds `Machine`; the inference service finds the same devices through `Found`, which the launcher puts in the
place of the real probe.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from inference.devices.device import Reading
from inference.devices.ggml_devices import GgmlProbe
from tests.rigs.sim_devices import SimDevices
from tests.rigs.sim_machine import TROUBLES, SimMachine

LISTING_ENV = "CHAOS_MACHINE"
SYNC_SECONDS = 0.1


class Machine:
    """Simulated devices of these sizes in bytes; a context manager. Every method may be called from any thread."""

    def __init__(self, root: Path, sizes: Sequence[int]) -> None:
        self._root = root
        self._devices = SimDevices(*sizes)
        self._turn = threading.Lock()
        self._written = ""
        self._ended = threading.Event()
        self.cut: set[str] = set()
        """Devices that stay cut when other faults end."""

    def __enter__(self) -> Machine:
        self._root.mkdir()
        self._devices.__enter__()
        self._sim = SimMachine(self._root, self._devices.control)
        self.env = {**self._sim.env, LISTING_ENV: str(self._root / "listing.json")}
        self._write()
        self._syncing = threading.Thread(target=self._sync, daemon=True)
        self._syncing.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._ended.set()
        self._syncing.join()
        self._devices.__exit__()

    def send(self, do: str, device: str | None = None, **amount: float) -> Mapping[str, Mapping[str, Any]]:
        """Sends a command to the simulator; returns the status of every device."""
        with self._turn:
            status = self._sim.send(do, device, **amount)
            names = {device} if device else set(status)
            if do == "cut":
                self.cut |= names
            elif do in ("return", "heal"):
                self.cut -= names
            self._write()
            return status

    def strike(self, trouble: str, device: str) -> None:
        """Starts one of TROUBLES."""
        with self._turn:
            self._sim.strike(trouble, device)
            self._write()

    def restore(self) -> None:
        """Ends all troubles; cut devices stay cut."""
        with self._turn:
            self._sim.restore()
            for device in self.cut:
                self._sim.send("cut", device)
            self._write()

    def _sync(self) -> None:
        while not self._ended.wait(SYNC_SECONDS):
            with self._turn:
                self._sim.sync()
                self._write()

    def _write(self) -> None:
        listing = asyncio.run(self._sim.listing())
        places = {gpu.pci: self._sim.endpoint(gpu.uuid) for gpu in self._sim.nvml.gpus}
        text = json.dumps({"listing": listing, "endpoints": places})
        if text != self._written:
            fresh = self._root / "listing.new"
            fresh.write_text(text)
            fresh.replace(self._root / "listing.json")
            self._written = text


class Found(GgmlProbe):
    """The devices listed in `path`: figures and health are those of NVML, and workers compute on them."""

    def __init__(self, path: Path) -> None:
        super().__init__({}, listing=self._listing)
        self._path = path

    def readings(self) -> tuple[Reading, ...]:
        """With the endpoints where they compute."""
        endpoints = self._read()["endpoints"]
        return tuple(
            replace(reading, rpc_endpoint=endpoints.get(self._pci[reading.id], reading.rpc_endpoint))
            for reading in super().readings()
        )

    async def _listing(self) -> list[dict[str, Any]]:
        return list(self._read()["listing"])

    def _read(self) -> dict[str, Any]:
        return dict(json.loads(self._path.read_text()))


__all__ = ["LISTING_ENV", "TROUBLES", "Found", "Machine"]
