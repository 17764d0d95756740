"""Keeps the pages of memory files in RAM (mlock), so that the kernel does not write them to swap."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import resource
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from headgate.shared.units import format_bytes

log = logging.getLogger("headgate.worker")


def lock(handles: Sequence[int], mlock: Callable[[int, int], None] | None = None) -> tuple[mmap.mmap, ...]:
    """Locks all pages of these files until the returned mappings are closed.

    If that fails, as when the limit of the process is too small, logs the reason and returns an empty tuple. `mlock`
    gets an address and a number of bytes and raises OSError.
    """
    limit = _raised_limit()
    lock_pages = mlock or _mlock
    maps: list[mmap.mmap] = []
    try:
        for handle in handles:
            # Private, because older kernels refuse shared mappings of sealed files.
            memory = mmap.mmap(handle, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
            maps.append(memory)
            lock_pages(np.frombuffer(memory, np.uint8).ctypes.data, len(memory))
    except (OSError, ValueError) as error:  # ValueError: an empty file
        for memory in maps:
            memory.close()
        wanted = sum(os.fstat(handle).st_size for handle in handles)
        log.log(
            logging.WARNING if _field("/proc/meminfo", "SwapTotal") else logging.INFO,
            "the copy of the weights is not locked in RAM (%s): %s wanted, %s locked, limit %s; the kernel may write "
            "it to swap. Raise the limit: LimitMEMLOCK=infinity in the systemd unit, or ulimits: {memlock: -1} of the "
            "container",
            error.strerror if isinstance(error, OSError) else error,
            format_bytes(wanted), format_bytes(_field("/proc/self/status", "VmLck")), limit,
        )  # fmt: skip
        return ()
    return tuple(maps)


def _mlock(address: int, count_bytes: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(count_bytes)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _raised_limit() -> str:
    """Raises the limit of locked memory as far as this process may; returns it in words."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
            soft = hard
    return "none" if soft == resource.RLIM_INFINITY else format_bytes(soft)


def _field(path: str, name: str) -> int:
    """A field of a file below /proc in bytes; 0 if it is missing."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path(path).read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0
