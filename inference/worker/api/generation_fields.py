"""The sampling, stop strings, tools and the answer's format in a decoded body, checked against the model."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from headgate.shared.bodies import openai_bodies
from headgate.shared.bodies.openai_bodies import (
    ChatBody,
    ChosenTool,
    CompletionRequest,
    ResponseFormat,
    StructuredOutputs,
    TokenizeBody,
)
from headgate.shared.parameters import SAMPLING_PARAMETERS, Sampling
from inference.protocol import Code
from inference.worker.api.body_intake import refuse_extra, refuse_field
from inference.worker.dialects.answer_parts import Tool, ToolChoice
from inference.worker.dialects.forms import Form, Grammar, Json, Literal, OneOf, Regex
from inference.worker.worker_errors import BadRequestError
from inference.worker.worker_requests import Facts

MAX_STOP_LENGTH = 1024
MAX_BIASES = 1024
MAX_TOOLS = 128
"""OpenAI's limit."""
MAX_PATTERN_CHARS = 2**16
MAX_GRAMMAR_CHARS = 2**18

_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
"""Anthropic's limit; OpenAI's is 64."""
_SUPERSEDED = {"functions": "tools", "function_call": "tool_choice"}

_OBJECT: Mapping[str, Any] = {"type": "object"}
_TYPE_KEYWORDS = frozenset(["type", "$ref", "enum", "const", "allOf", "anyOf", "oneOf"])
_FUNCTION = '{} must be {{"type": "function", "function": {{"name": ...}}}}'


# --- sampling --------------------------------------------------------------------------------------------------------
def sampling_of(given: ChatBody | CompletionRequest, facts: Facts) -> Sampling:
    """The sampling of a request. Defaults: the model file's recommendations, else those of SAMPLING_PARAMETERS."""
    values: dict[str, Any] = {}
    for row in SAMPLING_PARAMETERS:
        value = getattr(given, row.name)
        is_absent = value is None or value == [] or (row.minus_one and value == -1)
        value = facts.sampling_defaults.get(row.name, row.default) if is_absent else value
        values[row.name] = tuple(value) if row.kind == "strings" else value
    if given.repetition_penalty is not None:
        values["repeat_penalty"] = given.repetition_penalty
    values["top_k"] = min(int(values["top_k"]), facts.n_vocab)
    return Sampling(**values, logit_bias=_biases(given.logit_bias or {}, facts))


def _biases(values: Mapping[str, Any], facts: Facts) -> tuple[tuple[int, float], ...]:
    found = []
    if len(values) > MAX_BIASES:
        raise BadRequestError(f"logit_bias has {len(values)} entries; at most {MAX_BIASES} are allowed", "logit_bias")
    for key, value in values.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < facts.n_vocab):
            raise BadRequestError(
                f"logit_bias names {key[:40]!r}; token ids are from 0 to {facts.n_vocab - 1}",
                "logit_bias",
            )
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -100 <= value <= 100:
            raise BadRequestError(f"logit_bias.{key} must be a number from -100 to 100", f"logit_bias.{key}")
        found.append((int(key), float(value)))
    return tuple(found)


def stops_of(stops: Sequence[str]) -> tuple[str, ...]:
    """The stop strings; raises BadRequestError for one that is too long."""
    if any(len(stop) > MAX_STOP_LENGTH for stop in stops):
        raise BadRequestError(f"every stop must be a string of 1 to {MAX_STOP_LENGTH} characters", "stop")
    return tuple(stops)


# --- tools -----------------------------------------------------------------------------------------------------------
def tools_of(given: ChatBody | TokenizeBody, facts: Facts) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The tools and the choice among them; without tools the mode is `none`.

    Raises BadRequestError, `unsupported_parameter` where the model itself cannot call tools.
    """
    for name, instead in _SUPERSEDED.items():
        if getattr(given, name) not in (None, [], "none", "auto"):
            raise BadRequestError(f"{name} is superseded; use {instead}", name, code=Code.UNSUPPORTED_PARAMETER)
    tools = _tools(given.tools or ())
    tools, choice = _tool_choice(given.tool_choice, tools, given.parallel_tool_calls is not False)
    if choice.mode != "none" and "tools" not in facts.capabilities:
        raise BadRequestError(
            f"model {facts.model_id!r} does not support tools; use another model, or remove tools from the request",
            "tools",
            code=Code.UNSUPPORTED_PARAMETER,
        )
    return tools, choice


def _tools(given: Sequence[openai_bodies.Tool]) -> tuple[Tool, ...]:
    if len(given) > MAX_TOOLS:
        raise BadRequestError(f"tools has {len(given)} entries; at most {MAX_TOOLS} are allowed", "tools")
    found: dict[str, Tool] = {}
    for index, item in enumerate(given):
        tool = _tool(item, f"tools[{index}]")
        if tool.name in found:
            raise BadRequestError(f"two tools are named {tool.name!r}", f"tools[{index}].function.name")
        found[tool.name] = tool
    return tuple(found.values())


def _tool(item: openai_bodies.Tool, at: str) -> Tool:
    if item.type == "custom":
        raise BadRequestError(
            "this model supports only tools of type function", f"{at}.type", code=Code.UNSUPPORTED_PARAMETER
        )
    function = item.function
    if function is None:
        raise BadRequestError(_FUNCTION.format(at), at)
    at += ".function"
    refuse_extra(function, at)
    if not _TOOL_NAME.fullmatch(function.name):
        raise BadRequestError(f"{at}.name must be 1 to 128 letters, digits, underscores and dashes", f"{at}.name")
    if function.parameters is not None and function.parameters.get("type", "object") != "object":
        raise BadRequestError(f"{at}.parameters must be a JSON schema of an object", f"{at}.parameters")
    return Tool(function.name, function.description or "", function.parameters, bool(function.strict))


def _tool_choice(
    choice: str | ChosenTool | None, tools: tuple[Tool, ...], parallel: bool
) -> tuple[tuple[Tool, ...], ToolChoice]:
    if choice in (None, "none", "auto"):
        return tools, ToolChoice("none" if not tools or choice == "none" else "auto", None, parallel)
    if not tools:
        raise BadRequestError("tool_choice needs tools", "tool_choice")
    if not isinstance(choice, ChosenTool):
        return tools, ToolChoice("required", None, parallel)
    if choice.type != "allowed_tools":
        return tools, ToolChoice("named", _declared_tool(choice, tools, "tool_choice").name, parallel)
    at = "tool_choice.allowed_tools"
    allowed = choice.allowed_tools
    if allowed is None:
        raise BadRequestError(f'{at} needs a mode, "auto" or "required", and a list of tools', at)
    # The model does not see tools that are not allowed.
    kept = [_declared_tool(item, tools, f"{at}.tools[{index}]") for index, item in enumerate(allowed.tools)]
    return tuple(tool for tool in tools if tool in kept), ToolChoice(allowed.mode, None, parallel)


def _declared_tool(choice: ChosenTool, tools: tuple[Tool, ...], at: str) -> Tool:
    if choice.type != "function" or choice.function is None:
        raise BadRequestError(_FUNCTION.format(at), at)
    for tool in tools:
        if tool.name == choice.function.name:
            return tool
    raise BadRequestError(f"{at} names {choice.function.name[:80]!r}, which is not in tools", f"{at}.function.name")


# --- format of the answer --------------------------------------------------------------------------------------------
def form_of(given: ChatBody | CompletionRequest) -> tuple[Form | None, str]:
    """The required form of the answer and the parameter that requires it; (None, "") where any text is allowed.

    Raises BadRequestError, also when two parameters require a form.
    """
    required: dict[str, Form | None] = {}
    if isinstance(given, ChatBody) and given.response_format is not None:
        required["response_format"] = _response_format(given.response_format)
    if given.json_schema is not None:
        required["json_schema"] = Json(given.json_schema, closed=True)
    for name, read in _FORM_READERS.items():
        if (value := getattr(given, name)) is not None:
            required[name] = read(value, name)
    if given.structured_outputs is not None:
        required["structured_outputs"] = _structured(given.structured_outputs)
    forms = [(form, name) for name, form in required.items() if form is not None]
    if len(forms) > 1:
        (_, first), (_, second), *_ = forms
        raise BadRequestError(f"{first} and {second} both set the format of the answer; send one of them", second)
    return forms[0] if forms else (None, "")


def _response_format(given: ResponseFormat) -> Form | None:
    at = "response_format"
    extra = dict(given.extra or {})
    for name, kind in (("schema", "json_object"), ("json_schema", "json_schema")):
        if given.type != kind and getattr(given, name) is not None:
            extra[name] = True
    for name, value in extra.items():
        if value is not None:
            refuse_field(name, at)
    if given.type == "text":
        return None
    if given.type == "json_object":
        return Json(_OBJECT if given.schema is None else _object_schema(given.schema), closed=True)
    at += ".json_schema"
    wrapped = given.json_schema
    if wrapped is None:
        raise BadRequestError(f"{at} must be an object with name and schema", at)
    refuse_extra(wrapped, at)
    if wrapped.schema is None:
        raise BadRequestError(f"{at}.schema must be a JSON schema", f"{at}.schema")
    # A schema that cannot be enforced is refused unless the request sets strict to false.
    return Json(wrapped.schema, wrapped.strict is not False, closed=True)


def _object_schema(schema: Mapping[str, Any] | bool) -> Mapping[str, Any] | bool:
    """The schema, with type object unless it restricts the type itself."""
    if schema is True:
        return _OBJECT
    return schema if schema is False or _TYPE_KEYWORDS & schema.keys() else {**_OBJECT, **schema}


def _json_text(value: Mapping[str, Any] | bool | str, at: str) -> Form:
    """As in vLLM, a schema may also be sent as JSON text."""
    schema: Any = value
    if isinstance(value, str):
        with contextlib.suppress(orjson.JSONDecodeError):
            schema = orjson.loads(value)
    if not isinstance(schema, (dict, bool)):
        raise BadRequestError(f"{at} must be a JSON schema", at)
    return Json(schema, closed=True)


def _limited_text(value: str, at: str, most: int) -> str:
    if len(value) > most:
        raise BadRequestError(f"{at} has {len(value)} characters; at most {most} are allowed", at)
    return value


def _regex(value: str, at: str) -> Form:
    return Regex(_limited_text(value, at, MAX_PATTERN_CHARS))


def _grammar(value: str, at: str) -> Form:
    return Grammar(_limited_text(value, at, MAX_GRAMMAR_CHARS))


def _choice(value: Sequence[str], at: str) -> Form:
    return OneOf(
        tuple(Literal(_limited_text(item, f"{at}[{index}]", MAX_PATTERN_CHARS)) for index, item in enumerate(value))
    )


def _structured(given: StructuredOutputs) -> Form | None:
    """vLLM's object with one entry."""
    entries = {name: value for name in _STRUCTURED if (value := getattr(given, name)) is not None}
    if len(entries) != 1 or given.extra:
        raise BadRequestError(
            f"structured_outputs must contain exactly one of {', '.join(_STRUCTURED)}, and nothing else",
            "structured_outputs",
        )
    ((name, value),) = entries.items()
    return _STRUCTURED[name](value, f"structured_outputs.{name}")


_STRUCTURED: Mapping[str, Callable[[Any, str], Form | None]] = {
    "json": _json_text,
    "json_object": lambda value, at: Json(_OBJECT) if value else None,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
_FORM_READERS = {
    "regex": _regex,
    "grammar": _grammar,
    **{f"guided_{name}": read for name, read in _STRUCTURED.items() if name != "json_object"},
}
