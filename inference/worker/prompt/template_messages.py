"""Validates OpenAI chat messages and converts them for chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inference.protocol import Code
from inference.worker.prompt.message_images import ImageParts
from inference.worker.worker_errors import BadRequestError

MAX_MESSAGES = 4096
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def messages_of(value: Any, images: ImageParts | None = None) -> tuple[Mapping[str, Any], ...]:
    """Validated messages as templates expect them: plain text contents.

    `images` takes those in the messages; without it they are refused.
    """
    if not isinstance(value, list) or not value:
        raise BadRequestError("messages must be a non-empty list", "messages")
    if len(value) > MAX_MESSAGES:
        raise BadRequestError(f"messages has {len(value)} entries; at most {MAX_MESSAGES} are allowed", "messages")
    return tuple(_message(item, f"messages[{index}]", images) for index, item in enumerate(value))


_SHOWN_AS = {"developer": "system", "function": "tool"}
"""Roles that have another name in templates."""

_MESSAGE_FIELDS = frozenset(
    [
        "role",
        "content",
        "name",
        "refusal",
        "tool_calls",
        "tool_call_id",
        "function_call",
        "audio",
        "annotations",
        "parsed",
        "reasoning_content",
    ]
)
_ANSWERS_ONLY = frozenset(
    [
        "reasoning",
        "reasoning_text",
        "reasoning_details",
        "reasoning_opaque",
        "thinking",
        "thinking_blocks",
        "provider_specific_fields",
        "extra_content",
        "citations",
        "executed_tools",
        "images",
    ]
)
"""Fields that other services and client libraries add to answers. They have no effect."""


def _message(item: Any, at: str, images: ImageParts | None) -> Mapping[str, Any]:
    if not isinstance(item, dict):
        raise BadRequestError(f"{at} must be an object with role and content", at)
    role = item.get("role")
    for name, value in item.items():
        if name not in _MESSAGE_FIELDS and not (role == "assistant" and _has_no_effect(name, value)):
            raise BadRequestError(f"unknown field {name[:80]!r} in {at}", f"{at}.{name[:80]}")
    if role not in ROLES:
        raise BadRequestError(f"{at}.role must be one of {', '.join(ROLES)}", f"{at}.role")
    message: dict[str, Any] = {"role": _SHOWN_AS.get(role, role)}
    content = item.get("content")
    calls = item.get("tool_calls")
    if not calls and item.get("function_call"):
        calls = [{"function": item["function_call"]}]
    if content is None and not (role == "assistant" and (calls or item.get("refusal"))):
        raise BadRequestError(f"{at}.content is required", f"{at}.content")
    message["content"] = _text(content, f"{at}.content", images) or (item.get("refusal") or "")
    for name in ("name", "tool_call_id", "reasoning_content"):
        if item.get(name) is not None:
            if not isinstance(item[name], str):
                raise BadRequestError(f"{at}.{name} must be a string", f"{at}.{name}")
            message[name] = item[name]
    if role == "assistant" and isinstance(item.get("reasoning"), str):  # the name at some services
        message.setdefault("reasoning_content", item["reasoning"])
    if calls:
        message["tool_calls"] = _tool_calls(calls, f"{at}.tool_calls")
    return message


def _has_no_effect(name: str, value: Any) -> bool:
    """Whether a field of an answer that is sent back can be ignored; Mistral sends `"prefix": false`."""
    return name in _ANSWERS_ONLY or value is None or value is False


def _text(content: Any, at: str, images: ImageParts | None) -> str:
    """The text of a content. As in llama.cpp, text parts are joined by newlines, and images without.

    Raises BadRequestError for parts that the model cannot read.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequestError(f"{at} must be a string or a list of parts", at)
    joined = ""
    after_text = False
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text" if kind == "text" else "refusal") if isinstance(part, dict) else None
        if kind in ("text", "refusal") and isinstance(text, str):
            joined += "\n" + text if after_text else text
            after_text = True
        elif kind == "image_url" and images is not None:
            joined += images.take(part, f"{at}[{index}]")
            after_text = False
        elif kind in ("image_url", "input_audio", "file", "video_url"):
            raise BadRequestError(
                f"this model reads text{' and images' if images else ''} only; {at}[{index}] is {kind}",
                f"{at}[{index}]",
                code=Code.UNSUPPORTED_PARAMETER,
            )
        else:
            raise BadRequestError(f'{at}[{index}] must be {{"type": "text", "text": "..."}}', f"{at}[{index}]")
    return joined


def _tool_calls(value: Any, at: str) -> list[dict[str, Any]]:
    """Tool calls of an earlier assistant message. Their arguments are text of a model, which may be invalid JSON."""
    if not isinstance(value, list):
        raise BadRequestError(f"{at} must be a list", at)
    calls = []
    for index, item in enumerate(value):
        function = item.get("function") if isinstance(item, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequestError(f"{at}[{index}] must hold a function with a name", f"{at}[{index}]")
        calls.append(
            {
                "id": str(item.get("id", "")),
                "type": "function",
                "function": {"name": function["name"], "arguments": function.get("arguments") or "{}"},
            }
        )
    return calls
