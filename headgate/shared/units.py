"""Parses and formats durations (`30s`, `never`) and byte sizes (`512MiB`)."""

from __future__ import annotations

import math
import re
from typing import Any

_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?\s*")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, None: 1.0}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(B|KB|MB|GB|TB|KiB|MiB|GiB|TiB)?\s*", re.IGNORECASE)
_BYTES = {
    "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip

_TOO_LARGE = 2**63
"""Numbers from here on are refused: they do not fit into 64 bits, and an integer beyond 1e308 fits into no float."""

MIB = 2**20
GIB = 2**30


def mib(count: float) -> float:
    """`count` bytes in MiB, rounded to three decimal places."""
    return round(count / MIB, 3)


def parse_duration(value: Any) -> float:
    """The seconds of `"300s"`, `"250ms"`, `"5m"`, `"1h"`, `"2d"` or of a number of seconds; `"never"` is infinity.

    Raises ValueError with an example for other values.
    """
    if isinstance(value, bool):
        raise ValueError("true and false are not durations; write for example 30s, 250ms, 5m or never")
    if isinstance(value, str) and value.strip().lower() == "never":
        return math.inf
    seconds = value
    if isinstance(value, str) and (match := _DURATION.fullmatch(value)):
        seconds = float(match[1]) * _SECONDS[match[2]]
    if isinstance(seconds, (int, float)):
        if not 0 <= seconds < _TOO_LARGE and value != math.inf:
            raise ValueError(f"a duration cannot be {value}; write for example 30s, 250ms, 5m or never")
        return float(seconds)
    raise ValueError(f"{value!r} is not a duration; write for example 30s, 250ms, 5m or never")


def parse_bytes(value: Any) -> int:
    """The bytes of `"600MiB"`, `"1.5GB"` or a number of bytes. Raises ValueError with an example for other values."""
    if isinstance(value, bool):
        raise ValueError("true and false are not sizes; write for example 512MiB or 2GiB")
    count = value
    if isinstance(value, str) and (match := _SIZE.fullmatch(value)):
        count = float(match[1]) * _BYTES[(match[2] or "B").lower()]
    if isinstance(count, (int, float)):
        if not 0 <= count < _TOO_LARGE:
            raise ValueError(f"a size cannot be {value}; write for example 512MiB or 2GiB")
        return int(count)
    raise ValueError(f"{value!r} is not a size; write for example 512MiB or 2GiB")


def format_bytes(count: int) -> str:
    """`count` bytes in binary units: `"512 B"`, `"1.5 MiB"`, `"12.0 GiB"`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_duration(seconds: float) -> str:
    """`seconds` as `"never"`, `"250ms"`, `"42s"`, `"5m"`, `"2m 1s"` or `"2h 3m"`."""
    if math.isinf(seconds):
        return "never"
    if seconds < 1 and seconds > 0:
        return f"{seconds * 1000:.0f}ms"
    whole = round(seconds)
    if whole < 120:
        return f"{whole}s"
    if whole < 7200:
        return f"{whole // 60}m {whole % 60}s" if whole % 60 else f"{whole // 60}m"
    return f"{whole // 3600}h {whole % 3600 // 60}m"
