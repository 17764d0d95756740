"""Memory that is copied aside: its pages are gone meanwhile, everything else stays, and every byte is found again."""

from __future__ import annotations

import ctypes
import mmap
import random
import sys
from collections.abc import Iterator

import pytest

from inference.devices.simgpu.aside import PIECE_BYTES, Aside, AsideError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is copied aside on Linux only")
SIZE = 3 * PIECE_BYTES
CONTENT = random.Random(3).randbytes(SIZE)


@pytest.fixture
def memory() -> Iterator[mmap.mmap]:
    made = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    made[:] = CONTENT
    yield made
    made.close()


def address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def pages_of(memory: mmap.mmap) -> int:
    """How many of its pages are in memory (mincore)."""
    said = (ctypes.c_ubyte * (SIZE // mmap.PAGESIZE))()
    at = ctypes.c_void_p(address(memory))
    assert ctypes.CDLL(None).mincore(at, ctypes.c_size_t(SIZE), said) == 0
    return sum(byte & 1 for byte in said)


def test_all_of_it_is_gone_and_comes_back(memory: mmap.mmap) -> None:
    """Whole pages are the system's meanwhile; again and again."""
    aside = Aside()
    for _ in range(2):
        assert aside.take([(address(memory), SIZE)]) == SIZE
        assert pages_of(memory) == 0
        assert aside.put_back() == SIZE
        assert memory[:] == CONTENT


@pytest.mark.parametrize(("first", "size"), [(100, PIECE_BYTES + 5000), (4096, 4096), (5, 4000), (PIECE_BYTES - 1, 2)])
def test_what_is_beside_it_on_its_pages_stays(memory: mmap.mmap, first: int, size: int) -> None:
    aside = Aside()
    aside.take([(address(memory) + first, size)])
    assert memory[:first] == CONTENT[:first]
    assert memory[first + size :] == CONTENT[first + size :]
    whole = max(0, (first + size) // mmap.PAGESIZE - -(-first // mmap.PAGESIZE))
    assert pages_of(memory) <= SIZE // mmap.PAGESIZE  # looking at it brings zeros in
    assert memory[first : first + size].count(0) >= whole * mmap.PAGESIZE
    memory[first : first + size] = bytes(size)
    aside.put_back()
    assert memory[:] == CONTENT


def test_several_spans_and_empty_ones(memory: mmap.mmap) -> None:
    start = address(memory)
    aside = Aside()
    assert aside.take([(start, 0), (start + 8192, 4096), (start, 4096)]) == 8192
    assert memory[:4096] == memory[8192:12288] == bytes(4096)
    assert aside.put_back() == 8192
    assert memory[:] == CONTENT
    assert aside.take([]) == aside.put_back() == 0


def test_what_cannot_be_is_refused(memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice, back before it was taken, more than there is, another system: as before in every case."""
    aside, span = Aside(), (address(memory), SIZE)
    with pytest.raises(AsideError, match="nothing is aside"):
        aside.put_back()
    with pytest.raises(AsideError, match="no host memory for"):
        aside.take([(span[0], 2**62)])
    aside.take([span])
    with pytest.raises(AsideError, match="aside already"):
        aside.take([span])
    aside.put_back()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(AsideError, match="Linux only"):
        aside.take([span])
    assert memory[:] == CONTENT
