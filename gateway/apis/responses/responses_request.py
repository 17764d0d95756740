"""Turns a Responses body into the chat request that stands for it, or a RequestError naming its field; asks nobody.

What is asked for here exists in chat under another name, or it is refused in `responses_fields`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.apis.openai import field_checks as f
from gateway.apis.openai.frames import Endpoint
from gateway.apis.openai.generation_request import InferenceRequest, normalize_chat, typed
from gateway.apis.responses.responses_fields import (
    EXTENSIONS,
    INCLUDE_LOGPROBS,
    INCLUDE_REASONING,
    REFERENCE,
    check,
    kind_of,
    without_hosted,
)
from gateway.apis.responses.responses_items import function_name, messages_of, with_instructions
from gateway.apis.schema.body_decoder import parse_json
from gateway.apis.schema.openai_bodies import decode_chat
from gateway.errors import RequestError
from inference.protocol import Code

Item = Mapping[str, Any]
Names = Mapping[str, tuple[str, str]]
"""By a function's name in chat: its own name and its namespace."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """The conversation up to an answer given before: its items without instructions, and their size as JSON."""

    items: tuple[Item, ...]
    size_bytes: int


Recall = Callable[[str], Earlier | None]
"""The conversation behind a `previous_response_id`; None when it is not there."""

FindItem = Callable[[str], tuple[Item, int] | None]
"""The item with this id and its size as JSON; None when no kept conversation holds it."""


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """One Responses request. `echo` are the fields of the Response object that say what was asked.

    `items` are those of the whole conversation without instructions, as a later request may build on them. `seals` is
    whether reasoning is wanted in a form that clients send back.
    """

    request: InferenceRequest
    echo: Mapping[str, Any]
    names: Names
    items: tuple[Item, ...]
    stored: bool
    seals: bool


def parse(raw: bytes, recall: Recall, find_item: FindItem, *, leaves_out: bool = False) -> ResponsesRequest:
    """The request in `raw`; raises RequestError naming the field and what to write instead.

    With `leaves_out` tools that run at another provider are left out; the Response's `tools` are those that are left.
    """
    body = {name: value for name, value in parse_json(raw).items() if value is not None}
    if leaves_out and "tools" in body:
        body["tools"] = without_hosted(body["tools"])
    check(body)
    if body.get("max_output_tokens") == -1:
        del body["max_output_tokens"]
    earlier = _earlier(body.get("previous_response_id"), recall)
    own, referenced_bytes = _items(body.get("input", ()), find_item)
    items = (*earlier.items, *own)
    conversation = messages_of(items)
    if not conversation and not body.get("instructions"):
        f.refuse("input", "`input` is needed and holds nothing to answer; send a text or items")
    names, tools = _tools(body.get("tools") or ())
    include = body.get("include") or ()
    chat: dict[str, Any] = {
        "model": body["model"],
        "messages": with_instructions(body.get("instructions"), conversation),
        **_stream(body),
        **_tool_fields(body, tools),
        **_shape(body.get("text") or {}),
        **_sampling(body, INCLUDE_LOGPROBS in include),
    }
    request = decode_chat(chat)
    normalize_chat(request)
    return ResponsesRequest(
        request=typed(Endpoint.CHAT, request, earlier.size_bytes + referenced_bytes + len(raw)),
        echo=_echo(body),
        names=names,
        items=items,
        stored=body.get("store", True),
        seals=INCLUDE_REASONING in include,
    )


def _earlier(id: str | None, recall: Recall) -> Earlier:
    if id is None:
        return Earlier((), 0)
    found = recall(id)
    if found is None:
        raise RequestError(
            Code.PREVIOUS_RESPONSE_NOT_FOUND,
            f"Previous response with id '{id[:80]}' not found: it was not stored, is of another key, or was forgotten "
            "(they are kept in memory for a while); send the whole conversation as `input`",
            param="previous_response_id",
        )
    return found


def _items(given: str | Sequence[Item], find_item: FindItem) -> tuple[list[Item], int]:
    """The items of `input`, with kept items in place of references to them, and the size of those as JSON."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}], 0
    items: list[Item] = []
    size = 0
    for index, item in enumerate(given):
        if kind_of(item) == REFERENCE:
            found = find_item(item["id"])
            if found is None:
                raise _item_not_found(item["id"], f"input[{index}]")
            item, item_bytes = found
            size += item_bytes
        items.append(item)
    return items, size


def _item_not_found(id: str, param: str) -> RequestError:
    return RequestError(
        Code.NOT_FOUND,
        f"Item with id '{id[:80]}' not found: its response was not stored, belongs to another API key, or is no longer "
        "kept (responses are kept in memory for an hour). Send the item itself instead of a reference; clients do so "
        "with `store: false`.",
        param=param,
    )


# --- parts of the chat body -------------------------------------------------------------------------------------------
def _stream(body: Mapping[str, Any]) -> dict[str, Any]:
    return {"stream": True, "stream_options": {"include_usage": True}} if body.get("stream") else {}


_OF_A_FUNCTION = ("description", "parameters", "strict")


def _tools(tools: Sequence[Mapping[str, Any]]) -> tuple[dict[str, tuple[str, str]], list[dict[str, Any]]]:
    """Functions by their name in chat, and chat's tools; those of a namespace carry its name before theirs."""
    names: dict[str, tuple[str, str]] = {}
    found: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        namespace = tool["name"] if tool["type"] == "namespace" else ""
        for function in tool["tools"] if namespace else (tool,):
            name = function_name(function["name"], namespace)
            if name in names:
                f.refuse(
                    f"tools[{index}].name", f"`tools` has two functions named {name[:80]!r}; give each its own name"
                )
            names[name] = (function["name"], namespace)
            kept = {key: function[key] for key in _OF_A_FUNCTION if function.get(key) is not None}
            found.append({"type": "function", "function": {"name": name, **kept}})
    return names, found


def _tool_fields(body: Mapping[str, Any], tools: list[dict[str, Any]]) -> dict[str, Any]:
    """`tools`, `tool_choice` and `parallel_tool_calls`. Tools that are not allowed are not shown at all."""
    choice = body.get("tool_choice", "auto")
    if not tools:
        if choice not in ("none", "auto"):
            f.refuse("tool_choice", "`tool_choice` needs `tools`")
        return {}
    said: Any = choice
    if isinstance(choice, Mapping):
        wanted = choice["tools"] if choice["type"] == "allowed_tools" else (choice,)
        path = "tool_choice.tools" if choice["type"] == "allowed_tools" else "tool_choice"
        allowed = _known_functions(wanted, {tool["function"]["name"] for tool in tools}, path)
        if choice["type"] == "allowed_tools":
            tools = [tool for tool in tools if tool["function"]["name"] in allowed]
            said = choice["mode"]
        else:
            said = {"type": "function", "function": {"name": allowed.pop()}}
    parallel = body.get("parallel_tool_calls")
    fields = {"tools": tools, "tool_choice": said}
    return fields if parallel is None else {**fields, "parallel_tool_calls": parallel}


def _known_functions(wanted: Sequence[Mapping[str, Any]], known: set[str], path: str) -> set[str]:
    """The names in chat of the functions `wanted`; raises RequestError for one that is not among `known`."""
    names = [function_name(function["name"], function.get("namespace")) for function in wanted]
    for name in names:
        if name not in known:
            f.refuse(path, f"`{path}` names {name[:80]!r}, which is no function in `tools`")
    return set(names)


def _shape(text: Mapping[str, Any]) -> dict[str, Any]:
    """`response_format` and `verbosity`."""
    shape = text.get("format") or {}
    fields: dict[str, Any] = {"verbosity": text["verbosity"]} if text.get("verbosity") else {}
    match shape.get("type"):
        case "json_object":
            fields["response_format"] = {"type": "json_object"}
        case "json_schema":
            names = ("name", "schema", "strict", "description")
            inner = {name: shape[name] for name in names if shape.get(name) is not None}
            fields["response_format"] = {"type": "json_schema", "json_schema": inner}
    return fields


_SAME = (
    "temperature", "top_p", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "user",
    *EXTENSIONS,
)  # fmt: skip
"""Fields that are the same in chat."""


def _sampling(body: Mapping[str, Any], logprobs: bool) -> dict[str, Any]:
    fields = {name: body[name] for name in _SAME if name in body}
    if "max_output_tokens" in body:
        fields["max_completion_tokens"] = body["max_output_tokens"]
    if effort := (body.get("reasoning") or {}).get("effort"):
        fields["reasoning_effort"] = effort
    top = body.get("top_logprobs", 0)
    if logprobs or top:
        fields |= {"logprobs": True, "top_logprobs": top}
    return fields


# --- what the Response object repeats ---------------------------------------------------------------------------------
_REPEATED: Mapping[str, Any] = {
    "background": False, "instructions": None, "max_output_tokens": None, "max_tool_calls": None, "metadata": {},
    "parallel_tool_calls": True, "previous_response_id": None, "prompt_cache_key": None,
    "prompt_cache_retention": None, "safety_identifier": None, "temperature": None,
    "tool_choice": "auto", "top_logprobs": 0, "top_p": None, "truncation": "disabled", "user": None,
}  # fmt: skip
"""Fields of the body that stand in the Response object too, with what counts when they are absent."""


def _echo(body: Mapping[str, Any]) -> dict[str, Any]:
    reasoning, text = body.get("reasoning") or {}, body.get("text") or {}
    said = {name: body.get(name, default) for name, default in _REPEATED.items()}
    summary = reasoning.get("summary") or reasoning.get("generate_summary")
    said["reasoning"] = {"effort": reasoning.get("effort"), "summary": None if summary == "none" else summary}
    said["text"] = {"format": text.get("format") or {"type": "text"}}
    if text.get("verbosity"):
        said["text"]["verbosity"] = text["verbosity"]
    said["tools"] = [_shown(tool) for tool in body.get("tools") or ()]
    return said


def _shown(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool["type"] == "namespace":
        head = {"type": "namespace", "name": tool["name"], "description": tool.get("description") or ""}
        return {**head, "tools": [_shown(inner) for inner in tool["tools"]]}
    return {name: tool.get(name) for name in ("type", "name", *_OF_A_FUNCTION)}
