"""The authority in a simulated world: processes with memory of their own, devices, clients, and a fake effect runner.

The runner answers late, in any order, twice, with failures, or never, when a process ends before it answers.
`authority_checks.CheckedWorld` checks each step.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from inference.authority import effects, events
from inference.authority.leases import Lease, Ticket
from inference.authority.quarantine import Crash
from inference.authority.state import EstimateKey, LeaseRecord, ModelRecord, State
from inference.authority.step import step
from inference.authority.wait_queue import ORDER
from inference.devices.device import Reading
from inference.devices.signs import Sign
from inference.environment_settings import InferenceSettings
from inference.errors import InferenceError, ModelFailed, Shortage
from inference.estimate.header_formula import Parts
from inference.estimate.layers import Sizes
from inference.estimate.model_estimate import Estimate
from inference.protocol import ExitCause, Priority
from inference.settings import InferenceConfig, ModelEntry, ModelSpec, specs_of
from inference.worker_link import Buffer, Grant, Heartbeat, Hold, KvBudget, Limit, Offloaded, Ready, Threads
from inference.workers.exit_cause import WorkerExit

MIB = 2**20
CPU = "cpu"
GPUS = ("gpu-0", "gpu-1")
GPU_BYTES, HOST_BYTES = 1000 * MIB, 4000 * MIB
OVERHEAD_BYTES = 10 * MIB
KEEPER_BYTES = 64 * MIB
LAYERS = 4
_LOOP = asyncio.new_event_loop()
"""For the futures of tickets; it only runs to create them."""
atexit.register(_LOOP.close)


def configuration(models: Mapping[str, Mapping[str, Any]], **settings: Any) -> InferenceConfig:
    """Models with these keys of models.yaml, and INFERENCE_* settings."""
    found = InferenceSettings(**settings)
    entries = {name: ModelEntry(path=f"/models/{name}.gguf", **keys) for name, keys in models.items()}
    specs = {spec.id: spec for name, entry in entries.items() for spec in specs_of(name, entry, found)}
    return InferenceConfig(found, specs, {name: name for name in specs}, Path("/config"))


@dataclass
class Process:
    """A worker process: its bytes on each device, and the last orders to it. `is_stopped`: it was ordered to end, and
    `is_killed`: it ends for certain."""

    order: Grant | Hold
    bytes: dict[str, int] = field(default_factory=dict)
    grown_bytes: int = 0
    """what it took of host memory beyond its buffers"""
    pools: Counter[str] = field(default_factory=Counter)
    """what it took of accelerators beyond its buffers"""
    pid: int = 0
    is_stopped: bool = False
    is_killed: bool = False
    limit: int | None = None
    threads: int | None = None
    model: str = ""
    has_arena: bool = False
    has_context: bool = True
    kv_bytes: int = 0
    """its budget for stored sequences"""

    @property
    def uses_arena(self) -> bool:
        """Whether it has a context, whose sequences it stores."""
        return self.has_arena and self.has_context and isinstance(self.order, Grant)


@dataclass
class PendingRequest:
    """A request that waits. `leaves`: its client disconnects at the moment in which it gets a lease."""

    model: str
    priority: Priority
    alone: bool
    seconds: float
    arrived_at: float
    pauses: int
    """how many pauses of the service there were before it arrived"""
    ticket: Ticket
    leaves: bool = False

    @property
    def rank(self) -> int:
        """Its priority class."""
        return ORDER.index(self.priority)


@dataclass
class Faults:
    """What goes wrong from now on."""

    spawn: bool = False
    trials: bool = False
    readings: bool = False
    suspension: str | None = None
    """`driver` or `state`: why processes cannot be suspended or resumed"""
    allocation: float = 1.0
    """what workers allocate, as a share of the estimate"""
    broken_build: bool = False
    headroom: bool = False
    """what was learned of the head-room of a model changes"""
    damaged: str | None = None
    """a model that cannot be measured"""
    linger_seconds: float = 0.0
    """how long accelerators show the memory of ended processes as used"""


class _Issuer:
    """What tickets and leases call. Like the shell, it turns each call into an event."""

    def __init__(self, world: World) -> None:
        self._world = world

    @property
    def state(self) -> State:
        return self._world.state

    def withdraw(self, ticket: Ticket) -> None:
        self._world.pending.pop(ticket.id, None)
        self._world.send(events.Withdrawn(ticket.id))

    def release(self, lease: Lease, *, completed: bool) -> None:
        self._world.send(events.Released(lease.record.worker, lease.record.id, completed))


async def _new_ticket(world: World, id: int) -> Ticket:
    return Ticket(_Issuer(world), id)


@dataclass
class World:
    """`later` are events that are under way; a test decides when, in which order and how often they arrive."""

    config: InferenceConfig
    sizes: Mapping[str, int]
    gpus: tuple[str, ...] = GPUS
    kind: str = "cuda"
    now: float = 1000.0
    tells_processes: bool = False
    """whether accelerators report the bytes of each process"""
    gpu_bytes: int = GPU_BYTES
    context_bytes: int = 0
    """what a helper takes of an accelerator"""

    def __post_init__(self) -> None:
        self.state = State(
            self.config, cores=4, models={name: ModelRecord(spec) for name, spec in self.config.models.items()}
        )
        self.later: list[events.Event] = []
        self.now_due: list[events.Event] = []
        self.alive: dict[str, Process] = {}
        self.arenas: Counter[str] = Counter()
        """bytes of stored sequences in host memory, by model"""
        self.stored_at_stop = 0
        """bytes that a worker stores before it ends as ordered"""
        self.dropped: set[str] = set()
        """models whose arena is freed when the process that uses it ends"""
        self.lingering: dict[str, tuple[float, dict[str, int]]] = {}
        self.foreign: dict[str, int] = {}
        self.foreign_moved_at = -math.inf
        self.signs: dict[str, Sign] = {}
        self.absent: set[str] = set()
        self.faults = Faults()
        self.learned: Counter[str] = Counter()
        self.versions = dict.fromkeys(self.config.models, 1)
        self.leases: dict[int, str] = {}
        self.pending: dict[int, PendingRequest] = {}
        self.open: dict[int, tuple[Ticket, Lease]] = {}
        """the tickets and leases of clients that have not left"""
        self.failures: list[tuple[PendingRequest, InferenceError]] = []
        self.commands: dict[int, tuple[events.Request, Any]] = {}
        self.answers: dict[int, Any] = {}
        self.released: set[str] = set()
        self.uses: Counter[str] = Counter()
        self.metrics: Counter[str] = Counter()
        self.exits = 0
        self.numbers = itertools.count(1)
        self.reads = 0
        self.pauses: list[float] = []
        """how long each pause of the service was, in seconds"""
        self.saved: dict[str, Offloaded] = {}
        """the sequences that each worker has saved"""
        self.steps = 0
        self.compared = 0
        self.compared_behind_others = 0
        self.visited: Counter[str] = Counter()
        self.visited_standby: set[str] = set()
        self.wake_at = math.inf
        self.is_stepping = False
        self.is_broken = False
        """a check has failed: nothing that follows counts"""
        self.shown = self._measured()
        suspenders = {"sim": "the simulator"} if self.kind == "sim" else {}
        self.send(events.DevicesFound(self.readings(), suspenders, self.now))

    # --- devices -----------------------------------------------------------------------------------------------------
    def _measured(self) -> dict[str, Reading]:
        """The devices as they are at this moment."""
        lingering = {id: item for id, item in self.lingering.items() if item[0] > self.now}
        if len(lingering) != len(self.lingering):
            self.lingering, self.foreign_moved_at = lingering, self.now
        used: Counter[str] = Counter(self.foreign)
        used[CPU] += self.arenas.total()
        for process in self.alive.values():
            used.update(process.bytes)
        for _, left in self.lingering.values():
            used.update(left)
        found = {}
        for device in (*self.gpus, CPU):
            if device in self.absent:
                continue
            total, kind = (HOST_BYTES, CPU) if device == CPU else (self.gpu_bytes, self.kind)
            taken = min(total, used[device])
            shares = {item.pid: item.bytes[device] for item in self.alive.values() if item.bytes.get(device)}
            found[device] = Reading(
                device, kind, "fake", total, total - taken, taken, sign=self.signs.get(device, Sign.HEALTHY),
                context_bytes=self.context_bytes,
                process_bytes=shares if self.tells_processes and device != CPU else {},
            )  # fmt: skip
        return found

    def readings(self) -> tuple[Reading, ...]:
        """What the probes show: accelerators as they were last measured, the host as it is."""
        self.shown[CPU] = self._measured()[CPU]
        return tuple(self.shown.values())

    def put_sign(self, device: str, sign: Sign) -> None:
        """Changes the sign of a device; one that failed or is missing loses its memory."""
        self.signs[device] = sign
        self.absent.discard(device)
        if sign is Sign.MISSING:
            self.absent.add(device)
        if sign in (Sign.FAILED, Sign.MISSING):
            for process in self.alive.values():
                process.bytes.pop(device, None)
                process.pools.pop(device, None)
            for _, left in self.lingering.values():
                left.pop(device, None)
        self.send(events.DeviceNoticed())

    def use(self, device: str, count_bytes: int) -> None:
        """Other programs use `count_bytes` of a device from now on."""
        self.foreign[device] = count_bytes
        self.foreign_moved_at = self.now

    # --- what a checked world looks at -------------------------------------------------------------------------------
    def before_step(self, event: events.Event) -> Any:
        """A step is about to be taken; the result is passed to `after_step`."""

    def after_step(self, before: State, event: events.Event, expected: Any) -> None:
        """A step and its effects are done."""

    def settled(self) -> None:
        """An event and all that follows from it at once are done."""

    def granted(self, ticket: int, lease: LeaseRecord) -> None:
        """The wait of a ticket is about to end with a lease."""

    def spawning(self, worker: str, order: Grant | Hold) -> None:
        """A process is about to be started."""

    def commanding(self, request: events.Request) -> Any:
        """A command is about to be sent; `answered` gets the result."""

    def answered(self, request: events.Request, noted: Any) -> None:
        """A command is answered without an error."""

    # --- running -----------------------------------------------------------------------------------------------------
    def send(self, event: events.Event) -> None:
        """One event, and what follows from it at once."""
        self.now_due.append(event)
        if self.is_stepping:
            return
        for _ in range(2000):
            if not self.now_due:
                self.is_broken = True
                self.settled()
                self.is_broken = False
                return
            self._step(self.now_due.pop(0))
        raise AssertionError("the events do not settle")

    def _step(self, event: events.Event) -> None:
        before, self.is_broken, self.is_stepping = self.state, True, True
        if isinstance(event, events.Released):
            self.leases.pop(event.lease, None)
        expected = self.before_step(event)
        self.state, found = step(before, event, self.now)
        self.steps += 1
        for effect in found:
            self._perform(effect)
        self.after_step(before, event, expected)
        self.is_broken = self.is_stepping = False

    def tick(self, seconds: float) -> None:
        """Time passes; the service wakes up when it wants to."""
        until = self.now + seconds
        for _ in range(10_000):
            if self.wake_at > until:
                break
            self.now = max(self.now, self.wake_at)
            self.wake_at = math.inf
            self.send(events.Tick(self.readings(), self.now, dict(self.arenas)))
        self.now = max(self.now, until)

    def stand_still(self, seconds: float) -> None:
        """The service does not run for a while."""
        self.now += seconds
        if self.state.started:
            self.pauses.append(seconds)
        self.wake_at = math.inf
        self.send(events.Tick(self.readings(), self.now, dict(self.arenas)))

    def deliver(self, index: int = 0, *, twice: bool = False) -> None:
        """One of the events that are under way arrives."""
        if not self.later:
            return
        event = self.later.pop(index % len(self.later))
        if isinstance(event, events.DevicesRead):
            self.reads += 1
            if self.faults.readings:
                event = events.DevicesRead(self.readings(), "the driver does not answer", dict(self.arenas))
            else:
                self.shown = self._measured()
                event = events.DevicesRead(self.readings(), arenas=dict(self.arenas))
        elif isinstance(event, events.FilesChecked):
            event = events.FilesChecked({spec.id: self._files_of(spec) for spec in self.config.models.values()})
        elif isinstance(event, events.Exited):
            if event.worker not in self.alive:
                return
            if event.exit.cause is ExitCause.REQUESTED:
                self.store(event.worker, self.stored_at_stop)
            self._gone(event.worker)
        elif not self._arrives(event):
            return
        if isinstance(event, events.Exited | events.ContextFreed):
            event = replace(event, arenas=dict(self.arenas))
        self.send(event)
        if twice and not isinstance(event, events.DevicesRead):
            self.send(event)

    def deliver_all(self, most: int = 100) -> None:
        """Everything that is under way arrives, and what follows from it."""
        for _ in range(most):
            self.deliver()

    def _arrives(self, event: events.Event) -> bool:
        """Does what a process did before it sent the event; False for one that ended meanwhile."""
        match event:
            case events.Loaded(worker, ready):
                if process := self.alive.get(worker):
                    self._allocate(process, ready)
                self.saved.pop(worker, None)  # of an earlier stay in the warm pool
                return process is not None
            case events.FileHeld(worker, count):
                if process := self.alive.get(worker):
                    process.bytes = {CPU: process.bytes.get(CPU, 0) + count + KEEPER_BYTES}
                return process is not None
            case events.ContextFreed(worker, saved):
                process, record = self.alive.get(worker), self.state.workers.get(worker)
                if process is None or record is None:
                    return False
                self.saved[worker] = saved
                self.store(worker, saved.count_bytes)
                ready = record.ready
                kept = sum(item.bytes for item in ready.buffers if item.kind == "weights") if ready else 0
                process.bytes = {CPU: kept + OVERHEAD_BYTES}
                process.limit, process.has_context = None, False
                if process.model in self.dropped and not self._is_stored_by_process(process.model):
                    self._free_arena(process.model)
                return True
            case events.CheckpointEnded(worker, "suspend", None):
                if process := self.alive.get(worker):
                    process.bytes = {CPU: process.bytes[CPU]}
                return process is not None
            case events.CheckpointEnded(worker, "resume", None):
                process, record = self.alive.get(worker), self.state.workers.get(worker)
                if process is None or record is None or record.suspended is None:
                    return False
                self._allocate(process, record.suspended.ready, keeps_pools=True)
                return True
            case events.CheckpointEnded(worker):
                return worker in self.alive
            case _:
                return True

    def _allocate(self, process: Process, ready: Ready, *, keeps_pools: bool = False) -> None:
        process.bytes = dict.fromkeys([buffer.device for buffer in ready.buffers], OVERHEAD_BYTES)
        for buffer in ready.buffers:
            process.bytes[buffer.device] += buffer.bytes
        process.grown_bytes = 0
        if not keeps_pools:
            process.pools.clear()
        for device, count in process.pools.items():
            process.bytes[device] += count
        self._lose_memory(process)

    def _lose_memory(self, process: Process) -> None:
        """A process has nothing on a device that failed or is missing."""
        for device in list(process.bytes):
            if self.signs.get(device) in (Sign.FAILED, Sign.MISSING):
                del process.bytes[device]

    def _gone(self, worker: str) -> None:
        process = self.alive.pop(worker)
        if process.model in self.dropped and not self._is_stored_by_process(process.model):
            self._free_arena(process.model)
        left = {device: count for device, count in process.bytes.items() if device != CPU}
        if left and self.faults.linger_seconds:
            self.lingering[worker] = (self.now + self.faults.linger_seconds, left)
        if worker in self.state.workers and not self.state.workers[worker].ending:
            self.exits += 1

    def end(self, worker: str, cause: ExitCause, *, was_ready: bool = True, unexplained: bool = False) -> None:
        """The process of a worker ends. Its leases are released; after an assertion its clients report the crash."""
        if worker not in self.alive:
            return
        record = self.state.workers[worker]
        exit = WorkerExit(cause, 0, f"ended ({cause})", (), was_ready, silent_abort=unexplained)
        crash = Crash(cause, exit.message, alone=record.alone is not None, unexplained=unexplained)
        files = self._files(worker)
        self._gone(worker)
        self.send(events.Exited(worker, exit, files, dict(self.arenas)))
        for lease in [lease for lease, owner in self.leases.items() if owner == worker]:
            if cause is ExitCause.ASSERT:
                self.send(events.CrashReported(record.model, f"key-{lease % 3}", crash))
            self.release(lease, completed=False)

    def want(self, model: str, **more: Any) -> int:
        """A request for a model."""
        ticket = -next(self.numbers)
        seconds = min(self.config.settings.acquire_timeout_seconds, more.get("seconds") or math.inf)
        self.pending[ticket] = PendingRequest(
            model,
            more.get("priority", Priority.NORMAL),
            more.get("alone", False),
            seconds,
            self.now,
            len(self.pauses),
            _LOOP.run_until_complete(_new_ticket(self, ticket)),
        )
        self.send(events.Wanted(ticket, model, **{"any_replica": True, **more}))
        return ticket

    def withdraw(self, id: int) -> None:
        """The client of a waiting request disconnects."""
        if id in self.pending:
            self.pending[id].ticket.close()

    def release(self, lease: int, *, completed: bool, twice: bool = False, leaves: bool = False) -> None:
        """A request ends. `leaves`: its client disconnects, without a release of the lease."""
        ticket, held = self.open[lease]
        worker = held.record.worker
        if completed and worker in self.state.workers:
            self.send(events.RequestAnswered(held.model, f"key-{lease % 3}", 1))
        del self.open[lease]
        if leaves:
            ticket.close()
        else:
            held.release(completed=completed)
        if twice:
            held.release(completed=completed)
            ticket.close()
            self.send(events.Released(worker, lease, completed))

    def command(self, request: events.Request) -> int:
        """An operator's request."""
        id = -next(self.numbers)
        self.commands[id] = (request, self.commanding(request))
        self.send(events.Commanded(id, request))
        return id

    def abandon(self, id: int) -> None:
        """The client of a command is gone."""
        del self.commands[id]
        self.send(events.Abandoned(id))

    def change(self, config: InferenceConfig) -> None:
        """Another configuration."""
        self.config = config
        self.versions = dict.fromkeys(config.models, 1) | self.versions
        self.send(events.SettingsChanged(config))

    def grow(self, worker: str, count_bytes: int) -> None:
        """A process that serves takes more host memory than was planned."""
        process = self.alive[worker]
        if CPU in process.bytes:
            process.bytes[CPU] += count_bytes
            process.grown_bytes += count_bytes

    def grow_pools(self, worker: str, device: str, count_bytes: int) -> None:
        """A process that computes takes more memory of an accelerator than was planned, as far as it has some."""
        process = self.alive[worker]
        free = self._measured()[device].free_bytes if device in process.bytes and device not in self.absent else 0
        if count := min(free, count_bytes):
            process.bytes[device] += count
            process.pools[device] += count

    def store(self, worker: str, count_bytes: int) -> None:
        """A process stores sequences of its model within its budget."""
        process = self.alive[worker]
        if process.uses_arena:
            most = max(self.arenas[process.model], process.kv_bytes)
            self.arenas[process.model] = min(most, self.arenas[process.model] + count_bytes)

    def _is_stored_by_process(self, model: str) -> bool:
        return any(process.uses_arena and process.model == model for process in self.alive.values())

    def _free_arena(self, model: str) -> None:
        self.dropped.discard(model)
        del self.arenas[model]

    def beat(self, worker: str, prompt: int, generated: int, largest_step: int = 0) -> None:
        """A worker reports what it does."""
        beat = Heartbeat(
            None, 0, 1, 0, prompt, generated, prefill_tokens_per_second=100.0, largest_step=largest_step
        )  # fmt: skip
        self.send(events.Progressed(worker, 0.5, beat))

    def settle(self, seconds: int) -> None:
        """Everything that is under way arrives, requests end, and time passes."""
        for _ in range(seconds):
            while self.later:
                self.deliver()
            for lease in list(self.leases):
                self.release(lease, completed=True)
            self.tick(1.0)

    def heal(self) -> None:
        """Nothing fails any more, and other programs use nothing."""
        self.faults = Faults()
        self.foreign = {}
        self.foreign_moved_at = self.now
        for device in self.gpus:
            self.put_sign(device, Sign.HEALTHY)

    def _files(self, worker: str) -> Any:
        record = self.state.workers.get(worker)
        return () if record is None else self._files_of(record.spec)

    def _files_of(self, spec: ModelSpec) -> Any:
        return ((str(spec.path), (self.sizes[spec.configured_id] * MIB, self.versions[spec.configured_id], 1)),)

    # --- effects -----------------------------------------------------------------------------------------------------
    def _perform(self, effect: effects.Effect) -> None:
        match effect:
            case effects.WakeAt(at):
                self.wake_at = at
            case effects.Observe(specs):
                self.now_due.append(
                    events.Observed(
                        self.readings(), {item.id: self._files_of(item) for item in specs}, dict(self.arenas)
                    )
                )
            case effects.CheckFiles():
                self.later.append(events.FilesChecked({}))
            case effects.ReadDevices():
                self.later.append(events.DevicesRead(()))
            case effects.TryDevice(device, trial):
                self.later.append(events.TrialEnded(device, trial, "it is wrong" if self.faults.trials else None))
            case effects.RenewProbes(id):
                self.later.append(events.ProbesRenewed(id))
            case effects.CheckSuspension(kind, _):
                self.later.append(events.SuspensionTested(kind, self.faults.suspension))
            case effects.Estimate(key, devices, _):
                self.later.append(events.Estimated(key, self._estimate(key, devices)))
            case effects.MeasureWorkers(workers):
                found = {id: self.alive[id].bytes.get(CPU, 0) for id in workers if id in self.alive}
                self.now_due.append(events.WorkersMeasured(found, self.readings(), dict(self.arenas)))
            case effects.TrimWorkers(job, workers):
                found = {id: self.alive[id].bytes.get(CPU, 0) for id in workers if id in self.alive}
                self.later.append(events.Trimmed(job, MIB, found, dict.fromkeys(found, (10, 0))))
            case effects.CheckBuild(model, error):
                self.later.append(events.BuildChecked(model, not self.faults.broken_build, error))
            case effects.LearnShortage(worker, spec, exit, short, _):
                self.learned[spec.id] += 50
                lacks = tuple(Shortage(item.device.id, 1, 0, "the device") for item in short)
                self.later.append(events.ShortageLearned(worker, exit, lacks))
            case effects.LearnGoodEnd(spec, _):
                if self.faults.headroom:
                    self.now_due.append(events.HeadroomChanged((spec,)))
            case effects.CheckHeadrooms(planned):
                self.learned.clear()
                self.now_due.append(events.HeadroomChanged(tuple(dict.fromkeys(spec for spec, _, _ in planned))))
            case effects.GrantLease(ticket, lease):
                assert ticket in self.pending, "the wait of a ticket ends once"
                self.granted(ticket, lease)
                self._grant(ticket, lease)
            case effects.Fail(ticket, error):
                assert ticket in self.pending, "the wait of a ticket ends once"
                request = self.pending.pop(ticket)
                request.ticket.fail(error)
                self.failures.append((request, error))
            case effects.Answer(id, value):
                assert id in self.commands, "a command is answered once"
                self.answered(*self.commands.pop(id))
                self.answers[id] = value
            case effects.Refuse(id, error):
                assert id in self.commands, "a command is answered once"
                assert isinstance(error, InferenceError)
                del self.commands[id]
                self.answers[id] = error
            case effects.Count(metric, _, amount):
                assert amount >= 0
                self.metrics[metric] += amount if metric in ("tokens",) else 1
            case _:
                self._order(effect)

    def _grant(self, id: int, record: LeaseRecord) -> None:
        """As the shell does it."""
        request = self.pending.pop(id)
        self.leases[record.id] = record.worker
        self.uses[record.model] += record.counts_as_use
        process: Any = None
        devices = self.state.workers[record.worker].placement.devices
        lease = Lease(_Issuer(self), record, process, devices)
        if request.leaves:
            request.ticket.close()
        else:
            self.open[record.id] = (request.ticket, lease)
        request.ticket.grant(lease)

    def _order(self, effect: effects.Effect) -> None:
        """Effects on worker processes. Where a process has to be there, it is."""
        match effect:
            case effects.Spawn(worker, model, _, order, stores):
                self._spawn(worker, model, order, stores=stores)
            case effects.SendOrder(worker, order):
                process = self.alive[worker]
                process.order, process.kv_bytes, process.has_context = order, order.kv.ram_bytes, True
                self.dropped.discard(process.model)
                self.later.append(self._loaded(worker))
            case effects.FreeContext(worker, stays):
                process = self.alive[worker]
                cells = sum(item.bytes for item in self._ready(worker).buffers if item.kind == "kv")
                self.later.append(events.ContextFreed(worker, Offloaded(cells // 2, 1, 10)))
                if not stays:
                    process.is_stopped = True
                    self._exits(worker, ExitCause.REQUESTED)
            case effects.Checkpoint(operation, worker):
                bytes, record = self.alive[worker].bytes, self.state.workers[worker]
                if operation == "suspend":
                    assert record.suspended is not None
                    bytes[CPU] = sum(bytes.values())  # the copy is complete before the device is free
                    unbooked = bytes[CPU] - sum(record.suspended.need.values())
                    self.alive[worker].grown_bytes = max(self.alive[worker].grown_bytes, unbooked)
                else:
                    assert record.suspended is not None
                    for device, count in record.suspended.need.items():
                        bytes[device] = bytes.get(device, 0) + count
                self.later.append(events.CheckpointEnded(worker, operation, *self._carried()))
            case effects.StopWorker(worker):
                self._exits(worker, ExitCause.REQUESTED)
            case effects.KillWorker(worker):
                if worker in self.alive:
                    self.alive[worker].is_killed = True
                self._exits(worker, ExitCause.HANG if effect.hang else ExitCause.KILLED)
            case effects.LoseWorker(worker):
                self._exits(worker, ExitCause.DEVICE_LOST)
            case effects.Instruct(worker, _) if worker not in self.alive:
                pass  # it has ended, and the authority does not know it yet
            case effects.Instruct(worker, Limit(sequences)):
                self.alive[worker].limit = sequences
            case effects.Instruct(worker, KvBudget(count)):
                process = self.alive[worker]
                process.kv_bytes = count
                self.arenas[process.model] = min(self.arenas[process.model], count)
            case effects.DropKv(model):
                if self._is_stored_by_process(model):
                    self.dropped.add(model)
                else:
                    self._free_arena(model)
            case effects.Instruct(worker, Threads(count)):
                self.alive[worker].threads = count
            case _:
                pass

    def _carried(self) -> tuple[str | None, bool]:
        problem = self.faults.suspension
        return (None, False) if problem is None else (f"the {problem} refused", problem == "state")

    def _spawn(self, worker: str, model: str, order: Grant | Hold, *, stores: bool) -> None:
        self.spawning(worker, order)
        if self.faults.spawn:
            self.now_due.append(events.SpawnFailed(worker, "no descriptors are left"))
            return
        kv_bytes = 0 if isinstance(order, Hold) else order.kv.ram_bytes
        self.alive[worker] = Process(order, model=model, has_arena=stores, kv_bytes=kv_bytes)
        self.dropped.discard(model)
        self.alive[worker].pid = 2**22 + next(self.numbers)
        self.now_due.append(events.Spawned(worker, self.alive[worker].pid))
        if isinstance(order, Hold):
            size = self._files(worker)[0][1][0]
            self.later.append(events.FileHeld(worker, size, size))
        else:
            self.alive[worker].bytes = {device: count // 2 for device, count in order.reserved_bytes.items()}
            self._lose_memory(self.alive[worker])
            self.later.append(self._loaded(worker))

    def _exits(self, worker: str, cause: ExitCause) -> None:
        process = self.alive.get(worker)
        if process is None:
            return
        process.is_stopped = True
        if not any(isinstance(item, events.Exited) and item.worker == worker for item in self.later):
            exit = WorkerExit(cause, 0, "requested", (), True)
            self.later.append(events.Exited(worker, exit, self._files(worker)))

    def _loaded(self, worker: str) -> events.Loaded:
        return events.Loaded(worker, self._ready(worker), self._files(worker))

    def _ready(self, worker: str) -> Ready:
        record = self.state.workers[worker]
        share = self.faults.allocation
        buffers = tuple(
            Buffer(device, kind, int(count * share))
            for device, parts in record.estimate.parts.items()
            for kind, count in (
                ("weights", parts.weights_bytes), ("kv", parts.kv_bytes), ("compute", parts.compute_bytes)
            )
            if count
        )  # fmt: skip
        return Ready(0.1, buffers, record.spec.context_length, ("chat",))

    def _estimate(self, key: EstimateKey, devices: tuple[Reading, ...]) -> Estimate | InferenceError:
        """Weights by layer, a cache that grows with the context and the sequences, and a part in host memory."""
        spec = key.spec
        if spec.configured_id == self.faults.damaged:
            return ModelFailed(f"the model {spec.id!r} is damaged")
        weights = self.sizes[spec.configured_id] * MIB // (LAYERS + 1)
        kv = 8 * MIB * spec.cells // 4096
        compute = 10 * MIB * spec.ubatch // 512
        counts = dict(zip(key.devices, key.counts, strict=True)) if key.counts else {devices[0].id: LAYERS + 1}
        parts = {name: Parts(weights * count, kv * min(count, LAYERS), compute) for name, count in counts.items()}
        parts.setdefault(CPU, Parts(5 * MIB, 0, 0))
        more = self.learned[spec.id] * MIB
        headroom = {devices[0].id: more} if more else {}
        overhead = {name: OVERHEAD_BYTES + headroom.get(name, 0) for name in parts}
        sizes = (Sizes(weights, kv),) * LAYERS
        return Estimate(
            parts, overhead, "llama.cpp", "", 4096, sizes=sizes, counts=counts if key.counts else {},
            headroom_bytes=headroom,
        )  # fmt: skip
