"""The outcome of each candidate of one request, for the explain record and the error when none answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from gateway.apis.openai.generation_request import InferenceRequest
from gateway.breaker.outcome import TIER_SPECIFIC, Failure, Ignore, Observation, Reason, Success, Verdict
from gateway.errors import PassedOnError, UpstreamError
from gateway.routing.chain import Candidate, Drop, Dropped, passes_on
from gateway.routing.explain_record import Record
from inference.protocol import Code

CLOCK_TOLERANCE_SECONDS = 0.1
"""The inference service counts whole milliseconds on its own clock, so its deadline passes a little before ours."""

_CODES = frozenset(Code)


@dataclass(frozen=True, slots=True)
class CandidateOutcome:
    """The outcome of one candidate. `name` is short and bounded, `message` is for people.

    `retry_in` is in seconds, None when unknown. `drop` is set when no attempt was made, with the `param` that the
    candidate does not support and the numbers in `details`. `upstream_error` is a 4xx that other candidates may not
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
        """Records that an attempt begins: a deferral of the candidate is no outcome any more."""
        if self._deferred and candidate in self._deferred:
            self._all = [outcome for outcome in self._all if outcome.candidate != candidate]

    def fail(self, outcome: CandidateOutcome) -> None:
        """Records an attempt without an answer."""
        self._all.append(outcome)

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

    The last candidate gets all remaining time. `model_loading` has other causes too, so there the clock must agree.
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
