"""Counters of finished requests for the dashboard: by minute, by key, and times to the first token by local model."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

MINUTES = 60
"""Minutes that are kept."""
MAX_TIMES = 1000
"""Times to the first token that are kept: the first ones of a minute, and the last ones of a model."""
MAX_MODELS = 200
"""Models whose times are kept; the one without a request for longest is dropped."""
RECENT_SECONDS = 300.0
"""Age up to which times of a model count."""


@dataclass(slots=True)
class Finished:
    """A request at its end. `model` is the local model that answered, empty for none."""

    key: str = ""
    model: str = ""
    tier: str = "none"
    outcome: str = "success"
    reason: str = "none"
    ttft_seconds: float | None = None
    tokens: int = 0


@dataclass(slots=True)
class _Minute:
    start: int
    by_tier: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    times: list[float] = field(default_factory=list)
    tokens: int = 0

    def note(self, end: Finished) -> None:
        self.by_tier[end.tier] += 1
        if end.outcome != "success":
            self.errors[end.outcome] += 1
        if end.reason != "none" and end.tier != "none":
            self.fallbacks[end.reason] += 1
        if end.ttft_seconds is not None and len(self.times) < MAX_TIMES:
            self.times.append(end.ttft_seconds)
        self.tokens += end.tokens

    def to_json(self) -> dict[str, Any]:
        tiers = ("local", "local-fallback", "cloud", "none")
        return {
            "start": self.start,
            "by_tier": {tier: self.by_tier[tier] for tier in tiers},
            "errors": dict(self.errors),
            "fallbacks": dict(self.fallbacks),
            "ttft_p50": percentile(self.times, 0.5),
            "tokens": self.tokens,
        }


@dataclass(slots=True)
class KeyTotals:
    """Requests and tokens of one key since the start of the gateway."""

    requests: int = 0
    tokens: int = 0


class TrafficCounters:
    """The counters of one gateway. Times are Unix seconds."""

    def __init__(self) -> None:
        self._minutes: deque[_Minute] = deque(maxlen=MINUTES)
        self._times: dict[str, deque[tuple[float, float]]] = {}
        """By model: when a request ended, and its time to the first token. The last used model is last."""
        self.keys: dict[str, KeyTotals] = {}

    def note(self, end: Finished, now: float) -> None:
        """Counts a request that has ended."""
        self._minute(now).note(end)
        totals = self.keys.setdefault(end.key, KeyTotals())
        totals.requests += 1
        totals.tokens += end.tokens
        if end.model and end.ttft_seconds is not None:
            times = self._times.pop(end.model, None)
            if times is None:
                times = deque(maxlen=MAX_TIMES)
                if len(self._times) >= MAX_MODELS:
                    del self._times[next(iter(self._times))]
            self._times[end.model] = times
            times.append((now, end.ttft_seconds))

    def minutes(self, now: float) -> list[dict[str, Any]]:
        """The last minutes, also those without a request; the running one is last."""
        last = _start(now)
        known = {minute.start: minute for minute in self._minutes}
        starts = range(last - 60 * (MINUTES - 1), last + 60, 60)
        return [known.get(start, _Minute(start)).to_json() for start in starts]

    def minute(self, now: float) -> dict[str, Any]:
        """The running minute."""
        newest = self._minutes[-1] if self._minutes else None
        start = _start(now)
        return (newest if newest is not None and newest.start == start else _Minute(start)).to_json()

    def times(self, model: str, now: float) -> tuple[float | None, float | None]:
        """Median and 99th percentile of the recent times to the first token of a local model; None without any."""
        recent = [seconds for at, seconds in self._times.get(model, ()) if now - at < RECENT_SECONDS]
        return percentile(recent, 0.5), percentile(recent, 0.99)

    def _minute(self, now: float) -> _Minute:
        start = _start(now)
        if not self._minutes or self._minutes[-1].start < start:
            self._minutes.append(_Minute(start))
        return self._minutes[-1]  # after a step back of the clock the newest minute continues


def _start(now: float) -> int:
    return int(now // 60) * 60


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value with `share` of `values` at or below it, rounded to 3 decimals; None without values."""
    if not values:
        return None
    return round(sorted(values)[max(0, math.ceil(share * len(values)) - 1)], 3)
