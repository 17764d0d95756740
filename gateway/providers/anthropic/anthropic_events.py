"""Translates the events of an Anthropic message stream into OpenAI chunks (pure).

All chunks have the same id, `created` and model. The first chunk has the role, the last one the usage; `Done` follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import orjson

from gateway.apis.openai.frames import Comment, Data, DeltaKind, Done, Frame
from gateway.errors import UpstreamError, UpstreamKind
from gateway.providers.provider_errors import error_in, frame_error
from headgate.shared.sse import SseFrame

FINISH_REASONS: Mapping[str, str] = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "pause_turn": "length",  # the turn is not over; the client may continue it
    "refusal": "content_filter",
}
"""Anthropic's `stop_reason` as OpenAI's `finish_reason`; others become `stop`."""

PING = b": ping\n\n"

EVENTS = frozenset((
    "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
    "message_stop", "ping", "error",
))  # fmt: skip
"""The events that are read; others are ignored."""


@dataclass(slots=True)
class _Tool:
    """A tool call that is being streamed. `input` is the complete input if the provider sent it at once."""

    position: int
    input: str
    has_arguments: bool = False


class AnthropicStream:
    """The reader of one stream, see `gateway.providers.cloud_stream.EventReader`.

    `created` is seconds since the epoch. `native`: the client uses the Messages API, so the chunks also have fields
    that OpenAI's API lacks (see `gateway.apis.messages.messages_answer`).
    """

    def __init__(self, created: int, secrets: tuple[str, ...] = (), *, native: bool = False) -> None:
        self.is_complete = False
        self.is_finished = False
        self._created = created
        self._secrets = secrets
        self._native = native
        self._id = ""
        self._model = ""
        self._tools: dict[int, _Tool] = {}
        self._usage: dict[str, Any] = {}
        """The counts as last reported."""
        self._has_content = False

    def feed(self, frame: SseFrame) -> list[Frame]:
        """The chunks that `frame` adds; raises UpstreamError for an error event or a malformed stream."""
        if frame.comment is not None:
            return [Comment(frame.comment)]
        if frame.data is None or self.is_complete:
            return []
        try:
            event = orjson.loads(frame.data)
        except orjson.JSONDecodeError:
            raise _malformed("an event that is not JSON") from None
        if not isinstance(event, dict):
            raise _malformed("an event that is not an object")
        kind = str(event.get("type"))
        if kind not in EVENTS:
            return []  # the API may add event types, and clients must ignore unknown ones
        match kind:
            case "message_start":
                return self._start(event)
            case "ping":
                return [Comment(PING)]
            case "error":
                raise frame_error(error_in(event) or {}, secrets=self._secrets)
        if not self._id:
            raise _malformed(f"{kind} before message_start")
        match kind:
            case "content_block_start":
                return self._block_start(event)
            case "content_block_delta":
                return self._block_delta(event)
            case "content_block_stop":
                return self._block_stop(event)
            case "message_delta":
                return self._message_delta(event)
        self.is_complete = True
        return []

    def end(self) -> list[Frame]:
        """The last frames after the end of the bytes: usage if it was reported, and `Done`.

        Raises UpstreamError if the stream had no stop reason: READ if it had content, EMPTY otherwise.
        """
        if not self.is_finished:
            if self._has_content:
                raise UpstreamError(UpstreamKind.READ, "the stream ended before its stop reason")
            raise UpstreamError(UpstreamKind.EMPTY, "the stream ended with no content and no stop reason")
        usage = self._reported_usage()
        if usage is None:
            return [Done()]
        return [Data(self._chunk(usage=usage), DeltaKind.USAGE), Done()]

    def _reported_usage(self) -> dict[str, Any] | None:
        """The usage to report; for clients of the Messages API with the counts that OpenAI's API lacks."""
        counts = openai_usage(self._usage)
        if counts is None or not self._native:
            return counts
        return {**counts, "native": {name: count for name, count in self._usage.items() if name not in _TRANSLATED}}

    def _note_usage(self, holder: Mapping[str, Any]) -> None:
        """Keeps the counts of `holder`. Counts are cumulative, so a later one replaces an earlier one."""
        later = holder.get("usage")
        if isinstance(later, Mapping):
            self._usage |= {name: value for name, value in later.items() if value is not None}

    # --- events -------------------------------------------------------------------------------------------------------
    def _start(self, event: Mapping[str, Any]) -> list[Frame]:
        message = event.get("message")
        if not isinstance(message, Mapping) or not isinstance(message.get("id"), str):
            raise _malformed("message_start without a message")
        if self._id:
            raise _malformed("a second message_start")
        self._id, self._model = f"chatcmpl-{message['id']}", str(message.get("model", ""))
        self._note_usage(message)
        usage = self._reported_usage() if self._native else None
        return [Data(self._chunk({"role": "assistant", "content": ""}, usage=usage), DeltaKind.OTHER)]

    def _block_start(self, event: Mapping[str, Any]) -> list[Frame]:
        index, block = event.get("index"), event.get("content_block")
        if not isinstance(block, Mapping) or not isinstance(index, int):
            raise _malformed("content_block_start without a block")
        match block.get("type"):
            case "text":
                return self._text("content", block.get("text"))
            case "thinking":
                return self._text("reasoning_content", block.get("thinking"))
            case "tool_use":
                given = block.get("input")
                tool = _Tool(len(self._tools), orjson.dumps(given if isinstance(given, dict) else {}).decode())
                self._tools[index] = tool
                function = {"name": str(block.get("name", "")), "arguments": ""}
                call = {
                    "index": tool.position,
                    "id": str(block.get("id", "")),
                    "type": "function",
                    "function": function,
                }
                return self._content({"tool_calls": [call]})
            case "redacted_thinking":
                return self._thought(block)
        return []  # results of tools that run at the provider

    def _block_delta(self, event: Mapping[str, Any]) -> list[Frame]:
        delta = event.get("delta")
        if not isinstance(delta, Mapping):
            raise _malformed("content_block_delta without a delta")
        match delta.get("type"):
            case "text_delta":
                return self._text("content", delta.get("text"))
            case "thinking_delta":
                return self._text("reasoning_content", delta.get("thinking"))
            case "input_json_delta":
                return self._arguments(event.get("index"), delta.get("partial_json"))
            case "signature_delta":
                return self._thought({"type": "thinking", "signature": delta.get("signature")})
        return []  # OpenAI's API has no citations

    def _block_stop(self, event: Mapping[str, Any]) -> list[Frame]:
        """Emits the input of a call that was not streamed; OpenAI's arguments are never empty text."""
        index = event.get("index")
        tool = self._tools.get(index) if isinstance(index, int) else None
        return [] if tool is None or tool.has_arguments else self._call_piece(tool, tool.input)

    def _message_delta(self, event: Mapping[str, Any]) -> list[Frame]:
        self._note_usage(event)
        delta = event.get("delta")
        if not isinstance(delta, Mapping) or (reason := delta.get("stop_reason")) is None or self.is_finished:
            return []
        frames: list[Frame] = []
        details = delta.get("stop_details")
        extra: dict[str, Any] = {}
        if isinstance(delta.get("stop_sequence"), str):
            extra["stop_reason"] = delta["stop_sequence"]
        if self._native:
            extra["native_finish_reason"] = str(reason)
            extra |= {"stop_details": details} if isinstance(details, Mapping) else {}
        elif reason == "refusal" and isinstance(details, Mapping) and isinstance(details.get("explanation"), str):
            frames += self._text("refusal", details["explanation"])
        self.is_finished = True
        chunk = self._chunk({}, FINISH_REASONS.get(str(reason), "stop"), extra=extra)
        return [*frames, Data(chunk, DeltaKind.FINISH)]

    # --- chunks -------------------------------------------------------------------------------------------------------
    def _text(self, field: str, text: Any) -> list[Frame]:
        if not isinstance(text, str):
            raise _malformed(f"a {field} delta without text")
        return self._content({field: text}) if text else []

    def _thought(self, block: Mapping[str, Any]) -> list[Frame]:
        """Redacted thinking, or the signature of visible thinking. Clients of the Messages API send them back."""
        return self._content({"thinking_blocks": [block]}) if self._native else []

    def _arguments(self, index: Any, piece: Any) -> list[Frame]:
        if not isinstance(piece, str) or not isinstance(index, int):
            raise _malformed("input_json_delta without its text or index")
        tool = self._tools.get(index)
        return self._call_piece(tool, piece) if tool is not None and piece else []  # else a tool of the provider

    def _call_piece(self, tool: _Tool, piece: str) -> list[Frame]:
        tool.has_arguments = True
        return self._content({"tool_calls": [{"index": tool.position, "function": {"arguments": piece}}]})

    def _content(self, delta: Mapping[str, Any]) -> list[Frame]:
        self._has_content = True
        return [Data(self._chunk(delta), DeltaKind.CONTENT)]

    def _chunk(
        self,
        delta: Mapping[str, Any] | None = None,
        finish: str | None = None,
        usage: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] = MappingProxyType({}),
    ) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, **extra}
        chunk = {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
            "choices": [] if delta is None else [choice],
        }
        return orjson.dumps(chunk if usage is None else {**chunk, "usage": usage})


def openai_usage(usage: Mapping[str, Any]) -> dict[str, Any] | None:
    """OpenAI's usage object for Anthropic's counts; None when they are missing or invalid.

    Anthropic counts cached prompt tokens beside `input_tokens`, OpenAI within `prompt_tokens`.
    """
    uncached, completion = _count(usage, "input_tokens"), _count(usage, "output_tokens")
    if uncached is None or completion is None:
        return None
    read = _count(usage, "cache_read_input_tokens") or 0
    written = _count(usage, "cache_creation_input_tokens") or 0
    prompt = uncached + read + written
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": read, "cache_write_tokens": written},
    }
    details = usage.get("output_tokens_details")
    if isinstance(details, Mapping) and (thinking := _count(details, "thinking_tokens")) is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": thinking}
    return counts


_TRANSLATED = frozenset((
    "input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens", "output_tokens_details",
))  # fmt: skip
"""Counts that `openai_usage` translates."""


def _count(usage: Mapping[str, Any], name: str) -> int | None:
    value = usage.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _malformed(what: str) -> UpstreamError:
    return UpstreamError(UpstreamKind.MALFORMED, f"the provider sent {what}")
