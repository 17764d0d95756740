"""Defragmentation: releases retained cells and unused heap, and moves idle models to get a large free area."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import Any

from headgate.shared.units import mib
from inference.authority.draft import Draft
from inference.authority.effects import TrimWorkers
from inference.authority.events import Move, Trimmed
from inference.authority.handlers.measuring import estimates
from inference.authority.handlers.placing import moving
from inference.authority.handlers.queries import device_view
from inference.authority.handlers.running.worker_memory import reclaim, serving
from inference.authority.pending_commands import DefragmentCommand
from inference.authority.placement.repack import Piece, repack
from inference.authority.state import EstimateKey, ModelRecord, State
from inference.devices.device import CPU
from inference.errors import InferenceError
from inference.protocol import DeviceState, ModelState
from inference.settings import ModelSpec

MOVE_SECONDS = 30.0


def begin(draft: Draft, id: int) -> None:
    """Begins a defragmentation."""
    command = DefragmentCommand(_largest_room(draft.state, draft.now))
    draft.set_command(id, command)
    draft.emit(TrimWorkers(id, serving(draft.state), fresh_first=True))


def trimmed(draft: Draft, id: int, command: DefragmentCommand, event: Trimmed) -> None:
    """Workers have dropped retained prefixes."""
    cells = sum(max(0, before - after) for before, after in event.retained.values())
    changed = replace(
        command,
        trimmed_bytes=event.freed_bytes,
        cells=cells,
        reclaimed_bytes=reclaim(draft, event.bytes),
        awaited_read=device_view.read(draft),
    )
    draft.set_command(id, changed)


def advance(draft: Draft, id: int, command: DefragmentCommand) -> None:
    """Measures, plans, and moves one model after the other; the readings are current."""
    if (
        command.awaited_read is None
        or draft.state.devices.reads_done < command.awaited_read
        or command.moving is not None
    ):
        return
    if command.planned is None:
        rooms = _rooms(draft.state, draft.now)
        if _measures(draft, command, rooms):
            return
        pieces = [
            _piece(draft.state, model, rooms)
            for model in draft.state.models.values()
            if _is_movable(draft.state, model, rooms) and model.id not in command.unmeasurable
        ]
        command = replace(command, planned=repack(rooms, pieces))
    assert command.planned is not None
    if not command.planned:
        draft.answer(id, _report(draft, command))
        return
    first, *rest = command.planned
    command = replace(command, planned=tuple(rest), moving=first)
    draft.set_command(id, command)
    moving.begin(draft, draft.number(), Move(first.model, first.target, MOVE_SECONDS), parent=id)


def _rooms(state: State, now: float) -> dict[str, int]:
    found = device_view.balances(state, now)
    return {
        item.id: found[item.id].room_bytes
        for item in device_view.accelerators(state, now)
        if item.state is DeviceState.HEALTHY and not item.unified
    }


def _measures(draft: Draft, command: DefragmentCommand, rooms: Container[str]) -> bool:
    """Begins the next missing measurement; False if there is none."""
    for model in draft.state.models.values():
        if model.id in command.unmeasurable or not _is_movable(draft.state, model, rooms):
            continue
        known = draft.state.estimates_of(model.effective)
        for item in device_view.accelerators(draft.state, draft.now):
            key = EstimateKey(model.effective, (item.id,))
            if item.id in rooms and item.id not in known and estimates.request(draft, key):
                return True
    return False


def _is_movable(state: State, model: ModelRecord, devices: Container[str]) -> bool:
    """Whether a model may be moved: idle, on one device, and not bound to it. Pinned models may move too."""
    worker = state.worker_of(model)
    if worker is None or model.state is not ModelState.READY or worker.leases or model.queue.waiters:
        return False
    bound = model.spec.dedicated or model.spec.gpu_index is not None
    return not bound and len(worker.placement.devices) == 1 and worker.placement.device in devices


def _piece(state: State, model: ModelRecord, rooms: Container[str]) -> Piece:
    """The bytes of the model on its device, and its need on the others."""
    worker = state.worker_of(model)
    assert worker is not None
    device = worker.placement.device
    held = state.ledger.holdings[worker.holding].bytes[device]
    known = state.estimates_of(model.effective)
    needs = {name: item.need[name] for name, item in known.items() if name in rooms and name != device}
    return Piece(model.id, device, held, needs)


def cannot_measure(draft: Draft, spec: ModelSpec, error: InferenceError) -> None:
    """A model cannot be measured, so it is not moved."""
    del error
    for id, command in list(draft.state.commands.items()):
        if isinstance(command, DefragmentCommand):
            changed = replace(command, unmeasurable=command.unmeasurable | {spec.id})
            draft.set_command(id, changed)


def _largest_room(state: State, now: float) -> int:
    """The largest free area on one accelerator, or on the host if there are no accelerators; bytes."""
    found = device_view.balances(state, now)
    there = [item.id for item in device_view.accelerators(state, now) if item.id in found]
    return max((found[device].room_bytes for device in there or [CPU] if device in found), default=0)


def _report(draft: Draft, command: DefragmentCommand) -> dict[str, Any]:
    shifts = [
        (shift.reason, {"model_name": shift.model, "source": shift.source, "target": shift.target})
        for shift in command.done
    ]
    return {
        "cells_released": command.cells,
        "trimmed_mb": mib(command.trimmed_bytes),
        "reclaimed_mb": mib(command.reclaimed_bytes),
        "moved": [data for reason, data in shifts if reason is None],
        "refused": [{**data, "reason": reason} for reason, data in shifts if reason is not None],
        "largest_room_mb": {
            "before": mib(command.before_bytes),
            "after": mib(_largest_room(draft.state, draft.now)),
        },
    }
