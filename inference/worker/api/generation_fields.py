"""Reads the fields of a generation body that become objects: sampling, stop strings, tools and the answer's format."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from headgate.shared.parameters import BY_NAME, SAMPLING_PARAMETERS, Sampling
from inference.protocol import Code
from inference.worker.api import body_fields
from inference.worker.dialects.answer_parts import Tool, ToolChoice
from inference.worker.dialects.forms import Form, Grammar, Json, Literal, OneOf, Regex
from inference.worker.worker_errors import BadRequestError
from inference.worker.worker_requests import Facts

MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
MAX_BIASES = 1024
MAX_TOOLS = 128
"""OpenAI's limit."""
MAX_PATTERN_CHARS = 2**16
MAX_GRAMMAR_CHARS = 2**18
MAX_CHOICES = 4096

TOOL_FIELDS = frozenset(["tools", "tool_choice", "parallel_tool_calls", "functions", "function_call"])
"""The fields that `tools_of` reads."""

_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
"""Anthropic's limit; OpenAI's is 64."""
_FUNCTION_FIELDS = frozenset(["name", "description", "parameters", "strict"])
_SUPERSEDED = {"functions": "tools", "function_call": "tool_choice"}

_OBJECT: Mapping[str, Any] = {"type": "object"}
_TYPE_KEYWORDS = frozenset(["type", "$ref", "enum", "const", "allOf", "anyOf", "oneOf"])
_RESPONSE_FORMATS = {"text": None, "json_object": "schema", "json_schema": "json_schema"}
"""The field that may stand beside each type. Clients of llama.cpp send a schema beside `json_object`."""


# --- sampling --------------------------------------------------------------------------------------------------------
def sampling_of(given: Mapping[str, Any], facts: Facts) -> Sampling:
    """The sampling of a request. Defaults are the model file's recommendations, then those of the declarations."""
    values = {
        row.name: body_fields.parameter(given, row, facts.sampling_defaults.get(row.name, row.default))
        for row in SAMPLING_PARAMETERS
    }
    values["repeat_penalty"] = body_fields.parameter(given, BY_NAME["repetition_penalty"], values["repeat_penalty"])
    values["top_k"] = min(int(values["top_k"]), facts.n_vocab)
    return Sampling(**values, logit_bias=_biases(given, facts))


def _biases(given: Mapping[str, Any], facts: Facts) -> tuple[tuple[int, float], ...]:
    found = []
    values = body_fields.mapping(given, "logit_bias")
    if len(values) > MAX_BIASES:
        raise BadRequestError(f"logit_bias has {len(values)} entries; at most {MAX_BIASES} are allowed", "logit_bias")
    for key in values:
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < facts.n_vocab):
            raise BadRequestError(
                f"logit_bias names {key[:40]!r}; token ids are from 0 to {facts.n_vocab - 1}",
                "logit_bias",
            )
        found.append((int(key), body_fields.number(values, key, 0.0, -100.0, 100.0, prefix="logit_bias.")))
    return tuple(found)


def stops_of(value: Any) -> tuple[str, ...]:
    """The stop strings in a `stop` field."""
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise BadRequestError(f"stop must be a string or a list of at most {MAX_STOPS} strings", "stop")
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop) <= MAX_STOP_LENGTH:
            raise BadRequestError(f"every stop must be a string of 1 to {MAX_STOP_LENGTH} characters", "stop")
    return tuple(stops)


# --- tools -----------------------------------------------------------------------------------------------------------
def tools_of(given: Mapping[str, Any], facts: Facts) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The tools and the choice among them; without tools the mode is `none`.

    Raises BadRequestError, `unsupported_parameter` where the model itself cannot call tools.
    """
    for name, instead in _SUPERSEDED.items():
        if given.get(name) not in (None, [], "none", "auto"):
            raise BadRequestError(f"{name} is superseded; use {instead}", name, code=Code.UNSUPPORTED_PARAMETER)
    tools = _tools(given.get("tools", []))
    parallel = body_fields.boolean(given, "parallel_tool_calls", True)
    tools, choice = _tool_choice(given.get("tool_choice"), tools, parallel)
    if choice.mode != "none" and "tools" not in facts.capabilities:
        raise BadRequestError(
            f"model {facts.model_id!r} does not support tools; use another model, or remove tools from the request",
            "tools",
            code=Code.UNSUPPORTED_PARAMETER,
        )
    return tools, choice


def _tools(value: Any) -> tuple[Tool, ...]:
    if not isinstance(value, list):
        raise BadRequestError("tools must be a list", "tools")
    if len(value) > MAX_TOOLS:
        raise BadRequestError(f"tools has {len(value)} entries; at most {MAX_TOOLS} are allowed", "tools")
    found: dict[str, Tool] = {}
    for index, item in enumerate(value):
        tool = _tool(item, f"tools[{index}]")
        if tool.name in found:
            raise BadRequestError(f"two tools are named {tool.name!r}", f"tools[{index}].function.name")
        found[tool.name] = tool
    return tuple(found.values())


def _tool(item: Any, at: str) -> Tool:
    function = _function(item, at)
    at += ".function"
    for field in function:
        if field not in _FUNCTION_FIELDS:
            raise BadRequestError(f"unknown field {field[:80]!r} in {at}", f"{at}.{field[:80]}")
    name = function.get("name")
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise BadRequestError(f"{at}.name must be 1 to 128 letters, digits, underscores and dashes", f"{at}.name")
    description = function.get("description")
    if not isinstance(description, (str, type(None))):
        raise BadRequestError(f"{at}.description must be a string", f"{at}.description")
    parameters = function.get("parameters")
    if parameters is not None and (not isinstance(parameters, dict) or parameters.get("type", "object") != "object"):
        raise BadRequestError(f"{at}.parameters must be a JSON schema of an object", f"{at}.parameters")
    return Tool(name, description or "", parameters, body_fields.boolean(function, "strict", False, prefix=f"{at}."))


def _function(item: Any, at: str) -> Mapping[str, Any]:
    """The inner object of `{"type": "function", "function": {...}}`."""
    kind = item.get("type") if isinstance(item, dict) else None
    if kind == "custom":
        raise BadRequestError(
            "this model supports only tools of type function", f"{at}.type", code=Code.UNSUPPORTED_PARAMETER
        )
    function = item.get("function") if isinstance(item, dict) else None
    if kind != "function" or not isinstance(function, dict):
        raise BadRequestError(f'{at} must be {{"type": "function", "function": {{"name": ...}}}}', at)
    return function


def _tool_choice(value: Any, tools: tuple[Tool, ...], parallel: bool) -> tuple[tuple[Tool, ...], ToolChoice]:
    if value in (None, "none", "auto"):
        return tools, ToolChoice("none" if not tools or value == "none" else "auto", None, parallel)
    if not tools:
        raise BadRequestError("tool_choice needs tools", "tool_choice")
    if value == "required":
        return tools, ToolChoice("required", None, parallel)
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        return _allowed_tools(value.get("allowed_tools"), tools, parallel)
    if not isinstance(value, dict):
        raise BadRequestError(
            'tool_choice must be "none", "auto", "required" or name one tool as '
            '{"type": "function", "function": {"name": ...}}',
            "tool_choice",
        )
    return tools, ToolChoice("named", _declared_tool(value, tools, "tool_choice").name, parallel)


def _allowed_tools(value: Any, tools: tuple[Tool, ...], parallel: bool) -> tuple[tuple[Tool, ...], ToolChoice]:
    """Keeps only the allowed tools; the model does not see the others."""
    at = "tool_choice.allowed_tools"
    named = value.get("tools") if isinstance(value, dict) else None
    if not isinstance(named, list) or not named or value.get("mode") not in ("auto", "required"):
        raise BadRequestError(f'{at} needs a mode, "auto" or "required", and a list of tools', at)
    kept = [_declared_tool(item, tools, f"{at}.tools[{index}]") for index, item in enumerate(named)]
    return tuple(tool for tool in tools if tool in kept), ToolChoice(value["mode"], None, parallel)


def _declared_tool(item: Any, tools: tuple[Tool, ...], at: str) -> Tool:
    name = _function(item, at).get("name")
    for tool in tools:
        if tool.name == name:
            return tool
    raise BadRequestError(f"{at} names {str(name)[:80]!r}, which is not in tools", f"{at}.function.name")


# --- format of the answer --------------------------------------------------------------------------------------------
def form_of(given: Mapping[str, Any]) -> tuple[Form | None, str]:
    """The required form of the answer and the parameter that requires it; (None, "") where any text is allowed.

    Raises BadRequestError, also when two parameters require a form.
    """
    required = {
        name: form for name, read in _FORM_READERS.items() if name in given and (form := read(given[name], name))
    }
    if len(required) > 1:
        first, second, *_ = required
        raise BadRequestError(f"{first} and {second} both set the format of the answer; send one of them", second)
    for name, form in required.items():
        return form, name
    return None, ""


def _response_format(value: Any, at: str) -> Form | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _RESPONSE_FORMATS:
        raise BadRequestError(f'{at}.type must be "text", "json_object" or "json_schema"', at)
    for name in value:
        if name not in ("type", _RESPONSE_FORMATS[kind]) and value[name] is not None:
            raise BadRequestError(f"unknown field {name[:80]!r} in {at} of type {kind}", f"{at}.{name[:80]}")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = value.get("schema")
        return Json(_OBJECT if schema is None else _object_schema(_schema(schema, f"{at}.schema")), closed=True)
    at += ".json_schema"
    wrapped = value.get("json_schema")
    if not isinstance(wrapped, dict):
        raise BadRequestError(f"{at} must be an object with name and schema", at)
    for name in wrapped:
        if name not in ("name", "description", "schema", "strict"):
            raise BadRequestError(f"unknown field {name[:80]!r} in {at}", f"{at}.{name[:80]}")
    # A schema that cannot be enforced is refused unless the request sets strict to false.
    strict = body_fields.boolean(wrapped, "strict", True, prefix=f"{at}.")
    return Json(_schema(wrapped.get("schema"), f"{at}.schema"), strict, closed=True)


def _schema(value: Any, at: str) -> Mapping[str, Any] | bool:
    if not isinstance(value, (dict, bool)):
        raise BadRequestError(f"{at} must be a JSON schema", at)
    return value


def _object_schema(schema: Mapping[str, Any] | bool) -> Mapping[str, Any] | bool:
    """The schema, with type object unless it restricts the type itself."""
    if schema is True:
        return _OBJECT
    return schema if schema is False or _TYPE_KEYWORDS & schema.keys() else {**_OBJECT, **schema}


def _json(value: Any, at: str) -> Form:
    return Json(_schema(value, at), closed=True)


def _json_text(value: Any, at: str) -> Form:
    """As in vLLM, a schema may also be sent as JSON text."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            raise BadRequestError(f"{at} must be a JSON schema", at) from None
    return _json(value, at)


def _limited_text(value: Any, at: str, most: int) -> str:
    if not isinstance(value, str) or not value:
        raise BadRequestError(f"{at} must be a string that is not empty", at)
    if len(value) > most:
        raise BadRequestError(f"{at} has {len(value)} characters; at most {most} are allowed", at)
    return value


def _regex(value: Any, at: str) -> Form:
    return Regex(_limited_text(value, at, MAX_PATTERN_CHARS))


def _grammar(value: Any, at: str) -> Form:
    return Grammar(_limited_text(value, at, MAX_GRAMMAR_CHARS))


def _choice(value: Any, at: str) -> Form:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_CHOICES:
        raise BadRequestError(f"{at} must be a list of 1 to {MAX_CHOICES} strings", at)
    return OneOf(
        tuple(Literal(_limited_text(item, f"{at}[{index}]", MAX_PATTERN_CHARS)) for index, item in enumerate(value))
    )


def _any_object(value: Any, at: str) -> Form | None:
    if not isinstance(value, bool):
        raise BadRequestError(f"{at} must be true or false", at)
    return Json(_OBJECT) if value else None


def _structured(value: Any, at: str) -> Form | None:
    """vLLM's object with one entry."""
    entries = {} if not isinstance(value, dict) else {name: item for name, item in value.items() if item is not None}
    if len(entries) != 1 or (kind := next(iter(entries))) not in _STRUCTURED:
        raise BadRequestError(f"{at} must hold one of {', '.join(_STRUCTURED)}", at)
    return _STRUCTURED[kind](entries[kind], f"{at}.{kind}")


Reader = Callable[[Any, str], Form | None]

_STRUCTURED: Mapping[str, Reader] = {
    "json": _json_text,
    "json_object": _any_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
_FORM_READERS: Mapping[str, Reader] = {
    "response_format": _response_format,
    "json_schema": _json,
    "regex": _regex,
    "grammar": _grammar,
    "structured_outputs": _structured,
    **{f"guided_{name}": reader for name, reader in _STRUCTURED.items() if name != "json_object"},
}
FORM_FIELDS = frozenset(_FORM_READERS)
"""The fields that `form_of` reads."""
