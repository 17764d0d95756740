"""Checks a request as strictly as the real APIs would, independent of Headgate's translators; answers nothing.

A rule raises RefusedError with the message and the code of the real API.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.rigs.fake_provider import schemas


@dataclass(eq=False)
class RefusedError(Exception):
    """A 400. `code` and `param` are OpenAI's; Anthropic and Google have the message alone."""

    message: str
    code: str | None = None
    param: str | None = None


OPENAI_CHAT = frozenset((
    "messages", "model", "audio", "frequency_penalty", "function_call", "functions", "logit_bias", "logprobs",
    "max_completion_tokens", "max_tokens", "metadata", "modalities", "moderation", "n", "parallel_tool_calls",
    "prediction", "presence_penalty", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "reasoning_effort", "response_format", "safety_identifier", "seed", "service_tier", "stop", "store", "stream",
    "stream_options", "temperature", "tool_choice", "tools", "top_logprobs", "top_p", "user", "verbosity",
    "web_search_options",
))  # fmt: skip
GOOGLE_CHAT = frozenset((
    "messages", "model", "max_completion_tokens", "max_tokens", "n", "reasoning_effort", "response_format", "stop",
    "stream", "stream_options", "temperature", "tool_choice", "tools", "top_p",
))  # fmt: skip
OPENAI_COMPLETIONS = frozenset((
    "model", "prompt", "best_of", "echo", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "n",
    "presence_penalty", "seed", "stop", "stream", "stream_options", "suffix", "temperature", "top_p", "user",
))  # fmt: skip
OPENAI_EMBEDDINGS = frozenset(("model", "input", "dimensions", "encoding_format", "user"))
_MESSAGE_FIELDS: Mapping[str, frozenset[str]] = {
    "system": frozenset(("role", "content", "name")),
    "developer": frozenset(("role", "content", "name")),
    "user": frozenset(("role", "content", "name")),
    "assistant": frozenset(("role", "content", "name", "audio", "function_call", "refusal", "tool_calls")),
    "tool": frozenset(("role", "content", "tool_call_id")),
    "function": frozenset(("role", "content", "name")),
}
_UNANSWERED = "An assistant message with 'tool_calls' must be followed by tool messages."
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_IMAGE = re.compile(r"(https?://|data:image/[a-z+]+;base64,)", re.IGNORECASE)


# --- OpenAI -----------------------------------------------------------------------------------------------------------
def unknown_fields(body: Mapping[str, Any], known: frozenset[str], flavor: str) -> None:
    for name in body:
        if name not in known:
            if flavor == "google":
                raise RefusedError(f'Invalid JSON payload received. Unknown name "{name}": Cannot find field.')
            raise RefusedError(f"Unknown parameter: '{name}'.", "unknown_parameter", name)


def needed(body: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if body.get(name) is None:
            raise RefusedError(f"Missing required parameter: '{name}'.", "missing_required_parameter", name)


def in_range(body: Mapping[str, Any], name: str, low: float, high: float) -> None:
    value = body.get(name)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RefusedError(f"Invalid type for '{name}': expected a number.", "invalid_type", name)
    if not low <= value <= high:
        raise RefusedError(f"Invalid '{name}': expected a value between {low} and {high}.", "invalid_value", name)


def openai_chat(body: Mapping[str, Any], flavor: str) -> None:
    unknown_fields(body, GOOGLE_CHAT if flavor == "google" else OPENAI_CHAT, flavor)
    needed(body, "model", "messages")
    _sampling(body)
    if not isinstance(body["messages"], list) or not body["messages"]:
        raise RefusedError("Invalid 'messages': empty array.", "empty_array", "messages")
    open_calls: set[str] = set()
    for index, message in enumerate(body["messages"]):
        open_calls = _openai_message(message, f"messages[{index}]", open_calls, flavor)
    if open_calls:
        raise RefusedError(
            "An assistant message with 'tool_calls' must be followed by tool messages.", None, "messages"
        )
    for index, tool in enumerate(body.get("tools") or ()):
        name = (tool.get("function") or {}).get("name")
        if tool.get("type") == "function" and not (isinstance(name, str) and _NAME.fullmatch(name)):
            raise RefusedError("Invalid tool name.", "invalid_value", f"tools[{index}].function.name")
    if body.get("tool_choice") is not None and not body.get("tools"):
        raise RefusedError("'tool_choice' is only allowed when 'tools' are specified.", None, "tool_choice")
    if body.get("top_logprobs") is not None and not body.get("logprobs"):
        raise RefusedError("'logprobs' must be true.", "invalid_value", "top_logprobs")
    shape = body.get("response_format") or {}
    if unknown := shape.keys() - {"type", "json_schema"}:
        param = f"response_format.{min(unknown)}"
        raise RefusedError(f"Unknown parameter: '{param}'.", "unknown_parameter", param)
    if shape.get("type") == "json_schema" and not (shape.get("json_schema") or {}).get("name"):
        raise RefusedError(
            "Missing required parameter.", "missing_required_parameter", "response_format.json_schema.name"
        )
    if flavor == "openai" and re.match(r"(o\d|gpt-5)", body["model"]) and body.get("max_tokens") is not None:
        raise RefusedError(
            "Unsupported parameter: 'max_tokens' is not supported with this model. "
            "Use 'max_completion_tokens' instead.",
            "unsupported_parameter",
            "max_tokens",
        )
    if flavor == "google" and body.get("reasoning_effort") == "none" and body["model"].startswith("gemini-2.5-pro"):
        raise RefusedError("Budget 0 is invalid. This model only works in thinking mode.")
    if flavor == "openai":
        _longest_answer(body)
        _strict_schemas(body)
        _reasoning_model(body)
        if body.get("stream") and (body.get("audio") or {}).get("format") not in (None, "pcm16"):
            raise RefusedError(
                "Unsupported value: 'audio.format' when stream is true. Supported values are: 'pcm16'.",
                "unsupported_value",
                "audio.format",
            )


_LONGEST = {"gpt-4o": 16_384, "gpt-4o-mini": 16_384, "gpt-4.1": 32_768, "gpt-4-turbo": 4_096, "gpt-5-mini": 128_000}


def _longest_answer(body: Mapping[str, Any]) -> None:
    requested, most = body.get("max_completion_tokens") or 0, _LONGEST.get(body["model"])
    if most is not None and requested > most:
        message = f"max_tokens is too large: {requested}. This model supports at most {most} completion tokens"
        raise RefusedError(f"{message}, whereas you provided {requested}.", "invalid_value", "max_tokens")


def _strict_schemas(body: Mapping[str, Any]) -> None:
    shape = (body.get("response_format") or {}).get("json_schema") or {}
    if shape.get("strict") and (problem := schemas.openai_problem(shape.get("schema"))):
        message = f"Invalid schema for response_format '{shape['name']}': {problem}"
        raise RefusedError(message, None, "response_format")
    for index, tool in enumerate(body.get("tools") or ()):
        function = tool.get("function") or {}
        parameters = function.get("parameters") or {"type": "object", "additionalProperties": False}
        if function.get("strict") and (problem := schemas.openai_problem(parameters)):
            message = f"Invalid schema for function '{function['name']}': {problem}"
            raise RefusedError(message, "invalid_function_parameters", f"tools[{index}].function.parameters")


_REASONING_EFFORTS = (
    (r"gpt-5\.\d-chat", "medium"),
    (r"gpt-5-pro", "high"),
    (r"gpt-5\.\d-pro", "medium high xhigh"),
    (r"gpt-5\.(1-codex-max|[2-9]-codex)", "low medium high xhigh"),
    (r"o\d|codex-|gpt-5(\.1)?-codex", "low medium high"),
    (r"gpt-5\.1", "none low medium high"),
    (r"gpt-5\.", "none low medium high xhigh"),
    (r"gpt-5", "minimal low medium high"),
)
"""Values that OpenAI's reasoning models accept: https://platform.openai.com/docs/guides/reasoning and its errors."""


def _reasoning_effort(body: Mapping[str, Any]) -> None:
    effort, model = body.get("reasoning_effort"), body["model"]
    taken = next((efforts for name, efforts in _REASONING_EFFORTS if re.match(name, model)), None)
    if effort is not None and taken is not None and effort not in taken.split():
        message = f"Unsupported value: '{effort}' is not supported with the '{model}' model."
        raise RefusedError(f"{message} Supported values are: {taken}.", "unsupported_value", "reasoning_effort")


def _reasoning_model(body: Mapping[str, Any]) -> None:
    """Refuses parameters that OpenAI's reasoning models do not support.

    GPT-5.1 and later ones support sampling with the effort `none`, which is the default from GPT-5.1 to GPT-5.4,
    except for variants without this effort.
    """
    match = re.match(r"(o1|o3-mini|o\d|gpt-5(?!-chat)(\.\d)?)", body["model"])
    if match is None:
        if re.match(r"gpt-(3\.5|4|5-chat)", body["model"]) and body.get("reasoning_effort") is not None:
            raise RefusedError("Unrecognized request argument supplied: reasoning_effort")
        return
    _reasoning_effort(body)
    has_default_none = match[2] in (".1", ".2", ".3", ".4") and not re.search(r"-(chat|codex|pro)", body["model"])
    effort = body.get("reasoning_effort") or ("none" if has_default_none else "medium")
    no_effort = match[2] is not None and effort == "none"
    refused = ["frequency_penalty", "presence_penalty", "logit_bias"]
    refused += [] if no_effort else ["logprobs", "top_logprobs"]
    refused += [] if match[1] in ("o1", "o3-mini") else ["stop"]
    for name in refused:
        if body.get(name) is not None:
            message = f"Unsupported parameter: '{name}' is not supported with this model."
            raise RefusedError(message, "unsupported_parameter", name)
    for name in () if no_effort else ("temperature", "top_p"):
        if body.get(name) not in (None, 1):
            message = f"Unsupported value: '{name}' does not support {body[name]} with this model."
            raise RefusedError(f"{message} Only the default (1) value is supported.", "unsupported_value", name)


def _sampling(body: Mapping[str, Any]) -> None:
    in_range(body, "temperature", 0, 2)
    in_range(body, "top_p", 0, 1)
    in_range(body, "n", 1, 128)
    in_range(body, "max_tokens", 1, 10**6)
    in_range(body, "max_completion_tokens", 1, 10**6)
    in_range(body, "frequency_penalty", -2, 2)
    in_range(body, "presence_penalty", -2, 2)
    stop = body.get("stop")
    if isinstance(stop, list) and len(stop) > 4:
        raise RefusedError("Invalid 'stop': array too long.", "array_above_max_length", "stop")
    if body.get("stream_options") is not None:
        if not body.get("stream"):
            raise RefusedError("'stream_options' is only allowed when 'stream' is enabled.", None, "stream_options")
        known = {"include_usage", "include_obfuscation", "prompt_usage"}  # the last for the local provider's contract
        if unknown := set(body["stream_options"]) - known:
            raise RefusedError("Unknown parameter.", "unknown_parameter", f"stream_options.{unknown.pop()}")


def _openai_message(message: Any, path: str, open_calls: set[str], flavor: str) -> set[str]:
    if not isinstance(message, dict) or message.get("role") not in _MESSAGE_FIELDS:
        raise RefusedError("Invalid value for role.", "invalid_value", f"{path}.role")
    role = message["role"]
    if flavor == "google":
        _google_message(message, path)
    for name in message:
        if name not in _MESSAGE_FIELDS[role] and not (flavor == "google" and name in _GOOGLES):
            raise RefusedError(f"Unknown parameter: '{path}.{name}'.", "unknown_parameter", f"{path}.{name}")
    if message.get("content") is None and role != "assistant":
        raise RefusedError("Invalid value for 'content': expected a string, got null.", None, f"{path}.content")
    for part in message["content"] if isinstance(message.get("content"), list) else ():
        if part.get("type") == "image_url" and not _IMAGE.match(part["image_url"]["url"]):
            raise RefusedError("Invalid image URL.", "invalid_image_url", f"{path}.content")
        if role == "tool" and part.get("type") != "text":
            message = f"Invalid value: '{part.get('type')}'. Supported values are: 'text'."
            raise RefusedError(message, "invalid_value", f"{path}.content")
    if role == "tool":
        if message.get("tool_call_id") not in open_calls:
            raise RefusedError("'tool' must be a response to a preceding message with 'tool_calls'.", None, path)
        return open_calls - {message["tool_call_id"]}
    if open_calls:
        raise RefusedError(_UNANSWERED, None, path)
    return {call["id"] for call in message.get("tool_calls") or ()}


_GOOGLES = frozenset(("name", "extra_content"))
"""Fields that Google's address accepts in any message."""


def _google_message(message: Mapping[str, Any], path: str) -> None:
    """Google requires the function's name in a tool result, and an object as arguments of a call."""
    if message["role"] == "tool" and not message.get("name"):
        raise RefusedError(f"* GenerateContentRequest.{path}.function_response.name: Name cannot be empty.")
    for call in message.get("tool_calls") or ():
        try:
            is_object = isinstance(json.loads(call["function"]["arguments"]), dict)
        except ValueError:
            is_object = False
        if not is_object:
            raise RefusedError(
                f"{path}: Invalid value at 'function_call.args' (type.googleapis.com/google.protobuf.Struct)"
            )


def openai_completions(body: Mapping[str, Any]) -> None:
    unknown_fields(body, OPENAI_COMPLETIONS, "openai")
    needed(body, "model", "prompt")
    _sampling(body)
    if body.get("stream") and (body.get("best_of") or 1) > 1:
        raise RefusedError("Results from best_of cannot be streamed.", None, "best_of")


def openai_embeddings(body: Mapping[str, Any]) -> None:
    unknown_fields(body, OPENAI_EMBEDDINGS, "openai")
    needed(body, "model", "input")


# --- Anthropic --------------------------------------------------------------------------------------------------------
ANTHROPIC = frozenset((
    "model", "messages", "max_tokens", "cache_control", "container", "inference_geo", "metadata", "output_config",
    "service_tier", "stop_sequences", "stream", "system", "temperature", "thinking", "tool_choice", "tools", "top_k",
    "top_p",
))  # fmt: skip
ANTHROPIC_VERSIONS = ("2023-06-01", "2026-10-21")
COUNT_TOKENS = frozenset(
    ("model", "messages", "cache_control", "output_config", "system", "thinking", "tool_choice", "tools")
)
_BLOCKS: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    "text": (frozenset(("type", "text")), frozenset(("cache_control", "citations"))),
    "image": (frozenset(("type", "source")), frozenset(("cache_control",))),
    "document": (frozenset(("type", "source")), frozenset(("cache_control", "title", "context", "citations"))),
    "tool_use": (frozenset(("type", "id", "name", "input")), frozenset(("cache_control",))),
    "tool_result": (frozenset(("type", "tool_use_id")), frozenset(("content", "is_error", "cache_control"))),
    "thinking": (frozenset(("type", "thinking", "signature")), frozenset()),
}
_MEDIA = frozenset(("image/jpeg", "image/png", "image/gif", "image/webp"))
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
_TOOL_ID = re.compile(r"[a-zA-Z0-9_-]+")
_EFFORTS = (None, "low", "medium", "high", "xhigh", "max")


def _fields(value: Mapping[str, Any], needs: frozenset[str], may: frozenset[str], path: str) -> None:
    for name in needs - set(value):
        raise RefusedError(f"{path}.{name}: Field required")
    for name in set(value) - needs - may:
        raise RefusedError(f"{path}.{name}: Extra inputs are not permitted")


def anthropic(body: Mapping[str, Any], version: str, *, counting: bool = False) -> None:
    if version != ANTHROPIC_VERSIONS[0]:
        for name in ("temperature", "top_p", "top_k"):
            if name in body:
                raise RefusedError(f"{name}: Extra inputs are not permitted")
    needs = ("model", "messages") if counting else ("model", "messages", "max_tokens")
    for name in needs:
        if name not in body:
            raise RefusedError(f"{name}: Field required")
    for name in set(body) - (COUNT_TOKENS if counting else ANTHROPIC):
        raise RefusedError(f"{name}: Extra inputs are not permitted")
    generation = _generation(body["model"])
    if generation >= (4, 7) and {"temperature", "top_p", "top_k"} & set(body):
        raise RefusedError("`temperature` is deprecated for this model.")
    if generation >= (4, 6) and body["messages"] and body["messages"][-1]["role"] == "assistant":
        raise RefusedError("This model does not support assistant message prefill.")
    if not counting:
        limit = body["max_tokens"]
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise RefusedError("max_tokens: Input should be greater than or equal to 1")
    for name, high in (("temperature", 1), ("top_p", 1)):
        value = body.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= high:
            raise RefusedError(f"{name}: range: 0..{high}")
    if "temperature" in body and "top_p" in body:
        raise RefusedError("`temperature` and `top_p` cannot both be specified for this model. Please use only one.")
    for stop in body.get("stop_sequences", ()):
        if not isinstance(stop, str) or not stop.strip():
            raise RefusedError("stop_sequences: each stop sequence must contain non-whitespace")
    _fields(body.get("metadata", {}), frozenset(), frozenset(("user_id",)), "metadata")
    _output(body)
    _system(body.get("system"))
    _anthropic_tools(body)
    messages = _without_system(body["messages"], supported=generation >= (4, 8))
    _conversation(messages, {tool["name"] for tool in body.get("tools", ())})


def _generation(model: str) -> tuple[int, int]:
    """(4, 6) for `claude-opus-4-6-20260101`; (0, 0), to which no rule of newer models applies, for other names."""
    match = re.fullmatch(r"claude-[a-z]+-(\d)(?:-(\d))?(?:-\d{8})?", model)
    return (int(match[1]), int(match[2] or 0)) if match else (0, 0)


def _output(body: Mapping[str, Any]) -> None:
    config = body.get("output_config", {})
    _fields(config, frozenset(), frozenset(("effort", "format")), "output_config")
    if config.get("effort") not in _EFFORTS:
        raise RefusedError("output_config.effort: Input should be 'low', 'medium', 'high', 'xhigh' or 'max'")
    if "format" in config:
        _fields(config["format"], frozenset(("type", "schema")), frozenset(), "output_config.format")
        if config["format"]["type"] != "json_schema" or not isinstance(config["format"]["schema"], dict):
            raise RefusedError("output_config.format: Input should be a json_schema")
        if problem := schemas.anthropic_problem(config["format"]["schema"]):
            raise RefusedError(f"output_config.format.schema: {problem}")
    thinking = body.get("thinking", {"type": "disabled"})
    if thinking.get("type") not in ("enabled", "disabled", "adaptive"):
        raise RefusedError("thinking: Input tag does not match any of the expected tags")
    _fields(thinking, frozenset(("type",)), frozenset(("budget_tokens", "display")), "thinking")
    if thinking.get("display") not in (None, "summarized", "omitted"):
        raise RefusedError("thinking.display: Input should be 'summarized' or 'omitted'")
    if thinking["type"] == "enabled" and not 1024 <= thinking.get("budget_tokens", 0) < body["max_tokens"]:
        raise RefusedError("`max_tokens` must be greater than `thinking.budget_tokens`.")


def _system(system: Any) -> None:
    for block in system if isinstance(system, list) else ():
        _block(block, "system", frozenset(("text",)))
    if system is not None and not isinstance(system, (str, list)):
        raise RefusedError("system: Input should be a valid string")


_NOT_AT_TOP = frozenset(("$ref", "anyOf", "oneOf", "allOf"))


def _anthropic_tools(body: Mapping[str, Any]) -> None:
    tools: Sequence[Any] = body.get("tools", ())
    for index, tool in enumerate(tools):
        may = frozenset((
            "description", "strict", "type", "cache_control", "eager_input_streaming", "input_examples",
            "allowed_callers",
        ))  # fmt: skip
        _fields(tool, frozenset(("name", "input_schema")), may, f"tools.{index}")
        if not _TOOL_NAME.fullmatch(tool["name"]):
            raise RefusedError(f"tools.{index}.name: String should match pattern '^[a-zA-Z0-9_-]{{1,128}}$'")
        if not isinstance(tool["input_schema"], dict) or tool["input_schema"].get("type") != "object":
            raise RefusedError(f"tools.{index}.input_schema.type: Input should be 'object'")
        if tool.get("strict") and not _NOT_AT_TOP.isdisjoint(tool["input_schema"]):
            message = "input_schema does not support oneOf, allOf, or anyOf at the top level"
            raise RefusedError(f"tools.{index}.custom.input_schema: {message}")
        if tool.get("strict") and (problem := schemas.anthropic_problem(tool["input_schema"])):
            raise RefusedError(f"tools.{index}.custom.input_schema: {problem}")
    if (strict := sum(bool(tool.get("strict")) for tool in tools)) > 20:
        raise RefusedError(f"Too many strict tools ({strict}). The maximum number of strict tools supported is 20.")
    if len({tool["name"] for tool in tools}) < len(tools):
        raise RefusedError("tools: Tool names must be unique.")
    if (choice := body.get("tool_choice")) is None:
        return
    if not tools:
        raise RefusedError("tool_choice: may only be specified while providing tools")
    parallel = frozenset(("disable_parallel_tool_use",))
    shapes = {
        "auto": (frozenset(("type",)), parallel),
        "any": (frozenset(("type",)), parallel),
        "none": (frozenset(("type",)), frozenset()),
        "tool": (frozenset(("type", "name")), parallel),
    }
    if choice.get("type") not in shapes:
        raise RefusedError("tool_choice: Input tag does not match any of the expected tags")
    _fields(choice, *shapes[choice["type"]], "tool_choice")
    if choice["type"] == "tool" and choice["name"] not in {tool["name"] for tool in tools}:
        raise RefusedError(f"Tool '{choice['name']}' not found in provided tools")


def _without_system(messages: Any, *, supported: bool) -> Any:
    """The turns of user and assistant, once the rules for system messages between them are met."""
    if not isinstance(messages, list):
        return messages
    roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
    for index, role in enumerate(roles):
        if role != "system":
            continue
        path = f"messages.{index}"
        if not supported:
            raise RefusedError("role 'system' is not supported on this model")
        if index == 0 or roles[index - 1] != "user" or roles[index + 1 : index + 2] not in ([], ["assistant"]):
            raise RefusedError(f"{path}: a system message must follow a user turn and precede an assistant turn")
        _fields(messages[index], frozenset(("role", "content")), frozenset(), path)
        content = messages[index]["content"]
        for at, block in enumerate([] if isinstance(content, str) else content):
            _block(block, f"{path}.content.{at}", frozenset(("text",)))
    return [message for message, role in zip(messages, roles, strict=True) if role != "system"]


def _conversation(messages: Any, tools: set[str]) -> None:
    """Turns alternate (stricter than the API, which joins neighbors) and begin with the user.

    Tool results answer exactly the calls of the turn before, and come first.
    """
    if not isinstance(messages, list) or not messages:
        raise RefusedError("messages: at least one message is required")
    expected: list[str] = []
    for index, message in enumerate(messages):
        path = f"messages.{index}"
        _fields(message, frozenset(("role", "content")), frozenset(), path)
        role = "user" if index % 2 == 0 else "assistant"
        if message["role"] != role:
            raise RefusedError(f'{path}: roles must alternate between "user" and "assistant", starting with "user"')
        content = message["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not blocks:
            raise RefusedError(f"{path}: all messages must have non-empty content")
        kinds = frozenset(
            ("text", "image", "document", "tool_result") if role == "user" else ("text", "tool_use", "thinking")
        )
        for at, block in enumerate(blocks):
            _block(block, f"{path}.content.{at}", kinds)
        results = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
        if sorted(results) != sorted(expected):
            raise RefusedError(f"{path}: every `tool_use` needs its `tool_result` right after, and the reverse")
        if any(block["type"] != "tool_result" for block in blocks[: len(results)]):
            raise RefusedError(f"{path}: `tool_result` blocks must come first")
        calls = [block for block in blocks if block["type"] == "tool_use"]
        expected = [block["id"] for block in calls]
        if len(set(expected)) < len(expected):
            raise RefusedError(f"{path}: `tool_use` ids must be unique")
        if calls and not tools:
            raise RefusedError("Requests which include `tool_use` or `tool_result` blocks must define tools")
    if expected:
        raise RefusedError("the last `tool_use` blocks have no `tool_result`")
    last = messages[-1]
    if last["role"] == "assistant":
        text = last["content"] if isinstance(last["content"], str) else last["content"][-1].get("text", "")
        if text != text.rstrip():
            raise RefusedError("messages: final assistant content cannot end with trailing whitespace")


def _block(block: Any, path: str, kinds: frozenset[str]) -> None:
    if not isinstance(block, dict) or block.get("type") not in kinds:
        raise RefusedError(f"{path}: Input tag does not match any of the expected tags")
    kind = block["type"]
    _fields(block, *_BLOCKS[kind], path)
    if kind == "text" and not (isinstance(block["text"], str) and block["text"].strip()):
        raise RefusedError(f"{path}: text content blocks must contain non-whitespace text")
    if kind in ("image", "document"):
        if kind == "document" and block["source"].get("type") == "text":
            _plain_text(block["source"], path)
        else:
            _source(block["source"], path, _MEDIA if kind == "image" else frozenset(("application/pdf",)))
    if kind == "tool_use":
        if not _TOOL_ID.fullmatch(block["id"]):
            raise RefusedError(f"{path}.id: String should match pattern '^[a-zA-Z0-9_-]+$'")
        if not isinstance(block["input"], dict) or not _TOOL_NAME.fullmatch(block["name"]):
            raise RefusedError(f"{path}: Input should be a valid dictionary")
    if kind == "tool_result":
        content = block.get("content", "")
        for at, inner in enumerate(content if isinstance(content, list) else ()):
            _block(inner, f"{path}.content.{at}", frozenset(("text", "image", "document")))


def _plain_text(source: Mapping[str, Any], path: str) -> None:
    _fields(source, frozenset(("type", "media_type", "data")), frozenset(), f"{path}.source")
    if source["media_type"] != "text/plain":
        raise RefusedError(f"{path}.source.text.media_type: Input should be 'text/plain'")
    if not isinstance(source["data"], str) or not source["data"].strip():
        raise RefusedError(f"{path}.source.text.data: text content must contain non-whitespace text")


def _source(source: Mapping[str, Any], path: str, media: frozenset[str]) -> None:
    if source.get("type") == "url":
        _fields(source, frozenset(("type", "url")), frozenset(), f"{path}.source")
        if not source["url"].startswith(("http://", "https://")):
            raise RefusedError(f"{path}.source.url: Only HTTPS URLs are supported.")
        return
    _fields(source, frozenset(("type", "media_type", "data")), frozenset(), f"{path}.source")
    if source["type"] != "base64" or source["media_type"] not in media:
        raise RefusedError(f"{path}.source.media_type: Input should be one of {sorted(media)}")
    try:
        base64.b64decode(source["data"], validate=True)
    except (binascii.Error, ValueError):
        raise RefusedError(f"{path}.source.base64: invalid base64 data") from None
