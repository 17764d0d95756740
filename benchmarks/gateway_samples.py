"""The raw samples of a gateway benchmark, and one number per round from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

from headgate.cli.bench import percentile

WHOLE, STREAMED = "whole", "streamed"
"""Kinds of answers."""

CLOUD_WHOLE = "cloud, whole"
CLOUD_STREAM = "cloud, 100 chunks"
CLOUD_STREAMS = (CLOUD_STREAM, "cloud, 1000 chunks", "cloud, tool call")
"""Kinds of answers of a cloud; a stream has one token per chunk."""

FIRST_TOKEN_SECONDS = 0.5
"""`deadlines.first_token` in the failover part: how long the gateway waits for a silent tier."""


@dataclass(frozen=True, slots=True)
class Alone:
    """One connection at a fixed rate in one round: seconds to the first content and to the end of every answer."""

    system: str
    kind: str
    round: int
    first: Sequence[float]
    whole: Sequence[float]

    def first_at(self, quantile: float) -> float:
        """A percentile of the time to the first content."""
        return percentile(self.first, quantile)

    def whole_at(self, quantile: float) -> float:
        """A percentile of the time to the end."""
        return percentile(self.whole, quantile)


@dataclass(frozen=True, slots=True)
class Crowd:
    """Many connections in one round, each of which sends its next request at once. Shares are of one core."""

    system: str
    kind: str
    round: int
    connections: int
    requests: int
    seconds: float
    p50: float
    p99: float
    system_share: float
    generator_share: float

    @property
    def per_second(self) -> float:
        """Answers per second."""
        return self.requests / self.seconds

    @property
    def per_core_second(self) -> float:
        """Answers per second of CPU time of the system."""
        return self.per_second / self.system_share if self.system_share else float("nan")


@dataclass(frozen=True, slots=True)
class Paced:
    """Many paced streams at once in one round: seconds between their pieces; `longest` is one per stream."""

    system: str
    round: int
    streams: int
    tokens: int
    gap_p50: float
    gap_p99: float
    longest: Sequence[float]
    system_share: float


@dataclass(frozen=True, slots=True)
class Failed:
    """Answers of the second tier after the first one failed: seconds of each, and of answers without a first tier.

    `kind`: what the first tier does. `is_open`: its breaker is open, so it gets no request.
    """

    kind: str
    is_open: bool
    seconds: Sequence[float]
    without: Sequence[float]


@dataclass(slots=True)
class Held:
    """Memory of the gateway process: idle after its start, and after each number of requests."""

    idle_bytes: int = 0
    after: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Gone:
    """Disconnects of clients: seconds until the upstream or the worker stopped. `step`: seconds of a decode step."""

    kind: str
    seconds: Sequence[float]
    step: float = 0.0


@dataclass(slots=True)
class Results:
    """All raw samples of a run. `versions`: of the measured systems. `load`: of the machine at start and end."""

    versions: dict[str, str] = field(default_factory=dict)
    load: list[float] = field(default_factory=list)
    alone: list[Alone] = field(default_factory=list)
    crowds: list[Crowd] = field(default_factory=list)
    paced: list[Paced] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    held: Held = field(default_factory=Held)
    memory: dict[str, int] = field(default_factory=dict)
    gone: list[Gone] = field(default_factory=list)

    def alone_of(self, system: str, kind: str) -> list[Alone]:
        """Values in the order of rounds."""
        found = [one for one in self.alone if (one.system, one.kind) == (system, kind)]
        return sorted(found, key=lambda one: one.round)

    def crowds_of(self, system: str, kind: str) -> list[Crowd]:
        """Values in the order of rounds."""
        found = [one for one in self.crowds if (one.system, one.kind) == (system, kind)]
        return sorted(found, key=lambda one: one.round)

    def paced_of(self, system: str) -> list[Paced]:
        """Values in the order of rounds."""
        return sorted((one for one in self.paced if one.system == system), key=lambda one: one.round)

    def write(self, path: Path) -> None:
        """Writes JSON, times to the microsecond."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_rounded(asdict(self))))

    @classmethod
    def read(cls, path: Path) -> Results:
        """Reads a file of `write`."""
        raw = json.loads(path.read_text())
        held = Held(raw["held"]["idle_bytes"], [(count, size) for count, size in raw["held"]["after"]])
        return cls(
            raw["versions"],
            raw["load"],
            _each(raw["alone"], Alone),
            _each(raw["crowds"], Crowd),
            _each(raw["paced"], Paced),
            _each(raw["failed"], Failed),
            held,
            raw["memory"],
            _each(raw["gone"], Gone),
        )


T = TypeVar("T")


def _each(rows: list[dict[str, object]], make: Callable[..., T]) -> list[T]:
    return [make(**row) for row in rows]


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, list | tuple) else value
