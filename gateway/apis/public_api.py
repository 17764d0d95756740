"""The seam of the public APIs: a body in, one inner request; one inner stream in, the API's bytes out; serves nothing.

Inside the gateway there is one dialect, OpenAI's: the chain, the tiers and resuming see nothing else. A public API is
what translates at both ends. Contract (what `gateway.endpoints.serve` and `gateway.endpoints.answer_stream` rely on):
- `Dialect.parse` raises RequestError and nothing else, naming the field as the caller wrote it.
- A writer gets the frames of ONE OpenAI stream in order, from any provider, in groups as they came. It raises nothing,
  does no I/O, and is called synchronously on the token path.
- After the frames exactly one of `end` and `broke` is called; what `broke` returns is never the API's true end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from gateway.apis.openai.frames import Endpoint, Frame
from gateway.apis.openai.generation_request import InferenceRequest
from gateway.errors import GatewayError


class Writer(Protocol):
    """Writes one streamed answer; made for one request."""

    def write(self, frames: Sequence[Frame]) -> bytes:
        """The bytes that `frames` (no Done among them) become; empty when the caller is not to see them."""
        ...

    def end(self) -> bytes:
        """The last bytes of a whole answer."""
        ...

    def broke(self, code: str, message: str) -> bytes:
        """The last bytes of an answer that broke off: an error that a client of this API can read."""
        ...


class Asked(Protocol):
    """One request as it was asked, and what its answer must look like."""

    @property
    def request(self) -> InferenceRequest:
        """The request in the inner dialect."""
        ...

    def writer(self) -> Writer:
        """For a streamed answer."""
        ...

    def whole(self, answer: dict[str, Any]) -> bytes:
        """The body for a whole answer, given as OpenAI's object (`chat.completion` or `text_completion`)."""
        ...


class Dialect(Protocol):
    """One public path."""

    @property
    def path(self) -> str:
        """The path that is posted to."""
        ...

    @property
    def endpoint(self) -> Endpoint:
        """What is asked of the tiers."""
        ...

    def parse(self, raw: bytes, owner: str) -> Asked:
        """The request in `raw`; raises RequestError. What is kept of it is kept for `owner`, the asking key, alone."""
        ...

    def error(self, error: GatewayError) -> dict[str, Any]:
        """The body that tells `error` to clients of this API."""
        ...
