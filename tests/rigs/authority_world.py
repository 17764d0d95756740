"""The authority in a made-up world: effects are carried out by a runner that can fail, delay and repeat.

Every step is followed by checks of what must hold; see `World.check`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from inference.authority import effects, events
from inference.authority.handlers.placing import decision
from inference.authority.handlers.queries import device_view
from inference.authority.placement.ledger import Phase
from inference.authority.placement.plan import Placement, Refusal, Result
from inference.authority.state import ModelRecord, Purpose, State, TimerKind
from inference.authority.step import step
from inference.devices.device import Reading
from inference.devices.signs import Sign
from inference.environment_settings import InferenceSettings
from inference.errors import InferenceError, ModelFailed, Shortage
from inference.estimate.header_formula import Parts
from inference.estimate.model_estimate import Estimate
from inference.protocol import ExitCause, ModelState
from inference.settings import InferenceConfig, ModelEntry, ModelSpec, _spec
from inference.worker_link import Buffer, Hold, Offloaded, Ready
from inference.workers.exit_cause import WorkerExit

MIB = 2**20
GPUS = ("gpu-0", "gpu-1")
OF_WORKERS = (events.Loaded, events.FileHeld, events.ContextFreed)
GPU_BYTES, HOST_BYTES = 1000 * MIB, 4000 * MIB


def configuration(models: Mapping[str, Mapping[str, Any]], **settings: Any) -> InferenceConfig:
    """Models with these keys of models.yaml, and INFERENCE_* settings."""
    found = InferenceSettings(**settings)
    specs = {name: _spec(name, ModelEntry(path=f"/models/{name}.gguf", **keys), found) for name, keys in models.items()}
    return InferenceConfig(found, specs, {name: name for name in specs}, Path("/config"))


@dataclass
class World:
    """`later` are events that are under way; a test decides when, in which order and how often they arrive."""

    config: InferenceConfig
    sizes: Mapping[str, int]
    gpus: tuple[str, ...] = GPUS
    now: float = 1000.0
    foreign: dict[str, int] = field(default_factory=dict)
    signs: dict[str, Sign] = field(default_factory=dict)
    unmeasurable: set[str] = field(default_factory=set)
    spawn_fails: bool = False
    trials_fail: bool = False

    def __post_init__(self) -> None:
        self.state = State(
            self.config, cores=4, models={name: ModelRecord(spec) for name, spec in self.config.models.items()}
        )
        self.later: list[events.Event] = []
        self.now_due: list[events.Event] = []
        self.alive: dict[str, Any] = {}
        self.leases: dict[int, str] = {}
        self.asked: dict[int, str] = {}
        self.answers: dict[int, Any] = {}
        self.commands: set[int] = set()
        self.released: set[str] = set()
        self.numbers = itertools.count(1)
        self.steps = 0
        self.compared = 0
        self.wake_at = math.inf
        self.versions = dict.fromkeys(self.config.models, 1)
        self.send(events.DevicesFound(self.readings(), {}, 0.0))

    # --- running -----------------------------------------------------------------------------------------------------
    def readings(self) -> tuple[Reading, ...]:
        """The devices as a probe shows them: others' use, and what processes that exist hold."""
        held: dict[str, int] = {}
        for holding in self.state.ledger.holdings.values():
            exists = any(
                worker in self.alive and holding.id in (record.holding, record.extra)
                for worker, record in self.state.workers.items()
            )
            for device, count in holding.bytes.items() if exists else ():
                held[device] = held.get(device, 0) + count
        found = []
        for device in self.gpus:
            used = min(GPU_BYTES, held.get(device, 0) + self.foreign.get(device, 0))
            sign = self.signs.get(device, Sign.FINE)
            found.append(Reading(device, "cuda", "fake", GPU_BYTES, GPU_BYTES - used, used, sign=sign))
        used = min(HOST_BYTES, held.get("cpu", 0) + self.foreign.get("cpu", 0))
        return (*found, Reading("cpu", "cpu", "fake", HOST_BYTES, HOST_BYTES - used, used))

    def send(self, event: events.Event) -> None:
        """One event, and what follows from it at once."""
        self.now_due.append(event)
        for _ in range(2000):
            if not self.now_due:
                return
            self._step(self.now_due.pop(0))
        raise AssertionError("the events do not settle")

    def _step(self, event: events.Event) -> None:
        before = self.state
        expected = self._expected(event)
        self.state, found = step(before, event, self.now)
        self.steps += 1
        for effect in found:
            self._perform(effect)
        self.check(before)
        self._compare(expected)

    def tick(self, seconds: float) -> None:
        """Time passes, in pieces no longer than the timers ask for."""
        until = self.now + seconds
        for _ in range(10_000):
            if self.wake_at > until:
                break
            self.now = max(self.now, self.wake_at)
            self.wake_at = math.inf
            self.send(events.Tick(self.readings(), self.now))
        self.now = max(self.now, until)

    def deliver(self, index: int, *, twice: bool = False) -> None:
        """One of the events that are under way arrives."""
        if self.later:
            event = self.later.pop(index % len(self.later))
            if isinstance(event, events.DevicesRead):
                event = events.DevicesRead(self.readings(), event.problem)
            if isinstance(event, events.Exited):
                self.alive.pop(event.worker, None)
            elif isinstance(event, OF_WORKERS) and event.worker not in self.alive:
                return
            self.send(event)
            if twice:
                self.send(event)

    def end(self, worker: str, cause: ExitCause, *, was_ready: bool = True) -> None:
        """The process of a worker ends."""
        if worker in self.alive:
            del self.alive[worker]
            self.send(
                events.Exited(worker, WorkerExit(cause, 0, f"ended ({cause})", (), was_ready), self._files(worker))
            )

    def settle(self) -> None:
        """Everything that is under way arrives, and time passes until nothing moves."""
        for _ in range(400):
            while self.later:
                self.deliver(0)
            self.tick(1.0)
            if not self.later and not self.state.returns:
                return

    def want(self, model: str, **more: Any) -> int:
        """A request for a model."""
        ticket = -next(self.numbers)
        self.asked[ticket] = model
        self.send(events.Wanted(ticket, model, **more))
        return ticket

    def command(self, request: events.Request) -> int:
        """An operator's request."""
        id = -next(self.numbers)
        self.commands.add(id)
        self.send(events.Commanded(id, request))
        return id

    def _files(self, worker: str) -> Any:
        record = self.state.workers.get(worker)
        return () if record is None else self._files_of(record.spec)

    def _files_of(self, spec: ModelSpec) -> Any:
        return ((str(spec.path), (self.sizes[spec.id], self.versions[spec.id], 1)),)

    # --- effects -----------------------------------------------------------------------------------------------------
    def _perform(self, effect: effects.Effect) -> None:
        match effect:
            case effects.WakeAt(at):
                self.wake_at = at
            case effects.Observe():
                self.now_due.append(events.Observed(self.readings()))
            case effects.ReadFiles(model, spec):
                self.now_due.append(events.FilesRead(model, self._files_of(spec)))
            case effects.ReadDevices():
                self.later.append(events.DevicesRead(()))
            case effects.TryDevice(device, trial):
                self.later.append(events.TrialEnded(device, trial, "it is wrong" if self.trials_fail else None))
            case effects.RenewProbes(id):
                self.later.append(events.ProbesRenewed(id))
            case effects.Estimate(key, devices, _):
                self.later.append(events.Estimated(key, self._estimate(key, devices)))
            case effects.Spawn(worker, _, _, order):
                self._spawn(worker, order)
            case effects.SendOrder(worker, order):
                self.later.append(events.Loaded(worker, self._ready(order), self._files(worker)))
            case effects.FreeContext(worker, most, stays):
                self.later.append(events.ContextFreed(worker, Offloaded(min(most, MIB), 1, 10)))
                if not stays:
                    self._exits(worker, ExitCause.REQUESTED)
            case effects.StopWorker(worker):
                self._exits(worker, ExitCause.REQUESTED)
            case effects.KillWorker(worker) | effects.LoseWorker(worker):
                self._exits(worker, ExitCause.KILLED)
            case effects.MeasureWorkers(workers):
                self.later.append(events.WorkersMeasured(dict.fromkeys(workers, 0), self.readings()))
            case effects.TrimWorkers(job, workers):
                self.later.append(events.Trimmed(job, MIB, dict.fromkeys(workers, 0)))
            case effects.LearnShortage(worker, _, exit, short, _):
                lacks = tuple(Shortage(item.device.id, 1, 0, "the device") for item in short)
                self.later.append(events.ShortageLearned(worker, exit, lacks))
            case effects.Grant(ticket, lease):
                self._end_ticket(ticket)
                self.leases[lease.id] = lease.worker
            case effects.Fail(ticket, error):
                assert isinstance(error, InferenceError)
                self._end_ticket(ticket)
            case effects.Answer(id, value) | effects.Refuse(id, value):
                assert id in self.commands, "a command is answered once"
                self.commands.discard(id)
                self.answers[id] = value
            case _:
                pass

    def _end_ticket(self, ticket: int) -> None:
        assert ticket in self.asked, "the wait of a ticket ends once"
        del self.asked[ticket]

    def _spawn(self, worker: str, order: Any) -> None:
        if self.spawn_fails:
            self.now_due.append(events.SpawnFailed(worker, "no descriptors are left"))
            return
        self.alive[worker] = order
        self.now_due.append(events.Spawned(worker, 2**22 + next(self.numbers)))
        if isinstance(order, Hold):
            self.later.append(events.FileHeld(worker, 4))
        else:
            self.later.append(events.Loaded(worker, self._ready(order), self._files(worker)))

    def _exits(self, worker: str, cause: ExitCause) -> None:
        under_way = any(isinstance(item, events.Exited) and item.worker == worker for item in self.later)
        if worker in self.alive and not under_way:
            exit = WorkerExit(cause, 0, "asked to", (), True)
            self.later.append(events.Exited(worker, exit, self._files(worker)))

    def _ready(self, order: Any) -> Ready:
        buffers = tuple(
            Buffer(device, "weights", max(0, count - 10 * MIB)) for device, count in order.reserved_bytes.items()
        )
        return Ready(0.1, buffers, order.context_length, ("chat",))

    def _estimate(self, key: Any, devices: tuple[Reading, ...]) -> Estimate | InferenceError:
        if key.spec.id in self.unmeasurable:
            return ModelFailed(f"the model {key.spec.id!r} is damaged")
        size = self.sizes[key.spec.id] * MIB * key.spec.parallel
        each = size // len(devices)
        counts = dict(zip(key.devices, key.counts, strict=True)) if key.counts else {}
        parts = {item.id: Parts(each, 0, 0) for item in devices}
        return Estimate(parts, {item.id: 10 * MIB for item in devices}, "llama.cpp", "", 4096, counts=counts)

    # --- what must hold ----------------------------------------------------------------------------------------------
    def check(self, before: State) -> None:
        """Invariants of the ledger, of workers, of waiters, and of timers."""
        state = self.state
        self._check_ledger(before, state)
        for id, worker in state.workers.items():
            assert worker.id == id
            assert worker.holding in state.ledger.holdings
            if worker.extra is not None:
                assert worker.extra in state.ledger.holdings
        for model in state.models.values():
            holds = model.state not in (ModelState.COLD, ModelState.FAILED)
            assert (model.worker is not None) == holds, f"{model.id} is {model.state} with worker {model.worker}"
            assert model.worker is None or model.worker in state.workers
            assert (model.kept is not None) <= (
                model.state in (ModelState.WARM, ModelState.UNLOADING, ModelState.RESTORING)
            )
            assert (model.state is ModelState.BUSY) <= bool(state.in_flight(model))
            assert {waiter.id for waiter in model.queue.waiters} == {
                id for id, ticket in state.tickets.items() if ticket.model == model.id
            }
        waiting = {id for id, ticket in state.tickets.items() if ticket.purpose is Purpose.CLIENT}
        assert waiting == self.asked.keys() - self._unstarted(), "no waiter is lost"
        for id in state.tickets:
            assert (TimerKind.TICKET, id) in state.timers, "every wait has a deadline"
        for lease, worker in self.leases.items():
            assert worker not in state.workers or lease in state.workers[worker].leases
        assert self.commands >= {id for id in state.commands if id < 0}

    def _unstarted(self) -> set[int]:
        """Tickets whose event is in the queue of this runner."""
        return {item.ticket for item in self.now_due if isinstance(item, events.Wanted)}

    def _check_ledger(self, before: State, state: State) -> None:
        ledger = state.ledger
        for device in ledger.accounts:
            balance = ledger.balance(device)
            figures = (balance.free_bytes, balance.foreign_bytes, balance.reserved_bytes, balance.resident_bytes,
                       balance.releasing_bytes, balance.shortfall_bytes, balance.room_bytes)  # fmt: skip
            assert min(figures) >= 0
            assert balance.capacity_bytes + balance.shortfall_bytes == sum(figures[:5])
            ours = sum(holding.bytes.get(device, 0) for holding in ledger.holdings.values())
            assert ours == balance.ours_bytes
        gone = before.ledger.holdings.keys() - ledger.holdings.keys()
        assert not gone & self.released, "a reservation is released once"
        self.released |= gone
        assert not self.released & ledger.holdings.keys()
        owned = {holding for worker in state.workers.values() for holding in (worker.holding, worker.extra)}
        owned |= state.returns.keys()
        assert ledger.holdings.keys() <= owned, "every reservation has a worker, or is on its way back"
        for holding in state.returns:
            assert ledger.holdings[holding].phase is Phase.RELEASING

    # --- dry runs ----------------------------------------------------------------------------------------------------
    def _expected(self, event: events.Event) -> tuple[str, Any] | None:
        """What a dry run says of the one model that is wanted, in the step that decides."""
        state = self.state
        if not isinstance(event, events.Observed) or state.closing or not state.unplanned:
            return None
        wanted = [model for model in state.models.values() if model.queue.waiters]
        if len(wanted) != 1 or wanted[0].state is not ModelState.COLD or wanted[0].cleaning or state.commands:
            return None
        if any(model.state is ModelState.DRAINING for model in state.models.values()) or state.startup:
            return None
        seen = replace(device_view.observed(state, event.readings, self.now), claims=())
        found = decision.consider(seen, wanted[0].id, self.now)
        return (wanted[0].id, found.outcome) if isinstance(found, decision.Decision) else None

    def _compare(self, expected: tuple[str, Any] | None) -> None:
        """The decision is that of the dry run."""
        if expected is None:
            return
        id, outcome = expected
        model = self.state.models[id]
        worker = self.state.worker_of(model)
        if isinstance(outcome, Placement) and outcome.result is Result.FREE:
            assert worker is not None
            assert (worker.placement.devices, worker.placement.need) == (outcome.devices, outcome.need)
            self.compared += 1
        elif isinstance(outcome, Placement):
            assert worker is None
            for name in outcome.evict:
                assert self.state.models[name].state not in (ModelState.READY, ModelState.BUSY)
            self.compared += 1
        elif isinstance(outcome, Refusal):
            assert worker is None
            self.compared += 1
