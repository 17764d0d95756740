"""Errors of the command line and of the start of both services. Each has the exit code of the process.

HeadgateError
├── ConfigError          a configuration is invalid: lists all problems
├── NotRunningError      the service that a verb needs does not answer
├── PortInUseError       another process listens on the port
└── AlreadyRunningError  a second inference service on a machine, or a second `up` with the same state directory
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path


class Exit(IntEnum):
    """Exit codes of every `headgate` command and of the services. `docs/cli.md` explains them."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    NOT_RUNNING = 3
    DOES_NOT_FIT = 4
    RESTART_OUTSIDE = 70
    TRY_LATER = 75


class HeadgateError(Exception):
    """Base class of the errors that are shown to the user. `exit_code` is the exit code of the process."""

    exit_code: Exit = Exit.FAILURE


def did_you_mean(
    value: object,
    choices: Iterable[str],
    otherwise: str = "",
    *,
    shown: Callable[[str], str] = repr,
    cutoff: float = 0.6,
) -> str:
    """The end of a message about an unknown name: `; did you mean NAME?`, else `; ` and `otherwise` unless it is empty.

    NAME is the most similar one of `choices`, without regard to case, as `shown` formats it.
    """
    names = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(value[:64].lower(), names, n=1, cutoff=cutoff) if isinstance(value, str) else []
    return f"; did you mean {shown(names[near[0]])}?" if near else otherwise and f"; {otherwise}"


@dataclass(frozen=True, slots=True)
class Problem:
    """A mistake in a configuration: file, 1-based line or None, key or empty, and a message that says what to do."""

    message: str
    key: str = ""
    file: Path | None = None
    line: int | None = None

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}: " if self.file and self.line else f"{self.file}: " if self.file else ""
        return f"{where}{self.key + ': ' if self.key else ''}{self.message}"


class ConfigError(HeadgateError):
    """The configuration is invalid. `problems` lists all mistakes."""

    exit_code = Exit.USAGE

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class NotRunningError(HeadgateError):
    """The service that a verb needs does not answer at its address."""

    exit_code = Exit.NOT_RUNNING


class PortInUseError(HeadgateError):
    """Another process listens on the port."""


class AlreadyRunningError(HeadgateError):
    """Another inference service runs on this machine, or another `up` uses the state directory."""
