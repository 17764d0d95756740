"""Whether a model is likely to fail a request now, from the state that the inference service reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from inference.protocol import DeviceState, ModelState, ModelStatus

SHORT_REST_SECONDS = 2.0
"""The inference service itself waits for a failed model that it loads again within this time."""

_FAILED = ModelState.FAILED
_UNUSABLE = (DeviceState.QUARANTINED, DeviceState.LOST)


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
    unusable = [name for name in status.devices if devices.get(name) in _UNUSABLE]
    if not unusable:
        return None
    return LikelyFailure(f"its device {', '.join(unusable)} is {devices[unusable[0]]}")
