"""What a worker takes of a device beside its buffers, from readings before and after its load."""

from __future__ import annotations

from dataclasses import dataclass

from inference.authority.placement.ledger import Ledger, Phase
from inference.devices.device import Reading


@dataclass(frozen=True, slots=True)
class Before:
    """A device before a load: bytes in use by everybody, and the holdings that were resident on it."""

    used_bytes: int
    others: frozenset[str]

    @classmethod
    def of(cls, device: Reading, ledger: Ledger, own: str) -> Before:
        """As a reading and the ledger show it; `own` is the holding of the load itself."""
        return cls(device.used_bytes, _residents(ledger, device.id, own))

    def observed(self, device: Reading, ledger: Ledger, own: str, buffer_bytes: int) -> int | None:
        """What a worker has on `device` now beyond its buffers; None when others came or went meanwhile."""
        if _residents(ledger, device.id, own) != self.others or _moving(ledger, device.id, own):
            return None
        return device.used_bytes - self.used_bytes - buffer_bytes


def _residents(ledger: Ledger, device: str, own: str) -> frozenset[str]:
    found = (item for item in ledger.holdings.values() if device in item.bytes and item.phase is Phase.RESIDENT)
    return frozenset(item.id for item in found) - {own}


def _moving(ledger: Ledger, device: str, own: str) -> bool:
    found = (item for item in ledger.holdings.values() if device in item.bytes and item.phase is not Phase.RESIDENT)
    return any(item.id != own for item in found)
