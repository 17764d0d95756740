"""llama.cpp repeats names of a model file in its log; one of half a megabyte kept a helper busy for minutes."""

from __future__ import annotations

from inference.worker.llama.llama_log import MOST_LINE_CHARS, LogTail

WARN, CONT = 3, 5


def test_a_long_line_is_cut_before_it_is_searched() -> None:
    echoed: list[str] = []
    tail = LogTail(echoed.append)
    tail.feed(WARN, "error: unknown model architecture: '" + "llama" * 10**6 + "'\n")
    tail.feed(WARN, "CPU model buffer size = 1.00 MiB\n")
    assert [len(line) for line in tail.lines] == [MOST_LINE_CHARS, 32]
    assert len(tail.complaints()) == len(echoed[0]) == MOST_LINE_CHARS
    assert [buffer.bytes for buffer in tail.buffers({})] == [2**20]


def test_a_line_that_never_ends_is_not_collected() -> None:
    tail = LogTail(lambda line: None)
    for _ in range(1000):
        tail.feed(CONT, "x" * 10_000)
    assert len(tail._partial) == MOST_LINE_CHARS
