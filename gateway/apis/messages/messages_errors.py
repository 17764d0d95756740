"""The gateway's errors in Anthropic's envelope."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gateway.errors import GatewayError, PassedOnError
from inference.protocol import CODES, Code

# The HTTP status for `error.type` (OpenAI, Anthropic) and `error.status` (Google) of an error inside a stream, which
# began with status 200.
STATUS_OF_TYPE: Mapping[str, int] = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "invalid_api_key": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "conflict_error": 409,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "requests": 429,
    "tokens": 429,
    "insufficient_quota": 402,
    "server_error": 500,
    "internal_error": 500,
    "api_error": 500,
    "timeout_error": 504,
    "service_unavailable_error": 503,
    "overloaded_error": 529,
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "RESOURCE_EXHAUSTED": 429,
    "INTERNAL": 500,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}


_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Anthropic's `error.type` by HTTP status. Others below 500 are `invalid_request_error`, the rest `api_error`."""

_CODE_OF_PARAM: Mapping[str | None, str] = {"thread": "thread_unsupported_request"}
"""Parameters whose rejection has a code that Anthropic's clients handle: if threads are not supported, they send the
whole conversation."""

_OWN_NAMES: Mapping[str, str] = {
    "chat_template_kwargs": "thinking",
    "continue_final_message": "messages",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "user": "metadata.user_id",
}
"""The client's name of a parameter, by the internal name."""

_ANTHROPIC_OVERFLOW = re.compile(r"prompt is too long|exceed context limit", re.IGNORECASE)
"""Anthropic's messages about a prompt, or a prompt and an answer, that is too long for the model."""

_FIRST_WORD = re.compile(r"\w*")
_FUNCTION = re.compile(r"(tools\[\d+\])\.function\.(\w+)")

ENVELOPE: Mapping[str, Any] = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message", "details"],
            "properties": {
                "type": {"type": "string"},
                "message": {"type": "string", "minLength": 1},
                "details": {"type": "object", "required": ["error_code"]},
            },
        },
        "request_id": {"type": "string"},
    },
}
"""The error envelope in JSON Schema."""


def envelope(error: GatewayError) -> dict[str, Any]:
    """The body for `error`, with an empty `request_id`, which `http_exchange.Exchange` fills in.

    `details` inside the returned `error` has what Anthropic's envelope lacks: the code, the parameter and numbers.
    """
    code = error.upstream_code if isinstance(error, PassedOnError) else str(error.code)
    code = _CODE_OF_PARAM.get(error.param, code)
    param = _own_name(error)
    return {**_error_body(error.status, code, _message(error, code), param, error.details), "request_id": None}


def _message(error: GatewayError, code: str) -> str:
    """The message. An error about a prompt that is too long begins with Anthropic's text, so that agents shorten it."""
    if code != Code.CONTEXT_LENGTH_EXCEEDED:
        return error.message
    if error.details is None:  # of a cloud
        is_known = _ANTHROPIC_OVERFLOW.search(error.message)
        return error.message if is_known else f"prompt is too long: {error.message}"
    prompt, context = error.details.get("prompt_tokens"), error.details.get("context_length")
    if prompt is None or context is None:
        return error.message
    return f"prompt is too long: {prompt} tokens > {context} maximum; {error.message}"


def _own_name(error: GatewayError) -> str | None:
    """The parameter under the client's name; only `messages` if it has the indices of translated messages."""
    param = error.param
    if param is None:
        return None
    if found := _FUNCTION.match(param):
        return f"{found[1]}.{'input_schema' if found[2] == 'parameters' else found[2]}"
    word = _FIRST_WORD.match(param)
    assert word is not None
    if word[0] == "messages" and (isinstance(error, PassedOnError) or ".image_url" in param):
        return "messages"
    return _OWN_NAMES.get(word[0], param)


def frame_error(code: str, message: str) -> dict[str, Any]:
    """The error inside a stream. `code` is Headgate's or a provider's."""
    status = CODES[Code(code)].status if code in frozenset(Code) else STATUS_OF_TYPE.get(code, 500)
    return _error_body(status, code, message)


def _error_body(
    status: int, code: str, message: str, param: str | None = None, more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    type = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    details: dict[str, Any] = {"error_code": code}
    if param is not None:
        details["param"] = param
    if more:
        details["headgate"] = dict(more)
    return {"type": "error", "error": {"type": type, "message": message, "details": details}}
