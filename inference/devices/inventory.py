"""All devices of the machine with their newest readings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from inference.devices.checkpoint_support import DriverSuspender, SimulatorSuspender, Suspender
from inference.devices.device import CPU, Reading
from inference.devices.device_probe import Probe
from inference.devices.ggml_devices import GgmlProbe
from inference.devices.host import CpuProbe
from inference.devices.simgpu.probe import KIND as SIMULATED
from inference.devices.simgpu.probe import SimProbe
from inference.environment_settings import InferenceSettings

NVIDIA = "cuda"
"""The kind of NVIDIA devices."""


class Inventory:
    """The readings of several probes. The CPU is always present and last."""

    def __init__(self, probes: Sequence[Probe], suspenders: Mapping[str, Suspender] | None = None) -> None:
        self._probes = tuple(probes)
        self.suspenders: Mapping[str, Suspender] = {NVIDIA: DriverSuspender()} if suspenders is None else suspenders
        """Support for suspended processes, by the kind of device."""
        self._turn = asyncio.Lock()

    @classmethod
    def of(cls, settings: InferenceSettings, sockets: Path | None = None) -> Inventory:
        """The probes for INFERENCE_DEVICES and INFERENCE_FORCE_CPU_MODE.

        `sockets` is a private directory with a short path for the control socket of simulated devices.
        """
        if settings.force_cpu_mode or settings.devices == "cpu":
            return cls([CpuProbe()])
        if settings.simulated_bytes:
            simulator = SimProbe(settings.simulated_bytes, sockets)
            return cls([simulator, CpuProbe()], {SIMULATED: SimulatorSuspender(simulator.socket_path)})
        return cls([GgmlProbe(), CpuProbe()])

    async def start(self) -> None:
        """Finds the devices. Each probe has a deadline of its own."""
        await asyncio.gather(*(probe.start() for probe in self._probes))

    async def refresh(self) -> None:
        """Measures again. Concurrent calls run one after the other."""
        async with self._turn:
            await asyncio.gather(*(probe.refresh() for probe in self._probes))

    def listen(self, on_event: Callable[[], None]) -> None:
        """Calls `on_event` on the event loop after a device event, which the next refresh reports."""
        for probe in self._probes:
            probe.listen(on_event)

    async def renew(self) -> None:
        """Restarts the helpers of the probes at the next refresh."""
        await asyncio.gather(*(probe.renew() for probe in self._probes))

    async def trial(self, device: str) -> None:
        """Computes on a device and checks the result, with a deadline. Raises HelperError."""
        for probe in self._probes:
            if any(reading.id == device for reading in probe.readings()):
                await probe.trial(device)

    async def close(self) -> None:
        """Ends the processes of the probes."""
        await asyncio.gather(*(probe.close() for probe in self._probes))

    def measured(self) -> tuple[Reading, ...]:
        """The newest readings, accelerators first."""
        return tuple(reading for probe in self._probes for reading in probe.readings())

    def accelerators(self) -> tuple[Reading, ...]:
        """The readings without the CPU."""
        return tuple(reading for reading in self.measured() if reading.id != CPU)
