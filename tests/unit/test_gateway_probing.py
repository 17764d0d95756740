"""When the inference service is probed, why, and what an answer proves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.breaker import probe_schedule
from gateway.breaker.permits import BreakerState
from gateway.breaker.probe_schedule import Finding, ProbeKind, Purpose, Step, Watch
from gateway.errors import UpstreamError
from gateway.errors import UpstreamKind as Kind
from inference.protocol import Code

CLOSED, HALF, OPEN = BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN
CONFIRM, RECOVER = Purpose.CONFIRM, Purpose.RECOVER
GOOD, BAD, UNKNOWN = Finding.GOOD, Finding.BAD, Finding.UNKNOWN


def test_failure_is_confirmed_every_quarter_second_until_an_answer() -> None:
    watch = probe_schedule.suspected(Watch(), 100.0)
    assert probe_schedule.due_at(watch, CLOSED) == 100.25
    watch = probe_schedule.probed(watch, CONFIRM, BAD, 100.3)
    assert probe_schedule.suspected(watch, 100.4) == watch, "one series at a time"
    assert probe_schedule.due_at(watch, CLOSED) == 100.55
    watch = probe_schedule.probed(watch, CONFIRM, GOOD, 100.6)
    assert probe_schedule.due_at(watch, CLOSED) is None
    assert probe_schedule.due_at(probe_schedule.suspected(watch, 101.0), CLOSED) == 101.25


def test_pace_of_recovery_probes_is_a_tenth_of_the_trouble() -> None:
    watch = probe_schedule.opened(probe_schedule.suspected(Watch(), 99.0), 100.0)
    assert probe_schedule.due_at(watch, OPEN) == 100.5
    for at, following in ((100.5, 101.0), (110.0, 111.0), (130.0, 133.0), (1000.0, 1004.0)):
        watch = probe_schedule.probed(watch, RECOVER, BAD, at)
        assert probe_schedule.due_at(watch, OPEN) == following
    again = probe_schedule.opened(watch, 1030.0)
    assert again.trouble_since == 100.0, "it was never closed in between"
    assert probe_schedule.due_at(again, OPEN) == 1030.5


def test_good_probe_waits_for_request_and_false_recovery_delays_next_probe() -> None:
    watch = probe_schedule.probed(probe_schedule.opened(Watch(), 0.0), RECOVER, GOOD, 0.5)
    assert probe_schedule.due_at(watch, OPEN) is None
    assert probe_schedule.due_at(watch, HALF) is None
    dues = []
    for opened in (10.0, 20.0, 30.0):
        watch = probe_schedule.opened(watch, opened)
        dues.append(probe_schedule.due_at(watch, OPEN))
        watch = probe_schedule.probed(watch, RECOVER, GOOD, opened + 1)
    assert dues == [14.0, 52.0, 286.0]
    fair = probe_schedule.opened(
        probe_schedule.probed(probe_schedule.opened(Watch(), 0.0), RECOVER, UNKNOWN, 0.5), 31.0
    )
    assert fair.false_recoveries == 0


def test_sign_of_recovery_skips_pace_but_not_minimum_period() -> None:
    watch = probe_schedule.probed(probe_schedule.opened(Watch(), 0.0), RECOVER, BAD, 40.0)
    assert probe_schedule.due_at(watch, OPEN) == 44.0
    assert probe_schedule.due_at(probe_schedule.hurried(watch), OPEN) == 0.5
    confirming = probe_schedule.probed(probe_schedule.suspected(Watch(), 0.0), CONFIRM, BAD, 1.0)
    assert probe_schedule.hurried(confirming) == confirming
    assert probe_schedule.due_at(replace(watch, trouble_since=None), OPEN) == 44.0


def test_service_is_probed_before_its_models() -> None:
    own = probe_schedule.suspected(Watch(), 100.0)
    memory = probe_schedule.opened(Watch(), 50.0, needs_memory=True)
    broken = probe_schedule.opened(Watch(), 49.0)
    watches = {"": own, "big": memory, "failed": broken, "unknown": broken}
    states = {"": CLOSED, "big": OPEN, "failed": OPEN}
    assert probe_schedule.choose(watches, states) == Step("", CONFIRM, ProbeKind.READY, 100.25)
    assert probe_schedule.choose(watches, {**states, "": OPEN}) == Step("", RECOVER, ProbeKind.READY, 0.5)
    answers = {**watches, "": replace(own, ended_early=True)}
    assert probe_schedule.choose(answers, {**states, "": OPEN}) == Step("failed", RECOVER, ProbeKind.TOKEN, 49.5)
    calm = {**watches, "": Watch()}
    assert probe_schedule.choose(calm, states) == Step("failed", RECOVER, ProbeKind.TOKEN, 49.5)
    del calm["failed"]
    assert probe_schedule.choose(calm, states) == Step("big", RECOVER, ProbeKind.PLAN, 50.5)
    assert probe_schedule.choose({"big": memory}, {"big": HALF}) is None
    assert probe_schedule.choose({}, {}) is None


def _error(kind: Kind, status: int | None = None, code: str | None = None) -> UpstreamError:
    return UpstreamError(kind, "message", status=status, code=code)


CASES = [
    ("ready", ProbeKind.READY, {"status": "ready"}, GOOD),
    ("refused", ProbeKind.READY, _error(Kind.CONNECT), BAD),
    ("silent", ProbeKind.READY, _error(Kind.TIMEOUT), BAD),
    ("draining", ProbeKind.READY, _error(Kind.STATUS, 503), BAD),
    ("a path that is not there", ProbeKind.READY, _error(Kind.STATUS, 404), GOOD),
    ("not JSON", ProbeKind.READY, _error(Kind.MALFORMED), GOOD),
    ("it would fit", ProbeKind.PLAN, {"result": "FULL"}, GOOD),
    ("it would not", ProbeKind.PLAN, {"result": "CANT_ACCOMMODATE"}, UNKNOWN),
    ("no plan", ProbeKind.PLAN, _error(Kind.STATUS, 500), UNKNOWN),
    ("cold", ProbeKind.TOKEN, {"headgate": {"probe": "cold"}}, GOOD),
    ("an answer", ProbeKind.TOKEN, {"choices": []}, GOOD),
    ("no chat model", ProbeKind.TOKEN, _error(Kind.STATUS, 400, Code.INVALID_REQUEST), GOOD),
    ("full", ProbeKind.TOKEN, _error(Kind.STATUS, 429, Code.QUEUE_FULL), GOOD),
    ("failed", ProbeKind.TOKEN, _error(Kind.STATUS, 503, Code.MODEL_FAILED), BAD),
    ("lost", ProbeKind.TOKEN, _error(Kind.STATUS, 503, Code.DEVICE_LOST), BAD),
    ("too slow", ProbeKind.TOKEN, _error(Kind.STATUS, 504, Code.DEADLINE_EXCEEDED), UNKNOWN),
    ("slower", ProbeKind.TOKEN, _error(Kind.TIMEOUT), UNKNOWN),
    ("gone", ProbeKind.TOKEN, _error(Kind.CONNECT), UNKNOWN),
]


@pytest.mark.parametrize(("kind", "answer", "finding"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_finding_of_each_answer(kind: ProbeKind, answer: UpstreamError | dict[str, str], finding: Finding) -> None:
    assert probe_schedule.judge_probe(CONFIRM, kind, answer) is finding


def test_error_answer_of_readiness_does_not_extend_open_period() -> None:
    assert probe_schedule.judge_probe(RECOVER, ProbeKind.READY, _error(Kind.STATUS, 502)) is UNKNOWN
    assert probe_schedule.judge_probe(RECOVER, ProbeKind.READY, _error(Kind.CONNECT)) is BAD
    assert probe_schedule.judge_probe(RECOVER, ProbeKind.READY, {}) is GOOD


def test_errors_that_show_the_service_down() -> None:
    assert probe_schedule.is_down(_error(Kind.CONNECT))
    assert probe_schedule.is_down(_error(Kind.STATUS, 502))
    assert not probe_schedule.is_down(_error(Kind.STATUS, 503, Code.MODEL_FAILED))
    assert not probe_schedule.is_down(_error(Kind.STATUS, 401))
