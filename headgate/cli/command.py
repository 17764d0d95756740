"""The interface between `headgate` and the module of a verb: Command, Session, UsageError, and argument types."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headgate.cli.terminal import Terminal
from headgate.shared.errors import Exit, HeadgateError
from headgate.shared.state_directory import StateDir, config_dir


class UsageError(HeadgateError):
    """The arguments or the input of a verb are invalid."""

    exit_code = Exit.USAGE


@dataclass(frozen=True)
class Session:
    """One run of the command line: parsed arguments, environment (with `.env`) and terminal."""

    args: argparse.Namespace
    environ: Mapping[str, str]
    terminal: Terminal

    @property
    def config_dir(self) -> Path:
        """The configuration directory."""
        return config_dir(self.environ, getattr(self.args, "config_dir", None))

    @property
    def state(self) -> StateDir:
        """The state directory. Creates it. Raises HeadgateError when that fails."""
        return StateDir.from_env(self.environ)

    @property
    def json(self) -> bool:
        """Whether `--json` is given."""
        return bool(getattr(self.args, "json", False))

    def prints_json(self, answer: Any) -> bool:
        """Prints `answer` if `--json` is given. Returns whether it is."""
        if self.json:
            self.terminal.json(answer)
        return self.json


@dataclass(frozen=True)
class Command:
    """One verb: `arguments` declares its arguments, `run` returns the exit code.

    With `has_nodes` it has the option `--node`, which chooses one of several inference services.
    """

    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Session], int]
    has_nodes: bool = False


def on_nodes(arguments: Callable[[argparse.ArgumentParser], None], run: Callable[[Session], int]) -> Command:
    """A verb for the inference services of all nodes, or of one."""
    return Command(arguments, run, has_nodes=True)


def no_arguments(parser: argparse.ArgumentParser) -> None:
    """For verbs with only the common options."""


def list_or_act(action: str, effect: str, metavar: str, name_help: str) -> Callable[[argparse.ArgumentParser], None]:
    """Declares the arguments of a verb that lists objects, or does `action` to the named one."""

    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "action", metavar=action, nargs="?", choices=[action], help=f"{effect}; without it all are listed"
        )
        parser.add_argument("name", metavar=metavar, nargs="?", help=name_help)

    return arguments


def at_least_one(text: str) -> int:
    """The type of an option with a whole number of 1 or more."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is too small; use 1 or more")
    return number


def zero_or_more(text: str) -> float:
    """The type of an option with a finite number of 0 or more."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise argparse.ArgumentTypeError(f"{text} is not an amount; use a number of 0 or more")
    return number


def is_text(text: str) -> bool:
    """Whether `text`, from the arguments or stdin, was valid UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
