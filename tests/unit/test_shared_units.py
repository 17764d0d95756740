"""Durations and sizes: parsing, printing, and errors with an example."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.shared.units import format_bytes, format_duration, parse_bytes, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("300s", 300), ("250ms", 0.25), ("5m", 300), ("1h", 3600), ("2d", 172800), ("1.5s", 1.5), (7, 7), ("7", 7),
        ("never", math.inf),
    ],
)  # fmt: skip
def test_duration_is_parsed_into_seconds(text: object, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("bad", ["", "5 parsecs", "-3s", -1, True, float("nan"), None, [], "1e3s", 10**400, "9" * 400])
def test_error_of_an_invalid_duration_has_an_example(bad: object) -> None:
    with pytest.raises(ValueError, match="30s"):
        parse_duration(bad)


@pytest.mark.parametrize(
    ("text", "count"), [("600MiB", 600 * 2**20), ("1.5GB", 1_500_000_000), ("2gib", 2**31), (512, 512), ("12", 12)]
)
def test_size_is_parsed_into_bytes(text: object, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("bad", ["", "much", "-1MiB", -1, True, float("inf"), None, 10**400, "9" * 400])
def test_error_of_an_invalid_size_has_an_example(bad: object) -> None:
    with pytest.raises(ValueError, match="512MiB"):
        parse_bytes(bad)


@given(st.integers(min_value=0, max_value=2**50))
def test_printed_size_is_close_to_its_value(count: int) -> None:
    printed = format_bytes(count).replace(" ", "")
    assert parse_bytes(printed) == pytest.approx(count, rel=0.06, abs=1)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(math.inf, "never"), (0.25, "250ms"), (0, "0s"), (42, "42s"), (300, "5m"), (121, "2m 1s"), (7380, "2h 3m")],
)
def test_duration_is_printed_with_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
