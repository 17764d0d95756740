"""The hint of a request about its KV cache: what to do with the cached tokens after the request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headgate.shared.units import format_duration, parse_duration

MAX_PIN_SECONDS = 3600.0
"""Longest pin by a request. Operators can pin for longer (`inference.api.kv_routes`)."""


@dataclass(frozen=True, slots=True)
class KvHint:
    """`keep`: the tokens are kept rather than those without a hint. `drop`: they are not kept. `pin`: they are kept for
    `seconds` after the request; `seconds` is 0 for the other kinds.
    """

    kind: Literal["keep", "drop", "pin"]
    seconds: float = 0.0


def parse_kv_hint(text: str) -> KvHint:
    """The hint in `keep`, `drop` or `pin:60s`, in upper or lower case. Raises ValueError with the allowed values."""
    value = text.strip().lower()
    if value == "keep":
        return KvHint("keep")
    if value == "drop":
        return KvHint("drop")
    kind, _, duration = value.partition(":")
    if kind != "pin":
        raise ValueError(f"must be keep, drop or pin with a duration (pin:60s); it is {text[:40]!r}")
    try:
        seconds = parse_duration(duration)
    except ValueError:
        raise ValueError(f"needs a duration after `pin:`, for example pin:60s; it is {text[:40]!r}") from None
    if not 0 < seconds <= MAX_PIN_SECONDS:
        raise ValueError(
            f"must pin for more than 0 s and at most {format_duration(MAX_PIN_SECONDS)}; it is {text[:40]!r}"
        )
    return KvHint("pin", seconds)
