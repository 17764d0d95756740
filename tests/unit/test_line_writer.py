"""LineWriter keeps the order of lines and does not block its callers when the reader is slow."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator

import pytest

from headgate.shared.log import LineWriter, dropped_lines


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """The two ends of a pipe with a buffer of one page."""
    if sys.platform != "linux":
        pytest.skip("needs F_SETPIPE_SZ")
    ends = os.pipe()
    fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, 4096)
    yield ends
    for end in ends:
        os.close(end)


def _read(end: int, last: str) -> list[str]:
    """The lines from `end` up to the line `last`."""
    received = b""
    while not received.endswith(last.encode() + b"\n"):
        received += os.read(end, 65536)
    return received.decode().splitlines()


def test_lines_are_complete_and_in_order(pipe: tuple[int, int]) -> None:
    lines = LineWriter(pipe[1])
    for number in range(2000):
        lines.put(f"line {number}")
    assert _read(pipe[0], "line 1999") == [f"line {number}" for number in range(2000)]
    lines.flush(10)


@pytest.mark.parametrize("blocking", [True, False])
def test_lines_beyond_the_limit_are_dropped_and_counted(pipe: tuple[int, int], blocking: bool) -> None:
    """The line with the count is in the place of the dropped lines."""
    os.set_blocking(pipe[1], blocking)
    lines = LineWriter(pipe[1], lambda count: f"(dropped) {count}", max_bytes=10_000)
    for number in range(10_000):
        lines.put(f"line {number}")
    lines.flush(0.01)
    written, dropped, rest = 0, 0, b""
    while written + dropped < 10_000:
        *complete, rest = (rest + os.read(pipe[0], 65536)).split(b"\n")
        for kind, count in (line.rsplit(maxsplit=1) for line in complete):
            if kind == b"line":
                assert int(count) == written + dropped
                written += 1
            else:
                dropped += int(count)
    assert dropped > 5_000
    lines.put("again")
    assert _read(pipe[0], "again") == ["again"]


def test_line_larger_than_the_limit_is_written_when_the_buffer_is_empty(pipe: tuple[int, int]) -> None:
    lines = LineWriter(pipe[1], max_bytes=100)
    lines.put("x" * 9000)
    lines.put("dropped")
    assert os.read(pipe[0], 1) == b"x"
    assert _read(pipe[0], dropped_lines(1)) == ["x" * 8999, dropped_lines(1)]


def test_writer_continues_after_the_reader_closed() -> None:
    inner, outer = os.pipe()
    os.close(inner)
    lines = LineWriter(outer)
    lines.put("lost")
    lines.flush(10)
    lines.put("lost too")
    lines.flush(10)
    later, end = os.pipe()
    os.dup2(end, outer)
    lines.put("received")
    lines.flush(10)
    os.set_blocking(later, False)
    assert os.read(later, 100) == b"received\n"
    for one in (later, end, outer):
        os.close(one)


def test_invalid_utf8_is_written_with_escapes(pipe: tuple[int, int]) -> None:
    LineWriter(pipe[1]).put("a\udcff")
    assert os.read(pipe[0], 100) == b"a\\udcff\n"
