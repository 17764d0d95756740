"""The shell of the authority. It assigns the state, passes events to `step` and performs the effects.

The runners perform the effects of processes, devices and measurements. Everything belongs to the thread of the event
loop. A step and its effects are not interrupted by another event.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import Counter

from headgate.shared.errors import Problem
from inference.authority import effects, events
from inference.authority.clock import Alarm, Clock
from inference.authority.handlers.operating import configuration
from inference.authority.handlers.queries.plan_inputs import refusal_error
from inference.authority.handlers.running import replicas
from inference.authority.handlers.running.device_incidents import device_lost_error
from inference.authority.handlers.running.worker_lifecycle import failed_error
from inference.authority.handlers.watching.predictions import Predictions
from inference.authority.leases import Lease, Ticket
from inference.authority.lifecycle import ACCEPTING
from inference.authority.placement.plan import Refusal
from inference.authority.runners.background_tasks import BackgroundTasks
from inference.authority.runners.measuring_runner import MeasuringRunner
from inference.authority.runners.worker_runner import WorkerRunner
from inference.authority.state import ModelRecord, State, Timing
from inference.authority.step import step
from inference.authority.views import live_figures, model_status
from inference.authority.views.event_bus import Bus, Notifier
from inference.authority.views.inference_metrics import Metrics
from inference.authority.views.prefix_labels import PrefixLabels
from inference.devices.build_check import BuildCheck
from inference.devices.inventory import Inventory
from inference.errors import InferenceError, ModelNotFound
from inference.estimate.estimator import Estimator
from inference.estimate.headrooms import Headrooms
from inference.file_stamp import Fingerprint
from inference.protocol import ModelState, ModelStatus, Priority
from inference.settings import InferenceConfig, check_devices
from inference.worker.cpu_cores import usable_cores
from inference.worker_link import KvLabels, Ready
from inference.workers.crash_records import CrashStore
from inference.workers.exit_cause import WorkerExit
from inference.workers.worker_process import WorkerProcess
from inference.workers.worker_supervisor import Supervisor

log = logging.getLogger("inference.authority")


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
        kv_directory: Path | None = None,
    ) -> None:
        """`kv_directory`: where sequences are stored on disk unless INFERENCE_KV_DIR is set."""
        self.inventory = inventory
        self.crashes = crashes
        self.bus = bus
        self.metrics = metrics
        self.identity = {"node": config.settings.node_name, "epoch": secrets.token_hex(8)}
        """The name of this service, and a random value that differs after each start."""
        self._estimator = estimator
        self._supervisor = supervisor
        self._build_check = build_check
        self._state = State(
            config,
            cores=cores or usable_cores(),
            linux=sys.platform == "linux",
            timing=timing or Timing(),
            models={name: ModelRecord(spec) for name, spec in config.models.items()},
            kv_directory=kv_directory,
        )
        self._clock = clock or Clock()
        self._numbers = 0
        self._inbox: deque[events.Event] = deque()
        self._stepping = False
        self._alarm: Alarm | None = None
        self._tickets: dict[int, Ticket] = {}
        self._leases: dict[int, Lease] = {}
        self._commands: dict[int, asyncio.Future[Any]] = {}
        self._watchers: list[tuple[Callable[[State], bool], asyncio.Future[None]]] = []
        self._closed = False
        self._notifier = Notifier(bus, self._clock, lambda: self._state)
        self._tasks = BackgroundTasks()
        self._runner = WorkerRunner(
            supervisor, inventory, self.dispatch, on_ready=self._on_ready, on_exit=self._on_exit
        )
        self._performers: Mapping[type, Callable[[Any], Coroutine[Any, Any, None] | None]] = {
            effects.WakeAt: self._wake_at,
            effects.Log: self._log,
            effects.Count: self._count,
            effects.Publish: self._publish,
            effects.NotifyModels: self._notify_models,
            effects.RecordCrash: self._record_crash,
            effects.GrantLease: self._grant,
            effects.Fail: self._fail,
            effects.Answer: self._answer,
            effects.Refuse: self._refuse,
            **MeasuringRunner(
                inventory, estimator, headrooms, supervisor.arenas, self.build_computes, self.dispatch
            ).performers,
            **self._runner.performers,
        }
        self.labels = PrefixLabels(bus.publish_labels)
        bus.snapshot = self.snapshot
        bus.labels = self.labels.all
        bus.figures = self.live_figures

    # --- state -------------------------------------------------------------------------------------------------------
    @property
    def state(self) -> State:
        """The current state."""
        return self._state

    @property
    def now(self) -> float:
        """Seconds of the authority's clock."""
        return self._clock.now()

    def dispatch(self, event: events.Event) -> None:
        """Passes an event to `step`, and performs the effects and the events that follow."""
        self._inbox.append(event)
        if self._stepping:
            return
        self._stepping = True
        try:
            while self._inbox:
                self._step(self._inbox.popleft())
        finally:
            self._stepping = False
        self._notify_watchers()

    def _step(self, event: events.Event) -> None:
        try:
            self._state, found = step(self._state, event, self.now)
        except Exception:
            log.exception("internal error: the event %s could not be handled", type(event).__name__)
            return
        for effect in found:
            work = self._performers[type(effect)](effect)
            if work is not None:
                self._tasks.start(work)

    async def reached(self, condition: Callable[[State], bool]) -> None:
        """Returns once `condition` is true of the state, now or after an event. Raises the errors of `condition`."""
        if not condition(self._state):
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._watchers.append((condition, future))
            await future

    def _notify_watchers(self) -> None:
        watchers, self._watchers = self._watchers, []
        for condition, future in watchers:
            try:
                if not future.done() and condition(self._state):
                    future.set_result(None)
            except Exception as error:  # noqa: BLE001, RUF100 - it belongs to the code that waits
                future.set_exception(error)
            if not future.done():
                self._watchers.append((condition, future))

    def snapshot(self) -> dict[str, Any]:
        """The whole state, for listeners that begin or fell behind."""
        return {**self.identity, **model_status.snapshot(self._state, self.now)}

    def live_figures(self) -> dict[str, Any]:
        """The figures of devices and models from the newest readings."""
        self.observe()
        return live_figures.live_figures(self._state, self.now)

    def resolve(self, name: str) -> str:
        """The id of the model with this id or alias; raises ModelNotFound with a list of the models.

        The id of a model with several replicas stands for all of them where requests are served, `NAME@2` for one.
        """
        try:
            return self._state.config.names[name]
        except KeyError:
            raise ModelNotFound(name, sorted(self._state.config.model_ids)) from None

    def replicas(self, name: str) -> tuple[str, ...]:
        """The ids of the replicas that a name stands for: see `InferenceConfig.replicas_named`."""
        self.resolve(name)
        return tuple(id for id in self._state.config.replicas_named(name) if id in self._state.models)

    def replicas_of(self, id: str) -> list[ModelRecord]:
        """The replicas that may serve requests for this id."""
        model = self.model(id)
        return replicas.replicas_of(self._state, model) if model.spec.replica_of is None else [model]

    def first_replica(self, id: str) -> ModelRecord:
        """The first replica, whose record holds the quarantine that all replicas share. Raises ModelNotFound."""
        return replicas.first_of(self._state, self.model(id))

    def siblings(self, id: str) -> list[ModelRecord]:
        """The other replicas of the same model."""
        found = self._state.models.get(id)
        return [] if found is None else [item for item in replicas.replicas_of(self._state, found) if item.id != id]

    def model(self, id: str) -> ModelRecord:
        """The record of a model at this moment; raises ModelNotFound."""
        try:
            return self._state.models[id]
        except KeyError:
            raise ModelNotFound(id, sorted(self._state.config.model_ids)) from None

    def status(self, id: str) -> ModelStatus:
        """One model, or one replica by its own id, as it is shown to clients."""
        return model_status.status(self._state, self.model(id), self.now)

    def statuses(self) -> list[ModelStatus]:
        """All models in the order of the file."""
        return model_status.statuses(self._state, self.now)

    def observe(self) -> None:
        """Takes the newest readings, for current figures."""
        self.dispatch(events.Observed(self.inventory.measured(), arenas=self._supervisor.arenas.used_bytes()))

    def process(self, model: str) -> WorkerProcess | None:
        """The worker process of a model."""
        return self._runner.processes.get(self.model(model).worker or "")

    def note_labels(self, process: WorkerProcess, labels: KvLabels | None) -> None:
        """A worker has other labels of prompts, or none any more."""
        if labels is None:
            self.labels.forget(process)
        elif (model := self._state.models.get(process.name)) is not None:
            self.labels.change(process, model.spec.replica_of or model.id, labels.added, labels.removed)

    # --- life --------------------------------------------------------------------------------------------------------
    async def start(self, found: Callable[[int], None] = lambda accelerators: None) -> list[Problem]:
        """Finds the devices and opens their accounts; returns configuration problems that depend on devices.

        Raises BrokenBuildError if llama.cpp does not compute on this CPU. `found` is called with the number of
        accelerators before anything is planned, and may raise.
        """
        if self._build_check is not None:
            await self._build_check.at_start()
        await self.inventory.start()
        accelerators = len(self.inventory.accelerators())
        found(accelerators)
        self.inventory.listen(lambda: self.dispatch(events.DeviceNoticed()))
        suspenders = {kind: suspender.label for kind, suspender in self.inventory.suspenders.items()}
        self.dispatch(events.DevicesFound(self.inventory.measured(), suspenders, self._clock.unix()))
        await self.reached(lambda state: state.started)
        return check_devices(self._state.config, accelerators)

    async def build_computes(self) -> bool:
        """Whether llama.cpp computes on this CPU, after a worker crashed at its first step."""
        return self._build_check is None or await self._build_check.computes()

    def stop_accepting(self, error: InferenceError | None = None) -> None:
        """Stops accepting requests; waiting ones fail with `error`, by default ShuttingDown."""
        self.dispatch(events.Closing(error))

    def stop_workers(self) -> None:
        """Stops accepting requests and stops all workers, which ends their streams with an error frame."""
        self.dispatch(events.Closing(stops_workers=True))

    async def close(self) -> None:
        """Ends every worker and helper; returns when all are reaped."""
        self.stop_accepting()
        self._closed = True
        self.bus.close()
        if self._alarm is not None:
            self._alarm.cancel()
        self._notifier.close()
        await self._tasks.end()
        await self._supervisor.close()
        await self._estimator.close()
        await self.inventory.close()
        await self._tasks.end()
        for future in self._commands.values():
            future.cancel()
        if self._alarm is not None:
            self._alarm.cancel()

    # --- requests ----------------------------------------------------------------------------------------------------
    def ask(
        self,
        model: str,
        *,
        priority: Priority = Priority.NORMAL,
        seconds: float | None = None,
        counts_as_use: bool = True,
        alone: bool = False,
        retries: int = 0,
        conversation: str | None = None,
        any_replica: bool = False,
        evicts: bool = True,
    ) -> Ticket:
        """A ticket for `model`, granted at once if the model is ready. `counts_as_use`: false for probes.

        `alone`: no other request may run beside it. `retries`: number of earlier attempts; the queue limit
        applies to the first attempt only. With `any_replica` the id of a model stands for all its replicas;
        requests with the same `conversation` get the same one if possible. Without `evicts` no other model is
        evicted: if it does not fit into free memory, the ticket fails with the numbers. Waits at most `seconds`
        and INFERENCE_ACQUIRE_TIMEOUT_SECONDS. Raises an error that is known at once, such as ShuttingDown,
        QueueFull and ModelNotFound; the ticket raises later errors.
        """
        ticket = Ticket(self, self._number())
        self._tickets[ticket.id] = ticket
        wanted = events.Wanted(
            ticket.id,
            model,
            priority,
            seconds,
            counts_as_use,
            alone,
            retries,
            conversation=conversation,
            any_replica=any_replica,
            evicts=evicts,
        )
        self.dispatch(wanted)
        if (error := ticket.refusal()) is not None:
            raise error
        return ticket

    def _number(self) -> int:
        """A new negative number; those of `step` are positive."""
        self._numbers -= 1
        return self._numbers

    def withdraw(self, ticket: Ticket) -> None:
        """Removes a waiting ticket."""
        self._tickets.pop(ticket.id, None)
        self.dispatch(events.Withdrawn(ticket.id))

    def release(self, lease: Lease, *, completed: bool) -> None:
        """A request has ended."""
        self._leases.pop(lease.record.id, None)
        self.dispatch(events.Released(lease.record.worker, lease.record.id, completed))

    async def load(
        self, model: str, seconds: float | None = None, priority: Priority = Priority.HIGH, *, evicts: bool = True
    ) -> None:
        """Loads the model, or one replica, and returns when it is ready; raises the same errors as a request."""
        with self.ask(model, priority=priority, seconds=seconds, evicts=evicts) as ticket:
            await ticket.wait()

    async def command(self, request: events.Request) -> Any:
        """Runs an operator's command and returns its result; raises InferenceError."""
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
        """Applies another configuration, except settings in AT_START; returns the differences, one sentence each."""
        found = configuration.differences(self._state, config)
        self.dispatch(events.SettingsChanged(config))
        return found

    # --- errors of requests ------------------------------------------------------------------------------------------
    def refusal(self, id: str) -> InferenceError | None:
        """The error of a request that could not be served even if it waited; None if it could, or while unknown."""
        errors = [self._refusal(model) for model in self.replicas_of(id)]
        return None if None in errors else errors[0]

    def is_ready(self, id: str) -> bool:
        """Whether a replica of the model takes requests now."""
        return any(model.state in ACCEPTING for model in self.replicas_of(id))

    def _refusal(self, model: ModelRecord) -> InferenceError | None:
        found = Predictions(self._state, self.now).of(model)
        if model.state is ModelState.FAILED and found is not None:
            return failed_error(model, self.now)
        if model.state is ModelState.COLD and isinstance(found, Refusal) and not found.waits_for:
            return refusal_error(self._state, model.effective, found, self.now)
        return None

    def loss(self, model: str, devices: tuple[str, ...], what: str) -> InferenceError:
        """The error of a request whose device is lost."""
        return device_lost_error(self._state, self.model(model), devices, what, self.now)

    # --- effects -----------------------------------------------------------------------------------------------------
    def _wake_at(self, effect: effects.WakeAt) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if math.isfinite(effect.at) and not self._closed:
            self._alarm = self._clock.call_at(effect.at, self._tick)

    def _tick(self) -> None:
        self._alarm = None
        arenas = self._supervisor.arenas.used_bytes()
        self.dispatch(events.Tick(self.inventory.measured(), self._clock.unix(), arenas))

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
        self._notifier.changed(effect.seconds)

    def _record_crash(self, effect: effects.RecordCrash) -> None:
        shapes = [self._leases[id].shape() for id in effect.leases if id in self._leases]
        self.crashes.add(effect.model, effect.pid, effect.exit, shapes)
        crash = {"id": effect.model, "cause": str(effect.exit.cause), "message": effect.exit.message}
        self.bus.publish("crash", {"crash": crash})

    def _grant(self, effect: effects.GrantLease) -> None:
        record = effect.lease
        devices = self._state.workers[record.worker].placement.devices
        lease = Lease(self, record, self._runner.processes[record.worker], devices)
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

    def _on_ready(self, worker: str, ready: Ready) -> None:
        self.dispatch(events.Loaded(worker, ready, self._files_of(worker)))

    def _on_exit(self, worker: str, exit: WorkerExit) -> None:
        for lease in self._leases.values():
            if lease.record.worker == worker:
                lease.settle_alone()
        self.dispatch(events.Exited(worker, exit, self._files_of(worker), self._supervisor.arenas.used_bytes()))

    def _files_of(self, worker: str) -> Fingerprint:
        """The files of a worker's model as they are now."""
        record = self._state.workers.get(worker)
        return () if record is None else record.spec.files
