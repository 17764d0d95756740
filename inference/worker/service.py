"""The main program of a worker process: hello, grant, load, ready, serve, offload, drain, stop.

The process ends with the authority: it ends at the end of file of the link, and on Linux the kernel also ends it. It
ignores SIGINT, which the supervisor handles, and drains on SIGTERM.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from headgate import __version__
from headgate.shared import child_process
from headgate.shared import log as logs
from headgate.shared.event_loop import new_event_loop
from inference.protocol import ExitCause
from inference.worker import malloc_trim
from inference.worker.channel import Channel, Order
from inference.worker.worker_errors import LoadError, UnloadedError
from inference.worker_link import (
    ARENA_FD_ENV,
    BEAT_SECONDS,
    LINK_FD_ENV,
    PARENT_ENV,
    SOCKET_FD_ENV,
    Failed,
    Forget,
    Grant,
    Heartbeat,
    Held,
    Hello,
    Hold,
    KvBudget,
    KvLabels,
    Limit,
    LoadProgress,
    Offload,
    Stop,
    Threads,
    Timings,
)

if TYPE_CHECKING:
    from inference.worker.assembly import RequestPreparation
    from inference.worker.engine.engine import Engine
    from inference.worker.llama.context import Context
    from inference.worker.prompt.vision import Vision
    from inference.worker.warm.standby import HeldFile
    from inference.worker.worker_model import WorkerModel

T = TypeVar("T")
log = logging.getLogger("headgate.worker")

SWITCH_SECONDS = 0.0005
"""Time that another thread may hold the interpreter after a step of the engine; a tenth of Python's default."""
DRAIN_SECONDS = 600.0
"""Time for running requests after SIGTERM."""
STOP_SECONDS = 1.0
"""Time for clients to read their last bytes when the context ends."""
LAST_STEP_SECONDS = 60.0
"""Time for the running step to end when the model is offloaded."""
STOP_STEP_SECONDS = 0.5
"""The same when the process ends."""
STORE_SECONDS = 1.5
"""Time for storing sequences at the end, and again for writing them to disk.

Both, with STOP_STEP_SECONDS and STOP_SECONDS, are less than the time after which the service kills a worker
(`worker_process.STOP_SECONDS`).
"""
SPINS = "4000"
"""Iterations that a computing thread spins before it sleeps while it waits for the others: about 0.1 ms."""


def main(environ: Mapping[str, str] = os.environ) -> int:
    """Runs the worker and returns its exit status. It usually ends by `os._exit`, because C threads may still run."""
    try:
        parent, link_handle, socket_handle = (int(environ[name]) for name in (PARENT_ENV, LINK_FD_ENV, SOCKET_FD_ENV))
    except (KeyError, ValueError):
        sys.stderr.write("inference.worker is started by the inference service; run headgate up instead\n")
        return 2
    child_process.die_with_parent({child_process.PARENT_ENV: str(parent)})
    child_process.disable_core_dumps()
    logs.set_up(environ)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    sys.setswitchinterval(SWITCH_SECONDS)
    malloc_trim.set_up()
    arena = environ.get(ARENA_FD_ENV, "")
    worker = Worker(link_handle, socket_handle, int(arena) if arena.isdecimal() else None)
    worker.run()
    return 0


def _exit(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Worker:
    """One process, one model."""

    def __init__(self, link_handle: int, socket_handle: int, arena_handle: int | None = None) -> None:
        """`arena_handle`: shared memory for sequences that outlive the process."""
        self._socket = socket.socket(fileno=socket_handle)
        self._channel = Channel(link_handle, self._receive)
        self._arena_handle = arena_handle
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Future[str] | None = None
        self._offloading: Offload | None = None
        self._preparation: RequestPreparation | None = None
        self._vision: Vision | None = None
        self._engine: Engine | None = None
        self._contexts: tuple[Context, ...] = ()
        self._threads: int | None = None
        self._kv_budget: int | None = None
        self._pulse: Callable[[], Heartbeat] = _still
        self._timings: deque[Timings] = deque()
        self._labels: deque[KvLabels] = deque()
        self._draining = False
        self._fraction: float | None = None

    def run(self) -> None:
        """Runs until the process ends; does not return."""
        self._channel.start()
        threading.Thread(target=self._await_sigterm, name="signals", daemon=True).start()
        self._channel.send(Hello(os.getpid(), __version__))
        order = self._channel.order()
        _limit_spinning(os.environ)
        held = None
        if isinstance(order, Hold):
            held, order = self._hold(order)
        model = self._loading(partial(self._load, order, held))
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        while True:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                model = runner.run(self._serve(model))
            from inference.worker.worker_model import reopen_worker_model

            grant = self._channel.grant()  # the model was offloaded and the process stays
            model = self._loading(partial(reopen_worker_model, model, grant))

    # --- before serving ----------------------------------------------------------------------------------------------
    def _hold(self, order: Hold) -> tuple[HeldFile, Grant]:
        """Reads the file into memory and waits for the grant, without a device."""
        from inference.worker.warm.standby import hold

        held = self._loading(partial(hold, order.path, self._on_progress))
        self._channel.send(Held(held.count_bytes, held.locked_bytes))
        waiting = threading.Event()
        beating = threading.Thread(target=self._beat, args=(waiting,), name="waiting", daemon=True)
        beating.start()
        grant = self._channel.grant()
        waiting.set()
        return held, grant

    def _loading(self, work: Callable[[], T]) -> T:
        """The result of `work`; a failure is reported to the authority and ends the process."""
        try:
            with self._reports_progress():
                return work()
        except LoadError as error:
            self._give_up(error.cause, error.message)
        except Exception as error:
            log.exception("internal error: the load failed")
            self._give_up(ExitCause.STARTUP, f"the worker failed while loading ({type(error).__name__}: {error})")
        raise AssertionError("unreachable")

    def _load(self, grant: Grant, held: HeldFile | None) -> WorkerModel:
        from inference.worker.worker_model import load_worker_model

        return load_worker_model(grant, held, self._arena_handle, _write_stderr, self._on_progress, self._on_store)

    def _on_store(self) -> None:
        """Wakes the engine: the store of sequences has something to do. Called on any thread."""
        if (engine := self._engine) is not None:
            engine.wake()

    def _on_progress(self, fraction: float) -> bool:
        self._fraction = fraction
        return True

    @contextlib.contextmanager
    def _reports_progress(self) -> Iterator[None]:
        """Reports progress at the interval of the heartbeat, also while a single tensor takes long."""
        done = threading.Event()
        self._fraction = 0.0

        def report() -> None:
            while not done.wait(BEAT_SECONDS):
                self._channel.send(LoadProgress(round(self._fraction or 0.0, 3)))

        thread = threading.Thread(target=report, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
        self._channel.send(LoadProgress(1.0))

    def _give_up(self, cause: ExitCause, message: str) -> None:
        log.error("the model cannot be loaded, the worker ends: cause=%s: %s", cause, message)
        self._channel.send(Failed(cause.value, message))
        _exit(1)

    # --- orders, from the link and from signals ----------------------------------------------------------------------
    def _await_sigterm(self) -> None:
        while True:
            signal.sigwait({signal.SIGTERM})
            self._end("drain")

    def _receive(self, order: Order) -> None:
        """Carries out an order of the authority. Embedding and reranking models have no sequences to limit or drop, but
        may have a heap to trim.
        """
        match order:
            case Stop():
                self._end("stop")
            case Offload():
                self._offloading = order
                self._end("offload")
            case Threads():
                self._threads = order.count
                if (loop := self._loop) is not None:
                    loop.call_soon_threadsafe(self._use_threads)
            case Limit():
                if self._engine is not None:
                    self._engine.limit(order.sequences)
            case Grant():
                self._kv_budget = None  # the grant has the present one
            case KvBudget():
                self._kv_budget = order.ram_bytes
                if (loop := self._loop) is not None:
                    loop.call_soon_threadsafe(self._use_kv_budget)
            case Forget():
                if self._engine is not None:
                    self._engine.forget()
                malloc_trim.trim()

    def _use_threads(self) -> None:
        """Runs on the loop, as offloading does, so the contexts stay valid."""
        if self._threads is not None:
            for context in self._contexts:
                context.use_threads(self._threads)

    def _use_kv_budget(self) -> None:
        """Runs on the loop, so the engine is the present one."""
        if self._engine is not None and self._kv_budget is not None:
            self._engine.limit_stored(self._kv_budget)

    def _end(self, order: str) -> None:
        """Ends serving with drain, stop or offload. Before the model serves, the process ends at once."""
        loop = self._loop
        if loop is None:
            _exit(0)
        else:
            loop.call_soon_threadsafe(self._obey, order)

    def _obey(self, order: str) -> None:
        may_take = self._ending is not None and not self._ending.done()
        if may_take and (order == "stop" or not self._draining):
            assert self._ending is not None
            self._ending.set_result(order)

    # --- serving -----------------------------------------------------------------------------------------------------
    async def _serve(self, model: WorkerModel) -> WorkerModel:
        """Serves until the process ends, or until the model is offloaded; returns it without its context."""
        from headgate.shared.wire import QuietServer, server_config  # imported late, so that `hello` is fast
        from inference.worker import assembly

        loop = asyncio.get_running_loop()
        self._ending = loop.create_future()

        self._vision = self._vision or assembly.vision_of(model.loaded)
        engine, embedder = assembly.engines_of(model.loaded, model.grant, model.store, self._vision, self._fatal)
        self._engine = engine
        self._labels = deque() if engine is None else engine.label_changes
        running = engine or embedder
        assert running is not None
        if self._preparation is None:
            self._preparation = assembly.RequestPreparation.of(model.loaded, self._vision)
        app = assembly.app_of(model.loaded, engine, embedder, self._preparation, self._vision)
        self._timings = app.timings
        # Connections are kept: the only client owns the socket.
        config = server_config(
            app, lifespan="off", date_header=False, timeout_keep_alive=3600, timeout_graceful_shutdown=5
        )
        server = QuietServer(config)
        serving = asyncio.create_task(server.serve(sockets=[self._socket.dup()]))  # serve closes the duplicate
        running.start()
        self._loop = loop
        self._pulse = running.counters.beat
        self._contexts = model.loaded.contexts
        self._use_threads()
        self._use_kv_budget()
        self._channel.send(model.loaded.ready)
        app.set_idle()
        order = await self._ending
        app.draining = True
        if order == "drain":
            log.info("draining: %d requests are running", app.in_flight)
            self._draining = True
            self._ending = loop.create_future()  # a stop may still come
            drained = asyncio.create_task(app.drained())
            drained.add_done_callback(lambda _task: self._obey("stop"))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending, DRAIN_SECONDS)
        self._labels = deque()  # they end with the context, and with the process
        ended = running.stop(UnloadedError(), LAST_STEP_SECONDS if order == "offload" else STOP_STEP_SECONDS)
        until = loop.time() + STOP_SECONDS
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await app.drained()
        server.should_exit = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await serving
        self._send_pending(self._timings)
        if engine is not None and ended:
            engine.store_all(STORE_SECONDS)
        if order != "offload" or not ended:
            if model.store is not None and ended:
                model.store.close(STORE_SECONDS)
            _exit(0)
        self._loop = None
        self._pulse, self._engine, self._contexts = _still, None, ()
        from inference.worker.worker_model import free_context

        assert self._offloading is not None
        model, freed = free_context(model, STORE_SECONDS)
        self._channel.send(freed)
        if not self._offloading.stays:
            _exit(0)
        return model

    def _beat(self, until: threading.Event | None = None) -> None:
        """Sends heartbeats, forever or until `until` is set."""
        while until is None or not until.is_set():
            beat = self._pulse()
            self._channel.send(beat if self._vision is None else longer(beat, self._vision.counters.beat()))
            self._send_pending(self._timings)
            self._send_pending(self._labels)
            time.sleep(BEAT_SECONDS)

    def _send_pending(self, messages: deque[Timings] | deque[KvLabels]) -> None:
        with contextlib.suppress(IndexError):  # another thread removed the last one
            while messages:
                self._channel.send(messages.popleft())

    def _fatal(self, message: str) -> None:
        """The engine failed: ends the process after the requests got their errors."""
        log.error("the engine failed, the worker ends: %s", message)
        threading.Timer(STOP_SECONDS, _exit, (1,)).start()


def _limit_spinning(environ: MutableMapping[str, str]) -> None:
    """Limits how long GNU OpenMP's threads spin before they sleep, unless the environment has a choice.

    The library reads this once, when it is loaded. Its default keeps cores busy that other programs and models need.
    """
    if "OMP_WAIT_POLICY" not in environ:
        environ.setdefault("GOMP_SPINCOUNT", SPINS)


def _still() -> Heartbeat:
    """The heartbeat of a worker without a context."""
    return Heartbeat(None, 0, 0, 0, 0, 0)


def longer(beat: Heartbeat, vision: Heartbeat) -> Heartbeat:
    """`beat` with the step of `vision` if that takes longer, so that a hung encoder is visible beside a busy engine."""
    if (vision.step_seconds or 0.0) <= (beat.step_seconds or 0.0):
        return beat
    return replace(beat, step_seconds=vision.step_seconds, step_tokens=vision.step_tokens)


def _write_stderr(line: str) -> None:
    """Writes directly to stderr, which the authority collects; works while the process aborts."""
    os.write(2, (line + "\n").encode("utf-8", "replace"))
