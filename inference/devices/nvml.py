"""Reads NVIDIA devices through NVML in a child with a deadline; never opens the library in this process.

The library cannot be opened again once it failed, so the child is killed and started afresh on every error.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from inference.children import HelperError, ServingHelper

log = logging.getLogger(__name__)

FIRST_SECONDS = 15.0
NEXT_SECONDS = 5.0


class NvmlReader:
    """The NVIDIA devices of the machine by PCI address; empty where there is no driver."""

    def __init__(self) -> None:
        self._helper = ServingHelper("nvml")
        self._absent = False
        self.error: str | None = None

    async def read(self) -> Mapping[str, Mapping[str, Any]]:
        """Figures per PCI address (as `canonical_pci` writes it); empty when absent or failing (see `error`)."""
        if self._absent:
            return {}
        try:
            answer = await self._helper.ask(seconds=NEXT_SECONDS if self.error is None else FIRST_SECONDS)
        except HelperError as error:
            self._fail(str(error))
            return {}
        if "absent" in answer:
            self._absent = True
            await self._helper.close()
            return {}
        if "error" in answer:
            await self._helper.close()
            self._fail(f"NVML: {answer['error']}")
            return {}
        self.error = None
        return {canonical_pci(item["pci"]): item for item in answer["devices"]}

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
