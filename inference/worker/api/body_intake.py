"""Reads and decodes bodies off the event loop, large ones one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

from inference.protocol import Code
from inference.worker import malloc_trim
from inference.worker.api.worker_exchange import Exchange, parse
from inference.worker.worker_errors import GoneError, WorkerError

BIG_BODY_BYTES = 2**18
"""Larger bodies are decoded one at a time, because decoding takes many times their size."""
TURN_SECONDS = 30.0
"""Time for the large bodies before this one to be decoded."""

T = TypeVar("T")


class Intake:
    """Decodes the bodies of one worker's requests on `executor`."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._reading_big = asyncio.Lock()

    async def decoded(self, exchange: Exchange, decode: Callable[[Any], T]) -> T:
        """The result of `decode` for the body's JSON; raises GoneError when the client left before it ran."""
        if exchange.announced_bytes <= BIG_BODY_BYTES:
            return await self._read(exchange, decode)
        try:
            async with asyncio.timeout(TURN_SECONDS):
                await self._reading_big.acquire()
        except TimeoutError:
            raise WorkerError(
                Code.QUEUE_FULL, "this model is decoding other large requests; retry later", retry_after=1.0
            ) from None
        try:
            return await self._read(exchange, decode)
        finally:
            self._reading_big.release()

    async def off_loop(self, function: Callable[[], T]) -> T:
        """The result of `function`, called on another thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    def done(self, exchange: Exchange) -> None:
        """Ends an exchange; memory of a large body is returned to the system."""
        if exchange.announced_bytes > BIG_BODY_BYTES:
            self._executor.submit(malloc_trim.trim)

    async def _read(self, exchange: Exchange, decode: Callable[[Any], T]) -> T:
        parts = await exchange.body()
        exchange.watch()

        def work() -> T:
            if exchange.gone:
                raise GoneError
            raw = b"".join(parts)
            parts.clear()
            body = parse(raw)
            del raw
            return decode(body)

        return await self.off_loop(work)
