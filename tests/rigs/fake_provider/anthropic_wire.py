"""Payloads of Anthropic's API as documented; decides neither answers nor faults."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tests.rigs.fake_provider.answers import Answer, call_id, pieces

_STOPS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
    "context": "model_context_window_exceeded",
}
SIGNATURE = "EqQBCgIYAhIkZmFrZQ=="
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
Frame = tuple[str, bytes]


def _usage(answer: Answer, prompt_tokens: int, output: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt_tokens,
        "cache_creation_input_tokens": answer.cache_write_tokens,
        "cache_read_input_tokens": answer.cached_tokens,
        "cache_creation": {"ephemeral_5m_input_tokens": answer.cache_write_tokens, "ephemeral_1h_input_tokens": 0},
        "output_tokens": output,
        "service_tier": "standard",
    }


def _stop(answer: Answer) -> dict[str, Any]:
    details = None
    if answer.stop == "content_filter":
        details = {"type": "refusal", "category": "general_harms", "explanation": answer.refusal or None}
    return {
        "stop_reason": _STOPS.get(answer.stop, answer.stop),
        "stop_sequence": answer.stop_sequence,
        **({"stop_details": details} if details else {}),
    }


def _blocks(number: int, answer: Answer) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": SIGNATURE})
    if answer.text:
        blocks.append({"type": "text", "text": answer.text})
    blocks += [
        {"type": "tool_use", "id": call_id("toolu", number, at), "name": tool.name, "input": dict(tool.arguments)}
        for at, tool in enumerate(answer.tools)
    ]
    return blocks


def message(number: int, body: Mapping[str, Any], answer: Answer, prompt_tokens: int) -> dict[str, Any]:
    usage = _usage(answer, prompt_tokens, answer.completion_tokens)
    return {
        "id": f"msg_{number:06d}",
        "type": "message",
        "role": "assistant",
        "model": body["model"],
        "content": _blocks(number, answer),
        **_stop(answer),
        "usage": usage,
    }


def _event(kind: str, name: str, payload: Mapping[str, Any]) -> Frame:
    data = json.dumps({"type": name, **payload}, ensure_ascii=False, separators=(",", ":"))
    return kind, f"event: {name}\ndata: {data}\n\n".encode()


def stream(number: int, body: Mapping[str, Any], answer: Answer, prompt_tokens: int) -> Iterator[Frame]:
    """message_start, ping, blocks with their deltas, message_delta with the usage, message_stop."""
    start = {
        "id": f"msg_{number:06d}",
        "type": "message",
        "role": "assistant",
        "model": body["model"],
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(answer, prompt_tokens, 1),
    }
    yield _event("role", "message_start", {"message": start})
    for index, block in enumerate(_blocks(number, answer)):
        kind = block["type"]
        empty = {
            "thinking": {"type": "thinking", "thinking": "", "signature": ""},
            "text": {"type": "text", "text": ""},
            "tool_use": {**block, "input": {}},
        }[kind]
        yield _event("start", "content_block_start", {"index": index, "content_block": empty})
        if index == 0:
            yield "ping", PING
        for delta in _deltas(block):
            yield _event("content", "content_block_delta", {"index": index, "delta": delta})
        yield _event("stop", "content_block_stop", {"index": index})
    counts = {"output_tokens": answer.completion_tokens}
    if answer.reasoning:
        counts["output_tokens_details"] = {"thinking_tokens": answer.reasoning_tokens}  # type: ignore[assignment]
    yield _event("finish", "message_delta", {"delta": _stop(answer), "usage": counts})
    yield _event("done", "message_stop", {})


def _deltas(block: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if block["type"] == "thinking":
        yield from ({"type": "thinking_delta", "thinking": piece} for piece in pieces(block["thinking"]))
        yield {"type": "signature_delta", "signature": SIGNATURE}
    elif block["type"] == "text":
        yield from ({"type": "text_delta", "text": piece} for piece in pieces(block["text"]))
    else:
        text = json.dumps(block["input"], separators=(",", ":"))
        yield {"type": "input_json_delta", "partial_json": ""}
        if block["input"]:
            for begin in range(0, len(text), 8):
                yield {"type": "input_json_delta", "partial_json": text[begin : begin + 8]}


def error(type: str, text: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": type, "message": text}, "request_id": "req_fake"}


STATUS_ERRORS: Mapping[int, dict[str, Any]] = {
    400: error("invalid_request_error", "There was an issue with the format or content of your request."),
    401: error("authentication_error", "invalid x-api-key"),
    402: error("billing_error", "There is an issue with your billing."),
    403: error("permission_error", "Your API key does not have permission to use the specified resource."),
    404: error("not_found_error", "model: {model}"),
    413: error("request_too_large", "Request exceeds the maximum allowed number of bytes."),
    429: error("rate_limit_error", "This request would exceed your account's rate limit."),
    500: error("api_error", "Internal server error"),
    503: error("api_error", "Service unavailable"),
    504: error("timeout_error", "Request timed out."),
    529: error("overloaded_error", "Overloaded"),
}
CONTEXT = error("invalid_request_error", "prompt is too long: 210000 tokens > 200000 maximum")
CONTENT_POLICY = error("invalid_request_error", "Output blocked by content filtering policy")
STREAM_ERROR = error("overloaded_error", "Overloaded")


def error_event(payload: Mapping[str, Any]) -> bytes:
    return f"event: error\ndata: {json.dumps(payload, separators=(',', ':'))}\n\n".encode()


def models(names: tuple[str, ...]) -> dict[str, Any]:
    data = [{"type": "model", "id": name, "display_name": name, "created_at": "2025-01-01T00:00:00Z"} for name in names]
    return {"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}
