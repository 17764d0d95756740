"""Translates a Responses request into the chat request of the gateway."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.apis.body_parser import parse_json, with_request_errors
from gateway.apis.openai.frames import Endpoint
from gateway.apis.openai.generation_request import ChatRequest, InferenceRequest, normalize_chat, typed
from gateway.apis.responses.responses_items import function_name, messages_of, with_instructions
from gateway.apis.responses_body import (
    INCLUDE_LOGPROBS,
    INCLUDE_REASONING,
    SAME_IN_CHAT,
    AllowedTools,
    FunctionChoice,
    FunctionTool,
    InputItem,
    ItemReference,
    JsonObjectFormat,
    MessageItem,
    NamespaceTool,
    ReasoningOptions,
    ResponsesBody,
    SchemaFormat,
    TextFormat,
    TextOptions,
    decode_responses,
    without_hosted,
)
from gateway.errors import RequestError
from headgate.shared.bodies.body_decoder import refuse
from headgate.shared.bodies.openai_bodies import (
    AnswerSchema,
    ChosenFunction,
    ChosenTool,
    Function,
    ResponseFormat,
    StreamOptions,
    Tool,
)
from inference.protocol import Code

Names = Mapping[str, tuple[str, str]]
"""Name and namespace of a function, by its name in the chat."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """The conversation up to an earlier answer: its items without instructions, and their size as JSON."""

    items: tuple[InputItem, ...]
    size_bytes: int


Recall = Callable[[str], Earlier | None]
"""The conversation of a `previous_response_id`; None if it is not stored."""

FindItem = Callable[[str], tuple[InputItem, int] | None]
"""The item with this id and its size as JSON; None if no stored conversation contains it."""


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """One Responses request. `echo` are the request fields that the Response object repeats.

    `items` is the whole conversation without instructions, for later requests. `with_encrypted_content`: reasoning
    is also returned as `encrypted_content`.
    """

    request: InferenceRequest
    echo: Mapping[str, Any]
    names: Names
    items: tuple[InputItem, ...]
    stored: bool
    with_encrypted_content: bool


@with_request_errors
def decoded(raw: bytes, *, omit_hosted_tools: bool = False) -> ResponsesBody:
    """The body in `raw`; raises RequestError that names the field and what to write instead.

    `omit_hosted_tools`: tools that run at another provider are left out, also in `tools` of the Response object.
    """
    given = {name: value for name, value in parse_json(raw).items() if value is not None}
    if omit_hosted_tools and "tools" in given:
        given["tools"] = without_hosted(given["tools"])
    body = decode_responses(given)
    if body.max_output_tokens == -1:
        body.max_output_tokens = None
    return body


def references(body: ResponsesBody) -> tuple[str | None, list[str]]:
    """The id of the previous response, and the ids of the referenced items."""
    items = body.input if isinstance(body.input, list) else ()
    return body.previous_response_id, [item.id for item in items if isinstance(item, ItemReference)]


@with_request_errors
def translated(body: ResponsesBody, body_bytes: int, recall: Recall, find_item: FindItem) -> ResponsesRequest:
    """The request in a body of this size; raises RequestError."""
    earlier = _earlier(body.previous_response_id, recall)
    own, referenced_bytes = _items(body.input or (), find_item)
    items = (*earlier.items, *own)
    conversation = messages_of(items)
    if not conversation and not body.instructions:
        refuse("input", "`input` must not be empty; send a text or items")
    names, tools = _tools(body.tools or ())
    chat = ChatRequest(model=body.model, messages=with_instructions(body.instructions, conversation))
    if body.stream:
        chat.stream, chat.stream_options = True, StreamOptions(include_usage=True)
    _set_tools(chat, body, tools)
    _set_shape(chat, body.text)
    _set_sampling(chat, body)
    normalize_chat(chat)
    return ResponsesRequest(
        request=typed(Endpoint.CHAT, chat, earlier.size_bytes + referenced_bytes + body_bytes),
        echo=_echo(body),
        names=names,
        items=items,
        stored=body.store is not False,
        with_encrypted_content=INCLUDE_REASONING in (body.include or ()),
    )


def _earlier(id: str | None, recall: Recall) -> Earlier:
    if id is None:
        return Earlier((), 0)
    found = recall(id)
    if found is None:
        raise RequestError(
            Code.PREVIOUS_RESPONSE_NOT_FOUND,
            f"Previous response with id '{id[:80]}' not found: it was not stored, belongs to another API "
            "key, or has expired; send the whole conversation as `input`",
            param="previous_response_id",
        )
    return found


def _items(given: str | Sequence[InputItem], find_item: FindItem) -> tuple[list[InputItem], int]:
    """The items of `input` with references replaced by stored items, and the size of the stored items as JSON."""
    if isinstance(given, str):
        return [MessageItem(role="user", content=given)], 0
    items: list[InputItem] = []
    size = 0
    for index, item in enumerate(given):
        if isinstance(item, ItemReference):
            found = find_item(item.id)
            if found is None:
                raise _item_not_found(item.id, f"input[{index}]")
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


# --- parts of the chat request ----------------------------------------------------------------------------------------
_OF_A_FUNCTION = ("description", "parameters", "strict")


def _tools(tools: Sequence[FunctionTool | NamespaceTool]) -> tuple[dict[str, tuple[str, str]], dict[str, Tool]]:
    """The functions (name, namespace) and the chat tools, by name in the chat. A namespace is a prefix of that name."""
    names: dict[str, tuple[str, str]] = {}
    found: dict[str, Tool] = {}
    for index, tool in enumerate(tools):
        namespace = tool.name if isinstance(tool, NamespaceTool) else ""
        for one in tool.tools if isinstance(tool, NamespaceTool) else (tool,):
            name = function_name(one.name, namespace)
            if name in names:
                refuse(f"tools[{index}].name", f"`tools` has two functions named {name[:80]!r}; give each its own name")
            names[name] = (one.name, namespace)
            function = Function(name=name, description=one.description, parameters=one.parameters, strict=one.strict)
            found[name] = Tool(type="function", function=function)
    return names, found


def _set_tools(chat: ChatRequest, body: ResponsesBody, tools: Mapping[str, Tool]) -> None:
    """Sets `tools`, `tool_choice` and `parallel_tool_calls`. Tools that are not allowed are left out."""
    choice = body.tool_choice or "auto"
    if not tools:
        if choice not in ("none", "auto"):
            refuse("tool_choice", "`tool_choice` needs `tools`")
        return
    chat.tools, chat.parallel_tool_calls = list(tools.values()), body.parallel_tool_calls
    if isinstance(choice, AllowedTools):
        allowed = _known_functions(choice.tools, tools, "tool_choice.tools")
        chat.tools = [tool for name, tool in tools.items() if name in allowed]
        chat.tool_choice = choice.mode
    elif isinstance(choice, FunctionChoice):
        (name,) = _known_functions((choice,), tools, "tool_choice")
        chat.tool_choice = ChosenTool(type="function", function=ChosenFunction(name=name))
    else:
        chat.tool_choice = choice


def _known_functions(wanted: Sequence[FunctionChoice], known: Mapping[str, Tool], path: str) -> set[str]:
    """The names in the chat of the functions `wanted`; one that is not among `known` is refused."""
    names = [function_name(function.name, function.namespace) for function in wanted]
    for name in names:
        if name not in known:
            refuse(path, f"`{path}` names {name[:80]!r}, which is not a function in `tools`")
    return set(names)


def _set_shape(chat: ChatRequest, text: TextOptions | None) -> None:
    """Sets `response_format` and `verbosity`."""
    if text is None:
        return
    chat.verbosity = text.verbosity
    match text.format:
        case JsonObjectFormat():
            chat.response_format = ResponseFormat(type="json_object")
        case SchemaFormat(name=name, schema=schema, strict=strict, description=description):
            inner = AnswerSchema(name=name, schema=schema, strict=strict, description=description)
            chat.response_format = ResponseFormat(type="json_schema", json_schema=inner)


def _set_sampling(chat: ChatRequest, body: ResponsesBody) -> None:
    for name in SAME_IN_CHAT:
        setattr(chat, name, getattr(body, name))
    chat.max_completion_tokens = body.max_output_tokens
    chat.reasoning_effort = body.reasoning.effort if body.reasoning is not None else None
    top = body.top_logprobs or 0
    if top or INCLUDE_LOGPROBS in (body.include or ()):
        chat.logprobs, chat.top_logprobs = True, top


# --- fields that the Response object repeats --------------------------------------------------------------------------
_REPEATED: Mapping[str, Any] = {
    "background": False, "instructions": None, "max_output_tokens": None, "max_tool_calls": None, "metadata": {},
    "parallel_tool_calls": True, "previous_response_id": None, "prompt_cache_key": None,
    "prompt_cache_retention": None, "safety_identifier": None, "temperature": None,
    "tool_choice": "auto", "top_logprobs": 0, "top_p": None, "truncation": "disabled", "user": None,
}  # fmt: skip
"""Fields of the body that the Response object repeats, with their defaults."""


def _echo(body: ResponsesBody) -> dict[str, Any]:
    reasoning, text = body.reasoning or ReasoningOptions(), body.text or TextOptions()
    given = {name: getattr(body, name) for name in _REPEATED}
    echo = {name: _REPEATED[name] if value is None else msgspec.to_builtins(value) for name, value in given.items()}
    summary = reasoning.summary or reasoning.generate_summary
    echo["reasoning"] = {"effort": reasoning.effort, "summary": None if summary == "none" else summary}
    echo["text"] = msgspec.to_builtins(TextOptions(format=text.format or TextFormat(), verbosity=text.verbosity))
    echo["tools"] = [_shown(tool) for tool in body.tools or ()]
    return echo


def _shown(tool: FunctionTool | NamespaceTool) -> dict[str, Any]:
    if isinstance(tool, NamespaceTool):
        head = {"type": "namespace", "name": tool.name, "description": tool.description or ""}
        return {**head, "tools": [_shown(inner) for inner in tool.tools]}
    return {"type": "function", "name": tool.name, **{name: getattr(tool, name) for name in _OF_A_FUNCTION}}
