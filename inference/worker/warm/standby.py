"""Keeps a model file in host memory, so that a later load onto an accelerator does not read it from the disk.

The file is copied to anonymous memory and sealed, and the modules for a load are imported. The memory has no name in a
file system, so the kernel frees it when the last process that holds it ends. It is locked in RAM if the limit allows.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from inference.file_stamp import Fingerprint, Stamp, fingerprint, parts_of
from inference.protocol import ExitCause
from inference.worker.warm import memory_lock
from inference.worker.worker_errors import LoadError

CHUNK_BYTES = 32 * 2**20
_LATER = (
    "api.worker_app", "assembly", "constraints", "engine.embedder", "engine.engine",
    "engine.vision_context", "loading", "prompt.prompts", "sampling", "worker_model",
)  # fmt: skip
"""Modules of the worker that a load needs. They map the libraries of llama.cpp and open no device."""
_LIBRARIES = ("headgate.shared.wire", "encodings.idna", "encodings.unicode_escape", "numpy.ctypeslib", "uvloop")
"""Modules that the modules of _LATER import at their first use."""


@dataclass(frozen=True, slots=True)
class HeldFile:
    """A copy of a model file in memory, with all its parts: the stamp of each file, and the handle of its copy.

    `locks` are mappings that keep the pages in RAM.
    """

    files: Fingerprint
    handles: tuple[int, ...]
    locks: tuple[mmap.mmap, ...] = ()

    @property
    def sources(self) -> tuple[str, ...]:
        """The paths of the copies for llama.cpp."""
        return tuple(f"/proc/self/fd/{handle}" for handle in self.handles)

    @property
    def count_bytes(self) -> int:
        """The size of all copies."""
        return sum(size for _path, (size, *_rest) in self.files)

    @property
    def locked_bytes(self) -> int:
        """The bytes that are locked in RAM: all or none."""
        return sum(map(len, self.locks))

    def close(self) -> None:
        """Frees the memory."""
        for memory in self.locks:
            memory.close()
        for handle in self.handles:
            os.close(handle)


def hold(path: str, on_progress: Callable[[float], object]) -> HeldFile:
    """Copies the file with all its parts into sealed memory; raises LoadError. `on_progress` gets 0.0 to 1.0."""
    for name in (*(f"inference.worker.{name}" for name in _LATER), *_LIBRARIES):
        importlib.import_module(name)
    parts = parts_of(Path(path))
    total = sum(size for _path, (size, *_rest) in fingerprint(Path(path))) or 1
    files: list[tuple[str, Stamp]] = []
    handles: list[int] = []
    done = 0

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        on_progress(min(1.0, done / total))

    try:
        for part in parts:
            handle, stamp = _copy(str(part), on_bytes)
            handles.append(handle)
            files.append((str(part), stamp))
    except BaseException:
        for handle in handles:
            os.close(handle)
        raise
    return HeldFile(tuple(files), tuple(handles), memory_lock.lock(handles))


def _copy(path: str, on_bytes: Callable[[int], object]) -> tuple[int, Stamp]:
    """A sealed copy of one file in memory, and the stamp of the file; raises LoadError.

    The kernel copies with sendfile(2), from the page cache if possible.
    """
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
            on_bytes(count)
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
    return target, (status.st_size, status.st_mtime_ns, status.st_ino)
