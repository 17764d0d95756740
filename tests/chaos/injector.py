"""Injects planned faults into a running system and checks that each took effect."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2

from headgate.cli.chaos import FAULTS, signal_worker
from headgate.shared.errors import HeadgateError
from inference.authority.lifecycle import ACCEPTING
from inference.devices.simgpu.control import SimulatorError
from tests.chaos.judge import End, Outcome, Violation, Window
from tests.chaos.load import ENDLESS_TOKENS, TURNS, Ask, Load
from tests.chaos.machine import TROUBLES
from tests.chaos.plan import Event, Kind
from tests.chaos.system import ALONE, DEVICES, KV_RAM_GB, MODELS, OPEN_SECONDS, REPLICATED, System
from tests.rigs.processes import descendants_of, is_alive
from tests.rigs.sim_machine import Trouble

TRIES_SECONDS = 300.0
"""A fault that fails because its target is away (a killed service, a lost device) is tried again for this time."""
DAMAGES = ("values", "bit", "cut", "values", "foreign", "pipe", "future", "past")
GROWTH_BYTES = 8 * 2**20
SAVED_SECONDS = 0.3
"""A worker saves a sequence within this time after its answer, if it has nothing else to do."""
BEFORE_KILL_SECONDS = 0.2
"""The longest time between four requests and the kill of a replica that may have them."""
END_BYTES = 128
"""Sizes and padding at the end of a stored sequence, which the damage `values` does not change."""
AFTERMATH_SECONDS = 4.0
"""Time after the end of a fault in which an answer that ran during it may break."""
SEEN_SECONDS = 20.0
"""Time until the service shows an error of the driver, including a call that hangs."""
ILL = frozenset({"lost", "draining", "quarantined", "probing"})
ERRORS = ("driver-reset", "driver-replaced", "out-of-reach", "hung-driver", "unlisted")
XIDS = (
    "application-fault",
    "killed-process",
    "double-bit-error",
    "uncontained-error",
    "firmware-timeout",
    "off-the-bus",
)
_MISSED = (httpx2.HTTPError, SimulatorError, HeadgateError, OSError, LookupError, AssertionError)


@dataclass(slots=True)
class Done:
    """A fault that took effect: `took_seconds` is the time of the successful try, with the duration of the fault."""

    event: Event
    at: float
    took_seconds: float
    seen: str = ""


@dataclass
class Injector:
    """`clock` is that of the run. `done` has the injected faults, `missed` those that could not be injected."""

    system: System
    load: Load
    clock: Callable[[], float]
    done: list[Done] = field(default_factory=list)
    missed: list[tuple[Event, str]] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    outages: list[tuple[float, float]] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    restarts: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._held = {
            name: asyncio.Lock() for name in (*DEVICES, *MODELS, "inference", "gateway", "disk", "cloud", "kv")
        }

    async def inject(self, event: Event) -> None:
        """Injects one event and ends it."""
        began = self.clock()
        act: Callable[[Event], Awaitable[str]] = getattr(self, f"_{event.kind}")
        why = ""
        while self.clock() - began < TRIES_SECONDS:
            tried = self.clock()
            try:
                seen = await act(event)
            except _MISSED as error:
                why = f"{type(error).__name__}: {error}"
                await asyncio.sleep(0.3)
                continue
            self.done.append(Done(event, tried, self.clock() - tried, seen))
            return
        self.missed.append((event, why))

    # --- workers ----------------------------------------------------------------------------------------------------
    async def _worker(self, wanted: str) -> tuple[str, int]:
        """A model with a ready worker, and its process; raises LookupError or HTTPError without one."""
        models = await self.system.models()
        able = [name for name, one in models.items() if one.pid and one.state in ACCEPTING]
        if not able:
            await self.system.inference(f"/models/{wanted}/load?seconds=20", "POST", seconds=25.0)
            models, able = await self.system.models(), [wanted]
        name = wanted if wanted in able else able[0]
        pid = models[name].pid
        if pid is None:
            raise LookupError(f"{name} has no worker any more")
        return name, pid

    @contextlib.asynccontextmanager
    async def _touching(self, kind: str, *models: str) -> AsyncIterator[None]:
        """Answers of these models may break during this and its aftermath."""
        start = self.clock()
        try:
            yield
        finally:
            self.windows.append(Window(kind, frozenset(models) or None, start, self.clock() + AFTERMATH_SECONDS))

    async def _occupy(self, name: str) -> None:
        """Returns when a long answer of `name` runs, or soon after."""
        outcome, _task = self.load.start(Ask(name, "Tell me a long story.", True, ENDLESS_TOKENS))
        with contextlib.suppress(LookupError):  # it is queued, or over
            await self._until(lambda: bool(outcome.first_token or outcome.end), "an answer began", 3.0, every=0.002)

    async def _strike(self, event: Event, fault: str) -> str:
        name, pid = await self._worker(event.model)
        async with self._touching(event.kind, name):
            if event.draw < 0.7:
                await self._occupy(name)
            signal_worker(pid, FAULTS[fault])
            await self._until(lambda: not is_alive(pid), f"worker {pid} is gone", 5.0)
        return f"{name} {pid}"

    async def _worker_kill(self, event: Event) -> str:
        return await self._strike(event, "worker-kill")

    async def _worker_abort(self, event: Event) -> str:
        return await self._strike(event, "worker-abort")

    async def _oom_compute(self, event: Event) -> str:
        return await self._strike(event, "oom-compute")

    async def _replica_kill(self, event: Event) -> str:
        """kill -9 of one of two ready replicas, under requests and before one: none has a second tier."""
        async with contextlib.AsyncExitStack() as held:
            for name in sorted(DEVICES):  # no other fault changes a device meanwhile
                await held.enter_async_context(self._held[name])
            for name, one in (await self.system.simulator("status")).items():
                if one["lost"]:
                    await self.system.simulator("return", name)
            await self.system.inference(f"/models/{REPLICATED}/load?seconds=15", "POST", seconds=20.0)
            replicas = (await self.system.models())[REPLICATED].replicas
            ready = [one.pid for one in replicas if one.pid is not None and one.state in ACCEPTING]
            if len(ready) < len(replicas):
                raise LookupError(f"{len(ready)} replicas of {REPLICATED} are ready")
            pid = ready[event.number % len(ready)]
            async with self._touching(event.kind, REPLICATED):
                requests = [self.load.start(Ask(ALONE, "Tell me a story.", True, 40)) for _ in range(4)]
                await asyncio.sleep(event.draw * BEFORE_KILL_SECONDS)
                signal_worker(pid, FAULTS["worker-kill"])
                await self._until(lambda: not is_alive(pid), f"worker {pid} is gone", 5.0)
                requests.append(self.load.start(Ask(ALONE, "Hello!", True, 4)))
                for outcome, _task in requests:
                    outcome.survives = REPLICATED
                await asyncio.gather(*(task for _outcome, task in requests))
        return f"{REPLICATED} {pid}"

    async def _worker_stop(self, event: Event) -> str:
        """It continues after a while, or (one in five) never: then it must be detected as hung and killed."""
        name, pid = await self._worker(event.model)
        for_good = event.draw < 0.2
        async with self._touching(event.kind, name):
            signal_worker(pid, FAULTS["worker-stop"])
            await self._until(lambda: _run_state(pid) in ("T", None), f"worker {pid} stands still", 5.0)
            if for_good:
                await self._until(lambda: not is_alive(pid), f"worker {pid} was found hung", 30.0)
                return f"{name} {pid} for good"
            await asyncio.sleep(event.seconds)
            with contextlib.suppress(ProcessLookupError):  # detected as hung, or ended by another fault
                os.kill(pid, signal.SIGCONT)
        return f"{name} {pid} for {event.seconds} s"

    # --- memory -----------------------------------------------------------------------------------------------------
    async def _oom_load(self, event: Event) -> str:
        return await self._refuse(event, "refuse")

    async def _oom_context(self, event: Event) -> str:
        return await self._refuse(event, "refuse_after")

    async def _refuse(self, event: Event, do: str) -> str:
        """The devices refuse one allocation, and a model is loaded to make one."""
        async with contextlib.AsyncExitStack() as held:
            for name in sorted(DEVICES):
                await held.enter_async_context(self._held[name])
            before = _refusals(await self.system.simulator("status"))
            await self.system.inference(f"/models/{event.model}/unload?now=true", "POST", seconds=20.0)
            async with self._touching(event.kind, event.model):
                try:
                    await self.system.simulator(do, count=1)
                    with contextlib.suppress(httpx2.HTTPStatusError):  # the intended effect
                        await self.system.inference(f"/models/{event.model}/load?seconds=15", "POST", seconds=20.0)
                finally:
                    after = await self.system.simulator("refuse", count=0)
            if _refusals(after) == before:
                raise LookupError(f"no allocation was made for {event.model}")
        return event.model

    # --- devices ----------------------------------------------------------------------------------------------------
    async def _on(self, device: str) -> list[str]:
        """The models on a device, or all of them while the service is away."""
        try:
            models = await self.system.models()
        except _MISSED:
            return list(MODELS)
        return [name for name, one in models.items() if device in one.devices]

    async def _device_cut(self, event: Event) -> str:
        async with self._held[event.device]:
            models = await self._cut(event.device)
        return f"{event.device} with {', '.join(models) or 'nothing'}"

    async def _device_return(self, event: Event) -> str:
        async with self._held[event.device]:
            before = await self.system.simulator("status")
            if not before[event.device]["lost"]:
                await self._cut(event.device)
                await asyncio.sleep(1.0)
            status = await self.system.simulator("return", event.device)
            if status[event.device]["lost"]:
                raise LookupError("the device is not there")
        return event.device

    async def _cut(self, device: str) -> list[str]:
        """Cuts a device; returns its models.

        It succeeds at the first try, also while the service is away. A repeated cut would come after the planned return
        of the device: nothing returns it then, and when the other device is cut too, no model can be loaded. The faults
        that need a loaded model would take all places, and the returns that are planned after them could not start.
        """
        models, start = await self._on(device), self.clock()
        status = await self.system.simulator("cut", device)
        models += await self._on(device)
        window = Window(Kind.DEVICE_CUT, frozenset(models), start, self.clock() + AFTERMATH_SECONDS)
        self.windows.append(window)
        if not status[device]["lost"]:
            raise LookupError("the device is there")
        return sorted({*models})

    async def _device_stall(self, event: Event) -> str:
        async with self._held[event.device], self._touching(event.kind, *MODELS):  # others may be moved there
            status = await self.system.simulator("stall", event.device)
            if not status[event.device]["stalled"]:
                raise LookupError("the device passes bytes")
            await asyncio.sleep(event.seconds)
            await self._undo("unstall", event.device)
        return f"{event.device} for {event.seconds} s"

    async def _device_shrink(self, event: Event) -> str:
        async with self._held[event.device]:
            full = (await self.system.simulator("status"))[event.device]["total_bytes"]
            small = int(full * (0.2 + 0.6 * event.draw))
            status = await self.system.simulator("shrink", event.device, bytes=small)
            if status[event.device]["total_bytes"] != small:
                raise LookupError("the device is as large as before")
            await asyncio.sleep(event.seconds)
            await self._undo("shrink", event.device, bytes=full)
        return f"{event.device} to {small} bytes for {event.seconds} s"

    async def _device_growth(self, event: Event) -> str:
        """Pools of the processes on a device grow while they compute, with figures of each process or without.

        A model with replicas answers on any of its devices, so the pools of all of them may grow.
        """
        name, _pid = await self._worker(event.model)
        devices = [one for one in (await self.system.models())[name].devices if one in DEVICES]
        if not devices:
            raise LookupError(f"{name} is on no device")
        grown = int(GROWTH_BYTES * (1 + 3 * event.draw))
        async with contextlib.AsyncExitStack() as held:
            for device in sorted(devices):
                await held.enter_async_context(self._held[device])
                await self.system.simulator("tell" if event.draw < 0.5 else "hide", device)
            before = _outside(await self.system.simulator("status"), devices)
            try:
                for device in devices:
                    await self.system.simulator("pools", device, bytes=grown)
                await self.load.ask(Ask(name, "Tell me a story.", True, 40))
                after = _outside(await self.system.simulator("status"), devices)
                if after <= before:
                    raise LookupError("no pool has grown")
                await asyncio.sleep(event.seconds)
            finally:
                for device in devices:
                    await self._undo("pools", device, bytes=0)
        return f"{name} on {', '.join(devices)} by {after - before} bytes"

    async def _undo(self, do: str, device: str, **amount: float) -> None:
        await self.system.simulator(do, device, **amount)

    # --- the driver ---------------------------------------------------------------------------------------------------
    async def _nvml_error(self, event: Event) -> str:
        """The driver's library fails as at a reset of the driver; what the service shows of it counts."""
        return await self._trouble(event, ERRORS[int(event.draw * len(ERRORS))])

    async def _xid(self, event: Event) -> str:
        """The driver reports an error of a device; most of them end the processes on it."""
        return await self._trouble(event, XIDS[int(event.draw * len(XIDS))])

    async def _trouble(self, event: Event, name: str) -> str:
        trouble = TROUBLES[name]
        everywhere = DEVICES if trouble.is_everywhere else (event.device,)
        async with contextlib.AsyncExitStack() as held:
            for lock in ("inference", *sorted(everywhere)):
                await held.enter_async_context(self._held[lock])
            if not await self.system.is_ready(self.system.inference_port):
                raise LookupError("the service is away")
            await held.enter_async_context(self._touching(event.kind))
            offset = self.system.log_offset
            try:
                await asyncio.to_thread(self.system.machine.strike, name, event.device)
                await self._noticed(trouble, offset, everywhere)
                await asyncio.sleep(event.seconds)
            finally:
                await asyncio.to_thread(self.system.machine.restore)
        return f"{name} of {', '.join(everywhere)}"

    async def _noticed(self, trouble: Trouble, offset: int, devices: Sequence[str]) -> None:
        """Returns when the service has logged the trouble since `offset`, or shows one of its devices as unhealthy.

        An event without consequences leaves only the log line. Raises LookupError.
        """
        words = [f"Xid {number}" for number in trouble.xids] or ["NVML", "cannot read NVIDIA devices"]
        end = self.clock() + SEEN_SECONDS
        while not any(word in self.system.logged_since(offset) for word in words):
            with contextlib.suppress(httpx2.HTTPError):
                shown = await self.system.devices()
                if any(shown[name]["state"] in ILL for name in devices):
                    return
            if self.clock() > end:
                raise LookupError(f"not within {SEEN_SECONDS:g} s: {' or '.join(words)} was seen")
            await asyncio.sleep(0.1)

    # --- services ---------------------------------------------------------------------------------------------------
    async def _inference_kill(self, event: Event) -> str:
        """kill -9 while one of its workers is stopped and cannot react."""
        async with self._held["inference"], self._touching(event.kind):
            pid = self._service("inference")
            family = [pid, *descendants_of(pid)]
            with contextlib.suppress(*_MISSED):  # all models are cold
                os.kill((await self._worker(event.model))[1], signal.SIGSTOP)
            os.kill(self.system.up.pid, signal.SIGSTOP)  # no cleanup by the supervisor yet
            try:
                family = [*{*family, *descendants_of(pid)}]
                os.kill(pid, signal.SIGKILL)
                left = await self._outlived(family)
            finally:
                os.kill(self.system.up.pid, signal.SIGCONT)
            if left:
                self._violate("nothing outlives the service that started it", f"of pid {pid}: {left}")
                for one in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(one, signal.SIGKILL)
            await self._back("inference", self.system.inference_port, pid)
        return f"pid {pid}"

    async def _outlived(self, family: list[int], seconds: float = 3.0) -> list[int]:
        with contextlib.suppress(LookupError):
            await self._until(lambda: not any(map(is_alive, family)), "all processes ended", seconds)
        return [pid for pid in family if is_alive(pid)]

    async def _gateway_kill(self, event: Event) -> str:
        async with self._held["gateway"]:
            pid = self._service("gateway")
            start = self.clock()
            os.kill(pid, signal.SIGKILL)
            index = len(self.outages)
            self.outages.append((start, start + 1e9))
            await self._back("gateway", self.system.gateway_port, pid)
            self.outages[index] = (start, self.clock())
        return f"pid {pid}"

    def _service(self, name: str) -> int:
        if (pid := self.system.service_pid(name)) is None:
            raise LookupError(f"{name} does not run")
        return pid

    async def _back(self, name: str, port: int, before: int) -> None:
        began = self.clock()
        await self._until(lambda: not is_alive(before), f"{name} is gone", 5.0)
        while not await self.system.is_ready(port):
            if self.clock() - began > 90.0:
                self._violate("a killed service is back", f"{name}, killed at {began:.1f} s")
                return
            await asyncio.sleep(0.05)
        self.restarts.setdefault(name, []).append(self.clock() - began)

    # --- stored sequences -------------------------------------------------------------------------------------------
    async def _kv_damage(self, event: Event) -> str:
        """Files are changed, by another program or because the disk or the clock is broken.

        A conversation that was stored before continues in a new worker.
        """
        luck = random.Random(event.draw)
        damage = DAMAGES[event.number % len(DAMAGES)]
        ask = self.load.turn(replace(self.load.conversation(luck), route=event.model), TURNS - 1)
        async with self._held["kv"], self._touching(event.kind, event.model):
            await self.load.ask(ask)
            # an ending worker stores what its slots hold
            await self.system.inference(f"/models/{event.model}/unload", "POST", seconds=20.0)
            chosen = [path for path in self.system.kv_files() if _damaged(path, damage, luck)]
            if not chosen:
                raise LookupError("no sequence is stored on disk")
            with contextlib.suppress(httpx2.HTTPStatusError):  # another fault prevents the load
                await self.system.inference(f"/models/{event.model}/load?seconds=15", "POST", seconds=20.0)
            await asyncio.sleep(SAVED_SECONDS)  # until the worker has read the directory
            after = await self.load.ask(ask)
        return f"{damage}: {len(chosen)} files, then {after.cached} cached tokens by {after.answered_by}"

    async def _kv_removed(self, event: Event) -> str:
        """The directory is deleted while workers use it."""
        async with self._held["kv"]:
            files = self.system.kv_files()
            if not files:
                raise LookupError("no sequence is stored on disk")
            await asyncio.to_thread(shutil.rmtree, self.system.kv_directory, ignore_errors=True)
            if any(path.exists() for path in files):
                raise LookupError("the files are there again")
        return f"{len(files)} files"

    async def _kv_full(self, event: Event) -> str:
        """No sequence can be written for a while."""
        async with self._held["disk"], self._held["kv"]:
            before = self.system.disk.refused
            self.system.disk.fill()
            try:
                luck = random.Random(event.draw)
                await asyncio.gather(*(self._converse(luck) for _ in range(6)))
                await self._until(lambda: self.system.disk.refused > before, "a write was refused", 5.0)
                await asyncio.sleep(event.seconds)
            finally:
                self.system.disk.clear()
        return f"{self.system.disk.refused - before} writes"

    async def _kv_kill(self, event: Event) -> str:
        """kill -9 at about the time when a worker saves the sequence of an answer and writes it to the disk."""
        outcome = await self._converse(random.Random(event.draw), event.model)
        if not outcome.answered_by.startswith("local/"):
            raise LookupError("a cloud has answered")
        name = outcome.answered_by.removeprefix("local/")
        pid = (await self.system.models())[name].pid
        if pid is None:
            raise LookupError(f"{name} has no worker any more")
        async with self._touching(event.kind, name):
            await asyncio.sleep(event.draw * SAVED_SECONDS)
            signal_worker(pid, FAULTS["worker-kill"])
            await self._until(lambda: not is_alive(pid), f"worker {pid} is gone", 5.0)
        return f"{name} {pid}"

    async def _kv_shrink(self, event: Event) -> str:
        """A reload leaves no host memory for stored sequences for a while."""
        async with self._held["inference"], self._held["gateway"]:
            try:
                await self._kv_ram(0.0)
                began = self.clock()
                while (tier := (await self.system.inference("/memory/kv"))["total"]["tiers"]["ram"])["mb"]:
                    if self.clock() - began > 5.0:
                        raise LookupError(f"there is still memory: {tier}")
                    await asyncio.sleep(0.05)
                await asyncio.sleep(event.seconds)
            finally:
                await self._kv_ram(KV_RAM_GB)
        return f"{event.seconds} s"

    async def _kv_ram(self, gb: float) -> None:
        self.system.kv_ram_gb = gb
        self.system.configure()
        os.kill(self.system.up.pid, signal.SIGHUP)

    async def _converse(self, luck: random.Random, route: str | None = None) -> Outcome:
        """One turn of a new conversation."""
        conversation = self.load.conversation(luck)
        if route is not None:
            conversation = replace(conversation, route=route)
        return await self.load.ask(self.load.turn(conversation, luck.randrange(TURNS)))

    # --- the rest ---------------------------------------------------------------------------------------------------
    async def _disk_full(self, event: Event) -> str:
        """No file can be written while a worker aborts and its crash record is due."""
        async with self._held["disk"]:
            before = self.system.disk.refused
            self.system.disk.fill()
            try:
                struck = await self._strike(event, "worker-abort")
                await self._until(lambda: self.system.disk.refused > before, "a write was refused", 5.0)
                await asyncio.sleep(min(event.seconds, 1.0))
            finally:
                self.system.disk.clear()
        return f"{self.system.disk.refused - before} writes, {struck}"

    async def _reload(self, event: Event) -> str:
        """Another alias for a model, and another drain time of the gateway; both must apply."""
        async with self._held["inference"], self._held["gateway"]:
            alias = f"alias-{event.number}"
            self.system.configure(more=f", aliases: [{alias}]", drain=5 + event.number % 2)
            os.kill(self.system.up.pid, signal.SIGHUP)
            began = self.clock()
            while alias not in (await self.system.models())["tiny-experts"].aliases:
                if self.clock() - began > 5.0:
                    raise LookupError("the alias is not known")
                await asyncio.sleep(0.05)
        return alias

    async def _disconnect(self, event: Event) -> str:
        """A client disconnects before, at, or after the first token."""
        pieces = int(event.draw * 4)
        outcome = await self.load.ask(Ask(event.model, "Tell me a story.", True, 200, leaves_after=pieces))
        if outcome.end is not End.LEFT:
            raise LookupError(f"the answer was over before: {outcome.end}")
        return f"{event.model} after {pieces} pieces"

    async def _burst(self, event: Event) -> str:
        luck = random.Random(event.draw)
        count = 10 + int(event.draw * 20)
        await self.load.burst(luck, count)
        return f"{count} requests"

    async def _cloud_outage(self, event: Event) -> str:
        """A provider fails until its breaker opens; when it is half-open, many requests compete for the probe."""
        async with self._held["cloud"], self._held["gateway"]:
            await self.system.provider("/_fake/requests", "DELETE")
            ask = Ask("shaky", "Is this model available?", False, 4)
            try:
                await self._faults({"kind": "status", "status": 503, "count": None, "dialect": "google"})
                began = self.clock()
                while (state := await self._breaker("shaky/gemini-test"))["state"] != "open":
                    if self.clock() - began > 10.0:
                        raise LookupError("the breaker did not open")
                    await self.load.ask(ask)
                await self._faults({"kind": "silence", "seconds": 2.0, "count": None, "dialect": "google"})
                await self.system.provider("/_fake/requests", "DELETE")
                await asyncio.sleep((state["retry_after"] or OPEN_SECONDS) + 0.05)
                asking = [asyncio.ensure_future(self.load.ask(ask)) for _ in range(6)]
                await asyncio.sleep(0.8)
                records = (await self.system.provider("/_fake/requests"))["requests"]
                probes = [one for one in records if one["dialect"] == "google"]
                await asyncio.gather(*asking)
            finally:
                await self.system.provider("/_fake/faults", "DELETE")
            if not any(one["ended"] for one in probes) and len(probes) > 1:
                self._violate("a half-open breaker admits one probe", f"{len(probes)} at once")
        return f"{len(probes)} probes"

    async def _faults(self, fault: dict[str, Any]) -> None:
        await self.system.provider("/_fake/faults", "DELETE")
        await self.system.provider("/_fake/faults", "POST", fault)

    async def _breaker(self, name: str) -> dict[str, Any]:
        found = (await self.system.gateway("/admin/breakers"))["breakers"]
        return next((one for one in found if one["name"] == name), {"state": "none", "retry_after": None})

    # --- help -------------------------------------------------------------------------------------------------------
    def _violate(self, promise: str, seen: str) -> None:
        self.violations.append(Violation(promise, self.clock(), seen))

    async def _until(self, probe: Callable[[], bool], what: str, seconds: float, every: float = 0.01) -> None:
        """Raises LookupError if `probe` is not true within `seconds`."""
        end = self.clock() + seconds
        while not probe():
            if self.clock() > end:
                raise LookupError(f"not within {seconds:g} s: {what}")
            await asyncio.sleep(every)


KINDS = tuple(kind for kind in Kind if hasattr(Injector, f"_{kind}"))
"""What can be injected."""


def _damaged(path: Path, damage: str, luck: random.Random) -> bool:
    """Damages a stored sequence; False if it is gone."""
    try:
        size = path.stat().st_size
        match damage:
            case "bit":
                with path.open("r+b") as file:
                    file.seek(at := luck.randrange(size))
                    (before,) = file.read(1)
                    file.seek(at)
                    file.write(bytes([before ^ 1 << luck.randrange(8)]))
            case "values":
                # numbers of the last layer, so that only the checksum reveals it; sizes of empty streams follow
                with path.open("r+b") as file:
                    file.seek(size - size // 16 & ~1)
                    file.write(_ONES * ((size // 16 - END_BYTES) // 2))
            case "cut":
                os.truncate(path, luck.randrange(size))
            case "foreign":
                path.write_bytes(luck.randbytes(size))
            case "pipe":
                path.unlink()
                os.mkfifo(path)
            case "future" | "past":
                at = 2**32 if damage == "future" else 0
                os.utime(path, (at, at))
    except (OSError, IndexError, ValueError):
        return False
    return True


_ONES = bytes.fromhex("003c")
"""1.0 as a 16-bit float."""


def _run_state(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


def _refusals(status: Any) -> int:
    return sum(device["refusals"] for device in status.values())


def _outside(status: Any, devices: Sequence[str]) -> int:
    """The bytes of pools on these devices."""
    return sum(status[device]["outside_bytes"] for device in devices)
