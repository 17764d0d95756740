"""Keeps a model file in host memory, so that a later load onto an accelerator does not read it from the disk.

The file is copied to anonymous memory and sealed, and the modules for a load are imported. The memory has no name in a
file system, so the kernel frees it when the last process that holds it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass

from inference.protocol import ExitCause
from inference.worker.worker_errors import LoadError

CHUNK_BYTES = 32 * 2**20
_LATER = (
    "api.worker_app", "assembly", "constraints", "engine.embedder", "engine.engine",
    "engine.vision_context", "loading", "prompt.prompts", "sampling", "worker_model",
)  # fmt: skip
"""Modules of the worker that a load needs. They map the libraries of llama.cpp and open no device."""
_LIBRARIES = ("headgate.shared.wire", "encodings.idna", "encodings.unicode_escape", "numpy.ctypeslib", "uvloop")
"""Modules that these import at their first use."""


@dataclass(frozen=True, slots=True)
class HeldFile:
    """A copy of `path` in memory. `stamp` holds the size, modification time in ns and inode of the file."""

    path: str
    handle: int
    count_bytes: int
    stamp: tuple[int, int, int]

    @property
    def source(self) -> str:
        """The path of the copy for llama.cpp."""
        return f"/proc/self/fd/{self.handle}"

    def close(self) -> None:
        """Frees the memory."""
        os.close(self.handle)


def hold(path: str, on_progress: Callable[[float], object]) -> HeldFile:
    """Copies the file into sealed memory; raises LoadError. `on_progress` gets fractions up to 1.0.

    The kernel copies with sendfile(2), from the page cache if possible.
    """
    for name in (*(f"inference.worker.{name}" for name in _LATER), *_LIBRARIES):
        importlib.import_module(name)
    source = target = -1
    try:
        source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        target = os.memfd_create("headgate-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        status = os.fstat(source)
        done = 0
        while done < status.st_size:
            count = os.sendfile(target, source, done, min(CHUNK_BYTES, status.st_size - done))
            if count == 0:
                raise LoadError(
                    ExitCause.STARTUP, f"{path} became shorter while it was copied into memory; load the model again"
                )
            done += count
            on_progress(done / status.st_size)
        fcntl.fcntl(
            target, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        )
    except BaseException as error:
        if target >= 0:
            os.close(target)
        if isinstance(error, OSError):
            raise LoadError(ExitCause.STARTUP, f"cannot copy {path} into memory ({error.strerror})") from error
        raise
    finally:
        if source >= 0:
            with contextlib.suppress(OSError):  # opened for reading only
                os.close(source)
    return HeldFile(path, target, done, (status.st_size, status.st_mtime_ns, status.st_ino))
