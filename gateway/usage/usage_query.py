"""Which usage is wanted: by what it is grouped, and from when to when."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from headgate.shared.units import parse_duration

GROUPS = ("key", "model", "day", "route", "tier", "outcome")
"""What sums can be grouped by."""
COLUMNS = (
    "requests", "errors", "prompt_tokens", "cached_tokens", "completion_tokens", "ttft_seconds", "seconds", "dollars",
    "unpriced",
)  # fmt: skip
"""The figures of each group: sums, and means of `ttft_seconds` and `seconds`."""


class UsageQuery(NamedTuple):
    """Groups, and the time from `since` up to `until`, as Unix times."""

    by: tuple[str, ...]
    since: float
    until: float


def usage_query(by: str, since: str, until: str, now: float) -> UsageQuery:
    """A query from text: groups separated by commas, times as `7d` (ago), a date (UTC) or a Unix time; empty: from the
    beginning, until now.

    Raises ValueError with a sentence that says what is accepted.
    """
    groups = tuple(name.strip() for name in by.split(",") if name.strip())
    for name in groups:
        if name not in GROUPS:
            raise ValueError(f"usage cannot be grouped by {name[:40]!r}; choose from {', '.join(GROUPS)}")
    if len(set(groups)) < len(groups):
        raise ValueError(f"{by!r} names a group twice")
    query = UsageQuery(groups, _time(since, now, 0.0), _time(until, now, math.inf))
    if query.since >= query.until:
        raise ValueError("`since` must be before `until`")
    return query


def _time(text: str, now: float, default: float) -> float:
    text = text.strip()
    if not text:
        return default
    try:
        return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC).timestamp()
    except ValueError:
        pass
    try:
        at = float(text)
        if math.isfinite(at) and at >= 0:
            return at
    except ValueError:
        try:
            if math.isfinite(seconds := parse_duration(text)):
                return now - seconds
        except ValueError:
            pass
    raise ValueError(f"{text[:40]!r} is no time; write for example 7d (ago), 2026-11-01, or a Unix time")


def csv_text(by: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Sums as comma-separated values, the names first. Text that a spreadsheet takes for a formula gets a quote."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*by, *COLUMNS])
    for row in rows:
        writer.writerow([_cell(row[name]) for name in (*by, *COLUMNS)])
    return out.getvalue()


def _cell(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = value.replace("\r", " ")  # the csv module does not quote it
    return f"'{text}" if value.startswith(("=", "+", "-", "@", "\t", "\r")) else text
