"""How things are shown: data on stdout, progress on stderr, tables, JSON, color; decides nothing about content.

HeadgateError
└── OutputError       stdout cannot be written
ReaderLeftError       whoever read stdout is gone (`headgate list | head -1`): no fault, so no HeadgateError
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from headgate.shared.errors import HeadgateError
from headgate.shared.log import on_one_line

STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


class OutputError(HeadgateError):
    """What was asked for cannot be written to stdout."""


class ReaderLeftError(Exception):
    """The reader of stdout left. Not an OSError, so that nobody takes it for a connection of theirs that broke."""


def open_missing_streams() -> None:
    """Gives a process that was started without stdin, stdout or stderr (`>&-`) the null device in their place.

    Else the first file or socket to be opened would get their number, and children would write into it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number: this one
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115  # for good


def abandon(stream: TextIO) -> None:
    """What `stream` still holds, and all that follows, goes nowhere; so the flush at the end succeeds."""
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, stream.fileno())
    finally:
        os.close(null)


@dataclass
class Terminal:
    """The two streams of a command. `color` is on only for a terminal, without NO_COLOR, and not on a dumb one."""

    out: TextIO
    err: TextIO
    out_color: bool = False
    err_color: bool = False
    err_tty: bool = False
    _status: int = 0

    @classmethod
    def of_process(cls, environ: Mapping[str, str]) -> Terminal:
        """The terminal of this process."""
        plain = bool(environ.get("NO_COLOR")) or environ.get("TERM") == "dumb"
        out_tty, err_tty = sys.stdout.isatty(), sys.stderr.isatty()
        return cls(sys.stdout, sys.stderr, out_tty and not plain, err_tty and not plain, err_tty)

    @property
    def out_tty(self) -> bool:
        """Whether a person reads stdout."""
        return self.out.isatty()

    def data(self, text: str, *, end: str = "\n") -> None:
        """What was asked for, to stdout, at once; raises ReaderLeftError, OutputError."""
        self.clear_status()
        with writing(self.out):
            self.out.write(text + end)
            self.out.flush()

    def json(self, value: Any) -> None:
        """`value` as JSON, to stdout."""
        self.data(json.dumps(value, indent=2, ensure_ascii=False))

    def say(self, text: str) -> None:
        """Progress or a remark, to stderr."""
        self.clear_status()
        self._tell(text + "\n")

    def status(self, text: str) -> None:
        """A line that the next output replaces; nothing at all where stderr is not a terminal."""
        if self.err_tty:
            self._tell("\r" + text[:100].ljust(self._status))
            self._status = len(text[:100])

    def clear_status(self) -> None:
        """Removes the line that `status` left."""
        if self._status:
            self._tell("\r" + " " * self._status + "\r")
            self._status = 0

    def _tell(self, text: str) -> None:
        """To stderr; a stderr that takes nothing changes nothing about what is done, and nobody could be told."""
        try:
            self.err.write(text)
            self.err.flush()
        except OSError:
            with contextlib.suppress(OSError):  # not a file
                abandon(self.err)

    def paint(self, text: str, style: str) -> str:
        """`text` in a style for stdout, or as it is."""
        return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if self.out_color else text

    def paint_err(self, text: str, style: str) -> str:
        """`text` in a style for stderr, or as it is."""
        return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if self.err_color else text

    def table(
        self, headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = (), none: str = ""
    ) -> None:
        """An aligned table to stdout; `right` names the columns of numbers; `none` is said when there are no rows.

        What others chose or said (names, errors of providers) stands in cells: none of it drives the terminal.
        """
        if not rows:
            self.data(none)
            return
        lines = align(headers, [[on_one_line(cell) for cell in row] for row in rows], right)
        self.data(self.paint(lines[0], "bold"))
        for line in lines[1:]:
            self.data(line)


@contextlib.contextmanager
def writing(stream: TextIO) -> Iterator[None]:
    """Turns what can go wrong with stdout into ReaderLeftError or OutputError, and abandons it."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise OutputError(f"stdout takes {error.encoding} only ({error}); set LC_ALL=C.UTF-8") from error
    except OSError as error:
        with contextlib.suppress(OSError):  # not a file
            abandon(stream)
        if isinstance(error, BrokenPipeError):
            raise ReaderLeftError from error
        raise OutputError(f"cannot write to stdout: {error.strerror or error}") from error


def align(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> list[str]:
    """The lines of a table, two spaces between columns, no trailing blanks."""
    widths = [max(len(row[at]) for row in (headers, *rows)) for at in range(len(headers))]
    rights = [header in right for header in headers]

    def line(row: Sequence[str]) -> str:
        cells = (
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, rights, strict=True)
        )
        return "  ".join(cells).rstrip()

    return [line(headers), *map(line, rows)]


def facts(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Lines `name   value` with the values in one column."""
    width = max((len(name) for name, _ in pairs), default=0)
    return [f"{name.ljust(width)}  {value}".rstrip() for name, value in pairs]
