"""Gives freed memory back to the system instead of keeping it for later; decides nothing about who uses memory."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_LARGE_BYTES = 2**20
_MOST_LARGE_BYTES = 32 * 2**20
"""What glibc allows at most."""
_TOP_BYTES = 128 * 2**10
"""glibc's own default of what may lie free at the top of the heap."""


def set_up() -> None:
    """For the whole process: few arenas, and large blocks are the system's again when they are freed (glibc only).

    By default glibc keeps up to eight arenas per core and raises the size of what it calls large after every large
    block, so that one huge request would stay resident for as long as the worker lives.
    """
    _tune(_M_ARENA_MAX, 2)
    _tune(_M_MMAP_THRESHOLD, _LARGE_BYTES)


@contextlib.contextmanager
def reused() -> Iterator[None]:
    """Meanwhile freed blocks of up to 32 MiB are kept for the next of their kind, and given back at the end.

    Weights on their way to a device go through a block per tensor; with fresh pages for each the kernel's part of a
    load doubles (1.3 GB: 2.3 s instead of 1.2 s).
    """
    _tune(_M_MMAP_THRESHOLD, _MOST_LARGE_BYTES)
    _tune(_M_TRIM_THRESHOLD, 2**30)
    try:
        yield
    finally:
        _tune(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        _tune(_M_TRIM_THRESHOLD, _TOP_BYTES)
        trim()


def trim() -> None:
    """Returns what is free now (glibc only); may take milliseconds, without the interpreter lock."""
    if (give_back := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        give_back(0)


def _tune(what: int, value: int) -> None:
    if (tune := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        tune(what, value)
