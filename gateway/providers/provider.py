"""The provider seam: one call in OpenAI's dialect, one stream of frames back; decides nothing about failover.

Contract (checked by `tests/contract/test_providers.py` for every provider and its fake):
- `stream` yields frames of ONE OpenAI stream whatever the provider speaks: `Data` chunks (`chat.completion.chunk` or
  `text_completion` objects), `Comment`s, and at its very end `Done` if and only if a finish reason was seen.
- It raises UpstreamError for everything that goes wrong on the way, and nothing else but CancelledError. An error frame
  inside a stream is raised as `UpstreamKind.ERROR_FRAME`; an end without a finish reason as READ (or EMPTY without any
  content).
- Leaving the context closes the connection to the provider at once, also when the task is cancelled.
- It has no deadlines of its own but `connect_seconds`; the attempt measures silence between frames.
- It never retries.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from gateway.apis.openai.frames import Endpoint, Frame
from gateway.apis.schema.chat_request import AnyRequest


@dataclass(slots=True)  # frozen it takes a call for each field
class Call:
    """One attempt at one provider. Nobody changes its fields.

    `body` is the decoded request; providers copy it where they change it. `model` is the provider's own
    name. `headers` are extra headers for the local hop (request id, priority, tenant, deadline, probe). The provider
    fills `response_headers` (the device that computes).
    """

    endpoint: Endpoint
    model: str
    body: AnyRequest
    request_id: str
    connect_seconds: float = 5.0
    headers: Mapping[str, str] = field(default_factory=dict)
    response_headers: dict[str, str] = field(default_factory=dict)


class Provider(Protocol):
    """A place that answers: the inference service or a cloud."""

    name: str
    is_local: bool

    def unsupported_params(self, endpoint: Endpoint, body: AnyRequest, model: str) -> Mapping[str, str]:
        """Why this provider cannot honor a checked `body`, by parameter, known without asking it.

        Pure and quick; empty when an attempt is worth making. `stream` and `unary` refuse the same requests.
        """
        ...

    def stream(self, call: Call) -> AbstractAsyncContextManager[AsyncIterator[Frame]]:
        """Opens `call` (chat or completions) as a stream, whatever the caller asked for.

        Entering raises UpstreamError when no stream could be opened (status known by then).
        """
        ...

    async def unary(self, call: Call) -> bytes:
        """Answers a call that has no stream (embeddings): the response's JSON bytes. Raises UpstreamError."""
        ...

    async def aclose(self) -> None:
        """Closes every connection."""
        ...


@runtime_checkable
class CountsTokens(Protocol):
    """A provider that also tells how long a prompt is for one of its models."""

    async def count_tokens(self, call: Call) -> int:
        """Prompt tokens of a chat call; raises UpstreamError."""
        ...
