"""Decides what happens to a worker that holds more memory than was reserved for it; never looks at a process.

Other tenants never pay for it: the growth is reserved if it fits, else the worker has to leave.
"""

from __future__ import annotations

from dataclasses import dataclass

from inference.authority.placement.ledger import Ledger, LedgerError

SLACK_BYTES = 64 * 2**20
"""Of a reservation that a worker may exceed by this and a tenth: buffers of requests that come and go."""


@dataclass(frozen=True, slots=True)
class Growth:
    """A worker is `bytes` above its reservation. `ledger` has them booked; None: they do not fit, for this reason."""

    bytes: int
    ledger: Ledger | None
    reason: str = ""


def growth(ledger: Ledger, holding: str, device: str, seen_bytes: int) -> Growth | None:
    """What follows from `seen_bytes` of `device` in the process that has `holding`; None while it is within.

    `ledger` has taken a reading of the device just now, so that the growth is in it as somebody else's. Raises
    LedgerError when the holding is not resident.
    """
    held = ledger.holdings[holding].bytes.get(device, 0)
    more = seen_bytes - held
    if more <= SLACK_BYTES + held // 10:
        return None
    try:
        return Growth(more, ledger.grow(holding, device, more))
    except LedgerError as error:
        return Growth(more, None, str(error))
