"""Which candidates are tried, and why the others are not."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from gateway.apis.openai.frames import Endpoint
from gateway.apis.openai.generation_request import parse
from gateway.breaker.outcome import Ignore, Reason
from gateway.errors import GatewayError, PassedOnError, RequestError, UpstreamError, UpstreamKind
from gateway.providers.local.candidate_facts import Facts, LikelyFailure
from gateway.routing.candidate_outcomes import CandidateOutcome
from gateway.routing.chain import Candidate, Drop, Requirements, RouteMatch, expand, find_route, passes_on, select
from gateway.routing.refusal import no_answer
from inference.protocol import Code, Tier
from tests.rigs.typed_bodies import unsupported_by_anthropic as unsupported_params

ROUTES = ("demo", "big/model", "*")


def test_routes_are_found_by_name_by_alias_and_by_star() -> None:
    aliases = {"small": "demo", "other": "thing"}
    assert find_route("demo", ROUTES, aliases) == RouteMatch("demo", "demo")
    assert find_route("big/model", ROUTES, aliases) == RouteMatch("big/model", "big/model")
    assert find_route("small", ROUTES, aliases) == RouteMatch("demo", "demo")
    assert find_route("other", ROUTES, aliases) == RouteMatch("*", "thing")
    assert find_route("*", ROUTES, aliases) == RouteMatch("*", "*")
    assert find_route("nope", ("demo",), aliases) is None


def test_entries_expand_to_candidates_and_repeats_count_once() -> None:
    found = expand(("local/*", "local/demo", "openai/org/big", "local/demo"), "demo", {})
    assert [candidate.name for candidate in found] == ["local/demo", "openai/org/big"]
    assert [candidate.tier for candidate in found] == [Tier.LOCAL, Tier.CLOUD]
    assert not found[0].named
    assert expand(("openai/x", "local/y"), "z", {})[1].tier is Tier.LOCAL_FALLBACK


def test_aliases_of_local_models_become_their_ids() -> None:
    """One written by an alias had breakers and limits of its own; a cloud's model of that name is another one."""
    aliases = {"nick": "demo"}
    found = expand(("local/nick", "openai/nick", "local/demo", "local/*"), "other", aliases)
    assert [candidate.name for candidate in found] == ["local/demo", "openai/nick", "local/other"]
    assert [(candidate.position, candidate.named) for candidate in found] == [(0, True), (1, True), (2, False)]
    assert [candidate.name for candidate in expand(("local/*",), "nick", aliases)] == ["local/demo"]
    assert expand(("local/demo",), "x", aliases) is expand(("local/demo",), "x", {}), "found once"


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
def test_each_fact_drops_or_keeps(candidate: Candidate, facts: Facts, wants: Requirements, drop: Drop | None) -> None:
    chain = select([candidate], lambda _: facts, wants)
    assert [dropped.drop for dropped in chain.dropped] == ([] if drop is None else [drop])
    assert chain.kept == (() if drop else (candidate,))


def test_the_order_stays_and_every_drop_has_its_reason() -> None:
    known: Mapping[str, Facts] = {
        "local/a": Facts(breaker_open_for=5.0),
        "local/b": Facts(),
        "openai/c": Facts(present=False),
    }
    chain = select([LOCAL, MINI, CLOUD], lambda candidate: known[candidate.name], Requirements())
    assert chain.kept == (MINI,)
    assert [(dropped.candidate, dropped.drop) for dropped in chain.dropped] == [
        (LOCAL, Drop.BREAKER),
        (CLOUD, Drop.ABSENT),
    ]
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


def _none(*outcomes: CandidateOutcome, time_spent: str | None = None) -> GatewayError:
    return no_answer(REQUEST, outcomes, time_spent)


def test_error_names_every_candidate_and_the_soonest_retry() -> None:
    error = _none(
        CandidateOutcome(LOCAL, "breaker_open", "breaker open", 12.2, Drop.BREAKER),
        CandidateOutcome(MINI, "status_500", "500: broken", 40.0),
        CandidateOutcome(CLOUD, "provider_absent", "no key", None, Drop.ABSENT),
    )
    assert (error.status, error.code, error.retry_after, error.retryable) == (
        503,
        Code.NO_TIER_AVAILABLE,
        13.0,
        True,
    )
    assert all(name in error.message for name in ("local/a: breaker open", "local/b: 500", "openai/c: no key"))


def test_retry_after_has_a_default_when_nothing_is_known() -> None:
    assert (
        _none(CandidateOutcome(LOCAL, "connect", "refused"), CandidateOutcome(MINI, "x", "y", 9.0)).retry_after == 1.0
    )
    assert _none(CandidateOutcome(LOCAL, "cannot_fit", "no room", None, Drop.NO_FIT)).retry_after == 2.0
    assert _none().retry_after is None


def test_retry_after_is_that_of_a_lost_device() -> None:
    facts = Facts(fits=False, fit_reason="gpu-0 is lost (it was cut)", fit_in=6.4)
    (dropped,) = select([LOCAL], lambda _: facts, Requirements()).dropped
    assert (dropped.retry_in, dropped.message) == (6.4, "cannot fit now: gpu-0 is lost (it was cut)")
    outcome = CandidateOutcome(LOCAL, "cannot_fit", dropped.message, dropped.retry_in, Drop.NO_FIT)
    assert (_none(outcome).retry_after, "gpu-0 is lost" in _none(outcome).message) == (7.0, True)


def test_permanent_reasons_are_not_retried() -> None:
    error = _none(CandidateOutcome(CLOUD, "policy", "local only", None, Drop.POLICY))
    assert (error.status, error.retry_after, error.retryable) == (503, None, False)


def test_spent_time_is_a_504_unless_no_candidate_could_ever_answer() -> None:
    error = _none(CandidateOutcome(LOCAL, "timeout", "silent"), time_spent="the client's own timeout of 2 s")
    assert (error.status, error.code, error.retryable) == (504, Code.DEADLINE_EXCEEDED, False)
    assert error.message == "no tier answered within the client's own timeout of 2 s: local/a: silent"
    never = _none(CandidateOutcome(CLOUD, "policy", "local only", None, Drop.POLICY), time_spent="2 s")
    assert never.status == 503


def test_missing_capability_of_all_candidates_is_a_400() -> None:
    missing = _none(CandidateOutcome(LOCAL, "capability_missing", "cannot do vision", None, Drop.CAPABILITY))
    assert isinstance(missing, RequestError)
    assert (missing.status, missing.param) == (400, "messages")
    error = no_answer(COMPLETION, [CandidateOutcome(LOCAL, "capability_missing", "no", None, Drop.CAPABILITY)], None)
    assert error.param == "model"
    assert (
        _none(CandidateOutcome(LOCAL, "context_too_small", "9 > 8", None, Drop.CONTEXT)).code
        == Code.CONTEXT_LENGTH_EXCEEDED
    )
    gone = _none(
        CandidateOutcome(LOCAL, "model_not_found", "no such"), CandidateOutcome(MINI, "model_not_found", "no such")
    )
    assert (gone.status, gone.param) == (404, "model")


def test_unsupported_parameters_say_what_would_help() -> None:
    """Each unsupported parameter has its own message."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    body = {"messages": messages, "response_format": {"type": "json_object"}, "n": 2}
    unsupported = unsupported_params(body, "claude-opus-5")
    assert list(unsupported) == ["n", "response_format", "messages"]
    dropped = select([CLOUD], lambda _: Facts(unsupported=unsupported), Requirements()).dropped[0]
    assert "it gives one choice per request" in dropped.message
    assert "use json_schema" in dropped.message
    assert "must have the role user or tool" in dropped.message


def test_unsupported_parameter_is_named_in_the_error() -> None:
    dropped = select(
        [CLOUD], lambda _: Facts(unsupported={"seed": "no seed", "n": "one choice"}), Requirements()
    ).dropped[0]
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
    assert (later.status, later.retry_after) == (503, 9.0), "the local tier may do it later"


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
    assert (
        _none(
            CandidateOutcome(LOCAL, "unsupported_parameter", "no", upstream_error=own),
            CandidateOutcome(MINI, "connect", "no"),
        ).status
        == 503
    )
    assert CandidateOutcome(LOCAL, "x", "y", 3.0).with_wait(2.0).retry_in == 3.0


def test_full_queues_of_all_candidates_are_a_429() -> None:
    error = _none(
        CandidateOutcome(LOCAL, str(Code.QUEUE_FULL), "too many wait", 3.0),
        CandidateOutcome(MINI, "held", "held back", 5.0, Drop.HELD),
        CandidateOutcome(CLOUD, "policy", "no", None, Drop.POLICY),
    )
    assert (error.status, error.code, error.retry_after) == (429, Code.QUEUE_FULL, 3.0)


def test_unhealthy_candidates_are_tried_last() -> None:
    ill = Facts(likely_failure=LikelyFailure("the model failed: it aborted", 8.0))
    known = {"local/demo": ill, "local/demo-mini": Facts(), "cloud/big": Facts()}
    chain = select(expand(tuple(known), "demo", {}), lambda candidate: known[candidate.name], Requirements())
    assert [candidate.name for candidate in chain.kept] == ["local/demo-mini", "cloud/big", "local/demo"]
    assert chain.dropped == ()
    (deferred,) = chain.deferred
    assert (deferred.drop, deferred.message, deferred.retry_in) == (Drop.UNHEALTHY, "the model failed: it aborted", 8.0)


def test_order_stays_when_all_candidates_are_unhealthy() -> None:
    known = {
        "local/demo": Facts(likely_failure=LikelyFailure("x")),
        "local/demo-mini": Facts(likely_failure=LikelyFailure("y")),
    }
    chain = select(expand(tuple(known), "demo", {}), lambda candidate: known[candidate.name], Requirements())
    assert [candidate.name for candidate in chain.kept] == list(known)
    assert chain.deferred == ()
