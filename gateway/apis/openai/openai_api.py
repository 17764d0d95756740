"""OpenAI's API, which is also the internal format: chunks are relayed as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.apis.lenient_json import dumps
from gateway.apis.openai.frames import EVENT_STREAM, USAGE, Comment, Data, Endpoint, Frame
from gateway.apis.openai.generation_request import InferenceRequest, parse
from gateway.errors import GatewayError
from inference.protocol import DONE, Code, error_body

_NO_USAGE = b',"usage":null'


def _without_usage(frame: Data) -> bytes:
    """The chunk without `usage`. The gateway requests usage from every tier, and some write it into each chunk."""
    payload, chunk = frame.payload, frame.chunk
    if chunk is None:
        try:
            chunk = frame.parsed()
        except ValueError:
            return payload  # malformed, which the client will see
    if chunk.get("usage") is None:
        # Quotes inside a string are escaped, so these bytes are a member of an object.
        shorter = payload.replace(_NO_USAGE, b"")
        if len(shorter) == len(payload) - len(_NO_USAGE):
            return shorter
    return dumps({name: value for name, value in chunk.items() if name != "usage"})


class OpenAIWriter:
    """Relays payloads and comments; `usage` only to clients that requested it."""

    media_type = EVENT_STREAM

    def __init__(self, include_usage: bool) -> None:
        self._include_usage = include_usage

    def write(self, frames: Sequence[Frame]) -> bytes:
        """See `gateway.apis.public_api.Writer`."""
        pieces: list[bytes] = []
        for frame in frames:
            if isinstance(frame, Data):
                if self._include_usage:
                    pieces += (b"data: ", frame.payload, b"\n\n")
                elif frame.kind is not USAGE:
                    payload = frame.payload
                    if payload.find(b'"usage"') >= 0:  # `in` is slow for bytes
                        payload = _without_usage(frame)
                    pieces += (b"data: ", payload, b"\n\n")
            elif isinstance(frame, Comment):
                pieces.append(frame.frame)
        return b"".join(pieces)

    def end(self) -> bytes:
        """See `gateway.apis.public_api.Writer`."""
        return DONE

    def end_with_error(self, code: str, message: str) -> bytes:
        """See `gateway.apis.public_api.Writer`."""
        known = Code(code) if code in frozenset(Code) else code
        return b"data: " + orjson.dumps(error_body(known, message)) + b"\n\n"


@dataclass(frozen=True, slots=True)
class _Request:
    request: InferenceRequest

    def with_request(self, request: InferenceRequest) -> _Request:
        return _Request(request)

    def writer(self) -> OpenAIWriter:
        return OpenAIWriter(self.request.include_usage)

    def whole(self, answer: dict[str, Any]) -> bytes:
        return dumps(answer)

    def unary(self, answer: bytes) -> bytes:
        return answer


@dataclass(frozen=True, slots=True)
class OpenAIApi:
    """The API of `/v1/` followed by the endpoint's name."""

    endpoint: Endpoint

    @property
    def path(self) -> str:
        """See `gateway.apis.public_api.PublicApi`."""
        return f"/v1/{self.endpoint}"

    def parse(self, raw: bytes, owner: str) -> _Request:
        """See `gateway.apis.public_api.PublicApi`."""
        return _Request(parse(self.endpoint, raw))

    def error(self, error: GatewayError) -> dict[str, Any]:
        """See `gateway.apis.public_api.PublicApi`."""
        return error.body()
