"""Moved models: the device of the next load, and the return after a failure."""

from __future__ import annotations

from inference.authority.device_health import USABLE
from inference.authority.draft import Draft
from inference.authority.state import ModelRecord
from inference.devices.device import Reading
from inference.errors import InferenceError


def options(model: ModelRecord, devices: tuple[Reading, ...], found: tuple[Reading, ...]) -> tuple[Reading, ...]:
    """`devices`, or the target of a move."""
    reading = next((item for item in found if item.id == model.target), None)
    if reading is None:
        return devices
    return (reading,) if reading.state in USABLE else ()


def turn_back(draft: Draft, id: str, error: InferenceError) -> bool:
    """A load of a moved model failed: it returns to its old device, then to any device, while its requests wait.

    False if it is not being moved, or was not loaded before.
    """
    model = draft.model(id)
    if model.target is None or model.home is None:
        return False
    where = model.home if model.target != model.home else None
    draft.warning("%s cannot be loaded on %s and returns to %s: %s", id, model.target, where or "any device", error)
    draft.set_model(id, moved_in_vain=model.moved_in_vain or error, target=where, retry_at=draft.now)
    draft.plan()
    return True
