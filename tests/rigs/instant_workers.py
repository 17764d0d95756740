"""Workers without processes: they load in a given time, hold nothing and end at once; for long histories."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from inference import worker_link
from inference.authority.clock import Clock
from inference.protocol import ExitCause
from inference.workers.arenas import Arenas
from inference.workers.exit_cause import WorkerExit

OVERHEAD_BYTES = 64 * 2**20
"""The overhead of a worker in the estimates of tests.rigs.authority_rig.FakeEstimator."""


class InstantWorker:
    """The part of a worker process that the authority uses."""

    def __init__(self, name: str, load_seconds: float, pid: int, clock: Clock) -> None:
        loop = asyncio.get_running_loop()
        self.name = name
        self.pid = pid
        self.socket_path = Path("/nowhere")
        self.progress = 0.0
        self.threads: int | None = None
        self.beat: worker_link.Heartbeat | None = None
        self.hello: asyncio.Future[worker_link.Hello] = loop.create_future()
        self.ready: asyncio.Future[worker_link.Ready] = loop.create_future()
        self.exited: asyncio.Future[WorkerExit] = loop.create_future()
        self._load_seconds = load_seconds
        self._clock = clock
        loop.call_soon(self.hello.set_result, worker_link.Hello(pid, "instant"))

    def grant(self, grant: worker_link.Grant) -> None:
        """Loads."""
        buffers = tuple(
            worker_link.Buffer(device, "kv", max(0, count - OVERHEAD_BYTES))
            for device, count in grant.reserved_bytes.items()
        )
        ready = worker_link.Ready(self._load_seconds, buffers, grant.context_length, ("chat",))
        self._clock.call_at(self._clock.now() + self._load_seconds, partial(self._loaded, ready))

    def _loaded(self, ready: worker_link.Ready) -> None:
        if not self.exited.done():
            self.progress = 1.0
            self.ready.set_result(ready)

    def send(self, message: worker_link.Message) -> None:
        """Records the number of threads."""
        if isinstance(message, worker_link.Threads):
            self.threads = message.count

    def stop(self) -> None:
        """Ends with status 0."""
        self._end(WorkerExit(ExitCause.REQUESTED, 0, "requested", (), self.ready.done()))

    def kill(self, hang: str | None = None) -> None:
        """Ends at once."""
        self._end(WorkerExit(ExitCause.KILLED, -9, hang or "killed", (), self.ready.done()))

    def lose(self, why: str) -> None:
        """Ends at once because its device is lost."""
        self._end(WorkerExit(ExitCause.DEVICE_LOST, -9, why, (), self.ready.done()))

    def _end(self, exit: WorkerExit) -> None:
        if not self.exited.done():
            self.exited.set_result(exit)


class InstantSupervisor:
    """Replaces the supervisor; `seconds` are load times by model id (default 0.02), `workers` all started workers."""

    def __init__(self, seconds: Mapping[str, float] | None = None) -> None:
        self._seconds = dict(seconds or {})
        self.clock = Clock()
        self._pids = itertools.count(2**30)  # pids without a process, so no memory is read
        self.workers: list[InstantWorker] = []
        self.arenas = Arenas()

    def spawn(
        self, name: str, _environment: Mapping[str, str], _on_change: Callable[[], None], *, stores: bool = False
    ) -> InstantWorker:
        """A worker that waits for its grant; it stores nothing."""
        del stores
        worker = InstantWorker(name, self._seconds.get(name, 0.02), next(self._pids), self.clock)
        self.workers.append(worker)
        return worker

    def drop_arena(self, name: str) -> None:
        """Nothing is stored."""

    async def close(self) -> None:
        """Ends all workers."""
        for worker in self.workers:
            worker.stop()
