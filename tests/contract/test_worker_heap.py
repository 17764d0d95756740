"""Freed large blocks of a worker are returned to the system, except while weights are sent to a device."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

SCRIPT = """
import ctypes
from inference.worker import malloc_trim

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
SIZE = 12 * 2**20

def pages_of_its_own():
    before = libc.mallinfo2().hblks
    block = libc.malloc(SIZE)
    try:
        return libc.mallinfo2().hblks > before
    finally:
        libc.free(block)

malloc_trim.set_up()
assert pages_of_its_own()
with malloc_trim.reused():
    assert not pages_of_its_own()
    assert libc.mallinfo2().fordblks >= SIZE, "a freed block is not kept"
assert libc.mallinfo2().fordblks < SIZE, "freed blocks are kept afterwards"
assert pages_of_its_own()
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc from 2.33 on only")
def test_freed_blocks_are_kept_only_while_weights_are_loaded() -> None:
    """In a separate process, because the settings of the allocator apply to the whole process."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
