"""Gives memory back on an operator's word: one model, all idle ones, what is retained, what lies scattered.

Who may leave is decided by the same standings as in every plan. What is answered was measured: bytes that the ledger
got back, and bytes of processes before and after.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from inference import figures
from inference.authority.placement.plan import Standing
from inference.authority.placement.repack import Piece, repack
from inference.devices.host import CPU
from inference.errors import DeadlineExceeded, InferenceError, InvalidRequestError
from inference.evictions import Action, Eviction, Reason
from inference.loads import RETURN_SECONDS
from inference.protocol import DeviceState, ModelState
from inference.worker import malloc_trim
from inference.workers.os_api import private_bytes
from inference.workers.worker_link import BEAT_SECONDS

if TYPE_CHECKING:
    from inference.authority.shell import Authority
    from inference.model import Model
    from inference.workers.worker_process import WorkerProcess

LEAVE_SECONDS = 30.0
"""Beside what an answer may still take, a model that leaves gets so long until its memory is back."""
ANSWER_SECONDS = 6 * BEAT_SECONDS
"""A worker that was told to drop something shows it in its beats within this."""
_IDLE = (Standing.IDLE, Standing.WARM)
_S = ModelState


async def evict(authority: Authority, model: Model, action: Action = Action.UNLOAD) -> dict[str, Any]:
    """Lets one model leave and returns its record, with the memory that came back.

    Raises InvalidRequestError for a pinned one and DeadlineExceeded when its memory is not back in time.
    """
    if model.spec.pinned:
        raise InvalidRequestError(
            f"the model {model.id!r} is pinned and is not evicted; POST /models/{model.id}/unload unloads it all the "
            "same",
            param="model",
        )
    if model.running is None:
        return {"model_name": model.id, "evicted": False, "memory_freed_mb": 0.0}
    back = authority.evictions.next_of(model.id)
    authority.loads.leave(model, Reason.BY_HAND, action)
    authority.loop.call_later(authority.settings.drain_seconds, authority.loads.hurry, model, model.running)
    records = await _all_back([back], authority.settings.drain_seconds + LEAVE_SECONDS)
    if not records:
        raise DeadlineExceeded(f"{model.id!r} was told to leave, and its memory is not back yet")
    return {"evicted": True, **records[0].to_json()}


async def collect(authority: Authority) -> dict[str, Any]:
    """Unloads every idle model, and trims what stays. `freed_mb` is what models gave back and what trimming did."""
    now = authority.loop.time()
    idle = [model for model in authority.models.values() if model.running and model.standing(now) in _IDLE]
    backs = [authority.evictions.next_of(model.id) for model in idle]
    for model in idle:
        authority.loads.leave(model, Reason.BY_HAND, explanation=("idle when memory was collected",))
    records = await _all_back(backs, RETURN_SECONDS + LEAVE_SECONDS)
    trimmed = await _trim(_workers(authority))
    for model in authority.models.values():
        _reclaim(authority, model)
    freed = sum(record.memory_freed_mb for record in records)
    return {
        "freed_mb": round(freed + figures.mib(trimmed), 3),
        "models_unloaded": len(records),
        "models": [record.model_name for record in records],
        "trimmed_mb": figures.mib(trimmed),
    }


async def defragment(authority: Authority) -> dict[str, Any]:
    """Drops retained cells, trims heaps, takes grown reservations back, and moves idle models together."""
    before = _largest_room(authority)
    workers = _workers(authority)
    await _fresh_beats(workers)  # the last ones may be older than the last answers
    retained = _retained(workers)
    trimmed = await _trim(workers)
    still = _retained(workers)
    cells = sum(max(0, count - still.get(worker, count)) for worker, count in retained.items())
    reclaimed = sum(_reclaim(authority, model) for model in authority.models.values())
    await authority.inventory.refresh()
    moved, refused = await _repack(authority)
    authority.observe()
    authority.pump()
    after = _largest_room(authority)
    return {
        "cells_released": cells,
        "trimmed_mb": figures.mib(trimmed),
        "reclaimed_mb": figures.mib(reclaimed),
        "moved": moved,
        "refused": refused,
        "largest_room_mb": {"before": figures.mib(before), "after": figures.mib(after)},
    }


async def relieve(authority: Authority, *, on_host: bool) -> int:
    """Before a model is made smaller: retained prefixes are dropped, heaps trimmed, grown reservations taken back.

    With `on_host`, because host memory is what is missing, models that are only kept warm leave as well. Returns the
    bytes that were given back by then.
    """
    trimmed = await _trim(_workers(authority))
    reclaimed = sum(_reclaim(authority, model) for model in authority.models.values())
    if on_host:
        for model in list(authority.models.values()):
            if model.standing(authority.loop.time()) is Standing.WARM:
                authority.loads.leave(model, Reason.MEMORY_WANTED, explanation=("everything else was tried",))
    return trimmed + reclaimed


async def _all_back(futures: Iterable[asyncio.Future[Eviction]], seconds: float) -> list[Eviction]:
    """The records that are there within `seconds`."""
    waiting = list(futures)
    if not waiting:
        return []
    done, late = await asyncio.wait(waiting, timeout=seconds)
    for future in late:
        future.cancel()
    return [future.result() for future in waiting if future in done]


# --- what workers and the service itself hold without need ------------------------------------------------------------
def _workers(authority: Authority) -> list[WorkerProcess]:
    """Those that serve."""
    return [
        model.running.worker
        for model in authority.models.values()
        if model.running is not None and model.running.ready is not None and model.state in (_S.READY, _S.BUSY)
    ]


def _retained(workers: Iterable[WorkerProcess]) -> dict[WorkerProcess, int]:
    """Cells that each retains, by its last beat."""
    return {worker: worker.beat.cells_retained for worker in workers if worker.beat is not None}


async def _trim(workers: Sequence[WorkerProcess]) -> int:
    """These drop what they retain and trim their heaps, and so does the service; the bytes that are gone."""
    pids = [os.getpid(), *(worker.pid for worker in workers)]
    bytes_before = {pid: private_bytes(pid) or 0 for pid in pids}
    for worker in workers:
        worker.forget()
    await asyncio.to_thread(_trim_ourselves)
    for _ in range(2):  # the first beat after the order may have been on its way before it
        await _fresh_beats(workers)
    return sum(max(0, bytes_before[pid] - (private_bytes(pid) or bytes_before[pid])) for pid in pids)


def _trim_ourselves() -> None:
    """Full collection: the service stands still for some tens of milliseconds, as only an operator may ask for."""
    gc.collect()
    malloc_trim.trim()


async def _fresh_beats(workers: Iterable[WorkerProcess]) -> None:
    """Returns when every worker has sent a beat, or ANSWER_SECONDS have passed."""
    old = {worker: worker.beat for worker in workers}
    deadline = asyncio.get_running_loop().time() + ANSWER_SECONDS
    while any(worker.beat is beat and not worker.exited.done() for worker, beat in old.items()):
        if asyncio.get_running_loop().time() > deadline:
            return
        await asyncio.sleep(BEAT_SECONDS / 10)


def _reclaim(authority: Authority, model: Model) -> int:
    """Takes back what was booked for a worker's growth and is not in its process any more; the bytes."""
    running = model.running
    if running is None or not running.grown_bytes or model.state not in (_S.READY, _S.BUSY):
        return 0
    held = authority.ledger.holdings[running.holding].bytes
    seen = private_bytes(running.worker.pid)
    if seen is None:
        return 0
    planned = held[CPU] - running.grown_bytes
    back = max(0, held[CPU] - max(planned, seen))
    authority.ledger = authority.ledger.shrink(running.holding, {**held, CPU: held[CPU] - back})
    running.grown_bytes -= back
    return back


def _largest_room(authority: Authority) -> int:
    """The most that one model could get on one device now, an accelerator where there is one; bytes."""
    balances = authority.balances()
    accelerators = [reading.id for reading in authority.inventory.accelerators() if reading.id in balances]
    return max((balances[device].room_bytes for device in accelerators or balances), default=0)


# --- free memory that lies scattered over devices --------------------------------------------------------------------
async def _repack(authority: Authority) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Moves idle models so that the largest room grows: (who moved from where to where, who could not and why)."""
    balances = authority.balances()
    rooms = {
        reading.id: balances[reading.id].room_bytes
        for reading in authority.inventory.accelerators()
        if reading.state is DeviceState.HEALTHY and not reading.unified
    }
    pieces = []
    for model in list(authority.models.values()):
        try:
            needs = await _needs(authority, model, rooms) if _is_movable(model, rooms) else {}
        except InferenceError:  # its file cannot be used any more: it stays where it is
            continue
        if _is_movable(model, rooms):  # still
            pieces.append(_piece(authority, model, needs))
    moved: list[dict[str, Any]] = []
    refused: list[dict[str, Any]] = []
    for shift in repack(rooms, pieces):
        told = {"model_name": shift.model, "source": shift.source, "target": shift.target}
        try:
            await authority.moving.move(authority.resolve(shift.model), shift.target, LEAVE_SECONDS)
        except InferenceError as error:
            refused.append({**told, "reason": error.message})
        else:
            moved.append(told)
    return moved, refused


def _is_movable(model: Model, devices: Container[str]) -> bool:
    """Idle, on one of these devices alone, and bound to none; a pinned one moves as well: it stays loaded."""
    running = model.running
    if running is None or model.state is not _S.READY or model.in_flight or model.queue.waiters:
        return False
    bound = model.spec.dedicated or model.spec.gpu_index is not None
    return not bound and len(running.placement.devices) == 1 and running.placement.device in devices


async def _needs(authority: Authority, model: Model, devices: Iterable[str]) -> dict[str, int]:
    """What the model would need on each device; bytes. Raises ModelFailed."""
    need = {}
    for name in devices:
        if (reading := authority.inventory.get(name)) is not None:
            await authority.background.measure_on(model, reading)
            need[name] = model.estimates[name].need[name]
    return need


def _piece(authority: Authority, model: Model, needs: Mapping[str, int]) -> Piece:
    """What the model holds where it is, and what it would need elsewhere."""
    assert model.running is not None
    device = model.running.placement.device
    held = authority.ledger.holdings[model.running.holding].bytes[device]
    return Piece(model.id, device, held, {name: count for name, count in needs.items() if name != device})
