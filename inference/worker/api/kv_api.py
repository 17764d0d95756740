"""Answers /kv/sequences, /kv/clear and /kv/pin."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Annotated, Any, TypeVar

import msgspec
import orjson
from msgspec import Meta

from inference.protocol import Code
from inference.worker.api.body_intake import Intake
from inference.worker.api.worker_exchange import Exchange
from inference.worker.kv.sequence_control import SequenceControl, SequenceRow
from inference.worker.worker_errors import BadRequestError, WorkerError

WAIT_SECONDS = 10.0
"""Time limit for the engine, which answers between two steps."""

T = TypeVar("T")


class ClearBody(msgspec.Struct, forbid_unknown_fields=True):
    """`tenant`: only sequences of this tenant."""

    tenant: str | None = None


class PinBody(msgspec.Struct, forbid_unknown_fields=True):
    """The sequences in `ids`, and those of `tenant`. `seconds` 0 ends a pin."""

    seconds: Annotated[float, Meta(ge=0)]
    ids: list[str] = []
    tenant: str | None = None


class KvApi:
    """The endpoints for operators. A model without `control` has no sequences."""

    def __init__(self, control: SequenceControl | None, intake: Intake, seconds: float = WAIT_SECONDS) -> None:
        self._control = control
        self._intake = intake
        self._seconds = seconds

    async def show(self, exchange: Exchange) -> None:
        """GET /kv/sequences."""
        rows = [] if self._control is None else await self._rows(self._control)
        await exchange.json_bytes(orjson.dumps({"sequences": [asdict(row) for row in rows]}))

    async def clear(self, exchange: Exchange) -> None:
        """POST /kv/clear."""
        body = await self._intake.decoded(exchange, lambda raw: _typed(raw, ClearBody))
        control = self._control
        count = 0 if control is None else await self._result(control.clear_kv(body.tenant))
        await exchange.json(200, {"cleared": count})

    async def pin(self, exchange: Exchange) -> None:
        """POST /kv/pin. A pin of a tenant applies to its present sequences."""
        body = await self._intake.decoded(exchange, lambda raw: _typed(raw, PinBody))
        control = self._control
        ids = set(body.ids)
        if control is not None and body.tenant is not None:
            ids |= {row.id for row in await self._rows(control) if row.tenant == body.tenant}
        count = 0 if control is None or not ids else await self._result(control.pin_kv(ids, body.seconds))
        await exchange.json(200, {"pinned": count})

    async def _rows(self, control: SequenceControl) -> Sequence[SequenceRow]:
        return await self._result(control.kv_sequences())

    async def _result(self, future: Future[T]) -> T:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), self._seconds)
        except TimeoutError:
            raise WorkerError(
                Code.DEADLINE_EXCEEDED, f"a step of the model takes longer than {self._seconds:g} s", retry_after=1.0
            ) from None


def _typed(raw: Any, type_: type[T]) -> T:
    try:
        return msgspec.convert(raw, type_)
    except msgspec.ValidationError as error:
        raise BadRequestError(str(error)) from None
