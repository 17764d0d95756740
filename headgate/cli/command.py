"""What a verb is made of and what it is given to run; knows no verb."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from headgate.cli.terminal import Terminal
from headgate.shared.state import StateDir, config_dir


@dataclass(frozen=True)
class Session:
    """One call of the command line: parsed arguments, environment (with `.env`), and the terminal."""

    args: argparse.Namespace
    environ: Mapping[str, str]
    terminal: Terminal

    @property
    def config_dir(self) -> Path:
        """The configuration directory in force."""
        return config_dir(self.environ, getattr(self.args, "config_dir", None))

    @property
    def state(self) -> StateDir:
        """The state directory, created when absent."""
        return StateDir.from_env(self.environ)

    @property
    def json(self) -> bool:
        """Whether data goes out as JSON."""
        return bool(getattr(self.args, "json", False))


@dataclass(frozen=True)
class Command:
    """One verb: how its arguments are declared, and what runs; `run` returns the exit code."""

    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Session], int]


def no_arguments(parser: argparse.ArgumentParser) -> None:
    """For verbs that take nothing but the common options."""


def one_by_hand(action: str, does: str, metavar: str, names: str) -> Callable[[argparse.ArgumentParser], None]:
    """Arguments of a verb that lists, or does `action` to the one that is named; both may be left out."""

    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "action", metavar=action, nargs="?", choices=[action], help=f"{does}; without it they are listed"
        )
        parser.add_argument("name", metavar=metavar, nargs="?", help=names)

    return arguments


def at_least_one(text: str) -> int:
    """The type of an option that counts something."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is too few; a number from 1 on is needed")
    return number


def zero_or_more(text: str) -> float:
    """The type of an option that is an amount: finite, and not below zero."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise argparse.ArgumentTypeError(f"{text} is no amount; a number from 0 on is needed")
    return number


def is_text(text: str) -> bool:
    """False for what the system passed on as bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
