"""The overhead of a worker on a device beyond its buffers, from readings before and after its load."""

from __future__ import annotations

from dataclasses import dataclass

from inference.authority.placement.ledger import Ledger, Phase
from inference.devices.device import Reading


@dataclass(frozen=True, slots=True)
class Before:
    """A device before a load: all used bytes, and the resident holdings of other models with their bytes."""

    used_bytes: int
    others: frozenset[str]
    others_bytes: int

    @classmethod
    def of(cls, device: Reading, ledger: Ledger, own: str) -> Before:
        """From a reading and the ledger. `own` is the holding of the load."""
        others = _residents(ledger, device.id, own)
        return cls(device.used_bytes, others, _bytes_of(ledger, device.id, others))

    def observed(self, device: Reading, ledger: Ledger, own: str, buffer_bytes: int) -> int | None:
        """The bytes of a worker beyond its buffers and the growth of others; None when other holdings came or went."""
        if _residents(ledger, device.id, own) != self.others or _is_loading_or_releasing(ledger, device.id, own):
            return None
        grown = _bytes_of(ledger, device.id, self.others) - self.others_bytes
        return device.used_bytes - self.used_bytes - grown - buffer_bytes


def _residents(ledger: Ledger, device: str, own: str) -> frozenset[str]:
    found = (item for item in ledger.holdings.values() if device in item.bytes and item.phase is Phase.RESIDENT)
    return frozenset(item.id for item in found) - {own}


def _bytes_of(ledger: Ledger, device: str, holdings: frozenset[str]) -> int:
    return sum(ledger.holdings[id].bytes[device] for id in holdings)


def _is_loading_or_releasing(ledger: Ledger, device: str, own: str) -> bool:
    found = (item for item in ledger.holdings.values() if device in item.bytes and item.id != own)
    return any(item.phase in (Phase.RESERVED, Phase.RELEASING) for item in found)
