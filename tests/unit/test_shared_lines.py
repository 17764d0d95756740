"""Lines reach their reader in order, and nobody waits for one that does not read."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator

import pytest

from headgate.shared.lines import Lines, left_out


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe that holds no more than a page, by its two ends."""
    if sys.platform != "linux":
        pytest.skip("the size of a pipe is set")
    ends = os.pipe()
    fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, 4096)
    yield ends
    for end in ends:
        os.close(end)


def _read(end: int, last: str) -> list[str]:
    """What comes, up to the line `last`."""
    said = b""
    while not said.endswith(last.encode() + b"\n"):
        said += os.read(end, 65536)
    return said.decode().splitlines()


def test_lines_come_in_order_and_whole(pipe: tuple[int, int]) -> None:
    lines = Lines(pipe[1])
    for number in range(2000):
        lines.put(f"line {number}")
    assert _read(pipe[0], "line 1999") == [f"line {number}" for number in range(2000)]
    lines.flush(10)


@pytest.mark.parametrize("blocking", [True, False])
def test_what_nobody_reads_is_counted_and_waits_for_nobody(pipe: tuple[int, int], blocking: bool) -> None:
    """Beyond the bound lines are left out; the one that stands for them comes where they would have been."""
    os.set_blocking(pipe[1], blocking)
    lines = Lines(pipe[1], lambda count: f"(left out) {count}", most_bytes=10_000)
    for number in range(10_000):
        lines.put(f"line {number}")
    lines.flush(0.01)
    told, left_out, rest = 0, 0, b""
    while told + left_out < 10_000:
        *said, rest = (rest + os.read(pipe[0], 65536)).split(b"\n")
        for what, count in (line.rsplit(maxsplit=1) for line in said):
            if what == b"line":
                assert int(count) == told + left_out
                told += 1
            else:
                left_out += int(count)
    assert left_out > 5_000
    lines.put("again")
    assert _read(pipe[0], "again") == ["again"]


def test_a_line_larger_than_the_bound_is_written_where_nothing_waits(pipe: tuple[int, int]) -> None:
    """It was left out, and the line that stood for it blamed the reader."""
    lines = Lines(pipe[1], most_bytes=100)
    lines.put("x" * 9000)
    lines.put("no room behind it")
    assert os.read(pipe[0], 1) == b"x"
    assert _read(pipe[0], left_out(1)) == ["x" * 8999, left_out(1)]


def test_a_reader_that_left_ends_nothing() -> None:
    """Who comes after it reads on."""
    inner, outer = os.pipe()
    os.close(inner)
    lines = Lines(outer)
    lines.put("to nobody")
    lines.flush(10)
    lines.put("nor this")
    lines.flush(10)
    later, end = os.pipe()
    os.dup2(end, outer)
    lines.put("to you")
    lines.flush(10)
    os.set_blocking(later, False)
    assert os.read(later, 100) == b"to you\n"
    for one in (later, end, outer):
        os.close(one)


def test_text_that_is_no_utf8_is_written_all_the_same(pipe: tuple[int, int]) -> None:
    Lines(pipe[1]).put("a\udcff")
    assert os.read(pipe[0], 100) == b"a\\udcff\n"
