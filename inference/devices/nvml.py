"""Reads NVIDIA devices through NVML in a child with a deadline; never opens the library in this process.

The library cannot be opened again once it failed, so the child is killed and started afresh on every error, be it the
library's or one device's, and on every call that does not return in time.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from inference.children import HelperError, ServingHelper

log = logging.getLogger(__name__)

FIRST_SECONDS = 15.0
NEXT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Card:
    """One NVIDIA device as NVML tells it; bytes are bytes, `total_bytes` without what the driver reserves.

    With `error` (a sentence) its figures are those of the last good reading.
    """

    uuid: str
    name: str
    pci: str
    total_bytes: int
    free_bytes: int
    used_bytes: int
    driver: str
    error: str = ""


class NvmlReader:
    """The NVIDIA devices of the machine by PCI address; empty where there is no NVML.

    `error` says why the last reading failed altogether; `answered` whether any ever succeeded.
    """

    def __init__(self, *, first_seconds: float = FIRST_SECONDS, next_seconds: float = NEXT_SECONDS) -> None:
        self._helper = ServingHelper("nvml")
        self._first_seconds, self._next_seconds = first_seconds, next_seconds
        self._absent = False
        self._known: dict[int, Card] = {}
        self.answered = False
        self.error: str | None = None

    async def read(self) -> Mapping[str, Card]:
        """The cards by PCI address (as `canonical_pci` writes it); empty when absent or failing (see `error`)."""
        if self._absent:
            return {}
        fresh = not self.answered or self.error is not None
        try:
            answer = await self._helper.ask(seconds=self._first_seconds if fresh else self._next_seconds)
        except HelperError as error:
            self._fail(str(error))
            return {}
        if "absent" in answer:
            self._absent = True
            await self._helper.close()
            return {}
        if "error" in answer:
            await self._helper.close()
            self._fail(f"NVML: {answer['error']} ({answer['code']})")
            return {}
        self.error, self.answered = None, True
        cards: list[Card] = []
        for item in answer["devices"]:
            index = item.pop("index")
            if "error" not in item:
                cards.append(Card(**item, driver=answer["driver"]))
                self._known[index] = cards[-1]
            elif (known := self._known.get(index)) is not None:
                cards.append(replace(known, error=f"NVML: {item['error']} ({item['code']})"))
        if len(cards) < len(answer["devices"]) or any(card.error for card in cards):
            await self._helper.close()  # what it says of that device from now on may be old
        return {canonical_pci(card.pci): card for card in cards}

    async def close(self) -> None:
        """Ends the child."""
        await self._helper.close()

    def _fail(self, message: str) -> None:
        if self.error != message:
            log.warning("NVIDIA devices cannot be read: %s", message)
        self.error = message


def canonical_pci(address: str) -> str:
    """`00000000:01:00.0` (NVML), `0000:01:00.0` (ggml) and other spellings as one: `0:1:0.0`, hexadecimal."""
    domain, _, rest = address.strip().lower().partition(":")
    bus, _, device = rest.partition(":")
    if not device:
        domain, bus, device = "0", domain, rest
    slot, _, function = device.partition(".")
    return f"{_hex(domain)}:{_hex(bus)}:{_hex(slot)}.{function or '0'}"


def _hex(text: str) -> str:
    return text.lstrip("0") or "0"
