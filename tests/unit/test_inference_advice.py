"""Alerts and recommended settings; each recommended value removes its alert."""

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


def test_pressure_alert_has_its_numbers() -> None:
    assert only(FULL) == (Kind.PRESSURE, {})
    (alert,) = advise([replace(FULL, level=Level.HIGH, rung=Rung.HALVE)])
    assert alert.message.endswith("600.0 MiB of it by others; 1/2 of the sequences are admitted at a time")
    assert advise([replace(FULL, level=Level.HIGH)]) == ()


def test_recommended_limit_beside_foreign_use_is_sufficient() -> None:
    assert only(CROWD) == (Kind.FOREIGN_USE, {"INFERENCE_GPU_MEMORY_LIMIT_MB": "430"})
    assert advise([replace(CROWD, budget_bytes=430 * MIB)]) == ()
    assert only(replace(CROWD, host=True)) == (Kind.FOREIGN_USE, {"INFERENCE_CPU_MEMORY_MAX_PERCENT": "0.43"})
    assert advise([replace(CROWD, host=True, budget_bytes=430 * MIB)]) == ()


@pytest.mark.parametrize("host", [False, True])
def test_no_setting_is_recommended_if_foreign_use_fills_a_device(host: bool) -> None:
    assert only(replace(CROWD, peak_bytes=950 * MIB, host=host)) == (Kind.FOREIGN_USE, {})


def test_settings_for_swapping_models_make_them_fit_or_stay() -> None:
    fix = {"models.b.parallel": "1", "models.b.context_length": "512"}
    assert only(SWAPPING) == (Kind.THRASH, fix)
    stay = {f"models.{name}.min_residency": f"{RESIDENCY_SECONDS}s" for name in ("a", "b")}
    assert only(replace(SWAPPING, fix={})) == (Kind.THRASH, stay)
    assert advise([replace(SWAPPING, fix={}, residency_seconds=RESIDENCY_SECONDS)]) == ()
    assert advise([replace(SWAPPING, count=SWAPS - 1)]) == ()


def test_alert_of_a_model_that_does_not_fit_has_the_fix() -> None:
    misfit = Misfit("a", "needs 2 GiB", (Change("INFERENCE_MEMORY_LIMIT_GB", "2"),))
    assert only(misfit) == (Kind.REFUSED, {"INFERENCE_MEMORY_LIMIT_GB": "2"})


def test_recommended_overhead_covers_the_growth() -> None:
    assert only(OUTGROWN) == (Kind.OUTGROWN, {"models.a.memory_overhead": "165MiB"})
    assert only(replace(OUTGROWN, configured_bytes=100 * MIB))[0] is Kind.OUTGROWN
    assert advise([replace(OUTGROWN, configured_bytes=165 * MIB)]) == ()


def test_recommended_queue_would_have_held_all_rejected_requests() -> None:
    assert only(AWAY) == (Kind.QUEUE_FULL, {"INFERENCE_QUEUE_NORMAL": "55"})
    assert advise([replace(AWAY, count=TURNED_AWAY - 1)]) == ()


def test_alert_as_json() -> None:
    (alert,) = advise([AWAY])
    assert alert.to_json() == {"kind": "queue_full", "subject": alert.subject, "message": alert.message}
    about = {"kind": "queue_full", "subject": alert.subject}
    assert alert.recommendations() == [{**about, "setting": "INFERENCE_QUEUE_NORMAL", "value": "55"}]
    (alert,) = advise([FULL])
    assert alert.recommendations() == []


def test_two_models_swap_if_each_left_for_the_other() -> None:
    assert swaps([]) is None
    assert swaps([("a", "b"), ("a", "b"), ("c", "a")]) is None
    assert swaps([("a", "b"), ("b", "a"), ("a", "b"), ("c", "a"), ("a", "c")]) == (("a", "b"), 3)
