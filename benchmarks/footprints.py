"""Memory, descriptors and threads of processes, read from /proc, and their growth."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

KINDS: Mapping[str, tuple[str, ...]] = {
    "worker": ("inference.worker",),
    "helper": ("inference.helper",),
    "simulator": ("inference.devices.simgpu",),
    "rpc-server": ("inference.devices.simgpu.rpc_server",),
    "supervisor": ("up",),
    "inference": ("inference",),
    "gateway": ("gateway",),
}
"""Words in the command line that identify the kind of a process; the first match counts."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """One sample of one process. `rss_bytes` includes shared pages, `private_bytes` does not."""

    pid: int
    kind: str
    rss_bytes: int
    private_bytes: int
    descriptors: int
    threads: int


@dataclass(frozen=True, slots=True)
class Look:
    """All processes at one moment, `at` seconds after the start. `tasks`: asyncio tasks by service, if known.

    `at_rest`: there are no requests, and only pinned models are loaded.
    """

    at: float
    at_rest: bool
    processes: Sequence[Footprint]
    tasks: Mapping[str, int]


def kind_of(words: Sequence[str]) -> str:
    """The part of Headgate that a command line belongs to, or `other`."""
    for kind, names in KINDS.items():
        if any(name in words for name in names):
            return kind
    return "other"


def footprint(pid: int) -> Footprint | None:
    """A sample of a process; None if it has ended."""
    here = Path(f"/proc/{pid}")
    try:
        words = (here / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
        status = dict(line.split(":", 1) for line in (here / "status").read_text().splitlines() if ":" in line)
        descriptors = sum(1 for _ in (here / "fd").iterdir())
        rss, private = (int(status[name].split()[0]) * 1024 for name in ("VmRSS", "RssAnon"))
    except (OSError, KeyError):  # a zombie has no memory
        return None
    return Footprint(pid, kind_of(words), rss, private, descriptors, int(status["Threads"]))


MAX_POINTS = 400
"""Maximum number of samples for the slope, because all pairs are compared. Longer runs are thinned out."""


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Change per second: median of the slopes of all pairs (Theil-Sen), which is robust against outliers."""
    points = points[:: max(1, len(points) // MAX_POINTS)]
    found = [
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for index, earlier in enumerate(points)
        for later in points[index + 1 :]
        if later[0] > earlier[0]
    ]
    return median(found) if found else math.nan


def growth_percent(points: Sequence[tuple[float, float]]) -> float:
    """Rise of the regression line over the whole time, in percent of the median; NaN of fewer than three points."""
    if len(points) < 3:
        return math.nan
    level = median(value for _, value in points)
    return 100 * slope(points) * (points[-1][0] - points[0][0]) / level if level else 0.0


def spread_percent(points: Sequence[tuple[float, float]]) -> float:
    """How far the largest value is above the median, in percent; NaN without values."""
    values = [value for _, value in points]
    level = median(values) if values else 0
    return 100 * (max(values) / level - 1) if level else math.nan


def growth_count(values: Sequence[int]) -> int:
    """Growth of a count: from the maximum of the first third to the minimum of the last third, at least 0."""
    third = max(1, len(values) // 3)
    return max(0, min(values[-third:]) - max(values[:third])) if values else 0


@dataclass(frozen=True, slots=True)
class Lifeline:
    """Resources of one long-lived process, over time and at rest. `name` is unique within its kind."""

    name: str
    rss: Sequence[tuple[float, float]]
    private: Sequence[tuple[float, float]]
    descriptors: Sequence[int]
    threads: Sequence[int]


def lifelines(looks: Sequence[Look], since: float) -> Iterator[Lifeline]:
    """Histories of all processes that are in each sample from `since` on; counts are those at rest."""
    later = [look for look in looks if look.at >= since]
    by_pid = [{one.pid: one for one in look.processes} for look in later]
    always = set.intersection(*map(set, by_pid)) if by_pid else set[int]()
    numbers: dict[str, int] = {}
    for pid in sorted(always):
        kind = by_pid[0][pid].kind
        numbers[kind] = numbers.get(kind, 0) + 1
        seen = [(look, found[pid]) for look, found in zip(later, by_pid, strict=True)]
        rest = [one for look, one in seen if look.at_rest] or [one for _, one in seen]
        yield Lifeline(
            kind if numbers[kind] == 1 else f"{kind}-{numbers[kind]}",
            [(look.at, one.rss_bytes) for look, one in seen],
            [(look.at, one.private_bytes) for look, one in seen],
            [one.descriptors for one in rest],
            [one.threads for one in rest],
        )


def generations(looks: Sequence[Look], since: float, kind: str) -> list[tuple[float, float]]:
    """Processes of a kind that have ended: time of the last sample and the largest memory (RSS)."""
    last: dict[int, tuple[float, float]] = {}
    for look in looks:
        for one in look.processes:
            if one.kind == kind:
                last[one.pid] = (look.at, max(one.rss_bytes, last.get(one.pid, (0.0, 0.0))[1]))
    still_there = {one.pid for one in looks[-1].processes} if looks else set[int]()
    return sorted(found for pid, found in last.items() if found[0] >= since and pid not in still_there)
