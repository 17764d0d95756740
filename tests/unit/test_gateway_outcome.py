"""The verdict on each end of an attempt."""

from __future__ import annotations

import pytest

from gateway.breaker.outcome import (
    NEXT,
    End,
    Failure,
    Ignore,
    Next,
    Observation,
    Reason,
    Scope,
    Success,
    Verdict,
    judge,
    needs_operator,
)
from gateway.errors import UpstreamKind as Kind
from inference.protocol import Code

P, M = Scope.PROVIDER, Scope.PAIR


def _local(code: Code, status: int | None = None, wait: float | None = None, kind: Kind = Kind.STATUS) -> Observation:
    return Observation(kind, status, code, wait, is_local=True)


CASES: list[tuple[str, Observation, Verdict]] = [
    ("a complete answer", Observation(End.FINISHED), Success()),
    ("the client disconnected", Observation(End.CLIENT_LEFT), Ignore(Reason.CLIENT_LEFT)),
    ("the caller's deadline", Observation(End.CALLER_DEADLINE), Ignore(Reason.CALLER_DEADLINE)),
    ("a spill", Observation(End.SPILLED), Ignore(Reason.SPILLED)),
    ("the budget is spent", Observation(End.OUT_OF_TIME), Ignore(Reason.OUT_OF_TIME)),
    ("the gateway stops", Observation(End.SHUTTING_DOWN), Ignore(Reason.SHUTTING_DOWN)),
    ("no connection", Observation(Kind.CONNECT), Failure(P)),
    ("a broken connection", Observation(Kind.READ), Failure(P, pair_too=True, broke=True)),
    ("a stall", Observation(Kind.TIMEOUT), Failure(M)),
    ("malformed", Observation(Kind.MALFORMED), Failure(M)),
    ("an empty answer", Observation(Kind.EMPTY), Failure(M)),
    ("500", Observation(Kind.STATUS, 500), Failure(P, pair_too=True)),
    ("502 with a date", Observation(Kind.STATUS, 502, None, 7.0), Failure(P, 7.0, opens=True, pair_too=True)),
    ("503 for a week", Observation(Kind.STATUS, 503, None, 6e5), Failure(P, 3600.0, opens=True, pair_too=True)),
    ("local stopping, with a date", _local(Code.SHUTTING_DOWN, 503, 1.0), Failure(P, 1.0)),
    ("529", Observation(Kind.STATUS, 529), Failure(P, pair_too=True)),
    ("an error frame without status", Observation(Kind.ERROR_FRAME), Failure(P, pair_too=True)),
    ("a redirect", Observation(Kind.STATUS, 302), Failure(P, pair_too=True)),
    ("429", Observation(Kind.STATUS, 429), Failure(M, reached=True)),
    ("429 with Retry-After", Observation(Kind.STATUS, 429, None, 9.0), Failure(M, 9.0, opens=True, reached=True)),
    ("429 for a week", Observation(Kind.STATUS, 429, None, 6e5), Failure(M, 3600.0, opens=True, reached=True)),
    ("429 in the past", Observation(Kind.STATUS, 429, None, -3.0), Failure(M, 0.0, reached=True)),
    ("503 for no time", Observation(Kind.STATUS, 503, None, 0.0), Failure(P, 0.0, pair_too=True)),
    (
        "a cloud that stops, with a date",
        Observation(Kind.STATUS, 503, Code.SHUTTING_DOWN, 7.0),
        Failure(P, 7.0, opens=True, pair_too=True),
    ),
    ("400", Observation(Kind.STATUS, 400), Ignore(Reason.BAD_REQUEST)),
    ("422", Observation(Kind.STATUS, 422), Ignore(Reason.BAD_REQUEST)),
    ("418", Observation(Kind.STATUS, 418), Ignore(Reason.BAD_REQUEST)),
    ("404", Observation(Kind.STATUS, 404), Ignore(Reason.NOT_FOUND)),
    ("401", Observation(Kind.STATUS, 401), Ignore(Reason.MISCONFIGURED)),
    ("402", Observation(Kind.STATUS, 402), Failure(M, opens=True, reached=True)),
    ("402 for no time", Observation(Kind.STATUS, 402, None, 0.0), Failure(M, opens=True, reached=True)),
    ("402 for a time", Observation(Kind.STATUS, 402, None, 7.0), Failure(M, 7.0, opens=True, reached=True)),
    ("402 for a length", Observation(Kind.STATUS, 402, Code.CONTEXT_LENGTH_EXCEEDED), Ignore(Reason.CONTEXT_LENGTH)),
    ("403", Observation(Kind.STATUS, 403), Ignore(Reason.MISCONFIGURED)),
    ("too long", Observation(Kind.STATUS, 400, Code.CONTEXT_LENGTH_EXCEEDED), Ignore(Reason.CONTEXT_LENGTH)),
    ("too large for it", Observation(Kind.STATUS, 413, "request_too_large"), Ignore(Reason.TOO_LARGE)),
    ("content filter", Observation(Kind.STATUS, 400, "content_filter"), Ignore(Reason.CONTENT_POLICY)),
    ("a parameter it lacks", Observation(Kind.STATUS, 400, "unsupported_parameter"), Ignore(Reason.UNSUPPORTED)),
    ("a value it lacks", Observation(Kind.STATUS, 400, "unsupported_value"), Ignore(Reason.UNSUPPORTED)),
    ("a list too long for it", Observation(Kind.STATUS, 400, "array_above_max_length"), Ignore(Reason.UNSUPPORTED)),
    ("local memory", _local(Code.MEMORY_LIMIT_EXCEEDED, 503), Failure(M, reached=True, needs_memory=True)),
    (
        "local memory, in a frame",
        _local(Code.MEMORY_LIMIT_EXCEEDED, kind=Kind.ERROR_FRAME),
        Failure(M, reached=True, needs_memory=True),
    ),
    ("a cloud that lacks memory", Observation(Kind.STATUS, 503, Code.MEMORY_LIMIT_EXCEEDED), Failure(P, pair_too=True)),
    ("local device lost", _local(Code.DEVICE_LOST, 503, 4.0), Failure(M, 4.0, reached=True, broke=True)),
    (
        "local load that the device refused",
        _local(Code.MEMORY_LIMIT_EXCEEDED, 503, 1.0)._replace(cause="oom_load"),
        Failure(M, 1.0, reached=True, broke=True, needs_memory=True),
    ),
    ("local model failed", _local(Code.MODEL_FAILED, 503), Failure(M, reached=True, broke=True)),
    ("local stopping", _local(Code.SHUTTING_DOWN, 503), Failure(P)),
    ("local loading", _local(Code.MODEL_LOADING, 503), Ignore(Reason.MODEL_LOADING)),
    ("local queue full", _local(Code.QUEUE_FULL, 429, 3.0), Ignore(Reason.QUEUE_FULL, skip_seconds=3.0)),
    (
        "local queue full for some", _local(Code.QUEUE_FULL, 429, 3.0)._replace(full_for=frozenset(("low",))),
        Ignore(Reason.QUEUE_FULL, 3.0, frozenset(("low",))),
    ),
    ("local queue full, no date", _local(Code.QUEUE_FULL, 429), Ignore(Reason.QUEUE_FULL)),
    ("local deadline", _local(Code.DEADLINE_EXCEEDED, 504), Ignore(Reason.DEADLINE)),
    ("poison", _local(Code.POISON_REQUEST, 422), Ignore(Reason.POISON)),
    ("a code of Headgate from a cloud", Observation(Kind.STATUS, 503, Code.MODEL_LOADING), Failure(P, pair_too=True)),
]  # fmt: skip


@pytest.mark.parametrize(("seen", "verdict"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_each_observation_has_its_verdict(seen: Observation, verdict: Verdict) -> None:
    assert judge(seen) == verdict


def test_every_reason_has_a_next_step() -> None:
    assert set(NEXT) == set(Reason)
    assert Ignore(Reason.BAD_REQUEST).next is Next.PASS_ON


def test_every_kind_and_end_has_a_verdict() -> None:
    for kind in (*Kind, *End):
        assert judge(Observation(kind)) is not None


@pytest.mark.parametrize(("status", "expected"), [(401, True), (402, True), (403, True), (404, False), (429, False)])
def test_rejected_credentials_or_payment_need_the_operator(status: int, expected: bool) -> None:
    seen = Observation(Kind.STATUS, status)
    assert needs_operator(judge(seen), seen) is expected
