"""Performs the effects that start, command and end worker processes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

import aiohttp

from headgate.shared.errors import HeadgateError
from inference.authority import effects, events
from inference.authority.runners.background_tasks import BackgroundTasks
from inference.devices.inventory import Inventory
from inference.worker_link import Hold, Ready
from inference.workers.exit_cause import WorkerExit
from inference.workers.worker_process import WorkerProcess
from inference.workers.worker_supervisor import Supervisor, trim_heaps, worker_bytes

log = logging.getLogger("inference.authority")

WORKER_IDLE_SECONDS = 2.0
"""A connection to a worker is closed after this idle time; a new one over a Unix socket costs little."""


_CALLS: Mapping[type, Callable[[WorkerProcess, Any], object]] = {
    effects.StopWorker: lambda process, effect: process.stop(),
    effects.KillWorker: lambda process, effect: process.kill(effect.hang),
    effects.LoseWorker: lambda process, effect: process.lose(effect.why),
    effects.Instruct: lambda process, effect: process.send(effect.message),
}


class Worker:
    """A worker process, and the HTTP client of the model that it serves."""

    def __init__(self, id: str, process: WorkerProcess) -> None:
        self.id = id
        self.process = process
        self.session: aiohttp.ClientSession | None = None

    def connect(self) -> None:
        """Opens the HTTP client, when the model is ready."""
        self.session = self.session or aiohttp.ClientSession(
            "http://worker",
            connector=aiohttp.UnixConnector(
                path=str(self.process.socket_path), limit=0, keepalive_timeout=WORKER_IDLE_SECONDS
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
            auto_decompress=False,
            raise_for_status=False,
        )


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
        self.performers: Mapping[type, Callable[[Any], Coroutine[Any, Any, None] | None]] = {
            effects.Spawn: self._spawn,
            effects.SendOrder: self._send_order,
            **dict.fromkeys(_CALLS, self._call),
            effects.FreeContext: self._free_context,
            effects.Checkpoint: self._checkpoint,
            effects.MeasureWorkers: self._measure_workers,
            effects.TrimWorkers: self._trim_workers,
            effects.DropKv: lambda effect: supervisor.drop_arena(effect.model),
        }

    def _spawn(self, effect: effects.Spawn) -> None:
        id, order = effect.worker, effect.order
        try:
            process = self._supervisor.spawn(
                effect.model, effect.environment, lambda: self._on_progress(id), stores=effect.stores
            )
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
            done = held.result()
            self._dispatch(events.FileHeld(id, done.count_bytes, done.locked_bytes))

    def _ready(self, id: str, ready: asyncio.Future[Any]) -> None:
        if not _failed(ready) and (worker := self.workers.get(id)) is not None:
            worker.connect()
            self._on_ready(id, ready.result())

    def _exited(self, worker: Worker, exit: WorkerExit) -> None:
        self._on_exit(worker.id, exit)
        self.workers.pop(worker.id, None)
        if worker.session is not None:
            self._tasks.start(worker.session.close(), finishes=True)

    def _send_order(self, effect: effects.SendOrder) -> None:
        worker = self.workers[effect.worker].process
        self._supervisor.arenas.keep(worker.name)
        worker.grant(effect.order)
        worker.ready.add_done_callback(lambda ready: self._ready(effect.worker, ready))

    def _call(self, effect: Any) -> None:
        """Calls the process of a worker, unless it has ended."""
        if (worker := self.workers.get(effect.worker)) is not None:
            _CALLS[type(effect)](worker.process, effect)

    def _free_context(self, effect: effects.FreeContext) -> None:
        worker = self.workers[effect.worker].process
        worker.offload(stays=effect.stays)
        worker.offloaded.add_done_callback(lambda done: self._on_freed(effect.worker, done))

    def _on_freed(self, id: str, done: asyncio.Future[Any]) -> None:
        if not _failed(done):
            self._dispatch(events.ContextFreed(id, done.result(), self._supervisor.arenas.used_bytes()))

    def _checkpoint(self, effect: effects.Checkpoint) -> Coroutine[Any, Any, None]:
        """Suspends or resumes a process."""
        worker = self.workers.get(effect.worker)
        if worker is not None and effect.operation == "suspend":
            worker.process.suspend()  # at once: a stop that follows must kill, because the process cannot read it
        return self._run_checkpoint(effect, worker)

    async def _run_checkpoint(self, effect: effects.Checkpoint, worker: Worker | None) -> None:
        operation = effect.operation
        why, of_state = None, False
        try:
            failure = await self._inventory.suspenders[effect.kind].run(
                operation, effect.device, effect.pid, effect.seconds
            )
            if failure is not None:
                why, of_state = failure.why, failure.of_state
        except Exception as error:
            log.exception("internal error in %s of pid %d", operation, effect.pid)
            why = f"internal error ({type(error).__name__})"
        if worker is not None and operation == "resume" and why is None:
            worker.process.resumed()
        self._dispatch(events.CheckpointEnded(effect.worker, operation, why, of_state))

    def _measure_workers(self, effect: effects.MeasureWorkers) -> None:
        arenas = self._supervisor.arenas
        found = worker_bytes(self._processes(effect.workers), arenas)
        self._dispatch(events.WorkersMeasured(found, self._inventory.measured(), arenas.used_bytes()))

    def _processes(self, ids: Iterable[str]) -> dict[str, WorkerProcess]:
        return {id: self.workers[id].process for id in ids if id in self.workers}

    async def _trim_workers(self, effect: effects.TrimWorkers) -> None:
        processes = self._processes(effect.workers)
        freed = 0
        left: dict[str, int] = {}
        retained: dict[str, tuple[int, int]] = {}
        try:
            freed, left, retained = await trim_heaps(processes, self._supervisor.arenas, fresh_first=effect.fresh_first)
        finally:
            self._dispatch(events.Trimmed(effect.job, freed, left, retained))


def _failed(future: asyncio.Future[Any]) -> bool:
    return future.cancelled() or future.exception() is not None
