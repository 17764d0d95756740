"""OpenAI's Responses API, with stored responses.

Stored responses are in memory only, or in the store that gateways share. They are available to the key that created
them, and not part of logs or records.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from gateway.apis.lenient_json import dumps, loads
from gateway.apis.openai.frames import EVENT_STREAM, Frame
from gateway.apis.openai.generation_request import InferenceRequest
from gateway.apis.responses.responses_events import Answer, Head, Stream, answered
from gateway.apis.responses.responses_items import listed
from gateway.apis.responses.responses_request import Earlier, ResponsesRequest, decoded, references, translated
from gateway.apis.responses.responses_store import Store
from gateway.apis.responses_body import InputItem, ResponsesBody, stored_items
from gateway.errors import GatewayError, RequestError
from inference.protocol import Code

PATH = "/v1/responses"

KEPT_BYTES = 64 * 2**20
"""Size limit of all stored answers and their conversations, as JSON."""

MAX_REFERENCES = 1000
"""Limit of the items of one body that are looked up in the store that gateways share."""

KEPT_SECONDS = 3600.0
"""How long an answer is stored."""

_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
    "logprobs": "include",
}
"""The client's name of a parameter, by the internal name."""

SHARED_STORE_DOWN = "The store that gateways share does not answer, so responses of other gateways cannot be read now."

_FIRST_WORD = re.compile(r"^\w+")


class SharedStore(Protocol):
    """Copies responses of other gateways into the store of this gateway."""

    @property
    def is_up(self) -> bool:
        """Whether they can be copied now."""
        ...

    async def fetch(self, owner: str, id: str) -> None:
        """Copies the response `id`, if there is one."""
        ...

    async def fetch_items(self, owner: str, items: Iterable[str]) -> None:
        """Copies the responses whose conversations contain these items."""
        ...


class ResponsesApi:
    """`/v1/responses`."""

    path = PATH

    def __init__(
        self,
        store: Store,
        omit_hosted_tools: Callable[[], bool],
        max_bytes: Callable[[], int],
        shared: SharedStore | None = None,
    ) -> None:
        """`omit_hosted_tools` returns whether tools that run at another provider are left out instead of rejected.
        `max_bytes` returns the size limit of a body and the stored conversation that it continues. `shared` fills
        `store` with what requests refer to.
        """
        self._store = store
        self._shared = shared
        self._omit_hosted_tools = omit_hosted_tools
        self._max_bytes = max_bytes

    def parse(self, raw: bytes, owner: str) -> _Request | Awaitable[_Request]:
        """See `gateway.apis.public_api.PublicApi`."""
        body = decoded(raw, omit_hosted_tools=self._omit_hosted_tools())
        if self._shared is None or not any(references(body)):
            return self._translated(body, len(raw), owner)
        return self._with_shared(self._shared, body, len(raw), owner)

    async def _with_shared(self, shared: SharedStore, body: ResponsesBody, body_bytes: int, owner: str) -> _Request:
        """Gets the responses of other gateways that a body refers to."""
        previous, items = references(body)
        if previous is not None:
            await shared.fetch(owner, previous)
        if items:
            await shared.fetch_items(owner, items[:MAX_REFERENCES])
        try:
            return self._translated(body, body_bytes, owner)
        except RequestError as error:
            missing = error.code in (Code.PREVIOUS_RESPONSE_NOT_FOUND, Code.NOT_FOUND)
            if missing and not shared.is_up:
                raise RequestError(error.code, f"{error.message} {SHARED_STORE_DOWN}", param=error.param) from None
            raise

    def _translated(self, body: ResponsesBody, body_bytes: int, owner: str) -> _Request:
        memory = _Memory(self._store, owner, body_bytes, self._max_bytes())
        return _Request(translated(body, body_bytes, memory.earlier, memory.item), self._store, owner)

    def error(self, error: GatewayError) -> dict[str, Any]:
        """OpenAI's envelope, with the client's name of the parameter."""
        body = error.body()
        param = body["error"]["param"]
        if isinstance(param, str) and (match := _FIRST_WORD.match(param)) and match[0] in _NAMES:
            body["error"]["param"] = _NAMES[match[0]]
        return body


class _Memory:
    """The stored conversations that one request refers to; their size and the body's are limited together."""

    def __init__(self, store: Store, owner: str, body_bytes: int, max_bytes: int) -> None:
        self._store = store
        self._owner = owner
        self._size = body_bytes
        self._most = max_bytes
        self._items: dict[str, dict[str, Any]] = {}
        """The items of the conversations that this request has read, by id."""

    def earlier(self, id: str) -> Earlier | None:
        """The conversation up to the answer `id`."""
        kept = self._store.get(self._owner, id, time.monotonic())
        if kept is None:
            return None
        self._grow(len(kept.items), "previous_response_id")
        return Earlier(tuple(stored_items(loads(kept.items))), len(kept.items))

    def item(self, id: str) -> tuple[InputItem, int] | None:
        """The item with this id, and its size as JSON."""
        if id not in self._items:
            kept = self._store.find_by_item(self._owner, id, time.monotonic())
            if kept is None:
                return None
            self._items |= {item["id"]: item for item in loads(kept.items)}
        size = len(dumps(self._items[id]))
        self._grow(size, "input")
        return stored_items([self._items[id]])[0], size

    def _grow(self, more_bytes: int, param: str) -> None:
        self._size += more_bytes
        if self._size > self._most:
            message = f"the conversation is longer than the limit of {self._most} bytes (max_body); begin a new one"
            raise RequestError(Code.BODY_TOO_LARGE, message, param=param)


class _Request:
    def __init__(self, request: ResponsesRequest, store: Store, owner: str) -> None:
        self._request = request
        self._store = store
        self._owner = owner
        self.request: InferenceRequest = request.request

    def with_request(self, request: InferenceRequest) -> _Request:
        return _Request(replace(self._request, request=request), self._store, self._owner)

    def head(self) -> Head:
        request = self._request
        id, now = secrets.token_hex(24), int(time.time())
        return Head(id, now, request.request.model, request.echo, request.names, request.with_encrypted_content)

    def writer(self) -> _Writer:
        return _Writer(self)

    def whole(self, answer: dict[str, Any]) -> bytes:
        now = int(time.time())
        return self.keep(answered(self.head(), answer, now), now)

    def unary(self, answer: bytes) -> bytes:
        return answer

    def keep(self, answer: Answer, now: int) -> bytes:
        """The Response as JSON; stored unless the request has `store: false`."""
        response = answer.whole(now)
        body = dumps(response)
        if self._request.stored:
            id, output = response["id"], response["output"]
            items = [*listed(self._request.items, id.removeprefix("resp_")), *output]
            ids = tuple(item["id"] for item in items)
            self._store.put(self._owner, id, body, dumps(items), time.monotonic(), ids=ids, outputs=len(output))
        return body


class _Writer:
    media_type = EVENT_STREAM

    def __init__(self, request: _Request) -> None:
        self._request = request
        self._stream = Stream(request.head())

    def write(self, frames: Sequence[Frame]) -> bytes:
        return self._stream.feed(frames)

    def end(self) -> bytes:
        now = int(time.time())
        last = self._stream.end(now)
        if self._stream.is_whole:
            self._request.keep(self._stream.answer, now)
        return last

    def end_with_error(self, code: str, message: str) -> bytes:
        return self._stream.end_with_error(code, message)
