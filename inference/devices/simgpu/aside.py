"""Moves memory of this process to a copy and back, and frees its pages in between.

The addresses stay valid, like those of a device whose driver suspended a process. Memory is moved piece by piece, so
that only one piece exists twice at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PIECE_BYTES = 4 * 2**20
"""Two huge pages: pieces are aligned to huge pages, so that none is split."""

Span = tuple[int, int]
"""Address and bytes."""


class AsideError(Exception):
    """Nothing was copied."""


@dataclass(frozen=True, slots=True)
class _Copy:
    spans: tuple[Span, ...]
    memory: mmap.mmap


class Aside:
    """The moved memory of one process. It must not be used until it was moved back."""

    def __init__(self) -> None:
        self._copy: _Copy | None = None

    def take(self, spans: Sequence[Span]) -> int:
        """Copies `spans` and frees their pages; returns bytes. After AsideError nothing has changed.

        Pages that are only partly in a span are kept, because they may contain other objects of the heap.
        """
        if sys.platform != "linux":
            raise AsideError("memory can be moved on Linux only")
        if self._copy is not None:
            raise AsideError("the memory was already moved")
        spans = tuple((address, size) for address, size in spans if size)
        total = sum(size for _address, size in spans)
        try:
            memory = mmap.mmap(-1, max(1, total), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise AsideError(f"there is no host memory for {total} bytes ({error})") from None
        with _addressed(memory) as copy:
            for address, offset, size in _pieces(spans):
                ctypes.memmove(copy + offset, address, size)
                _free(address, size)
        self._copy = _Copy(spans, memory)
        return total

    def put_back(self) -> int:
        """Copies everything back and frees the copy; returns bytes. Raises AsideError if nothing was moved."""
        if self._copy is None:
            raise AsideError("no memory was moved")
        spans, memory = self._copy.spans, self._copy.memory
        with _addressed(memory) as copy:
            for address, offset, size in _pieces(spans):
                ctypes.memmove(address, copy + offset, size)
                _free(copy + offset, size)
        memory.close()
        self._copy = None
        return sum(size for _address, size in spans)


@contextlib.contextmanager
def _addressed(memory: mmap.mmap) -> Iterator[int]:
    """The address of a mapping, which cannot be closed within the context."""
    view = ctypes.c_char.from_buffer(memory)
    try:
        yield ctypes.addressof(view)
    finally:
        del view


def _pieces(spans: Sequence[Span]) -> Iterator[tuple[int, int, int]]:
    """(address, offset in the copy, bytes), each within one multiple of PIECE_BYTES."""
    offset = 0
    for address, size in spans:
        end = address + size
        while address < end:
            count = min(end, (address // PIECE_BYTES + 1) * PIECE_BYTES) - address
            yield address, offset, count
            address, offset = address + count, offset + count


def _free(address: int, size: int) -> None:
    """Frees the complete pages of private anonymous memory; they read as zeros afterwards."""
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last and _libc.madvise(first, last - first, mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "madvise")


_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
