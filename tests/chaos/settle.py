"""The final state of a run: every model answers again, and nothing is left over."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from inference.devices.simgpu.control import SimulatorError
from inference.workers.os_api import socket_directory
from tests.chaos.judge import End, Violation
from tests.chaos.load import Ask, Load
from tests.chaos.system import DEVICES, KV_DISK_BYTES, MODELS, System

BACKOFF_SECONDS = 310.0
"""The longest backoff of a failed model, and a little more."""
RECOVERY_SECONDS = 2.0
"""In addition to the time of a load."""
QUIET_SECONDS = 15.0
KV_LEFT = "stored sequences leave no rest"


@dataclass
class Settled:
    """How long models and breakers still rested, how long after that each model answered, and how long it takes when
    all are loaded at once and nothing was broken; in seconds.
    """

    backoff_seconds: float = 0.0
    recovery_seconds: dict[str, float] = field(default_factory=dict)
    load_seconds: dict[str, float] = field(default_factory=dict)
    violations: list[Violation] = field(default_factory=list)


class Settling:
    """The end of a run. `clock` is that of the run."""

    def __init__(self, system: System, load: Load, clock: Callable[[], float]) -> None:
        self._system, self._load, self._clock = system, load, clock
        self._answered: dict[str, float] = {}
        self.found = Settled()

    async def all_answer(self) -> dict[str, float]:
        """Seconds until each model answered its first request, all sent at once, within a minute."""
        began, self._answered = self._clock(), {}
        await asyncio.gather(*(self._answers(name, 60.0) for name in MODELS))
        return {name: at - began for name, at in self._answered.items()}

    async def run(self, *, measures: bool = True) -> None:
        """Waits for backoffs, then for answers; unloads everything and looks at what is left.

        With `measures` everything is loaded once more in between, to know what that takes.
        """
        await self._heal()
        began = self._clock()
        await self._until("backoffs and open periods end", self._no_backoff, BACKOFF_SECONDS)
        self.found.backoff_seconds = self._clock() - began
        self.found.recovery_seconds = await self.all_answer()
        for name in MODELS:
            if name not in self._answered:
                self._violate("every model recovers", f"{name} did not answer within a minute")
        await self._until("no request is in flight", self._none_in_flight, QUIET_SECONDS)
        await self._until("breakers are closed", self._closed, QUIET_SECONDS)
        await self._all_unloaded()
        if measures:
            self.found.load_seconds = await self.all_answer()
            await self._all_unloaded()
        await self._until("files of sequences are complete", self._only_whole_files, QUIET_SECONDS, KV_LEFT)
        self._without_kv_memory()
        await self._until("memory files are closed", self._no_arenas, QUIET_SECONDS, KV_LEFT)
        await self._until("the ledger is empty", self._empty, QUIET_SECONDS, "no byte is leaked in any ledger")
        await self._until("devices are empty", self._freed, QUIET_SECONDS, "no byte is leaked in any ledger")
        await self._until("sockets are removed", self._no_sockets, QUIET_SECONDS, "no socket is leaked")

    async def _heal(self) -> None:
        self._system.disk.clear()
        for _ in range(100):
            try:
                await self._system.simulator("heal")
            except SimulatorError:
                await asyncio.sleep(0.3)
            else:
                return

    async def _answers(self, name: str, seconds: float) -> None:
        """Sends requests until `name` itself answers."""
        end = self._clock() + seconds
        while self._clock() < end:
            outcome = await self._load.ask(Ask(name, "Hello!", True, 4))
            if outcome.end is End.COMPLETE and outcome.answered_by == f"local/{name}":
                self._answered = {**self._answered, name: outcome.first_token or outcome.ended}
                return
            await asyncio.sleep(0.05)

    # --- what is looked at -------------------------------------------------------------------------------------------
    async def _no_backoff(self) -> str | None:
        resting = {name: one.retry_after_seconds for name, one in (await self._system.models()).items()}
        breakers = (await self._system.gateway("/admin/breakers"))["breakers"]
        pauses = {one["name"]: one["retry_after"] for one in breakers if one["provider"] == "local"}
        devices = {d["id"]: d["state"] for d in (await self._system.inference("/devices"))["devices"]}
        late = {name: value for name, value in {**resting, **pauses}.items() if value}
        ill = {name: state for name, state in devices.items() if state != "healthy"}
        return f"{late or ''} {ill or ''}" if late or ill else None

    async def _none_in_flight(self) -> str | None:
        busy = {
            name: (one.in_flight, one.queued)
            for name, one in (await self._system.models()).items()
            if one.in_flight or one.queued
        }
        text = await self._system.gateway("/metrics")
        gauges = dict(re.findall(r"^(gateway_in_flight|gateway_queue_depth) (\S+)$", text, re.MULTILINE))
        waiting = {name: value for name, value in gauges.items() if float(value)}
        return f"{busy} {waiting}" if busy or waiting else None

    async def _closed(self) -> str | None:
        """Each breaker gets the requests that close it."""
        await asyncio.gather(*(self._load.ask(Ask(name, "Hello!", False, 4)) for name in (*MODELS, "shaky")))
        breakers = (await self._system.gateway("/admin/breakers"))["breakers"]
        odd = {one["name"]: one["state"] for one in breakers if one["state"] != "closed" or one["probing"]}
        return str(odd) if odd else None

    async def _all_unloaded(self) -> None:
        for name in MODELS:
            await self._unloaded(name)

    async def _unloaded(self, name: str) -> None:
        try:
            await self._system.inference(f"/models/{name}/unload", "POST", seconds=30.0)
        except httpx2.HTTPError as error:
            self._violate("no model, queue or breaker stays stuck", f"{name} cannot be unloaded: {error!r}")

    async def _empty(self) -> str | None:
        dump = await self._system.inference("/memory/dump", "POST", body={})
        return str(dump["ledger"]["holdings"]) if dump["ledger"]["holdings"] else None

    def _without_kv_memory(self) -> None:
        """Leaves no host memory for stored sequences, so that their budgets leave the ledger, too."""
        self._system.kv_ram_gb = 0.0
        self._system.configure()
        os.kill(self._system.up.pid, signal.SIGHUP)

    async def _only_whole_files(self) -> str | None:
        """Without a worker nothing is being written, and the directory is within its limit."""
        left = [path.name for path in self._system.kv_files(".tmp")]
        count_bytes = sum(path.stat().st_size for path in self._system.kv_files())
        if count_bytes > KV_DISK_BYTES:
            left.append(f"{count_bytes} bytes of {KV_DISK_BYTES}")
        with contextlib.suppress(FileNotFoundError), (self._system.kv_directory / "lock").open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                left.append("the lock of the directory")
        return ", ".join(left) or None

    async def _no_arenas(self) -> str | None:
        pid = self._system.service_pid("inference")
        links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
        return ", ".join(link for link in links if "headgate-sequences" in link) or None

    async def _freed(self) -> str | None:
        status = await self._system.simulator("status")
        used = {name: status[name]["used_bytes"] for name in DEVICES if status[name]["used_bytes"]}
        return str(used) if used else None

    async def _no_sockets(self) -> str | None:
        left = [path.name for path in socket_directory(self._system.state).glob("*.sock") if "simgpu" not in path.name]
        return str(left) if left else None

    # --- help --------------------------------------------------------------------------------------------------------
    async def _until(
        self, what: str, look: Any, seconds: float, promise: str = "no model, queue or breaker stays stuck"
    ) -> None:
        """`look` describes what is missing, or returns None; its last description is a violation."""
        end = self._clock() + seconds
        while True:
            try:
                left = await look()
            except (httpx2.HTTPError, SimulatorError, OSError) as error:
                left = repr(error)
            if left is None:
                return
            if self._clock() > end:
                self._violate(promise, f"{what}: not within {seconds:g} s ({left})")
                return
            await asyncio.sleep(0.1)

    def _violate(self, promise: str, seen: str) -> None:
        self.found.violations.append(Violation(promise, self._clock(), seen))
