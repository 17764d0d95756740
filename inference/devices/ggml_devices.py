"""Finds and measures the accelerators that llama.cpp can use. Drivers are loaded only in helper processes.

A device counts if this build of llama.cpp can compute on it; a CPU build sees no NVIDIA GPU. Identity and figures of
NVIDIA devices come from NVML, those of AMD devices from the kernel, and all others from a helper.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from inference.devices.device import Reading, narrowed
from inference.devices.device_probe import Probe
from inference.devices.nvml_reader import Card, NvmlReader, canonical_pci
from inference.devices.signs import Sign
from inference.workers.helper_client import HelperError, run_helper

log = logging.getLogger(__name__)

PROBE_SECONDS = 60.0
_VARIABLES = {
    "CUDA": "CUDA_VISIBLE_DEVICES",
    "HIP": "HIP_VISIBLE_DEVICES",
    "ROCm": "HIP_VISIBLE_DEVICES",
    "Vulkan": "GGML_VK_VISIBLE_DEVICES",
}
_AMD = ("HIP", "ROCm")
_FIRST_NAME = {"CUDA": "CUDA0", "HIP": "ROCm0", "ROCm": "ROCm0", "Vulkan": "Vulkan0"}
_HOST_TYPES = ("cpu", "accel")
"""ggml's types of devices that compute with the CPU; they are no accelerators."""
_UNIFIED = ("MTL", "Metal")
"""Backends whose devices use host memory, as integrated GPUs (`igpu`) of all backends do."""

Listing = Callable[[], Awaitable[list[dict[str, Any]]]]


class GgmlProbe(Probe):
    """The accelerators of the machine as `gpu-0`, `gpu-1`, ... in llama.cpp's order.

    `listing` lists them (see `list_devices` in `inference.devices.ggml_job`) or raises HelperError.
    """

    def __init__(
        self,
        environ: Mapping[str, str] = os.environ,
        *,
        root: Path = Path("/"),
        nvml: NvmlReader | None = None,
        listing: Listing | None = None,
    ) -> None:
        self._environ = environ
        self._root = root
        self._nvml = nvml or NvmlReader()
        self._list = listing or _listed
        self._pci: dict[str, str] = {}
        self._readings: tuple[Reading, ...] = ()

    def readings(self) -> tuple[Reading, ...]:
        """The newest readings."""
        return self._readings

    async def start(self) -> None:
        """Lists the devices once. After a failure, which is logged, there are none."""
        try:
            found = [item for item in await self._list() if item["type"] not in _HOST_TYPES]
        except HelperError as error:
            log.warning("cannot list accelerators (%s); continuing without them", error)
            return
        self._pci = {f"gpu-{number}": item["pci"] or "" for number, item in enumerate(found)}
        self._readings = tuple(_reading(id, item) for id, item in zip(self._pci, found, strict=True))
        self._readings = tuple(self._identified(await self._cards(), [item["backend"] for item in found]))

    async def refresh(self) -> None:
        """Measures again. A device that cannot be read keeps its figures, with the reason in `note`."""
        if not self._readings:
            return
        fresh = {reading.id: reading for reading in self._readings}
        cards = await self._cards()
        for reading in self._readings:
            if reading.unified:  # uses host memory, which CpuProbe measures
                continue
            card, chip = cards.get(self._address(reading)), self._chip(reading)
            if card is not None:
                fresh[reading.id] = _with_card(reading, card)
            elif chip is not None:
                fresh[reading.id] = _measured(reading, chip.total_bytes, chip.total_bytes - chip.used_bytes)
            elif self._nvml.error is not None and self._nvml.answered and reading.kind == "cuda":
                fresh[reading.id] = _unread(reading, self._nvml.error, self._nvml.sign)
            elif reading.kind == "cuda" and self._nvml.knows(self._address(reading)):
                fresh[reading.id] = _unread(reading, "NVML no longer lists it", Sign.MISSING)
            else:
                del fresh[reading.id]
        if len(fresh) < len(self._readings):
            fresh |= await self._probed([reading for reading in self._readings if reading.id not in fresh])
        self._readings = tuple(fresh[reading.id] for reading in self._readings)

    def listen(self, on_event: Callable[[], None]) -> None:
        """Calls `on_event` at each Xid event."""
        self._nvml.listen(on_event)

    async def renew(self) -> None:
        """The next reading starts a new NVML helper."""
        await self._nvml.renew()

    async def close(self) -> None:
        """Ends the NVML helper."""
        await self._nvml.close()

    # --- identity --------------------------------------------------------------------------------------------------
    def _identified(self, cards: Mapping[str, Card], backends: Sequence[str]) -> Iterator[Reading]:
        """The readings with the environments that pin their devices, by UUID for NVIDIA and AMD."""
        amd_uuids = self._amd_uuids(backends)
        indices: Counter[str] = Counter()
        for reading, backend, amd_uuid in zip(self._readings, backends, amd_uuids, strict=True):
            card = cards.get(self._address(reading))
            environment = self._pin(backend, indices[backend], card.uuid if card else amd_uuid)
            indices[backend] += 1
            pinned = replace(reading, environment=environment)
            yield replace(pinned, uuid=amd_uuid) if card is None else _with_card(pinned, card)

    def _amd_uuids(self, backends: Sequence[str]) -> list[str | None]:
        """The UUID of each device; None for all if one has none, because a list of UUIDs would hide that one."""
        chips = [self._chip(reading) for reading in self._readings]
        uuids = [None if chip is None else chip.uuid for chip in chips]
        has_all = all(uuid is not None for uuid, backend in zip(uuids, backends, strict=True) if backend in _AMD)
        return uuids if has_all else [None] * len(uuids)

    def _pin(self, backend: str, index: int, uuid: str | None) -> dict[str, str]:
        """The environment that makes only the `index`-th device of the backend visible.

        UUIDs of ROCm go into ROCR_VISIBLE_DEVICES, which is applied before HIP_VISIBLE_DEVICES. The latter takes only
        indices of the remaining devices; when it is unset, CUDA_VISIBLE_DEVICES applies.
        """
        variable = _VARIABLES.get(backend)
        if variable is None:
            return {}
        if backend not in _AMD:
            return {variable: narrowed(self._environ.get(variable), index, uuid if backend == "CUDA" else None)}
        if uuid is not None:
            return {"ROCR_VISIBLE_DEVICES": uuid, variable: "0"}
        outer = self._environ.get(variable) or self._environ.get("CUDA_VISIBLE_DEVICES")
        return {variable: narrowed(outer, index, None)}

    # --- memory ----------------------------------------------------------------------------------------------------
    async def _cards(self) -> Mapping[str, Card]:
        if any(reading.kind == "cuda" for reading in self._readings):
            return await self._nvml.read()
        return {}

    def _address(self, reading: Reading) -> str:
        pci = self._pci.get(reading.id)
        return canonical_pci(pci) if pci and reading.kind == "cuda" else ""

    def _chip(self, reading: Reading) -> AmdFigures | None:
        pci = self._pci.get(reading.id)
        return amd_figures(pci, self._root) if pci and reading.kind != "cuda" else None

    async def _probed(self, readings: Sequence[Reading]) -> dict[str, Reading]:
        """The current figures of these devices from the helper."""
        try:
            found = [item for item in await self._list() if item["type"] not in _HOST_TYPES]
        except HelperError as error:
            return {reading.id: _unread(reading, str(error)) for reading in readings}
        if len(found) == len(self._readings):
            now = {reading.id: item for reading, item in zip(self._readings, found, strict=True)}
            return {
                reading.id: _measured(reading, now[reading.id]["total_bytes"], now[reading.id]["free_bytes"])
                for reading in readings
            }
        why = f"llama.cpp lists {len(found)} devices where there were {len(self._readings)}"
        listed = {canonical_pci(item["pci"]): item for item in found if item["pci"]}
        return {reading.id: self._among(reading, listed, why) for reading in readings}

    def _among(self, reading: Reading, listed: Mapping[str, Mapping[str, Any]], why: str) -> Reading:
        """The figures of a device in a changed list. Without a UUID its environment may select another device now."""
        address = self._pci[reading.id]
        item = listed.get(canonical_pci(address)) if address else None
        if item is None:
            return _unread(reading, why, Sign.MISSING if address else Sign.UNCERTAIN)
        if reading.uuid is None:
            return _unread(reading, why)
        return _measured(reading, item["total_bytes"], item["free_bytes"])


async def _listed() -> list[dict[str, Any]]:
    answer = await run_helper("devices", {}, seconds=PROBE_SECONDS)
    return list(answer["devices"])


def _reading(id: str, item: Mapping[str, Any]) -> Reading:
    backend = item["backend"]
    return Reading(
        id=id,
        kind=backend.lower(),
        name=item["name"] or item["ggml_name"],
        total_bytes=item["total_bytes"],
        free_bytes=item["free_bytes"],
        used_bytes=item["total_bytes"] - item["free_bytes"],
        ggml_name=_FIRST_NAME.get(backend, item["ggml_name"]),
        unified=item["type"] == "igpu" or backend in _UNIFIED,
    )


def _measured(reading: Reading, total_bytes: int, free_bytes: int) -> Reading:
    return replace(
        reading,
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        used_bytes=max(0, total_bytes - free_bytes),
        sign=Sign.HEALTHY,
        note="",
    )


def _unread(reading: Reading, why: str, sign: Sign = Sign.UNCERTAIN) -> Reading:
    return replace(reading, sign=sign, note=why)


def _with_card(reading: Reading, card: Card) -> Reading:
    """`reading` with identity, figures and evidence from NVML."""
    return replace(
        reading,
        name=card.name,
        uuid=card.uuid,
        driver=card.driver,
        total_bytes=card.total_bytes,
        free_bytes=card.free_bytes,
        used_bytes=card.used_bytes,
        process_bytes=card.process_bytes,
        sign=card.sign,
        note=card.note,
    )


@dataclass(frozen=True, slots=True)
class AmdFigures:
    """Video memory of an AMD device, and its UUID for ROCR_VISIBLE_DEVICES (None without one)."""

    total_bytes: int
    used_bytes: int
    uuid: str | None


def amd_figures(pci: str, root: Path = Path("/")) -> AmdFigures | None:
    """The AMD device at a PCI address such as `0000:03:00.0`, from the files of the amdgpu driver; None without one."""
    folder = root / "sys/bus/pci/devices" / pci.lower()
    try:
        total = int((folder / "mem_info_vram_total").read_text())
        used = int((folder / "mem_info_vram_used").read_text())
    except (OSError, ValueError):
        return None
    return AmdFigures(total, used, _uuid(folder))


def _uuid(folder: Path) -> str | None:
    try:
        number = (folder / "unique_id").read_text().strip().removeprefix("0x").lower()
    except OSError:
        return None
    return f"GPU-{number.zfill(16)}" if number.strip("0") else None
