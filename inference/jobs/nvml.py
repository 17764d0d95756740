"""Reads NVIDIA devices through NVML; runs in a child because the library cannot be opened again, decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    """Opens NVML and gives one reading, as `read`; `{"absent": sentence}` where the machine has no NVML at all."""
    del job
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
            return {"absent": str(error)}
        return {"error": str(error), "code": error.value}
    return read()


def read() -> dict[str, Any]:
    """A reading once NVML is open: `{"driver", "devices": [{"index", "uuid", "name", "pci", "total_bytes", ...}]}`.

    Besides `total_bytes` there are `free_bytes` and `used_bytes`. A device that cannot be read has `error` (a sentence)
    and `code` instead, and the others are read all the same; `{"error", "code"}` when NVML itself fails.
    """
    import pynvml

    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        return {"error": str(error), "code": error.value}
    found: list[dict[str, Any]] = []
    for index in range(count):
        try:
            found.append({"index": index, **_device(pynvml, pynvml.nvmlDeviceGetHandleByIndex(index))})
        except pynvml.NVMLError as error:
            found.append({"index": index, "error": str(error), "code": error.value})
    return {"driver": driver, "devices": found}


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
