"""Reads bodies and works on them off the event loop, large ones one after the other; never knows what they mean."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import Any, TypeVar

from inference.protocol import Code
from inference.worker import malloc_trim
from inference.worker.api.worker_exchange import Exchange, parse
from inference.worker.worker_errors import BadRequestError, GoneError, WorkerError

BIG_BODY_BYTES = 2**18
"""Requests whose bodies are larger are read one after the other: what one takes while it is read is many times that."""
BODY_SECONDS = 30.0
"""For a body to arrive, and for the large ones before it to be read."""

T = TypeVar("T")


class Coming:
    """Counts requests between their arrival and the engine; on the event loop, read by any thread."""

    def __init__(self) -> None:
        self.count = 0

    @contextlib.contextmanager
    def one(self) -> Iterator[Callable[[], None]]:
        """One request; what is called when the engine has it."""
        self.count += 1
        is_coming = True

        def arrived() -> None:
            nonlocal is_coming
            self.count -= is_coming
            is_coming = False

        try:
            yield arrived
        finally:
            arrived()


class Intake:
    """One per worker, on the event loop; `executor` does the work."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._reading_big = asyncio.Lock()

    async def understood(self, exchange: Exchange, understand: Callable[[Any], T]) -> T:
        """What `understand` makes of the body's JSON; raises GoneError when the client left before its turn came."""
        if exchange.announced_bytes <= BIG_BODY_BYTES:
            return await self._read(exchange, understand)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                await self._reading_big.acquire()
        except TimeoutError:
            raise WorkerError(
                Code.QUEUE_FULL, "this model reads other large requests; ask again", retry_after=1.0
            ) from None
        try:
            return await self._read(exchange, understand)
        finally:
            self._reading_big.release()

    async def off_loop(self, function: Callable[[], T]) -> T:
        """What `function` returns, on another thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    def done(self, exchange: Exchange) -> None:
        """The exchange is over: what a large body took goes back to the system."""
        if exchange.announced_bytes > BIG_BODY_BYTES:
            self._executor.submit(malloc_trim.trim)

    async def _read(self, exchange: Exchange, understand: Callable[[Any], T]) -> T:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                parts = await exchange.body()
        except TimeoutError:
            raise BadRequestError(f"the body did not arrive within {BODY_SECONDS:g} s") from None
        exchange.watch()

        def work() -> T:
            if exchange.gone:
                raise GoneError
            raw = b"".join(parts)
            parts.clear()
            body = parse(raw)
            del raw
            return understand(body)

        return await self.off_loop(work)
