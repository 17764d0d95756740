"""Deadlines and attempts of a request."""

from __future__ import annotations

import pytest

from gateway.routing.budget import Budget, Deadline, Due, Limits, Phase, next_deadline, unary_deadline

LIMITS = Limits(first_token=30, inter_token=15, total=300, load_wait=120, attempts=2)
BUDGET = Budget(LIMITS, started=1000.0)


@pytest.mark.parametrize(
    ("phase", "deadline"),
    [
        (Phase(1000, 1000), Deadline(1030, Due.SILENCE)),
        (Phase(1000, 1028), Deadline(1058, Due.SILENCE)),
        (Phase(1000, 1110, waiting=True), Deadline(1120, Due.LOAD_WAIT)),
        (Phase(1000, 1110, waiting=True, last=True), Deadline(1140, Due.SILENCE)),
        (Phase(1280, 1290), Deadline(1300, Due.TOTAL)),
        (Phase(1270, 1270), Deadline(1300, Due.SILENCE)),
        (Phase(1280, 1290, sent=True), Deadline(1320, Due.SILENCE)),
        (Phase(1000, 1400, answered=True), Deadline(1415, Due.SILENCE)),
        (Phase(1000, 1050, idle_since=1000), Deadline(1080, Due.SILENCE)),
        (Phase(1000, 1100, idle_since=1000), Deadline(1120, Due.SILENCE, kept_alive=True)),
        (Phase(1000, 1400, answered=True, idle_since=1395), Deadline(1415, Due.SILENCE)),
        (Phase(1000, 1400, answered=True, idle_since=1290), Deadline(1410, Due.SILENCE, kept_alive=True)),
    ],
    ids=[
        "silence",
        "progress restarts it",
        "a cold model spills",
        "the last candidate keeps waiting",
        "the total",
        "silence before the total",
        "no total after something was sent",
        "between tokens",
        "keep-alives restart it",
        "until load_wait",
        "keep-alives between tokens",
        "until a limit",
    ],
)
def test_next_deadline_depends_on_the_phase(phase: Phase, deadline: Deadline) -> None:
    assert next_deadline(BUDGET, phase) == deadline


def test_shorter_timeout_of_the_client_ends_the_wait_without_a_failure() -> None:
    """The client's timeout until the first byte does not apply to the rest of the answer."""
    budget = Budget(Limits(30, 15, 300, 120, 2, client_silence=5.0), started=0.0)
    assert budget.commit_by == 5.0
    assert next_deadline(budget, Phase(0, 0, last=True)) == Deadline(5.0, Due.CLIENT)
    assert next_deadline(budget, Phase(0, 4, answered=True)) == Deadline(19.0, Due.SILENCE)
    assert not budget.has_short_gap


def test_wait_for_admission_is_subtracted_from_the_clients_timeouts() -> None:
    budget = Budget(Limits(30, 15, 300, 120, 2, 5.0, 5.0), started=1000.0, waited=4.0)
    assert (budget.commit_by, budget.commit_due) == (1001.0, Due.CLIENT)
    assert next_deadline(budget, Phase(1000, 1000, answered=True, last=True)) == Deadline(1005.0, Due.CLIENT)
    assert Budget(LIMITS, started=1000.0, waited=4.0).commit_by == 1300.0


def test_timeout_of_the_client_applies_until_a_unary_answer_is_sent() -> None:
    """The client gets the first byte at the end. The gateway's total deadline does not apply after the first token."""
    budget = Budget(Limits(30, 15, 300, 120, 2, client_silence=5.0), started=0.0)
    assert next_deadline(budget, Phase(0, 4, answered=True, whole=True)) == Deadline(5.0, Due.CLIENT)
    impatient = Budget(Limits(30, 0.5, 300, 120, 2, client_silence=5.0), started=0.0)
    assert next_deadline(impatient, Phase(0, 4, answered=True, whole=True)) == Deadline(4.5, Due.SILENCE)
    assert next_deadline(BUDGET, Phase(1000, 1400, answered=True, whole=True)) == Deadline(1415, Due.SILENCE)


def test_unary_answer_ends_at_the_clients_longer_timeout() -> None:
    budget = Budget(Limits(30, 15, 300, 120, 2, 600.0, 600.0), started=0.0)
    assert (budget.commit_by, budget.commit_due) == (300.0, Due.TOTAL)
    assert budget.limit_text(300.0) == "the 300 s that a request has (deadlines.total)"
    assert budget.limit_text(600.0) == "the client's own timeout of 600 s"
    assert next_deadline(budget, Phase(0, 580, answered=True, whole=True)) == Deadline(595.0, Due.SILENCE)
    assert next_deadline(budget, Phase(0, 590, answered=True, whole=True)) == Deadline(600.0, Due.CLIENT)


def test_gap_in_an_answer_is_at_most_the_clients_read_timeout() -> None:
    """Half of it is kept for candidates that could resume. The end of the client's timeout is not a failure."""
    budget = Budget(Limits(30, 15, 300, 120, 4, 10.0, 10.0), started=0.0)
    assert budget.has_short_gap
    assert next_deadline(budget, Phase(0, 400, answered=True)) == Deadline(405.0, Due.LOAD_WAIT)
    assert next_deadline(budget, Phase(0, 400, answered=True, last=True)) == Deadline(410.0, Due.CLIENT)
    assert next_deadline(budget, Phase(0, 400, sent=True, last=True)) == Deadline(410.0, Due.CLIENT)
    patient = Budget(Limits(30, 15, 300, 120, 4, 30.0, 30.0), started=0.0)
    assert not patient.has_short_gap
    assert next_deadline(patient, Phase(0, 400, answered=True)) == Deadline(415.0, Due.SILENCE)


def test_resume_has_its_own_time() -> None:
    """As much as the first attempt. Until a stream is open, the client's timeout counts from the last byte it got."""
    limits = Limits(30, 15, 300, 120, 4, 10.0, 10.0)
    again = Budget(limits, 0.0, attempts=4).renewed(505.0, quiet_since=500.0)
    assert (again.commit_by, again.commit_due, again.attempts) == (805.0, Due.TOTAL, 4)
    opening = Phase(506, 506, opened=False)
    assert next_deadline(again, opening) == Deadline(508.0, Due.LOAD_WAIT)
    assert next_deadline(again, opening._replace(last=True)) == Deadline(510.0, Due.CLIENT)
    assert next_deadline(again, Phase(506, 507)) == Deadline(512.0, Due.LOAD_WAIT)
    assert next_deadline(again, Phase(506, 507, last=True)) == Deadline(517.0, Due.CLIENT)
    assert (again.resume_seconds_left(506.0), again.has_time(509.0), again.has_time(510.0)) == (4.0, True, False)
    patient = Budget(LIMITS, 0.0).renewed(500.0, quiet_since=485.0)
    assert next_deadline(patient, Phase(500, 510)) == Deadline(540.0, Due.SILENCE)
    assert patient.has_time(799.0) and not patient.has_time(800.0)


def test_short_timeout_of_the_client_is_shared_between_candidates() -> None:
    budget = Budget(Limits(30, 15, 300, 120, 2, client_silence=20.0), started=0.0)
    assert next_deadline(budget, Phase(0, 0)) == Deadline(10.0, Due.LOAD_WAIT)
    assert next_deadline(budget, Phase(0, 9, waiting=True)) == Deadline(10.0, Due.LOAD_WAIT)
    assert next_deadline(budget, Phase(0, 12)) == Deadline(20.0, Due.CLIENT), "a prefill makes progress"
    assert next_deadline(budget, Phase(10, 10)) == Deadline(15.0, Due.LOAD_WAIT)


def test_keep_alives_do_not_extend_the_share_of_a_candidate() -> None:
    """The next candidate keeps half of the time."""
    budget = Budget(Limits(30, 15, 300, 120, 2, client_silence=20.0), started=0.0)
    assert next_deadline(budget, Phase(0, 9, idle_since=0)) == Deadline(10.0, Due.LOAD_WAIT)
    assert next_deadline(budget, Phase(0, 9, idle_since=0, last=True)) == Deadline(20.0, Due.CLIENT)


def test_keep_alives_do_not_shorten_the_inter_token_deadline() -> None:
    budget = Budget(Limits(first_token=1, inter_token=15, total=300, load_wait=120, attempts=2), started=0.0)
    phase = Phase(0, 10, answered=True, idle_since=9)
    assert next_deadline(budget, phase) == Deadline(24.0, Due.SILENCE, kept_alive=True)


def test_budget_limits_attempts_and_time() -> None:
    assert BUDGET.allows_attempt(1000.0)
    assert not BUDGET.allows_attempt(1300.0)
    assert BUDGET.spend().allows_attempt(1000.0)
    assert not BUDGET.spend().spend().allows_attempt(1000.0)
    assert BUDGET.spend().spend().has_time(1299.0)
    assert not BUDGET.has_time(1300.0)


def test_silence_of_a_local_unary_answer_is_no_failure() -> None:
    assert unary_deadline(BUDGET, 1000.0, is_local=True, last=False) == Deadline(1120.0, Due.LOAD_WAIT)
    assert unary_deadline(BUDGET, 1000.0, is_local=True, last=True) == Deadline(1300.0, Due.TOTAL)
    assert unary_deadline(BUDGET, 1000.0, is_local=False, last=False) == Deadline(1030.0, Due.SILENCE)
    assert unary_deadline(BUDGET, 1290.0, is_local=False, last=True) == Deadline(1300.0, Due.TOTAL)
    hurried = Budget(Limits(30, 15, 300, 120, 2, client_silence=20.0), started=0.0)
    assert unary_deadline(hurried, 0.0, is_local=True, last=False) == Deadline(10.0, Due.LOAD_WAIT)
    assert unary_deadline(hurried, 10.0, is_local=True, last=True) == Deadline(20.0, Due.CLIENT)
