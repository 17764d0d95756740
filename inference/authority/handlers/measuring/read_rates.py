"""The rate at which models read from the memory of each device, learned from their decode speed."""

from __future__ import annotations

from inference.authority.draft import Draft
from inference.authority.handlers.queries import decode_speed
from inference.authority.state import WorkerRecord


def learn(draft: Draft, worker: WorkerRecord, tokens_per_second: float) -> None:
    """Learns the rate of a device from the decode speed of a model: of its only device, or of the only one without a
    known rate. The time for reads from the other devices and for exchanges is subtracted.

    The largest measured rate counts, because small models do not reach the rate of the memory.
    """
    rates = draft.state.read_rates
    found = decode_speed.expected(rates, worker.spec, worker.estimate, worker.placement)
    if found is None:
        return
    seconds = 1 / tokens_per_second - found.exchange_seconds
    is_alone = len(found.read_bytes) == 1
    unknown = [device for device in found.read_bytes if is_alone or device not in rates]
    for device, count in found.read_bytes.items():
        seconds -= 0.0 if device in unknown else count / rates[device]
    if len(unknown) == 1 and seconds > 0:
        learn_rate(draft, unknown[0], found.read_bytes[unknown[0]] / seconds)


def learn_rate(draft: Draft, device: str, bytes_per_second: float) -> None:
    """Keeps a measured rate of a device if it is the largest so far."""
    rates = draft.state.read_rates
    if bytes_per_second > rates.get(device, 0.0):
        draft.set(read_rates={**rates, device: bytes_per_second})
