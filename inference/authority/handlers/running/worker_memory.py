"""Memory of workers beyond the plan.

Growth of host memory is booked, or the model leaves. The overhead on accelerators is learned from the first reading
after a load, and again after the first full batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from headgate.shared.units import format_bytes
from inference.authority.draft import Draft
from inference.authority.effects import CheckFiles, LearnOverhead, MeasureWorkers
from inference.authority.handlers.queries import device_view
from inference.authority.handlers.running import departure
from inference.authority.lifecycle import ACCEPTING, Reason
from inference.authority.placement.ledger import Ledger, LedgerError
from inference.authority.state import SIMULATED, Growth, State, WorkerRecord
from inference.devices.device import CPU, Reading
from inference.estimate.overheads import is_learnable
from inference.protocol import DeviceState

GROWTH_SLACK_BYTES = 64 * 2**20
COMPARABLE_SECONDS = 120.0
"""Readings from before and after a load are compared for this time; later, other programs may have changed too."""


def serving(state: State) -> tuple[str, ...]:
    """The workers that serve requests."""
    found = ((model, state.worker_of(model)) for model in state.models.values())
    return tuple(
        worker.id
        for model, worker in found
        if worker is not None and worker.ready is not None and not worker.ending and model.state in ACCEPTING
    )


def tick(draft: Draft) -> None:
    """Begins a measurement of the memory of workers and a check of the files of all models, at intervals."""
    if draft.now >= draft.state.memory_check_at:
        draft.set(memory_check_at=draft.now + draft.state.timing.watch_seconds)
        if workers := serving(draft.state):
            draft.emit(MeasureWorkers(workers))
        draft.emit(CheckFiles(tuple(model.effective for model in draft.state.models.values())))


def measured(draft: Draft, bytes: Mapping[str, int]) -> None:
    """The memory of workers was measured; the ledger has readings of the same moment."""
    there = {*serving(draft.state)}
    for id, seen in bytes.items():
        if id in there:
            _check_growth(draft, draft.worker(id), seen)


def growth_bytes(ledger: Ledger, holding: str, device: str, seen_bytes: int) -> int:
    """The bytes of `device` that the process of `holding` uses beyond its reservation.

    0 if they are at most GROWTH_SLACK_BYTES plus a tenth of the reservation, because buffers of requests come and go.
    """
    held = ledger.holdings[holding].bytes.get(device, 0)
    return seen_bytes - held if seen_bytes - held > GROWTH_SLACK_BYTES + held // 10 else 0


def _check_growth(draft: Draft, worker: WorkerRecord, seen: int) -> None:
    """Books the growth if it fits, else drains the model, so that other models do not lose memory."""
    more = growth_bytes(draft.state.ledger, worker.holding, CPU, seen)
    if not more:
        return
    note_growth(draft, worker, CPU, worker.grown_bytes + more)
    try:
        ledger = draft.state.ledger.grow(worker.holding, CPU, more)
    except LedgerError as error:
        draft.error(
            "the worker of %s uses %s more than reserved and is drained: %s", worker.model, format_bytes(more), error
        )
        departure.leave(draft, worker.model, Reason.OUTGREW, explanation=(str(error),))
        departure.stop_in(draft, worker.model, draft.state.settings.drain_seconds)
        return
    draft.set(ledger=ledger)
    draft.set_worker(worker.id, grown_bytes=worker.grown_bytes + more)
    draft.changed()
    draft.warning("the worker of %s uses %s more than reserved; it is booked now", worker.model, format_bytes(more))


def note_growth(draft: Draft, worker: WorkerRecord, device: str, grown_bytes: int) -> None:
    """Stores all growth on `device` for an alert, unless it can be learned as overhead: on an accelerator, without a
    configured `memory_overhead`.

    The host memory of a model on accelerators has no setting, so its overhead is None and the alert recommends none.
    A model has one alert: for growth that has a setting, else for the largest growth.
    """
    overhead = worker.estimate.overhead_bytes.get(device, 0) if device in worker.placement.devices else None
    if device != CPU and worker.spec.memory_overhead is None and is_learnable((overhead or 0) + grown_bytes):
        return
    noted = Growth(worker.holding, grown_bytes, overhead, draft.now)
    advice = draft.state.advice
    before = advice.outgrown.get(worker.model)
    if before is None or before.holding != worker.holding or _rank(noted) > _rank(before):
        draft.set(advice=replace(advice, outgrown={**advice.outgrown, worker.model: noted}))


def _rank(growth: Growth) -> tuple[bool, int]:
    return growth.overhead_bytes is not None, growth.bytes + (growth.overhead_bytes or 0)


def reclaim(draft: Draft, bytes: Mapping[str, int]) -> int:
    """Releases booked growth that is no longer in the processes; returns the bytes."""
    there = {*serving(draft.state)}
    total = 0
    for id, seen in bytes.items():
        worker = draft.state.workers.get(id)
        if worker is None or id not in there or not worker.grown_bytes:
            continue
        held = draft.state.ledger.holdings[worker.holding].bytes
        planned = held[CPU] - worker.grown_bytes
        back = max(0, held[CPU] - max(planned, seen))
        ledger = draft.state.ledger.shrink(worker.holding, {**held, CPU: held[CPU] - back})
        draft.set(ledger=ledger)
        draft.set_worker(id, grown_bytes=worker.grown_bytes - back)
        total += back
    return total


# --- overhead on accelerators ----------------------------------------------------------------------------------------


def learn_overhead(draft: Draft, worker: WorkerRecord) -> None:
    """A worker was loaded, or has computed a full batch: its overhead is learned from the next reading."""
    if worker.device.kind not in SIMULATED and any(name != CPU for name in worker.before):
        draft.set_worker(worker.id, overhead_read=device_view.read(draft))


def learn_after_full_batch(draft: Draft, worker: WorkerRecord) -> None:
    """A heartbeat has come: with the first full batch pools and graphs have their size."""
    tokens = 0 if worker.beat is None or worker.ready is None else worker.beat.largest_step
    if tokens >= worker.spec.ubatch and not worker.has_full_batch:
        learn_overhead(draft, draft.set_worker(worker.id, has_full_batch=True))


def overhead_read(draft: Draft, *, failed: bool) -> None:
    """A reading has come."""
    for worker in list(draft.state.workers.values()):
        if worker.overhead_read is None or draft.state.devices.reads_done < worker.overhead_read:
            continue
        draft.set_worker(worker.id, overhead_read=None)
        if failed or worker.ready is None:
            continue
        for name in worker.before:
            reading = device_view.reading(draft.state, name, draft.now)
            if name != CPU and reading is not None and reading.state is DeviceState.HEALTHY:
                seen = _overhead(draft, worker, reading)
                if seen is not None:
                    draft.emit(LearnOverhead(reading, seen, worker.estimate.shape))


def _overhead(draft: Draft, worker: WorkerRecord, reading: Reading) -> int | None:
    """The bytes of a worker on a device beyond its buffers, None if unknown.

    From the driver's figure for its process, else from the readings before the load and soon after it, else from its
    booked growth.
    """
    buffers = buffer_bytes(worker, reading.id)
    if (found := process_bytes(worker, reading)) is not None:
        return found - buffers
    if draft.now - worker.ready_at <= COMPARABLE_SECONDS:
        return worker.before[reading.id].observed(reading, draft.state.ledger, worker.holding, buffers)
    growth = worker.device_growth.get(reading.id)
    if growth is None or worker.spec.mmproj or worker.spec.lora:  # their bytes are part of the planned overhead
        return None
    estimate = worker.estimate
    planned = estimate.overhead_bytes.get(reading.id, 0) - estimate.headroom_bytes.get(reading.id, 0)
    return planned + growth.bytes


def buffer_bytes(worker: WorkerRecord, device: str) -> int:
    """The bytes of the buffers of a loaded worker."""
    return sum(buffer.bytes for buffer in worker.ready.buffers if buffer.device == device) if worker.ready else 0


def process_bytes(worker: WorkerRecord, reading: Reading) -> int | None:
    """The driver's figure for the process of a worker, None if unknown.

    A figure below its buffers or above the use of the device belongs to a process of another namespace with this id.
    """
    found = reading.process_bytes.get(worker.pid or 0)
    covers = found is not None and buffer_bytes(worker, reading.id) <= found <= reading.used_bytes
    return found if covers else None
