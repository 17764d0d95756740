"""What is known about one candidate of a chain before it is tried."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gateway.providers.local.failing_models import Ailment
from gateway.providers.local.model_speed import UNKNOWN, Speed
from gateway.providers.provider_fields import ALL_TAKEN


class Facts(NamedTuple):
    """What is known about a candidate now; None is unknown and never a reason to drop.

    `closed_for`: seconds until its breaker admits a probe. `held_for`: seconds it asked to be left alone.
    `unsupported`: the parameters of the request that its provider is known not to take, and why.
    """

    present: bool = True
    closed_for: float | None = None
    held_for: float | None = None
    capabilities: frozenset[str] | None = None
    unsupported: Mapping[str, str] = ALL_TAKEN
    same_vectors: bool = True
    """Whether its numbers mean the same as the first choice's; only of interest where numbers are asked for."""
    foreign_ids: str | None = None
    """The field whose token ids are those of another model, the first choice's."""
    context_length: int | None = None
    speed: Speed = UNKNOWN
    fits: bool | None = None
    fit_reason: str | None = None
    fit_in: float | None = None
    """Seconds until what it needs may be there again, where the service knows."""
    ailment: Ailment | None = None
    """Why it would likely fail now: a reason to ask the others first, and none to drop it."""
