"""One machine told by two rigs: simulated devices compute and count, and the NVML stub says the same of them. Linux."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inference.devices.simgpu.control import Control
from tests.rigs.nvml_stub import NvidiaGpu, NvmlStub

GPU_IS_LOST = 15


class SimMachine:
    """NVML's view of the simulator behind `control`, in a state file below `root`.

    `env` is for processes that shall see it. The figures are those of the last `tell` or `sync`.
    """

    def __init__(self, root: Path, control: Control, *, reserved_bytes: int = 0) -> None:
        self._control = control
        self._reserved_bytes = reserved_bytes
        self.nvml = NvmlStub(root, [])
        self.env = self.nvml.env
        self.sync()

    def tell(self, do: str, device: str | None = None, **amount: float) -> dict[str, dict[str, Any]]:
        """Carries out a command of the simulator, and tells NVML; the status of every device."""
        return self._show(self._control.tell(do, device, **amount))

    def sync(self) -> dict[str, dict[str, Any]]:
        """Tells NVML what the simulator says now; the status of every device."""
        return self.tell("status")

    async def listing(self) -> list[dict[str, Any]]:
        """What llama.cpp would list if these were NVIDIA devices and it was built for them."""
        return [
            {
                "ggml_name": f"CUDA{number}",
                "backend": "CUDA",
                "name": gpu.name,
                "type": "gpu",
                "pci": gpu.pci,
                "total_bytes": gpu.total_bytes,
                "free_bytes": gpu.free_bytes,
            }
            for number, gpu in enumerate(self.nvml.gpus)
        ]

    def _show(self, devices: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        self.nvml.gpus = [
            NvidiaGpu(
                uuid=device["uuid"],
                pci=f"00000000:{number:02X}:00.0",
                name=device["name"],
                total_bytes=device["total_bytes"] + self._reserved_bytes,
                reserved_bytes=self._reserved_bytes,
                used_bytes=min(device["used_bytes"], device["total_bytes"]),
            )
            for number, device in enumerate(devices.values(), 1)
        ]
        self.nvml.errors = [("all", GPU_IS_LOST, device["uuid"]) for device in devices.values() if device["lost"]]
        self.nvml.write()
        return devices
