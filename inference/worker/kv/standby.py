"""A worker that waits with a model's file in its memory and no device: what a warm model of an accelerator is.

Decides nothing: it copies, seals what it copied, imports what a load needs, and waits for the grant. The memory has no
name in any file system, so it is gone with the last process that holds it, however that one ends.
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
    "api.worker_app", "api.worker_server", "assembly", "constraints", "engine.embedder", "engine.engine",
    "engine.vision_context", "loading", "prompt.prompts", "sampling.constrained_sampler", "worker_model",
)  # fmt: skip
"""Modules of the worker that a load needs. They map llama.cpp's libraries and touch no device."""
_LIBRARIES = ("encodings.idna", "encodings.unicode_escape", "numpy.ctypeslib", "uvloop")
"""What they import when they are first used."""


@dataclass(frozen=True, slots=True)
class HeldFile:
    """A copy of `path` in memory. `stamp` is what its size, time and inode were."""

    path: str
    handle: int
    count_bytes: int
    stamp: tuple[int, int, int]

    @property
    def source(self) -> str:
        """Where llama.cpp finds the copy."""
        return f"/proc/self/fd/{self.handle}"

    def close(self) -> None:
        """Gives the memory back."""
        os.close(self.handle)


def hold(path: str, on_progress: Callable[[float], object]) -> HeldFile:
    """Copies the file into memory that nobody can change afterwards; raises LoadError.

    The kernel copies, from the page cache where the file is in it: the bytes never pass through this process.
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
                raise LoadError(ExitCause.STARTUP, f"{path} became shorter while it was copied")
            done += count
            on_progress(done / status.st_size)
        fcntl.fcntl(
            target, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        )
    except BaseException as error:
        if target >= 0:
            os.close(target)
        if isinstance(error, OSError):
            raise LoadError(ExitCause.STARTUP, f"{path} cannot be held in memory ({error.strerror})") from error
        raise
    finally:
        if source >= 0:
            with contextlib.suppress(OSError):  # nothing was written through it
                os.close(source)
    return HeldFile(path, target, done, (status.st_size, status.st_mtime_ns, status.st_ino))
