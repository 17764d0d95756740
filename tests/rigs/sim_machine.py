"""One machine with two views: simulated devices compute, and the NVML stub reports the same figures. Linux."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from inference.devices.device import Reading
from inference.devices.ggml_devices import GgmlProbe
from inference.devices.nvml_reader import NvmlReader
from inference.devices.simgpu.control import Control
from tests.rigs.nvml_stub import NvidiaGpu, NvmlStub

GPU_IS_LOST = 15


@dataclass(frozen=True, slots=True)
class Trouble:
    """A fault of a device, or with `is_everywhere` of the driver and so of all devices.

    It has Xid events, the error code of NVML from then on (0: none), the recovery action of the driver, whether the
    device stops computing (`is_cut`), whether it is no longer listed (`is_gone`), and whether NVML hangs (`is_hung`).
    """

    xids: tuple[int, ...] = ()
    code: int = 0
    action: int = 0
    is_cut: bool = False
    is_gone: bool = False
    is_hung: bool = False
    is_everywhere: bool = False


TROUBLES: Mapping[str, Trouble] = {
    "application-fault": Trouble((31, 43)),
    "killed-process": Trouble((45,)),
    "double-bit-error": Trouble((48, 63), action=4),
    "uncontained-error": Trouble((95, 45), code=16, action=1, is_cut=True),
    "firmware-timeout": Trouble((119,), action=1, is_cut=True),
    "off-the-bus": Trouble((79,), code=GPU_IS_LOST, is_cut=True),
    "unlisted": Trouble(is_cut=True, is_gone=True),
    "driver-reset": Trouble(code=9, is_cut=True, is_everywhere=True),
    "driver-replaced": Trouble(code=18, is_everywhere=True),
    "out-of-reach": Trouble(code=999, is_everywhere=True),
    "hung-driver": Trouble(is_hung=True, is_everywhere=True),
}


class SimMachine:
    """NVML's view of the simulator behind `control`, in a state file below `root`.

    `env` is for processes that use it. The figures are those of the last `tell`, `sync`, `strike` or `restore`.
    """

    def __init__(self, root: Path, control: Control, *, reserved_bytes: int = 0) -> None:
        self._control = control
        self._reserved_bytes = reserved_bytes
        self._troubles: dict[str | None, Trouble] = {}
        self._endpoints: dict[str, str] = {}
        self._uuids: dict[str, str] = {}
        self.nvml = NvmlStub(root, [])
        self.env = self.nvml.env
        self.sync()

    # --- what happens ----------------------------------------------------------------------------------------------
    def strike(self, name: str, device: str) -> None:
        """Starts one of TROUBLES; for a trouble of the driver `device` does not matter."""
        trouble = TROUBLES[name]
        self._troubles[None if trouble.is_everywhere else device] = trouble
        if trouble.is_cut:
            self._control.send("cut", None if trouble.is_everywhere else device)
        self.nvml.xids += [(self._uuids[device], number) for number in trouble.xids]
        self.sync()

    def restore(self) -> None:
        """Ends all troubles: cut devices return empty, and NVML answers new processes."""
        self._troubles.clear()
        self.send("return")

    def send(self, do: str, device: str | None = None, **amount: float) -> dict[str, dict[str, Any]]:
        """Sends a command to the simulator and updates NVML; returns the status of every device."""
        return self._show(self._control.send(do, device, **amount))

    def sync(self) -> dict[str, dict[str, Any]]:
        """Updates NVML from the simulator; returns the status of every device."""
        return self.send("status")

    # --- probes and processes --------------------------------------------------------------------------------------
    def probe(self, nvml: NvmlReader | None = None) -> GgmlProbe:
        """Finds the devices as if they were NVIDIA's; workers and trials compute on them."""
        return _Probe(self, nvml)

    def endpoint(self, uuid: str | None) -> str | None:
        """The endpoint where the device computes."""
        return self._endpoints.get(uuid or "")

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
        self._uuids = {name: device["uuid"] for name, device in devices.items()}
        self._endpoints = {device["uuid"]: device["endpoint"] for device in devices.values()}
        whole = self._troubles.get(None, Trouble())
        own = {name: self._troubles.get(name, Trouble()) for name in devices}
        self.nvml.gpus = [
            NvidiaGpu(
                uuid=device["uuid"],
                pci=f"00000000:{number:02X}:00.0",
                name=device["name"],
                total_bytes=device["total_bytes"] + self._reserved_bytes,
                reserved_bytes=self._reserved_bytes,
                used_bytes=min(device["used_bytes"], device["total_bytes"]),
            )
            for number, (name, device) in enumerate(devices.items(), 1)
            if not own[name].is_gone
        ]
        codes = {
            device["uuid"]: own[name].code or (GPU_IS_LOST if device["lost"] and name not in self._troubles else 0)
            for name, device in devices.items()
        }
        self.nvml.errors = [("all", whole.code, "")] if whole.code else []
        self.nvml.errors += [("all", code, uuid) for uuid, code in codes.items() if code]
        self.nvml.processes = [
            (device["uuid"], int(pid), count)
            for device in devices.values()
            for pid, count in device["processes"].items()
        ]
        self.nvml.hangs = ["nvmlSystemGetDriverVersion"] if whole.is_hung else []
        self.nvml.actions = {device["uuid"]: own[name].action for name, device in devices.items()}
        self.nvml.write()
        return devices


class _Probe(GgmlProbe):
    """NVML reports the state of the devices, and the simulator computes."""

    def __init__(self, machine: SimMachine, nvml: NvmlReader | None) -> None:
        super().__init__({}, nvml=nvml, listing=machine.listing)
        self._machine = machine

    def readings(self) -> tuple[Reading, ...]:
        return tuple(self._at_endpoint(reading) for reading in super().readings())

    def _at_endpoint(self, reading: Reading) -> Reading:
        return replace(reading, rpc_endpoint=self._machine.endpoint(reading.uuid))
