"""Looks at ledger, models, breakers and processes all along, and tells what stays wrong; breaks nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx2

from inference.protocol import ModelStatus
from tests.chaos.judge import Violation
from tests.chaos.system import System

EVERY_SECONDS = 0.5
LEAK_SECONDS = 12.0
"""A gone worker's bytes are released or forfeited within five seconds and a reading, on a machine that is busy."""
STUCK_SECONDS = 45.0
"""No model changes its state, and nobody waits, for longer than this without an end: beyond every deadline in force."""
STRAY_SECONDS = 6.0
PARTS = ("free", "foreign", "reserved", "resident", "releasing")
KEPT = frozenset({"offloading", "warm"})
"""States in which a model holds no device memory and computes nothing."""
PASSING = frozenset({"loading", "draining", "offloading", "restoring", "unloading"})


@dataclass
class Since:
    """Since when each thing that is suspicious has been seen without a break."""

    limit_seconds: float
    seen: dict[str, float] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)

    def note(self, present: Mapping[str, str], now: float) -> list[str]:
        """What has been there for too long, once each; `present` is a description by key."""
        self.seen = {key: self.seen.get(key, now) for key in present}
        late = [key for key, since in self.seen.items() if now - since > self.limit_seconds and key not in self.told]
        self.told.update(late)
        return [f"{present[key]}, for {now - self.seen[key]:.1f} s" for key in late]

    def forget(self) -> None:
        """Nobody could look for a while."""
        self.seen = {}


class Watch:
    """Runs beside everything else. What it finds is in `violations`."""

    def __init__(self, system: System, clock: Callable[[], float]) -> None:
        self._system, self._clock = system, clock
        self._holdings, self._stuck, self._strays = Since(LEAK_SECONDS), Since(STUCK_SECONDS), Since(STRAY_SECONDS)
        self._pid: int | None = None
        self.violations: list[Violation] = []
        self.samples = 0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(EVERY_SECONDS)

    async def look(self) -> None:
        """One look at everything that answers."""
        now = self._clock()
        strays = await asyncio.to_thread(self._system.strays)
        for said in self._strays.note({str(pid): f"pid {pid} ({words})" for pid, words in strays.items()}, now):
            self._violate("nothing outlives the service that started it", said)
        try:
            dump = await self._system.inference("/memory/dump", "POST", body={})
            models, devices = await self._system.models(), await self._system.devices()
        except (httpx2.HTTPError, KeyError):
            self._holdings.forget()
            self._stuck.forget()
            return
        self.samples += 1
        for said in unbalanced(devices):
            self._violate("every account adds up", said)
        for said in on_cpu(models):
            self._violate("no model is on the CPU by surprise", said)
        for said in self._holdings.note(unowned(dump), now):
            self._violate("no byte is leaked in any ledger", said)
        for said in self._stuck.note(waiting(models), now):
            self._violate("no model, queue or breaker stays stuck", said)

    def _violate(self, promise: str, seen: str) -> None:
        self.violations.append(Violation(promise, self._clock(), seen))


def unowned(dump: Mapping[str, Any]) -> dict[str, str]:
    """Holdings that are no living worker's own: leaving ones, second ones of models on their way, and leaked ones."""
    owned = {worker["holding"] for worker in dump["workers"].values()}
    return {
        name: f"{name} holds {holding['devices_mb']} MB for {holding['owner']} ({holding['phase']})"
        for name, holding in dump["ledger"]["holdings"].items()
        if name not in owned or holding["phase"] == "releasing"
    }


def unbalanced(devices: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Accounts that do not add up, or hold less than nothing."""
    found = []
    for name, device in devices.items():
        account = {key.removesuffix("_bytes"): value for key, value in device["ledger"].items() if key != "bound"}
        has = account["capacity"] + account["shortfall"]
        if has != sum(account[part] for part in PARTS) or any(value < 0 for value in account.values()):
            found.append(f"{name}: {account}")
    return found


def on_cpu(models: Mapping[str, ModelStatus]) -> list[str]:
    """Models that are where nobody wants them: on the CPU of a machine with accelerators. What is kept warm, or on its
    way there, is in host memory and computes nothing.
    """
    return [
        f"{name} is on {', '.join(one.devices)}"
        for name, one in models.items()
        if "cpu" in one.devices and one.state not in KEPT
    ]


def waiting(models: Mapping[str, ModelStatus]) -> dict[str, str]:
    """Models on their way from one state to another, and queues in which somebody waits."""
    found = {}
    for name, one in models.items():
        if one.state in PASSING:
            found[f"{name} {one.state} {one.pid}"] = f"{name} is {one.state}"
        if one.queued:
            found[f"{name} queue {one.pid} {one.loads}"] = f"{one.queued} wait for {name}, which is {one.state}"
    return found
