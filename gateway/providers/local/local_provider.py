"""The inference service as a provider: requests to it, its errors as UpstreamError, and its token counts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from hashlib import blake2b
from typing import Any

import orjson
from msgspec.structs import replace

from gateway.apis.openai.frames import Endpoint, Frame
from gateway.apis.openai.generation_request import AnyRequest
from gateway.breaker.outcome import LOCAL
from gateway.errors import UpstreamError, UpstreamKind
from gateway.providers.http_clients import make_hop
from gateway.providers.local.local_stream import LocalStream, upstream_error
from gateway.providers.provider import Call
from gateway.providers.provider_errors import retry_after_seconds
from gateway.providers.provider_fields import ALL_TAKEN, refused_by_local
from headgate.shared.bodies.body_decoder import as_json
from headgate.shared.bodies.openai_bodies import GenerationFields, TokenizeBody
from headgate.shared.hop import Answer, BrokenError
from inference.protocol import H_DEADLINE, H_DEVICE, H_REQUEST_ID

MAX_ERROR_BYTES = 65536
ERROR_BODY_SECONDS = 5.0


class LocalProvider:
    """The inference service at `url`; `token` is the secret of both services, None when there is none. `tls` replaces
    the default context for https, `server_name` is expected in its certificate instead of the host of `url`.
    """

    name = LOCAL

    def __init__(
        self,
        url: str,
        token: str | None,
        tls: ssl.SSLContext | None = None,
        server_name: str | None = None,
    ) -> None:
        self._headers = {"content-type": "application/json"}
        if token:
            self._headers["authorization"] = f"Bearer {token}"
        self._hop, self._prefix = make_hop(url.rstrip("/"), tls, server_name)

    def unsupported_params(self, endpoint: Endpoint, body: AnyRequest, model: str) -> Mapping[str, str]:
        """The parameters that no local model supports; those of the requested model are in the `InferenceView`."""
        return refused_by_local(body) if endpoint.streams else ALL_TAKEN

    def stream(self, call: Call) -> AbstractAsyncContextManager[AsyncIterator[Frame]]:
        """See `gateway.providers.provider.Provider`."""
        original = call.body
        assert isinstance(original, GenerationFields), "other endpoints have no stream"
        options = {"include_usage": True}
        given = original.stream_options
        if not (given is not None and given.include_usage) and original.answer_so_far is None:
            options["prompt_usage"] = True
        body = as_json(original)
        body["model"], body["stream"], body["stream_options"] = call.model, True, options
        return LocalStream(self._ask, call, orjson.dumps(body))

    async def unary(self, call: Call) -> bytes:
        """See `gateway.providers.provider.Provider`."""
        body = replace(call.body, model=call.model)
        answer = await self._ask(call, orjson.dumps(as_json(body)))
        try:
            return await answer.whole()
        except BrokenError as error:
            raise UpstreamError(UpstreamKind.READ, f"the response was interrupted: {error}") from error
        finally:
            answer.close()

    async def get_json(self, path: str, seconds: float) -> Any:
        """The JSON at a GET path of the service within `seconds`; raises UpstreamError."""
        return await self._json(f"GET {path}", self._hop.get(self._prefix + path, self._headers), seconds)

    async def post_json(self, path: str, body: bytes, seconds: float, headers: Mapping[str, str] | None = None) -> Any:
        """The JSON that answers a POST of `body` within `seconds`; raises UpstreamError with the service's message."""
        headers = {**self._headers, H_DEADLINE: str(max(1, int(seconds * 1000))), **(headers or {})}
        return await self._json(f"POST {path}", self._hop.post(self._prefix + path, body, headers), seconds)

    @staticmethod
    async def _json(request: str, asking: Awaitable[Answer], seconds: float) -> Any:
        with _with_upstream_errors(request, seconds):
            async with asyncio.timeout(seconds):
                answer = await asking
                try:
                    body = await answer.whole()
                finally:
                    answer.close()
        if answer.status != 200:
            raise _status_error(f"{request}: {answer.status}", answer.status, body)
        try:
            return orjson.loads(body)
        except ValueError as error:
            raise UpstreamError(UpstreamKind.MALFORMED, f"{request}: the response is not JSON") from error

    @contextlib.asynccontextmanager
    async def events(
        self, silence_seconds: float, *, figures: bool = False, kv: bool = False
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """The bytes of the service's event stream, with or without the events `figures` and `kv`.

        Raises UpstreamError, also after `silence_seconds` without bytes.
        """
        query = "&".join(f"{name}=true" for name, wanted in (("figures", figures), ("kv", kv)) if wanted)
        path = f"{self._prefix}/events" + (f"?{query}" if query else "")
        with _with_upstream_errors("GET /events", silence_seconds):
            async with asyncio.timeout(silence_seconds):
                answer = await self._hop.get(path, self._headers)
            try:
                if answer.status != 200:
                    message = f"GET /events: status {answer.status}"
                    raise UpstreamError(UpstreamKind.STATUS, message, status=answer.status)
                async with contextlib.aclosing(answer.pieces(silence_seconds)) as pieces:
                    yield pieces
            finally:
                answer.close()

    async def aclose(self) -> None:
        """Closes every connection."""
        self._hop.close()

    async def _ask(self, call: Call, body: bytes) -> Answer:
        """Posts a request; returns the answer when its status is 200, raises UpstreamError otherwise."""
        headers = {**self._headers, H_REQUEST_ID: call.request_id, **call.headers}
        try:
            answer = await self._hop.post(f"{self._prefix}/v1/{call.endpoint}", body, headers, call.connect_seconds)
        except OSError as error:
            raise UpstreamError(
                UpstreamKind.CONNECT, f"the inference service cannot be reached: {_reason_of(error)}"
            ) from error
        except BrokenError as error:
            raise UpstreamError(UpstreamKind.READ, f"the inference service did not answer: {error}") from error
        if answer.status == 200:
            if device := answer.headers.get(H_DEVICE):
                call.response_headers[H_DEVICE] = device
            return answer
        try:
            raise await _refusal(answer)
        finally:
            answer.close()


@contextlib.contextmanager
def _with_upstream_errors(request: str, seconds: float) -> Iterator[None]:
    """Raises UpstreamError where the service is not reached, breaks the connection or is silent for `seconds`."""
    try:
        yield
    except TimeoutError as error:
        raise UpstreamError(UpstreamKind.TIMEOUT, f"{request}: no data for {seconds:g} s") from error
    except (BrokenError, OSError) as error:
        raise UpstreamError(UpstreamKind.CONNECT, _reason_of(error)) from error


def _status_error(message: str, status: int, answer: bytes) -> UpstreamError:
    """The error for a status other than 200, with the message of the error envelope, else `message`."""
    with contextlib.suppress(ValueError):
        raw = orjson.loads(answer)
        if isinstance(raw, dict) and isinstance(raw.get("error"), dict):
            return upstream_error(UpstreamKind.STATUS, raw, status, None)
    return UpstreamError(UpstreamKind.STATUS, message, status=status)


async def _refusal(answer: Answer) -> UpstreamError:
    """The error in a response whose status is not 200. Size and time of reading the body are limited."""
    raw: Any = None
    with contextlib.suppress(BrokenError, TimeoutError, ValueError):  # the status is enough
        async with asyncio.timeout(ERROR_BODY_SECONDS):
            raw = orjson.loads(await answer.whole(MAX_ERROR_BYTES))
    return upstream_error(UpstreamKind.STATUS, raw, answer.status, retry_after_seconds(answer.headers, time.time()))


def _reason_of(error: BaseException) -> str:
    """A short description without addresses, because clients see it."""
    if isinstance(error, BrokenError):
        return str(error)
    number = getattr(error, "errno", None)
    if isinstance(error, ssl.SSLError):
        return (error.reason or "TLS handshake failed").replace("_", " ").lower()
    return os.strerror(number).lower() if isinstance(number, int) and number > 0 else type(error).__name__


# --- token counts -----------------------------------------------------------------------------------------------------
REMEMBERED = 1024
"""Entries of the cache (least recently used are removed)."""


_LARGE_BYTES = 2**20
"""Longer bodies are hashed in a thread, so that they do not block other streams."""

PostJson = Callable[[str, bytes, float], Awaitable[Any]]
"""Posts a JSON body to a path of the service and returns the JSON answer within a number of seconds; raises
UpstreamError."""

_COUNTED = tuple(name for name in TokenizeBody.__struct_fields__ if name != "model")
"""The fields that make up a prompt."""


class Counter:
    """Counts prompt tokens of local models, with a cache of numbers by digest; it holds no prompts.

    The service uses the model's template and vocabulary, also if the model is not loaded, so the count is exact.
    """

    def __init__(self, ask_about: Callable[[str], PostJson]) -> None:
        """`ask_about` returns how to ask a service that has the model."""
        self._ask_about = ask_about
        self._known: OrderedDict[bytes, int] = OrderedDict()

    async def count(self, model: str, body: AnyRequest, seconds: float) -> int:
        """Prompt tokens of a chat or completion `body` for the local `model`; the longest of several prompts counts.

        Raises UpstreamError after `seconds`, if the service is not reachable, or if it cannot count this body (images,
        tools for a model without tool calls). A text that is far too long raises `context_length_exceeded` with a lower
        bound of its tokens in `details["prompt_tokens"]`.
        """
        fields: dict[str, Any] = {name: getattr(body, name, None) for name in _COUNTED}
        question = orjson.dumps(as_json(TokenizeBody(model=model, **fields)))
        key = await _digest(question)
        if (known := self._known.get(key)) is not None:
            self._known.move_to_end(key)
            return known
        answer = await self._ask_about(model)("/tokenize", question, seconds)
        count = answer.get("count") if isinstance(answer, dict) else None
        if not isinstance(count, int):
            raise UpstreamError(UpstreamKind.MALFORMED, "POST /tokenize: no count in the answer")
        self._known[key] = count
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return count


async def _digest(question: bytes) -> bytes:
    if len(question) > _LARGE_BYTES:
        return await asyncio.to_thread(_digest_of, question)
    return _digest_of(question)


def _digest_of(question: bytes) -> bytes:
    return blake2b(question, digest_size=16).digest()
