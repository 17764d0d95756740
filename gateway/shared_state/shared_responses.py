"""Stored responses that every gateway can continue. Each gateway keeps its own as well, and those that it has read.

The responses have connections of their own: a long conversation must not delay the limits and breakers of other
requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from gateway.apis.lenient_json import dumps, loads
from gateway.apis.responses.responses_store import Store, StoredResponse
from gateway.errors import RefusedError
from gateway.shared_state.scripts import DELETE_RESPONSE, PUT_RESPONSE, RESPONSES
from gateway.shared_state.shared_state import SharedState
from inference.protocol import Code

SHARED_BYTES = 256 * 2**20
"""Size limit of the responses of all gateways."""
MAX_BYTES = 8 * 2**20
"""A larger response is only stored at its gateway."""
BULK_SECONDS = 1.0
"""Deadline of one operation."""
RETRY_PAUSES = (0.05, 0.15)
"""Seconds before an unknown response is looked for again: its gateway writes it after it has sent the end."""
DELETE_AGAIN_SECONDS = 5.0
"""Retry-After of a deletion without the store."""
MAX_WRITES = 64
"""Responses that are being written; others are only stored at their gateway while the store is slow."""

_ERRORS = (RedisError, OSError, TimeoutError, ValueError, LookupError, TypeError)
"""The last three: a value of another version."""


class SharedResponses(Store):
    """The responses of one gateway and the way to those of the others."""

    def __init__(self, state: SharedState, url: str, limit_bytes: int, seconds: float) -> None:
        super().__init__(limit_bytes, seconds)
        self._state = state
        self._client: Redis = Redis.from_url(
            url, socket_timeout=BULK_SECONDS, socket_connect_timeout=BULK_SECONDS, retry=Retry(NoBackoff(), 0),
            max_connections=MAX_WRITES * 4,
        )  # fmt: skip
        self._put = self._client.register_script(PUT_RESPONSE)
        self._delete = self._client.register_script(DELETE_RESPONSE)
        self._writes: set[asyncio.Task[None]] = set()
        state.on_message["response_deleted"] = self._on_deleted

    @property
    def is_up(self) -> bool:
        """Whether responses of other gateways can be read."""
        return self._state.is_up

    def put(
        self, owner: str, id: str, response: bytes, items: bytes, now: float, *,
        ids: tuple[str, ...] = (), outputs: int = 0, until: float | None = None,
    ) -> None:  # fmt: skip
        """Stores one answer here, and in the background for the other gateways."""
        super().put(owner, id, response, items, now, ids=ids, outputs=outputs, until=until)
        if self._state.is_up and len(self._writes) < MAX_WRITES and len(response) + len(items) <= MAX_BYTES:
            head = dumps({"response": len(response), "outputs": outputs, "ids": ids})
            value = b"\n".join((head, response + items))
            task = asyncio.create_task(self._write(owner, id, value, ids), name="store a response")
            self._writes.add(task)
            task.add_done_callback(self._writes.discard)

    async def fetch(self, owner: str, id: str) -> None:
        """Gets a response of another gateway, or forgets one that was deleted there. Errors leave what is here."""
        try:
            for pause in (*RETRY_PAUSES, None):
                if await self._fetch(owner, id) or pause is None:
                    return
                await asyncio.sleep(pause)
        except _ERRORS:
            self._state.on_error("responses")

    async def fetch_items(self, owner: str, items: Iterable[str]) -> None:
        """For each item without a local response: gets the response whose conversation contains it."""
        wanted = [item for item in items if self.find_by_item(owner, item, self._state.clock()) is None]
        if not wanted or not self._state.is_up:
            return
        try:
            async with asyncio.timeout(BULK_SECONDS):
                found: list[Any] = await self._client.mget([_item_key(owner, item) for item in wanted])
            for id in {id.decode() for id in found if id is not None}:
                await self._fetch(owner, id)
        except _ERRORS:
            self._state.on_error("responses")

    async def forget(self, owner: str, id: str, now: float) -> bool:
        """Deletes a response at every gateway; returns whether there was one.

        Raises RefusedError (503) if the store does not answer: the response is then deleted only here.
        """
        existed = self.delete(owner, id, now)
        if not self._state.is_up:
            raise _not_deleted()
        message = dumps([self._state.gateway, "response_deleted", owner, id])
        try:
            async with asyncio.timeout(BULK_SECONDS):
                keys = [_value_key(owner, id), _deleted_key(owner, id), RESPONSES, self._state.channel]
                reply = await self._delete(keys, [owner, id, round(self._seconds * 1000), message])
        except (RedisError, OSError, TimeoutError):
            self._state.on_error("responses")
            raise _not_deleted() from None
        return existed or bool(reply)

    async def aclose(self) -> None:
        """Closes the connections, after what is being written."""
        if self._writes:
            await asyncio.wait(self._writes, timeout=BULK_SECONDS)
        for task in tuple(self._writes):
            task.cancel()
        await asyncio.gather(*self._writes, return_exceptions=True)
        await self._client.aclose()

    async def _fetch(self, owner: str, id: str) -> bool:
        """Whether looking again is useless: the response was found or deleted, or the store does not answer."""
        if not self._state.is_up:
            return True
        now = self._state.clock()
        is_here = self.get(owner, id, now) is not None
        keys = [_deleted_key(owner, id), *([] if is_here else [_value_key(owner, id)])]
        async with asyncio.timeout(BULK_SECONDS):
            is_deleted, *value = await self._client.mget(keys)
            left_ms = 0 if is_here else await self._client.pttl(_value_key(owner, id))
        if is_deleted is not None:
            self.delete(owner, id, now)
        elif value and value[0] is not None and left_ms > 0:
            kept = _unpacked(value[0])
            super().put(
                owner,
                id,
                kept.response,
                kept.items,
                now,
                ids=kept.ids,
                outputs=kept.outputs,
                until=now + left_ms / 1000,
            )
        return is_deleted is not None or self.get(owner, id, now) is not None

    async def _write(self, owner: str, id: str, value: bytes, ids: tuple[str, ...]) -> None:
        keys = [_value_key(owner, id), RESPONSES, *(_item_key(owner, item) for item in ids)]
        try:
            async with asyncio.timeout(BULK_SECONDS):
                await self._put(keys, [value, owner, id, round(self._seconds * 1000), SHARED_BYTES])
        except (RedisError, OSError, TimeoutError):
            self._state.on_error("responses")

    def _on_deleted(self, owner: str, id: str) -> None:
        self.delete(owner, id, self._state.clock())


def _not_deleted() -> RefusedError:
    message = "the store that gateways share does not answer, so other gateways may keep the response; delete it again"
    return RefusedError(Code.STORE_UNAVAILABLE, message, retry_after=DELETE_AGAIN_SECONDS)


def _value_key(owner: str, id: str) -> str:
    return f"{RESPONSES}:value:{owner}:{id}"


def _deleted_key(owner: str, id: str) -> str:
    return f"{RESPONSES}:deleted:{owner}:{id}"


def _item_key(owner: str, item: str) -> str:
    return f"{RESPONSES}:item:{owner}:{item}"


def _unpacked(value: Any) -> StoredResponse:
    head, _, rest = value.partition(b"\n")
    facts: dict[str, Any] = loads(head)
    size = int(facts["response"])
    return StoredResponse(rest[:size], rest[size:], 0.0, tuple(facts["ids"]), int(facts["outputs"]))
