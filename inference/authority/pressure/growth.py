"""What happens to a worker that holds more memory than its reservation.

The growth is reserved if it fits; otherwise the worker has to leave, so that other models are not affected.
"""

from __future__ import annotations

from dataclasses import dataclass

from inference.authority.placement.ledger import Ledger, LedgerError

SLACK_BYTES = 64 * 2**20
"""A worker may exceed its reservation by this and a tenth of it, for temporary buffers of requests."""


@dataclass(frozen=True, slots=True)
class Growth:
    """A worker is `bytes` above its reservation. `ledger` includes them; None if they do not fit, for `reason`."""

    bytes: int
    ledger: Ledger | None
    reason: str = ""


def growth(ledger: Ledger, holding: str, device: str, seen_bytes: int) -> Growth | None:
    """The growth of a process with `holding` that uses `seen_bytes` of `device`; None without growth.

    `ledger` must have a new reading of the device, in which the growth counts as foreign. Raises LedgerError if the
    holding is not resident.
    """
    held = ledger.holdings[holding].bytes.get(device, 0)
    more = seen_bytes - held
    if more <= SLACK_BYTES + held // 10:
        return None
    try:
        return Growth(more, ledger.grow(holding, device, more))
    except LedgerError as error:
        return Growth(more, None, str(error))
