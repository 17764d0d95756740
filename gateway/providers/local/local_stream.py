"""One answer stream of the inference service, relayed as raw frames.

This is the hot path: payloads are not rewritten, and a chunk that was parsed for classification is passed on with its
payload.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any

import orjson

from gateway.apis.openai.frames import CONTENT, FINISH, Comment, Done, Finishes, Frame, frame_of
from gateway.apis.openai.generation_request import choices_of
from gateway.errors import UpstreamError, UpstreamKind
from gateway.providers.provider import Call
from headgate.shared.hop import Answer, BrokenError
from headgate.shared.sse import SseFrame, SseSplitter
from inference.protocol import CODES, H_DEVICE, RETRY_AFTER, Code, Restored, device_of

log = logging.getLogger("gateway.providers.local.local_provider")

Ask = Callable[[Call, bytes], Awaitable[Answer]]
"""Posts a body and returns the answer when its status is 200; raises UpstreamError."""

CLOSE_SECONDS = 0.2
"""How long the end of a finished response may take, so that its connection can be used again."""

_USUAL_TYPE = "text/event-stream; charset=utf-8"
"""The content type that the inference service sends."""


def upstream_error(kind: UpstreamKind, raw: Any, status: int | None, retry_after: float | None) -> UpstreamError:
    """The error in a parsed OpenAI envelope (`{"error": {...}}`), or a general one without an envelope."""
    error = raw.get("error") if isinstance(raw, dict) else None
    if not isinstance(error, dict):
        return UpstreamError(kind, "an error without the OpenAI envelope", status=status, retry_after=retry_after)
    details = error.get("headgate")
    if retry_after is None and isinstance(details, dict):
        delay = details.get(RETRY_AFTER)
        retry_after = float(delay) if isinstance(delay, (int, float)) and not isinstance(delay, bool) else None
    return UpstreamError(
        kind,
        str(error.get("message") or "no message"),
        status=status,
        code=str(error["code"]) if error.get("code") is not None else None,
        type=str(error["type"]) if error.get("type") is not None else None,
        param=str(error["param"]) if error.get("param") is not None else None,
        retry_after=retry_after,
        details=details if isinstance(details, dict) else None,
    )


def _status_of(code: str | None) -> int | None:
    """The HTTP status of an error code of the inference service; None for other codes."""
    with contextlib.suppress(ValueError):
        return CODES[Code(code or "")].status
    return None


class LocalStream(AbstractAsyncContextManager["LocalStream"], AsyncIterator[Frame]):
    """One open stream and its iterator. Leaving it closes the connection unless the answer is complete."""

    def __init__(self, ask: Ask, call: Call, body: bytes) -> None:
        self._ask = ask
        self._call = call
        self._body = body
        self._splitter = SseSplitter()
        self._ready: deque[Frame] = deque()
        self._error: UpstreamError | None = None
        """Raised after the last frame of `_ready`."""
        self._answer: Answer | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Callable[[list[Frame]], bool] | None = None
        self._paused = False
        self._finishes = Finishes(choices_of(call.body))
        self._has_content = False
        self._whole = False
        self._over = False

    async def __aenter__(self) -> LocalStream:
        answer = await self._ask(self._call, self._body)
        kind = answer.headers.get("content-type", "")
        if kind != _USUAL_TYPE and kind.partition(";")[0].strip().lower() != "text/event-stream":
            answer.close()
            raise UpstreamError(UpstreamKind.MALFORMED, f"expected an event stream, got {kind or 'no content type'}")
        self._answer = answer
        answer.listen(self._on_piece, self._on_end)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """Closes the connection; after a complete answer it is returned to the pool in the background."""
        answer, self._answer = self._answer, None
        self._sink = None
        if answer is not None:
            answer.close(CLOSE_SECONDS if self._whole else 0.0)

    def __aiter__(self) -> LocalStream:
        return self

    async def __anext__(self) -> Frame:
        while not self._ready:
            error, self._error = self._error, None
            if error is not None:
                raise error
            if self._over:
                raise StopAsyncIteration
            await self._changed()
        return self._ready.popleft()

    def take_ready(self) -> list[Frame]:
        """The frames that have already arrived, so that they can be sent in one write; a pending error stays."""
        ready = list(self._ready)
        self._ready.clear()
        return ready

    def pass_on(self, sink: Callable[[list[Frame]], bool]) -> None:
        """Passes frames directly to `sink` while a task waits for one; the task is not woken if `sink` returns True.

        The end and errors are not passed to `sink`.
        """
        self._sink = sink

    async def _changed(self) -> None:
        """Waits for a frame, the end or an error. Reading is paused while no task waits."""
        if self._paused and self._answer is not None:
            self._paused = False
            self._answer.resume()
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _on_piece(self, piece: bytes) -> None:
        """Queues the frames in received bytes, or passes them to the sink."""
        if self._over:
            return  # everything after [DONE] or an error is ignored
        if (payloads := self._splitter.plain(piece)) is not None:
            self._take_payloads(payloads)
        else:
            try:
                frames = self._splitter.feed(piece)
            except ValueError as error:
                self._fail(UpstreamError(UpstreamKind.MALFORMED, str(error)))
            else:
                self._take_all(frames)
        if not self._over and (not self._ready or self._passes()):
            return
        if self._waiter is None and not self._over:
            self._paused = True
            if self._answer is not None:
                self._answer.pause()
        self._wake()

    def _on_end(self, error: BrokenError | None) -> None:
        """Handles the end of the answer, or a broken connection."""
        if not self._over:
            if error is None:
                self._take_all(self._splitter.end())
            if not self._over and error is None:
                self._end("the stream ended")
            elif not self._over:
                self._fail(UpstreamError(UpstreamKind.READ, f"the stream was interrupted: {error}"))
        self._wake()

    def _passes(self) -> bool:
        """Passes the queued frames to the sink; returns whether it accepted them."""
        if self._sink is None or self._waiter is None or self._waiter.done():
            return False
        try:
            taken = self._sink(list(self._ready))
        except Exception:
            log.exception("internal error: frames of the inference service could not be relayed")
            return False
        if taken:
            self._ready.clear()
        return taken

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _take_all(self, frames: list[SseFrame]) -> None:
        for frame in frames:
            self._take(frame)
            if self._over:
                return  # everything after [DONE] or an error is ignored

    def _take(self, frame: SseFrame) -> None:
        if frame.data is not None:
            self._take_payloads([frame.data])
        elif (comment := frame.comment) is not None:
            if restored := Restored.parse(comment):
                self._call.restored.append(restored)
                return  # for the record only
            if device := device_of(comment):
                self._call.response_headers[H_DEVICE] = device
            self._ready.append(Comment(comment))

    def _take_payloads(self, payloads: list[bytes]) -> None:
        for payload in payloads:
            if payload.startswith(b"{") and payload.endswith(b"}"):
                frame = frame_of(payload)
                if frame.chunk is None and payload.find(b'"choices"') < 0 and payload.find(b'"error"') >= 0:
                    self._take_error(payload)  # `in` is slow for bytes
                    return
                if frame.kind is FINISH:
                    self._finishes.note(frame)
                elif frame.kind is CONTENT:
                    self._has_content = True
                self._ready.append(frame)
                continue
            if payload.strip() == b"[DONE]":
                self._end("the end mark came")
            else:
                self._fail(UpstreamError(UpstreamKind.MALFORMED, f"not a chunk: {payload[:80]!r}"))
            return  # everything after [DONE] or an error is ignored

    def _take_error(self, payload: bytes) -> None:
        """Ends the stream with the error frame in `payload`."""
        try:
            error = upstream_error(UpstreamKind.ERROR_FRAME, orjson.loads(payload), None, None)
        except ValueError:
            error = UpstreamError(UpstreamKind.MALFORMED, f"not JSON: {payload[:80]!r}")
        else:
            error.status = _status_of(error.code)
        self._fail(error)

    def _end(self, how: str) -> None:
        if self._finishes.are_all:
            self._over = self._whole = True
            self._ready.append(Done())
        elif self._has_content or self._finishes.are_any:
            self._fail(UpstreamError(UpstreamKind.READ, f"{how} without a finish_reason"))
        else:
            self._fail(UpstreamError(UpstreamKind.EMPTY, f"{how} without any content"))

    def _fail(self, error: UpstreamError) -> None:
        self._over = True
        self._error = error
