"""Reads NVIDIA devices through NVML in a child with a deadline; never opens the library in this process.

The library cannot be opened again once it failed, so the child is killed and started afresh on every error, be it the
library's or one device's, and on every call that does not return in time. How soon,
`inference.devices.reopen_policy` decides.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from inference.authority.device_health.signs import (
    OUT_OF_REACH,
    Sign,
    sign_of_action,
    sign_of_nvml,
    sign_of_xid,
    worst,
    xid_words,
)
from inference.devices.reopen_policy import Reopening
from inference.helpers.helper_client import HelperError, ServingHelper

log = logging.getLogger(__name__)

FIRST_SECONDS = 15.0
NEXT_SECONDS = 5.0
_LIBRARY_NOT_FOUND = 12


@dataclass(frozen=True, slots=True)
class Card:
    """One NVIDIA device as NVML tells it; bytes are bytes, `total_bytes` without what the driver reserves.

    `note` (a sentence) says what `sign` comes from. The figures of one that could not be read are the last good ones.
    """

    uuid: str
    name: str
    pci: str
    total_bytes: int
    free_bytes: int
    used_bytes: int
    driver: str
    sign: Sign = Sign.FINE
    note: str = ""


class NvmlReader:
    """The NVIDIA devices of the machine by PCI address; empty where there is no NVML.

    `error` says why the last reading failed altogether; `answered` whether any ever succeeded.
    """

    def __init__(
        self,
        *,
        first_seconds: float = FIRST_SECONDS,
        next_seconds: float = NEXT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        helper: ServingHelper | None = None,
    ) -> None:
        self._helper = helper or ServingHelper("nvml")
        self._first_seconds, self._next_seconds, self._clock = first_seconds, next_seconds, clock
        self._reopening = Reopening()
        self._absent = False
        self._known: dict[int, Card] = {}
        self._seen: set[str] = set()
        self._code: int | None = None
        self.answered = False
        self.error: str | None = None

    @property
    def sign(self) -> Sign:
        """What the last reading says of every device, if it failed altogether."""
        if self.error is None:
            return Sign.FINE
        if self.answered and self._reopening.is_beyond:
            return Sign.BEYOND
        return Sign.UNSURE if self._code is None else sign_of_nvml(self._code)

    def knows(self, pci: str) -> bool:
        """Whether there ever was a card at that address (as `canonical_pci` writes it)."""
        return pci in self._seen

    async def read(self) -> Mapping[str, Card]:
        """The cards by PCI address (as `canonical_pci` writes it); empty when absent or failing (see `error`).

        After a failure it fails without asking until the next child is due.
        """
        if self._absent or (self.error is not None and not self._reopening.is_due(self._clock())):
            return {}
        is_fresh = not self._helper.is_running
        try:
            answer = await self._helper.ask(seconds=self._first_seconds if is_fresh else self._next_seconds)
        except HelperError as error:
            self._fail(str(error), None, is_fresh)
            return {}
        if "absent" in answer and not self.answered:
            self._absent = True
            await self._helper.close()
            return {}
        if "devices" not in answer:
            await self._helper.close()
            code = int(answer.get("code", _LIBRARY_NOT_FOUND))
            self._fail(f"NVML: {answer.get('error') or answer['absent']} ({code})", code, is_fresh)
            return {}
        self.error, self._code, self.answered = None, None, True
        cards, has_errors = self._cards(answer)
        if not has_errors:
            self._reopening = Reopening()
        elif self._reopening.is_due(self._clock()):
            await self._helper.close()  # what it says of that device from now on may be old
            self._reopening = self._reopening.failed(self._clock())
        return {canonical_pci(card.pci): card for card in cards}

    def listen(self, notice: Callable[[], None]) -> None:
        """Calls `notice` at each Xid event, which the next reading tells."""
        self._helper.notice = notice

    async def renew(self) -> None:
        """The next reading is a fresh child's, however many failed before."""
        await self._helper.close()
        self._reopening = Reopening()

    async def close(self) -> None:
        """Ends the child."""
        await self._helper.close()

    def _cards(self, answer: Mapping[str, Any]) -> tuple[list[Card], bool]:
        """The cards of a reading, and whether one could not be read."""
        xids: dict[str, list[int]] = {}
        for uuid, number in answer["xids"]:
            xids.setdefault(uuid, []).append(number)
            log.warning("%s of %s", xid_words(number), uuid)
        cards: list[Card] = []
        has_errors = False
        for item in answer["devices"]:
            index, action = item.pop("index"), item.pop("action", None)
            if "error" in item:
                has_errors = True
                if (known := self._known.get(index)) is not None:
                    note = f"NVML: {item['error']} ({item['code']})"
                    cards.append(replace(known, sign=sign_of_nvml(item["code"]), note=note))
            else:
                self._known[index] = card = Card(**item, driver=answer["driver"])
                self._seen.add(canonical_pci(card.pci))
                cards.append(_with_evidence(card, xids.get(card.uuid, ()), action))
        return cards, has_errors

    def _fail(self, message: str, code: int | None, is_fresh: bool) -> None:
        if self.error != message:
            log.warning("NVIDIA devices cannot be read: %s", message)
        self.error, self._code = message, code
        self._reopening = self._reopening.failed(self._clock(), is_refused=is_fresh and code in OUT_OF_REACH)


def _with_evidence(card: Card, xids: Iterable[int], action: int | None) -> Card:
    """`card` with what its events and its driver say of it; the note tells what is not fine."""
    found = [(sign_of_xid(number), xid_words(number)) for number in xids]
    if action is not None:
        found.append((sign_of_action(action), f"its driver asks for recovery action {action}"))
    told = [words for sign, words in found if sign is not Sign.FINE]
    return replace(card, sign=worst(sign for sign, _words in found), note="; ".join(told))


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
