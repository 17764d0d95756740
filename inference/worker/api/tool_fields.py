"""Reads tools and which of them may be called out of a body; never presents them to a model and knows no schema."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from inference.protocol import Code
from inference.worker.api import body_fields
from inference.worker.dialects.answer_parts import Tool, ToolChoice
from inference.worker.worker_errors import BadRequestError
from inference.worker.worker_requests import Facts

MAX_TOOLS = 128
"""As many as OpenAI takes."""

NAMES = frozenset(["tools", "tool_choice", "parallel_tool_calls", "functions", "function_call"])
"""The fields that `tools_of` reads."""

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
"""Anthropic's bound; OpenAI's is half of it."""
_FUNCTION = frozenset(["name", "description", "parameters", "strict"])
_SUPERSEDED = {"functions": "tools", "function_call": "tool_choice"}


def tools_of(given: Mapping[str, Any], facts: Facts) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The tools and the choice among them; without tools the mode is `none`.

    Raises BadRequestError, `unsupported_parameter` where the model itself cannot call tools.
    """
    for name, instead in _SUPERSEDED.items():
        if given.get(name) not in (None, [], "none", "auto"):
            raise BadRequestError(f"{name} is superseded; use {instead}", name, code=Code.UNSUPPORTED_PARAMETER)
    tools = _tools(given.get("tools", []))
    parallel = body_fields.boolean(given, "parallel_tool_calls", True)
    tools, choice = _choice(given.get("tool_choice"), tools, parallel)
    if choice.mode != "none" and "tools" not in facts.capabilities:
        raise BadRequestError(
            f"model {facts.model_id!r} does not call tools; ask another one, or send the request without tools",
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
        if field not in _FUNCTION:
            raise BadRequestError(f"unknown field {field[:80]!r} in {at}", f"{at}.{field[:80]}")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadRequestError(f"{at}.name must be 1 to 128 of letters, digits, underscores and dashes", f"{at}.name")
    description = function.get("description")
    if not isinstance(description, (str, type(None))):
        raise BadRequestError(f"{at}.description must be a string", f"{at}.description")
    parameters = function.get("parameters")
    if parameters is not None and (not isinstance(parameters, dict) or parameters.get("type", "object") != "object"):
        raise BadRequestError(f"{at}.parameters must be a JSON schema of an object", f"{at}.parameters")
    return Tool(name, description or "", parameters, body_fields.boolean(function, "strict", False, prefix=f"{at}."))


def _function(item: Any, at: str) -> Mapping[str, Any]:
    """What `{"type": "function", "function": {...}}` holds."""
    kind = item.get("type") if isinstance(item, dict) else None
    if kind == "custom":
        raise BadRequestError(
            "only tools of type function can be called by this model", f"{at}.type", code=Code.UNSUPPORTED_PARAMETER
        )
    function = item.get("function") if isinstance(item, dict) else None
    if kind != "function" or not isinstance(function, dict):
        raise BadRequestError(f'{at} must be {{"type": "function", "function": {{"name": ...}}}}', at)
    return function


def _choice(value: Any, tools: tuple[Tool, ...], parallel: bool) -> tuple[tuple[Tool, ...], ToolChoice]:
    if value in (None, "none", "auto"):
        return tools, ToolChoice("none" if not tools or value == "none" else "auto", None, parallel)
    if not tools:
        raise BadRequestError("tool_choice needs tools", "tool_choice")
    if value == "required":
        return tools, ToolChoice("required", None, parallel)
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        return _allowed(value.get("allowed_tools"), tools, parallel)
    if not isinstance(value, dict):
        raise BadRequestError(
            'tool_choice must be "none", "auto", "required" or name one tool as '
            '{"type": "function", "function": {"name": ...}}',
            "tool_choice",
        )
    return tools, ToolChoice("named", _known(value, tools, "tool_choice").name, parallel)


def _allowed(value: Any, tools: tuple[Tool, ...], parallel: bool) -> tuple[tuple[Tool, ...], ToolChoice]:
    """Some of the tools only: the model is not told of the others."""
    at = "tool_choice.allowed_tools"
    named = value.get("tools") if isinstance(value, dict) else None
    if not isinstance(named, list) or not named or value.get("mode") not in ("auto", "required"):
        raise BadRequestError(f'{at} needs a mode, "auto" or "required", and a list of tools', at)
    mode: Literal["auto", "required"] = value["mode"]
    kept = [_known(item, tools, f"{at}.tools[{index}]") for index, item in enumerate(named)]
    return tuple(tool for tool in tools if tool in kept), ToolChoice(mode, None, parallel)


def _known(item: Any, tools: tuple[Tool, ...], at: str) -> Tool:
    name = _function(item, at).get("name")
    for tool in tools:
        if tool.name == name:
            return tool
    raise BadRequestError(f"{at} names {str(name)[:80]!r}, which is none of the tools", f"{at}.function.name")
