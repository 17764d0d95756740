"""The shell of the authority: it holds the state, sends events to `step` and performs the effects. It decides nothing.

Live objects are here and nowhere else: worker processes and their HTTP sessions, tickets, leases, tasks, one timer.
Everything belongs to the thread of the event loop. A step and its effects are never interrupted by another event.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import aiohttp
from prometheus_client import Counter

from headgate.shared.errors import HeadgateError, Problem
from inference.authority import effects, events
from inference.authority.clock import Alarm, Clock
from inference.authority.handlers.operating import configuration
from inference.authority.handlers.queries import device_view
from inference.authority.handlers.queries.questions import error_of
from inference.authority.handlers.queueing import expectations
from inference.authority.handlers.running.device_care import loss
from inference.authority.handlers.running.worker_life import resting
from inference.authority.handlers.watching.prospects import Moment
from inference.authority.placement.plan import Refusal
from inference.authority.state import EstimateKey, LeaseRecord, ModelRecord, State, Timing
from inference.authority.step import step
from inference.authority.views import model_status
from inference.authority.views.event_bus import Bus
from inference.authority.views.inference_metrics import Metrics
from inference.authority.views.notifier import Notifier
from inference.devices.build_check import BuildCheck
from inference.devices.inventory import Inventory
from inference.errors import InferenceError, ModelFailed, ModelNotFound, Shortage
from inference.estimate.estimator import Estimator
from inference.estimate.headroom import asked
from inference.estimate.headrooms import Headrooms
from inference.file_stamp import Fingerprint
from inference.protocol import ModelStatus, Priority, Progress
from inference.settings import InferenceConfig, check_devices
from inference.worker.cpu_cores import usable_cores
from inference.worker_link import Hold
from inference.workers import heap_trim as trimming
from inference.workers.crash_records import CrashStore
from inference.workers.helper_client import HelperError
from inference.workers.os_api import private_bytes
from inference.workers.worker_exit import WorkerExit
from inference.workers.worker_process import WorkerProcess
from inference.workers.worker_supervisor import Supervisor

log = logging.getLogger("inference.authority")

WORKER_IDLE_SECONDS = 2.0
"""A connection to a worker that is idle for so long is closed; a new one over a Unix socket costs little."""


class Worker:
    """A worker process, and the HTTP client of the model that it serves."""

    def __init__(self, id: str, process: WorkerProcess) -> None:
        self.id = id
        self.process = process
        self.session: aiohttp.ClientSession | None = None


class Lease:
    """The right to send one request to a worker; `release` exactly once (later calls do nothing)."""

    def __init__(self, authority: Authority, record: LeaseRecord, worker: Worker, devices: tuple[str, ...]) -> None:
        self.record = record
        self.process = worker.process
        self.devices = devices
        """the devices that the worker computes on"""
        self.shape: Callable[[], dict[str, Any]] = dict
        """describes the request for a crash record"""
        self._authority = authority
        self._worker = worker
        self._open = True
        self._was_alone: bool | None = None

    @property
    def model(self) -> str:
        """The id of its model."""
        return self.record.model

    @property
    def alone(self) -> bool:
        """Whether the worker has had no other request since this one came; after its end, whether that was so."""
        if self._was_alone is not None:
            return self._was_alone
        worker = self._authority.state.workers.get(self.record.worker)
        return worker is not None and worker.alone == self.record.id

    def settle_alone(self) -> None:
        """The worker has ended: `alone` stays what it is."""
        self._was_alone = self.alone

    @property
    def session(self) -> aiohttp.ClientSession:
        """The HTTP client of the worker."""
        assert self._worker.session is not None
        return self._worker.session

    def release(self, *, completed: bool = False) -> None:
        """Ends it; `completed` says that the worker answered to the end."""
        if self._open:
            self._open = False
            self._authority.release(self, completed=completed)


class Ticket:
    """A request for a lease. Use as a context manager: leaving it gives up the place or the lease, whichever it is."""

    def __init__(self, authority: Authority, id: int) -> None:
        self.id = id
        self._authority = authority
        self._future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()

    @property
    def pending(self) -> bool:
        """Whether it still waits."""
        return not self._future.done()

    def grant(self, lease: Lease) -> None:
        """Ends the wait with a lease."""
        if self._future.done():
            lease.release()
        else:
            self._future.set_result(lease)

    def fail(self, error: InferenceError) -> None:
        """Ends the wait with `error`."""
        if not self._future.done():
            self._future.set_exception(error)
            self._future.exception()  # the holder may have left without looking

    def refusal(self) -> InferenceError | None:
        """The error that ended the wait."""
        error = self._future.exception() if self._future.done() and not self._future.cancelled() else None
        return error if isinstance(error, InferenceError) else None

    async def wait(self, seconds: float | None = None) -> Lease | None:
        """The lease, or None when it is not there within `seconds`; raises the InferenceError that ended the wait."""
        if not self._future.done():
            await asyncio.wait({self._future}, timeout=seconds)
        return self._future.result() if self._future.done() else None

    def progress(self) -> Progress:
        """What it waits for."""
        return expectations.progress(self._authority.state, self.id)

    def close(self) -> None:
        """Gives up the place in the queue, or releases the lease."""
        if not self._future.done():
            self._future.cancel()
            self._authority.withdraw(self)
        elif not self._future.cancelled() and self._future.exception() is None:
            self._future.result().release()

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Authority:
    """The one authority of the service. All methods belong to the loop's thread."""

    def __init__(
        self,
        config: InferenceConfig,
        *,
        inventory: Inventory,
        estimator: Estimator,
        supervisor: Supervisor,
        crashes: CrashStore,
        bus: Bus,
        metrics: Metrics,
        headrooms: Headrooms,
        build_check: BuildCheck | None = None,
        timing: Timing | None = None,
        cores: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.inventory = inventory
        self.crashes = crashes
        self.bus = bus
        self.metrics = metrics
        self.on_restart: Callable[[str], None] = _log_restart
        self._estimator = estimator
        self._supervisor = supervisor
        self._headrooms = headrooms
        self._build_check = build_check
        self._state = State(
            config,
            cores=cores or usable_cores(),
            linux=sys.platform == "linux",
            timing=timing or Timing(),
            models={name: ModelRecord(spec) for name, spec in config.models.items()},
        )
        self._clock = clock or Clock()
        self._numbers = 0
        self._inbox: deque[events.Event] = deque()
        self._stepping = False
        self._alarm: Alarm | None = None
        self._workers: dict[str, Worker] = {}
        self._tickets: dict[int, Ticket] = {}
        self._leases: dict[int, Lease] = {}
        self._commands: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._finishing: set[asyncio.Task[None]] = set()
        self._looking: asyncio.Task[None] | None = None
        self._started: asyncio.Future[None] | None = None
        self._watchers: list[tuple[Callable[[State], bool], asyncio.Future[None]]] = []
        self._closed = False
        self.notifier = Notifier(bus, self._clock)
        bus.snapshot = self.snapshot

    # --- state -------------------------------------------------------------------------------------------------------
    @property
    def state(self) -> State:
        """Everything that is known and decided, at this moment."""
        return self._state

    @property
    def now(self) -> float:
        """Seconds of the authority's clock."""
        return self._clock.now()

    def dispatch(self, event: events.Event) -> None:
        """Sends one event through `step` and performs what follows, and what follows from that."""
        self._inbox.append(event)
        if self._stepping:
            return
        self._stepping = True
        try:
            while self._inbox:
                self._step(self._inbox.popleft())
        finally:
            self._stepping = False
        self._tell_watchers()

    def _step(self, event: events.Event) -> None:
        try:
            self._state, found = step(self._state, event, self.now)
        except Exception:
            log.exception("the event %s could not be handled", type(event).__name__)
            return
        for effect in found:
            self.perform(effect)

    async def reached(self, probe: Callable[[State], bool]) -> None:
        """Returns once `probe` holds for the state; it is looked at after each step."""
        if not probe(self._state):
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._watchers.append((probe, future))
            await future

    def _tell_watchers(self) -> None:
        if self._watchers:
            waiting, self._watchers = self._watchers, []
            for probe, future in waiting:
                if future.done():
                    continue
                try:
                    holds = probe(self._state)
                except Exception as error:  # noqa: BLE001, RUF100 - the caller's own
                    future.set_exception(error)
                    continue
                if holds:
                    future.set_result(None)
                else:
                    self._watchers.append((probe, future))

    def snapshot(self) -> dict[str, Any]:
        """The whole state, for listeners that begin or fell behind."""
        return model_status.snapshot(self._state, self.now)

    def resolve(self, name: str) -> str:
        """The id of the model with this id or alias; raises ModelNotFound naming those there are."""
        try:
            return self._state.config.names[name]
        except KeyError:
            raise ModelNotFound(name, sorted(self._state.config.models)) from None

    def model(self, id: str) -> ModelRecord:
        """The record of a model at this moment; raises ModelNotFound."""
        try:
            return self._state.models[id]
        except KeyError:
            raise ModelNotFound(id, sorted(self._state.config.models)) from None

    def status(self, id: str) -> ModelStatus:
        """One model as it is shown to clients."""
        return model_status.status(self._state, self.model(id), self.now)

    def statuses(self) -> list[ModelStatus]:
        """All models in the order of the file."""
        moment = Moment(self._state, self.now)
        return [model_status.status(self._state, model, self.now, moment) for model in self._state.models.values()]

    def observe(self) -> None:
        """Takes the newest readings, for figures that are asked for."""
        self.dispatch(events.Observed(self.inventory.measured()))

    def process(self, model: str) -> WorkerProcess | None:
        """The worker process of a model."""
        id = self.model(model).worker
        worker = None if id is None else self._workers.get(id)
        return None if worker is None else worker.process

    # --- life --------------------------------------------------------------------------------------------------------
    async def start(self, found: Callable[[int], None] = lambda accelerators: None) -> list[Problem]:
        """Finds the devices and opens their accounts; returns configuration problems that only show now.

        Raises BrokenBuildError where llama.cpp does not compute on this CPU. `found` gets the number of accelerators
        before anything is planned with them, and may raise.
        """
        self._started = asyncio.get_running_loop().create_future()
        if self._build_check is not None:
            await self._build_check.at_start()
        await self.inventory.start()
        accelerators = len(self.inventory.accelerators())
        found(accelerators)
        self.inventory.listen(lambda: self.dispatch(events.DeviceNoticed()))
        carriers = {kind: carrier.who for kind, carrier in self.inventory.carriers.items()}
        self.dispatch(events.DevicesFound(self.inventory.measured(), carriers, self._clock.unix()))
        await self._started
        return check_devices(self._state.config, accelerators)

    async def build_holds(self) -> bool:
        """Whether llama.cpp still computes on this CPU, after a worker died at its first step."""
        return self._build_check is None or await self._build_check.holds()

    def quiesce(self, error: InferenceError | None = None) -> None:
        """Takes nothing new from now on; requests that wait fail with `error`, by default ShuttingDown."""
        self.dispatch(events.Quiesced(error))

    def end(self) -> None:
        """Takes nothing new and ends what runs: workers stop, which ends their streams with an honest error."""
        self.dispatch(events.Ended())

    async def close(self) -> None:
        """Ends every worker and helper; returns when all are reaped."""
        self.quiesce()
        self._closed = True
        self.bus.close()
        if self._alarm is not None:
            self._alarm.cancel()
        self.notifier.close()
        self._cancel()
        await self._join()
        await self._supervisor.close()
        await self._estimator.close()
        await self.inventory.close()
        self._cancel()
        await self._join()
        for future in self._commands.values():
            future.cancel()
        if self._alarm is not None:
            self._alarm.cancel()

    def _cancel(self) -> None:
        for task in self._tasks - self._finishing:
            task.cancel()

    async def _join(self) -> None:
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- requests ----------------------------------------------------------------------------------------------------
    def ask(
        self,
        model: str,
        *,
        priority: Priority = Priority.NORMAL,
        seconds: float | None = None,
        counts: bool = True,
        alone: bool = False,
        retries: int = 0,
    ) -> Ticket:
        """A request for `model`, granted at once if it is ready; `counts` false is no use (a probe).

        `alone`: no other request may use it meanwhile; `retries`: number of earlier attempts, with which it finds a
        place in any queue. Waits at most `seconds` (INFERENCE_ACQUIRE_TIMEOUT_SECONDS at most). Raises ShuttingDown,
        QueueFull and ModelNotFound; whatever ends the wait later is raised by the ticket.
        """
        ticket = Ticket(self, self._number())
        self._tickets[ticket.id] = ticket
        self.dispatch(events.Wanted(ticket.id, model, priority, seconds, counts, alone, retries))
        if (error := ticket.refusal()) is not None:
            raise error
        return ticket

    def _number(self) -> int:
        """Negative, so that it is none that `step` gives."""
        self._numbers -= 1
        return self._numbers

    def withdraw(self, ticket: Ticket) -> None:
        """The holder of a waiting ticket is gone."""
        self._tickets.pop(ticket.id, None)
        self.dispatch(events.Withdrawn(ticket.id))

    def release(self, lease: Lease, *, completed: bool) -> None:
        """A request has ended."""
        self._leases.pop(lease.record.id, None)
        self.dispatch(events.Released(lease.record.worker, lease.record.id, completed))

    async def load(self, model: str, seconds: float | None = None) -> None:
        """Loads the model and returns when it is ready; raises what a request would meet."""
        with self.ask(model, priority=Priority.HIGH, seconds=seconds) as ticket:
            await ticket.wait()

    async def command(self, request: events.Request) -> Any:
        """Has an operator's request carried out and returns its answer; raises InferenceError."""
        id = self._number()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._commands[id] = future
        self.dispatch(events.Commanded(id, request))
        try:
            return await future
        except asyncio.CancelledError:
            self.dispatch(events.Abandoned(id))
            raise
        finally:
            self._commands.pop(id, None)

    def reload(self, config: InferenceConfig) -> list[str]:
        """Applies another configuration; returns the differences, one sentence each. The listening address stays."""
        found = configuration.differences(self._state, config)
        self.dispatch(events.SettingsChanged(config))
        return found

    # --- errors of requests ------------------------------------------------------------------------------------------
    def prospect(self, model: str) -> Refusal | bool | None:
        """True when the model could be loaded now, the refusal when not, None while unknown."""
        return Moment(self._state, self.now).of(self.model(model))

    def resting(self, model: str) -> InferenceError:
        """The error of a request for a failed model."""
        return resting(self.model(model), self.now)

    def refusal(self, model: str, refusal: Refusal) -> InferenceError:
        """The error of a request for a model that does not fit."""
        found = device_view.readings(self._state, self.now)
        return error_of(self.model(model).effective, refusal, found, self._state.settings)

    def loss(self, model: str, devices: tuple[str, ...], what: str) -> InferenceError:
        """The error of a request whose device is lost."""
        return loss(self._state, self.model(model), devices, what, self.now)

    # --- effects -----------------------------------------------------------------------------------------------------
    def perform(self, effect: effects.Effect) -> None:
        """Does what `step` asks for."""
        _PERFORM[type(effect)](self, effect)

    def _spawn_task(self, work: Coroutine[Any, Any, None], *, finishes: bool = False) -> asyncio.Task[None]:
        """Runs a coroutine; one that `finishes` something is quick and never cancelled."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        if finishes:
            self._finishing.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._finishing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background work failed", exc_info=error)

    def _wake_at(self, effect: effects.WakeAt) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if math.isfinite(effect.at) and not self._closed:
            self._alarm = self._clock.call_at(effect.at, self._tick)

    def _tick(self) -> None:
        self._alarm = None
        self.dispatch(events.Tick(self.inventory.measured(), self._clock.unix()))

    def _log(self, effect: effects.Log) -> None:
        log.log(logging.getLevelName(effect.level), "%s", effect.message)

    def _count(self, effect: effects.Count) -> None:
        metric = getattr(self.metrics, effect.metric)
        series = metric.labels(*effect.labels) if effect.labels else metric
        if isinstance(metric, Counter):
            series.inc(effect.amount)
        else:
            series.observe(effect.amount)

    def _publish(self, effect: effects.Publish) -> None:
        self.bus.publish(effect.kind, dict(effect.data))

    def _notify_models(self, effect: effects.NotifyModels) -> None:
        self.notifier.changed(self, effect.seconds)

    def _record_crash(self, effect: effects.RecordCrash) -> None:
        shapes = [self._leases[id].shape() for id in effect.leases if id in self._leases]
        self.crashes.add(effect.model, effect.pid, effect.exit, shapes)

    def _has_started(self, effect: effects.Started) -> None:
        del effect
        if self._started is not None and not self._started.done():
            self._started.set_result(None)

    def _restart(self, effect: effects.RestartService) -> None:
        self.on_restart(effect.why)

    def _grant(self, effect: effects.Grant) -> None:
        record = effect.lease
        devices = self._state.workers[record.worker].placement.devices
        lease = Lease(self, record, self._workers[record.worker], devices)
        self._leases[record.id] = lease
        ticket = self._tickets.pop(effect.ticket, None)
        if ticket is None:
            lease.release()
        else:
            ticket.grant(lease)

    def _fail(self, effect: effects.Fail) -> None:
        ticket = self._tickets.pop(effect.ticket, None)
        if ticket is not None:
            ticket.fail(effect.error)

    def _answer(self, effect: effects.Answer) -> None:
        future = self._commands.get(effect.command)
        if future is not None and not future.done():
            future.set_result(effect.value)

    def _refuse(self, effect: effects.Refuse) -> None:
        future = self._commands.get(effect.command)
        if future is not None and not future.done():
            future.set_exception(effect.error)

    # --- devices -----------------------------------------------------------------------------------------------------
    def _observe(self, effect: effects.Observe) -> None:
        del effect
        self.dispatch(events.Observed(self.inventory.measured()))

    def _read_devices(self, effect: effects.ReadDevices) -> None:
        del effect
        self._spawn_task(self._read())

    async def _read(self) -> None:
        problem: str | None = None
        try:
            await self.inventory.refresh()
        except Exception as error:  # noqa: BLE001, RUF100 - any at all: decisions are made on the last figures then
            problem = repr(error)
        self.dispatch(events.DevicesRead(self.inventory.measured(), problem))

    def _try_device(self, effect: effects.TryDevice) -> None:
        self._spawn_task(self._try(effect))

    async def _try(self, effect: effects.TryDevice) -> None:
        failure: str | None = None
        try:
            await self.inventory.trial(effect.device)
        except HelperError as error:
            failure = str(error)
        except Exception as error:
            log.exception("the trial of %s failed in the service", effect.device)
            failure = f"the trial failed in the service ({type(error).__name__})"
        self.dispatch(events.TrialEnded(effect.device, effect.trial, failure))

    def _renew_probes(self, effect: effects.RenewProbes) -> None:
        self._spawn_task(self._renew(effect))

    async def _renew(self, effect: effects.RenewProbes) -> None:
        try:
            await self.inventory.renew()
        except Exception:
            log.exception("the probes could not be renewed")
        self.dispatch(events.ProbesRenewed(effect.command))

    def _prove_suspension(self, effect: effects.ProveSuspension) -> None:
        self._spawn_task(self._prove(effect))

    async def _prove(self, effect: effects.ProveSuspension) -> None:
        problem: str | None = None
        try:
            trouble = await self.inventory.carriers[effect.kind].test(effect.device)
            problem = None if trouble is None else trouble.why
        except Exception as error:
            log.exception("the test of suspension on %s failed in the service", effect.device.id)
            problem = f"its test failed in the service ({type(error).__name__})"
        self.dispatch(events.SuspensionTested(effect.kind, problem))

    # --- workers -----------------------------------------------------------------------------------------------------
    def _spawn(self, effect: effects.Spawn) -> None:
        id, order = effect.worker, effect.order
        after = {} if effect.after is None else {"after": self._workers[effect.after].process}
        try:
            process = self._supervisor.spawn(effect.model, effect.environment, lambda: self._on_progress(id), **after)
        except HeadgateError as error:
            self.dispatch(events.SpawnFailed(id, str(error)))
            return
        worker = self._workers[id] = Worker(id, process)
        self.dispatch(events.Spawned(id, process.pid))
        if isinstance(order, Hold):
            process.hello.add_done_callback(lambda hello: None if _failed(hello) else process.hold(order.path))
            process.held.add_done_callback(lambda held: self._on_held(id, held))
        else:
            process.hello.add_done_callback(lambda hello: None if _failed(hello) else process.grant(order))
            process.ready.add_done_callback(lambda ready: self._on_ready(id, ready))
        process.exited.add_done_callback(lambda exited: self._on_exit(worker, exited.result()))

    def _on_progress(self, id: str) -> None:
        worker = self._workers.get(id)
        if worker is not None:
            self.dispatch(events.Progressed(id, worker.process.progress, worker.process.beat))

    def _on_held(self, id: str, held: asyncio.Future[Any]) -> None:
        if not _failed(held):
            self.dispatch(events.FileHeld(id, held.result().count_bytes))

    def _on_ready(self, id: str, ready: asyncio.Future[Any]) -> None:
        if not _failed(ready):
            self.dispatch(events.Loaded(id, ready.result(), self._files_of(id)))

    def _files_of(self, id: str) -> Fingerprint:
        """The files of a worker's model as they are now."""
        worker = self._state.workers.get(id)
        return () if worker is None else worker.spec.files

    def _on_exit(self, worker: Worker, exit: WorkerExit) -> None:
        for lease in self._leases.values():
            if lease.record.worker == worker.id:
                lease.settle_alone()
        self.dispatch(events.Exited(worker.id, exit, self._files_of(worker.id)))
        self._workers.pop(worker.id, None)

    def _send_order(self, effect: effects.SendOrder) -> None:
        worker = self._workers[effect.worker].process
        worker.grant(effect.order)
        worker.ready.add_done_callback(lambda ready: self._on_ready(effect.worker, ready))

    def _stop_worker(self, effect: effects.StopWorker) -> None:
        if (worker := self._workers.get(effect.worker)) is not None:
            worker.process.stop()

    def _kill_worker(self, effect: effects.KillWorker) -> None:
        if (worker := self._workers.get(effect.worker)) is not None:
            worker.process.kill(effect.hang)

    def _lose_worker(self, effect: effects.LoseWorker) -> None:
        if (worker := self._workers.get(effect.worker)) is not None:
            worker.process.lose(effect.why)

    def _limit_worker(self, effect: effects.LimitWorker) -> None:
        if (worker := self._workers.get(effect.worker)) is not None:
            worker.process.limit(effect.sequences)

    def _forget_prefixes(self, effect: effects.ForgetPrefixes) -> None:
        if (worker := self._workers.get(effect.worker)) is not None:
            worker.process.forget()

    def _set_threads(self, effect: effects.SetThreads) -> None:
        if (worker := self._workers.get(effect.worker)) is not None:
            worker.process.use_threads(effect.count)

    def _free_context(self, effect: effects.FreeContext) -> None:
        worker = self._workers[effect.worker].process
        worker.offload(effect.most_bytes, stays=effect.stays)
        worker.offloaded.add_done_callback(lambda done: self._on_freed(effect.worker, done))

    def _on_freed(self, id: str, done: asyncio.Future[Any]) -> None:
        if not _failed(done):
            self.dispatch(events.ContextFreed(id, done.result()))

    def _suspend(self, effect: effects.Suspend) -> None:
        self._workers[effect.worker].process.suspend()
        self._spawn_task(self._carry("suspend", effect))

    def _resume(self, effect: effects.Resume) -> None:
        self._spawn_task(self._carry("resume", effect))

    async def _carry(self, operation: str, effect: effects.Suspend | effects.Resume) -> None:
        carrier = self.inventory.carriers[effect.kind]
        why, of_state = None, False
        try:
            trouble = await carrier.carry(operation, effect.device, effect.pid, effect.seconds)
            if trouble is not None:
                why, of_state = trouble.why, trouble.of_state
        except Exception as error:
            log.exception("%s of pid %d failed in the service", operation, effect.pid)
            why = f"it failed in the service ({type(error).__name__})"
        if isinstance(effect, effects.Suspend):
            self.dispatch(events.SuspendEnded(effect.worker, why, of_state))
            return
        if why is None and effect.worker in self._workers:
            self._workers[effect.worker].process.resumed()
        self.dispatch(events.ResumeEnded(effect.worker, why, of_state))

    def _connect(self, effect: effects.Connect) -> None:
        worker = self._workers[effect.worker]
        worker.session = aiohttp.ClientSession(
            "http://worker",
            connector=aiohttp.UnixConnector(
                path=str(worker.process.socket_path), limit=0, keepalive_timeout=WORKER_IDLE_SECONDS
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
            auto_decompress=False,
            raise_for_status=False,
        )

    def _disconnect(self, effect: effects.Disconnect) -> None:
        worker = self._workers.get(effect.worker)
        if worker is not None and worker.session is not None:
            session, worker.session = worker.session, None
            self._spawn_task(session.close(), finishes=True)

    def _measure_workers(self, effect: effects.MeasureWorkers) -> None:
        found = {
            id: seen
            for id in effect.workers
            if (worker := self._workers.get(id)) is not None and (seen := private_bytes(worker.process.pid)) is not None
        }
        self.dispatch(events.WorkersMeasured(found, self.inventory.measured()))

    def _trim_workers(self, effect: effects.TrimWorkers) -> None:
        self._spawn_task(self._trim(effect))

    async def _trim(self, effect: effects.TrimWorkers) -> None:
        processes = {id: self._workers[id].process for id in effect.workers if id in self._workers}
        freed = 0
        left: dict[str, int] = {}
        retained: dict[str, tuple[int, int]] = {}
        try:
            freed, left, retained = await trimming.trim(processes, fresh_first=effect.fresh_first)
        finally:
            self.dispatch(events.Trimmed(effect.job, freed, left, retained))

    # --- measuring and learning --------------------------------------------------------------------------------------
    def _estimate(self, effect: effects.Estimate) -> None:
        self._spawn_task(self._measure(effect))

    async def _measure(self, effect: effects.Estimate) -> None:
        key = effect.key
        try:
            found = await self._estimator.get(key.spec, *effect.devices, counts=key.counts)
            found = self._headrooms.added(key.spec, effect.devices, found, effect.capacities)
        except InferenceError as error:
            self.dispatch(events.Estimated(key, error))
        except Exception as error:
            log.exception("the estimate of %s on %s failed in the service", key.spec.id, ", ".join(key.devices))
            self.dispatch(events.Estimated(key, _unmeasurable(key, error)))
        else:
            self.dispatch(events.Estimated(key, found))

    def _read_files(self, effect: effects.ReadFiles) -> None:
        self.dispatch(events.FilesRead(effect.model, effect.spec.files))

    def _look_at_files(self, effect: effects.LookAtFiles) -> None:
        if self._looking is None or self._looking.done():
            self._looking = self._spawn_task(self._look(effect))

    async def _look(self, effect: effects.LookAtFiles) -> None:
        found = await asyncio.to_thread(lambda: {spec.id: spec.files for spec in effect.specs})
        self.dispatch(events.FilesSeen(found))

    def _check_build(self, effect: effects.CheckBuild) -> None:
        self._spawn_task(self._check(effect))

    async def _check(self, effect: effects.CheckBuild) -> None:
        self.dispatch(events.BuildChecked(effect.model, await self.build_holds(), effect.error))

    def _learn_shortage(self, effect: effects.LearnShortage) -> None:
        found = []
        for item in effect.short:
            before = self._headrooms.of(effect.spec, item.device)
            need = item.planned_bytes - min(item.planned_bytes, asked(before, item.planned_bytes, item.capacity_bytes))
            more = self._headrooms.short(effect.spec, item.device, need, computing=effect.computing)
            found.append(Shortage(item.device.id, need + more, item.device.free_bytes, "the device refused it"))
        self.dispatch(events.ShortageLearned(effect.worker, effect.exit, tuple(found)))

    def _learn_good_end(self, effect: effects.LearnGoodEnd) -> None:
        if self._headrooms.ended_well(effect.spec, effect.devices):
            self.dispatch(events.HeadroomChanged((effect.spec,)))

    def _ease_headrooms(self, effect: effects.EaseHeadrooms) -> None:
        specs = [spec for spec, device, count in effect.planned if count > self._headrooms.of(spec, device).total_bytes]
        if specs:
            self.dispatch(events.HeadroomChanged(tuple(dict.fromkeys(specs))))

    def _learn_overhead(self, effect: effects.LearnOverhead) -> None:
        self._estimator.learn(effect.device, effect.observed_bytes)


def _failed(future: asyncio.Future[Any]) -> bool:
    return future.cancelled() or future.exception() is not None


def _unmeasurable(key: EstimateKey, error: Exception) -> ModelFailed:
    return ModelFailed(
        f"the model {key.spec.id!r} cannot be measured ({type(error).__name__}); the service's log says more"
    )


def _log_restart(why: str) -> None:
    log.error("the service should be restarted: %s", why)


_PERFORM: Mapping[type, Callable[[Authority, Any], None]] = {
    effects.WakeAt: Authority._wake_at,
    effects.Log: Authority._log,
    effects.Count: Authority._count,
    effects.Publish: Authority._publish,
    effects.NotifyModels: Authority._notify_models,
    effects.RecordCrash: Authority._record_crash,
    effects.Started: Authority._has_started,
    effects.RestartService: Authority._restart,
    effects.Grant: Authority._grant,
    effects.Fail: Authority._fail,
    effects.Answer: Authority._answer,
    effects.Refuse: Authority._refuse,
    effects.Observe: Authority._observe,
    effects.ReadDevices: Authority._read_devices,
    effects.TryDevice: Authority._try_device,
    effects.RenewProbes: Authority._renew_probes,
    effects.ProveSuspension: Authority._prove_suspension,
    effects.Spawn: Authority._spawn,
    effects.SendOrder: Authority._send_order,
    effects.StopWorker: Authority._stop_worker,
    effects.KillWorker: Authority._kill_worker,
    effects.LoseWorker: Authority._lose_worker,
    effects.LimitWorker: Authority._limit_worker,
    effects.ForgetPrefixes: Authority._forget_prefixes,
    effects.SetThreads: Authority._set_threads,
    effects.FreeContext: Authority._free_context,
    effects.Suspend: Authority._suspend,
    effects.Resume: Authority._resume,
    effects.Connect: Authority._connect,
    effects.Disconnect: Authority._disconnect,
    effects.MeasureWorkers: Authority._measure_workers,
    effects.TrimWorkers: Authority._trim_workers,
    effects.Estimate: Authority._estimate,
    effects.ReadFiles: Authority._read_files,
    effects.LookAtFiles: Authority._look_at_files,
    effects.CheckBuild: Authority._check_build,
    effects.LearnShortage: Authority._learn_shortage,
    effects.LearnGoodEnd: Authority._learn_good_end,
    effects.EaseHeadrooms: Authority._ease_headrooms,
    effects.LearnOverhead: Authority._learn_overhead,
}
