"""Figures of a soak run: trends, growth of counts, kinds of processes, footprints."""

from __future__ import annotations

import math
import os

import pytest

from benchmarks.footprints import (
    Footprint,
    Look,
    footprint,
    generations,
    growth_count,
    growth_percent,
    kind_of,
    lifelines,
    slope,
    spread_percent,
)
from benchmarks.soak import Results, bars, tables

MIB = 2**20


def line(start: float, rise: float, count: int = 11) -> list[tuple[float, float]]:
    return [(float(at), start + rise * at) for at in range(count)]


def look(at: float, *processes: tuple[int, str, int], at_rest: bool = True, tasks: int = 5) -> Look:
    seen = [Footprint(pid, kind, rss * MIB, rss * MIB // 2, 10, 4) for pid, kind, rss in processes]
    return Look(at, at_rest, seen, {"inference": tasks, "gateway": 3})


def test_growth_ignores_outliers() -> None:
    points = line(100, 1)
    assert growth_percent(points) == pytest.approx(100 * 10 / 105)
    points[5] = (5.0, 900.0)
    assert growth_percent(points) == pytest.approx(100 * 10 / 106, rel=0.05)
    assert spread_percent(points) > 500


def test_slope_of_a_long_run_is_exact() -> None:
    assert slope(line(0, 2, 5000)) == 2


@pytest.mark.parametrize("points", [[], [(0.0, 1.0)], [(0.0, 1.0), (1.0, 5.0)]], ids=["none", "one", "two"])
def test_growth_needs_more_than_two_points(points: list[tuple[float, float]]) -> None:
    assert math.isnan(growth_percent(points))


@pytest.mark.parametrize(
    ("values", "grown"), [([5, 6, 5, 6, 5, 6], 0), ([5, 6, 7, 7, 8, 8], 2), ([9, 9, 5, 5, 5, 5], 0), ([5], 0), ([], 0)]
)
def test_count_has_grown_if_its_later_minimum_exceeds_its_earlier_maximum(values: list[int], grown: int) -> None:
    assert growth_count(values) == grown


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["python", "-m", "headgate", "up", "--port", "1"], "supervisor"),
        (["python", "-m", "headgate", "inference", "--port", "1"], "inference"),
        (["python", "-m", "headgate", "gateway"], "gateway"),
        (["python", "-m", "inference.worker"], "worker"),
        (["python", "-m", "inference.devices.simgpu.rpc_server"], "rpc-server"),
        (["python", "-m", "inference.devices.simgpu", "/tmp/x"], "simulator"),
        (["sh"], "other"),
    ],
)
def test_kind_of_a_process_follows_from_its_command_line(words: list[str], kind: str) -> None:
    assert kind_of(words) == kind


def test_footprint_of_a_running_process_is_read_and_of_an_ended_one_unknown() -> None:
    own = footprint(os.getpid())
    assert own is not None
    assert own.rss_bytes > own.private_bytes > MIB
    assert own.descriptors > 2
    assert footprint(2**22 + 1) is None


def test_long_running_processes_are_separate_from_replaced_ones() -> None:
    looks = [
        look(0, (1, "inference", 50), (7, "worker", 10)),
        look(1, (1, "inference", 50), (2, "worker", 10), (7, "worker", 11)),
        look(2, (1, "inference", 50), (3, "worker", 12), (7, "worker", 10)),
        look(3, (1, "inference", 50), (7, "worker", 10)),
    ]
    assert [one.name for one in lifelines(looks, 1)] == ["inference", "worker"]
    assert generations(looks, 1, "worker") == [(1, 10 * MIB), (2, 12 * MIB)]


def test_leaks_of_memory_and_of_tasks_miss_their_limits() -> None:
    def run(leak: int, tasks: int) -> dict[str, bool]:
        found = Results(60.0, [look(at, (1, "inference", 50 + leak * at), tasks=5 + tasks * at) for at in range(60)])
        assert any("inference" in text for text in tables(found))
        return {bar.name: bar.reached for bar in bars(found)}

    assert run(0, 0)["rss_rises_inference"]
    assert run(0, 0)["tasks_grew_inference"]
    assert not run(1, 0)["rss_rises_inference"]
    assert not run(0, 1)["tasks_grew_inference"]
