"""Finds the accelerators llama.cpp can use, in a probe child, and measures them; never loads a driver in this process.

A device counts only if this build of llama.cpp can compute on it: an NVIDIA card under a CPU build is no device.
NVIDIA devices take identity and figures from NVML where it answers; all others are measured by the probe child.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from inference.children import HelperError, run_helper
from inference.devices.base import Reading, narrowed
from inference.devices.nvml import NvmlReader, canonical_pci
from inference.protocol import DeviceState

log = logging.getLogger(__name__)

PROBE_SECONDS = 60.0
_VARIABLES = {"CUDA": "CUDA_VISIBLE_DEVICES", "HIP": "HIP_VISIBLE_DEVICES", "ROCm": "HIP_VISIBLE_DEVICES",
              "Vulkan": "GGML_VK_VISIBLE_DEVICES"}  # fmt: skip
_FIRST_NAME = {"CUDA": "CUDA0", "HIP": "ROCm0", "ROCm": "ROCm0", "Vulkan": "Vulkan0"}
_NO_HOST_ACCELERATOR = ("cpu", "accel")


class GgmlProbe:
    """The accelerators of the machine as `gpu-0`, `gpu-1`, ... in llama.cpp's own order."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ
        self._nvml = NvmlReader()
        self._pci: dict[str, str] = {}
        self._readings: tuple[Reading, ...] = ()
        self.has_rpc = False

    def readings(self) -> tuple[Reading, ...]:
        """The newest figures."""
        return self._readings

    async def start(self) -> None:
        """Asks llama.cpp once which devices there are; a failing probe is told and counts as none."""
        found = await self._probe()
        indices: dict[str, int] = {}
        readings: list[Reading] = []
        for item in found:
            backend = item["backend"]
            index = indices.get(backend, 0)
            indices[backend] = index + 1
            reading = self._reading(f"gpu-{len(readings)}", item, index)
            if item["pci"]:
                self._pci[reading.id] = canonical_pci(item["pci"])
            readings.append(reading)
        self._readings = tuple(readings)
        if any(item["backend"] == "CUDA" for item in found):
            self._readings = self._merge(await self._nvml.read(), self._readings, pin=True)

    async def refresh(self) -> None:
        """Measures anew; what cannot be read keeps its figures and turns suspect."""
        if not self._readings:
            return
        if any(reading.kind == "cuda" for reading in self._readings):
            figures = await self._nvml.read()
            if figures:
                self._readings = self._merge(figures, self._readings)
                return
            if self._nvml.error is not None:
                self._readings = tuple(
                    replace(reading, state=DeviceState.SUSPECT, note=self._nvml.error) for reading in self._readings
                )
                return
        found = await self._probe()
        if len(found) == len(self._readings):
            self._readings = tuple(
                replace(
                    reading,
                    total_bytes=item["total_bytes"],
                    free_bytes=item["free_bytes"],
                    used_bytes=item["total_bytes"] - item["free_bytes"],
                )
                for reading, item in zip(self._readings, found, strict=True)
            )

    async def close(self) -> None:
        """Ends the NVML child."""
        await self._nvml.close()

    async def _probe(self) -> list[dict[str, Any]]:
        try:
            answer = await run_helper("devices", {}, seconds=PROBE_SECONDS)
        except HelperError as error:
            log.warning("accelerators cannot be listed, only the CPU is used: %s", error)
            return []
        return [item for item in answer["devices"] if item["type"] not in _NO_HOST_ACCELERATOR]

    def _reading(self, id: str, item: Mapping[str, Any], index: int) -> Reading:
        backend = item["backend"]
        variable = _VARIABLES.get(backend)
        environment = {variable: narrowed(self._environ.get(variable), index, None)} if variable else {}
        return Reading(
            id=id,
            kind=backend.lower(),
            name=item["name"] or item["ggml_name"],
            total_bytes=item["total_bytes"],
            free_bytes=item["free_bytes"],
            used_bytes=item["total_bytes"] - item["free_bytes"],
            ggml_name=_FIRST_NAME.get(backend, item["ggml_name"]),
            environment=environment,
        )

    def _merge(
        self, figures: Mapping[str, Mapping[str, Any]], readings: tuple[Reading, ...], *, pin: bool = False
    ) -> tuple[Reading, ...]:
        """`readings` with NVML's figures, and, once at the start, pinned by UUID."""
        merged = []
        for index, reading in enumerate(readings):
            item = figures.get(self._pci.get(reading.id, ""))
            if item is None:
                merged.append(reading)
                continue
            fresh = replace(
                reading,
                name=item["name"],
                uuid=item["uuid"],
                total_bytes=item["total_bytes"],
                free_bytes=item["free_bytes"],
                used_bytes=item["used_bytes"],
                state=DeviceState.HEALTHY,
                note="",
            )
            if pin and reading.kind == "cuda":
                value = narrowed(self._environ.get("CUDA_VISIBLE_DEVICES"), index, item["uuid"])
                fresh = replace(fresh, environment={"CUDA_VISIBLE_DEVICES": value})
            merged.append(fresh)
        return tuple(merged)
