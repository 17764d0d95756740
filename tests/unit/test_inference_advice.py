"""Alerts and what they recommend: each is a condition, and the recommended value makes it false."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inference.authority.pressure.advice import (
    MIB,
    RESIDENCY_SECONDS,
    SWAPS,
    TURNED_AWAY,
    Change,
    Crowd,
    Fact,
    Full,
    Kind,
    Misfit,
    Outgrown,
    Swapping,
    TurnedAway,
    advise,
    swaps,
)
from inference.authority.pressure.levels import Bounds, Level
from inference.authority.pressure.relief import Rung

TOTAL = 1000 * MIB
FULL = Full("gpu-0", Level.CRITICAL, Rung.NONE, 930 * MIB, 600 * MIB, TOTAL)
CROWD = Crowd("gpu-0", 450 * MIB, 900 * MIB, TOTAL, Bounds())
SWAPPING = Swapping(("a", "b"), SWAPS, 5.0, {"parallel": 1, "context_length": 512})
OUTGROWN = Outgrown("a", 100 * MIB + 1, 64 * MIB, None)
AWAY = TurnedAway("normal", 50, TURNED_AWAY)


def only(fact: Fact) -> tuple[Kind, dict[str, str]]:
    (alert,) = advise([fact])
    assert alert.message
    return alert.kind, {change.setting: change.value for change in alert.changes}


def test_a_device_in_distress_is_said_to_be_with_its_numbers() -> None:
    assert only(FULL) == (Kind.PRESSURE, {})
    (alert,) = advise([replace(FULL, level=Level.HIGH, rung=Rung.HALVE)])
    assert alert.message.endswith("600.0 MiB of it by others; 1/2 of the sequences are admitted at a time")
    assert advise([replace(FULL, level=Level.HIGH)]) == ()


def test_our_share_beside_others_is_recommended_and_enough() -> None:
    assert only(CROWD) == (Kind.FOREIGN_USE, {"INFERENCE_GPU_MEMORY_LIMIT_MB": "430"})
    assert advise([replace(CROWD, budget_bytes=430 * MIB)]) == ()
    assert only(replace(CROWD, host=True)) == (Kind.FOREIGN_USE, {"INFERENCE_CPU_MEMORY_MAX_PERCENT": "0.43"})
    assert advise([replace(CROWD, host=True, budget_bytes=430 * MIB)]) == ()


@pytest.mark.parametrize("host", [False, True])
def test_where_others_alone_fill_a_device_no_setting_helps(host: bool) -> None:
    assert only(replace(CROWD, peak_bytes=950 * MIB, host=host)) == (Kind.FOREIGN_USE, {})


def test_models_that_swap_are_made_to_fit_or_to_stay() -> None:
    fix = {"models.b.parallel": "1", "models.b.context_length": "512"}
    assert only(SWAPPING) == (Kind.THRASH, fix)
    stay = {f"models.{name}.min_residency": f"{RESIDENCY_SECONDS}s" for name in ("a", "b")}
    assert only(replace(SWAPPING, fix={})) == (Kind.THRASH, stay)
    assert advise([replace(SWAPPING, fix={}, residency_seconds=RESIDENCY_SECONDS)]) == ()
    assert advise([replace(SWAPPING, count=SWAPS - 1)]) == ()


def test_a_misfit_carries_what_makes_it_fit() -> None:
    misfit = Misfit("a", "needs 2 GiB", (Change("INFERENCE_MEMORY_LIMIT_GB", "2"),))
    assert only(misfit) == (Kind.REFUSED, {"INFERENCE_MEMORY_LIMIT_GB": "2"})


def test_an_overhead_is_recommended_that_covers_the_growth() -> None:
    assert only(OUTGROWN) == (Kind.OUTGROWN, {"models.a.memory_overhead": "165MiB"})
    assert only(replace(OUTGROWN, configured_bytes=100 * MIB))[0] is Kind.OUTGROWN
    assert advise([replace(OUTGROWN, configured_bytes=165 * MIB)]) == ()


def test_a_queue_is_recommended_that_would_have_held_everybody() -> None:
    assert only(AWAY) == (Kind.QUEUE_FULL, {"INFERENCE_QUEUE_NORMAL": "55"})
    assert advise([replace(AWAY, count=TURNED_AWAY - 1)]) == ()


def test_an_alert_as_others_read_it() -> None:
    (alert,) = advise([AWAY])
    assert alert.to_json() == {"kind": "queue_full", "subject": alert.subject, "message": alert.message}
    about = {"kind": "queue_full", "subject": alert.subject}
    assert alert.recommendations() == [{**about, "setting": "INFERENCE_QUEUE_NORMAL", "value": "55"}]
    (alert,) = advise([FULL])
    assert alert.recommendations() == []


def test_a_pair_swaps_when_each_left_for_the_other() -> None:
    assert swaps([]) is None
    assert swaps([("a", "b"), ("a", "b"), ("c", "a")]) is None
    assert swaps([("a", "b"), ("b", "a"), ("a", "b"), ("c", "a"), ("a", "c")]) == (("a", "b"), 3)
