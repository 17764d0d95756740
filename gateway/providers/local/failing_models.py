"""Tells from what the inference service says whether a model is likely to fail a request now; never drops a tier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from inference.protocol import DeviceState, ModelState, ModelStatus

SHORT_REST_SECONDS = 2.0
"""A model that failed and is tried again within so long is waited for by the service itself."""

_FAILED = ModelState.FAILED
_GONE = (DeviceState.QUARANTINED, DeviceState.LOST)


@dataclass(frozen=True, slots=True)
class Ailment:
    """What speaks against asking a model now, in words, and in how many seconds that may be over, where it is known."""

    message: str
    retry_in: float | None = None


def ailment(status: ModelStatus, devices: Mapping[str, DeviceState], age: float) -> Ailment | None:
    """What speaks against a model whose `status` was heard `age` seconds ago; None while nothing does."""
    if status.state is _FAILED:
        rest = None if status.retry_after_seconds is None else max(0.0, status.retry_after_seconds - age)
        if rest is not None and rest <= SHORT_REST_SECONDS:
            return None
        return Ailment(f"the model failed: {status.reason or 'no reason given'}", rest)
    gone = [name for name in status.devices if devices.get(name) in _GONE]
    return Ailment(f"its device {', '.join(gone)} is {devices[gone[0]]}") if gone else None
