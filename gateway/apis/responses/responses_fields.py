"""Knows every field of a Responses body, what it may hold and what is refused; rewrites nothing.

The rule: a field that would change the answer and cannot is refused by name with what to do instead; one that only
tunes another provider's hosting is taken and changes nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from gateway.apis.openai import field_checks as f
from gateway.apis.openai.chat_messages import IMAGE_URL
from headgate.shared.parameters import BY_NAME, PARAMETERS
from inference.protocol import Code

INCLUDE_LOGPROBS = "message.output_text.logprobs"
INCLUDE_REASONING = "reasoning.encrypted_content"
INCLUDES = (
    INCLUDE_LOGPROBS, INCLUDE_REASONING, "code_interpreter_call.outputs", "computer_call_output.output.image_url",
    "file_search_call.results", "message.input_image.image_url", "web_search_call.action.sources",
    "web_search_call.results",
)  # fmt: skip
"""What belongs to tools that run at a provider never comes, so asking for it changes nothing."""


def _by_kind(kinds: Mapping[str, f.Check]) -> f.Check:
    """The check for the object's `type`."""
    kind = f.mapping({"type": f.one_of(*kinds)}, needed=("type",))

    def check(value: Any, path: str) -> None:
        kind.run(value, path)
        kinds[value["type"]].run(value, path)

    return f.Check(check, {"anyOf": [_tagged(name, inner) for name, inner in kinds.items()]})


def _tagged(kind: str, inner: f.Check) -> dict[str, Any]:
    return {"allOf": [inner.schema, {"properties": {"type": {"const": kind}}, "required": ["type"]}]}


def _check_data_url(value: Any, path: str) -> None:
    f.string(1)(value, path)
    if not value.startswith("data:"):
        f.refuse(path, f"`{path}` must be a data: URL; the gateway fetches nothing, so send the content as base64")


_DATA_URL = f.Check(_check_data_url, {"type": "string", "pattern": "^data:"})
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
SERVICE_TIERS = ("auto", "default", "flex", "scale", "priority", "fast", "ultrafast")


# --- parts of messages and of function outputs ------------------------------------------------------------------------
def _check_image(value: Any, path: str) -> None:
    f.mapping({"detail": f.one_of("auto", "low", "high", "original")})(value, path)
    if value.get("file_id") is not None:
        f.refuse(f"{path}.file_id", f"`{path}.file_id` names a file this gateway does not keep; send a data: URL")
    f.mapping({"image_url": IMAGE_URL}, needed=("image_url",))(value, path)


def _check_file(value: Any, path: str) -> None:
    f.mapping({"filename": f.string()})(value, path)
    for name in ("file_id", "file_url"):
        if value.get(name) is not None:
            f.refuse(f"{path}.{name}", f"`{path}.{name}` cannot be fetched; send the file itself as `file_data`")
    f.mapping({"file_data": _DATA_URL}, needed=("file_data",))(value, path)


_TEXT = f.mapping({"text": f.string()}, needed=("text",))
_AUDIO = f.mapping(
    {"input_audio": f.mapping({"data": f.string(1), "format": f.string(1)}, needed=("data", "format"))},
    needed=("input_audio",),
)
_PARTS: Mapping[str, f.Check] = {
    "input_text": _TEXT,
    "output_text": _TEXT,
    "refusal": f.mapping({"refusal": f.string()}, needed=("refusal",)),
    "input_image": f.Check(_check_image, f.mapping({"image_url": IMAGE_URL}, needed=("image_url",)).schema),
    "input_file": f.Check(_check_file, f.mapping({"file_data": _DATA_URL}, needed=("file_data",)).schema),
    "input_audio": _AUDIO,
}
_PART = _by_kind(_PARTS)
_CONTENT = f.by_type("a string or an array of parts", text=f.string(), array=f.array(_PART))

# --- items ------------------------------------------------------------------------------------------------------------
_ROLES = ("user", "assistant", "system", "developer")
_MESSAGE = f.mapping({"role": f.one_of(*_ROLES), "content": _CONTENT}, needed=("role", "content"))
_CALL = f.mapping(
    {"call_id": f.string(1), "name": f.string(1), "namespace": f.string(1), "arguments": f.string()},
    needed=("call_id", "name", "arguments"),
)
_OUTPUT = f.mapping(
    {"call_id": f.string(1), "name": f.string(1), "namespace": f.string(1), "output": _CONTENT}, needed=("output",)
)
_REASONING = f.mapping({"summary": f.array(_TEXT), "content": f.array(_TEXT), "encrypted_content": f.string()})
_REFERENCE = f.mapping({"id": f.string(1, 256)}, needed=("id",))
REFERENCE = "item_reference"
"""The type of an item that stands for one of a kept conversation."""
ITEMS: Mapping[str, f.Check] = {
    "message": _MESSAGE,
    "function_call": _CALL,
    "function_call_output": _OUTPUT,
    "reasoning": _REASONING,
    REFERENCE: _REFERENCE,
}

_ELSEWHERE = "belongs to a tool that runs at another provider; leave it out"
_REFUSED_ITEMS: Mapping[str, str] = {
    "compaction": "was made for another service; send the items it stands for",
    "compaction_trigger": "asks for compaction, which this gateway does not do; leave it out",
    "configuration_update": "cannot change the request midway; set the field in the body",
    "additional_tools": "cannot add tools midway; list them in `tools`",
    **dict.fromkeys(("custom_tool_call", "custom_tool_call_output"), "is of a custom tool; use a function instead"),
}


def kind_of(item: Mapping[str, Any]) -> str:
    """The type of an input item; `type` may be left out of messages and references."""
    said = item.get("type") or ("message" if item.get("role") is not None else REFERENCE)
    return str(said)


def _check_item(value: Any, path: str) -> None:
    f.mapping({"type": f.string(1, 64)})(value, path)
    kind = kind_of(value)
    if kind not in ITEMS:
        why = _REFUSED_ITEMS.get(kind, _ELSEWHERE)
        f.refuse(path, f"`{path}` is of type {kind} and {why}", Code.UNSUPPORTED_PARAMETER)
    ITEMS[kind].run(value, path)


_UNTAGGED = [{"allOf": [inner.schema, {"not": {"required": ["type"]}}]} for inner in (_MESSAGE, _REFERENCE)]
_ITEM = f.Check(_check_item, {"anyOf": [*_UNTAGGED, *(_tagged(kind, inner) for kind, inner in ITEMS.items())]})

# --- tools ------------------------------------------------------------------------------------------------------------
_FUNCTION = f.mapping(
    {"name": f.string(1, 256), "description": f.string(), "parameters": f.mapping(), "strict": f.boolean},
    needed=("name",),
)
_NAMESPACE = f.mapping(
    {"name": f.string(1, 256), "description": f.string(), "tools": f.array()}, needed=("name", "tools")
)
_CUSTOM = "takes free text; give it as a function whose parameter is that text"
_HOSTED = "runs at another provider and not here; leave it out (`hosted_tools: leave_out` in gateway.yaml does so)"
_SHOWN = ("function", "namespace")
"""Tools that a model behind this gateway can be shown."""


def without_hosted(tools: Any) -> Any:
    """`tools` without those that no model here can be shown; what is no list of tools stays as it is."""
    if not isinstance(tools, list):
        return tools
    return [tool for tool in tools if not isinstance(tool, dict) or tool.get("type") in _SHOWN or "type" not in tool]


def _check_tool(value: Any, path: str) -> None:
    f.mapping({"type": f.string(1, 64)}, needed=("type",))(value, path)
    kind = value["type"]
    if kind == "namespace":
        _NAMESPACE(value, path)
        for index, inner in enumerate(value["tools"]):
            f.mapping({"type": f.one_of("function")}, needed=("type",))(inner, f"{path}.tools[{index}]")
            _FUNCTION(inner, f"{path}.tools[{index}]")
    elif kind == "function":
        _FUNCTION(value, path)
    else:
        why = _CUSTOM if kind == "custom" else _HOSTED
        f.refuse(f"{path}.type", f"`{path}` is a tool of type {kind}, which {why}", Code.UNSUPPORTED_PARAMETER)


_TOOL = f.Check(_check_tool, {"anyOf": [_tagged("function", _FUNCTION), _tagged("namespace", _NAMESPACE)]})
_CHOICES: Mapping[str, f.Check] = {
    "function": f.mapping({"name": f.string(1), "namespace": f.string(1)}, needed=("name",)),
    "allowed_tools": f.mapping(
        {
            "mode": f.one_of("auto", "required"),
            "tools": f.array(f.mapping({"type": f.one_of("function"), "name": f.string(1)}, needed=("name",)), low=1),
        },
        needed=("mode", "tools"),
    ),
}
_TOOL_CHOICE = f.by_type(
    "none, auto, required or an object", text=f.one_of("none", "auto", "required"), mapping=_by_kind(_CHOICES)
)

# --- the body ---------------------------------------------------------------------------------------------------------
_FORMATS: Mapping[str, f.Check] = {
    "text": f.mapping(),
    "json_object": f.mapping(),
    "json_schema": f.mapping(
        {"name": f.string(1), "schema": f.mapping(), "strict": f.boolean, "description": f.string()},
        needed=("name", "schema"),
    ),
}
_REASONING_OPTIONS: Mapping[str, f.Check] = {
    "effort": f.one_of(*EFFORTS),
    "summary": f.one_of("auto", "concise", "detailed", "none"),
    "generate_summary": f.one_of("auto", "concise", "detailed"),
    "context": f.one_of("auto", "all_turns"),
    "mode": f.one_of("standard"),
}


def _check_metadata(value: Any, path: str) -> None:
    f.mapping()(value, path)
    if len(value) > 16:
        f.refuse(path, f"`{path}` may hold at most 16 pairs; it has {len(value)}")
    for name, said in value.items():
        f.string(1, 64)(name, path)
        f.string(0, 512)(said, f"{path}.{name}")


def _check_false(value: Any, path: str) -> None:
    f.boolean(value, path)
    if value:
        f.refuse(path, f"`{path}` must be false: answers are given while the caller waits", Code.UNSUPPORTED_PARAMETER)


FIELDS: Mapping[str, f.Check] = {
    "model": f.string(1, 256),
    "input": f.by_type("a string or an array of items", text=f.string(), array=f.array(_ITEM)),
    "instructions": f.string(),
    "background": f.Check(_check_false, {"const": False}),
    "client_metadata": f.mapping(),
    "include": f.array(f.one_of(*INCLUDES)),
    "max_output_tokens": f.parameter(BY_NAME["max_tokens"]),
    "max_tool_calls": f.integer(1),
    "metadata": f.Check(_check_metadata, {"type": "object", "additionalProperties": {"type": "string"}}),
    "parallel_tool_calls": f.boolean,
    "previous_response_id": f.string(1, 256),
    "prompt_cache_key": f.string(),
    "prompt_cache_options": f.mapping(),
    "prompt_cache_retention": f.one_of("in_memory", "24h"),
    "reasoning": f.mapping(_REASONING_OPTIONS),
    "safety_identifier": f.string(),
    "service_tier": f.one_of(*SERVICE_TIERS),
    "store": f.boolean,
    "stream": f.boolean,
    "stream_options": f.mapping({"include_obfuscation": f.boolean}),
    "temperature": f.parameter(BY_NAME["temperature"]),
    "text": f.mapping({"format": _by_kind(_FORMATS), "verbosity": f.one_of("low", "medium", "high")}),
    "tool_choice": _TOOL_CHOICE,
    "tools": f.array(_TOOL, high=1024),
    "top_logprobs": f.integer(0, 20),
    "top_p": f.parameter(BY_NAME["top_p"]),
    "truncation": f.one_of("auto", "disabled"),
    "user": f.string(),
}
EXTENSIONS: Mapping[str, f.Check] = {
    **{
        row.name: f.parameter(row)
        for row in PARAMETERS
        if row.name not in FIELDS and row.name not in ("max_tokens", "max_completion_tokens", "n_probs")
    },
    "chat_template_kwargs": f.mapping(),
    "logit_bias": f.mapping(),
    "stop": f.by_type("a string or an array of strings", text=f.string(1), array=f.array(f.string(1), high=16)),
}
"""What local models take beyond the Responses API; told on as they are."""

REFUSED: Mapping[str, str] = {
    "max_tokens": "the Responses API calls it `max_output_tokens`",
    "max_completion_tokens": "the Responses API calls it `max_output_tokens`",
    "n_probs": "the Responses API calls it `top_logprobs`",
    "access_programs": "this gateway has no access programs; leave it out",
    "context_management": "a conversation is never compacted; leave it out and send what is to be read",
    "conversation": "conversations are not kept; use `previous_response_id`, or send the items themselves",
    "image": "images are never changed; leave it out",
    "moderation": "nothing is moderated here; leave it out",
    "prompt": "prompt templates are not kept; send `instructions` and `input`",
}
"""Fields of the API that would change the answer and cannot here, and what to do instead."""

_KNOWN = {**FIELDS, **EXTENSIONS}


def schema() -> dict[str, Any]:
    """The body in JSON Schema; rules between fields are not in it."""
    asked = [{"required": [name]} for name in ("input", "instructions", "previous_response_id")]
    return {**f.object_schema(_KNOWN, ("model",)), "anyOf": asked, "additionalProperties": False}


def check(body: Mapping[str, Any]) -> None:
    """Raises RequestError (400) for the first field that is not as it must be; none of them is null."""
    if body.get("model") is None:
        f.refuse("model", "`model` is needed and not there")
    for name, value in body.items():
        if name in REFUSED:
            f.refuse(name, f"`{name}` is not supported: {REFUSED[name]}", Code.UNSUPPORTED_PARAMETER)
        known = _KNOWN.get(name)
        if known is None:
            near = difflib.get_close_matches(name[:64], _KNOWN, n=1)
            advice = f"did you mean `{near[0]}`?" if near else "leave it out"
            said = f"`{name[:64]}` is not a parameter of /v1/responses; {advice}"
            f.refuse(name[:64], said, Code.UNSUPPORTED_PARAMETER)
        known.run(value, name)
    if body.get("stream_options") is not None and not body.get("stream"):
        f.refuse("stream_options", "`stream_options` is only allowed when `stream` is true")
