"""Host memory for stored sequences that outlives the process: entries in an anonymous memory file.

The file is sparse, and new regions begin at its end. A region begins with a header, which is written before the pages
of the region are allocated and completed by the last write, so that after a crash at any point each entry is complete
or recognized as incomplete. Removed regions are kept for new entries while there is room, because new pages cost four
times as much as the copy into them: the kernel has to clear and map them.

Without an inherited file (or on systems without such files) the entries end with the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from inference.worker.kv.entry_format import (
    HEADER_BYTES,
    InvalidEntryError,
    Progress,
    blank_header,
    decode_header,
    set_progress,
    set_times,
)

PAGE = mmap.PAGESIZE
MIN_SPARE_BYTES = 2**20
"""A smaller rest of a region is returned to the system instead of kept."""

_POPULATE_READ, _POPULATE_WRITE = 22, 23  # madvise(2), Linux 5.14
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # fallocate(2)
_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE

_libc = ctypes.CDLL(None, use_errno=True)  # these functions release the GIL, and `mmap.mmap` does not
_mmap, _munmap, _madvise = _libc.mmap, _libc.munmap, _libc.madvise
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
if sys.platform == "linux":
    _libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


@dataclass(slots=True, eq=False)
class Region:
    """A mapped range of the arena. `offset` is its place in the file, `address` its place in memory.

    `is_ready`: its pages are mapped. The memory must not be used after the region was released.
    """

    offset: int
    address: int
    size: int
    is_ready: bool = True

    @property
    def view(self) -> memoryview:
        """Its bytes."""
        return memoryview((ctypes.c_uint8 * self.size).from_address(self.address)).cast("B")

    def array(self, at: int, count: int) -> np.ndarray:
        """`count` of its bytes from `at` on, as uint8."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(self.address + at))


class Arena:
    """Regions of a memory file. All methods may be called from any thread."""

    def __init__(self, handle: int | None = None) -> None:
        """`handle`: an inherited memory file. None: memory of this process."""
        self._inherited = handle
        self._handle = -1
        self._lock = threading.Lock()
        self._end = 0
        self._spare: list[Region] = []
        self._mapped_bytes = 0
        self._spare_bytes = 0

    @property
    def spare_bytes(self) -> int:
        """Memory that is kept for new entries."""
        return self._spare_bytes

    @property
    def used_bytes(self) -> int:
        """Memory of the entries."""
        return self._mapped_bytes - self._spare_bytes

    def open(self) -> bool:
        """Takes the arena for this process; False while another process uses it. Raises OSError."""
        if self._inherited is None:
            if hasattr(os, "memfd_create"):
                with contextlib.suppress(OSError):  # a sandbox that forbids it
                    self._handle = os.memfd_create("headgate-sequences", os.MFD_CLOEXEC)
            return True
        # A new open file, because the lock belongs to the open file and not to the process.
        handle = os.open(f"/proc/self/fd/{self._inherited}", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            raise
        self._handle = handle
        self._end = os.fstat(handle).st_size
        return True

    def scan(self) -> Iterator[Region]:
        """The complete entries in the file. All others are removed. Call it after `open`, before `allocate`."""
        at, alive = 0, 0
        while self._handle >= 0 and (at := self._data_from(at)) < self._end:
            try:
                found = decode_header(os.pread(self._handle, HEADER_BYTES, at))
            except InvalidEntryError:
                self._punch(at, PAGE)
                at += PAGE
                continue
            size = rounded(found.all_bytes)
            if found.progress == Progress.COMPLETE and at + size <= self._end:
                alive = at + size
                yield self._map(at, size, is_ready=False)
            else:
                self._punch(at + PAGE, size - PAGE)
                self._punch(at, PAGE)
            at += size
        if self._handle >= 0:
            self._end = alive
            os.ftruncate(self._handle, alive)

    def allocate(self, count_bytes: int, max_bytes: int, *, maps: bool = True) -> Region:
        """A region of at least `count_bytes`, marked as being written.

        Spare regions are released so that the arena has at most `max_bytes` if possible. Without `maps` the pages of a
        new region are not mapped yet, for `fill`. Raises MemoryError.
        """
        size = rounded(count_bytes)
        with self._lock:
            region = min((item for item in self._spare if item.size >= size), key=_size, default=None)
            if region is not None:
                self._spare.remove(region)
                self._spare_bytes -= region.size
        if region is not None:
            return self._cut(region, size)
        self.trim(max(0, max_bytes - self.used_bytes - size))
        return self._new(size, maps=maps)

    def fill(self, region: Region, at: int, handle: int, count: int) -> None:
        """Copies `count` bytes, or up to the end of the open file `handle`, to the same place `at` in a region.

        If its pages are not mapped yet, the kernel copies from its cache into new pages, which it need not clear. One
        thread at a time. Raises OSError.
        """
        done = 0
        while done < count:
            if region.is_ready:
                copied = os.preadv(handle, [region.view[at + done : at + count]], at + done)
            else:
                os.lseek(self._handle, region.offset + at + done, os.SEEK_SET)
                copied = os.sendfile(self._handle, handle, at + done, count - done)
            if copied == 0:
                return
            done += copied
        if not region.is_ready:
            start = at // PAGE * PAGE
            _madvise(region.address + start, at + count - start, _POPULATE_READ)

    def prepare(self, count_bytes: int, max_spare: int) -> None:
        """Makes a spare region of at least this size, unless there is one or it exceeds `max_spare`, and releases other
        spare regions, so that all together have at most `max_spare` bytes.

        If the system has no memory for the region, none is made.
        """
        size = rounded(count_bytes)
        makes = size <= max_spare and not any(region.size >= size for region in self._spare.copy())
        self.trim(max_spare - size if makes else max_spare)
        if makes:
            with contextlib.suppress(MemoryError):
                self._keep(self._new(size))

    def commit(self, region: Region) -> None:
        """Marks the entry in `region` as complete."""
        set_progress(region.view, Progress.COMPLETE)

    def touch(self, region: Region, used_at: float, pinned_until: float) -> None:
        """Records the times of an entry."""
        set_times(region.view, used_at, pinned_until)

    def prefault(self, region: Region) -> None:
        """Maps the pages of a region that was found by `scan`."""
        if not region.is_ready:
            _madvise(region.address, region.size, _POPULATE_READ)
            region.is_ready = True

    def remove(self, region: Region) -> None:
        """Marks an entry as removed. The caller has to `release` its memory later, which takes as long as a copy."""
        set_progress(region.view, Progress.REMOVED)

    def release(self, region: Region, *, spare: bool = False) -> None:
        """Removes an entry. With `spare` its memory is kept for new ones."""
        self.remove(region)
        if spare and region.size >= MIN_SPARE_BYTES:
            self._keep(region)
        else:
            self._free(region)

    def trim(self, spare_bytes: int) -> None:
        """Returns spare memory to the system until at most `spare_bytes` are left, the smallest regions first."""
        while True:
            with self._lock:
                if self._spare_bytes <= spare_bytes:
                    return
                region = min(self._spare, key=_size)
                self._spare.remove(region)
                self._spare_bytes -= region.size
            self._free(region)

    def unmap(self, region: Region) -> None:
        """Leaves an entry to the next process that uses the arena; without an inherited file it is lost."""
        _munmap(region.address, region.size)
        with self._lock:
            self._mapped_bytes -= region.size

    def close(self) -> None:
        """Returns the spare memory, and lets another process use the arena."""
        self.trim(0)
        if self._handle >= 0:
            if self._inherited is not None:
                fcntl.flock(self._handle, fcntl.LOCK_UN)  # mappings keep the open file, and with it the lock
            os.close(self._handle)
            self._handle = -1

    # --- regions ------------------------------------------------------------------------------------------------------
    def _new(self, size: int, *, maps: bool = True) -> Region:
        with self._lock:
            offset, self._end = self._end, self._end + size
            if self._handle >= 0:
                os.ftruncate(self._handle, self._end)
        try:
            if self._handle >= 0:
                os.pwrite(self._handle, blank_header(size), offset)  # before the pages, so that a scan finds them
                if maps:
                    os.posix_fallocate(self._handle, offset, size)
            region = self._map(offset, size, is_ready=maps or self._handle < 0)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._punch(offset, size)
            raise MemoryError(f"no host memory for {size} bytes ({error.strerror})") from error
        if maps and sys.platform == "linux":
            _madvise(region.address, size, _POPULATE_WRITE)
        region.view[:HEADER_BYTES] = blank_header(size)
        return region

    def _map(self, offset: int, size: int, *, is_ready: bool = True) -> Region:
        if self._handle >= 0:
            flags, handle, at = mmap.MAP_SHARED, self._handle, offset
        else:
            flags, handle, at = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
        address = _mmap(None, size, _PROTECTION, flags, handle, at)
        if address in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        with self._lock:
            self._mapped_bytes += size
        return Region(offset, address, size, is_ready)

    def _cut(self, region: Region, size: int) -> Region:
        """The first `size` bytes of a spare region; the rest stays spare or is returned to the system."""
        rest = Region(region.offset + size, region.address + size, region.size - size)
        if rest.size:
            rest.view[:HEADER_BYTES] = blank_header(rest.size)  # before the header of the whole region changes
        region.view[:HEADER_BYTES] = blank_header(size)
        if rest.size >= MIN_SPARE_BYTES:
            self._keep(rest)
        elif rest.size:
            self._free(rest)
        return Region(region.offset, region.address, size)

    def _keep(self, region: Region) -> None:
        with self._lock:
            self._spare.append(region)
            self._spare_bytes += region.size

    def _free(self, region: Region) -> None:
        """Unmaps a region that is not a complete entry, and frees its pages."""
        with contextlib.suppress(OSError):  # then the next worker frees them
            self._punch(region.offset + PAGE, region.size - PAGE)
            self._punch(region.offset, PAGE)  # last, because its header says how much is to be freed
        self.unmap(region)

    def _punch(self, offset: int, size: int) -> None:
        """Frees pages of the file."""
        if self._handle >= 0 and size > 0 and sys.platform == "linux":
            if _libc.fallocate(self._handle, _PUNCH_HOLE | _KEEP_SIZE, offset, size):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def _data_from(self, offset: int) -> int:
        """The offset of the next page with data, or the end."""
        try:
            return os.lseek(self._handle, offset, os.SEEK_DATA)
        except OSError:
            return self._end


def _size(region: Region) -> int:
    return region.size


def rounded(count_bytes: int) -> int:
    """The bytes that an entry of this size takes: whole pages."""
    return -(-count_bytes // PAGE) * PAGE
