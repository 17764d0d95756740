"""Knows the shape of chat messages and tools, and which capabilities they ask of a model; decides nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.apis.openai import field_checks as f

MAX_URL_CHARS = 2048
VISION = "vision"
TOOLS = "tools"
AUDIO = "audio"

_NOTHING: frozenset[str] = frozenset()
_NEEDS: Mapping[str, str] = {"image_url": VISION, "input_audio": AUDIO}
"""What parts of a content ask of a model."""

_SPEAKERS = ("user", "assistant", "system", "developer")
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def _check_image_url(value: Any, path: str) -> None:
    f.string(1)(value, path)
    if not value.startswith("data:") and not (value.startswith("https://") and len(value) <= MAX_URL_CHARS):
        f.refuse(path, f"`{path}` must be a data: URL, or a short https: one; send the image itself as base64")


IMAGE_URL = f.Check(_check_image_url, {"type": "string", "pattern": "^(data:|https://)"})
"""An image that came with the request, or one to be fetched where `core.images` allows that; tiers see the former."""
_IMAGE = f.mapping(
    {"url": IMAGE_URL, "detail": f.one_of("auto", "low", "high", "original")},
    needed=("url",),
)
_PARTS: Mapping[str, f.Check] = {
    "text": f.mapping({"text": f.string()}, needed=("text",)),
    "refusal": f.mapping({"refusal": f.string()}, needed=("refusal",)),
    "image_url": f.mapping({"image_url": _IMAGE}, needed=("image_url",)),
    "input_audio": f.mapping(
        {"input_audio": f.mapping({"data": f.string(1), "format": f.string(1)}, needed=("data", "format"))},
        needed=("input_audio",),
    ),
    "file": f.mapping({"file": f.mapping()}, needed=("file",)),
}


_KINDS = f.mapping({"type": f.one_of(*_PARTS)}, needed=("type",))


def _check_part(value: Any, path: str) -> None:
    _KINDS(value, path)
    _PARTS[value["type"]](value, path)


_PART = f.Check(
    _check_part,
    {
        "anyOf": [
            {"allOf": [check.schema, {"properties": {"type": {"const": kind}}, "required": ["type"]}]}
            for kind, check in _PARTS.items()
        ]
    },
)
_CONTENT = f.by_type("a string or an array of parts", text=f.string(), array=f.array(_PART, low=1))
_CALL = f.mapping(
    {
        "id": f.string(1),
        "type": f.one_of("function", "custom"),
        "function": f.mapping({"name": f.string(1), "arguments": f.string()}, needed=("name", "arguments")),
    },
    needed=("id",),
)
_FIELDS: Mapping[str, f.Check] = {
    "role": f.one_of(*_ROLES),
    "content": _CONTENT,
    "name": f.string(1),
    "tool_call_id": f.string(1),
    "tool_calls": f.array(_CALL),
    "function_call": f.mapping({"name": f.string(1), "arguments": f.string()}, needed=("name", "arguments")),
    "refusal": f.string(),
    "reasoning_content": f.string(),
}


_SHAPE = f.mapping(_FIELDS, needed=("role",))


def _check_message(value: Any, path: str) -> None:
    _SHAPE.run(value, path)
    role = value["role"]
    if value.get("content") is None and not (role == "assistant" and _says_otherwise(value)):
        f.refuse(f"{path}.content", f"`{path}` needs `content`")
    if role == "tool" and value.get("tool_call_id") is None:
        f.refuse(f"{path}.tool_call_id", f"`{path}` answers a tool call and needs its `tool_call_id`")


def _says_otherwise(message: Mapping[str, Any]) -> bool:
    others = ("function_call", "refusal", "audio")
    return bool(message.get("tool_calls")) or any(message.get(name) is not None for name in others)


_LIST = f.array(f.Check(_check_message, _SHAPE.schema), low=1)


def _check_messages(value: Any, path: str) -> None:
    """As `_LIST` does; text that somebody said, which most messages are, is seen to be well-formed at a glance."""
    if type(value) is not list or not value:
        _LIST.run(value, path)
    for index, message in enumerate(value):
        if (
            type(message) is not dict
            or len(message) != 2
            or type(message.get("content")) is not str
            or message.get("role") not in _SPEAKERS
        ):
            _check_message(message, f"{path}[{index}]")


MESSAGES: f.Check = f.Check(_check_messages, _LIST.schema)

TOOL: f.Check = f.mapping(
    {
        "type": f.one_of("function", "custom"),
        "function": f.mapping(
            {"name": f.string(1, 256), "description": f.string(), "parameters": f.mapping(), "strict": f.boolean},
            needed=("name",),
        ),
    },
    needed=("type",),
)
TOOL_CHOICE: f.Check = f.by_type(
    "none, auto, required or an object", text=f.one_of("none", "auto", "required"), mapping=f.mapping(needed=("type",))
)


def needs_of_messages(body: Mapping[str, Any]) -> frozenset[str]:
    """The capabilities that a checked chat body asks for."""
    needs: set[str] = set()
    if (body.get("tools") and body.get("tool_choice") != "none") or body.get("functions"):
        needs.add(TOOLS)
    if body.get("audio") or "audio" in (body.get("modalities") or ()):
        needs.add(AUDIO)
    return frozenset(needs) | needs_of_contents(body)


def needs_of_contents(body: Mapping[str, Any]) -> frozenset[str]:
    """Those of its messages' contents alone."""
    needs = _NOTHING
    for message in body["messages"]:
        if type(parts := message.get("content")) is list:
            needs |= {_NEEDS[part["type"]] for part in parts if part["type"] in _NEEDS}
    return needs
