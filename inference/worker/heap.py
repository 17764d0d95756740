"""Gives freed memory back to the system instead of keeping it for later; decides nothing about who uses memory."""

from __future__ import annotations

import ctypes

_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_LARGE_BYTES = 2**20


def set_up() -> None:
    """For the whole process: few arenas, and large blocks are the system's again when they are freed (glibc only).

    By default glibc keeps up to eight arenas per core and raises the size of what it calls large after every large
    block, so that one huge request would stay resident for as long as the worker lives.
    """
    if (tune := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        tune(_M_ARENA_MAX, 2)
        tune(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def trim() -> None:
    """Returns what is free now (glibc only); may take milliseconds, without the interpreter lock."""
    if (give_back := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        give_back(0)
