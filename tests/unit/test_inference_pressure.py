"""Levels of pressure: where they begin, that they do not flap, and that what was admitted is no distress."""

from __future__ import annotations

import pytest

from inference.authority.pressure.levels import Bounds, Gauge, Level, Use, admit, grew, settle

BOUNDS = Bounds()


def use(ours: int, foreign: int, total: int = 1000) -> Use:
    return Use("gpu-0", total, ours, foreign)


def settled(*uses: Use) -> Gauge:
    gauge = Gauge()
    for one in uses:
        gauge = settle(gauge, one, BOUNDS)
    return gauge


@pytest.mark.parametrize(
    ("foreign", "level"),
    [(0, "low"), (599, "low"), (600, "moderate"), (799, "moderate"), (800, "high"), (900, "critical"),
     (979, "critical"), (980, "emergency"), (1000, "emergency")],
)  # fmt: skip
def test_the_use_of_others_alone_goes_by_the_bounds(foreign: int, level: str) -> None:
    assert str(settled(use(0, foreign)).level) == level


def test_a_device_without_a_size_is_low() -> None:
    assert settled(use(100, 100, total=0)).level is Level.LOW


def test_a_plan_that_fills_its_budget_is_never_critical() -> None:
    assert settled(use(0, 20), use(975, 20)).level is Level.HIGH
    assert settled(use(0, 20), use(975, 20), use(975, 30)).level is Level.HIGH, "others vary a little"


def test_others_who_come_on_top_of_a_plan_make_it_critical() -> None:
    assert settled(use(0, 20), use(880, 20), use(880, 31)).level is Level.CRITICAL
    assert settled(use(0, 20), use(880, 20), use(880, 100)).level is Level.EMERGENCY


def test_what_others_take_after_a_booking_is_no_part_of_the_plan() -> None:
    """Both happened since the last look."""
    booked = admit(settled(use(0, 20)), use(880, 20))
    assert settle(booked, use(880, 60), BOUNDS).level is Level.CRITICAL
    assert settled(use(0, 20), use(880, 60)).level is Level.HIGH, "nobody said when it was booked"


def test_a_plan_does_not_hide_that_others_alone_fill_the_device() -> None:
    assert settled(use(0, 930), use(20, 930)).level is Level.CRITICAL


def test_after_distress_the_plan_counts_again_once_others_are_back_where_they_were() -> None:
    before = (use(0, 20), use(880, 20), use(880, 40))
    assert settled(*before, use(880, 29)).level is Level.CRITICAL
    assert settled(*before, use(880, 20)).level is Level.HIGH


def test_a_level_is_left_only_well_below_its_bound() -> None:
    assert settled(use(0, 800), use(0, 790)).level is Level.HIGH
    assert settled(use(0, 800), use(0, 779)).level is Level.MODERATE
    assert settled(use(0, 980), use(0, 100)).level is Level.LOW


def test_use_that_wobbles_about_a_bound_changes_the_level_once() -> None:
    gauge, levels = Gauge(), []
    for foreign in (795, 805, 795, 805, 790, 810):
        gauge = settle(gauge, use(0, foreign), BOUNDS)
        levels.append(gauge.level)
    assert levels == [Level.MODERATE, *[Level.HIGH] * 5]


def test_growth_of_others_adds_up_and_is_told_once() -> None:
    gauge = Gauge()
    assert not grew(gauge, use(0, 500)), "nothing is known before the first look"
    told = []
    for foreign in (500, 506, 512, 512, 400, 409, 411):
        told.append(grew(gauge, use(0, foreign)))
        gauge = settle(gauge, use(0, foreign), BOUNDS)
    assert told == [False, False, True, False, False, False, True]


def test_what_we_take_is_no_growth_of_others() -> None:
    assert not grew(settled(use(0, 100)), use(800, 100))
