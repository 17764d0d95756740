"""The state that this gateway shares with others: whether the store answers, its clock, and the live gateways.

While the store does not answer, every caller uses its local state.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

from gateway.apis.lenient_json import loads
from gateway.errors import StoreLostError
from gateway.shared_state.gateway_count import GatewayCountFile
from gateway.shared_state.scripts import DEAD_SECONDS, GATEWAYS
from gateway.shared_state.store import Store, Values, shown

log = logging.getLogger("gateway.shared_state")

HEARTBEAT_SECONDS = 1.0
FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS = 0.1, 2.0
"""Time between two tries to connect; it doubles."""
START_SECONDS = 2.0
"""How long the start of a gateway waits for the store."""

OnState = Callable[[bool, int], None]
"""Called with whether the store answers, and the number of live gateways."""
OnMessage = Callable[..., None]


class SharedState:
    """This gateway's connection to the shared state. Objects that keep shared data add their callbacks before `start`.

    `on_up` runs after each connection, `on_tick` with each heartbeat, `on_down` when the store is lost; `on_message`
    has a function for each kind of published message. `count_file` keeps the number of gateways for a start without
    the store.
    """

    def __init__(
        self,
        url: str,
        on_state: OnState = lambda *_: None,
        on_error: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        count_file: GatewayCountFile | None = None,
    ) -> None:
        self.gateway = secrets.token_hex(8)
        """The name of this process in the store."""
        self.gateways = 1
        """Live gateways; the last known number while the store is lost."""
        self.is_up = False
        self.on_up: list[Callable[[], Awaitable[None]]] = []
        self.on_tick: list[Callable[[], Awaitable[None]]] = []
        self.on_down: list[Callable[[], None]] = []
        self.on_message: dict[str, OnMessage] = {}
        self.clock = clock
        self._address = shown(url)
        self._on_state = on_state
        self.on_error = on_error
        """Counts a failed operation."""
        self._store = Store(url, self._lost, on_error)
        self._offset = 0.0
        """Server time minus the clock of this process."""
        self._up_since = 0.0
        self._why: str | None = None
        self._count_file = count_file
        self._down = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._first_try = asyncio.Event()

    @property
    def channel(self) -> str:
        """The channel of published messages."""
        return self._store.channel

    def server_time(self, at: float | None = None) -> float:
        """Server seconds at a time of this process's clock, by default now."""
        return (self.clock() if at is None else at) + self._offset

    def local_time(self, server_seconds: float) -> float:
        """The time of this process's clock for server seconds."""
        return server_seconds - self._offset

    async def start(self) -> None:
        """Waits at most START_SECONDS for a connection to the store. Without a connection the gateway starts alone."""
        if self._count_file is not None:
            self.gateways = await self._count_file.load()
        self._tasks = [
            asyncio.create_task(self._run(), name="shared-state"),
            asyncio.create_task(self._listen(), name="shared-state-events"),
        ]
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._first_try.wait()
        except TimeoutError:
            self._note_down("no answer in time")

    async def stop(self) -> None:
        """Removes this gateway from the live gateways and closes the connections."""
        if self.is_up:
            self.post("heartbeat", "leave_fleet", [GATEWAYS], [self.gateway])
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._store.close()
        if self._count_file is not None:
            await self._count_file.close()
        self.is_up = False

    async def call(self, operation: str, script: str, keys: list[str], values: Values = ()) -> Any:
        """The reply of a script; raises StoreLostError, at once while the store is lost."""
        if not self.is_up:
            raise StoreLostError(self._why or "not connected")
        return await self._store.call(operation, script, keys, values)

    def post(self, operation: str, script: str, keys: list[str], values: Values = ()) -> asyncio.Future[Any] | None:
        """Sends a script after those that were sent before; nothing waits for it. None while the store is lost."""
        return self._store.post(operation, script, keys, values) if self.is_up else None

    # --- the connection ----------------------------------------------------------------------------------------------
    async def _run(self) -> None:
        wait = FIRST_WAIT_SECONDS
        while True:
            self._down.clear()
            try:
                await self._store.open()
                await self._heartbeat()
                await self._came_up()
                wait = FIRST_WAIT_SECONDS
                while not self._down.is_set():
                    try:
                        async with asyncio.timeout(HEARTBEAT_SECONDS):
                            await self._down.wait()
                    except TimeoutError:
                        await self._heartbeat()
                        for tick in self.on_tick:
                            await tick()
            except StoreLostError as error:
                self._lost(str(error))
            except Exception:
                log.exception("internal error in the shared state")
                self._lost("internal error")
            self._first_try.set()
            await self._store.close()
            await asyncio.sleep(wait * (0.5 + secrets.randbelow(1000) / 1000))
            wait = min(wait * 2, MAX_WAIT_SECONDS)

    async def _heartbeat(self) -> None:
        sent = self.clock()
        reply = await self._store.call("heartbeat", "heartbeat", [GATEWAYS], [self.gateway, DEAD_SECONDS])
        received = self.clock()
        now, count = float(reply[0]), int(reply[1])
        self._offset = now - (sent + received) / 2
        if not self.is_up:
            self._up_since = received
        # after a restart of the store the gateways come back one by one
        self.gateways = max(count, self.gateways) if received - self._up_since < DEAD_SECONDS else count
        if self._count_file is not None:
            self._count_file.note(self.gateways)
        self._on_state(True, self.gateways)

    async def _came_up(self) -> None:
        self.is_up = True
        for callback in self.on_up:
            await callback()
        if self._why is not None:
            log.info("shared state: %s answers again; %d gateways", self._address, self.gateways)
        else:
            log.info("shared state: connected to %s", self._address)
        self._why = None
        self._first_try.set()

    def _lost(self, why: str) -> None:
        was_up, self.is_up = self.is_up, False
        self._down.set()
        self._note_down(why)
        if was_up:
            for callback in self.on_down:
                callback()

    def _note_down(self, why: str) -> None:
        self._on_state(False, self.gateways)
        if self._why is None:
            log.warning(
                "shared state: %s does not answer (%s); this gateway uses its own state and 1/%d of the limits",
                self._address, why, self.gateways,
            )  # fmt: skip
        self._why = why

    async def _listen(self) -> None:
        """Receives published messages. A lost message does no harm: the data it announces is also read regularly."""
        while True:
            try:
                await self._store.listen(self._receive)
            except StoreLostError:
                pass
            except Exception:
                log.exception("internal error while handling a message of the shared state")
            await asyncio.sleep(FIRST_WAIT_SECONDS if self.is_up else HEARTBEAT_SECONDS)

    def _receive(self, text: str) -> None:
        try:
            origin, kind, *rest = loads(text.encode())
        except ValueError:
            return
        handler = self.on_message.get(kind)
        if origin != self.gateway and handler is not None:
            handler(*rest)
