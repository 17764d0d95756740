"""Translates the events of an Anthropic message stream into OpenAI chunks (pure).

`step(state, frame) -> (state, frames)` for each server-sent event, then `end(state) -> frames` when the bytes end. All
chunks have the same id, `created` and model. The first chunk has the role, the last one the usage; `Done` follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool call that is being streamed. `input` is the complete input if the provider sent it at once."""

    position: int
    input: bytes
    has_arguments: bool = False


@dataclass(frozen=True, slots=True)
class AnthropicStream:
    """A stream so far. `created` is seconds since the epoch. `usage` holds the counts as last reported.

    `complete`: `message_stop` was seen, and nothing more needs to be read. `native`: the client uses the Messages API,
    so the chunks also carry fields that OpenAI's API lacks (see `gateway.apis.messages.messages_answer`).
    """

    created: int
    secrets: tuple[str, ...] = ()
    id: str = ""
    model: str = ""
    tools: Mapping[int, Tool] | None = None
    usage: Mapping[str, Any] | None = None
    has_content: bool = False
    finished: bool = False
    complete: bool = False
    native: bool = False


Step = tuple[AnthropicStream, tuple[Frame, ...]]


def step(state: AnthropicStream, frame: SseFrame) -> Step:
    """The chunks that `frame` adds; raises UpstreamError for an error event or a malformed stream."""
    if frame.is_comment:
        return state, (Comment(frame.raw),)
    if frame.data is None or state.complete:
        return state, ()
    try:
        event = orjson.loads(frame.data)
    except orjson.JSONDecodeError:
        raise _malformed("an event that is not JSON") from None
    if not isinstance(event, dict):
        raise _malformed("an event that is not an object")
    handler = _EVENTS.get(str(event.get("type")))
    if handler is None:
        return state, ()  # the API may add event types, and clients must ignore unknown ones
    if not state.id and handler not in (_start, _ping, _error):
        raise _malformed(f"{event['type']} before message_start")
    return handler(state, event)


def end(state: AnthropicStream) -> tuple[Frame, ...]:
    """The last frames after the end of the bytes: usage if it was reported, and `Done`.

    Raises UpstreamError: READ if the stream was cut before its stop reason, EMPTY if it had no content.
    """
    if not state.finished:
        if state.has_content:
            raise UpstreamError(UpstreamKind.READ, "the stream ended before its stop reason")
        raise UpstreamError(UpstreamKind.EMPTY, "the stream ended with no content and no stop reason")
    usage = _usage(state)
    if usage is None:
        return (Done(),)
    return Data(_chunk(state, usage=usage), DeltaKind.USAGE), Done()


def is_complete(state: AnthropicStream) -> bool:
    """Whether message_stop was seen."""
    return state.complete


def is_finished(state: AnthropicStream) -> bool:
    """Whether the stop reason was seen."""
    return state.finished


def openai_usage(usage: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """OpenAI's usage object for Anthropic's counts; None when they are missing or invalid.

    Anthropic counts cached prompt tokens beside `input_tokens`, OpenAI within `prompt_tokens`.
    """
    if usage is None or (uncached := _count(usage, "input_tokens")) is None:
        return None
    if (completion := _count(usage, "output_tokens")) is None:
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


def _usage(state: AnthropicStream) -> dict[str, Any] | None:
    """The usage to report; for clients of the Messages API with the counts that OpenAI's API lacks."""
    counts = openai_usage(state.usage)
    if counts is None or state.usage is None or not state.native:
        return counts
    return {**counts, "native": {name: count for name, count in state.usage.items() if name not in _TRANSLATED}}


def _count(usage: Mapping[str, Any], name: str) -> int | None:
    value = usage.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


# --- events -----------------------------------------------------------------------------------------------------------
def _start(state: AnthropicStream, event: Mapping[str, Any]) -> Step:
    message = event.get("message")
    if not isinstance(message, Mapping) or not isinstance(message.get("id"), str):
        raise _malformed("message_start without a message")
    if state.id:
        raise _malformed("a second message_start")
    state = replace(
        state, id=f"chatcmpl-{message['id']}", model=str(message.get("model", "")), usage=_merged({}, message)
    )
    usage = _usage(state) if state.native else None
    return state, (Data(_chunk(state, {"role": "assistant", "content": ""}, usage=usage), DeltaKind.OTHER),)


def _block_start(state: AnthropicStream, event: Mapping[str, Any]) -> Step:
    index, block = event.get("index"), event.get("content_block")
    if not isinstance(block, Mapping) or not isinstance(index, int):
        raise _malformed("content_block_start without a block")
    match block.get("type"):
        case "text":
            return _text_delta(state, "content", block.get("text"))
        case "thinking":
            return _text_delta(state, "reasoning_content", block.get("thinking"))
        case "tool_use":
            tools = state.tools or {}
            given = block.get("input")
            tool = Tool(len(tools), orjson.dumps(given if isinstance(given, dict) else {}))
            state = replace(state, tools={**tools, index: tool}, has_content=True)
            function = {"name": str(block.get("name", "")), "arguments": ""}
            call = {"index": tool.position, "id": str(block.get("id", "")), "type": "function", "function": function}
            return state, (Data(_chunk(state, {"tool_calls": [call]}), DeltaKind.CONTENT),)
        case "redacted_thinking":
            return _thought(state, block)
    return state, ()  # results of tools that run at the provider


def _block_delta(state: AnthropicStream, event: Mapping[str, Any]) -> Step:
    delta = event.get("delta")
    if not isinstance(delta, Mapping):
        raise _malformed("content_block_delta without a delta")
    match delta.get("type"):
        case "text_delta":
            return _text_delta(state, "content", delta.get("text"))
        case "thinking_delta":
            return _text_delta(state, "reasoning_content", delta.get("thinking"))
        case "input_json_delta":
            return _arguments(state, event.get("index"), delta.get("partial_json"))
        case "signature_delta":
            return _thought(state, {"type": "thinking", "signature": delta.get("signature")})
    return state, ()  # OpenAI's API has no citations


def _thought(state: AnthropicStream, block: Mapping[str, Any]) -> Step:
    """Redacted thinking, or the signature of visible thinking. Clients of the Messages API send them back."""
    if not state.native:
        return state, ()
    state = replace(state, has_content=True)
    return state, (Data(_chunk(state, {"thinking_blocks": [block]}), DeltaKind.CONTENT),)


def _arguments(state: AnthropicStream, index: Any, piece: Any) -> Step:
    if not isinstance(piece, str) or not isinstance(index, int):
        raise _malformed("input_json_delta without its text or index")
    tool = (state.tools or {}).get(index)
    if tool is None or not piece:
        return state, ()  # the input of a tool that runs at the provider
    if not tool.has_arguments:
        state = replace(state, tools={**(state.tools or {}), index: replace(tool, has_arguments=True)})
    return state, (_call_piece(state, tool, piece),)


def _block_stop(state: AnthropicStream, event: Mapping[str, Any]) -> Step:
    """Emits the input of a call that was not streamed; OpenAI's arguments are never empty text."""
    index = event.get("index")
    tool = (state.tools or {}).get(index) if isinstance(index, int) else None
    if tool is None or not isinstance(index, int) or tool.has_arguments:
        return state, ()
    state = replace(state, tools={**(state.tools or {}), index: replace(tool, has_arguments=True)})
    return state, (_call_piece(state, tool, tool.input.decode()),)


def _call_piece(state: AnthropicStream, tool: Tool, piece: str) -> Data:
    call = {"index": tool.position, "function": {"arguments": piece}}
    return Data(_chunk(state, {"tool_calls": [call]}), DeltaKind.CONTENT)


def _message_delta(state: AnthropicStream, event: Mapping[str, Any]) -> Step:
    state = replace(state, usage=_merged(state.usage or {}, event))
    delta = event.get("delta")
    reason = delta.get("stop_reason") if isinstance(delta, Mapping) else None
    if reason is None or state.finished:
        return state, ()
    frames: list[Frame] = []
    assert isinstance(delta, Mapping)
    details = delta.get("stop_details")
    extra: dict[str, Any] = {}
    if isinstance(delta.get("stop_sequence"), str):
        extra["stop_reason"] = delta["stop_sequence"]
    if state.native:
        extra["native_finish_reason"] = str(reason)
        extra |= {"stop_details": details} if isinstance(details, Mapping) else {}
    elif reason == "refusal" and isinstance(details, Mapping) and isinstance(details.get("explanation"), str):
        state, refusal = _text_delta(state, "refusal", details["explanation"])
        frames += refusal
    state = replace(state, finished=True)
    frames.append(Data(_chunk(state, {}, FINISH_REASONS.get(str(reason), "stop"), extra=extra), DeltaKind.FINISH))
    return state, tuple(frames)


def _stop(state: AnthropicStream, event: Mapping[str, Any]) -> Step:
    return replace(state, complete=True), ()


def _ping(state: AnthropicStream, event: Mapping[str, Any]) -> Step:
    return state, (Comment(PING),)


def _error(state: AnthropicStream, event: Mapping[str, Any]) -> Step:
    raise frame_error(error_in(event) or {}, secrets=state.secrets)


_EVENTS: Mapping[str, Callable[[AnthropicStream, Mapping[str, Any]], Step]] = {
    "message_start": _start,
    "content_block_start": _block_start,
    "content_block_delta": _block_delta,
    "content_block_stop": _block_stop,
    "message_delta": _message_delta,
    "message_stop": _stop,
    "ping": _ping,
    "error": _error,
}


# --- chunks -----------------------------------------------------------------------------------------------------------
def _text_delta(state: AnthropicStream, field: str, text: Any) -> Step:
    if not isinstance(text, str):
        raise _malformed(f"a {field} delta without text")
    if not text:
        return state, ()
    if not state.has_content:
        state = replace(state, has_content=True)
    return state, (Data(_chunk(state, {field: text}), DeltaKind.CONTENT),)


def _chunk(
    state: AnthropicStream,
    delta: Mapping[str, Any] | None = None,
    finish: str | None = None,
    usage: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] = MappingProxyType({}),
) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, **extra}
    chunk = {
        "id": state.id,
        "object": "chat.completion.chunk",
        "created": state.created,
        "model": state.model,
        "choices": [] if delta is None else [choice],
    }
    return orjson.dumps(chunk if usage is None else {**chunk, "usage": usage})


def _merged(usage: Mapping[str, Any], holder: Mapping[str, Any]) -> dict[str, Any]:
    """`usage` with the later counts of `holder`. Counts are cumulative, so a later one replaces an earlier one."""
    later = holder.get("usage")
    if not isinstance(later, Mapping):
        return dict(usage)
    return {**usage, **{name: value for name, value in later.items() if value is not None}}


def _malformed(what: str) -> UpstreamError:
    return UpstreamError(UpstreamKind.MALFORMED, f"the provider sent {what}")
