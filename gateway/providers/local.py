"""Talks to the inference service: raw frames in, raw frames out; retries nothing and judges nothing.

This is the hot path. Payloads are never parsed: what a chunk carries is read from its bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any

import aiohttp
import orjson

from gateway.core.chain import LOCAL
from gateway.core.frames import Comment, Data, DeltaKind, Done, Endpoint, Frame
from gateway.core.provider_fields import refused_by_local
from gateway.core.sse import SseFrame, SseSplitter
from gateway.errors import UpstreamError, UpstreamKind
from gateway.http import make_hop
from gateway.providers.base import Call
from headgate.shared.hop import Answer, BrokenError
from inference.protocol import CODES, H_DEADLINE, H_DEVICE, H_REQUEST_ID, RETRY_AFTER, Code, device_of

log = logging.getLogger("gateway.providers.local")

MAX_ERROR_BYTES = 65536
ERROR_BODY_SECONDS = 5.0
CLOSE_SECONDS = 0.2
"""How long the end of a finished response may take to come so that its connection can serve again."""

_FINISH = re.compile(rb'"finish_reason"\s*:\s*"')
_NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')
_CONTENT = re.compile(
    rb'"(?:content|reasoning_content|reasoning|refusal|text)"\s*:\s*"[^"]'
    rb'|"tool_calls"\s*:\s*\[\s*\{|"function_call"\s*:\s*\{'
)

_USUAL = (b'"content":"', b'"text":"')
"""How text begins in what our own worker writes: looked for first, because that is several times as quick."""


def kind_of(payload: bytes) -> DeltaKind:
    """What a chunk of ours carries, from its bytes.

    A quote inside a JSON string is escaped, so a key's closing quote and colon cannot occur in generated text.
    """
    if _FINISH.search(payload):
        return DeltaKind.FINISH
    for key in _USUAL:
        begin = payload.find(key) + len(key)
        if begin >= len(key) and payload[begin : begin + 1] not in (b'"', b""):
            return DeltaKind.CONTENT
    if _CONTENT.search(payload):
        return DeltaKind.CONTENT
    return DeltaKind.USAGE if _NO_CHOICES.search(payload) else DeltaKind.OTHER


def retry_after_of(headers: Mapping[str, str]) -> float | None:
    """Seconds in a Retry-After header, None without one or when it is a date."""
    try:
        return float(headers["retry-after"])
    except (KeyError, ValueError):
        return None


def upstream_error(kind: UpstreamKind, raw: Any, status: int | None, retry_after: float | None) -> UpstreamError:
    """The error in an OpenAI envelope (`{"error": {...}}`, parsed), as far as it is one."""
    error = raw.get("error") if isinstance(raw, dict) else None
    if not isinstance(error, dict):
        return UpstreamError(kind, "an error without the OpenAI envelope", status=status, retry_after=retry_after)
    details = error.get("headgate")
    if retry_after is None and isinstance(details, dict):
        said = details.get(RETRY_AFTER)
        retry_after = float(said) if isinstance(said, (int, float)) and not isinstance(said, bool) else None
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


class LocalProvider:
    """The inference service at `url`; `token` is the secret both services share, None when there is none."""

    name = LOCAL
    is_local = True

    def __init__(self, url: str, token: str | None, session: aiohttp.ClientSession) -> None:
        self._url = url.rstrip("/")
        self._session = session
        self._headers = {"content-type": "application/json"}
        if token:
            self._headers["authorization"] = f"Bearer {token}"
        self._hop, self._path = make_hop(self._url)

    def unsupported_params(self, endpoint: Endpoint, body: Mapping[str, Any], model: str) -> tuple[str, ...]:
        """What no local model takes; what the one asked for can do stands in the service's own snapshot."""
        return refused_by_local(body) if endpoint.streams else ()

    def stream(self, call: Call) -> AbstractAsyncContextManager[AsyncIterator[Frame]]:
        """See `gateway.providers.base.Provider`."""
        body = {**call.body, "model": call.model, "stream": True, "stream_options": {"include_usage": True}}
        return _Stream(self, call, orjson.dumps(body))

    async def unary(self, call: Call) -> bytes:
        """See `gateway.providers.base.Provider`."""
        body = orjson.dumps({**call.body, "model": call.model})
        answer = await self._ask(call, body)
        try:
            return await answer.whole()
        except BrokenError as error:
            raise UpstreamError(UpstreamKind.READ, f"the answer broke off: {error}") from error
        finally:
            answer.close()

    async def get_json(self, path: str, seconds: float) -> Any:
        """The JSON at a GET path of the service within `seconds`; raises UpstreamError."""
        return await self._json("GET", path, None, seconds)

    async def post_json(self, path: str, body: bytes, seconds: float, headers: Mapping[str, str] | None = None) -> Any:
        """The JSON that answers a POST of `body` within `seconds`; raises UpstreamError in the service's own words."""
        deadline = {H_DEADLINE: str(max(1, int(seconds * 1000)))}
        return await self._json("POST", path, body, seconds, {**deadline, **(headers or {})})

    async def _json(
        self, method: str, path: str, body: bytes | None, seconds: float, more: Mapping[str, str] | None = None
    ) -> Any:
        headers = {**self._headers, **(more or {})}
        try:
            async with self._session.request(
                method, self._url + path, data=body, headers=headers, timeout=aiohttp.ClientTimeout(total=seconds)
            ) as response:
                answer = await response.read()
                if response.status != 200:
                    raise _not_given(f"{method} {path}: {response.status}", response.status, answer)
                return orjson.loads(answer)
        except TimeoutError as error:
            raise UpstreamError(UpstreamKind.TIMEOUT, f"{method} {path}: nothing for {seconds:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamError(UpstreamKind.CONNECT, _said(error)) from error
        except ValueError as error:
            raise UpstreamError(UpstreamKind.MALFORMED, f"{method} {path}: not JSON") from error

    @contextlib.asynccontextmanager
    async def events(self, silence_seconds: float) -> AsyncIterator[AsyncIterator[bytes]]:
        """The bytes of the service's event stream as they come; raises UpstreamError, also after so long a silence."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=silence_seconds, sock_read=silence_seconds)
        try:
            async with self._session.get(self._url + "/events", headers=self._headers, timeout=timeout) as response:
                if response.status != 200:
                    raise UpstreamError(UpstreamKind.STATUS, "GET /events", status=response.status)
                yield response.content.iter_any()
        except TimeoutError as error:
            raise UpstreamError(UpstreamKind.TIMEOUT, f"GET /events: nothing for {silence_seconds:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamError(UpstreamKind.CONNECT, _said(error)) from error

    async def aclose(self) -> None:
        """Closes every connection."""
        self._hop.close()
        await self._session.close()

    async def _ask(self, call: Call, body: bytes) -> Answer:
        """The answer to a POST once its good status is known."""
        headers = {**self._headers, H_REQUEST_ID: call.request_id, **call.headers}
        try:
            answer = await self._hop.post(f"{self._path}/v1/{call.endpoint}", body, headers, call.connect_seconds)
        except OSError as error:
            raise UpstreamError(
                UpstreamKind.CONNECT, f"the inference service cannot be reached: {_said(error)}"
            ) from error
        except BrokenError as error:
            raise UpstreamError(UpstreamKind.READ, f"the inference service did not answer: {error}") from error
        if answer.status == 200:
            if device := answer.headers.get(H_DEVICE):
                call.heard[H_DEVICE] = device
            return answer
        try:
            raise await _refusal(answer)
        finally:
            answer.close()


def _not_given(asked: str, status: int, answer: bytes) -> UpstreamError:
    """The error instead of an answer, in the envelope's words where it is one."""
    with contextlib.suppress(ValueError):
        raw = orjson.loads(answer)
        if isinstance(raw, dict) and isinstance(raw.get("error"), dict):
            return upstream_error(UpstreamKind.STATUS, raw, status, None)
    return UpstreamError(UpstreamKind.STATUS, asked, status=status)


async def _refusal(answer: Answer) -> UpstreamError:
    """The error in a response whose status is not 200; its body is read only so far and so long."""
    raw: Any = None
    with contextlib.suppress(BrokenError, TimeoutError, ValueError):  # the status alone says enough
        async with asyncio.timeout(ERROR_BODY_SECONDS):
            raw = orjson.loads(await answer.whole(MAX_ERROR_BYTES))
    return upstream_error(UpstreamKind.STATUS, raw, answer.status, retry_after_of(answer.headers))


def _said(error: BaseException) -> str:
    """What went wrong in a few words, without addresses: callers read it too."""
    if isinstance(error, aiohttp.ClientPayloadError | aiohttp.ServerDisconnectedError):
        return "the connection was closed"
    cause = getattr(error, "os_error", error)
    number = getattr(cause, "errno", None)
    if isinstance(cause, ssl.SSLError):
        return (cause.reason or "a broken handshake").replace("_", " ").lower()
    return os.strerror(number).lower() if isinstance(number, int) and number > 0 else type(cause).__name__


def _status_of(code: str | None) -> int | None:
    """The HTTP status that belongs to one of our codes; an error frame comes after a 200."""
    with contextlib.suppress(ValueError):  # a code that is not ours has no status of ours
        return CODES[Code(code or "")].status
    return None


class _Stream(AbstractAsyncContextManager["_Stream"], AsyncIterator[Frame]):
    """One open stream; its own iterator. Leaving it closes the connection unless the answer came whole."""

    def __init__(self, provider: LocalProvider, call: Call, body: bytes) -> None:
        self._provider = provider
        self._call = call
        self._body = body
        self._splitter = SseSplitter()
        self._ready: deque[Frame | UpstreamError] = deque()
        self._answer: Answer | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Callable[[list[Frame]], bool] | None = None
        self._paused = False
        self._finished = False
        self._answered = False
        self._whole = False
        self._over = False

    async def __aenter__(self) -> _Stream:
        answer = await self._provider._ask(self._call, self._body)
        kind = answer.headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() != "text/event-stream":
            answer.close()
            raise UpstreamError(UpstreamKind.MALFORMED, f"expected an event stream, got {kind or 'no type'}")
        self._answer = answer
        answer.listen(self._on_piece, self._on_end)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """Closes the connection; one whose answer came whole is used again once its end came, which nobody awaits."""
        answer, self._answer = self._answer, None
        self._sink = None
        if answer is not None:
            answer.close(CLOSE_SECONDS if self._whole else 0.0)

    def __aiter__(self) -> _Stream:
        return self

    async def __anext__(self) -> Frame:
        while not self._ready:
            if self._over:
                raise StopAsyncIteration
            await self._changed()
        frame = self._ready.popleft()
        if isinstance(frame, UpstreamError):
            raise frame
        return frame

    def take_ready(self) -> list[Frame]:
        """The frames that are here already, so that they can leave in one write; an error waits its turn."""
        ready: list[Frame] = []
        while self._ready and not isinstance(frame := self._ready[0], UpstreamError):
            ready.append(frame)
            self._ready.popleft()
        return ready

    def pass_on(self, sink: Callable[[list[Frame]], bool]) -> None:
        """Offers `sink` what comes while somebody waits for a frame; what it takes, with True, wakes nobody.

        The end and errors are not offered.
        """
        self._sink = sink

    async def _changed(self) -> None:
        """Waits for more to happen. What comes while nobody waits is not read further than it has been."""
        if self._paused and self._answer is not None:
            self._paused = False
            self._answer.resume()
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _on_piece(self, piece: bytes) -> None:
        """Bytes came: queues the frames in them, and the error that ends them, unless they can be passed on."""
        if self._over:
            return  # nothing counts after [DONE] or an error
        if (payloads := self._splitter.plain(piece)) is not None:
            self._take_payloads(payloads)
        else:
            try:
                frames = self._splitter.feed(piece)
            except ValueError as error:
                self._fail(UpstreamError(UpstreamKind.MALFORMED, str(error)))
            else:
                self._take_all(frames)
        if not self._ready or self._passes():
            return
        if self._waiter is None:
            self._paused = True
            if self._answer is not None:
                self._answer.pause()
        self._wake()

    def _on_end(self, error: BrokenError | None) -> None:
        """The answer is over."""
        if not self._over:
            if error is None:
                self._take_all(self._splitter.end())
            if not self._over and error is None:
                self._end("the stream ended")
            elif not self._over:
                self._fail(UpstreamError(UpstreamKind.READ, f"the stream broke off: {error}"))
        self._wake()

    def _passes(self) -> bool:
        """Whether everything that is here was passed on."""
        if self._sink is None or self._waiter is None or self._waiter.done() or self._over:
            return False
        frames = [frame for frame in self._ready if not isinstance(frame, UpstreamError)]
        try:
            taken = self._sink(frames)
        except Exception:
            log.exception("frames of the inference service could not be passed on")
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
                return  # nothing counts after [DONE] or an error

    def _take_payloads(self, payloads: list[bytes]) -> None:
        for payload in payloads:
            self._take_payload(payload)
            if self._over:
                return  # as above

    def _take(self, frame: SseFrame) -> None:
        if frame.data is not None:
            self._take_payload(frame.data)
        elif frame.is_comment:
            if device := device_of(frame.raw):
                self._call.heard[H_DEVICE] = device
            self._ready.append(Comment(frame.raw))

    def _take_payload(self, payload: bytes) -> None:
        if payload.startswith(b"{") and payload.endswith(b"}"):
            if b'"error"' in payload and b'"choices"' not in payload:
                self._refuse(payload)
                return
            kind = kind_of(payload)
            self._finished = self._finished or kind is DeltaKind.FINISH
            self._answered = self._answered or kind is DeltaKind.CONTENT
            self._ready.append(Data(payload, kind))
        elif payload.strip() == b"[DONE]":
            self._end("the end mark came")
        else:
            self._fail(UpstreamError(UpstreamKind.MALFORMED, f"not a chunk: {payload[:80]!r}"))

    def _refuse(self, payload: bytes) -> None:
        """Queues the error frame in `payload`."""
        try:
            error = upstream_error(UpstreamKind.ERROR_FRAME, orjson.loads(payload), None, None)
        except ValueError:
            error = UpstreamError(UpstreamKind.MALFORMED, f"not JSON: {payload[:80]!r}")
        else:
            error.status = _status_of(error.code)
        self._fail(error)

    def _end(self, how: str) -> None:
        if self._finished:
            self._over = self._whole = True
            self._ready.append(Done())
        elif self._answered:
            self._fail(UpstreamError(UpstreamKind.READ, f"{how} without a finish_reason"))
        else:
            self._fail(UpstreamError(UpstreamKind.EMPTY, f"{how} without any content"))

    def _fail(self, error: UpstreamError) -> None:
        self._over = True
        self._ready.append(error)
