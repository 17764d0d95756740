"""Memory of helper processes on accelerators: each opens a device context, which is reserved while the helper runs."""

from __future__ import annotations

from collections.abc import Iterable

from inference.authority.draft import Draft
from inference.authority.handlers.queries import device_view
from inference.authority.state import HelperKey
from inference.devices.device import CPU
from inference.estimate.overheads import context_bytes

HELPERS = "a helper process"
"""The owner of these holdings; no model has this id, because ids have no spaces."""


def begin(draft: Draft, key: HelperKey, devices: Iterable[str]) -> None:
    """A helper is started on these devices. On a full device the rest of the memory is reserved for it."""
    need = {}
    for reading in device_view.named(draft.state, devices, draft.now):
        if reading.id != CPU and not reading.unified:
            need[reading.id] = min(context_bytes(reading), draft.state.ledger.room(reading.id, exempt=True)[0])
    if any(need.values()) and key not in draft.state.helpers:
        id = f"helper#{draft.number()}"
        draft.set(
            ledger=draft.state.ledger.reserve(id, HELPERS, need, exempt=True),
            helpers={**draft.state.helpers, key: id},
        )


def end(draft: Draft, key: HelperKey) -> None:
    """A helper has ended."""
    id = draft.state.helpers.get(key)
    if id is not None:
        draft.set(
            ledger=draft.state.ledger.release(id),
            helpers={other: held for other, held in draft.state.helpers.items() if other != key},
        )
        draft.plan()
