"""Helper job that reads NVIDIA devices and their Xid events with NVML. After a failure NVML needs a new process."""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml

WAIT_MILLISECONDS = 1000
_ACTION_FIELD = 230
"""NVML_FI_DEV_GET_GPU_RECOVERY_ACTION (driver R570 or newer)."""


class Session:
    """NVML in this process, opened by the first reading. A thread calls `on_event` for each Xid event."""

    def __init__(self, on_event: Callable[[], None]) -> None:
        self._on_event = on_event
        self._listener: Listener | None = None

    def read(self) -> dict[str, Any]:
        """A reading: `{"driver", "devices": [{"index", "uuid", "name", "pci", "total_bytes", ...}], "xids"}`.

        Further fields of a device: `free_bytes`; `used_bytes`; `action` is the recovery action that the driver requests
        (None if unknown); `processes` are pairs of a process id in this namespace and its bytes, if known. A device
        that cannot be read has `error` and `code` instead. `xids` are pairs (UUID, Xid) of the events since the last
        reading. The reading is `{"error", "code"}` when NVML fails, and `{"absent": message}` on a machine without it.
        """
        try:
            if self._listener is None:
                pynvml.nvmlInit()
                self._listener = Listener(self._on_event)
            driver = _text(pynvml.nvmlSystemGetDriverVersion())
            count = pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
                return {"absent": str(error)}
            return {"error": str(error), "code": error.value}
        found: list[dict[str, Any]] = []
        for index in range(count):
            try:
                found.append({"index": index, **_device(pynvml.nvmlDeviceGetHandleByIndex(index))})
            except pynvml.NVMLError as error:
                found.append({"index": index, "error": str(error), "code": error.value})
        return {"driver": driver, "devices": found, "xids": self._listener.take()}


class Listener:
    """Receives the Xid events of all devices in a thread that always waits for the next one.

    Older drivers do not queue events, so periodic polling would get only the newest one, several times.
    """

    def __init__(self, on_event: Callable[[], None]) -> None:
        self._on_event = on_event
        self._received: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._uuids: dict[int | None, str] = {}
        with contextlib.suppress(pynvml.NVMLError):  # NVML without events, as on WSL
            events = pynvml.nvmlEventSetCreate()
            for index in range(pynvml.nvmlDeviceGetCount()):
                self._register(index, events)
            if self._uuids:
                threading.Thread(target=self._listen, args=(events,), name="xids", daemon=True).start()

    def take(self) -> list[tuple[str, int]]:
        """The events since the last call, oldest first."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._received.get_nowait())
        return found

    def _register(self, index: int, events: Any) -> None:
        with contextlib.suppress(pynvml.NVMLError):  # a device without events, or a lost one
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuid = _text(pynvml.nvmlDeviceGetUUID(handle))
            pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
            self._uuids[_address(handle)] = uuid

    def _listen(self, events: Any) -> None:
        while True:
            try:
                event = pynvml.nvmlEventSetWait(events, WAIT_MILLISECONDS)
            except pynvml.NVMLError as error:
                if error.value != pynvml.NVML_ERROR_TIMEOUT:
                    time.sleep(WAIT_MILLISECONDS / 1000)  # the readings report the failure
                continue
            if (uuid := self._uuids.get(_address(event.device))) is not None:
                self._received.put((uuid, int(event.eventData)))
                self._on_event()


def _device(handle: Any) -> dict[str, Any]:
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        reserved = int(memory.reserved)
    except (pynvml.NVMLError, AttributeError, TypeError):  # older drivers have only version 1
        memory, reserved = pynvml.nvmlDeviceGetMemoryInfo(handle), 0
    return {
        "uuid": _text(pynvml.nvmlDeviceGetUUID(handle)),
        "name": _text(pynvml.nvmlDeviceGetName(handle)),
        "pci": _text(pynvml.nvmlDeviceGetPciInfo(handle).busId),
        "total_bytes": int(memory.total) - reserved,
        "free_bytes": int(memory.free),
        "used_bytes": int(memory.used),
        "action": _action(handle),
        "processes": _processes(handle),
    }


def _action(handle: Any) -> int | None:
    try:
        value = pynvml.nvmlDeviceGetFieldValues(handle, [_ACTION_FIELD])[0]
    except pynvml.NVMLError:  # an older driver
        return None
    return int(value.value.uiVal) if value.nvmlReturn == pynvml.NVML_SUCCESS else None


def _processes(handle: Any) -> list[tuple[int, int]]:
    """The processes that compute on a device. WSL reports no bytes, older drivers no processes."""
    try:
        found = pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)
    except pynvml.NVMLError:
        return []
    sizes: dict[int, int] = {}
    for item in found:
        if item.usedGpuMemory is not None and (pid := pid_here(int(item.pid))) is not None:
            sizes[pid] = sizes.get(pid, 0) + int(item.usedGpuMemory)
    return list(sizes.items())


def pid_here(pid: int, root: Path = Path("/proc")) -> int | None:
    """The id that a process of the driver's list has in the namespace of this process; None for another namespace.

    The two ids differ where /proc belongs to an outer namespace, as in a container that mounts the /proc of the host.
    `NSpid` then has one id per namespace, the outermost first. Elsewhere the driver's id is used unchanged.
    """
    own = _namespace_pids(root / "self")
    if own is None or len(own) < 2:
        return pid
    theirs = _namespace_pids(root / str(pid))
    try:
        is_same = (root / str(pid) / "ns/pid").readlink() == (root / "self/ns/pid").readlink()
    except OSError:
        is_same = False
    return theirs[len(own) - 1] if is_same and theirs is not None and len(theirs) == len(own) else None


def _namespace_pids(folder: Path) -> list[int] | None:
    """The ids of a process in its namespaces; None if the kernel does not show them."""
    try:
        for line in (folder / "status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("NSpid:"):
                return [int(text) for text in line.split()[1:]]
    except (OSError, ValueError):
        pass
    return None


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
