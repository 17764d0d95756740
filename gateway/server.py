"""Runs the gateway's application on a socket until it is told to stop; decides the order of stopping, nothing else.

SIGTERM: readiness turns 503 at once while the port still answers, so that balancers notice; then no new connections are
taken and open answers finish within the drain time; what is left ends in an honest error frame. Exit status 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
from collections.abc import Iterator
from typing import Any

import orjson
import uvicorn

from gateway.edge import Edge
from gateway.exchange import Exchange
from gateway.runtime import Runtime
from headgate.shared.errors import HeadgateError
from headgate.shared.wire import WiredHttp
from inference.protocol import Code, error_body

log = logging.getLogger("gateway.server")

NOTICE_SECONDS = 2.0
"""How long the port answers after readiness turned 503."""

LAST_WORDS_SECONDS = 3
"""What uvicorn waits after the drain time, for the last error frames to go out."""

MAX_DRAIN_SECONDS = 86400.0

MAX_HEADER_BYTES = 65536
UNREAD_SECONDS = 30.0
"""A client that leaves its answer unread for so long is gone."""

HEAD_SECONDS = 30.0
"""A connection that does not finish its request's head for so long is dropped; uvicorn watches idle ones."""
KEEP_ALIVE_SECONDS = 75


class _HeadersTooLong(Exception):  # noqa: N818  # the parser turns it into its own error
    """A request line and headers beyond MAX_HEADER_BYTES."""


class BoundedHttp(WiredHttp):
    """uvicorn's HTTP with bounds: on the size of a request's head (then 400), on the time it takes to come, and on the
    time a client leaves its answer unread.
    """

    head_seconds = HEAD_SECONDS
    unread_seconds = UNREAD_SECONDS
    _header_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected: its first request is awaited."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._head_came()
        self._read_again()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """More is unread than the connection buffers; a client that never reads may not hold its place for ever."""
        super().pause_writing()
        if self._unread_timer is None:
            self._unread_timer = self.loop.call_later(self.unread_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads."""
        self._read_again()
        super().resume_writing()

    def _read_again(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def data_received(self, data: bytes) -> None:
        """Bytes came; unless a request is being served now, they begin one."""
        super().data_received(data)
        if self._head_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._await_head()

    def on_headers_complete(self) -> None:
        """A request's head is whole."""
        self._head_came()
        super().on_headers_complete()

    def _await_head(self) -> None:
        if not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self.head_seconds, self._drop)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _drop(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()

    def on_message_begin(self) -> None:
        """A new request begins."""
        self._header_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A piece of the request line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def send_400_response(self, msg: str) -> None:
        """What the parser refuses has no request yet; it gets the envelope and the headers all the same."""
        exchange = Exchange(f"req_{secrets.token_hex(12)}", {}, reason=Code.INVALID_REQUEST)
        body = orjson.dumps(error_body(Code.INVALID_REQUEST, f"this is not HTTP as it should be: {msg}"))
        head = [
            b"HTTP/1.1 400 Bad Request", b"content-type: application/json", b"connection: close",
            b"content-length: %d" % len(body),
            *(name + b": " + value for name, value in exchange.response_headers()),
        ]  # fmt: skip
        self.transport.write(b"\r\n".join(head) + b"\r\n\r\n" + body)
        self.transport.close()

    def _count(self, more: int) -> None:
        self._header_bytes += more
        if self._header_bytes > MAX_HEADER_BYTES:
            raise _HeadersTooLong


class QuietServer(uvicorn.Server):
    """uvicorn without its signal handlers, which would close the port first and end with status 143."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves the signals to `Stopping`."""
        yield


class Stopping:
    """The order of stopping: notice, drain, last words. `begin` is what the signals call."""

    def __init__(self, runtime: Runtime, server: uvicorn.Server, notice_seconds: float = NOTICE_SECONDS) -> None:
        self._runtime = runtime
        self._server = server
        self._notice = notice_seconds
        self._task: asyncio.Task[None] | None = None

    def begin(self, number: signal.Signals) -> None:
        """The first signal begins to stop, a second one stops at once."""
        if self._task is not None:
            log.warning("%s again: stopping at once", number.name)
            self._server.force_exit = True
            self._server.should_exit = True
            self._runtime.presences.interrupt_all()
            return
        self._runtime.is_draining = True
        self._task = asyncio.get_running_loop().create_task(self._stop(number), name="stopping")

    async def _stop(self, number: signal.Signals) -> None:
        drain = _drain_seconds(self._runtime)
        self._server.config.timeout_graceful_shutdown = int(drain) + LAST_WORDS_SECONDS  # a reload may have changed it
        log.info(
            "%s: not ready any more; %d requests have %g s to finish", number.name, len(self._runtime.presences), drain
        )
        await asyncio.sleep(min(self._notice, drain))
        self._server.should_exit = True
        await asyncio.sleep(max(0.0, drain - self._notice))
        if left := self._runtime.presences.interrupt_all():
            log.warning("%d requests did not finish within %g s and end with an error", left, drain)

    async def aclose(self) -> None:
        """Forgets what is left to do once the server has stopped."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):  # it only slept
                await self._task


def _drain_seconds(runtime: Runtime) -> float:
    """The drain time in force; `never` is a day."""
    return min(runtime.config.drain_seconds, MAX_DRAIN_SECONDS)


async def serve(runtime: Runtime, app: Edge, sock: socket.socket) -> None:
    """Serves on `sock` until a signal stops it; returns after the last answer. Raises HeadgateError at a bad start."""
    options: dict[str, Any] = {
        "http": BoundedHttp,
        "ws": "none",
        "lifespan": "on",
        "log_config": None,
        "access_log": False,
        "proxy_headers": False,
        "server_header": False,
        "timeout_keep_alive": KEEP_ALIVE_SECONDS,
    }
    server = QuietServer(uvicorn.Config(app, **options))
    stopping = Stopping(runtime, server)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.begin, number)
    loop.add_signal_handler(signal.SIGHUP, _on_hangup, runtime)
    try:
        await server.serve(sockets=[sock])
    except SystemExit as error:
        raise HeadgateError("the gateway could not start; its log says why") from error
    finally:
        await stopping.aclose()


_reloads: set[asyncio.Task[None]] = set()


def _on_hangup(runtime: Runtime) -> None:
    task = asyncio.get_running_loop().create_task(_reload(runtime), name="reload")
    _reloads.add(task)
    task.add_done_callback(_reloads.discard)


async def _reload(runtime: Runtime) -> None:
    try:
        await runtime.reload()
    except HeadgateError as error:
        log.error("reload failed, the old configuration stays: %s", error)  # noqa: TRY400  # the sentence is enough
