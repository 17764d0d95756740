"""Says in Anthropic's words how an inner answer ended, what it used and what it holds; knows no stream.

What Anthropic alone knows and an inner choice cannot say travels beside it, put there by `core.anthropic_events` for
requests that came in Anthropic's dialect: `thinking_blocks`, `native_finish_reason`, `stop_details`, and in the usage
`native`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from gateway.apis.lenient_json import mapping
from gateway.apis.tool_names import arguments

UNSIGNED = "headgate"
"""The signature of thinking that Anthropic did not sign. Clients want one and send it back; it proves nothing, so such
thinking is never shown to Anthropic."""

STOP_REASONS: Mapping[str, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
"""OpenAI's `finish_reason` as Anthropic's `stop_reason`; one that is not listed here is `end_turn`."""

_NO_USAGE: Mapping[str, Any] = {
    "input_tokens": 0,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 0,
    "output_tokens": 0,
}


def message_id(id: Any) -> str:
    """An id in Anthropic's style; one that a tier of Anthropic's gave is its own again."""
    own = str(id or "").removeprefix("chatcmpl-")
    return own if own.startswith("msg_") else f"msg_{own}"


def anthropic_usage(usage: Any) -> dict[str, Any]:
    """Anthropic's counts for OpenAI's usage object; zeros where a tier reports none.

    Anthropic counts prompt tokens that were read from a cache, or written to one, beside `input_tokens`, and thoughts
    within `output_tokens`: some tiers leave hidden ones out of their `completion_tokens`, but not of the total.
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
    """Anthropic's usage object, with the other fields of its own tier (`cache_creation`, `service_tier`)."""
    native = mapping(usage, "native") if isinstance(usage, Mapping) else {}
    return {**native, **anthropic_usage(usage)}


def _count(holder: Any, name: str) -> int:
    value = holder.get(name) if isinstance(holder, Mapping) else None
    return value if isinstance(value, int) and value > 0 else 0


@dataclass(frozen=True, slots=True)
class Bounds:
    """The ends of an answer that the client requested: one of these texts, or a number of tokens."""

    stops: Sequence[str] = ()
    max_tokens: int | None = None


def stop_of(
    choice: Mapping[str, Any], bounds: Bounds, *, output_tokens: int, has_calls: bool, refusal: str = ""
) -> dict[str, Any]:
    """`stop_reason`, `stop_sequence` and `stop_details` of a finished choice.

    Without a call nothing is to be used. A tier that met one of the stop sequences names it in `stop_reason`. An answer
    that ended for its length before `max_tokens` had no more room.
    """
    reason = STOP_REASONS.get(str(choice.get("finish_reason")), "end_turn")
    sequence = choice.get("stop_reason")
    if reason == "tool_use" and not has_calls:
        reason = "end_turn"  # a call that got no name is none
    if reason == "end_turn" and has_calls:
        reason = "tool_use"  # a call that was demanded by name ends with `stop` at some providers
    if reason == "end_turn" and refusal:
        reason = "refusal"  # what a model declines by itself ends with `stop` in OpenAI's dialect
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
    """The id of a tool call; one is made of the answer's id where a tier gave none."""
    return given if isinstance(given, str) and given else f"toolu_{answer.removeprefix('msg_')}_{position}"


def whole(answer: Mapping[str, Any], bounds: Bounds, names: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """The message for a `chat.completion` object. `names` are tools' own, where the tier knew them by others."""
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
    """The thinking, as Anthropic signed it or, from any other tier, as one block of text."""
    if signed := message.get("thinking_blocks"):
        return list(signed)
    text = message.get("reasoning_content") or message.get("reasoning")
    return [{"type": "thinking", "thinking": text, "signature": UNSIGNED}] if text else []
