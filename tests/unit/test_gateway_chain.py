"""Route lookup, selection of candidates, outcomes of attempts, and the error without an answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from gateway.apis.openai.frames import Endpoint
from gateway.apis.openai.generation_request import InferenceRequest, parse
from gateway.breaker.outcome import End, Failure, Ignore, Observation, Reason, Scope, Success, Verdict
from gateway.errors import GatewayError, PassedOnError, RequestError, UpstreamError, UpstreamKind
from gateway.providers.local.candidate_facts import Facts, LikelyFailure
from gateway.routing.candidate_outcomes import (
    CLOCK_TOLERANCE_SECONDS,
    CandidateOutcome,
    CandidateOutcomes,
    failed_attempt,
    no_answer,
    outcome_name,
    ran_out_of_time,
)
from gateway.routing.chain import (
    MAX_NODES,
    Candidate,
    Drop,
    Dropped,
    Requirements,
    RouteMatch,
    expand,
    find_route,
    passes_on,
    select,
)
from gateway.routing.explain_record import Record
from inference.protocol import Code, Tier
from tests.rigs.typed_bodies import unsupported_by_anthropic as unsupported_params

ROUTES = ("demo", "big/model", "*")


def test_routes_are_found_by_name_alias_or_star() -> None:
    aliases = {"small": "demo", "other": "thing"}
    assert find_route("demo", ROUTES, aliases) == RouteMatch("demo", "demo")
    assert find_route("big/model", ROUTES, aliases) == RouteMatch("big/model", "big/model")
    assert find_route("small", ROUTES, aliases) == RouteMatch("demo", "demo")
    assert find_route("other", ROUTES, aliases) == RouteMatch("*", "thing")
    assert find_route("*", ROUTES, aliases) == RouteMatch("*", "*")
    assert find_route("nope", ("demo",), aliases) is None


def test_entries_expand_to_candidates_without_repetitions() -> None:
    found = expand(("local/*", "local/demo", "openai/org/big", "local/demo"), "demo", {})
    assert [candidate.name for candidate in found] == ["local/demo", "openai/org/big"]
    assert [candidate.tier for candidate in found] == [Tier.LOCAL, Tier.CLOUD]
    assert not found[0].named
    assert expand(("openai/x", "local/y"), "z", {})[1].tier is Tier.LOCAL_FALLBACK


def test_aliases_of_local_models_become_their_ids() -> None:
    """The same name at a cloud is another model."""
    aliases = {"nick": "demo"}
    found = expand(("local/nick", "openai/nick", "local/demo", "local/*"), "other", aliases)
    assert [candidate.name for candidate in found] == ["local/demo", "openai/nick", "local/other"]
    assert [(candidate.position, candidate.named) for candidate in found] == [(0, True), (1, True), (2, False)]
    assert [candidate.name for candidate in expand(("local/*",), "nick", aliases)] == ["local/demo"]
    assert expand(("local/demo",), "x", aliases) is expand(("local/demo",), "x", {}), "results are cached"


def test_smaller_is_a_rule_in_a_chain_and_a_name_in_a_request() -> None:
    """Also where a model or an alias has that name."""
    found = expand(("local/*", "local/smaller", "openai/smaller", "local/smaller"), "smaller", {"smaller": "demo"})
    assert [(name.name, name.position, name.is_rule) for name in found] == [
        ("local/demo", 0, False), ("local/smaller", 1, True), ("openai/smaller", 2, False),
    ]  # fmt: skip
    assert [name.is_rule for name in expand(("local/*", "local/smaller"), "smaller", {})] == [False, True]


def test_rule_without_any_model_is_dropped() -> None:
    (rule,) = expand(("local/smaller",), "x", {})
    (dropped,) = select([rule], lambda _: Facts(capabilities=()), VISION).dropped
    assert (dropped.drop, dropped.message) == (Drop.CAPABILITY, "no other local model can do vision")


LOCAL, MINI, CLOUD = Candidate("local", "a", 0), Candidate("local", "b", 1), Candidate("openai", "c", 2)
VISION = Requirements(capabilities=frozenset({"vision"}))


@pytest.mark.parametrize(
    ("candidate", "facts", "wants", "drop"),
    [
        (CLOUD, Facts(), Requirements(cloud_allowed=False), Drop.POLICY),
        (LOCAL, Facts(), Requirements(cloud_allowed=False), None),
        (CLOUD, Facts(present=False), Requirements(), Drop.ABSENT),
        (LOCAL, Facts(capabilities=frozenset({"chat"})), VISION, Drop.CAPABILITY),
        (LOCAL, Facts(capabilities=frozenset({"chat", "vision"})), VISION, None),
        (LOCAL, Facts(capabilities=None), VISION, None),
        (CLOUD, Facts(unsupported={"seed": "no seed"}), Requirements(), Drop.CAPABILITY),
        (LOCAL, Facts(context_length=100), Requirements(), None),
        (LOCAL, Facts(same_vectors=False), Requirements(), Drop.VECTORS),
        (MINI, Facts(foreign_ids="logit_bias"), Requirements(), Drop.VOCABULARY),
        (LOCAL, Facts(breaker_open_for=12.0), Requirements(), Drop.BREAKER),
        (LOCAL, Facts(breaker_open_for=0.2), Requirements(), Drop.BREAKER),
        (LOCAL, Facts(queue_full_for=3.0), Requirements(), Drop.HELD),
        (LOCAL, Facts(fits=False, fit_reason="lacks 3 MiB"), Requirements(), Drop.NO_FIT),
        (LOCAL, Facts(fits=False), Requirements(), Drop.NO_FIT),
        (LOCAL, Facts(fits=False), Requirements(fit_check=False), None),
        (LOCAL, Facts(fits=True), Requirements(), None),
        (LOCAL, Facts(fits=None), Requirements(), None),
        (CLOUD, Facts(fits=False), Requirements(), None),
    ],
)
def test_facts_drop_or_keep_a_candidate(
    candidate: Candidate, facts: Facts, wants: Requirements, drop: Drop | None
) -> None:
    chain = select([candidate], lambda _: facts, wants)
    assert [dropped.drop for dropped in chain.dropped] == ([] if drop is None else [drop])
    assert chain.kept == (() if drop else (candidate,))


def test_order_is_kept_and_drops_have_reasons() -> None:
    known: Mapping[str, Facts] = {
        "local/a": Facts(breaker_open_for=5.0),
        "local/b": Facts(),
        "openai/c": Facts(present=False),
    }
    chain = select([LOCAL, MINI, CLOUD], lambda candidate: known[candidate.name], Requirements())
    assert chain.kept == (MINI,)
    dropped = [(LOCAL, Drop.BREAKER), (CLOUD, Drop.ABSENT)]
    assert [(one.candidate, one.drop) for one in chain.dropped] == dropped
    assert chain.dropped[0].retry_in == 5.0


def test_client_gets_the_4xx_only_when_it_is_at_fault() -> None:
    assert passes_on(Ignore(Reason.CONTEXT_LENGTH), LOCAL)
    assert not passes_on(Ignore(Reason.CONTEXT_LENGTH), MINI)
    assert not passes_on(Ignore(Reason.CONTEXT_LENGTH), LOCAL, larger_context_left=True)
    assert not passes_on(Ignore(Reason.NOT_FOUND), LOCAL)
    assert passes_on(Ignore(Reason.NOT_FOUND), Candidate("local", "x", 0, named=False))
    assert passes_on(Ignore(Reason.BAD_REQUEST), MINI)
    assert not passes_on(Ignore(Reason.QUEUE_FULL), LOCAL)


REQUEST = parse(Endpoint.CHAT, b'{"model":"a","messages":[{"role":"user","content":"x"}]}')
COMPLETION = parse(Endpoint.COMPLETIONS, b'{"model":"a","prompt":"x"}')


def _none(*outcomes: CandidateOutcome, passed_limit: str | None = None) -> GatewayError:
    return no_answer(REQUEST, outcomes, passed_limit)


def test_error_names_all_candidates_and_the_earliest_retry() -> None:
    error = _none(
        CandidateOutcome(LOCAL, "breaker_open", "breaker open", 12.2, Drop.BREAKER),
        CandidateOutcome(MINI, "status_500", "500: broken", 40.0),
        CandidateOutcome(CLOUD, "provider_absent", "no key", None, Drop.ABSENT),
    )
    found = (error.status, error.code, error.retry_after, error.retryable)
    assert found == (503, Code.NO_TIER_AVAILABLE, 13.0, True)
    assert all(name in error.message for name in ("local/a: breaker open", "local/b: 500", "openai/c: no key"))


def test_retry_after_has_a_default_for_each_reason() -> None:
    unknown = CandidateOutcome(LOCAL, "connect", "refused"), CandidateOutcome(MINI, "x", "y", 9.0)
    assert _none(*unknown).retry_after == 1.0
    assert _none(CandidateOutcome(LOCAL, "cannot_fit", "no room", None, Drop.NO_FIT)).retry_after == 2.0
    assert _none().retry_after is None


def test_retry_after_is_the_wait_for_a_lost_device() -> None:
    facts = Facts(fits=False, fit_reason="gpu-0 is lost (its connections were cut)", fit_in=6.4)
    (dropped,) = select([LOCAL], lambda _: facts, Requirements()).dropped
    assert (dropped.retry_in, dropped.message) == (6.4, "cannot fit now: gpu-0 is lost (its connections were cut)")
    outcome = CandidateOutcome(LOCAL, "cannot_fit", dropped.message, dropped.retry_in, Drop.NO_FIT)
    assert (_none(outcome).retry_after, "gpu-0 is lost" in _none(outcome).message) == (7.0, True)


def test_error_with_only_permanent_reasons_is_not_retryable() -> None:
    error = _none(CandidateOutcome(CLOUD, "policy", "local only", None, Drop.POLICY))
    assert (error.status, error.retry_after, error.retryable) == (503, None, False)


def test_timeout_gets_status_504_unless_no_candidate_could_ever_answer() -> None:
    error = _none(CandidateOutcome(LOCAL, "timeout", "silent"), passed_limit="the client's own timeout of 2 s")
    assert (error.status, error.code, error.retryable) == (504, Code.DEADLINE_EXCEEDED, False)
    assert error.message == "no tier answered within the client's own timeout of 2 s: local/a: silent"
    never = _none(CandidateOutcome(CLOUD, "policy", "local only", None, Drop.POLICY), passed_limit="2 s")
    assert never.status == 503


def test_capability_that_all_candidates_lack_gets_status_400() -> None:
    missing = _none(CandidateOutcome(LOCAL, "capability_missing", "cannot do vision", None, Drop.CAPABILITY))
    assert isinstance(missing, RequestError)
    assert (missing.status, missing.param) == (400, "messages")
    error = no_answer(COMPLETION, [CandidateOutcome(LOCAL, "capability_missing", "no", None, Drop.CAPABILITY)], None)
    assert error.param == "model"
    short = _none(CandidateOutcome(LOCAL, "context_too_small", "9 > 8", None, Drop.CONTEXT))
    assert short.code == Code.CONTEXT_LENGTH_EXCEEDED
    gone = _none(*(CandidateOutcome(candidate, "model_not_found", "no such") for candidate in (LOCAL, MINI)))
    assert (gone.status, gone.param) == (404, "model")


def test_each_unsupported_parameter_has_its_own_message() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    body = {"messages": messages, "response_format": {"type": "json_object"}, "n": 2}
    unsupported = unsupported_params(body, "claude-opus-5")
    assert list(unsupported) == ["n", "response_format", "messages"]
    dropped = select([CLOUD], lambda _: Facts(unsupported=unsupported), Requirements()).dropped[0]
    assert "it returns one choice per request" in dropped.message
    assert "use json_schema" in dropped.message
    assert "must have the role user or tool" in dropped.message


def test_unsupported_parameter_is_named_in_the_error() -> None:
    facts = Facts(unsupported={"seed": "no seed", "n": "one choice"})
    dropped = select([CLOUD], lambda _: facts, Requirements()).dropped[0]
    assert (dropped.param, dropped.message) == ("seed", "no seed; one choice")
    error = _none(
        CandidateOutcome(LOCAL, "policy", "no", None, Drop.POLICY),
        CandidateOutcome(CLOUD, "capability", dropped.message, None, Drop.CAPABILITY, param="seed"),
    )
    assert (error.status, error.code, error.param) == (400, Code.UNSUPPORTED_PARAMETER, "seed")
    later = _none(
        CandidateOutcome(LOCAL, "breaker_open", "open", 9.0, Drop.BREAKER),
        CandidateOutcome(CLOUD, "capability", dropped.message, None, Drop.CAPABILITY, param="seed"),
    )
    assert (later.status, later.retry_after) == (503, 9.0), "the local candidate may support it later"


def test_parameter_that_no_candidate_supports_gets_the_first_providers_error() -> None:
    upstream = UpstreamError(
        UpstreamKind.STATUS, "no tools here", status=400, code="unsupported_parameter", param="tools"
    )
    own = PassedOnError(upstream, 400, "tools")
    error = _none(
        CandidateOutcome(LOCAL, "unsupported_parameter", "no tools", upstream_error=own),
        CandidateOutcome(CLOUD, "policy", "no", None, Drop.POLICY),
    )
    assert error is own
    assert error.body()["error"]["code"] == "unsupported_parameter"
    unknown = CandidateOutcome(LOCAL, "unsupported_parameter", "no", upstream_error=own)
    assert _none(unknown, CandidateOutcome(MINI, "connect", "no")).status == 503
    assert CandidateOutcome(LOCAL, "x", "y", 3.0).with_wait(2.0).retry_in == 3.0


@pytest.mark.parametrize(
    ("request_", "details", "sentence"),
    [
        (REQUEST, {"context_length": 8, "prompt_tokens": 9}, "is 8 tokens, but the messages take 9 tokens ("),
        (COMPLETION, {"context_length": 8, "prompt_tokens": 8}, "is 8 tokens, but the prompt takes 8 tokens ("),
        (REQUEST, {"context_length": 8, "prompt_tokens": 2, "max_tokens": 7}, "is 8 tokens, but max_tokens is 7 ("),
        (REQUEST, None, "The request exceeds the context window of every model ("),
    ],
)
def test_request_too_long_for_all_candidates_gets_status_400_and_the_numbers(
    request_: InferenceRequest, details: Mapping[str, Any] | None, sentence: str
) -> None:
    """The largest context is named."""
    small = CandidateOutcome(MINI, "context", "it is small", None, Drop.CONTEXT, details={"context_length": 4})
    outcomes = [CandidateOutcome(LOCAL, "context", "it is too long", None, Drop.CONTEXT, details=details)]
    error = no_answer(request_, [small, *outcomes] if details else outcomes, None)
    assert (error.status, error.code) == (400, Code.CONTEXT_LENGTH_EXCEEDED)
    assert sentence in error.message
    assert "local/a: it is too long" in error.message


def test_full_queues_of_all_candidates_give_status_429() -> None:
    error = _none(
        CandidateOutcome(LOCAL, str(Code.QUEUE_FULL), "too many wait", 3.0),
        CandidateOutcome(MINI, "held", "held back", 5.0, Drop.HELD),
        CandidateOutcome(CLOUD, "policy", "no", None, Drop.POLICY),
    )
    assert (error.status, error.code, error.retry_after) == (429, Code.QUEUE_FULL, 3.0)


def test_candidates_that_will_probably_fail_are_tried_last() -> None:
    ill = Facts(likely_failure=LikelyFailure("the model failed: it aborted", 8.0))
    known = {"local/demo": ill, "local/demo-mini": Facts(), "cloud/big": Facts()}
    chain = select(expand(tuple(known), "demo", {}), lambda candidate: known[candidate.name], Requirements())
    assert [candidate.name for candidate in chain.kept] == ["local/demo-mini", "cloud/big", "local/demo"]
    assert chain.dropped == ()
    (deferred,) = chain.deferred
    assert (deferred.drop, deferred.message, deferred.retry_in) == (Drop.UNHEALTHY, "the model failed: it aborted", 8.0)


def test_order_is_kept_if_all_candidates_will_probably_fail() -> None:
    known = {
        "local/demo": Facts(likely_failure=LikelyFailure("x")),
        "local/demo-mini": Facts(likely_failure=LikelyFailure("y")),
    }
    chain = select(expand(tuple(known), "demo", {}), lambda candidate: known[candidate.name], Requirements())
    assert [candidate.name for candidate in chain.kept] == list(known)
    assert chain.deferred == ()


REJECTED = UpstreamError(UpstreamKind.STATUS, "no", status=422, retry_after=7.0)
SEEN = Observation(UpstreamKind.STATUS, 422)


def _end(candidate: Candidate, verdict: Verdict, error: Exception = REJECTED, **more: Any) -> Any:
    arguments = {"larger_context_left": False, "request": REQUEST, **more}
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
def test_outcome_name_is_one_of_a_fixed_set(verdict: Verdict, observation: Observation, name: str) -> None:
    assert outcome_name(verdict, observation) == name


def test_failure_keeps_the_providers_retry_after() -> None:
    outcome = _end(CLOUD, Failure(Scope.PAIR, retry_after=9.0))
    assert outcome == CandidateOutcome(CLOUD, "status_422", "it failed", 9.0)


def test_full_queue_is_retried_after_the_time_of_the_local_service() -> None:
    assert _end(LOCAL, Ignore(Reason.QUEUE_FULL)).retry_in == 7.0
    assert _end(LOCAL, Ignore(Reason.QUEUE_FULL, skip_seconds=3.0)).retry_in == 3.0
    assert _end(CLOUD, Ignore(Reason.QUEUE_FULL)).retry_in is None


def test_ignored_end_without_an_upstream_error_continues_with_the_next_candidate() -> None:
    outcome = _end(LOCAL, Ignore(Reason.SPILLED), RuntimeError())
    assert outcome == CandidateOutcome(LOCAL, "spilled", "it failed")


@pytest.mark.parametrize(
    ("reason", "request_", "error", "status", "param"),
    [
        (Reason.BAD_REQUEST, REQUEST, REJECTED, 422, None),
        (Reason.CONTEXT_LENGTH, REQUEST, REJECTED, 422, "messages"),
        (Reason.CONTEXT_LENGTH, COMPLETION, REJECTED, 422, "prompt"),
        (Reason.BAD_REQUEST, REQUEST, UpstreamError(UpstreamKind.STATUS, "no", status=400, param="n"), 400, "n"),
        (Reason.BAD_REQUEST, REQUEST, UpstreamError(UpstreamKind.ERROR_FRAME, "no"), 400, None),
        (Reason.CONTENT_POLICY, REQUEST, UpstreamError(UpstreamKind.STATUS, "no", status=503), 400, None),
    ],
)
def test_error_of_the_request_ends_it_with_the_providers_4xx(
    reason: Reason, request_: Any, error: UpstreamError, status: int, param: str | None
) -> None:
    ended = _end(LOCAL, Ignore(reason), error, request=request_)
    assert isinstance(ended, PassedOnError)
    assert (ended.status, ended.param) == (status, param)


def test_unknown_model_named_by_the_client_is_an_error_of_the_request() -> None:
    ended = _end(Candidate("openai", "c", 0, named=False), Ignore(Reason.NOT_FOUND))
    assert isinstance(ended, PassedOnError)
    assert ended.param == "model"
    assert isinstance(_end(CLOUD, Ignore(Reason.NOT_FOUND)), CandidateOutcome)


def test_prompt_too_long_for_one_candidate_is_sent_to_a_larger_one() -> None:
    error = UpstreamError(
        UpstreamKind.STATUS, "long", status=400, param="messages", details={"context_length": 8, "prompt_tokens": 9}
    )
    for candidate, is_larger_left in ((LOCAL, True), (MINI, False)):
        outcome = _end(candidate, Ignore(Reason.CONTEXT_LENGTH), error, larger_context_left=is_larger_left)
        assert isinstance(outcome, CandidateOutcome)
        assert (outcome.param, outcome.details) == ("messages", {"context_length": 8, "prompt_tokens": 9})


def test_error_of_an_unsupported_parameter_is_kept() -> None:
    outcome = _end(LOCAL, Ignore(Reason.UNSUPPORTED))
    assert isinstance(outcome.upstream_error, PassedOnError)


def test_passed_deadline_ends_the_request() -> None:
    assert ran_out_of_time(Ignore(Reason.DEADLINE), 20.0)
    assert ran_out_of_time(Ignore(Reason.MODEL_LOADING), CLOCK_TOLERANCE_SECONDS / 2)
    assert not ran_out_of_time(Ignore(Reason.MODEL_LOADING), CLOCK_TOLERANCE_SECONDS * 2)
    assert not ran_out_of_time(Failure(Scope.PAIR), 0.0)


def test_started_candidate_stays_deferred_but_no_longer_counts_as_dropped() -> None:
    record = Record("id", 0.0, "/")
    outcomes = CandidateOutcomes(record)
    outcomes.defer(Dropped(LOCAL, Drop.TOO_SLOW, "slow", 3.0))
    outcomes.drop(Dropped(CLOUD, Drop.POLICY, "local only"))
    assert outcomes.is_deferred(LOCAL)
    assert outcomes.first.candidate == LOCAL
    outcomes.start(LOCAL)
    assert not outcomes.has_failed(LOCAL)
    assert outcomes.first.candidate == CLOUD
    assert outcomes.is_deferred(LOCAL)
    outcomes.fail(CandidateOutcome(MINI, "connect", "refused", 2.0))
    outcomes.start(MINI)
    waits = outcomes.in_chain_order(lambda outcome: 5.0 if outcome.candidate == MINI else 0.0)
    assert [(outcome.candidate, outcome.retry_in) for outcome in waits] == [(MINI, 5.0), (CLOUD, 0.0)]
    assert record.dropped == {"local/a": "predicted_too_slow: slow", "openai/c": "policy: local only"}
    outcomes.defer(Dropped(MINI, Drop.TOO_SLOW, "slow", 3.0))
    outcomes.start(MINI)
    assert outcomes.has_failed(MINI), "a failure before the deferral still counts"


def test_candidate_on_a_node_is_the_same_candidate() -> None:
    candidate = Candidate("local", "demo", 1)
    first = candidate.on("n0")
    assert (first, first.node, first.provider_key, first.place) == (candidate, "n0", "local@n0", "local/demo on n0")
    assert candidate.on("n0") is first
    assert first.on("n1").on("n0") is first, "requests that go from node to node make no further candidates"
    assert (candidate.provider_key, candidate.place) == ("local", "local/demo")
    found = [candidate.on(f"n{number}").node for number in range(MAX_NODES + 2)]
    assert found[-1] == f"n{MAX_NODES + 1}"
