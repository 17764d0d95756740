"""What the end of an attempt means for its request: the next candidate, or the provider's own 4xx."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.apis.openai.frames import Endpoint
from gateway.apis.openai.generation_request import parse
from gateway.breaker.outcome import End, Failure, Ignore, Observation, Reason, Scope, Success, Verdict
from gateway.errors import PassedOnError, UpstreamError, UpstreamKind
from gateway.routing.candidate_outcomes import (
    CLOCK_TOLERANCE_SECONDS,
    CandidateOutcome,
    CandidateOutcomes,
    failed_attempt,
    outcome_name,
    ran_out_of_time,
)
from gateway.routing.chain import Candidate, Drop, Dropped
from gateway.routing.explain_record import Record
from inference.protocol import Code

LOCAL = Candidate("local", "a", 0)
SMALL = Candidate("local", "b", 1)
CLOUD = Candidate("openai", "c", 2)
CHAT = parse(Endpoint.CHAT, b'{"model":"a","messages":[{"role":"user","content":"x"}]}')
COMPLETION = parse(Endpoint.COMPLETIONS, b'{"model":"a","prompt":"x"}')
REFUSED = UpstreamError(UpstreamKind.STATUS, "no", status=422, retry_after=7.0)
SEEN = Observation(UpstreamKind.STATUS, 422)


def _end(candidate: Candidate, verdict: Verdict, error: Exception = REFUSED, **more: Any) -> Any:
    arguments = {"larger_context_left": False, "request": CHAT, **more}
    request = arguments.pop("request")
    return failed_attempt(request, candidate, verdict, SEEN, "it failed", error, **arguments)


@pytest.mark.parametrize(
    ("verdict", "observation", "name"),
    [
        (Success(), Observation(End.FINISHED), "success"),
        (Ignore(Reason.SPILLED), Observation(End.SPILLED), "spilled"),
        (Failure(Scope.PAIR), Observation(UpstreamKind.STATUS, 503, Code.MODEL_FAILED, is_local=True), "model_failed"),
        (Failure(Scope.PAIR), Observation(UpstreamKind.STATUS, 503, "made_up", is_local=True), "error"),
        (Failure(Scope.PAIR), Observation(UpstreamKind.STATUS, 503, "made_up"), "status_503"),
        (Failure(Scope.PROVIDER), Observation(UpstreamKind.CONNECT), "connect"),
    ],
)
def test_outcome_names_are_bounded(verdict: Verdict, observation: Observation, name: str) -> None:
    assert outcome_name(verdict, observation) == name


def test_a_failure_keeps_the_providers_retry_after() -> None:
    outcome = _end(CLOUD, Failure(Scope.PAIR, retry_after=9.0))
    assert outcome == CandidateOutcome(CLOUD, "status_422", "it failed", 9.0)


def test_a_full_queue_is_retried_when_the_local_service_says() -> None:
    assert _end(LOCAL, Ignore(Reason.QUEUE_FULL)).retry_in == 7.0
    assert _end(LOCAL, Ignore(Reason.QUEUE_FULL, skip_seconds=3.0)).retry_in == 3.0
    assert _end(CLOUD, Ignore(Reason.QUEUE_FULL)).retry_in is None


def test_an_ignored_end_without_an_upstream_error_tries_the_next_candidate() -> None:
    outcome = _end(LOCAL, Ignore(Reason.SPILLED), RuntimeError())
    assert outcome == CandidateOutcome(LOCAL, "spilled", "it failed")


@pytest.mark.parametrize(
    ("reason", "request_", "error", "status", "param"),
    [
        (Reason.BAD_REQUEST, CHAT, REFUSED, 422, None),
        (Reason.CONTEXT_LENGTH, CHAT, REFUSED, 422, "messages"),
        (Reason.CONTEXT_LENGTH, COMPLETION, REFUSED, 422, "prompt"),
        (Reason.BAD_REQUEST, CHAT, UpstreamError(UpstreamKind.STATUS, "no", status=400, param="n"), 400, "n"),
        (Reason.BAD_REQUEST, CHAT, UpstreamError(UpstreamKind.ERROR_FRAME, "no"), 400, None),
        (Reason.CONTENT_POLICY, CHAT, UpstreamError(UpstreamKind.STATUS, "no", status=503), 400, None),
    ],
)
def test_a_fault_of_the_request_ends_it_with_the_providers_4xx(
    reason: Reason, request_: Any, error: UpstreamError, status: int, param: str | None
) -> None:
    ended = _end(LOCAL, Ignore(reason), error, request=request_)
    assert isinstance(ended, PassedOnError)
    assert (ended.status, ended.param) == (status, param)


def test_an_unknown_model_that_the_client_named_is_a_fault_of_the_request() -> None:
    ended = _end(Candidate("openai", "c", 0, named=False), Ignore(Reason.NOT_FOUND))
    assert isinstance(ended, PassedOnError)
    assert ended.param == "model"
    assert isinstance(_end(CLOUD, Ignore(Reason.NOT_FOUND)), CandidateOutcome)


def test_a_prompt_too_long_for_one_candidate_is_tried_at_a_larger_one() -> None:
    error = UpstreamError(
        UpstreamKind.STATUS, "long", status=400, param="messages", details={"context_length": 8, "prompt_tokens": 9}
    )
    for candidate, is_larger_left in ((LOCAL, True), (SMALL, False)):
        outcome = _end(candidate, Ignore(Reason.CONTEXT_LENGTH), error, larger_context_left=is_larger_left)
        assert isinstance(outcome, CandidateOutcome)
        assert (outcome.param, outcome.details) == ("messages", {"context_length": 8, "prompt_tokens": 9})


def test_an_unsupported_parameter_is_kept_for_the_case_that_no_candidate_supports_it() -> None:
    outcome = _end(LOCAL, Ignore(Reason.UNSUPPORTED))
    assert isinstance(outcome.upstream_error, PassedOnError)


def test_the_last_candidate_ends_the_request_when_its_deadline_passed() -> None:
    assert ran_out_of_time(Ignore(Reason.DEADLINE), 20.0)
    assert ran_out_of_time(Ignore(Reason.MODEL_LOADING), CLOCK_TOLERANCE_SECONDS / 2)
    assert not ran_out_of_time(Ignore(Reason.MODEL_LOADING), CLOCK_TOLERANCE_SECONDS * 2)
    assert not ran_out_of_time(Failure(Scope.PAIR), 0.0)


def test_a_deferral_is_forgotten_when_the_attempt_begins() -> None:
    record = Record("id", 0.0, "/")
    outcomes = CandidateOutcomes(record)
    outcomes.defer(Dropped(LOCAL, Drop.TOO_SLOW, "slow", 3.0))
    outcomes.drop(Dropped(CLOUD, Drop.POLICY, "local only"))
    assert outcomes.is_deferred(LOCAL)
    assert outcomes.first.candidate == LOCAL
    outcomes.start(LOCAL)
    assert outcomes.is_deferred(LOCAL)
    outcomes.fail(CandidateOutcome(SMALL, "connect", "refused", 2.0))
    outcomes.start(SMALL)
    waits = outcomes.in_chain_order(lambda outcome: 5.0 if outcome.candidate == SMALL else 0.0)
    assert [(outcome.candidate, outcome.retry_in) for outcome in waits] == [(SMALL, 5.0), (CLOUD, 0.0)]
    assert record.dropped == {"local/a": "predicted_too_slow: slow", "openai/c": "policy: local only"}
