"""What an Anthropic Messages body may hold, field by field; changes no value and translates nothing.

Unlike OpenAI's fields these are closed at every level, as Anthropic's own are: an unknown name is refused by its path.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gateway.apis.image_policy import IMAGE_TYPES
from gateway.apis.openai import field_checks as f
from gateway.apis.openai.chat_messages import MAX_URL_CHARS
from headgate.shared.parameters import BY_NAME
from inference.protocol import Code

IGNORED: Mapping[str, str] = {
    "anthropic_beta": "names beta features; those that change an answer have fields of their own",
    "anthropic_version": "the version stands in a header; both versions that exist are understood",
    "betas": "names beta features; those that change an answer have fields of their own",
    "billing_policy": "concerns the bill of another provider's hosting",
    "context_management": "drops old tool results at Anthropic; here they stay",
    "diagnostics": "explains Anthropic's prompt cache",
    "fallback_credit_token": "concerns the bill of another provider's hosting",
    "fallbacks": "names other models of Anthropic's; the chain of the route is what the gateway falls back to",
    "speed": "chooses between machines of Anthropic's",
    "user_profile_id": "says whom Anthropic bills",
    "workspace_id": "says whom Anthropic bills",
}
"""Fields that clients send and that change nothing in what an answer means; they are checked for nothing."""

_REFUSED: Mapping[str, str] = {
    "compaction": "the gateway summarizes no conversations",
    "container": "containers and skills live at Anthropic",
    "inference_geo": "the gateway cannot promise a region; `x-headgate-policy: local-only` keeps a request here",
    "mcp_servers": "the gateway calls no MCP server; let the client call it and send its tools",
    "thread": "the gateway keeps no conversations; send all messages",
}
"""Fields that would change the answer and that no tier behind the gateway can honor."""

_BLOCKS_REFUSED: Mapping[str, str] = {
    "compaction": "the gateway summarizes no conversations",
    "search_result": "send it as text",
    "container_upload": "the gateway keeps no files",
    "server_tool_use": "it is the work of a tool that runs at Anthropic, which no other tier has",
    "tool_reference": "send the tool itself in `tools`",
    "browser_state": "send it as text or an image",
}
_SERVERS_BLOCK = "it is the work of a tool that runs at Anthropic, which no other tier has"

_ANTHROPICS_TOOLS = (
    "it is a tool of Anthropic's own; only tools with a name and an `input_schema`, which the client runs, reach every "
    "model"
)


def closed(known: Mapping[str, f.Check], needed: tuple[str, ...] = ()) -> f.Check:
    """An object with these fields and no others."""
    inner = f.mapping(known, needed)

    def check(value: Any, path: str) -> None:
        inner.run(value, path)
        unknown(value, known, f"{path}.")

    return f.Check(check, {**inner.schema, "additionalProperties": False})


def unknown(value: Mapping[str, Any], known: Mapping[str, f.Check], prefix: str) -> None:
    """Raises RequestError for the first name in `value` that is not among `known`."""
    for name in value:
        if name not in known:
            near = difflib.get_close_matches(name[:64], known, n=1)
            advice = f"did you mean `{prefix}{near[0]}`?" if near else "leave it out"
            path = f"{prefix}{name[:64]}"
            f.refuse(path, f"`{path}` is not a parameter of /v1/messages; {advice}", Code.UNSUPPORTED_PARAMETER)


def _by_kind(kinds: Mapping[str, f.Check], refused: Mapping[str, str]) -> f.Check:
    """An object whose `type` chooses its check. Types in `refused` exist and are not taken; the value says why."""
    head = f.mapping({"type": f.string(1)}, needed=("type",))

    def check(value: Any, path: str) -> None:
        head.run(value, path)
        kind = value["type"]
        if kind in kinds:
            kinds[kind].run(value, path)
            return
        why = refused.get(kind) or (_SERVERS_BLOCK if kind.endswith("_tool_result") else None)
        if why is not None:
            f.refuse(f"{path}.type", f"`{path}` of type {kind[:60]} is not taken: {why}", Code.UNSUPPORTED_PARAMETER)
        f.one_of(*kinds).run(kind, f"{path}.type")

    return f.Check(check, {"anyOf": [_tagged(kind, inner) for kind, inner in kinds.items()]})


def _tagged(kind: str, inner: f.Check) -> dict[str, Any]:
    return {"allOf": [inner.schema, {"properties": {"type": {"const": kind}}, "required": ["type"]}]}


_CACHE = f.mapping({"type": f.one_of("ephemeral")}, needed=("type",))
_TYPE = {"type": f.string(1)}
_MARKED = {**_TYPE, "cache_control": _CACHE}

_TEXT = closed({**_MARKED, "text": f.string(), "citations": f.anything}, needed=("type", "text"))
_NO_FETCHING = "the gateway fetches no documents, so send the data itself as base64"


def _check_address(value: Any, path: str) -> None:
    f.string(1).run(value, path)
    if not value.startswith("https://") or len(value) > MAX_URL_CHARS:
        f.refuse(path, f"`{path}` must be a short https: address; send the image itself as base64")


_ADDRESS = f.Check(_check_address, {"type": "string", "pattern": "^https://", "maxLength": MAX_URL_CHARS})
"""Fetched where `core.images` allows that."""
_NO_FILES = "the gateway keeps no files, so send the data itself as base64"
_IMAGE_SOURCE = _by_kind(
    {
        "base64": closed(
            {**_TYPE, "media_type": f.one_of(*IMAGE_TYPES), "data": f.string(1)}, needed=("media_type", "data")
        ),
        "url": closed({**_TYPE, "url": _ADDRESS}, needed=("url",)),
    },
    {"file": _NO_FILES},
)
_IMAGE = closed({**_MARKED, "source": _IMAGE_SOURCE, "transformations": f.anything}, needed=("type", "source"))
_DOCUMENT_SOURCE = _by_kind(
    {
        "base64": closed(
            {**_TYPE, "media_type": f.one_of("application/pdf"), "data": f.string(1)}, needed=("media_type", "data")
        ),
        "text": closed({**_TYPE, "media_type": f.one_of("text/plain"), "data": f.string()}, needed=("data",)),
    },
    {"url": _NO_FETCHING, "file": _NO_FILES, "content": "send its blocks themselves"},
)


def _check_citations(value: Any, path: str) -> None:
    f.mapping({"enabled": f.boolean}).run(value, path)
    if value.get("enabled"):
        said = f"`{path}.enabled` must be false: most models behind the gateway cite nothing"
        f.refuse(f"{path}.enabled", said, Code.UNSUPPORTED_PARAMETER)


_NO_CITATIONS = f.Check(_check_citations, {"type": "object", "properties": {"enabled": {"enum": [False, None]}}})
_DOCUMENT = closed(
    {
        **_MARKED,
        "source": _DOCUMENT_SOURCE,
        "title": f.string(),
        "context": f.string(),
        "citations": _NO_CITATIONS,
    },
    needed=("type", "source"),
)
_SHOWN: Mapping[str, f.Check] = {"text": _TEXT, "image": _IMAGE, "document": _DOCUMENT}
_RESULT = closed(
    {
        **_MARKED,
        "tool_use_id": f.string(1),
        "content": f.by_type(
            "a string or an array of blocks", text=f.string(), array=f.array(_by_kind(_SHOWN, _BLOCKS_REFUSED))
        ),
        "is_error": f.boolean,
        "toolset_name": f.anything,
    },
    needed=("type", "tool_use_id"),
)
_USE = closed(
    {
        **_MARKED,
        "id": f.string(1),
        "name": f.string(1, 128),
        "input": f.mapping(),
        "caller": f.anything,
        "toolset_name": f.anything,
    },
    needed=("type", "id", "name", "input"),
)
_THOUGHT = closed({**_TYPE, "thinking": f.string(), "signature": f.string()}, needed=("type", "thinking"))
_HIDDEN = closed({**_TYPE, "data": f.string()}, needed=("type", "data"))


def _content(kinds: Mapping[str, f.Check]) -> f.Check:
    blocks = f.array(_by_kind(kinds, _BLOCKS_REFUSED), low=1)
    return f.by_type("a string or an array of blocks", text=f.string(), array=blocks)


_ROLES: Mapping[str, f.Check] = {
    role: closed({"role": f.string(1), "content": _content(kinds)}, needed=("role", "content"))
    for role, kinds in {
        "user": {**_SHOWN, "tool_result": _RESULT},
        "assistant": {"text": _TEXT, "thinking": _THOUGHT, "redacted_thinking": _HIDDEN, "tool_use": _USE},
        "system": {"text": _TEXT},
    }.items()
}
_ROLE = f.mapping({"role": f.one_of(*_ROLES)}, needed=("role",))


def _check_message(value: Any, path: str) -> None:
    _ROLE.run(value, path)
    _ROLES[value["role"]].run(value, path)


_MESSAGE = f.Check(
    _check_message,
    {
        "anyOf": [
            {"allOf": [check.schema, {"properties": {"role": {"const": role}}, "required": ["role"]}]}
            for role, check in _ROLES.items()
        ]
    },
)

_OWN_TOOL = closed(
    {
        **_MARKED,
        "name": f.string(1, 128),
        "description": f.string(),
        "input_schema": f.mapping({"type": f.one_of("object")}),
        "strict": f.boolean,
        "allowed_callers": f.array(f.string(1)),
        "defer_loading": f.boolean,
        "eager_input_streaming": f.boolean,
        "input_examples": f.array(),
    },
    needed=("name", "input_schema"),
)
_TOOL_HEAD = f.mapping({"type": f.string(1)})


def _check_tool(value: Any, path: str) -> None:
    _TOOL_HEAD.run(value, path)
    kind = value.get("type") or "custom"
    if kind != "custom":
        said = f"`{path}` of type {kind[:60]} is not taken: {_ANTHROPICS_TOOLS}"
        f.refuse(f"{path}.type", said, Code.UNSUPPORTED_PARAMETER)
    _OWN_TOOL.run(value, path)


def is_hosted(tool: Any) -> bool:
    """Whether a tool is one of Anthropic's own, which runs there or that only its models know."""
    return isinstance(tool, dict) and tool.get("type") not in (None, "custom")


_TOOL = f.Check(_check_tool, {"allOf": [_OWN_TOOL.schema, {"properties": {"type": {"enum": ["custom", None]}}}]})
_ONE_BY_ONE = {**_TYPE, "disable_parallel_tool_use": f.boolean}
_CHOICE = _by_kind(
    {
        "auto": closed(_ONE_BY_ONE),
        "any": closed(_ONE_BY_ONE),
        "none": closed(_TYPE),
        "tool": closed({**_ONE_BY_ONE, "name": f.string(1)}, needed=("name",)),
    },
    {},
)
_SHOWN_THINKING = {**_TYPE, "display": f.one_of("summarized", "omitted", "updates"), "block_binding": f.anything}
_THINKING = _by_kind(
    {
        "enabled": closed({**_SHOWN_THINKING, "budget_tokens": f.integer(1024)}, needed=("budget_tokens",)),
        "adaptive": closed(_SHOWN_THINKING),
        "between_tools": closed(_TYPE),
        "disabled": closed(_TYPE),
    },
    {},
)
_FORMAT = closed({"type": f.one_of("json_schema"), "schema": f.mapping()}, needed=("type", "schema"))

FIELDS: Mapping[str, f.Check] = {
    **dict.fromkeys(IGNORED, f.anything),
    "cache_control": _CACHE,
    "max_tokens": f.integer(1),
    "messages": f.array(_MESSAGE, low=1, high=100_000),
    "metadata": f.mapping({"user_id": f.string()}),
    "model": f.string(1, 256),
    "output_config": closed(
        {"effort": f.one_of("low", "medium", "high", "xhigh", "max"), "format": _FORMAT, "task_budget": f.anything}
    ),
    "output_format": _FORMAT,
    "service_tier": f.one_of("auto", "standard_only"),
    "stop_sequences": f.array(f.string(1), high=16),
    "stream": f.boolean,
    "system": f.by_type("a string or an array of text blocks", text=f.string(), array=f.array(_TEXT)),
    "temperature": f.parameter(replace(BY_NAME["temperature"], high=1)),
    "thinking": _THINKING,
    "tool_choice": _CHOICE,
    "tools": f.array(_TOOL, high=1024),
    "top_k": f.integer(0),
    "top_p": f.parameter(BY_NAME["top_p"]),
}

NEEDED = ("model", "max_tokens", "messages")
"""The fields a request must have; counting tokens needs no `max_tokens`."""


def schema(*, counting: bool = False) -> dict[str, Any]:
    """The body that `check` takes, in JSON Schema; rules between fields are not in it."""
    return {**f.object_schema(FIELDS, needed(counting)), "additionalProperties": False}


def needed(counting: bool) -> tuple[str, ...]:
    """The fields that must be there."""
    return tuple(name for name in NEEDED if not (counting and name == "max_tokens"))


def check(body: Mapping[str, Any], *, counting: bool = False) -> None:
    """Raises RequestError naming the first field that is wrong, as the caller wrote it."""
    for name in needed(counting):
        if body.get(name) is None:
            f.refuse(name, f"`{name}` is needed and not there")
    for name, why in _REFUSED.items():
        if body.get(name):
            f.refuse(name, f"`{name}` is not taken: {why}", Code.UNSUPPORTED_PARAMETER)
    unknown({name: value for name, value in body.items() if name not in _REFUSED}, FIELDS, "")
    for name, value in body.items():
        if value is not None and name in FIELDS:
            FIELDS[name].run(value, name)
