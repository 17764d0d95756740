"""Quarantine of requests: suspicion, confirmation and release after crashes of workers."""

from __future__ import annotations

import pytest

from inference.authority.quarantine import (
    CONFIRMED_SECONDS,
    MAX_CASES,
    MAX_IN_A_ROW,
    SUSPECT_SECONDS,
    TABLE,
    Crash,
    CrashKind,
    Quarantine,
    Suspicion,
)
from inference.protocol import ExitCause

_S = Suspicion
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
    ("crashes", "suspicion"),
    [
        ([], _S.NONE),
        ([TOGETHER], _S.SUSPECT),
        ([TOGETHER] * 9, _S.SUSPECT),
        ([ALONE], _S.SUSPECT),
        ([TOGETHER, ALONE], _S.CONFIRMED),
        ([TOGETHER, SILENT], _S.STRONG),
        ([TOGETHER, SILENT, TOGETHER], _S.STRONG),
        ([TOGETHER, SILENT, SILENT], _S.CONFIRMED),
        ([TOGETHER, SILENT, ALONE], _S.CONFIRMED),
        ([TOGETHER, ALONE, TOGETHER], _S.CONFIRMED),
        ([TOGETHER, NO_MEMORY, NO_MEMORY, NO_MEMORY], _S.SUSPECT),
    ],
)
def test_only_crashes_alone_confirm_and_one_without_a_message_is_not_enough(
    crashes: list[Crash], suspicion: Suspicion
) -> None:
    quarantine = _after(*crashes)
    assert quarantine.suspicion("a", 1.0) is suspicion
    if crashes:
        assert quarantine.cases["a"].crashes == len(crashes)


def test_answered_request_is_cleared() -> None:
    for crashes in ([TOGETHER], [TOGETHER, SILENT], [TOGETHER, ALONE]):
        quarantine = _after(*crashes).answered("a")
        assert quarantine.suspicion("a", 1.0) is _S.NONE
        assert quarantine.in_a_row == ()


def test_requests_of_one_batch_are_suspected_separately() -> None:
    quarantine = Quarantine()
    for key in "abc":
        quarantine = quarantine.crashed(key, TOGETHER, 0.0)
    quarantine = quarantine.crashed("b", ALONE, 1.0).answered("a")
    assert [quarantine.suspicion(key, 2.0) for key in "abc"] == [_S.NONE, _S.CONFIRMED, _S.SUSPECT]


@pytest.mark.parametrize(
    ("crashes", "seconds"), [([TOGETHER], SUSPECT_SECONDS), ([TOGETHER, ALONE], CONFIRMED_SECONDS)]
)
def test_cases_expire(crashes: list[Crash], seconds: float) -> None:
    quarantine = _after(*crashes)
    assert quarantine.suspicion("a", seconds - 0.1) is not _S.NONE
    assert quarantine.suspicion("a", seconds) is _S.NONE
    again = quarantine.crashed("a", TOGETHER, seconds)
    assert again.cases["a"].suspicion is _S.SUSPECT
    assert again.cases["a"].crashes == 1, "expired crashes are not counted"
    assert "a" not in quarantine.crashed("b", TOGETHER, seconds).cases


def test_crashes_of_a_model_that_never_answers_are_not_attributed_to_its_requests() -> None:
    quarantine = Quarantine()
    for number in range(MAX_IN_A_ROW):
        quarantine = _after(TOGETHER, ALONE, key=f"k{number}", quarantine=quarantine)
    assert all(quarantine.suspicion(f"k{number}", 1.0) is _S.CONFIRMED for number in range(MAX_IN_A_ROW))
    quarantine = _after(TOGETHER, ALONE, key="last", quarantine=quarantine)
    assert quarantine.doubted
    assert quarantine.suspicion("last", 1.0) is _S.SUSPECT
    assert all(quarantine.suspicion(f"k{number}", 1.0) is _S.NONE for number in range(MAX_IN_A_ROW))
    quarantine = quarantine.crashed("last", ALONE, 1.0)
    assert quarantine.suspicion("last", 1.0) is _S.SUSPECT, "no request is confirmed while the model is doubted"
    quarantine = quarantine.answered("other").crashed("last", ALONE, 2.0)
    assert quarantine.suspicion("last", 2.0) is _S.CONFIRMED, "the model has answered another request"


def test_oldest_case_is_dropped_over_the_limit() -> None:
    quarantine = Quarantine()
    for number in range(MAX_CASES + 5):
        quarantine = quarantine.crashed(f"k{number}", TOGETHER, float(number) / 1000)
    assert len(quarantine.cases) == MAX_CASES
    assert quarantine.suspicion("k4", 1.0) is _S.NONE
    assert quarantine.suspicion("k5", 1.0) is _S.SUSPECT


def test_suspicion_of_a_request_can_be_cleared_by_an_operator() -> None:
    assert _after(TOGETHER, ALONE).forget("a").suspicion("a", 1.0) is _S.NONE
    assert Quarantine().forget("a") == Quarantine()


def test_table_is_complete_and_no_crash_lowers_a_suspicion() -> None:
    order = list(Suspicion)
    assert set(TABLE) == {(suspicion, event) for suspicion in Suspicion for event in CrashKind}
    for (before, _), after in TABLE.items():
        assert order.index(after) >= order.index(before)
