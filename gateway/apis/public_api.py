"""The interface of a public API: it translates its requests to OpenAI's format, and OpenAI streams to its answers.

Inside the gateway only OpenAI's format is used. Contract, on which `gateway.endpoints` relies:
- `PublicApi.parse` raises only RequestError, with the field name of the client's API.
- A writer gets the frames of one OpenAI stream in order. It does not raise or do I/O, and is called synchronously for
  each group of frames.
- After the frames exactly one of `end` and `end_with_error` is called. Only `end` returns the API's regular end mark.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

from gateway.apis.openai.frames import Frame
from gateway.apis.openai.generation_request import InferenceRequest
from gateway.errors import GatewayError


class Writer(Protocol):
    """Writes the streamed answer of one request."""

    @property
    def media_type(self) -> bytes:
        """The media type of the stream."""
        ...

    def write(self, frames: Sequence[Frame]) -> bytes:
        """The bytes to send for `frames`, which contain no Done; empty if this API sends nothing for them."""
        ...

    def end(self) -> bytes:
        """The last bytes of a complete answer."""
        ...

    def end_with_error(self, code: str, message: str) -> bytes:
        """The last bytes of an interrupted answer: an error in the format of this API."""
        ...


class ApiRequest(Protocol):
    """One request of a public API."""

    @property
    def request(self) -> InferenceRequest:
        """The request in OpenAI's format."""
        ...

    def with_request(self, request: InferenceRequest) -> ApiRequest:
        """The same, with another request in OpenAI's format."""
        ...

    def writer(self) -> Writer:
        """A writer for a streamed answer."""
        ...

    def whole(self, answer: dict[str, Any]) -> bytes:
        """The body of a response without a stream. `answer`: OpenAI's `chat.completion` or `text_completion` object."""
        ...

    def unary(self, answer: bytes) -> bytes:
        """The body of a response of an endpoint without streams. `answer`: JSON of the object in OpenAI's format."""
        ...


class PublicApi(Protocol):
    """The API of one public path."""

    @property
    def path(self) -> str:
        """The path of POST requests."""
        ...

    def parse(self, raw: bytes, owner: str) -> ApiRequest | Awaitable[ApiRequest]:
        """The request in `raw`; raises RequestError. Stored data is available to `owner` (digest of the key) only.

        The result is an awaitable if the request refers to stored data that other gateways may have; it fetches them.
        """
        ...

    def error(self, error: GatewayError) -> dict[str, Any]:
        """The body for `error` in the format of this API."""
        ...
