"""Performs the effects that start, command and end worker processes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from headgate.shared.errors import HeadgateError
from inference.authority import effects, events
from inference.devices.inventory import Inventory
from inference.worker_link import Hold, Ready
from inference.workers.exit_cause import WorkerExit
from inference.workers.worker_process import WorkerProcess
from inference.workers.worker_supervisor import Supervisor, trim_heaps, worker_bytes

log = logging.getLogger("inference.authority")

_CALLS: Mapping[type, Callable[[WorkerProcess, Any], object]] = {
    effects.StopWorker: lambda process, effect: process.stop(),
    effects.KillWorker: lambda process, effect: process.kill(effect.hang),
    effects.LoseWorker: lambda process, effect: process.lose(effect.why),
    effects.Instruct: lambda process, effect: process.send(effect.message),
}


class WorkerRunner:
    """The processes by the ids of their workers. `on_ready` and `on_exit` are called with what a worker reported."""

    def __init__(
        self,
        supervisor: Supervisor,
        inventory: Inventory,
        dispatch: Callable[[events.Event], None],
        *,
        on_ready: Callable[[str, Ready], None],
        on_exit: Callable[[str, WorkerExit], None],
    ) -> None:
        self.processes: dict[str, WorkerProcess] = {}
        self._supervisor = supervisor
        self._inventory = inventory
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
        self.processes[id] = process
        self._dispatch(events.Spawned(id, process.pid))
        if isinstance(order, Hold):
            process.hello.add_done_callback(lambda hello: None if _failed(hello) else process.hold(order.path))
            process.held.add_done_callback(lambda held: self._on_held(id, held))
        else:
            process.hello.add_done_callback(lambda hello: None if _failed(hello) else process.grant(order))
            process.ready.add_done_callback(lambda ready: self._ready(id, ready))
        process.exited.add_done_callback(lambda exited: self._exited(id, exited.result()))

    def _on_progress(self, id: str) -> None:
        if (process := self.processes.get(id)) is not None:
            self._dispatch(events.Progressed(id, process.progress, process.beat))

    def _on_held(self, id: str, held: asyncio.Future[Any]) -> None:
        if not _failed(held):
            done = held.result()
            self._dispatch(events.FileHeld(id, done.count_bytes, done.locked_bytes))

    def _ready(self, id: str, ready: asyncio.Future[Any]) -> None:
        if not _failed(ready) and id in self.processes:
            self._on_ready(id, ready.result())

    def _exited(self, id: str, exit: WorkerExit) -> None:
        self._on_exit(id, exit)
        self.processes.pop(id, None)

    def _send_order(self, effect: effects.SendOrder) -> None:
        process = self.processes[effect.worker]
        self._supervisor.arenas.keep(process.name)
        process.grant(effect.order)
        process.ready.add_done_callback(lambda ready: self._ready(effect.worker, ready))

    def _call(self, effect: Any) -> None:
        """Calls the process of a worker, unless it has ended."""
        if (process := self.processes.get(effect.worker)) is not None:
            _CALLS[type(effect)](process, effect)

    def _free_context(self, effect: effects.FreeContext) -> None:
        process = self.processes[effect.worker]
        process.offload(stays=effect.stays)
        process.offloaded.add_done_callback(lambda done: self._on_freed(effect.worker, done))

    def _on_freed(self, id: str, done: asyncio.Future[Any]) -> None:
        if not _failed(done):
            self._dispatch(events.ContextFreed(id, done.result(), self._supervisor.arenas.used_bytes()))

    def _checkpoint(self, effect: effects.Checkpoint) -> Coroutine[Any, Any, None]:
        """Suspends or resumes a process."""
        process = self.processes.get(effect.worker)
        if process is not None and effect.operation == "suspend":
            process.note_suspending()  # at once: a stop that follows must kill, as a suspended process reads no message
        return self._run_checkpoint(effect, process)

    async def _run_checkpoint(self, effect: effects.Checkpoint, process: WorkerProcess | None) -> None:
        operation = effect.operation
        why, by_device_state = None, False
        try:
            failure = await self._inventory.suspenders[effect.kind].run(
                operation, effect.device, effect.pid, effect.seconds
            )
            if failure is not None:
                why, by_device_state = failure.why, failure.by_device_state
        except Exception as error:
            log.exception("internal error in %s of pid %d", operation, effect.pid)
            why = f"internal error ({type(error).__name__})"
        if process is not None and operation == "resume" and why is None:
            process.note_resumed()
        self._dispatch(events.CheckpointEnded(effect.worker, operation, why, by_device_state))

    def _measure_workers(self, effect: effects.MeasureWorkers) -> None:
        arenas = self._supervisor.arenas
        found = worker_bytes(self._of(effect.workers), arenas)
        self._dispatch(events.WorkersMeasured(found, self._inventory.measured(), arenas.used_bytes()))

    def _of(self, ids: Iterable[str]) -> dict[str, WorkerProcess]:
        return {id: self.processes[id] for id in ids if id in self.processes}

    async def _trim_workers(self, effect: effects.TrimWorkers) -> None:
        processes = self._of(effect.workers)
        freed = 0
        left: dict[str, int] = {}
        retained: dict[str, tuple[int, int]] = {}
        try:
            freed, left, retained = await trim_heaps(processes, self._supervisor.arenas, fresh_first=effect.fresh_first)
        finally:
            self._dispatch(events.Trimmed(effect.job, freed, left, retained))


def _failed(future: asyncio.Future[Any]) -> bool:
    return future.cancelled() or future.exception() is not None
