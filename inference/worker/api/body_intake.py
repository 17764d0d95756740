"""Reads bodies and decodes them off the event loop, large ones one after the other, into types of the local hop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any, NoReturn, TypeVar

import orjson

from headgate.shared.bodies.body_decoder import Extensible, InvalidBodyError, not_finite
from inference.protocol import Code
from inference.worker import malloc_trim
from inference.worker.api.worker_exchange import Exchange
from inference.worker.worker_errors import BadRequestError, GoneError, WorkerError
from inference.worker.worker_requests import Facts

BIG_BODY_BYTES = 2**18
"""Larger bodies are decoded one at a time, because decoding takes many times their size."""
TURN_SECONDS = 30.0
"""Time limit for waiting until earlier large bodies are decoded."""

T = TypeVar("T")


class Intake:
    """Decodes the bodies of one worker's requests on `executor`."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._reading_big = asyncio.Lock()

    async def decoded(self, exchange: Exchange, decode: Callable[[Any], T]) -> T:
        """The result of `decode` for the body's JSON; raises GoneError when the client disconnected before it ran.

        Raises WorkerError(QUEUE_FULL) if other large bodies take longer than TURN_SECONDS.
        """
        if exchange.announced_bytes <= BIG_BODY_BYTES:
            return await self._read(exchange, decode)
        try:
            async with asyncio.timeout(TURN_SECONDS):
                await self._reading_big.acquire()
        except TimeoutError:
            raise WorkerError(
                Code.QUEUE_FULL, "this model is still parsing other large request bodies; retry later", retry_after=1.0
            ) from None
        try:
            return await self._read(exchange, decode)
        finally:
            self._reading_big.release()

    async def off_loop(self, function: Callable[[], T]) -> T:
        """The result of `function`, called on another thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    def done(self, exchange: Exchange) -> None:
        """Returns the memory of a large body to the system after its exchange."""
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


def parse(raw: bytes) -> Any:
    """The JSON value of a body; raises BadRequestError, with `param` where a number is NaN or infinite."""
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        if (name := not_finite(raw)) is not None:
            raise BadRequestError(f"{name[:80]} must be a finite number", name[:80]) from None
        raise BadRequestError(f"the body is not valid JSON: {error}", code=Code.INVALID_JSON) from None


def typed(body: Any, decode: Callable[[Mapping[str, Any]], T], facts: Facts) -> T:
    """The result of `decode` for `body`, which is parsed JSON; raises BadRequestError.

    A worker has one model, so that the body need not name it.
    """
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    try:
        return decode({"model": facts.model_id, **body})
    except InvalidBodyError as error:
        raise BadRequestError(error.message.replace("`", ""), error.param, code=Code(error.code)) from None


def refuse_extra(holder: Extensible | None, at: str) -> None:
    """Raises BadRequestError for a field of the object `at` that is not declared."""
    for name in (holder and holder.extra) or ():
        refuse_field(name, at)


def refuse_field(name: str, at: str) -> NoReturn:
    """Raises BadRequestError for a field of the object `at`."""
    raise BadRequestError(f"unknown field {name[:80]!r} in {at}", f"{at}.{name[:80]}")
