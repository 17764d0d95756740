"""Checks ledger, models, breakers and processes during a run, and reports what stays wrong."""

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
"""The bytes of an ended worker are released or forfeited within five seconds and a reading, on a busy machine."""
STUCK_SECONDS = 45.0
"""No model changes its state and no request waits for longer than this: more than every configured deadline."""
STRAY_SECONDS = 6.0
PARTS = ("free", "foreign", "reserved", "resident", "releasing", "cached")
KEPT = frozenset({"offloading", "warm"})
"""States in which a model holds no device memory and computes nothing."""
PASSING = frozenset({"loading", "draining", "offloading", "restoring", "unloading"})


@dataclass
class Since:
    """Since when each suspicious thing has been seen without a break."""

    limit_seconds: float
    seen: dict[str, float] = field(default_factory=dict)
    reported: set[str] = field(default_factory=set)

    def note(self, present: Mapping[str, str], now: float) -> list[str]:
        """Descriptions of what has lasted too long, once each; `present` is a description by key."""
        self.seen = {key: self.seen.get(key, now) for key in present}
        late = [
            key for key, since in self.seen.items() if now - since > self.limit_seconds and key not in self.reported
        ]
        self.reported.update(late)
        return [f"{present[key]}, for {now - self.seen[key]:.1f} s" for key in late]

    def forget(self) -> None:
        """The checks were not possible for a while."""
        self.seen = {}


class Watch:
    """Runs during the whole run; `violations` has its findings."""

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
        """One check of everything that answers."""
        now = self._clock()
        strays = await asyncio.to_thread(self._system.strays)
        for text in self._strays.note({str(pid): f"pid {pid} ({words})" for pid, words in strays.items()}, now):
            self._violate("nothing outlives the service that started it", text)
        try:
            dump = await self._system.inference("/memory/dump", "POST", body={})
            models, devices = await self._system.models(), await self._system.devices()
        except (httpx2.HTTPError, KeyError):
            self._holdings.forget()
            self._stuck.forget()
            return
        self.samples += 1
        for text in unbalanced(devices):
            self._violate("every account adds up", text)
        for text in on_cpu(models):
            self._violate("no model runs on the CPU", text)
        for text in self._holdings.note(unowned(dump), now):
            self._violate("no byte is leaked in any ledger", text)
        for text in self._stuck.note(waiting(models), now):
            self._violate("no model, queue or breaker stays stuck", text)

    def _violate(self, promise: str, seen: str) -> None:
        self.violations.append(Violation(promise, self._clock(), seen))


def unowned(dump: Mapping[str, Any]) -> dict[str, str]:
    """Holdings without a living worker: leaving ones, second ones of models in transition, and leaked ones."""
    owned = {worker["holding"] for worker in dump["workers"].values()}
    return {
        name: f"{name} holds {holding['devices_mb']} MB for {holding['owner']} ({holding['phase']})"
        for name, holding in dump["ledger"]["holdings"].items()
        if holding["phase"] == "releasing" or (name not in owned and holding["phase"] != "cached")
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
    """Models on the CPU of a machine with accelerators. Warm models and models in transition use host memory
    without computing.
    """
    return [
        f"{one.id} is on {', '.join(one.devices)}"
        for model in models.values()
        for one in model.replicas or (model,)
        if "cpu" in one.devices and one.state not in KEPT
    ]


def waiting(models: Mapping[str, ModelStatus]) -> dict[str, str]:
    """Models in transition, and queues with waiting requests."""
    found = {}
    for model in models.values():
        for one in model.replicas or (model,):
            what = f"{one.id}, which is {one.state}"
            if one.state in PASSING:
                found[f"{one.id} {one.state} {one.pid}"] = f"{one.id} is {one.state}"
            if one.queued:
                found[f"{one.id} queue {one.pid} {model.loads}"] = f"{one.queued} wait for {what}"
    return found
