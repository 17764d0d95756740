"""The request inside the gateway: the body of OpenAI's chats, into which the other public APIs are translated."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from gateway.apis.schema.messages_body import CountedRequest
from headgate.shared.bodies.openai_bodies import (
    ChatBody,
    CompletionRequest,
    EmbeddingRequest,
    GenerationFields,
    RerankRequest,
)


class ChatRequest(ChatBody, kw_only=True):
    """A chat of any public API."""

    origin: CountedRequest | None = msgspec.field(default=None, name="$origin")
    """The Messages request that this one was translated from. An Anthropic tier is sent it instead."""
    from_messages: bool = msgspec.field(default=False, name="$from_messages")
    """Fields have the meaning of the Messages API, also after the origin no longer holds."""


AnyRequest = ChatRequest | CompletionRequest | EmbeddingRequest | RerankRequest
Generation = TypeVar("Generation", bound=GenerationFields)


def changed(body: Generation, **more: Any) -> Generation:
    """A copy of `body` with other fields, and without its origin, which no longer holds."""
    if isinstance(body, ChatRequest):
        more.setdefault("origin", None)
    copy: Generation = msgspec.structs.replace(body, **more)
    return copy
