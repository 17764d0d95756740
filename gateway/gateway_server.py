"""Runs the application on a socket until a signal stops it.

SIGTERM: `/readyz` is 503 at once while the port still answers, so that load balancers notice. Then no new connections
are accepted, and open answers may finish within the drain time; the rest end in an error frame. Exit status 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket

import uvicorn

from gateway.http.connection_limits import MAX_CONNECTIONS, BoundedHttp
from gateway.http.middleware import Edge
from gateway.runtime import Runtime
from headgate.shared.errors import HeadgateError
from headgate.shared.wire import QuietServer, server_config

log = logging.getLogger("gateway.gateway_server")

NOTICE_SECONDS = 2.0
"""How long the port still answers after `/readyz` became 503."""

LAST_FRAMES_SECONDS = 3
"""How long uvicorn waits after the drain time for the last error frames."""

MAX_DRAIN_SECONDS = 86400.0

KEEP_ALIVE_SECONDS = 75

NEW_OBJECTS = 10_000
"""New objects before a garbage collection. The default of 700 is reached by a few requests in flight."""

OWN_DESCRIPTORS = 256
"""File descriptors that are not for clients."""


class _Server(QuietServer):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to serve, and freezes the objects of the start-up for the garbage collector."""
        await super().startup(sockets)
        _freeze_objects()


def _freeze_objects() -> None:
    """Excludes the objects of the start-up from garbage collection.

    Reference counting frees the objects of a request. A full collection visits all objects, and the start-up creates a
    hundred times as many as the requests: collections take a tenth of the CPU at full load, and each stops every stream
    for tens of milliseconds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, 10, 10)


class Shutdown:
    """The order of a shutdown: notice, drain, error frames. Signals call `begin`."""

    def __init__(self, runtime: Runtime, server: uvicorn.Server, notice_seconds: float = NOTICE_SECONDS) -> None:
        self._runtime = runtime
        self._server = server
        self._notice = notice_seconds
        self._task: asyncio.Task[None] | None = None

    def begin(self, number: signal.Signals) -> None:
        """The first signal begins the shutdown, a second one ends it at once."""
        if self._task is not None:
            log.warning("%s again: stopping at once", number.name)
            self._server.force_exit = True
            self._server.should_exit = True
            self._runtime.end_streams()
            self._runtime.open_requests.interrupt_all()
            return
        self._runtime.is_draining = True
        self._task = asyncio.get_running_loop().create_task(self._stop(number), name="stopping")

    async def _stop(self, number: signal.Signals) -> None:
        drain = _drain_seconds(self._runtime)
        self._server.config.timeout_graceful_shutdown = int(drain) + LAST_FRAMES_SECONDS  # a reload may have changed it
        log.info(
            "%s: shutting down; %d requests have %g s to finish", number.name, len(self._runtime.open_requests), drain
        )
        # After Ctrl-C no balancer has to notice the changed readiness.
        notice = 0.0 if number is signal.SIGINT else min(self._notice, drain)
        await asyncio.sleep(notice)
        self._runtime.end_streams()
        self._server.should_exit = True
        await asyncio.sleep(drain - notice)
        if left := self._runtime.open_requests.interrupt_all():
            log.warning("%d requests did not finish within %g s and end with an error", left, drain)

    async def aclose(self) -> None:
        """Cancels the shutdown task once the server has stopped."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):  # it only sleeps
                await self._task


def _drain_seconds(runtime: Runtime) -> float:
    """The drain time in force; `never` is a day."""
    return min(runtime.config.drain_seconds, MAX_DRAIN_SECONDS)


async def serve(runtime: Runtime, app: Edge, sock: socket.socket) -> None:
    """Serves on `sock` until a signal stops it; returns after the last answer. Raises HeadgateError."""
    http = _bounded_protocol(_raise_descriptor_limit())
    server = _Server(server_config(app, http=http, lifespan="on", timeout_keep_alive=KEEP_ALIVE_SECONDS))
    stopping = Shutdown(runtime, server)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.begin, number)
    loop.add_signal_handler(signal.SIGHUP, _on_hangup, runtime)
    try:
        await server.serve(sockets=[sock])
    except SystemExit as error:
        raise HeadgateError("the gateway could not start; see its log") from error
    finally:
        await stopping.aclose()


def _raise_descriptor_limit() -> int:
    """Raises the limit of open file descriptors as far as needed and permitted, and returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MAX_CONNECTIONS + OWN_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else soft


def _bounded_protocol(descriptors: int) -> type[BoundedHttp]:
    """The HTTP protocol with a limit of connections: each one may need two of `descriptors`, one to a provider."""
    most = max(1, min(MAX_CONNECTIONS, (descriptors - OWN_DESCRIPTORS) // 2))
    return type("BoundedHttp", (BoundedHttp,), {"max_connections": most})


_reloads: set[asyncio.Task[None]] = set()


def _on_hangup(runtime: Runtime) -> None:
    task = asyncio.get_running_loop().create_task(_reload(runtime), name="reload")
    _reloads.add(task)
    task.add_done_callback(_reloads.discard)


async def _reload(runtime: Runtime) -> None:
    try:
        await runtime.reload()
    except HeadgateError as error:
        for line in str(error).splitlines():
            log.error("reload failed; the old configuration stays in force: %s", line)  # noqa: TRY400  # the message is enough
