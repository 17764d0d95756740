"""A machine's NVML for tests: the C library that the real pynvml loads, and the state file that it reads. Linux."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from tests.rigs import compiled

SOURCE = Path(__file__).with_name("nvml_stub.c")
LIBRARY = "libnvidia-ml.so.1"
GIB = 2**30
MAX_XIDS = 48
"""Newest events in the file; the library reads no more than 64."""


def library_directory() -> Path:
    """The folder that holds the compiled library."""
    return compiled.library_directory(SOURCE, LIBRARY)


@dataclass
class NvidiaGpu:
    """One card as NVML reports it; amounts are bytes, and total = reserved + free + used."""

    uuid: str = "GPU-00000000-0000-0000-0000-000000000000"
    pci: str = "00000000:01:00.0"
    name: str = "NVIDIA Stub"
    total_bytes: int = 24 * GIB
    reserved_bytes: int = GIB // 2
    used_bytes: int = 0

    @property
    def free_bytes(self) -> int:
        """What is left."""
        return self.total_bytes - self.reserved_bytes - self.used_bytes


@dataclass
class NvmlStub:
    """The state file below `root`; `write` after every change. `errors` are (function or `all`, code, UUID or "").

    `xids` (UUID, number) only grow; `actions` are the recovery actions that the driver requires, by UUID. `processes`
    are (UUID, process id, bytes or -1 for an unknown number).
    """

    root: Path
    gpus: list[NvidiaGpu] = field(default_factory=lambda: [NvidiaGpu()])
    driver: str = "570.86.15"
    errors: list[tuple[str, int, str]] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    xids: list[tuple[str, int]] = field(default_factory=list)
    actions: dict[str, int] = field(default_factory=dict)
    processes: list[tuple[str, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.path = self.root / "nvml.state"
        self.write()

    @property
    def env(self) -> dict[str, str]:
        """For processes that use this machine."""
        outer = os.environ.get("LD_LIBRARY_PATH")
        path = os.pathsep.join([str(library_directory()), *([outer] if outer else [])])
        return {"LD_LIBRARY_PATH": path, "NVML_STUB_STATE": str(self.path)}

    def write(self) -> None:
        """Writes the state of the fields; it applies to the next call."""
        lines = [f"driver {self.driver}"]
        lines += [
            f"device {gpu.uuid} {gpu.pci} {gpu.total_bytes} {gpu.reserved_bytes} {gpu.free_bytes} {gpu.used_bytes} "
            f"{gpu.name}"
            for gpu in self.gpus
        ]
        lines += [f"error {function} {code} {uuid}".rstrip() for function, code, uuid in self.errors]
        lines += [f"hang {function}" for function in self.hangs]
        xids = list(enumerate(self.xids, 1))[-MAX_XIDS:]
        lines += [f"xid {number} {uuid} {xid}" for number, (uuid, xid) in xids]
        lines += [f"action {uuid} {action}" for uuid, action in self.actions.items()]
        lines += [f"process {uuid} {pid} {count}" for uuid, pid, count in self.processes]
        fresh = self.path.with_suffix(".new")
        fresh.write_text("\n".join(lines) + "\n")
        fresh.replace(self.path)
