"""Queries for usage, and sums as comma-separated values."""

from __future__ import annotations

import csv
import io
import math

import pytest

from gateway.usage.usage_query import COLUMNS, UsageQuery, csv_text, usage_query

NOW = 1_800_000_000.0


@pytest.mark.parametrize(
    ("by", "since", "until", "query"),
    [
        ("", "", "", UsageQuery((), 0.0, math.inf)),
        ("key, model", "7d", "", UsageQuery(("key", "model"), NOW - 7 * 86400, math.inf)),
        ("day", "2026-11-01", "2026-11-02", UsageQuery(("day",), 1793491200.0, 1793577600.0)),
        ("tier", "1700000000", "1h", UsageQuery(("tier",), 1.7e9, NOW - 3600)),
    ],
)
def test_groups_and_times_of_a_query_are_parsed(by: str, since: str, until: str, query: UsageQuery) -> None:
    assert usage_query(by, since, until, NOW) == query


@pytest.mark.parametrize(
    ("by", "since", "until", "message"),
    [
        ("models", "", "", "choose from key, model"),
        ("key,key", "", "", "twice"),
        ("", "soon", "", "'soon' is no time"),
        ("", "-5", "", "'-5' is no time"),
        ("", "never", "", "'never' is no time"),
        ("", "nan", "", "'nan' is no time"),
        ("", "2026-11-02", "2026-11-01", "must be before"),
    ],
)
def test_invalid_queries_say_what_is_accepted(by: str, since: str, until: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        usage_query(by, since, until, NOW)


@pytest.mark.parametrize("key", ["=1+1", "+1", "-1", "@a", "\t=1", "\r=1"])
def test_csv_has_the_names_first_and_no_formulas(key: str) -> None:
    row = dict.fromkeys(COLUMNS, 1) | {"key": key, "ttft_seconds": None}
    lines = list(csv.reader(io.StringIO(csv_text(["key"], [row]), newline="")))
    assert lines[0] == ["key", *COLUMNS]
    assert lines[1][:2] == ["'" + key.replace("\r", " "), "1"]
