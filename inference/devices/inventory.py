"""All devices of the machine through one door: which there are, how full they are; decides nothing about models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from inference.devices.checkpoint_support import Carrier, DriversCarrier, SimulatorsCarrier
from inference.devices.device import Probe, Reading
from inference.devices.ggml_devices import GgmlProbe
from inference.devices.host import CPU, CpuProbe
from inference.devices.simgpu.probe import KIND as SIMULATED
from inference.devices.simgpu.probe import SimProbe
from inference.environment_settings import InferenceSettings

NVIDIA = "cuda"
"""The kind of devices that NVIDIA's driver drives."""


class Inventory:
    """The readings of several probes; the CPU is always there and always last."""

    def __init__(self, probes: Sequence[Probe], carriers: Mapping[str, Carrier] | None = None) -> None:
        self._probes = tuple(probes)
        self.carriers: Mapping[str, Carrier] = {NVIDIA: DriversCarrier()} if carriers is None else carriers
        """Who can suspend a process, by the kind of its device."""
        self.overlay: Callable[[Reading], Reading] = lambda reading: reading
        """What everybody sees of a reading: the state that was decided for its device."""
        self.refreshes = 0
        """How often all was measured anew."""
        self.refreshed: Callable[[], None] = lambda: None
        """Called after each time, before the next one begins: some of what is seen, such as an event, is seen once."""
        self._turn = asyncio.Lock()

    @classmethod
    def of(cls, settings: InferenceSettings, sockets: Path | None = None) -> Inventory:
        """The probes that INFERENCE_DEVICES and INFERENCE_FORCE_CPU_MODE ask for.

        `sockets` is a private directory with a short path, for the control socket of simulated devices.
        """
        if settings.force_cpu_mode or settings.devices == "cpu":
            return cls([CpuProbe()])
        if settings.simulated_bytes:
            simulator = SimProbe(settings.simulated_bytes, sockets)
            return cls([simulator, CpuProbe()], {SIMULATED: SimulatorsCarrier(simulator.socket_path)})
        return cls([GgmlProbe(), CpuProbe()])

    async def start(self) -> None:
        """Finds the devices; every probe has a deadline of its own."""
        await asyncio.gather(*(probe.start() for probe in self._probes))

    async def refresh(self) -> None:
        """Measures anew, after whoever asked before."""
        async with self._turn:
            await asyncio.gather(*(probe.refresh() for probe in self._probes))
            self.refreshes += 1
            self.refreshed()

    def listen(self, notice: Callable[[], None]) -> None:
        """Calls `notice`, on the event loop, when something happened to a device: a refresh is worth its while."""
        for probe in self._probes:
            probe.listen(notice)

    async def renew(self) -> None:
        """Starts afresh, at the next refresh, what the probes measure with."""
        await asyncio.gather(*(probe.renew() for probe in self._probes))

    async def trial(self, device: str) -> None:
        """Computes on one device and checks the result; raises HelperError, within a deadline, saying why not."""
        for probe in self._probes:
            if any(reading.id == device for reading in probe.readings()):
                await probe.trial(device)

    async def close(self) -> None:
        """Ends every child of the probes."""
        await asyncio.gather(*(probe.close() for probe in self._probes))

    def readings(self) -> tuple[Reading, ...]:
        """The newest readings, accelerators first; one without memory of its own is as full as the host."""
        found = tuple(map(self.overlay, self.measured()))
        host = next((reading for reading in found if reading.id == CPU), None)
        return tuple(_on_host(reading, host) if reading.unified and host else reading for reading in found)

    def measured(self) -> tuple[Reading, ...]:
        """The newest readings as the probes have them."""
        return tuple(reading for probe in self._probes for reading in probe.readings())

    def accelerators(self) -> tuple[Reading, ...]:
        """Without the CPU."""
        return tuple(reading for reading in self.readings() if reading.id != CPU)

    def get(self, device: str) -> Reading | None:
        """One device's newest reading."""
        return next((reading for reading in self.readings() if reading.id == device), None)


def _on_host(reading: Reading, host: Reading) -> Reading:
    """`reading` with what the host has left of what the accelerator may use of it."""
    total = min(reading.total_bytes or host.total_bytes, host.total_bytes)
    free = min(total, host.free_bytes)
    return replace(reading, total_bytes=total, free_bytes=free, used_bytes=total - free)
