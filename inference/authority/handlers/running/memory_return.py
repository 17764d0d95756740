"""Release of the memory of ended workers: host memory at once, device memory when a reading shows it as free.

Memory that a device does not show as free in time counts as foreign.
"""

from __future__ import annotations

from dataclasses import replace

from inference.authority.draft import Draft
from inference.authority.handlers.queries import device_view
from inference.authority.handlers.running import endings
from inference.authority.state import Return, TimerKind, WorkerRecord
from inference.devices.device import CPU

FIRST_PAUSE_SECONDS = 0.02
LAST_PAUSE_SECONDS = 0.25
"""Pauses between readings; short at first, because memory is usually free at once and a load waits for it."""
SLACK_BYTES = 64 * 2**20


def give_back(draft: Draft, worker: WorkerRecord) -> None:
    """Releases the memory of an ended worker: host memory at once, device memory when a reading shows it."""
    if all(device == CPU for device in worker.placement.need):
        endings.release(draft, worker.holding, worker.model, worker.departure)
        return
    devices = worker.placement.devices
    awaited = Return(
        worker.id,
        worker.model,
        worker.holding,
        devices,
        {name: draft.state.ledger.balance(name).foreign_bytes for name in devices},
        draft.now + draft.state.timing.return_seconds,
        FIRST_PAUSE_SECONDS,
        draft.now,
        device_view.read(draft),
        worker.departure,
    )
    draft.set(returns={**draft.state.returns, worker.holding: awaited})
    draft.timer(TimerKind.RETURN, worker.holding, awaited.deadline)


def look(draft: Draft, *, problem: str | None = None) -> None:
    """A reading has come or failed: decides for all memory that waited for it."""
    for holding, awaited in list(draft.state.returns.items()):
        if draft.state.devices.done < awaited.needs_read:
            continue
        if problem is not None:
            first = awaited.pause == FIRST_PAUSE_SECONDS
            if first:
                draft.warning(
                    "%s could not be read after the worker of %s ended: %s", awaited.devices[0], awaited.model, problem
                )
        elif all(_is_back(draft, awaited, name) for name in awaited.devices):
            _forget(draft, holding)
            endings.release(draft, holding, awaited.model, awaited.departure)
            draft.changed()
            continue
        pause = min(2 * awaited.pause, LAST_PAUSE_SECONDS)
        again = replace(awaited, pause=pause, look_at=draft.now + awaited.pause, needs_read=2**62)
        draft.set(returns={**draft.state.returns, holding: again})
        draft.timer(TimerKind.RETURN, holding, min(again.look_at, again.deadline))


def due(draft: Draft, holding: str) -> None:
    """A reading is due, or the memory is overdue."""
    awaited = draft.state.returns.get(holding)
    if awaited is None:
        return
    if draft.now < awaited.deadline:
        again = replace(awaited, needs_read=device_view.read(draft))
        draft.set(returns={**draft.state.returns, holding: again})
        draft.timer(TimerKind.RETURN, holding, awaited.deadline)
        return
    _forget(draft, holding)
    draft.warning(
        "not all memory on %s became free after %s; it counts as foreign", ", ".join(awaited.devices), awaited.model
    )
    draft.set(ledger=draft.state.ledger.forfeit(holding))
    endings.record(draft, awaited.model, awaited.departure, 0)
    draft.changed()
    draft.plan()


def _forget(draft: Draft, holding: str) -> None:
    draft.set(returns={id: awaited for id, awaited in draft.state.returns.items() if id != holding})
    draft.cancel(TimerKind.RETURN, holding)


def _is_back(draft: Draft, awaited: Return, device: str) -> bool:
    reading = device_view.reading(draft.state, device, draft.now)
    ledger = draft.state.ledger
    ours = ledger.balance(device).ours_bytes - ledger.holdings[awaited.holding].bytes.get(device, 0)
    return reading is None or reading.used_bytes <= awaited.foreign[device] + ours + SLACK_BYTES
