"""Learns the overhead of a worker on its accelerators from the first reading after its load."""

from __future__ import annotations

from inference.authority.draft import Draft
from inference.authority.effects import LearnOverhead
from inference.authority.handlers.queries import device_view
from inference.authority.state import Learning, WorkerRecord
from inference.devices.device import CPU
from inference.protocol import DeviceState

KNOWN_KINDS = frozenset({"sim"})
"""Simulated devices hold buffers and nothing else."""


def begin(draft: Draft, worker: WorkerRecord) -> None:
    """A worker was loaded."""
    devices = tuple(name for name in worker.before if name != CPU and worker.device.kind not in KNOWN_KINDS)
    if devices:
        waiting = Learning(worker.id, devices, device_view.read(draft))
        draft.set(learning=(*draft.state.learning, waiting))


def read_done(draft: Draft, *, failed: bool) -> None:
    """A reading has come."""
    due = [item for item in draft.state.learning if draft.state.devices.done >= item.needs_read]
    if not due:
        return
    draft.set(learning=tuple(item for item in draft.state.learning if item not in due))
    for item in due if not failed else ():
        worker = draft.state.workers.get(item.worker)
        if worker is None or worker.ready is None:
            continue
        for name in item.devices:
            reading = device_view.reading(draft.state, name, draft.now)
            buffers = sum(buffer.bytes for buffer in worker.ready.buffers if buffer.device == name)
            if reading is not None and reading.state is DeviceState.HEALTHY:
                seen = worker.before[name].observed(reading, draft.state.ledger, worker.holding, buffers)
                if seen is not None:
                    draft.emit(LearnOverhead(reading, seen))
