"""One HTTP request and its response on raw ASGI: body, headers, disconnect, JSON or stream; decides no content."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import orjson

from headgate.shared import wire
from inference.protocol import H_DEADLINE, H_PRIORITY, H_REQUEST_ID, H_STREAM_INTERVAL, Code, Priority
from inference.worker.api import response_writer
from inference.worker.worker_errors import BadRequestError, GoneError, WorkerError

MAX_BODY_BYTES = 32 * 2**20
MAX_DISCARDED_BYTES = 256 * 2**20
"""A body over the limit is read to its end before the refusal, or the client would see a reset instead of it."""
MOST_PATIENCE_SECONDS = 1.0
"""However much is asked for: a stream that says nothing for longer looks hung."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def parse(raw: bytes) -> Any:
    """The JSON value of a body; raises BadRequestError, with `param` where a number is NaN or infinite."""
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        problem = str(error)
    try:
        # Python writes NaN and Infinity into JSON; which parameter holds one is worth saying.
        lenient = json.loads(raw)
    except (ValueError, RecursionError):
        lenient = None
    if isinstance(lenient, dict):
        for name, value in lenient.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise BadRequestError(f"{name[:80]} must be a finite number", name[:80])
    raise BadRequestError(f"the body is not valid JSON: {problem}", code=Code.INVALID_JSON)


class Exchange:
    """One request and its response. Watches for the client's leaving once the body was read."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method = str(scope["method"])
        self.path = str(scope["path"])
        self.begun = False
        self.gone = False
        """The client was seen leaving; may be asked on any thread."""
        self._headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.request_id = self.header(H_REQUEST_ID)
        self._receive = receive
        self._send = send
        self._wire = wire.take(scope)
        self._watcher: asyncio.Task[None] | None = None
        self._leave: Callable[[], None] | None = None

    def header(self, name: str) -> str:
        """A header's value, empty when absent."""
        return str(self._headers.get(name, ""))

    def priority(self) -> Priority:
        """The request's queue class."""
        said = self.header(H_PRIORITY)
        try:
            return Priority(said.lower()) if said else Priority.NORMAL
        except ValueError:
            raise BadRequestError(f"{H_PRIORITY} must be high, normal or low", H_PRIORITY) from None

    def deadline(self, now: float) -> float | None:
        """When the first token must be there, on the clock that says `now`."""
        milliseconds = self._milliseconds(H_DEADLINE)
        return None if milliseconds is None else now + milliseconds / 1000

    def patience(self) -> float:
        """Seconds that text of a stream may wait for more to leave with it; 0 where nothing is said."""
        return min((self._milliseconds(H_STREAM_INTERVAL) or 0) / 1000, MOST_PATIENCE_SECONDS)

    def _milliseconds(self, name: str) -> int | None:
        said = self.header(name)
        if not said:
            return None
        if not (said.isascii() and said.isdigit() and len(said) < 12):
            raise BadRequestError(f"{name} must be a whole number of milliseconds", name)
        return int(said)

    @property
    def announced_bytes(self) -> float:
        """How large the body will be at most, as its header says."""
        said = self.header("content-length")
        return int(said) if said.isascii() and said.isdigit() and len(said) < 16 else math.inf

    async def body(self) -> list[bytes]:
        """The whole body, in pieces; raises WorkerError(body_too_large) after discarding the rest of it."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise GoneError
            part = message.get("body", b"")
            size += len(part)
            if size <= MAX_BODY_BYTES:
                parts.append(part)
            elif size > MAX_DISCARDED_BYTES:
                break
            if not message.get("more_body", False):
                break
        if size > MAX_BODY_BYTES:
            raise WorkerError(Code.BODY_TOO_LARGE, f"the body is larger than {MAX_BODY_BYTES} bytes")
        return parts

    def watch(self) -> None:
        """From now on `gone` is true as soon as the client is; the body must have been read."""
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch())

    def on_disconnect(self, leave: Callable[[], None]) -> None:
        """Calls `leave` as soon as the client is gone, at once when it is."""
        self._leave = leave
        self.watch()
        if self.gone:
            leave()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            continue
        self.gone = True
        if self._leave is not None:
            self._leave()

    def close(self) -> None:
        """Ends the watch."""
        if self._watcher is not None:
            self._watcher.cancel()

    async def json(self, body: bytes, status: int = 200, extra: Mapping[str, str] | None = None) -> None:
        """A complete response."""
        await self._start(status, "application/json", {**(extra or {}), "content-length": str(len(body))})
        await self._send({"type": "http.response.body", "body": body})

    async def fail(self, error: WorkerError) -> None:
        """An error as a status, or as the last frame of a stream that has begun."""
        if self.begun:
            await self.chunk(response_writer.error_frame(error))
            await self.end()
            return
        retry = {} if error.retry_after is None else {"retry-after": str(max(1, math.ceil(error.retry_after)))}
        await self.json(response_writer.error_json(error), error.status, retry)

    async def begin_stream(self) -> None:
        """Status and headers of an event stream."""
        await self._start(200, "text/event-stream; charset=utf-8", {"cache-control": "no-cache"})

    async def chunk(self, data: bytes) -> None:
        """Bytes of a stream, which begins with the first."""
        if not self.begun:
            await self.begin_stream()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    @property
    def takes_pieces(self) -> bool:
        """Whether `piece` may be called now."""
        return self.begun and self._wire is not None and self._wire.is_free

    def piece(self, data: bytes) -> None:
        """A chunk that leaves at once; only while `takes_pieces` and nobody awaits another."""
        assert self._wire is not None
        self._wire.write(data)

    async def end(self) -> None:
        """The end of a stream."""
        await self._send({"type": "http.response.body", "body": b""})

    async def _start(self, status: int, kind: str, extra: Mapping[str, str]) -> None:
        self.begun = True
        headers = {"content-type": kind, **extra}
        if self.request_id:
            headers[H_REQUEST_ID] = self.request_id
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers.items()],
            }
        )
