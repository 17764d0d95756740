"""Performs the effects that start, command and end worker processes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp

from headgate.shared.errors import HeadgateError
from inference.authority import effects, events
from inference.authority.runners.background_tasks import BackgroundTasks
from inference.devices.inventory import Inventory
from inference.worker_link import Hold, Ready
from inference.workers.exit_cause import WorkerExit
from inference.workers.os_api import private_bytes
from inference.workers.worker_process import WorkerProcess
from inference.workers.worker_supervisor import Supervisor, trim_heaps

log = logging.getLogger("inference.authority")

WORKER_IDLE_SECONDS = 2.0
"""A connection to a worker that is idle for so long is closed; a new one over a Unix socket costs little."""


class Worker:
    """A worker process, and the HTTP client of the model that it serves."""

    def __init__(self, id: str, process: WorkerProcess) -> None:
        self.id = id
        self.process = process
        self.session: aiohttp.ClientSession | None = None


class WorkerRunner:
    """The processes by the ids of their workers. `on_ready` and `on_exit` are called with what a worker reported."""

    def __init__(
        self,
        supervisor: Supervisor,
        inventory: Inventory,
        tasks: BackgroundTasks,
        dispatch: Callable[[events.Event], None],
        *,
        on_ready: Callable[[str, Ready], None],
        on_exit: Callable[[str, WorkerExit], None],
    ) -> None:
        self.workers: dict[str, Worker] = {}
        self._supervisor = supervisor
        self._inventory = inventory
        self._tasks = tasks
        self._dispatch = dispatch
        self._on_ready = on_ready
        self._on_exit = on_exit
        self.performers: Mapping[type, Callable[[Any], object]] = {
            effects.Spawn: self._spawn,
            effects.SendOrder: self._send_order,
            effects.StopWorker: self._stop_worker,
            effects.KillWorker: self._kill_worker,
            effects.LoseWorker: self._lose_worker,
            effects.LimitWorker: self._limit_worker,
            effects.ForgetPrefixes: self._forget_prefixes,
            effects.SetThreads: self._set_threads,
            effects.FreeContext: self._free_context,
            effects.Suspend: self._suspend,
            effects.Resume: self._resume,
            effects.Connect: self._connect,
            effects.Disconnect: self._disconnect,
            effects.MeasureWorkers: self._measure_workers,
            effects.TrimWorkers: self._trim_workers,
        }

    def _spawn(self, effect: effects.Spawn) -> None:
        id, order = effect.worker, effect.order
        after = {} if effect.after is None else {"after": self.workers[effect.after].process}
        try:
            process = self._supervisor.spawn(effect.model, effect.environment, lambda: self._on_progress(id), **after)
        except HeadgateError as error:
            self._dispatch(events.SpawnFailed(id, str(error)))
            return
        worker = self.workers[id] = Worker(id, process)
        self._dispatch(events.Spawned(id, process.pid))
        if isinstance(order, Hold):
            process.hello.add_done_callback(lambda hello: None if _failed(hello) else process.hold(order.path))
            process.held.add_done_callback(lambda held: self._on_held(id, held))
        else:
            process.hello.add_done_callback(lambda hello: None if _failed(hello) else process.grant(order))
            process.ready.add_done_callback(lambda ready: self._ready(id, ready))
        process.exited.add_done_callback(lambda exited: self._exited(worker, exited.result()))

    def _on_progress(self, id: str) -> None:
        worker = self.workers.get(id)
        if worker is not None:
            self._dispatch(events.Progressed(id, worker.process.progress, worker.process.beat))

    def _on_held(self, id: str, held: asyncio.Future[Any]) -> None:
        if not _failed(held):
            self._dispatch(events.FileHeld(id, held.result().count_bytes))

    def _ready(self, id: str, ready: asyncio.Future[Any]) -> None:
        if not _failed(ready):
            self._on_ready(id, ready.result())

    def _exited(self, worker: Worker, exit: WorkerExit) -> None:
        self._on_exit(worker.id, exit)
        self.workers.pop(worker.id, None)

    def _send_order(self, effect: effects.SendOrder) -> None:
        worker = self.workers[effect.worker].process
        worker.grant(effect.order)
        worker.ready.add_done_callback(lambda ready: self._ready(effect.worker, ready))

    def _stop_worker(self, effect: effects.StopWorker) -> None:
        if (worker := self.workers.get(effect.worker)) is not None:
            worker.process.stop()

    def _kill_worker(self, effect: effects.KillWorker) -> None:
        if (worker := self.workers.get(effect.worker)) is not None:
            worker.process.kill(effect.hang)

    def _lose_worker(self, effect: effects.LoseWorker) -> None:
        if (worker := self.workers.get(effect.worker)) is not None:
            worker.process.lose(effect.why)

    def _limit_worker(self, effect: effects.LimitWorker) -> None:
        if (worker := self.workers.get(effect.worker)) is not None:
            worker.process.limit(effect.sequences)

    def _forget_prefixes(self, effect: effects.ForgetPrefixes) -> None:
        if (worker := self.workers.get(effect.worker)) is not None:
            worker.process.forget()

    def _set_threads(self, effect: effects.SetThreads) -> None:
        if (worker := self.workers.get(effect.worker)) is not None:
            worker.process.use_threads(effect.count)

    def _free_context(self, effect: effects.FreeContext) -> None:
        worker = self.workers[effect.worker].process
        worker.offload(effect.most_bytes, stays=effect.stays)
        worker.offloaded.add_done_callback(lambda done: self._on_freed(effect.worker, done))

    def _on_freed(self, id: str, done: asyncio.Future[Any]) -> None:
        if not _failed(done):
            self._dispatch(events.ContextFreed(id, done.result()))

    def _suspend(self, effect: effects.Suspend) -> None:
        self.workers[effect.worker].process.suspend()
        self._tasks.start(self._carry("suspend", effect))

    def _resume(self, effect: effects.Resume) -> None:
        self._tasks.start(self._carry("resume", effect))

    async def _carry(self, operation: str, effect: effects.Suspend | effects.Resume) -> None:
        carrier = self._inventory.carriers[effect.kind]
        why, of_state = None, False
        try:
            trouble = await carrier.carry(operation, effect.device, effect.pid, effect.seconds)
            if trouble is not None:
                why, of_state = trouble.why, trouble.of_state
        except Exception as error:
            log.exception("internal error in %s of pid %d", operation, effect.pid)
            why = f"internal error ({type(error).__name__})"
        if isinstance(effect, effects.Suspend):
            self._dispatch(events.SuspendEnded(effect.worker, why, of_state))
            return
        if why is None and effect.worker in self.workers:
            self.workers[effect.worker].process.resumed()
        self._dispatch(events.ResumeEnded(effect.worker, why, of_state))

    def _connect(self, effect: effects.Connect) -> None:
        worker = self.workers[effect.worker]
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
        worker = self.workers.get(effect.worker)
        if worker is not None and worker.session is not None:
            session, worker.session = worker.session, None
            self._tasks.start(session.close(), finishes=True)

    def _measure_workers(self, effect: effects.MeasureWorkers) -> None:
        found = {
            id: seen
            for id in effect.workers
            if (worker := self.workers.get(id)) is not None and (seen := private_bytes(worker.process.pid)) is not None
        }
        self._dispatch(events.WorkersMeasured(found, self._inventory.measured()))

    def _trim_workers(self, effect: effects.TrimWorkers) -> None:
        self._tasks.start(self._trim(effect))

    async def _trim(self, effect: effects.TrimWorkers) -> None:
        processes = {id: self.workers[id].process for id in effect.workers if id in self.workers}
        freed = 0
        left: dict[str, int] = {}
        retained: dict[str, tuple[int, int]] = {}
        try:
            freed, left, retained = await trim_heaps(processes, fresh_first=effect.fresh_first)
        finally:
            self._dispatch(events.Trimmed(effect.job, freed, left, retained))


def _failed(future: asyncio.Future[Any]) -> bool:
    return future.cancelled() or future.exception() is not None
