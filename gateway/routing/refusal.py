"""The error of a request that no candidate answered: the outcome of each, and when a retry may succeed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gateway.apis.openai.generation_request import InferenceRequest
from gateway.breaker.outcome import Reason
from gateway.errors import GatewayError, RefusedError, RequestError
from gateway.routing.candidate_outcomes import CandidateOutcome
from gateway.routing.chain import Drop
from inference.protocol import Code, context_overflow

_FOREVER = frozenset({Drop.ABSENT, Drop.POLICY, Drop.CAPABILITY, Drop.VECTORS, Drop.VOCABULARY, Drop.CONTEXT})
"""Drops that a retry of the same request does not change."""

_FIT_SECONDS = 2.0
"""Retry time where memory may become free at any time. The view of the models is not refreshed more often."""


def no_answer(
    request: InferenceRequest, outcomes: Sequence[CandidateOutcome], time_spent: str | None, *, is_retry: bool = False
) -> GatewayError:
    """The error for a request that every candidate dropped, refused or failed.

    `time_spent` is the limit that passed, None while time is left. `is_retry`: the client has retried before, and gets
    `x-should-retry: false`.
    """
    each = "; ".join(f"{outcome.candidate.name}: {outcome.message}" for outcome in outcomes)
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
    if time_spent is not None:
        return RefusedError(Code.DEADLINE_EXCEEDED, f"no tier answered within {time_spent}: {each}", retryable=False)
    spent = is_retry or Drop.BUDGET in drops  # a retry would repeat the same attempts
    return RefusedError(
        Code.NO_TIER_AVAILABLE,
        f"no tier could answer: {each}",
        retry_after=_soonest(outcomes),
        retryable=False if spent else None,
    )


def _is_too_long(outcome: CandidateOutcome) -> bool:
    """Whether the request exceeds the context, by our count or by the provider's error."""
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
    """Whole seconds, at least 1, until the first candidate may be tried again."""
    waits = [
        outcome.retry_in or (_FIT_SECONDS if outcome.drop is Drop.NO_FIT else 0.0)
        for outcome in outcomes
        if outcome.drop not in _FOREVER
    ]
    return float(max(1, math.ceil(min(waits, default=0.0))))
