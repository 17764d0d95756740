"""The results of checks, and their levels."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How serious a finding is. Only `problem` changes the exit status."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check: its subject, what was found, and what to do about it (empty if nothing)."""

    level: Level
    check: str
    message: str
    advice: str = ""


def ok(check: str, message: str) -> Finding:
    """Nothing to do."""
    return Finding(Level.OK, check, message)


def note(check: str, message: str, advice: str = "") -> Finding:
    """Worth knowing; may be intended."""
    return Finding(Level.NOTE, check, message, advice)


def warning(check: str, message: str, advice: str) -> Finding:
    """Works, but with a disadvantage that can be removed."""
    return Finding(Level.WARNING, check, message, advice)


def problem(check: str, message: str, advice: str) -> Finding:
    """Does not work."""
    return Finding(Level.PROBLEM, check, message, advice)
