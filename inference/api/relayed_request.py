"""The parts of a request that the relay reads: headers and some fields of the body. Workers decode the whole body."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw

from headgate.shared.asgi import Headers
from headgate.shared.kv_hint import parse_kv_hint
from headgate.shared.traces.trace_context import TRACEPARENT
from inference.api.relay_spans import RelayTrace
from inference.errors import InvalidRequestError
from inference.estimate import cold_tokenizer
from inference.protocol import (
    H_CONVERSATION,
    H_DEADLINE,
    H_KV,
    H_PREFIX,
    H_PRIORITY,
    H_PROBE,
    H_REQUEST_ID,
    H_STREAM_INTERVAL,
    H_TENANT,
    Code,
    Priority,
    prefix_hashes,
)

_BIG_BODY_BYTES = 2**20
"""Larger bodies are parsed in a thread, so that they do not delay other streams."""
_PASSED_ON = (H_TENANT, H_KV, H_PREFIX, H_PRIORITY, H_PROBE, H_STREAM_INTERVAL, H_REQUEST_ID)
_ABSENT = Raw(b"null")
_MAX_DIGITS = 20
_MAX_KEY_CHARS = 64


class Envelope(msgspec.Struct, frozen=True):
    """The fields of a body that the service reads, each as the JSON that was sent."""

    model: Raw = _ABSENT
    stream: Raw = _ABSENT
    messages: Raw = _ABSENT
    tools: Raw = _ABSENT
    documents: Raw = _ABSENT
    max_tokens: Raw = _ABSENT
    max_completion_tokens: Raw = _ABSENT
    n: Raw = _ABSENT
    response_format: Raw = _ABSENT
    grammar: Raw = _ABSENT
    regex: Raw = _ABSENT
    json_schema: Raw = _ABSENT


_LISTS = ("messages", "tools", "documents")
_NUMBERS = ("max_tokens", "max_completion_tokens", "n")
_CONSTRAINTS = ("response_format", "grammar", "regex", "json_schema")

_envelope_of = msgspec.json.Decoder(Envelope).decode
_items = msgspec.json.Decoder(list[Raw]).decode


@dataclass(frozen=True, slots=True)
class RelayedRequest:
    """One request. `deadline_seconds` counts from `arrived_at`, which is a time of the event loop's clock."""

    path: str
    headers: Headers
    body: bytes
    envelope: Envelope
    model: str
    stream: bool
    priority: Priority
    deadline_seconds: float | None
    probe: bool
    arrived_at: float
    trace: RelayTrace | None = None

    @property
    def only_tokenizes(self) -> bool:
        """Whether a vocabulary is enough to answer it."""
        return self.path in cold_tokenizer.PATHS

    @property
    def conversation(self) -> str | None:
        """The key of its conversation, or None."""
        value = self.headers.get(H_CONVERSATION)
        return value[:_MAX_KEY_CHARS] if value else None

    def seconds_left(self, now: float) -> float | None:
        """Seconds until the deadline, at least 0; None without a deadline."""
        if self.deadline_seconds is None:
            return None
        return max(0.0, self.arrived_at + self.deadline_seconds - now)

    def worker_headers(self, now: float) -> dict[str, str]:
        """The headers of the request to a worker."""
        passed = {name: value for name in _PASSED_ON if (value := self.headers.get(name)) is not None}
        passed["content-type"] = "application/json"
        if (left := self.seconds_left(now)) is not None:
            passed[H_DEADLINE] = str(max(1, int(left * 1000)))
        if self.trace is not None and self.trace.span.is_sampled:
            passed[TRACEPARENT] = self.trace.span.traceparent
        return passed

    def shape(self) -> dict[str, Any]:
        """What crash records keep of a request; no text of it.

        Always `path`, `body_bytes` and `stream`. If the body has them, also the limits of tokens, the numbers of
        answers, messages, tools and documents, and whether the answer is constrained.
        """
        given = {name: bytes(getattr(self.envelope, name)) for name in (*_LISTS, *_NUMBERS, *_CONSTRAINTS)}
        shape: dict[str, Any] = {"path": self.path, "body_bytes": len(self.body), "stream": self.stream}
        shape |= {name: len(_items(given[name])) for name in _LISTS if given[name].startswith(b"[")}
        shape |= {
            name: int(given[name]) for name in _NUMBERS if given[name].isdigit() and len(given[name]) < _MAX_DIGITS
        }
        if any(given[name] != b"null" for name in _CONSTRAINTS):
            shape["constrained"] = True
        return shape


async def read_request(path: str, headers: Headers, body: bytes, trace: RelayTrace | None = None) -> RelayedRequest:
    """The request with this body. Raises InvalidRequestError."""
    arrived_at = asyncio.get_running_loop().time()
    envelope = await asyncio.to_thread(_envelope, body) if len(body) > _BIG_BODY_BYTES else _envelope(body)
    model, stream = _value(envelope.model), _value(envelope.stream)
    if not isinstance(model, str) or not model:
        raise InvalidRequestError("`model` must be a string, the id of a model; see /v1/models", param="model")
    if stream is not None and not isinstance(stream, bool):
        raise InvalidRequestError("`stream` must be true or false", param="stream")
    _check(headers, H_KV, parse_kv_hint)
    _check(headers, H_PREFIX, prefix_hashes)
    return RelayedRequest(
        path,
        headers,
        body,
        envelope,
        model,
        bool(stream),
        _priority(headers),
        _deadline(headers),
        headers.get(H_PROBE) == "1",
        arrived_at,
        trace,
    )


def _envelope(body: bytes) -> Envelope:
    try:
        return _envelope_of(body)
    except msgspec.ValidationError as error:
        raise InvalidRequestError('the body must be a JSON object such as {"model": ...}') from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise _invalid_json(error) from error


def _value(field: Raw) -> Any:
    try:
        return msgspec.json.decode(field)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # the envelope is not checked for UTF-8
        raise _invalid_json(error) from error


def _invalid_json(error: Exception) -> InvalidRequestError:
    return InvalidRequestError(f"the body is not valid JSON: {error}", code=Code.INVALID_JSON)


def _priority(headers: Headers) -> Priority:
    value = headers.get(H_PRIORITY)
    if value is None:
        return Priority.NORMAL
    try:
        return Priority(value.lower())
    except ValueError:
        names = ", ".join(Priority)
        raise InvalidRequestError(
            f"{H_PRIORITY} must be one of {names}, not {value[:50]!r}", param=H_PRIORITY
        ) from None


def _check(headers: Headers, name: str, parse: Callable[[str], object]) -> None:
    if (value := headers.get(name)) is None:
        return
    try:
        parse(value)
    except ValueError as error:
        raise InvalidRequestError(f"{name} {error}", param=name) from None


def _deadline(headers: Headers) -> float | None:
    value = headers.get(H_DEADLINE)
    if value is None:
        return None
    if not value.isascii() or not value.isdigit() or len(value) > 12:
        raise InvalidRequestError(
            f"{H_DEADLINE} must be a number of milliseconds, not {value[:50]!r}", param=H_DEADLINE
        )
    return int(value) / 1000
