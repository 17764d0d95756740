"""Defects that the suite must find. Each replaces one function of the gateway."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.chaos.defects import replace
from tests.fleet import judge
from tests.fleet.plan import Kind


def unclaimed_probe() -> None:
    """A gateway probes an open breaker without the claim that keeps others from it."""
    from gateway.shared_state import breaker_sync

    async def claim(self: breaker_sync.BreakerSync, _keys: Sequence[tuple[str, str]]) -> Any:
        return breaker_sync._Claim(self, {})

    replace(breaker_sync.BreakerSync, "claim", claim)


def undivided_limits() -> None:
    """A gateway that has lost the store admits the whole limit of a key."""
    from gateway.access import shared_limits

    assert hasattr(shared_limits, "share_of")
    for module in _using(shared_limits.share_of):
        replace(module, "share_of", lambda limits, _gateways: limits)


def _using(function: Any) -> list[Any]:
    """The modules that have imported a function, or define it."""
    from gateway import app

    assert app
    return [module for module in list(sys.modules.values()) if getattr(module, function.__name__, None) is function]


def no_resume() -> None:
    """An answer of a node that ends is not continued on another one."""
    from gateway.routing import resume_policy

    replace(resume_policy, "MAX_RESUMES", 0)


PLANTS: Mapping[str, Callable[[], None]] = {
    "unclaimed_probe": unclaimed_probe,
    "undivided_limits": undivided_limits,
    "no_resume": no_resume,
}
"""By name."""

PROMISES: Mapping[str, str] = {
    "unclaimed_probe": judge.ONE_PROBE,
    "undivided_limits": judge.LIMITED,
    "no_resume": judge.NOT_LOST,
}
"""The promise whose violation the suite must report for each defect."""

REVEALED_BY: Mapping[str, Kind] = {
    "unclaimed_probe": Kind.HALF_OPEN,
    "undivided_limits": Kind.LIMITS_ALONE,
    "no_resume": Kind.NODE_KILL,
}
"""The faults that reveal each defect."""
