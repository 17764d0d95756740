"""Quarantine of requests: suspicion, conviction and release after crashes of workers."""

from __future__ import annotations

import pytest

from inference.authority.quarantine import (
    CONVICTED_SECONDS,
    MOST_CASES,
    MOST_IN_A_ROW,
    SUSPECT_SECONDS,
    TABLE,
    Crash,
    CrashKind,
    Quarantine,
    Standing,
)
from inference.protocol import ExitCause

_S = Standing
TOGETHER = Crash(ExitCause.ASSERT, "GGML_ASSERT", alone=False)
ALONE = Crash(ExitCause.ASSERT, "GGML_ASSERT", alone=True)
NO_MEMORY = Crash(ExitCause.OOM_COMPUTE, "CUDA error: out of memory", alone=True)
SILENT = Crash(ExitCause.ASSERT, "", alone=True, unexplained=True)


def _after(*crashes: Crash, key: str = "a", quarantine: Quarantine | None = None) -> Quarantine:
    quarantine = quarantine or Quarantine()
    for crash in crashes:
        quarantine = quarantine.crashed(key, crash, 0.0)
    return quarantine


@pytest.mark.parametrize(
    ("crashes", "standing"),
    [
        ([], _S.INNOCENT),
        ([TOGETHER], _S.SUSPECT),
        ([TOGETHER] * 9, _S.SUSPECT),
        ([ALONE], _S.SUSPECT),
        ([TOGETHER, ALONE], _S.CONVICTED),
        ([TOGETHER, SILENT], _S.ACCUSED),
        ([TOGETHER, SILENT, TOGETHER], _S.ACCUSED),
        ([TOGETHER, SILENT, SILENT], _S.CONVICTED),
        ([TOGETHER, SILENT, ALONE], _S.CONVICTED),
        ([TOGETHER, ALONE, TOGETHER], _S.CONVICTED),
        ([TOGETHER, NO_MEMORY, NO_MEMORY, NO_MEMORY], _S.SUSPECT),
    ],
)
def test_only_crashes_alone_convict_and_one_without_a_message_counts_half(
    crashes: list[Crash], standing: Standing
) -> None:
    quarantine = _after(*crashes)
    assert quarantine.standing("a", 1.0) is standing
    if crashes:
        assert quarantine.cases["a"].crashes == len(crashes)


def test_answered_request_is_acquitted() -> None:
    for crashes in ([TOGETHER], [TOGETHER, SILENT], [TOGETHER, ALONE]):
        quarantine = _after(*crashes).answered("a")
        assert quarantine.standing("a", 1.0) is _S.INNOCENT
        assert quarantine.in_a_row == ()


def test_requests_of_one_batch_have_separate_standings() -> None:
    quarantine = Quarantine()
    for key in "abc":
        quarantine = quarantine.crashed(key, TOGETHER, 0.0)
    quarantine = quarantine.crashed("b", ALONE, 1.0).answered("a")
    assert [quarantine.standing(key, 2.0) for key in "abc"] == [_S.INNOCENT, _S.CONVICTED, _S.SUSPECT]


@pytest.mark.parametrize(
    ("crashes", "seconds"), [([TOGETHER], SUSPECT_SECONDS), ([TOGETHER, ALONE], CONVICTED_SECONDS)]
)
def test_cases_expire(crashes: list[Crash], seconds: float) -> None:
    quarantine = _after(*crashes)
    assert quarantine.standing("a", seconds - 0.1) is not _S.INNOCENT
    assert quarantine.standing("a", seconds) is _S.INNOCENT
    again = quarantine.crashed("a", TOGETHER, seconds)
    assert again.cases["a"].standing is _S.SUSPECT
    assert again.cases["a"].crashes == 1, "expired crashes are not counted"
    assert "a" not in quarantine.crashed("b", TOGETHER, seconds).cases


def test_crashes_of_a_model_that_never_answers_are_not_attributed_to_its_requests() -> None:
    quarantine = Quarantine()
    for number in range(MOST_IN_A_ROW):
        quarantine = _after(TOGETHER, ALONE, key=f"k{number}", quarantine=quarantine)
    assert all(quarantine.standing(f"k{number}", 1.0) is _S.CONVICTED for number in range(MOST_IN_A_ROW))
    quarantine = _after(TOGETHER, ALONE, key="last", quarantine=quarantine)
    assert quarantine.doubted
    assert quarantine.standing("last", 1.0) is _S.SUSPECT
    assert all(quarantine.standing(f"k{number}", 1.0) is _S.INNOCENT for number in range(MOST_IN_A_ROW))
    quarantine = quarantine.crashed("last", ALONE, 1.0)
    assert quarantine.standing("last", 1.0) is _S.SUSPECT, "no convictions while the model is doubted"
    quarantine = quarantine.answered("other").crashed("last", ALONE, 2.0)
    assert quarantine.standing("last", 2.0) is _S.CONVICTED, "the model has answered another request"


def test_oldest_case_is_dropped_over_the_limit() -> None:
    quarantine = Quarantine()
    for number in range(MOST_CASES + 5):
        quarantine = quarantine.crashed(f"k{number}", TOGETHER, float(number) / 1000)
    assert len(quarantine.cases) == MOST_CASES
    assert quarantine.standing("k4", 1.0) is _S.INNOCENT
    assert quarantine.standing("k5", 1.0) is _S.SUSPECT


def test_case_can_be_cleared_manually() -> None:
    assert _after(TOGETHER, ALONE).forget("a").standing("a", 1.0) is _S.INNOCENT
    assert Quarantine().forget("a") == Quarantine()


def test_table_is_complete_and_standings_do_not_improve() -> None:
    order = list(Standing)
    assert set(TABLE) == {(standing, event) for standing in Standing for event in CrashKind}
    for (before, _), after in TABLE.items():
        assert order.index(after) >= order.index(before)
