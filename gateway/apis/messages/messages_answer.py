"""Translates an answer, its stop reason and its usage from OpenAI's to Anthropic's format.

For clients of the Messages API, `gateway.providers.anthropic.anthropic_events` adds fields that OpenAI's format lacks:
`thinking_blocks`, `native_finish_reason`, `stop_details`, and `native` in the usage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from gateway.apis.lenient_json import arguments, count, dumps, is_complete, mapping, objects, text
from gateway.apis.messages.messages_errors import frame_error
from gateway.apis.openai.frames import EVENT_STREAM, Data, Frame

UNSIGNED = "headgate"
"""The placeholder signature of thinking from other providers. Clients require one and send it back; such thinking is
not sent to Anthropic."""

STOP_REASONS: Mapping[str, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
"""OpenAI's `finish_reason` as Anthropic's `stop_reason`; others become `end_turn`."""

_NO_USAGE: Mapping[str, Any] = {
    "input_tokens": 0,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 0,
    "output_tokens": 0,
}


def message_id(id: Any) -> str:
    """An id in Anthropic's style; the original id if the answer came from Anthropic."""
    own = str(id or "").removeprefix("chatcmpl-")
    return own if own.startswith("msg_") else f"msg_{own}"


def anthropic_usage(usage: Any) -> dict[str, Any]:
    """Anthropic's counts for OpenAI's usage object; zeros for missing counts.

    `input_tokens` excludes prompt tokens that were read from or written to a cache. `output_tokens` includes reasoning:
    some providers leave hidden reasoning out of `completion_tokens` but not of `total_tokens`.
    """
    if not isinstance(usage, Mapping):
        return dict(_NO_USAGE)
    details = usage.get("prompt_tokens_details")
    prompt, completion = count(usage, "prompt_tokens"), count(usage, "completion_tokens")
    read, written = count(details, "cached_tokens"), count(details, "cache_write_tokens")
    counts: dict[str, Any] = {
        "input_tokens": max(0, prompt - read - written),
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": read,
        "output_tokens": max(completion, count(usage, "total_tokens") - prompt),
    }
    if thought := count(usage.get("completion_tokens_details"), "reasoning_tokens"):
        counts["output_tokens_details"] = {"thinking_tokens": thought}
    return counts


def whole_usage(usage: Any) -> dict[str, Any]:
    """Anthropic's usage object, with further fields of Anthropic (`cache_creation`, `service_tier`)."""
    native = mapping(usage, "native") if isinstance(usage, Mapping) else {}
    return {**native, **anthropic_usage(usage)}


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of an answer in the request: stop sequences and `max_tokens`."""

    stops: Sequence[str] = ()
    max_tokens: int | None = None


def stop_of(
    choice: Mapping[str, Any], bounds: Bounds, *, output_tokens: int, has_calls: bool, refusal: str = ""
) -> dict[str, Any]:
    """`stop_reason`, `stop_sequence` and `stop_details` of a finished choice.

    `tool_use` needs a tool call. A provider that met a stop sequence names it in the choice's `stop_reason`. If an
    answer ended by length and has fewer than `max_tokens` tokens, it has filled the context.
    """
    reason = STOP_REASONS.get(str(choice.get("finish_reason")), "end_turn")
    sequence = choice.get("stop_reason")
    if reason == "tool_use" and not has_calls:
        reason = "end_turn"  # a call without a name does not count
    if reason == "end_turn" and has_calls:
        reason = "tool_use"  # some providers end a forced call with `stop`
    if reason == "end_turn" and refusal:
        reason = "refusal"  # OpenAI's API ends a refusal by the model with `stop`
    if reason == "end_turn" and isinstance(sequence, str) and sequence in bounds.stops:
        reason = "stop_sequence"
    else:
        sequence = None
    if reason == "max_tokens" and 0 < output_tokens < (bounds.max_tokens or 0):
        reason = "model_context_window_exceeded"
    if isinstance(native := choice.get("native_finish_reason"), str):
        reason = native
    details = choice.get("stop_details")
    if details is None and reason == "refusal":
        details = {"type": "refusal", "category": None, "explanation": refusal or None}
    return {
        "stop_reason": reason,
        "stop_sequence": sequence,
        **({"stop_details": details} if details is not None else {}),
    }


def call_id(given: Any, answer: str, position: int) -> str:
    """The id of a tool call; derived from the answer's id if the provider sent none."""
    return given if isinstance(given, str) and given else f"toolu_{answer.removeprefix('msg_')}_{position}"


def whole(answer: Mapping[str, Any], bounds: Bounds, names: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """The message for a `chat.completion` object. `names`: original tool names by shortened ones."""
    id = message_id(answer.get("id"))
    choice = answer["choices"][0]
    message = choice["message"]
    calls = [
        {
            "type": "tool_use",
            "id": call_id(call.get("id"), id, position),
            "name": names.get(call["function"]["name"], call["function"]["name"]),
            "input": arguments(call["function"]["arguments"]),
        }
        for position, call in enumerate(message.get("tool_calls") or ())
        if call["function"]["name"]
    ]
    refusal = message.get("refusal") or ""
    text = (message.get("content") or "") + refusal
    usage = whole_usage(answer.get("usage"))
    return {
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": answer.get("model"),
        "content": [*_thoughts(message), *([{"type": "text", "text": text}] if text else []), *calls],
        **stop_of(choice, bounds, output_tokens=usage["output_tokens"], has_calls=bool(calls), refusal=refusal),
        "usage": usage,
    }


def _thoughts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The thinking: Anthropic's signed blocks, or one block of text from another provider."""
    if signed := message.get("thinking_blocks"):
        return list(signed)
    text = message.get("reasoning_content") or message.get("reasoning")
    return [{"type": "thinking", "thinking": text, "signature": UNSIGNED}] if text else []


# --- streamed answers -------------------------------------------------------------------------------------------------
PING = b'event: ping\ndata: {"type":"ping"}\n\n'

_DELTA = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":%b}}\n\n'
)
_TEXT = (b"text_delta", b"text")
_THINKING = (b"thinking_delta", b"thinking")
_SIGNATURE = (b"signature_delta", b"signature")
_INPUT = (b"input_json_delta", b"partial_json")
"""The type of a delta, and the field that holds its text."""


def _event(name: str, payload: Mapping[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), dumps({"type": name, **payload}))


@dataclass(slots=True)
class _Call:
    """A tool call that is being streamed. Its block begins when the name is known."""

    id: Any = None
    pieces: list[str] = field(default_factory=list)
    index: int | None = None
    is_open: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether the arguments are complete JSON, so that the block can end before the answer."""
        return is_complete("".join(self.pieces))


class MessageEvents:
    """The writer of one stream; see `gateway.apis.public_api.Writer`. `names`: original tool names by short ones.

    The order is message_start, the blocks one after the other (each with start, deltas and stop; a tool call may stay
    open while the next block begins), message_delta with the stop reason and the usage, message_stop. Comments become
    pings.
    """

    media_type = EVENT_STREAM

    def __init__(self, bounds: Bounds, names: Mapping[str, str] = MappingProxyType({})) -> None:
        self._bounds = bounds
        self._names = names
        self._id = ""
        self._model: Any = None
        self._blocks = 0
        self._open: tuple[str, int] | None = None
        """Kind and index of the open text or thinking block."""
        self._calls: dict[int, _Call] = {}
        self._refusal: list[str] = []
        self._finished: Mapping[str, Any] = {}
        self._usage: Any = None

    def write(self, frames: Sequence[Frame]) -> bytes:
        """The events for `frames`."""
        out: list[bytes] = []
        for frame in frames:
            if isinstance(frame, Data):
                self._chunk(frame.parsed(), out)
            else:
                out.append(PING)
        return b"".join(out)

    def end(self) -> bytes:
        """The last events of a complete answer."""
        out: list[bytes] = []
        self._start({}, out)
        self._close_all(out)
        usage = anthropic_usage(self._usage)
        stop = stop_of(
            self._finished,
            self._bounds,
            output_tokens=usage["output_tokens"],
            has_calls=any(call.index is not None for call in self._calls.values()),
            refusal="".join(self._refusal),
        )
        out.append(_event("message_delta", {"delta": stop, "usage": usage}))
        out.append(_event("message_stop", {}))
        return b"".join(out)

    def end_with_error(self, code: str, message: str) -> bytes:
        """The error event of an interrupted answer, without message_stop."""
        return b"event: error\ndata: %b\n\n" % dumps(frame_error(code, message))

    # --- one chunk ----------------------------------------------------------------------------------------------------
    def _chunk(self, chunk: Mapping[str, Any], out: list[bytes]) -> None:
        if chunk.get("usage") is not None:
            self._usage = chunk["usage"]
        choices = objects(chunk, "choices")
        if choices or chunk.get("id"):  # Azure's first chunk has a content rating and no id
            self._start(chunk, out)
        for choice in choices:
            self._delta(mapping(choice, "delta"), out)
            if choice.get("finish_reason") is not None:
                self._finished = choice

    def _start(self, chunk: Mapping[str, Any], out: list[bytes]) -> None:
        if self._id:
            return
        self._id = message_id(chunk.get("id"))
        message: dict[str, Any] = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": chunk.get("model") or "",
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": whole_usage(self._usage),
        }
        out.append(_event("message_start", {"message": message}))

    def _delta(self, delta: Mapping[str, Any], out: list[bytes]) -> None:
        if thought := text(delta, "reasoning_content") or text(delta, "reasoning"):
            self._say("thinking", _THINKING, thought, out)
        for block in objects(delta, "thinking_blocks"):
            self._signed(block, out)
        if content_text := text(delta, "content"):
            self._say("text", _TEXT, content_text, out)
        if refusal := text(delta, "refusal"):
            self._refusal.append(refusal)
            self._say("text", _TEXT, refusal, out)
        for call in objects(delta, "tool_calls"):
            self._call(call, out)

    def _say(self, kind: str, delta: tuple[bytes, bytes], content_text: str, out: list[bytes]) -> None:
        if self._open is None or self._open[0] != kind:
            self._close(out)
            empty = {"thinking": "", "signature": ""} if kind == "thinking" else {"text": ""}
            self._open = kind, self._begin({"type": kind, **empty}, out)
        out.append(_DELTA % (self._open[1], *delta, dumps(content_text)))

    def _signed(self, block: Mapping[str, Any], out: list[bytes]) -> None:
        """Ends a thinking block with its signature, or emits a redacted one."""
        if block.get("type") != "thinking":
            self._close(out)
            out.append(_event("content_block_stop", {"index": self._begin(block, out)}))
            return
        if self._open is None or self._open[0] != "thinking":
            self._close(out)
            self._open = "thinking", self._begin({"type": "thinking", "thinking": "", "signature": ""}, out)
        self._close(out, block.get("signature"))

    def _call(self, piece: Mapping[str, Any], out: list[bytes]) -> None:
        position = piece.get("index", 0)
        function = mapping(piece, "function")
        call, name, content_text = self._calls.get(position), text(function, "name"), text(function, "arguments")
        if call is None:
            call = self._calls[position] = _Call()
        if call.index is None:  # some providers send the name after the id
            call.id = piece.get("id") or call.id
            if not name:
                call.pieces.append(content_text)
                return
            self._close(out)
            id = call_id(call.id, self._id, position)
            block: dict[str, Any] = {"type": "tool_use", "id": id, "name": self._names.get(name, name), "input": {}}
            call.index, call.is_open = self._begin(block, out), True
            content_text, call.pieces = "".join(call.pieces) + content_text, []
        if content_text and call.is_open:
            call.pieces.append(content_text)
            out.append(_DELTA % (call.index, *_INPUT, dumps(content_text)))

    # --- blocks -------------------------------------------------------------------------------------------------------
    def _begin(self, block: Mapping[str, Any], out: list[bytes]) -> int:
        index, self._blocks = self._blocks, self._blocks + 1
        out.append(_event("content_block_start", {"index": index, "content_block": block}))
        return index

    def _close(self, out: list[bytes], signature: str | None = None) -> None:
        """Ends the open blocks before another begins. A call with incomplete arguments stays open."""
        if self._open is not None:
            kind, index = self._open
            self._open = None
            if kind == "thinking":
                out.append(_DELTA % (index, *_SIGNATURE, dumps(signature or UNSIGNED)))
            out.append(_event("content_block_stop", {"index": index}))
        for call in self._calls.values():
            if call.is_open and call.is_complete:
                self._stop(call, out)

    def _close_all(self, out: list[bytes]) -> None:
        self._close(out)
        for call in self._calls.values():
            if call.is_open:
                self._stop(call, out)

    def _stop(self, call: _Call, out: list[bytes]) -> None:
        call.is_open = False
        out.append(_event("content_block_stop", {"index": call.index}))
