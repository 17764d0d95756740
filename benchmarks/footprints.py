"""What processes hold (memory, descriptors, threads), read from /proc, and whether it grew; starts and ends none."""

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
"""A process is of the kind one of whose words stands in its command line; the first that fits."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """One look at one process. `rss_bytes` counts shared pages too, `private_bytes` does not."""

    pid: int
    kind: str
    rss_bytes: int
    private_bytes: int
    descriptors: int
    threads: int


@dataclass(frozen=True, slots=True)
class Look:
    """All processes at one moment, `at` seconds after the start; `tasks` of each service that tells them.

    `at_rest`: nothing is asked, and models are unloaded but for those that are pinned.
    """

    at: float
    at_rest: bool
    processes: Sequence[Footprint]
    tasks: Mapping[str, int]


def kind_of(words: Sequence[str]) -> str:
    """Which part of Headgate a command line is; `other` for none."""
    for kind, names in KINDS.items():
        if any(name in words for name in names):
            return kind
    return "other"


def footprint(pid: int) -> Footprint | None:
    """Of a living process; None when it is gone."""
    here = Path(f"/proc/{pid}")
    try:
        words = (here / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
        said = dict(line.split(":", 1) for line in (here / "status").read_text().splitlines() if ":" in line)
        descriptors = sum(1 for _ in (here / "fd").iterdir())
        rss, private = (int(said[name].split()[0]) * 1024 for name in ("VmRSS", "RssAnon"))
    except (OSError, KeyError):  # a zombie has no memory
        return None
    return Footprint(pid, kind_of(words), rss, private, descriptors, int(said["Threads"]))


MOST_POINTS = 400
"""Of a long run every so-manieth look is taken: all pairs of them are compared."""


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Change per second, as the median of the slopes between all pairs (Theil-Sen): outliers do not tilt it."""
    points = points[:: max(1, len(points) // MOST_POINTS)]
    found = [
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for index, earlier in enumerate(points)
        for later in points[index + 1 :]
        if later[0] > earlier[0]
    ]
    return median(found) if found else math.nan


def growth_percent(points: Sequence[tuple[float, float]]) -> float:
    """How much the line through the points rises over their time, in percent of their median."""
    if len(points) < 3:
        return math.nan
    level = median(value for _, value in points)
    return 100 * slope(points) * (points[-1][0] - points[0][0]) / level if level else 0.0


def spread_percent(points: Sequence[tuple[float, float]]) -> float:
    """The largest value over the median, in percent beyond it."""
    values = [value for _, value in points]
    level = median(values) if values else 0
    return 100 * (max(values) / level - 1) if level else math.nan


def growth_count(values: Sequence[int]) -> int:
    """By how many a count grew: from the most of the first third to the least of the last, or not at all (0)."""
    third = max(1, len(values) // 3)
    return max(0, min(values[-third:]) - max(values[:third])) if values else 0


@dataclass(frozen=True, slots=True)
class Lifeline:
    """What one long-lived process held, over time and at rest. `name` tells it from others of its kind."""

    name: str
    rss: Sequence[tuple[float, float]]
    private: Sequence[tuple[float, float]]
    descriptors: Sequence[int]
    threads: Sequence[int]


def lifelines(looks: Sequence[Look], since: float) -> Iterator[Lifeline]:
    """Of every process that was there at each look from `since` on; counts are those at rest."""
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
    """When each process of a kind that came and went was last seen, and the most memory it held (RSS)."""
    last: dict[int, tuple[float, float]] = {}
    for look in looks:
        for one in look.processes:
            if one.kind == kind:
                last[one.pid] = (look.at, max(one.rss_bytes, last.get(one.pid, (0.0, 0.0))[1]))
    still_there = {one.pid for one in looks[-1].processes} if looks else set[int]()
    return sorted(found for pid, found in last.items() if found[0] >= since and pid not in still_there)
