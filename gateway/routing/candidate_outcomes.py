"""The outcome of each candidate of one request, and the error when none answered."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from gateway.apis.openai.generation_request import InferenceRequest
from gateway.breaker.outcome import TIER_SPECIFIC, Failure, Ignore, Observation, Reason, Success, Verdict
from gateway.errors import GatewayError, PassedOnError, RefusedError, RequestError, UpstreamError
from gateway.routing.chain import Candidate, Drop, Dropped, passes_on
from gateway.routing.explain_record import Record
from inference.protocol import Code, context_overflow

CLOCK_TOLERANCE_SECONDS = 0.1
"""The inference service counts whole milliseconds on its own clock, so its deadline passes a little before the
gateway's."""

_CODES = frozenset(Code)


@dataclass(frozen=True, slots=True)
class CandidateOutcome:
    """The outcome of one candidate. `name` is short and bounded, `message` is for people.

    `retry_in` is in seconds, None when unknown. `drop` is set when no attempt was made. `param` is the parameter that
    the candidate does not support, `details` has the numbers. `upstream_error` is a 4xx that other candidates may not
    share, such as an unsupported parameter.
    """

    candidate: Candidate
    name: str
    message: str
    retry_in: float | None = None
    drop: Drop | None = None
    upstream_error: PassedOnError | None = None
    param: str | None = None
    details: Mapping[str, int | None] | None = None

    def with_wait(self, seconds: float) -> CandidateOutcome:
        """The same outcome with a `retry_in` of at least `seconds`."""
        return replace(self, retry_in=max(seconds, self.retry_in or 0.0))


class CandidateOutcomes:
    """The outcomes of one request, in the order in which they occurred."""

    __slots__ = ("_all", "_deferred", "_record")

    def __init__(self, record: Record) -> None:
        self._record = record
        self._all: list[CandidateOutcome] = []
        self._deferred: set[Candidate] = set()

    def drop(self, dropped: Dropped) -> None:
        """Records that a candidate is not tried."""
        self._record.dropped[dropped.candidate.name] = f"{dropped.drop}: {dropped.message}"
        self._all.append(
            CandidateOutcome(
                dropped.candidate,
                str(dropped.drop),
                dropped.message,
                dropped.retry_in,
                dropped.drop,
                param=dropped.param,
                details=dropped.details,
            )
        )

    def defer(self, dropped: Dropped) -> None:
        """Records that a candidate is tried after the others; until its turn it counts as dropped."""
        self._deferred.add(dropped.candidate)
        self.drop(dropped)

    def is_deferred(self, candidate: Candidate) -> bool:
        """Whether the candidate was deferred, also when its turn has come since."""
        return candidate in self._deferred

    def start(self, candidate: Candidate) -> None:
        """An attempt begins: if the candidate was deferred, it no longer counts as dropped. Failed attempts stay."""
        if self._deferred and candidate in self._deferred:
            self._all = [one for one in self._all if one.candidate != candidate or one.drop is None]

    def fail(self, outcome: CandidateOutcome) -> None:
        """Records an attempt without an answer."""
        self._all.append(outcome)

    def has_failed(self, candidate: Candidate) -> bool:
        """Whether an attempt of the candidate has failed."""
        return any(outcome.candidate == candidate and outcome.drop is None for outcome in self._all)

    @property
    def first(self) -> CandidateOutcome:
        """The outcome of the earliest candidate in the chain; exists where a later candidate answered."""
        return min(self._all, key=lambda outcome: outcome.candidate.position)

    def in_chain_order(self, ready_in: Callable[[CandidateOutcome], float]) -> list[CandidateOutcome]:
        """All outcomes in the order of the chain, each with the seconds until its candidate may take a request."""
        ordered = sorted(self._all, key=lambda outcome: outcome.candidate.position)
        return [outcome.with_wait(ready_in(outcome)) for outcome in ordered]


def outcome_name(verdict: Verdict, observation: Observation) -> str:
    """A short, bounded name for metrics, records and `x-headgate-reason`."""
    if isinstance(verdict, Success):
        return "success"
    if isinstance(verdict, Ignore):
        return str(verdict.reason)
    if observation.is_local and observation.code is not None:
        return observation.code if observation.code in _CODES else "error"
    return f"status_{observation.status}" if observation.status is not None else str(observation.kind)


def failed_attempt(
    request: InferenceRequest,
    candidate: Candidate,
    verdict: Verdict,
    observation: Observation,
    message: str,
    error: Exception,
    *,
    larger_context_left: bool,
) -> CandidateOutcome | PassedOnError:
    """What an attempt that ended with `error` means for the request.

    PassedOnError ends the request with the provider's own 4xx; after a CandidateOutcome the next candidate is tried.
    `larger_context_left`: a remaining candidate may hold a prompt that is too long for this one.
    """
    name = outcome_name(verdict, observation)
    if not isinstance(verdict, Ignore):
        return CandidateOutcome(candidate, name, message, verdict.retry_after if isinstance(verdict, Failure) else None)
    retry_in = verdict.skip_seconds
    if not isinstance(error, UpstreamError):
        return CandidateOutcome(candidate, name, message, retry_in)
    if retry_in is None and candidate.is_local:
        retry_in = error.retry_after
    if passes_on(verdict, candidate, larger_context_left=larger_context_left):
        return _passed_on(request, verdict, error)
    outcome = CandidateOutcome(candidate, name, message, retry_in)
    if verdict.reason in TIER_SPECIFIC:
        outcome = replace(outcome, upstream_error=_passed_on(request, verdict, error))
    if verdict == Ignore(Reason.CONTEXT_LENGTH):
        outcome = replace(outcome, param=error.param, details=error.details)
    return outcome


def ran_out_of_time(verdict: Verdict, seconds_left: float) -> bool:
    """Whether the refusal of the last candidate means that the request's time is over.

    The last candidate gets all remaining time. `model_loading` also has other causes, so it
    counts only if almost no time is left.
    """
    if not isinstance(verdict, Ignore):
        return False
    return verdict.reason is Reason.DEADLINE or (
        verdict.reason is Reason.MODEL_LOADING and seconds_left < CLOCK_TOLERANCE_SECONDS
    )


def _passed_on(request: InferenceRequest, verdict: Ignore, error: UpstreamError) -> PassedOnError:
    param = error.param
    if param is None and verdict == Ignore(Reason.NOT_FOUND):
        param = "model"
    if param is None and verdict == Ignore(Reason.CONTEXT_LENGTH):
        param = request.prompt_param
    status = error.status if error.status is not None and 400 <= error.status < 500 else 400
    return PassedOnError(error, status, param)


# --- the error --------------------------------------------------------------------------------------------------------
_FOREVER = frozenset({Drop.ABSENT, Drop.POLICY, Drop.CAPABILITY, Drop.VECTORS, Drop.VOCABULARY, Drop.CONTEXT})
"""Drops that a retry of the same request does not change."""

_FIT_SECONDS = 2.0
"""Retry time where memory may become free at any time: the time between two polls of the models."""


def no_answer(
    request: InferenceRequest, outcomes: Sequence[CandidateOutcome], passed_limit: str | None, *, is_retry: bool = False
) -> GatewayError:
    """The error for a request whose candidates all were dropped, refused it or failed.

    `passed_limit` is the limit that passed, None while time is left. `is_retry`: the client has retried before;
    unless a full queue is the only problem, it gets `x-should-retry: false`.
    """
    each = "; ".join(f"{outcome.candidate.place}: {outcome.message}" for outcome in outcomes)
    drops = {outcome.drop for outcome in outcomes}
    if Drop.CAPABILITY in drops and drops <= {Drop.CAPABILITY, Drop.ABSENT, Drop.POLICY}:
        param = next((outcome.param for outcome in outcomes if outcome.param is not None), None)
        return RequestError(
            Code.UNSUPPORTED_PARAMETER,
            f"no model of {request.model!r} supports this request: {each}",
            param=param or _param_in_need(request),
        )
    long = [outcome for outcome in outcomes if _is_too_long(outcome)]
    if long and all(_is_too_long(outcome) or outcome.drop in _FOREVER for outcome in outcomes):
        return _too_long(request, long, each)
    if outcomes and all(outcome.name == Code.MODEL_NOT_FOUND for outcome in outcomes):
        return RequestError(Code.MODEL_NOT_FOUND, f"no tier has the model {request.model!r}: {each}", param="model")
    refused = [outcome.upstream_error for outcome in outcomes if outcome.upstream_error is not None]
    if refused and all(outcome.upstream_error or outcome.drop in _FOREVER for outcome in outcomes):
        return refused[0]
    if all(outcome.drop in _FOREVER for outcome in outcomes):
        return RefusedError(Code.NO_TIER_AVAILABLE, f"no tier can answer: {each}", retryable=False)
    if all(outcome.drop in _FOREVER or _is_full(outcome) for outcome in outcomes):
        return RefusedError(Code.QUEUE_FULL, f"too many requests wait already: {each}", retry_after=_soonest(outcomes))
    if passed_limit is not None:
        return RefusedError(Code.DEADLINE_EXCEEDED, f"no tier answered within {passed_limit}: {each}", retryable=False)
    spent = is_retry or Drop.BUDGET in drops  # a retry would repeat the same attempts
    return RefusedError(
        Code.NO_TIER_AVAILABLE,
        f"no tier could answer: {each}",
        retry_after=_soonest(outcomes),
        retryable=False if spent else None,
    )


def _is_too_long(outcome: CandidateOutcome) -> bool:
    """Whether the request exceeds the context, by the gateway's count or by the provider's error."""
    return outcome.drop is Drop.CONTEXT or outcome.name == Reason.CONTEXT_LENGTH


def _too_long(request: InferenceRequest, outcomes: Sequence[CandidateOutcome], each: str) -> RequestError:
    """The error with the numbers of the largest context among `outcomes`."""
    known = [outcome for outcome in outcomes if outcome.details is not None]
    largest = max(known, key=lambda outcome: (outcome.details or {}).get("context_length") or 0, default=outcomes[0])
    prompt = request.prompt_param
    return RequestError(
        Code.CONTEXT_LENGTH_EXCEEDED,
        f"{_overflow(prompt, largest.details or {})} No model behind {request.model!r} can take this request: {each}",
        param=largest.param or prompt,
        details=largest.details,
    )


_LENGTHS = {
    "messages": "the messages take",
    "prompt": "the prompt takes",
    "input": "the input takes",
    "documents": "the documents take",
}
"""Parameters that hold the text of a request, and the beginning of a sentence about the length of each."""


def _overflow(prompt: str, numbers: Mapping[str, int | None]) -> str:
    """The first sentence of the message, with the known `numbers`."""
    context, tokens, most = (numbers.get(name) for name in ("context_length", "prompt_tokens", "max_tokens"))
    if context is None:
        return f"The request exceeds the context window of every model ({Code.CONTEXT_LENGTH_EXCEEDED})."
    if tokens is not None and tokens >= context:
        return context_overflow(context, f"{_LENGTHS[prompt]} {tokens} tokens")
    return context_overflow(context, f"max_tokens is {most}")


def _is_full(outcome: CandidateOutcome) -> bool:
    """Whether the only problem is a full queue."""
    return outcome.name == Code.QUEUE_FULL or outcome.drop is Drop.HELD


def _param_in_need(request: InferenceRequest) -> str:
    """The parameter that needs the missing capability."""
    for name in ("tools", "functions", "messages", "input"):
        if getattr(request.body, name, None) and (name != "tools" or "tools" in request.needs):
            return name
    return "model"


def _soonest(outcomes: Sequence[CandidateOutcome]) -> float:
    """Whole seconds, at least 1, until one of the candidates may be tried again."""
    waits = [
        outcome.retry_in or (_FIT_SECONDS if outcome.drop is Drop.NO_FIT else 0.0)
        for outcome in outcomes
        if outcome.drop not in _FOREVER
    ]
    return float(max(1, math.ceil(min(waits, default=0.0))))
