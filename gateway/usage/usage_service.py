"""Usage of the running gateway: rows of ended requests, budgets, and keys that were created at run time."""

from __future__ import annotations

import asyncio
import logging
import re
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from gateway.access.authentication import Key
from gateway.access.budgets import NOTHING, Budgets, Spent, month_of
from gateway.errors import RefusedError, RequestError
from gateway.routing.explain_record import Record
from gateway.settings import GatewayConfig, KeySettings
from gateway.usage.capture import Captured, kept_text, redacted
from gateway.usage.prices import Price, cost, price_of
from gateway.usage.shared_budgets import SharedBudgets
from gateway.usage.usage_file import StoredKey, UsageFile, UsageRow, advice
from gateway.usage.usage_writer import Retention, UsageWriter
from headgate.shared.errors import HeadgateError
from inference.protocol import Code

log = logging.getLogger("gateway.usage")

READ_SECONDS = 10.0

T = TypeVar("T")


class UsageService:
    """The stored usage, and the budgets and keys that are read from it.

    `on_keys` gets the accepted keys of the file at the start and after each change, on the event loop.
    """

    def __init__(
        self, directory: Path, config: GatewayConfig, on_keys: Callable[[tuple[KeySettings, ...]], None]
    ) -> None:
        self._directory = directory
        self._on_keys = on_keys
        self._budgets = Budgets()
        self.shared_budgets: SharedBudgets | None = None
        """What other gateways used, where gateways share their state."""
        self._writer: UsageWriter | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.apply(config)

    def apply(self, config: GatewayConfig) -> None:
        """Applies a configuration; `usage.store` takes effect at the next start."""
        self._settings = config.usage
        self._patterns = [re.compile(pattern) for pattern in config.usage.redact]
        self._prices = {
            name: Price(price.input, price.output, price.cached_input) for name, price in config.prices.items()
        }

    async def start(self) -> None:
        """Reads budgets and keys, and starts to store. Nothing is stored until the file can be used."""
        self._loop = asyncio.get_running_loop()
        if not self._settings.store:
            return
        try:
            self._budgets, keys = await asyncio.to_thread(self._read)
            self._on_keys(accepted(keys))
        except (sqlite3.Error, OSError, HeadgateError) as error:
            log.warning("the usage file cannot be read, so the use of all keys counts from zero: %s", advice(error))
        self._writer = UsageWriter(
            self._directory, self._retention, self._note_keys, redact=lambda text: redacted(text, self._patterns)
        )
        self._writer.start()

    async def aclose(self) -> None:
        """Stores what is queued."""
        if self._writer is not None:
            await asyncio.to_thread(self._writer.close)

    def admit(self, key: Key) -> None:
        """Raises RefusedError (429) if the budget of `key` is used up."""
        if not key.budget.is_any:
            return
        now = time.time()
        exceeded = self._budgets.check(key.name, key.budget, now, self._elsewhere(key.name, now))
        if exceeded is not None:
            raise RefusedError(Code.BUDGET_EXCEEDED, exceeded.message, retry_after=exceeded.seconds)

    def spent(self, key: str, now: float) -> Spent:
        """What `key` used at this gateway in the month of `now`."""
        return self._budgets.spent(key, now)

    def spent_everywhere(self, key: str, now: float) -> Spent:
        """What `key` used at all gateways in the month of `now`, as far as this one knows."""
        return self.spent(key, now).plus(*self._elsewhere(key, now))

    def _elsewhere(self, key: str, now: float) -> Spent:
        return NOTHING if self.shared_budgets is None else self.shared_budgets.elsewhere(key, now)

    def note(self, record: Record, tier: str) -> None:
        """Stores an ended request; does not block."""
        if self._writer is None or not record.key:
            return
        row = usage_row(record, tier, self._prices)
        self._budgets.note(row.key, row.dollars or 0.0, row.prompt_tokens + row.completion_tokens, row.at)
        self._writer.put(row)

    def keep_bodies(self, record: Record, request: bytes, answer: bytes) -> None:
        """Stores a request and its answer without secrets; does not block."""
        if self._writer is not None:
            texts = kept_text(request), kept_text(answer)
            self._writer.put_bodies(Captured(record.started, record.id, record.key, record.route, *texts))

    async def captured(self, request_id: str) -> Captured:
        """The stored bodies of a request; raises RequestError, 404 if there are none."""
        found = None if self._writer is None else await self._read_file(lambda file: file.captured(request_id))
        if found is None:
            raise RequestError(
                Code.NOT_FOUND,
                f"no bodies of request {request_id[:128]!r} are stored; routes with `capture: true` store them",
                param="request_id",
            )
        return found

    async def sums(self, by: Sequence[str], since: float, until: float) -> list[dict[str, Any]]:
        """See `UsageFile.sums`; raises RequestError while nothing is stored."""
        if self._writer is None:
            raise RequestError(Code.NOT_FOUND, "usage is not stored; set `usage: {store: true}` in gateway.yaml")
        return await self._read_file(lambda file: file.sums(by, since, until))

    async def _read_file(self, read: Callable[[UsageFile], T]) -> T:
        """What `read` returns, in a thread; raises RefusedError for a file that cannot be read."""

        def run() -> T:
            with closing(UsageFile(self._directory)) as file:
                return read(file)

        try:
            async with asyncio.timeout(READ_SECONDS):
                return await asyncio.to_thread(run)
        except TimeoutError:
            raise RefusedError(
                Code.INTERNAL_ERROR,
                f"the usage file was not read within {READ_SECONDS:g} s; retry, and ask for usage of a shorter period",
            ) from None
        except (sqlite3.Error, OSError, HeadgateError) as error:
            raise RefusedError(Code.INTERNAL_ERROR, f"the usage file cannot be read: {advice(error)}") from error

    def _read(self) -> tuple[Budgets, list[StoredKey]]:
        month = month_of(time.time())
        with closing(UsageFile(self._directory)) as file:
            return Budgets(month, file.spent(month)), file.stored_keys()

    def _retention(self) -> Retention:
        return Retention(self._settings.keep, self._settings.max_bytes)

    def _note_keys(self, keys: Sequence[StoredKey]) -> None:
        """Called in the thread of the writer."""
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._on_keys, accepted(keys))


def accepted(keys: Sequence[StoredKey]) -> tuple[KeySettings, ...]:
    """The keys that are not revoked; an entry that this version cannot read is left out, with a log line."""
    found = []
    for key in keys:
        if key.revoked is not None:
            continue
        try:
            found.append(KeySettings.model_validate(key.settings))
        except ValidationError as error:
            log.warning("the stored key %r is not accepted: %s", key.name, error)
    return tuple(found)


def usage_row(record: Record, tier: str, prices: Mapping[str, Price]) -> UsageRow:
    """The row of an ended request."""
    (prompt, completion), cached = record.tokens, record.cached_tokens or 0
    price = price_of(record.answered_by, prices) if record.answered_by else Price(0.0, 0.0)
    return UsageRow(
        at=record.started,
        id=record.id,
        key=record.key,
        endpoint=record.endpoint,
        route=record.route,
        tier=tier,
        model=record.answered_by or "",
        requested=record.model.encode("utf-8", "replace").decode(),
        prompt_tokens=prompt,
        cached_tokens=cached,
        completion_tokens=completion,
        ttft_seconds=record.first_token_seconds,
        seconds=record.total_seconds or 0.0,
        outcome=record.outcome,
        reason=record.reason,
        dollars=None if price is None else cost(price, prompt, completion, cached),
    )
