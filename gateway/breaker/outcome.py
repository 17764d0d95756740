"""Judges how one attempt ended: a success, a failure of the provider or of the (provider, model) pair, or ignored.

A failure counts for the provider when it cannot be reached or fails without a named reason, and for the pair when the
provider works and this model does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from gateway.errors import UpstreamKind
from inference.protocol import Code, ExitCause

LOCAL = "local"
"""The provider name of the inference service."""


def provider_key(node: str) -> str:
    """The key of a node's client, breakers and skips: `local@NODE`, or `local` for the only service (no name)."""
    return f"{LOCAL}@{node}" if node else LOCAL


def split_key(key: str) -> tuple[str, str]:
    """Provider and node of a key; the node is empty for clouds and for the only service."""
    provider, _, node = key.partition("@")
    return provider, node


def is_local(key: str) -> bool:
    """Whether the key is that of an inference service."""
    return key.partition("@")[0] == LOCAL


MAX_RETRY_AFTER_SECONDS = 3600.0
"""A longer Retry-After is cut to this: a mistake of a provider must not open its breaker for a day."""


REQUEST_TOO_LARGE = "request_too_large"
"""A cloud refuses a request that alone exceeds what its account may use in a minute."""


class End(StrEnum):
    """How an attempt ended when the provider did not fail."""

    FINISHED = "finished"
    """the stream was complete, or the unary answer was whole"""
    CLIENT_LEFT = "client_left"
    CALLER_DEADLINE = "caller_deadline"
    """the client's own time-out was too short"""
    SPILLED = "spilled"
    """the request made progress and left the candidate after `load_wait`, or its share of the client's time"""
    OUT_OF_TIME = "out_of_time"
    """the request's budget ended before the provider's own deadline"""
    SHUTTING_DOWN = "shutting_down"
    """the gateway itself stops"""


class Observation(NamedTuple):
    """Observations about the end of an attempt; fields other than `kind` are None if the provider did not send them.

    `retry_after` is in seconds. From the inference service: `cause` is why the worker ended, `full_for` the priorities
    for which a model's queue is full.
    """

    kind: End | UpstreamKind
    status: int | None = None
    code: str | None = None
    retry_after: float | None = None
    is_local: bool = False
    cause: str | None = None
    full_for: frozenset[str] = frozenset()


class Scope(StrEnum):
    """The breaker that a failure counts in."""

    PROVIDER = "provider"
    PAIR = "pair"


class Next(StrEnum):
    """What the chain does after an ignored outcome."""

    STOP = "stop"
    """the client has disconnected, the deadline has passed, or the gateway stops"""
    PASS_ON = "pass_on"
    """the client gets the provider's 4xx; no other tier is tried"""
    NEXT_TIER = "next_tier"


class Reason(StrEnum):
    """Why an outcome is ignored."""

    CLIENT_LEFT = "client_left"
    CALLER_DEADLINE = "caller_deadline"
    SPILLED = "spilled"
    OUT_OF_TIME = "out_of_time"
    SHUTTING_DOWN = "shutting_down"
    BAD_REQUEST = "bad_request"
    CONTEXT_LENGTH = "context_length"
    UNSUPPORTED = "unsupported_parameter"
    TOO_LARGE = "request_too_large"
    CONTENT_POLICY = "content_policy"
    POISON = "poison_request"
    NOT_FOUND = "model_not_found"
    MODEL_LOADING = "model_loading"
    QUEUE_FULL = "queue_full"
    DEADLINE = "deadline_exceeded"
    MISCONFIGURED = "misconfigured"


NEXT: Mapping[Reason, Next] = {
    Reason.CLIENT_LEFT: Next.STOP,
    Reason.CALLER_DEADLINE: Next.STOP,
    Reason.SPILLED: Next.NEXT_TIER,
    Reason.OUT_OF_TIME: Next.STOP,
    Reason.SHUTTING_DOWN: Next.STOP,
    Reason.BAD_REQUEST: Next.PASS_ON,
    Reason.CONTEXT_LENGTH: Next.PASS_ON,
    Reason.UNSUPPORTED: Next.NEXT_TIER,
    Reason.TOO_LARGE: Next.NEXT_TIER,
    Reason.CONTENT_POLICY: Next.PASS_ON,
    Reason.POISON: Next.PASS_ON,
    Reason.NOT_FOUND: Next.NEXT_TIER,
    Reason.MODEL_LOADING: Next.NEXT_TIER,
    Reason.QUEUE_FULL: Next.NEXT_TIER,
    Reason.DEADLINE: Next.NEXT_TIER,
    Reason.MISCONFIGURED: Next.NEXT_TIER,
}


TIER_SPECIFIC = frozenset({Reason.UNSUPPORTED, Reason.TOO_LARGE})
"""Reasons of a 4xx that another tier may accept. The client gets the 4xx if no other tier is left."""


@dataclass(frozen=True, slots=True)
class Success:
    """The answer was whole."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The tier failed.

    `retry_after`: the provider's own Retry-After, in seconds.
    `opens`: the pair's breaker opens at once, for `retry_after` or else for the usual time.
    `reached`: an error answer that concerns only this model. It is a success for the provider's breaker.
    `pair_too`: it counts for the provider and for the pair (a 5xx without a named reason, an interrupted stream).
    Perhaps only this model fails, and successes of other models would hide that.
    `broke`: it ended a running attempt. One event can end many attempts.
    `needs_memory`: the inference service refused memory, until a placement plan shows that the model fits.
    """

    scope: Scope
    retry_after: float | None = None
    opens: bool = False
    reached: bool = False
    pair_too: bool = False
    broke: bool = False
    needs_memory: bool = False


@dataclass(frozen=True, slots=True)
class Ignore:
    """No breaker counts it. If a queue is full, requests of priorities `full_for` skip the tier for `skip_seconds`."""

    reason: Reason
    skip_seconds: float | None = None
    full_for: frozenset[str] = frozenset()

    @property
    def next(self) -> Next:
        """What the chain does next."""
        return NEXT[self.reason]


Verdict = Success | Failure | Ignore

_ENDS: Mapping[End, Verdict] = {
    End.FINISHED: Success(),
    **{end: Ignore(Reason(end.value)) for end in End if end is not End.FINISHED},
}

_TRANSPORT: Mapping[UpstreamKind, Scope] = {
    UpstreamKind.CONNECT: Scope.PROVIDER,
    UpstreamKind.READ: Scope.PROVIDER,
    UpstreamKind.TIMEOUT: Scope.PAIR,
    UpstreamKind.MALFORMED: Scope.PAIR,
    UpstreamKind.EMPTY: Scope.PAIR,
}

# A named code outweighs the status.
_BY_CODE: Mapping[str, Scope | Reason] = {
    Code.CONTEXT_LENGTH_EXCEEDED: Reason.CONTEXT_LENGTH,
    Code.UNSUPPORTED_PARAMETER: Reason.UNSUPPORTED,
    "unsupported_value": Reason.UNSUPPORTED,  # OpenAI: another model may have this value
    "array_above_max_length": Reason.UNSUPPORTED,
    REQUEST_TOO_LARGE: Reason.TOO_LARGE,
    "content_filter": Reason.CONTENT_POLICY,
    "content_policy_violation": Reason.CONTENT_POLICY,
    Code.POISON_REQUEST: Reason.POISON,
    Code.MODEL_NOT_FOUND: Reason.NOT_FOUND,
}

# Headgate's codes count only from the inference service.
_BY_LOCAL_CODE: Mapping[str, Scope | Reason] = {
    Code.MEMORY_LIMIT_EXCEEDED: Scope.PAIR,
    Code.DEVICE_LOST: Scope.PAIR,
    Code.MODEL_FAILED: Scope.PAIR,
    Code.INTERNAL_ERROR: Scope.PAIR,
    Code.SHUTTING_DOWN: Scope.PROVIDER,
    Code.MODEL_LOADING: Reason.MODEL_LOADING,
    Code.QUEUE_FULL: Reason.QUEUE_FULL,
    Code.DEADLINE_EXCEEDED: Reason.DEADLINE,
}

_BREAKING = frozenset({Code.MODEL_FAILED, Code.DEVICE_LOST})
"""The worker or its device failed, which ends all its requests by one event."""

PAYMENT_REQUIRED = 402
"""The account is empty: further requests would fail too."""

_BY_STATUS: Mapping[int, Scope | Reason] = {
    400: Reason.BAD_REQUEST,
    401: Reason.MISCONFIGURED,
    PAYMENT_REQUIRED: Scope.PAIR,
    403: Reason.MISCONFIGURED,
    404: Reason.NOT_FOUND,
    405: Reason.MISCONFIGURED,
    408: Scope.PAIR,
    409: Scope.PAIR,
    410: Reason.NOT_FOUND,
    413: Reason.BAD_REQUEST,
    415: Reason.BAD_REQUEST,
    422: Reason.BAD_REQUEST,
    425: Scope.PAIR,
    429: Scope.PAIR,
}


_NODE_SPECIFIC = frozenset({Reason.NOT_FOUND, Reason.QUEUE_FULL, Reason.MISCONFIGURED})


def is_node_specific(verdict: Verdict) -> bool:
    """Whether another inference service may answer the request although one did not."""
    return isinstance(verdict, Failure) or (isinstance(verdict, Ignore) and verdict.reason in _NODE_SPECIFIC)


def needs_operator(verdict: Verdict, seen: Observation) -> bool:
    """Whether only the operator can correct it: a bad key, wrong settings, an empty account."""
    if isinstance(verdict, Ignore):
        return verdict.reason is Reason.MISCONFIGURED
    return isinstance(verdict, Failure) and seen.status == PAYMENT_REQUIRED


def judge(seen: Observation) -> Verdict:
    """The verdict on one attempt."""
    if isinstance(seen.kind, End):
        return _ENDS[seen.kind]
    if seen.kind in _TRANSPORT:
        cut = seen.kind is UpstreamKind.READ
        return Failure(_TRANSPORT[seen.kind], pair_too=cut, broke=cut)
    return _judge_answer(seen)


def _judge_answer(seen: Observation) -> Verdict:
    """The verdict on an HTTP error status or an error frame."""
    wait = None if seen.retry_after is None else min(max(seen.retry_after, 0.0), MAX_RETRY_AFTER_SECONDS)
    ruling: Scope | Reason | None = None
    if seen.code is not None:
        ruling = _BY_CODE.get(seen.code) or (_BY_LOCAL_CODE.get(seen.code) if seen.is_local else None)
    if ruling is None:
        ruling = _by_status(seen.status)
    if isinstance(ruling, Reason):
        return Ignore(ruling, wait, seen.full_for) if ruling is Reason.QUEUE_FULL else Ignore(ruling)
    named = ruling is Scope.PAIR or (seen.is_local and seen.code == Code.SHUTTING_DOWN)
    broke = seen.is_local and (seen.code in _BREAKING or seen.cause == ExitCause.OOM_LOAD)
    if seen.status == PAYMENT_REQUIRED:
        return Failure(Scope.PAIR, wait or None, opens=True, reached=True)
    opens = bool(wait) and not seen.is_local  # the inference service is probed instead
    return Failure(
        ruling, wait, opens=opens, reached=ruling is Scope.PAIR, pair_too=not named, broke=broke,
        needs_memory=seen.is_local and seen.code == Code.MEMORY_LIMIT_EXCEEDED,
    )  # fmt: skip


def _by_status(status: int | None) -> Scope | Reason:
    if status is None or not 400 <= status < 500:
        return Scope.PROVIDER
    return _BY_STATUS.get(status, Reason.BAD_REQUEST)
