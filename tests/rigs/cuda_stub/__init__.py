"""A CUDA driver library for tests: the C library that helpers load, and the directory that it reads. Linux."""

from __future__ import annotations

import os
from pathlib import Path

from tests.rigs import compiled

SOURCE = Path(__file__).with_name("cuda_stub.c")
LIBRARY = "libcuda.so.1"


def library_directory() -> Path:
    """The folder that holds the compiled library."""
    return compiled.library_directory(SOURCE, LIBRARY)


class CudaStub:
    """A driver whose state lies below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(exist_ok=True)

    @property
    def env(self) -> dict[str, str]:
        """Variables for processes that use this driver."""
        outer = os.environ.get("LD_LIBRARY_PATH")
        path = os.pathsep.join([str(library_directory()), *([outer] if outer else [])])
        return {"LD_LIBRARY_PATH": path, "CUDA_STUB": str(self.root)}

    def set_faults(self, *lines: str) -> None:
        """Replaces the faults of the driver by these."""
        fresh = self.root / "faults.new"
        fresh.write_text("".join(f"{line}\n" for line in lines))
        fresh.replace(self.root / "faults")

    def state(self, pid: int) -> int:
        """0 running, 1 locked, 2 checkpointed."""
        path = self.root / f"{pid}.state"
        return int(path.read_text()) if path.exists() else 0
