"""One connection to Redis or Valkey. Commands are sent in order; those that wait are sent together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import ConnectionPool
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import NoScriptError, RedisError, ResponseError

from gateway.errors import StoreLostError
from gateway.shared_state.scripts import CHANNEL, SCRIPTS
from headgate.shared.errors import HeadgateError

log = logging.getLogger("gateway.shared_state")

CALL_SECONDS = 0.25
"""Deadline of commands that are sent together. Before that, a command waits at most as long for earlier ones."""
GRACE_SECONDS = 0.05
"""Time after the deadline to read a reply that arrived while this process was busy."""
CONNECT_SECONDS = 1.0
LISTEN_SECONDS = 60.0
"""After this time without a published message a new connection receives them: the old one may be dead."""
MAX_WAITING = 10_000
"""Commands that wait to be sent."""
MAX_TOGETHER = 256

Values = Sequence[str | int | float]
_OPTIONS: dict[str, Any] = {
    "decode_responses": True,
    "encoding_errors": "surrogatepass",
    "socket_timeout": None,
    "socket_connect_timeout": CONNECT_SECONDS,
    "client_name": "headgate",
}


@dataclass(slots=True)
class _Command:
    operation: str
    packed: Iterable[bytes]
    reply: asyncio.Future[Any] | None


def shown(url: str) -> str:
    """The address without user name and password."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


class Store:
    """The connection. `on_lost` is called once with the reason when it breaks; then `open` makes a new one.

    `on_error` is called with the operation of each failed command; when the connection breaks, once for each operation
    of the failed commands.
    """

    def __init__(self, url: str, on_lost: Callable[[str], None], on_error: Callable[[str], None]) -> None:
        try:
            keepalive = {} if url.startswith("unix:") else {"socket_keepalive": True}
            self._pool = ConnectionPool.from_url(url, **_OPTIONS, **keepalive)
            self._pool.make_connection()  # type: ignore[no-untyped-call]  # it does not connect yet
        except (TypeError, ValueError) as error:
            unknown = str(error).partition("unexpected keyword argument ")[2]
            why = f"unknown option {unknown} after `?`" if unknown else str(error)
            raise HeadgateError(f"`state: {shown(url)}` of gateway.yaml cannot be used: {why}") from None
        self.channel = CHANNEL + str(self._pool.connection_kwargs.get("db") or 0)
        """The channel of published messages."""
        self._on_lost = on_lost
        self._on_error = on_error
        self._connection: AbstractConnection | None = None
        self._hashes: dict[str, str] = {}
        self._waiting: deque[_Command] = deque()
        self._wake = asyncio.Event()
        self._sender: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Connects and loads the scripts; raises StoreLostError."""
        connection = await self._connect()
        try:
            with _as_lost():
                async with asyncio.timeout(CONNECT_SECONDS):
                    for name, text in SCRIPTS.items():
                        await connection.send_command("SCRIPT", "LOAD", text)
                        self._hashes[name] = await connection.read_response()
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        self._connection = connection
        self._wake.clear()
        self._sender = asyncio.create_task(self._send(connection), name="shared-state-sender")

    async def listen(self, on_message: Callable[[str], None]) -> None:
        """Passes each published message to `on_message`, on a connection of its own; raises StoreLostError."""
        connection = await self._connect()
        try:
            with _as_lost():
                await connection.send_command("SUBSCRIBE", self.channel)
                await connection.read_response(timeout=CONNECT_SECONDS, push_request=True)
                while True:
                    message = await connection.read_response(timeout=LISTEN_SECONDS, push_request=True)
                    if isinstance(message, list) and len(message) == 3 and message[0] == "message":
                        on_message(message[2])
        finally:
            await connection.disconnect(nowait=True)

    async def _connect(self) -> AbstractConnection:
        connection: AbstractConnection = self._pool.make_connection()  # type: ignore[no-untyped-call]
        with _as_lost():
            async with asyncio.timeout(CONNECT_SECONDS):
                await connection.connect()  # type: ignore[no-untyped-call]
        return connection

    async def call(self, operation: str, script: str, keys: Sequence[str], values: Values = ()) -> Any:
        """The reply of a script; raises StoreLostError."""
        reply = asyncio.get_running_loop().create_future()
        self._submit(operation, script, keys, values, reply)
        try:
            async with asyncio.timeout(2 * (CALL_SECONDS + GRACE_SECONDS)):
                return await reply
        except TimeoutError:
            self._on_error(operation)
            raise StoreLostError("too many commands wait to be sent") from None

    def post(self, operation: str, script: str, keys: Sequence[str], values: Values = ()) -> asyncio.Future[Any] | None:
        """Sends a script after the commands that wait already. The reply may be ignored; None if it cannot be sent."""
        reply = asyncio.get_running_loop().create_future()
        reply.add_done_callback(_ignore_loss)
        try:
            self._submit(operation, script, keys, values, reply)
        except StoreLostError:
            return None
        return reply

    def _submit(
        self, operation: str, script: str, keys: Sequence[str], values: Values, reply: asyncio.Future[Any]
    ) -> None:
        if self._connection is None:
            raise StoreLostError("not connected")
        if len(self._waiting) >= MAX_WAITING:
            self._on_error(operation)
            raise StoreLostError(f"{MAX_WAITING} commands wait to be sent")
        packed = self._connection.pack_command("EVALSHA", self._hashes[script], len(keys), *keys, *values)
        self._waiting.append(_Command(operation, packed, reply))
        self._wake.set()

    async def _send(self, connection: AbstractConnection) -> None:
        """Sends what waits until the connection breaks."""
        sent: list[_Command] = []
        try:
            while True:
                await self._wake.wait()
                sent = [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_TOGETHER))]
                with _as_lost():
                    await self._in_time(self._exchange(connection, sent))
                sent = []
                if not self._waiting:
                    self._wake.clear()
        except StoreLostError as error:
            self._lose(error, sent)
        except asyncio.CancelledError:
            self._fail(StoreLostError("the connection was closed"), sent)
            raise
        except Exception:
            log.exception("internal error in the connection to the shared state")
            self._lose(StoreLostError("internal error"), sent)
        finally:
            await connection.disconnect(nowait=True)

    @staticmethod
    async def _in_time(exchange: Coroutine[Any, Any, None]) -> None:
        """Raises TimeoutError after CALL_SECONDS, not counting time in which this process was busy."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(None) as limit:
            timer = loop.call_later(CALL_SECONDS, lambda: limit.reschedule(loop.time() + GRACE_SECONDS))
            try:
                await exchange
            finally:
                timer.cancel()

    async def _exchange(self, connection: AbstractConnection, commands: Sequence[_Command]) -> None:
        packed = b"".join(part for command in commands for part in command.packed)
        await connection.send_packed_command(packed, check_health=False)
        for command in commands:
            reply: Any = None
            try:
                reply = await connection.read_response()
            except NoScriptError:
                raise  # the server forgot the scripts: `open` loads them
            except ResponseError as error:
                self._on_error(command.operation)
                if command.reply is not None and not command.reply.done():
                    command.reply.set_exception(StoreLostError(f"{command.operation}: {error}"))
                continue
            if command.reply is not None and not command.reply.done():
                command.reply.set_result(reply)

    def _lose(self, error: StoreLostError, sent: Sequence[_Command]) -> None:
        self._connection = None
        for operation in self._fail(error, sent):
            self._on_error(operation)
        self._on_lost(str(error))

    def _fail(self, error: StoreLostError, sent: Sequence[_Command]) -> set[str]:
        """Fails all commands without a reply; returns their operations."""
        lost, self._waiting = [*sent, *self._waiting], deque()
        for command in lost:
            if command.reply is not None and not command.reply.done():
                command.reply.set_exception(error)
        return {command.operation for command in lost}

    async def close(self) -> None:
        """Sends what waits, within the deadline of a call, and closes the connection."""
        if self._sender is None:
            return
        if self._connection is not None and self._waiting:
            with contextlib.suppress(StoreLostError, TimeoutError):
                async with asyncio.timeout(CALL_SECONDS):
                    await self.call("close", "now", ())
        self._connection = None
        self._sender.cancel()
        await asyncio.gather(self._sender, return_exceptions=True)


@contextlib.contextmanager
def _as_lost() -> Iterator[None]:
    """Every failure of the connection as StoreLostError."""
    try:
        yield
    except TimeoutError:
        raise StoreLostError("no answer in time") from None
    except (RedisError, OSError, ssl.SSLError, UnicodeError) as error:
        raise StoreLostError(str(error) or type(error).__name__) from error


def _ignore_loss(reply: asyncio.Future[Any]) -> None:
    if not reply.cancelled():
        reply.exception()
