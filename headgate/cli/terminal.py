"""Output of the command line: data on stdout, progress on stderr, tables, JSON, color.

HeadgateError
└── OutputError       stdout cannot be written
StdoutClosedError       the reader closed stdout (`headgate list | head -1`), which is not an error
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
from headgate.shared.units import format_bytes, format_duration

STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


class OutputError(HeadgateError):
    """The output cannot be written, or stdout cannot encode it."""


class StdoutClosedError(Exception):
    """The reader closed stdout. Not an OSError, so that it is not taken for a broken connection."""


def open_missing_streams() -> None:
    """Opens the null device as stdin, stdout or stderr when the process was started without it (`>&-`).

    Otherwise the next opened file or socket would get that number, and children would write into it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # opens the lowest free number, which is this one
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115  # stays open


def abandon(stream: TextIO) -> None:
    """Redirects `stream` to the null device, so that the flush at the exit succeeds."""
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, stream.fileno())
    finally:
        os.close(null)


@dataclass
class Terminal:
    """The output streams of a command. Colors need a terminal with TERM other than `dumb`, and NO_COLOR not set."""

    out: TextIO
    err: TextIO
    out_color: bool = False
    err_color: bool = False
    err_tty: bool = False
    _status_width: int = 0

    @classmethod
    def of_process(cls, environ: Mapping[str, str]) -> Terminal:
        """The terminal of this process."""
        plain = bool(environ.get("NO_COLOR")) or environ.get("TERM") == "dumb"
        out_tty, err_tty = sys.stdout.isatty(), sys.stderr.isatty()
        return cls(sys.stdout, sys.stderr, out_tty and not plain, err_tty and not plain, err_tty)

    @property
    def out_tty(self) -> bool:
        """Whether stdout is a terminal."""
        return self.out.isatty()

    def data(self, text: str, *, end: str = "\n") -> None:
        """Writes the result of a command to stdout. Raises StdoutClosedError, OutputError."""
        self.clear_status()
        with writing(self.out):
            self.out.write(text + end)
            self.out.flush()

    def json(self, value: Any) -> None:
        """Writes `value` as JSON to stdout."""
        self.data(json.dumps(value, indent=2, ensure_ascii=False))

    def say(self, text: str) -> None:
        """Writes a message to stderr."""
        self.clear_status()
        self._write_err(text + "\n")

    def status(self, text: str) -> None:
        """Shows 100 characters of `text` on a line that the next output replaces. Does nothing without a terminal."""
        if self.err_tty:
            self._write_err("\r" + text[:100].ljust(self._status_width))
            self._status_width = len(text[:100])

    def clear_status(self) -> None:
        """Removes the line of `status`."""
        if self._status_width:
            self._write_err("\r" + " " * self._status_width + "\r")
            self._status_width = 0

    def _write_err(self, text: str) -> None:
        """Writes to stderr. A broken stderr does not change what the command does."""
        try:
            self.err.write(text)
            self.err.flush()
        except OSError:
            with contextlib.suppress(OSError):  # not a file
                abandon(self.err)

    def paint(self, text: str, style: str) -> str:
        """`text` with a style if stdout has color."""
        return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if self.out_color else text

    def paint_err(self, text: str, style: str) -> str:
        """`text` with a style if stderr has color."""
        return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if self.err_color else text

    def table(
        self, headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = (), none: str = ""
    ) -> None:
        """Writes an aligned table to stdout. `right` names the right-aligned columns; `none` replaces an empty table.

        Control characters in cells are escaped: cells contain names of clients and errors of providers.
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
    """Turns write errors of stdout (`stream`) into StdoutClosedError or OutputError.

    After an OSError, `stream` is redirected to the null device.
    """
    try:
        yield
    except UnicodeEncodeError as error:
        raise OutputError(f"stdout accepts only {error.encoding} ({error}); set LC_ALL=C.UTF-8") from error
    except OSError as error:
        with contextlib.suppress(OSError):  # not a file
            abandon(stream)
        if isinstance(error, BrokenPipeError):
            raise StdoutClosedError from error
        raise OutputError(f"cannot write to stdout: {error.strerror or error}") from error


def align(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> list[str]:
    """The lines of a table, with two spaces between columns and no trailing spaces."""
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
    """Lines of `name   value` with aligned values."""
    width = max((len(name) for name, _ in pairs), default=0)
    return [f"{name.ljust(width)}  {value}".rstrip() for name, value in pairs]


def bytes_cell(count: int | None) -> str:
    """A number of bytes for a table; `-` for None."""
    return "-" if count is None else format_bytes(count)


def seconds_cell(seconds: float | None) -> str:
    """A duration for a table; `-` for None."""
    return "-" if seconds is None else format_duration(seconds)
