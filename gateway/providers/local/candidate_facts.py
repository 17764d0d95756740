"""The facts about one candidate of a chain before it is tried."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gateway.providers.local.failing_models import LikelyFailure
from gateway.providers.local.model_speed import UNKNOWN, Speed
from gateway.providers.provider_fields import ALL_TAKEN


class Facts(NamedTuple):
    """The facts about a candidate now; None means unknown and is never a reason to drop.

    `breaker_open_for`: seconds until its breaker admits a probe. `queue_full_for`: the rest of the Retry-After of a
    full queue, in seconds. `unsupported`: the parameters of the request that its provider does not support, with
    reasons.
    """

    present: bool = True
    breaker_open_for: float | None = None
    queue_full_for: float | None = None
    capabilities: frozenset[str] | None = None
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
