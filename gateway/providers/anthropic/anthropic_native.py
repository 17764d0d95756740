"""Adapts a Messages API request to one Anthropic model without translating it to OpenAI's format and back.

Cache marks, signatures and images in tool results are kept. Only what the model or the API without beta features
rejects is changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.apis.messages.messages_answer import UNSIGNED
from gateway.apis.schema.messages_body import CountedRequest
from gateway.providers.anthropic.anthropic_models import effort_for, takes_later_system, thinking_for
from gateway.providers.anthropic.anthropic_request import ToolIds, sampling
from headgate.shared.bodies.body_decoder import as_json

_AS_IT_IS = ("max_tokens", "tool_choice", "metadata", "service_tier")
_CACHE_FIELDS = ("type", "ttl")
_NOT_SENT = ("defer_loading",)
"""Works only with a tool-search tool, which the gateway does not accept."""


def to_native(request: CountedRequest, model: str) -> dict[str, Any]:
    """The streaming request to Anthropic for `model`."""
    return _native(as_json(request), model)


def _native(origin: dict[str, Any], model: str) -> dict[str, Any]:
    messages = _messages(origin["messages"])
    if not takes_later_system(model):
        messages = _without_system(messages)
    request: dict[str, Any] = {"model": model, "messages": messages, "stream": True}
    request |= {name: origin[name] for name in _AS_IT_IS if origin.get(name) is not None}
    if system := _system(origin.get("system")):
        request["system"] = system
    if origin.get("cache_control") is not None:
        request["cache_control"] = _cache(origin["cache_control"])
    if tools := origin.get("tools"):
        request["tools"] = [_tool(tool) for tool in tools]
    else:
        request.pop("tool_choice", None)
    request |= sampling(
        model, origin.get("stop_sequences") or (), origin.get("temperature"), origin.get("top_p"), origin.get("top_k")
    )
    if config := _config(origin, model):
        request["output_config"] = config
    thinking = thinking_for(origin["thinking"], model) if origin.get("thinking") else None
    if thinking and not (thinking["type"] == "enabled" and _resumes_without_thinking(messages)):
        request["thinking"] = _plain(thinking)
    return request


def _config(origin: Mapping[str, Any], model: str) -> dict[str, Any]:
    options = origin.get("output_config") or {}
    config: dict[str, Any] = {}
    if shape := options.get("format") or origin.get("output_format"):
        config["format"] = shape
    if options.get("effort") and (effort := effort_for(options["effort"], model)):
        config["effort"] = effort
    return config


def _plain(thinking: Mapping[str, Any]) -> dict[str, Any]:
    """Thinking without the parts that need a beta feature; `updates` becomes `summarized`."""
    result = {name: value for name, value in _given(thinking).items() if name != "block_binding"}
    return {**result, "display": "summarized"} if result.get("display") == "updates" else result


def _resumes_without_thinking(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the tool calls of the last assistant turn came without thinking of Anthropic, from another tier.

    Thinking with a budget needs that turn to begin with such thinking.
    """
    turns = [message["content"] for message in messages if message["role"] == "assistant"]
    if not turns or messages[-1]["role"] == "assistant" or isinstance(turns[-1], str):
        return False
    kinds = [block["type"] for block in turns[-1]]
    return "tool_use" in kinds and kinds[0] not in ("thinking", "redacted_thinking")


# --- messages ---------------------------------------------------------------------------------------------------------
def _messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages without what the API rejects: empty texts, thinking without Anthropic's signature, empty turns.

    Tool call ids of other tiers are rewritten in Anthropic's alphabet; white space at the end of a prefill is removed.
    """
    ids = ToolIds()
    turns: list[dict[str, Any]] = []
    for message in messages:
        content = message["content"]
        if isinstance(content, list):
            content = _blocks(content, ids, from_user=message["role"] == "user")
        if content and (not isinstance(content, str) or content.strip()):
            turns.append({"role": message["role"], "content": content})
    if turns and turns[-1]["role"] == "assistant":
        turns[-1]["content"] = _trimmed(turns[-1]["content"])
    return turns


def _without_system(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The turns, with each system message as a part of a user turn at the same place.

    In the system prompt it would change the beginning of the prompt, which loses Anthropic's prompt cache.
    """
    found: list[dict[str, Any]] = []
    is_moved = False  # whether the last turn contains the text of a system message
    for turn in turns:
        is_system = turn["role"] == "system"
        role = "user" if is_system else turn["role"]
        if found and found[-1]["role"] == role == "user" and (is_system or is_moved):
            found[-1] = {**found[-1], "content": [*_as_blocks(found[-1]["content"]), *_as_blocks(turn["content"])]}
        else:
            found.append({**turn, "role": role})
            is_moved = False
        is_moved = is_moved or is_system
    return found


def _as_blocks(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _trimmed(content: Any) -> Any:
    if isinstance(content, str):
        return content.rstrip()
    last = content[-1]
    return [*content[:-1], {**last, "text": last["text"].rstrip()}] if last["type"] == "text" else content


def _blocks(blocks: Sequence[Mapping[str, Any]], ids: ToolIds, *, from_user: bool) -> list[dict[str, Any]]:
    return [_block(block, ids, from_user=from_user) for block in blocks if _is_taken(block)]


def _is_taken(block: Mapping[str, Any]) -> bool:
    if block["type"] == "text":
        return bool(block["text"].strip())
    return block["type"] != "thinking" or block.get("signature") not in (None, "", UNSIGNED)


def _block(block: Mapping[str, Any], ids: ToolIds, *, from_user: bool) -> dict[str, Any]:
    result = _marked(block)
    if result["type"] == "tool_use":
        result["id"] = ids(result["id"])
    elif result["type"] == "tool_result":
        result["tool_use_id"] = ids(result["tool_use_id"])
        if isinstance(result.get("content"), list):
            result["content"] = _blocks(result["content"], ids, from_user=from_user)
    elif result["type"] == "text" and from_user:
        result.pop("citations", None)  # the newer API version rejects them in user messages
    return result


def _system(system: Any) -> Any:
    if not isinstance(system, list):
        return system
    return [_marked(block) for block in system if block["text"].strip()]


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    result = {name: value for name, value in _marked(tool).items() if name not in _NOT_SENT}
    return {**result, "input_schema": {"type": "object", **tool["input_schema"]}}


def _marked(holder: Mapping[str, Any]) -> dict[str, Any]:
    """A block or tool without null fields; a cache mark keeps the fields that need no beta feature."""
    result = _given(holder)
    if "cache_control" in result:
        result["cache_control"] = _cache(result["cache_control"])
    return result


def _cache(mark: Mapping[str, Any]) -> dict[str, Any]:
    return {name: mark[name] for name in _CACHE_FIELDS if mark.get(name) is not None}


def _given(holder: Mapping[str, Any]) -> dict[str, Any]:
    """`holder` without null fields: clients send back the nulls of earlier answers, and the API rejects them."""
    return {name: value for name, value in holder.items() if value is not None}
