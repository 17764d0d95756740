"""Payloads of OpenAI's API (and of Google's address) as documented; decides neither answers nor faults."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from tests.rigs.fake_provider.answers import CREATED, FINGERPRINT, Answer, call_id, pieces

_STOPS = {"stop_sequence": "stop", "pause_turn": "stop", "context": "length"}
KEEP_ALIVE = b": keep-alive\n\n"
"""OpenAI's own API sends none; many compatible services do, with other texts."""

Frame = tuple[str, bytes]
"""The kind of a frame, for faults (role, content, finish, usage, done), and its bytes."""


def usage(answer: Answer, prompt_tokens: int, choices: int = 1) -> dict[str, Any]:
    prompt, completion = prompt_tokens + answer.cached_tokens, answer.completion_tokens * choices
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": answer.reasoning_tokens,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def _finish(answer: Answer) -> str:
    return _STOPS.get(answer.stop, answer.stop)


def _logprobs(text: str, wanted: bool) -> dict[str, Any] | None:
    if not wanted:
        return None
    token = {"token": text, "logprob": -0.25, "bytes": list(text.encode()), "top_logprobs": []}
    return {"content": [token], "refusal": None}


def _frame(kind: str, payload: Mapping[str, Any]) -> Frame:
    return kind, b"data: " + json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def chat_stream(number: int, body: Mapping[str, Any], answer: Answer, prompt_tokens: int) -> Iterator[Frame]:
    """Role, content, finish for every choice, usage if requested, [DONE]."""
    with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
    choices = body.get("n") or 1

    def chunk(kind: str, choice: list[dict[str, Any]], counts: dict[str, Any] | None = None) -> Frame:
        payload = {
            "id": f"chatcmpl-{number:06d}",
            "object": "chat.completion.chunk",
            "created": CREATED,
            "model": body["model"],
            "service_tier": "default",
            "system_fingerprint": FINGERPRINT,
            "choices": choice,
        }
        return _frame(kind, payload | ({"usage": counts} if with_usage else {}))

    def delta(
        kind: str, index: int, fields: dict[str, Any], finish: str | None = None, text: str | None = None
    ) -> Frame:
        logprobs = _logprobs(text, bool(body.get("logprobs"))) if text is not None else None
        return chunk(kind, [{"index": index, "delta": fields, "logprobs": logprobs, "finish_reason": finish}])

    for index in range(choices):
        empty = None if answer.tools else ""
        yield delta("role", index, {"role": "assistant", "content": empty, "refusal": None})
        for piece in pieces(answer.reasoning):
            yield delta("content", index, {"reasoning_content": piece})
        for piece in pieces(answer.refusal):
            yield delta("content", index, {"refusal": piece})
        for piece in answer.pieces:
            yield delta("content", index, {"content": piece}, text=piece)
        for at, tool in enumerate(answer.tools):
            call = {"index": at, "id": call_id("call", number, at), "type": "function"}
            yield delta("content", index, {"tool_calls": [{**call, "function": {"name": tool.name, "arguments": ""}}]})
            text = tool.json
            for begin in range(0, len(text), 8):
                part = {"index": at, "function": {"arguments": text[begin : begin + 8]}}
                yield delta("content", index, {"tool_calls": [part]})
        yield delta("finish", index, {}, _finish(answer))
    if with_usage:
        yield chunk("usage", [], usage(answer, prompt_tokens, choices))
    yield "done", b"data: [DONE]\n\n"


def azure_stream(number: int, body: Mapping[str, Any], answer: Answer, prompt_tokens: int) -> Iterator[Frame]:
    """The same as Azure writes it: first the result of its filter for the prompt, in a chunk without a model."""
    prompt = {"prompt_index": 0, "content_filter_results": FILTERED}
    unnamed = {"choices": [], "created": 0, "id": "", "model": "", "object": "", "prompt_filter_results": [prompt]}
    yield _frame("role", unnamed)
    for kind, frame in chat_stream(number, body, answer, prompt_tokens):
        if kind == "done":
            yield kind, frame
            continue
        payload = json.loads(frame.removeprefix(b"data: "))
        for choice in payload["choices"]:
            choice["content_filter_results"] = FILTERED if kind == "content" else {}
        yield _frame(kind, payload)


FILTERED: Mapping[str, Any] = {
    name: {"filtered": False, "severity": "safe"} for name in ("hate", "self_harm", "sexual", "violence")
}
"""The result of Azure's content filter for a harmless text."""


def chat_answer(number: int, body: Mapping[str, Any], answer: Answer, prompt_tokens: int) -> dict[str, Any]:
    choices = body.get("n") or 1
    message: dict[str, Any] = {
        "role": "assistant",
        "content": answer.text or None,
        "refusal": answer.refusal or None,
        "annotations": [],
    }
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tools:
        message["tool_calls"] = [
            {
                "id": call_id("call", number, at),
                "type": "function",
                "function": {"name": tool.name, "arguments": tool.json},
            }
            for at, tool in enumerate(answer.tools)
        ]
    return {
        "id": f"chatcmpl-{number:06d}",
        "object": "chat.completion",
        "created": CREATED,
        "model": body["model"],
        "choices": [
            {
                "index": index,
                "message": message,
                "logprobs": _logprobs(answer.text, bool(body.get("logprobs"))),
                "finish_reason": _finish(answer),
            }
            for index in range(choices)
        ],
        "usage": usage(answer, prompt_tokens, choices),
        "service_tier": "default",
        "system_fingerprint": FINGERPRINT,
    }


def _texts_of(body: Mapping[str, Any]) -> int:
    """How many texts a completion has: `n` for each prompt."""
    prompt = body["prompt"]
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    return (len(prompt) if several else 1) * (body.get("n") or 1)


def text_stream(number: int, body: Mapping[str, Any], answer: Answer, prompt_tokens: int) -> Iterator[Frame]:
    with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
    head = {"id": f"cmpl-{number:06d}", "object": "text_completion", "created": CREATED, "model": body["model"]}

    choices = _texts_of(body)

    def chunk(kind: str, index: int, text: str, finish: str | None) -> Frame:
        choice = {"text": text, "index": index, "logprobs": None, "finish_reason": finish}
        return _frame(kind, head | {"choices": [choice]} | ({"usage": None} if with_usage else {}))

    for index in range(choices):
        for piece in answer.pieces:
            yield chunk("content", index, piece, None)
        yield chunk("finish", index, "", _finish(answer))
    if with_usage:
        yield _frame("usage", head | {"choices": [], "usage": usage(answer, prompt_tokens, choices)})
    yield "done", b"data: [DONE]\n\n"


def text_answer(number: int, body: Mapping[str, Any], answer: Answer, prompt_tokens: int) -> dict[str, Any]:
    return {
        "id": f"cmpl-{number:06d}",
        "object": "text_completion",
        "created": CREATED,
        "model": body["model"],
        "system_fingerprint": FINGERPRINT,
        "choices": [
            {"text": answer.text, "index": index, "logprobs": None, "finish_reason": _finish(answer)}
            for index in range(_texts_of(body))
        ],
        "usage": usage(answer, prompt_tokens, _texts_of(body)),
    }


def embeddings(body: Mapping[str, Any]) -> dict[str, Any]:
    given = body["input"]
    items = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    vectors = [_vector(str(item), body.get("dimensions") or 8) for item in items]
    if body.get("encoding_format") == "base64":
        coded: list[Any] = [base64.b64encode(struct.pack(f"<{len(v)}f", *v)).decode() for v in vectors]
    else:
        coded = vectors
    tokens = sum(max(1, len(pieces(str(item)))) for item in items)
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(coded)],
        "model": body["model"],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _vector(text: str, size: int) -> list[float]:
    raw = hashlib.shake_128(text.encode()).digest(size)
    return [round(byte / 127.5 - 1, 6) for byte in raw]


def models(names: tuple[str, ...]) -> dict[str, Any]:
    return {"object": "list", "data": [model(name) for name in names]}


def model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": CREATED, "owned_by": "fake"}


# --- errors -----------------------------------------------------------------------------------------------------------
def error(
    message: str, *, type: str = "invalid_request_error", param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


STATUS_ERRORS: Mapping[int, dict[str, Any]] = {
    401: error("Incorrect API key provided: {key}. You can find your API key on the website.", code="invalid_api_key"),
    403: error("Country, region, or territory not supported", type="request_forbidden", code="unsupported_country"),
    404: error("The model `{model}` does not exist or you do not have access to it.", code="model_not_found"),
    429: error("Rate limit reached for {model}.", type="requests", code="rate_limit_exceeded"),
    500: error("The server had an error while processing your request. Sorry about that!", type="server_error"),
    503: error("The engine is currently overloaded, please try again later", type="service_unavailable"),
}
CONTEXT = error(
    "This model's maximum context length is 128000 tokens. However, your messages resulted in 200000 tokens.",
    param="messages",
    code="context_length_exceeded",
)
TOO_LARGE = error(
    "Request too large for gpt-4o in organization org-fake on tokens per min (TPM): Limit 30000, Requested 61337. "
    "The input or output tokens must be reduced in order to run successfully.",
    type="tokens",
    code="rate_limit_exceeded",
)
NO_QUOTA = error(
    "You exceeded your current quota, please check your plan and billing details.",
    type="insufficient_quota",
    code="insufficient_quota",
)
CONTENT_POLICY = error("Your request was rejected as a result of our safety system.", code="content_policy_violation")
STREAM_ERROR = error("The server had an error processing your request.", type="server_error", code="server_error")

_GOOGLE_STATUS = {
    400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED", 500: "INTERNAL", 503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED",
}  # fmt: skip


def google_error(
    status: int, message: str, *, reason: str | None = None, retry_delay: float | None = None
) -> list[dict[str, Any]]:
    """Google's own envelope, which its OpenAI-compatible address answers as a list of one."""
    details: list[dict[str, Any]] = []
    if reason:
        details.append(
            {
                "@type": "type.googleapis.com/google.rpc.ErrorInfo",
                "reason": reason,
                "domain": "googleapis.com",
                "metadata": {"service": "generativelanguage.googleapis.com"},
            }
        )
    if retry_delay is not None:
        details.append({"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": f"{retry_delay:g}s"})
    body: dict[str, Any] = {"code": status, "message": message, "status": _GOOGLE_STATUS.get(status, "UNKNOWN")}
    return [{"error": body | ({"details": details} if details else {})}]


GOOGLE_CONTEXT = google_error(
    400, "The input token count (2000000) exceeds the maximum number of tokens allowed (1048576)."
)
GOOGLE_BAD_KEY = google_error(400, "API key not valid. Please pass a valid API key.", reason="API_KEY_INVALID")
