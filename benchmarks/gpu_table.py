"""The table of `gpu-check`: its rows, their file, and Markdown."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of a part. `expected`: a prediction or a target, which `reached` refers to."""

    part: str
    figure: str
    value: str
    expected: str = ""
    reached: bool = True


def markdown(rows: Iterable[Row]) -> str:
    """A table; figures that fall short are bold."""
    lines = ["| part | figure | measured | expected |", "|---|---|---|---|"]
    for row in rows:
        part, figure, value, expected = (
            " ".join(text.split()).replace("|", "/") for text in (row.part, row.figure, row.value, row.expected)
        )
        lines.append(f"| {part} | {figure} | {value if row.reached else f'**{value}**'} | {expected} |")
    return "\n".join(lines)


def selected(known: Collection[str], wanted: str) -> list[str]:
    """The parts that `wanted` names (empty: all), in the order of `known`. Raises ValueError for another name."""
    names = {name.strip() for name in wanted.split(",") if name.strip()}
    if unknown := names - set(known):
        raise ValueError(f"unknown part {sorted(unknown)[0]!r}; parts: {', '.join(known)}")
    return [name for name in known if not names or name in names]


def append(path: Path, row: Row) -> None:
    """Adds a row to a file at once, so that it survives the end of its process."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(row)) + "\n")


def read(path: Path) -> Sequence[Row]:
    """The rows of a file; a line that was not finished is left out."""
    rows = []
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError, TypeError):
                rows.append(Row(**json.loads(line)))
    return rows
