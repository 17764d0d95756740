"""Compares what loading a model would cost on several nodes, from their answers of `/memory/plan`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_RESULTS = {"DEPLOYED": 0, "FREE": 1, "FULL": 2}

Cost = tuple[float, ...]
"""Smaller is better."""


def plan_cost(plan: Mapping[str, Any], load_seconds: float | None) -> Cost | None:
    """The cost of a plan; None if the model does not fit. `load_seconds` is the measured time to load it.

    A loaded model is best, then free memory before evictions, the settings as configured before smaller ones, fewer
    evictions, a higher expected speed, and a shorter load.
    """
    rank = _RESULTS.get(str(plan.get("result")))
    if rank is None:
        return None
    speed = (plan.get("expected") or {}).get("tokens_per_second") or 0.0
    return (
        rank, bool(plan.get("changes")), len(plan.get("evict") or ()), -speed,
        math.inf if load_seconds is None else load_seconds,
    )  # fmt: skip
