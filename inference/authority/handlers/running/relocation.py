"""A moved model: the one device of its next load, and its way back if that fails."""

from __future__ import annotations

from inference.authority.device_health import USABLE
from inference.authority.draft import Draft
from inference.authority.state import ModelRecord
from inference.devices.device import Reading
from inference.errors import InferenceError


def options(model: ModelRecord, devices: tuple[Reading, ...], found: tuple[Reading, ...]) -> tuple[Reading, ...]:
    """`devices`, or the one that a move asks for."""
    reading = next((item for item in found if item.id == model.target), None)
    if reading is None:
        return devices
    return (reading,) if reading.state in USABLE else ()


def turn_back(draft: Draft, id: str, error: InferenceError) -> bool:
    """A load of a moved model failed or became impossible: it goes home, and its requests wait on.

    First to its home, then anywhere. False when it is not being moved, or was nowhere before.
    """
    model = draft.model(id)
    if model.target is None or model.home is None:
        return False
    where = model.home if model.target != model.home else None
    draft.warning("%s cannot be loaded on %s and goes back to %s: %s", id, model.target, where or "any device", error)
    draft.set_model(id, moved_in_vain=model.moved_in_vain or error, target=where, retry_at=draft.now)
    draft.plan()
    return True
