"""Growth of loaded models on accelerators: it is booked to its model, or the model leaves, before it counts as foreign.

Which model it belongs to is decided by `placement.device_growth`, for each reading during which the bookings of the
device did not change.
"""

from __future__ import annotations

from collections.abc import Mapping

from headgate.shared.units import format_bytes
from inference.authority.draft import Draft
from inference.authority.handlers.queries import device_view
from inference.authority.handlers.running import departure, worker_memory
from inference.authority.lifecycle import SERVING, Reason
from inference.authority.placement.device_growth import (
    Attribution,
    Change,
    Grown,
    Mark,
    Occupant,
    attribute,
    slack_bytes,
    tolerated_bytes,
)
from inference.authority.placement.ledger import Holding, LedgerError, Phase
from inference.authority.state import State, WorkerRecord
from inference.devices.device import CPU, Reading
from inference.devices.signs import Sign


def observed(draft: Draft, before: tuple[Reading, ...], *, is_read: bool) -> None:
    """New readings were entered into the ledger; `before` are the previous ones."""
    known = {item.id: item for item in before}
    measured = draft.state.devices.measured
    fresh = {item.id for item in measured if item.id != CPU and (is_read or known.get(item.id) != item)}
    if not fresh:
        return
    ledger, foreign = draft.state.ledger, _foreign_bytes(draft.state)
    for reading in device_view.readings(draft.state, draft.now):
        if reading.id in fresh and _has_figures(draft.state, reading):
            changes, small_bytes = _decide(draft, reading)
            spare = tolerated_bytes(reading.total_bytes) - small_bytes
            for change in sorted(changes, key=lambda change: change.bytes):
                spare -= _book(draft, reading, change, spare)
    if draft.state.ledger is not ledger or _foreign_bytes(draft.state) != foreign:
        draft.state = device_view.entered(draft.state, draft.now)


def _foreign_bytes(state: State) -> dict[str, int]:
    return {device: mark.foreign_bytes for device, mark in state.devices.growth.items()}


def _has_figures(state: State, reading: Reading) -> bool:
    """Whether a reading is of an accelerator with its own memory that could be read."""
    return reading.id in state.ledger.accounts and reading.total_bytes > 0 and reading.sign is Sign.HEALTHY


def _decide(draft: Draft, reading: Reading) -> tuple[tuple[Change, ...], int]:
    """The changes of models that a reading shows, and the bytes of growth too small to be booked; updates the mark
    of the device.
    """
    state, devices, device = draft.state, draft.state.devices, reading.id
    is_reading = devices.reads_begun > devices.reads_done
    now = _bookings(state.ledger.holdings, device)
    if is_reading and _bookings(devices.booked, device) != now:
        return (), 0
    began_at = devices.read_begun_at if is_reading else draft.now
    workers = [worker for worker in state.workers.values() if worker.holding in now]
    unexplained = reading.used_bytes - state.ledger.balance(device).ours_bytes
    mark = devices.growth.get(device)
    overheads = {holding: count for holding, count in mark.overheads.items() if holding in now} if mark else {}
    overheads |= {
        worker.holding: worker.estimate.overhead_bytes.get(device, 0)
        for worker in workers
        if now[worker.holding][0] is not Phase.RESERVED
    }
    if mark is None:
        found = Attribution((), state.ledger.balance(device).foreign_bytes)
    else:
        # a model that has left may have used less than was booked; the difference may look like new foreign use
        left = sum(count for holding, count in mark.overheads.items() if holding not in now)
        found = attribute(
            unexplained,
            mark.foreign_bytes + left,
            [_occupant(state, worker, reading, mark.at) for worker in workers if _is_serving(state, worker)],
            slack_bytes(reading.total_bytes),
            is_settled=all(phase is Phase.RESIDENT for phase, _ in now.values()),
        )
    _set_mark(draft, device, Mark(found.foreign_bytes, began_at, overheads))
    return found.changes, found.small_bytes


def _bookings(holdings: Mapping[str, Holding], device: str) -> dict[str, tuple[Phase, int]]:
    return {id: (item.phase, item.bytes[device]) for id, item in holdings.items() if item.bytes.get(device)}


def _is_serving(state: State, worker: WorkerRecord) -> bool:
    model = state.models.get(worker.model)
    is_current = model is not None and model.worker == worker.id and model.state in SERVING
    return is_current and worker.ready is not None and not worker.ending


def _occupant(state: State, worker: WorkerRecord, reading: Reading, since: float) -> Occupant:
    growth = worker.device_growth.get(reading.id)
    is_active = bool(worker.leases) or worker.active_at >= since
    return Occupant(
        worker.holding,
        state.ledger.holdings[worker.holding].bytes[reading.id],
        growth.bytes if growth else 0,
        worker_memory.process_bytes(worker, reading),
        worker.active_at if is_active else None,
    )


def _book(draft: Draft, reading: Reading, change: Change, spare: int) -> int:
    """Books a change; returns the bytes that it left unbooked.

    Growth that does not fit is left unbooked up to `spare` bytes. More is booked, and its model leaves, so that no
    other model pays.
    """
    worker = next(item for item in draft.state.workers.values() if item.holding == change.holding)
    before = worker.device_growth.get(reading.id)
    evidence = before.evidence if before and change.bytes < 0 else change.evidence
    grown = Grown((before.bytes if before else 0) + change.bytes, evidence)
    ledger = draft.state.ledger
    problem = ""
    if change.bytes < 0:
        held = ledger.holdings[worker.holding].bytes
        ledger = ledger.shrink(worker.holding, {**held, reading.id: held[reading.id] + change.bytes})
    else:
        try:
            ledger = ledger.grow(worker.holding, reading.id, change.bytes)
        except LedgerError as error:
            if change.bytes <= spare:
                return change.bytes
            problem = str(error)
            ledger = ledger.grow(worker.holding, reading.id, change.bytes, beyond=True)
    draft.set(ledger=ledger)
    growths = {**worker.device_growth, reading.id: grown}
    draft.set_worker(worker.id, device_growth={name: item for name, item in growths.items() if item.bytes})
    draft.changed()
    if change.bytes < 0:
        return 0
    worker_memory.note_growth(draft, worker, reading.id, grown.bytes)
    worker_memory.learn_overhead(draft, worker)
    what = sentence(reading.id, grown)
    if not problem:
        draft.warning("%s %s; it is booked now", worker.model, what)
        return 0
    draft.error("%s %s, and is drained: %s", worker.model, what, problem)
    departure.leave(draft, worker.model, Reason.OUTGREW, explanation=(problem, what))
    departure.stop_in(draft, worker.model, draft.state.settings.drain_seconds)
    return 0


def sentence(device: str, grown: Grown) -> str:
    """The growth of a model in words."""
    return f"uses {format_bytes(grown.bytes)} of {device} more than planned ({grown.evidence})"


def _set_mark(draft: Draft, device: str, mark: Mark) -> None:
    draft.set_devices(growth={**draft.state.devices.growth, device: mark})
