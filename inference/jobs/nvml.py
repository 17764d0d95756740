"""Reads NVIDIA devices through NVML; runs in a child because the library cannot be opened again, decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    """One reading: `{"devices": [{"uuid", "name", "pci", "total_bytes", "free_bytes", "used_bytes"}]}`.

    `{"absent": sentence}` where the machine has no NVIDIA driver; `{"error": sentence, "code": N}` where it has one
    that fails.
    """
    del job
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        absent = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        if error.value in absent:
            return {"absent": str(error)}
        return {"error": str(error), "code": error.value}
    return read()


def read() -> dict[str, Any]:
    """A reading once NVML is open; an error of one device is its own."""
    import pynvml

    found = []
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            found.append(_device(pynvml, handle))
    except pynvml.NVMLError as error:
        return {"error": str(error), "code": error.value}
    return {"devices": found}


def _device(pynvml: Any, handle: Any) -> dict[str, Any]:
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        reserved = int(memory.reserved)
    except (pynvml.NVMLError, AttributeError, TypeError):  # older drivers know only the first version
        memory, reserved = pynvml.nvmlDeviceGetMemoryInfo(handle), 0
    return {
        "uuid": _text(pynvml.nvmlDeviceGetUUID(handle)),
        "name": _text(pynvml.nvmlDeviceGetName(handle)),
        "pci": _text(pynvml.nvmlDeviceGetPciInfo(handle).busId),
        "total_bytes": int(memory.total) - reserved,
        "free_bytes": int(memory.free),
        "used_bytes": int(memory.used),
    }


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
