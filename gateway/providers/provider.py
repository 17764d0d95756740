"""The interface of a provider: it gets a call in OpenAI's format and returns a stream of frames.

Contract (checked by `tests/contract/test_providers.py` for every provider and its fake):
- `stream` yields the frames of one OpenAI stream, whatever API the provider has: `Data` chunks (`chat.completion.chunk`
  or `text_completion` objects), `Comment`s, and at the end `Done` if and only if a finish reason was seen.
- It raises only UpstreamError and CancelledError. An error frame inside a stream is raised as
  `UpstreamKind.ERROR_FRAME`; an end without a finish reason as READ, or as EMPTY without any content.
- Leaving the context before the end closes the connection to the provider at once, also when the task is cancelled.
- `connect_seconds` is its only deadline; the attempt measures silence between frames.
- It does not retry.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from gateway.apis.openai.frames import Endpoint, Frame
from gateway.apis.openai.generation_request import AnyRequest
from inference.protocol import Restored


@dataclass(slots=True)  # not frozen, because a frozen dataclass is slower to create
class Call:
    """One attempt at one provider. Treat it as immutable, except `response_headers` and `restored`.

    `body` is the decoded request; providers copy what they change. `model` is the provider's name of the model.
    `headers` are extra headers of the request: the trace and, for the inference service, priority, tenant, deadline and
    others. The provider fills `response_headers` (the device of the model) and `restored` (prompt tokens that were not
    computed).
    """

    endpoint: Endpoint
    model: str
    body: AnyRequest
    request_id: str
    connect_seconds: float = 5.0
    headers: Mapping[str, str] = field(default_factory=dict)
    response_headers: dict[str, str] = field(default_factory=dict)
    restored: list[Restored] = field(default_factory=list)


class Provider(Protocol):
    """The inference service or a cloud."""

    name: str

    def unsupported_params(self, endpoint: Endpoint, body: AnyRequest, model: str) -> Mapping[str, str]:
        """Why this provider cannot serve a valid `body`, by parameter; empty if it can.

        Makes no call to the provider. `stream` and `unary` reject the same requests.
        """
        ...

    def stream(self, call: Call) -> AbstractAsyncContextManager[AsyncIterator[Frame]]:
        """Opens `call` (chat or completions) as a stream, also if the client requested none.

        Entering raises UpstreamError if the stream could not be opened or the status is an error.
        """
        ...

    async def unary(self, call: Call) -> bytes:
        """The JSON bytes that answer a call without a stream (embeddings, reranking); raises UpstreamError."""
        ...

    async def aclose(self) -> None:
        """Closes every connection."""
        ...


@runtime_checkable
class CountsTokens(Protocol):
    """A provider that can also count the tokens of a prompt."""

    async def count_tokens(self, call: Call) -> int:
        """Prompt tokens of a chat call; raises UpstreamError."""
        ...


@runtime_checkable
class AnswersWhole(Protocol):
    """A provider that can also answer chat and completions with one object."""

    async def whole(self, call: Call) -> dict[str, Any]:
        """The complete answer in OpenAI's format; raises UpstreamError."""
        ...
