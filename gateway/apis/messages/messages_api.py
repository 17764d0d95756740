"""Anthropic's Messages API. The other modules of this package translate requests, answers and errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gateway.apis.lenient_json import dumps
from gateway.apis.messages import messages_answer, messages_errors, messages_request
from gateway.apis.messages.messages_answer import Bounds, MessageEvents
from gateway.apis.openai.generation_request import ChatRequest, InferenceRequest
from gateway.errors import GatewayError


@dataclass(frozen=True, slots=True)
class _Request:
    request: InferenceRequest

    @property
    def _chat(self) -> ChatRequest:
        assert isinstance(self.request.body, ChatRequest), "a Messages request is a chat"
        return self.request.body

    @property
    def _bounds(self) -> Bounds:
        return Bounds(self._chat.stops, self.request.max_tokens)

    @property
    def _names(self) -> dict[str, str]:
        origin = self._chat.origin
        return {} if origin is None else messages_request.long_names(origin)

    def with_request(self, request: InferenceRequest) -> _Request:
        return _Request(request)

    def writer(self) -> MessageEvents:
        return MessageEvents(self._bounds, self._names)

    def whole(self, answer: dict[str, Any]) -> bytes:
        return dumps(messages_answer.whole(answer, self._bounds, self._names))

    def unary(self, answer: bytes) -> bytes:
        return answer


class MessagesApi:
    """The API of `/v1/messages`."""

    path = "/v1/messages"

    def __init__(self, omit_hosted_tools: Callable[[], bool]) -> None:
        """`omit_hosted_tools` returns whether tools that run at Anthropic are left out instead of rejected."""
        self._omit_hosted_tools = omit_hosted_tools

    def parse(self, raw: bytes, owner: str) -> _Request:
        """See `gateway.apis.public_api.PublicApi`."""
        return _Request(messages_request.parse(raw, omit_hosted_tools=self._omit_hosted_tools()))

    def parse_counted(self, raw: bytes, owner: str) -> _Request:
        """The request whose tokens are counted; it needs no `max_tokens`."""
        return _Request(messages_request.parse(raw, counting=True, omit_hosted_tools=self._omit_hosted_tools()))

    def error(self, error: GatewayError) -> dict[str, Any]:
        """See `gateway.apis.public_api.PublicApi`."""
        return messages_errors.envelope(error)
