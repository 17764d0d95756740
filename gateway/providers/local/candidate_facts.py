"""The facts about one candidate of a chain before it is tried."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gateway.providers.provider_fields import ALL_TAKEN
from inference.protocol import DeviceState, ModelState, ModelStatus


class Speed(NamedTuple):
    """Measurements of a model; None where none exist.

    `load_seconds` is 0 for a loaded model. `queue_seconds` is the wait of a new request behind others after loading.
    """

    load_seconds: float | None = None
    queue_seconds: float | None = None
    prefill_tokens_per_second: float | None = None

    @property
    def ready_in(self) -> float:
        """Seconds until the model starts a new request, as far as known."""
        return (self.load_seconds or 0.0) + (self.queue_seconds or 0.0)


def queue_seconds(
    reported_seconds: float | None,
    outstanding: int,
    parallel: int,
    answer_seconds: float | None,
    *,
    first: bool = False,
) -> float | None:
    """The wait behind other requests: the last reported one, or a longer estimate from the gateway's own requests.

    The service reports every few seconds; `outstanding` includes requests that were sent since. `first`: the request
    has the highest priority and gets the next free place.
    """
    waits_for = outstanding - parallel + 1
    if waits_for > 0 and answer_seconds is not None:
        reported_seconds = max(reported_seconds or 0.0, waits_for * answer_seconds)
    if first and reported_seconds is not None and answer_seconds is not None:
        return min(reported_seconds, answer_seconds)
    return reported_seconds


UNKNOWN = Speed()
"""Without measurements."""


SHORT_REST_SECONDS = 2.0
"""The inference service itself waits for a failed model that it loads again within this time."""

_FAILED = ModelState.FAILED
UNUSABLE = (DeviceState.QUARANTINED, DeviceState.LOST)


@dataclass(frozen=True, slots=True)
class LikelyFailure:
    """Why a model would fail now. `retry_in`: seconds until that may be over, None if unknown."""

    message: str
    retry_in: float | None = None


def likely_failure(status: ModelStatus, devices: Mapping[str, DeviceState], age: float) -> LikelyFailure | None:
    """The likely failure of a model whose `status` was reported `age` seconds ago; None without a reason."""
    if status.state is _FAILED:
        rest = None if status.retry_after_seconds is None else max(0.0, status.retry_after_seconds - age)
        if rest is not None and rest <= SHORT_REST_SECONDS:
            return None
        return LikelyFailure(f"the model failed: {status.reason or 'no reason given'}", rest)
    if not devices:
        return None
    places = [item.devices for item in status.replicas if item.devices] or [status.devices]
    if not all(any(devices.get(name) in UNUSABLE for name in place) for place in places):
        return None  # a replica is on other devices
    unusable = [name for name in status.devices if devices.get(name) in UNUSABLE]
    return LikelyFailure(f"its device {', '.join(unusable)} is {devices[unusable[0]]}")


class Facts(NamedTuple):
    """The facts about a candidate now; None means unknown, or no obstacle, and is never a reason to drop.

    `breaker_open_for`: seconds until its breaker admits a probe. `queue_full_for`: the rest of the Retry-After of a
    full queue, in seconds. `unsupported`: the parameters of the request that its provider does not support, with
    reasons.
    """

    present: bool = True
    breaker_open_for: float | None = None
    queue_full_for: float | None = None
    capabilities: Collection[str] | None = None
    unsupported: Mapping[str, str] = ALL_TAKEN
    same_vectors: bool = True
    """Whether its vectors or scores can be compared with those of the first choice (embeddings and reranking)."""
    foreign_ids: str | None = None
    """The field of the request with token ids of the first choice, which is another model."""
    context_length: int | None = None
    speed: Speed = UNKNOWN
    fits: bool | None = None
    fit_reason: str | None = None
    fit_in: float | None = None
    """Seconds until enough memory may be free, if the inference service knows."""
    likely_failure: LikelyFailure | None = None
    """Why it would likely fail now: a reason to try it last, but not to drop it."""
