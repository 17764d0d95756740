"""Translates an answer, its stop reason and its usage from OpenAI's to Anthropic's format.

For clients of the Messages API, `gateway.providers.anthropic.anthropic_events` adds fields that OpenAI's format lacks:
`thinking_blocks`, `native_finish_reason`, `stop_details`, and `native` in the usage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from gateway.apis.lenient_json import mapping
from gateway.apis.tool_names import arguments

UNSIGNED = "headgate"
"""The placeholder signature of thinking from other tiers. Clients require one and send it back; such thinking is not
sent to Anthropic."""

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
    some tiers leave hidden reasoning out of `completion_tokens` but not of `total_tokens`.
    """
    if not isinstance(usage, Mapping):
        return dict(_NO_USAGE)
    details = usage.get("prompt_tokens_details")
    prompt, completion = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
    read, written = _count(details, "cached_tokens"), _count(details, "cache_write_tokens")
    counts: dict[str, Any] = {
        "input_tokens": max(0, prompt - read - written),
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": read,
        "output_tokens": max(completion, _count(usage, "total_tokens") - prompt),
    }
    if thought := _count(usage.get("completion_tokens_details"), "reasoning_tokens"):
        counts["output_tokens_details"] = {"thinking_tokens": thought}
    return counts


def whole_usage(usage: Any) -> dict[str, Any]:
    """Anthropic's usage object, with further fields of an Anthropic tier (`cache_creation`, `service_tier`)."""
    native = mapping(usage, "native") if isinstance(usage, Mapping) else {}
    return {**native, **anthropic_usage(usage)}


def _count(holder: Any, name: str) -> int:
    value = holder.get(name) if isinstance(holder, Mapping) else None
    return value if isinstance(value, int) and value > 0 else 0


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of an answer in the request: stop sequences and `max_tokens`."""

    stops: Sequence[str] = ()
    max_tokens: int | None = None


def stop_of(
    choice: Mapping[str, Any], bounds: Bounds, *, output_tokens: int, has_calls: bool, refusal: str = ""
) -> dict[str, Any]:
    """`stop_reason`, `stop_sequence` and `stop_details` of a finished choice.

    `tool_use` needs a tool call. A tier that met a stop sequence names it in `stop_reason`. An answer that ended by
    length before `max_tokens` filled the context.
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
    """The id of a tool call; derived from the answer's id if the tier sent none."""
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
    """The thinking: Anthropic's signed blocks, or one block of text from another tier."""
    if signed := message.get("thinking_blocks"):
        return list(signed)
    text = message.get("reasoning_content") or message.get("reasoning")
    return [{"type": "thinking", "thinking": text, "signature": UNSIGNED}] if text else []
