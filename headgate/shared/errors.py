"""Errors the command line and both services' start-up share; each carries the exit code the process ends with.

HeadgateError
├── ConfigError        a file or a setting is wrong: every problem with file, line and what to write instead
├── NotRunningError    the service a verb needs does not answer
├── PortInUseError     another process holds the port; names it
└── AlreadyRunningError  a second authority on one machine, or `up` on one state; names the first
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path


class Exit(IntEnum):
    """Exit codes of every `headgate` command."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    NOT_RUNNING = 3
    DOES_NOT_FIT = 4
    RESTART_OUTSIDE = 70
    TRY_LATER = 75


class HeadgateError(Exception):
    """Base of all errors a user may see on the terminal; `exit_code` is what the process ends with."""

    exit_code: Exit = Exit.FAILURE


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong in a configuration: where (file, 1-based line or None), which key, and what to do."""

    message: str
    key: str = ""
    file: Path | None = None
    line: int | None = None

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}: " if self.file and self.line else f"{self.file}: " if self.file else ""
        return f"{where}{self.key + ': ' if self.key else ''}{self.message}"


class ConfigError(HeadgateError):
    """The configuration cannot be used; `problems` lists everything found, not only the first."""

    exit_code = Exit.USAGE

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class NotRunningError(HeadgateError):
    """The service a command needs does not answer at its address."""

    exit_code = Exit.NOT_RUNNING


class PortInUseError(HeadgateError):
    """The port to listen on is held by another process."""


class AlreadyRunningError(HeadgateError):
    """Another inference service already is the GPU authority of this machine, or another `up` keeps this state."""
