"""The copy of a warm model's weights is locked in RAM, or one log line says why not."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from inference.worker.warm import memory_lock, standby

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="models are held in memory on Linux only")
SIZE = 256 * 1024


@pytest.fixture
def handles() -> Iterator[list[int]]:
    """Two memory files."""
    made = [os.memfd_create("test") for _ in range(2)]
    for handle in made:
        os.write(handle, bytes(SIZE))
    yield made
    for handle in made:
        os.close(handle)


def locked_bytes() -> int:
    found = re.search(r"^VmLck:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] < 4 * SIZE, reason="the limit is too small here")
def test_copy_is_locked_until_it_is_closed(tmp_path: Path) -> None:
    """Sealed memory can be locked too. The bytes appear in the kernel's figure of the process."""
    (tmp_path / "a.gguf").write_bytes(os.urandom(SIZE))
    before = locked_bytes()
    held = standby.hold(str(tmp_path / "a.gguf"), lambda _fraction: None)
    assert (held.locked_bytes, locked_bytes() - before) == (SIZE, SIZE)
    held.close()
    assert locked_bytes() == before


def test_too_small_limit_is_logged_with_its_numbers_and_nothing_stays_locked(
    handles: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """The first part could be locked, the second one could not."""
    before, calls = locked_bytes(), []
    libc = ctypes.CDLL(None)

    def mlock(address: int, count_bytes: int) -> None:
        calls.append(count_bytes)
        if len(calls) == 2:
            raise OSError(12, "Cannot allocate memory")
        libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(count_bytes))

    with caplog.at_level(logging.INFO, "headgate.worker"):
        assert memory_lock.lock(handles, mlock) == ()
    assert calls == [SIZE, SIZE]
    assert locked_bytes() == before
    (line,) = caplog.messages
    assert "not locked in RAM (Cannot allocate memory): 512.0 KiB wanted, " in line
    assert "LimitMEMLOCK=infinity" in line


def test_empty_file_is_not_locked(caplog: pytest.LogCaptureFixture) -> None:
    handle = os.memfd_create("test")
    with caplog.at_level(logging.INFO, "headgate.worker"):
        assert memory_lock.lock([handle]) == ()
    os.close(handle)
    assert len(caplog.messages) == 1
