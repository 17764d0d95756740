"""Reads NVIDIA devices with NVML in a helper process with a deadline.

NVML does not work again in a process after a failure. The helper is killed and restarted after each error of NVML or of
a device, and after a timeout, with the delays of `inference.devices.reopen_policy`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from inference.devices.reopen_policy import Reopening
from inference.devices.signs import OUT_OF_REACH, Sign, sign_of_action, sign_of_nvml, sign_of_xid, worst, xid_words
from inference.workers.helper_client import HelperError, ServingHelper

log = logging.getLogger(__name__)

FIRST_SECONDS = 15.0
NEXT_SECONDS = 5.0
_LIBRARY_NOT_FOUND = 12


@dataclass(frozen=True, slots=True)
class Card:
    """One NVIDIA device in a reading. `total_bytes` excludes memory that the driver reserves.

    `note` explains `sign`. A device that could not be read has its last figures. `process_bytes`: bytes by process id,
    as far as the driver reports them.
    """

    uuid: str
    name: str
    pci: str
    total_bytes: int
    free_bytes: int
    used_bytes: int
    driver: str
    sign: Sign = Sign.HEALTHY
    note: str = ""
    process_bytes: Mapping[int, int] = field(default_factory=dict)


class NvmlReader:
    """The NVIDIA devices of the machine by PCI address; empty without NVML.

    `error` is the reason when the last reading failed for all devices; `answered` is true after the first success.
    `unread`: the devices that have never been read, with the reason of the last reading.
    """

    def __init__(
        self,
        *,
        next_seconds: float = NEXT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        helper: ServingHelper | None = None,
    ) -> None:
        self._helper = helper or ServingHelper("nvml")
        self._next_seconds, self._clock = next_seconds, clock
        self._reopening = Reopening()
        self._absent = False
        self._known: dict[int, Card] = {}
        self._seen: set[str] = set()
        self._code: int | None = None
        self.answered = False
        self.error: str | None = None
        self.unread: tuple[str, ...] = ()

    @property
    def sign(self) -> Sign:
        """Evidence about all devices from a failed reading."""
        if self.error is None:
            return Sign.HEALTHY
        if self.answered and self._reopening.is_exhausted:
            return Sign.UNREACHABLE
        return Sign.UNCERTAIN if self._code is None else sign_of_nvml(self._code)

    def knows(self, pci: str) -> bool:
        """Whether a reading ever contained the address (in the form of `canonical_pci`)."""
        return pci in self._seen

    async def read(self) -> Mapping[str, Card]:
        """The cards by PCI address (in the form of `canonical_pci`); empty without NVML and after a failure (`error`).

        After a failure no helper is asked until the next attempt is due.
        """
        if self._absent or (self.error is not None and not self._reopening.is_due(self._clock())):
            return {}
        is_fresh = not self._helper.is_running
        try:
            answer = await self._helper.ask(seconds=FIRST_SECONDS if is_fresh else self._next_seconds)
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
            await self._helper.close()  # its later readings of the device may be stale
            self._reopening = self._reopening.failed(self._clock())
        return {canonical_pci(card.pci): card for card in cards}

    def listen(self, on_event: Callable[[], None]) -> None:
        """Calls `on_event` at each Xid event, which the next reading contains."""
        self._helper.on_notice = on_event

    async def renew(self) -> None:
        """The next reading starts a new helper without a delay."""
        await self._helper.close()
        self._reopening = Reopening.renewed()

    async def close(self) -> None:
        """Ends the helper."""
        await self._helper.close()

    def _cards(self, answer: Mapping[str, Any]) -> tuple[list[Card], bool]:
        """The cards of a reading, and whether one could not be read."""
        xids: dict[str, list[int]] = {}
        for uuid, number in answer["xids"]:
            xids.setdefault(uuid, []).append(number)
            log.warning("%s on %s", xid_words(number), uuid)
        cards: list[Card] = []
        has_errors = False
        unread: list[str] = []
        for item in answer["devices"]:
            index, action = item.pop("index"), item.pop("action", None)
            shares = dict(item.pop("processes", ()))
            if "error" in item:
                has_errors = True
                note = f"NVML: {item['error']} ({item['code']})"
                if (known := self._known.get(index)) is None:
                    unread.append(f"device {index}: {note}")
                else:
                    cards.append(replace(known, sign=sign_of_nvml(item["code"]), note=note))
            else:
                self._known[index] = card = Card(**item, driver=answer["driver"], process_bytes=shares)
                self._seen.add(canonical_pci(card.pci))
                cards.append(_with_evidence(card, xids.get(card.uuid, ()), action))
        self.unread = tuple(unread)
        return cards, has_errors

    def _fail(self, message: str, code: int | None, is_fresh: bool) -> None:
        if self.error != message:
            log.warning("cannot read NVIDIA devices: %s", message)
        self.error, self._code = message, code
        self._reopening = self._reopening.failed(self._clock(), is_refused=is_fresh and code in OUT_OF_REACH)


def _with_evidence(card: Card, xids: Iterable[int], action: int | None) -> Card:
    """`card` with the worst sign of its events and its recovery action. `note` lists the reasons."""
    found = [(sign_of_xid(number), xid_words(number)) for number in xids]
    if action is not None:
        found.append((sign_of_action(action), f"its driver requests recovery action {action}"))
    reasons = [words for sign, words in found if sign is not Sign.HEALTHY]
    return replace(card, sign=worst(sign for sign, _words in found), note="; ".join(reasons))


def canonical_pci(address: str) -> str:
    """One form for PCI addresses such as `00000000:01:00.0` (NVML) and `0000:01:00.0` (ggml): `0:1:0.0`."""
    domain, _, rest = address.strip().lower().partition(":")
    bus, _, device = rest.partition(":")
    if not device:
        domain, bus, device = "0", domain, rest
    slot, _, function = device.partition(".")
    return f"{_hex(domain)}:{_hex(bus)}:{_hex(slot)}.{function or '0'}"


def _hex(text: str) -> str:
    return text.lstrip("0") or "0"
