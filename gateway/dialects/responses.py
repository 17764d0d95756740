"""OpenAI's Responses API: gives ids and the clock to the pure translation and keeps answers for later; decides nothing.

What is kept stands in memory alone, for the key that asked alone, and reaches no log and no record.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from gateway.core.frames import Endpoint, Frame
from gateway.core.requests import InferenceRequest
from gateway.core.responses_events import Answer, Head, Stream, answered
from gateway.core.responses_items import messages_of
from gateway.core.responses_request import Earlier, ResponsesRequest, parse
from gateway.core.responses_store import Store
from gateway.core.unchecked import dumps, loads
from gateway.errors import GatewayError, RequestError
from inference.protocol import Code

PATH = "/v1/responses"

KEPT_BYTES = 64 * 2**20
"""What all kept answers together may take, with their conversations, as JSON."""

KEPT_SECONDS = 3600.0
"""How long an answer can be built on."""

_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
    "logprobs": "include",
}
"""The caller's own name for what a tier calls otherwise."""

_FIRST_WORD = re.compile(r"^\w+")


class ResponsesDialect:
    """`/v1/responses`."""

    path = PATH
    endpoint = Endpoint.CHAT

    def __init__(self, store: Store, leaves_out: Callable[[], bool], most_bytes: Callable[[], int]) -> None:
        """`leaves_out` tells at any time whether tools that run at another provider are left out, not refused,
        `most_bytes` how long a body may be, and so a conversation that a short one builds on.
        """
        self._store = store
        self._leaves_out = leaves_out
        self._most_bytes = most_bytes

    def parse(self, raw: bytes, owner: str) -> _Asked:
        """See `gateway.dialects.base.Dialect`."""
        asked = parse(raw, lambda earlier: self._earlier(owner, earlier, len(raw)), leaves_out=self._leaves_out())
        return _Asked(asked, self._store, owner)

    def _earlier(self, owner: str, id: str, new_bytes: int) -> Earlier | None:
        kept = self._store.get(owner, id, time.monotonic())
        if kept is None:
            return None
        size, most = len(kept.conversation), self._most_bytes()
        if size + new_bytes > most:
            said = f"the conversation has grown longer than the {most} bytes that a body may have; begin a new one"
            raise RequestError(Code.BODY_TOO_LARGE, said, param="previous_response_id")
        return Earlier(tuple(loads(kept.conversation)), size)

    def error(self, error: GatewayError) -> dict[str, Any]:
        """OpenAI's envelope; the field to blame has the caller's name."""
        body = error.body()
        param = body["error"]["param"]
        if isinstance(param, str) and (match := _FIRST_WORD.match(param)) and match[0] in _NAMES:
            body["error"]["param"] = _NAMES[match[0]]
        return body


class _Asked:
    def __init__(self, asked: ResponsesRequest, store: Store, owner: str) -> None:
        self._asked = asked
        self._store = store
        self._owner = owner
        self.request: InferenceRequest = asked.request

    def head(self) -> Head:
        asked = self._asked
        return Head(secrets.token_hex(24), int(time.time()), asked.request.model, asked.echo, asked.names, asked.seals)

    def writer(self) -> _Writer:
        return _Writer(self)

    def whole(self, answer: dict[str, Any]) -> bytes:
        now = int(time.time())
        return self.keep(answered(self.head(), answer, now), now)

    def keep(self, answer: Answer, now: int) -> bytes:
        """The Response as JSON; kept unless the caller did not want that."""
        response = answer.whole(now)
        body = dumps(response)
        if self._asked.stored:
            conversation = dumps([*self._asked.conversation, *messages_of(answer.output)])
            self._store.put(self._owner, response["id"], body, conversation, time.monotonic())
        return body


class _Writer:
    def __init__(self, asked: _Asked) -> None:
        self._asked = asked
        self._stream = Stream(asked.head())

    def write(self, frames: Sequence[Frame]) -> bytes:
        return self._stream.feed(frames)

    def end(self) -> bytes:
        now = int(time.time())
        last = self._stream.end(now)
        if self._stream.is_whole:
            self._asked.keep(self._stream.answer, now)
        return last

    def broke(self, code: str, message: str) -> bytes:
        return self._stream.broke(code, message)
