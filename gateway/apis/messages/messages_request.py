"""Rewrites an Anthropic Messages request as the inner chat request, or says what is wrong; sends nothing.

Fields that only an Anthropic tier can use (cache marks, signatures of thinking) stay in `ChatRequest.origin`;
`gateway.providers.anthropic.anthropic_native` writes the request for such a tier from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from gateway.apis.messages import messages_fields
from gateway.apis.openai import field_checks as f
from gateway.apis.openai.frames import Endpoint
from gateway.apis.openai.generation_request import InferenceRequest, typed
from gateway.apis.schema.body_decoder import parse_json
from gateway.apis.schema.openai_bodies import decode_chat
from gateway.apis.tool_names import short_name

ATTRIBUTION = "x-anthropic-billing-header:"
"""How coding agents begin a system block that is meant for Anthropic's accounts. It differs from request to request:
at the head of a prompt it would keep a local model from ever using what it has already read."""

MAX_USER_CHARS = 64
"""OpenAI takes no longer `user`; a longer `user_id` stays out of the inner body."""

FAILED = "Error: "
"""Stands before the result of a tool call that failed: the inner dialect has no other word for it."""

SCHEMA_NAME = "answer"
"""The inner dialect gives every schema a name, Anthropic none."""


def parse(raw: bytes, *, counting: bool = False, leaves_out: bool = False) -> InferenceRequest:
    """The typed request in `raw`; raises RequestError (400) naming the field and what to write instead.

    With `counting` it is a request to count the tokens of, which needs no `max_tokens`. With `leaves_out` tools that
    run at Anthropic are left out of it instead of refused.
    """
    origin = parse_json(raw)
    if leaves_out and isinstance(origin.get("tools"), list):
        origin["tools"] = [tool for tool in origin["tools"] if not messages_fields.is_hosted(tool)]
    messages_fields.check(origin, counting=counting)
    _check_together(origin)
    body = decode_chat(to_chat(origin))
    body.origin, body.from_messages = origin, True
    return typed(Endpoint.CHAT, body, len(raw))._replace(is_only_bounded=True)


def long_names(body: Mapping[str, Any]) -> dict[str, str]:
    """The tools of a checked body that the inner dialect calls by a shorter name: their own, by that."""
    names = [tool["name"] for tool in body.get("tools") or ()]
    return {short: name for name in names if (short := short_name(name)) != name}


def to_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """The inner body of a checked one; raises RequestError where calls and results do not belong together."""
    turns = _turns(body["messages"])
    messages = [*_system(body.get("system")), *_messages(turns)]
    chat: dict[str, Any] = {"model": body["model"], "messages": messages}
    if turns[-1].role == "assistant":
        chat["continue_final_message"] = True
    renamed = {
        "max_tokens": "max_tokens", "stop_sequences": "stop", "stream": "stream", "temperature": "temperature",
        "top_k": "top_k", "top_p": "top_p",
    }  # fmt: skip
    chat |= {inner: body[name] for name, inner in renamed.items() if body.get(name) not in (None, [])}
    chat |= _tools(body)
    chat |= _output(body)
    user = (body.get("metadata") or {}).get("user_id")
    if user and len(user) <= MAX_USER_CHARS:
        chat["user"] = user
    if body.get("service_tier") is not None:
        chat["service_tier"] = "auto" if body["service_tier"] == "auto" else "default"
    return chat


def _check_together(body: Mapping[str, Any]) -> None:
    """Rules between fields."""
    names = [tool["name"] for tool in body.get("tools") or ()]
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name in seen:
            f.refuse(f"tools[{index}].name", f"two tools are named {name!r}")
        seen.add(name)
    for index, tool in enumerate(body.get("tools") or ()):
        if "direct" not in (tool.get("allowed_callers") or ("direct",)):
            f.refuse(f"tools[{index}].allowed_callers", "a tool must be one that the model may call: `direct`")
    choice = body.get("tool_choice") or {}
    if choice.get("type") in ("any", "tool") and not names:
        f.refuse("tool_choice", "`tool_choice` needs `tools`")
    if choice.get("type") == "tool" and choice["name"] not in seen:
        f.refuse("tool_choice.name", f"there is no tool {choice['name'][:64]!r} in `tools`")
    thinking = body.get("thinking") or {}
    limit = body.get("max_tokens")
    if thinking.get("type") == "enabled" and limit is not None and thinking["budget_tokens"] >= limit:
        f.refuse("thinking.budget_tokens", "`thinking.budget_tokens` must be less than `max_tokens`")
    config = body.get("output_config") or {}
    if config.get("format") and body.get("output_format"):
        f.refuse("output_format", "`output_format` is the old name of `output_config.format`; send one of them")


# --- the conversation -------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Turn:
    """What one side says at once: neighbors of one role are one turn, as Anthropic reads them."""

    role: str
    blocks: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    """Each with its path in the body."""

    def of(self, *kinds: str) -> list[tuple[str, Mapping[str, Any]]]:
        """The blocks of these types."""
        return [(path, block) for path, block in self.blocks if block["type"] in kinds]


def _turns(messages: Sequence[Mapping[str, Any]]) -> list[_Turn]:
    turns: list[_Turn] = []
    for index, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if not turns or turns[-1].role != role:
            turns.append(_Turn(role))
        at = f"messages[{index}].content"
        if isinstance(content, str):
            turns[-1].blocks.append((at, {"type": "text", "text": content}))
        else:
            turns[-1].blocks += [(f"{at}[{place}]", block) for place, block in enumerate(content)]
    return turns


def _messages(turns: Sequence[_Turn]) -> Iterator[dict[str, Any]]:
    """The turns as inner messages. `asked` are the calls, id to name, that the next turn must answer."""
    asked: dict[str, str] = {}
    for turn in turns:
        if turn.role == "user":
            yield from _user(turn, asked)
            asked = {}
            continue
        _all_answered(asked)
        if turn.role == "assistant":
            asked = _calls(turn)
            yield _assistant(turn)
        else:
            yield {"role": "system", "content": _joined(block for _, block in turn.blocks)}
    _all_answered(asked)


def _all_answered(asked: Mapping[str, str]) -> None:
    if asked:
        missing = ", ".join(list(asked)[:5])
        f.refuse(
            "messages", f"every `tool_use` needs its `tool_result` in the next user message; without one: {missing}"
        )


def _calls(turn: _Turn) -> dict[str, str]:
    asked: dict[str, str] = {}
    for path, block in turn.of("tool_use"):
        if block["id"] in asked:
            f.refuse(f"{path}.id", f"two calls of one turn have the id {block['id'][:64]!r}")
        asked[block["id"]] = short_name(block["name"])
    return asked


def _assistant(turn: _Turn) -> dict[str, Any]:
    texts = turn.of("text")
    calls = [_call(block) for _, block in turn.of("tool_use")]
    message: dict[str, Any] = {"role": "assistant", "content": _joined(block for _, block in texts)}
    if calls and not message["content"]:
        message["content"] = None
    if thought := "\n".join(block["thinking"] for _, block in turn.of("thinking") if block["thinking"]):
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": short_name(block["name"]), "arguments": orjson.dumps(block["input"]).decode()}
    return {"id": block["id"], "type": "function", "function": function}


def _user(turn: _Turn, asked: dict[str, str]) -> Iterator[dict[str, Any]]:
    """The results in the order of their calls, then what else the user says.

    Pictures in results stand in the user's own words, because tool messages hold text alone. Raises RequestError for a
    result without a call.
    """
    results: dict[str, Mapping[str, Any]] = {}
    for path, block in turn.of("tool_result"):
        id = block["tool_use_id"]
        if id not in asked or id in results:
            said = "has a result already" if id in results else "is no call of the assistant's turn before"
            f.refuse(f"{path}.tool_use_id", f"`{path}.tool_use_id` {id[:64]!r} {said}")
        results[id] = block
    _all_answered({id: name for id, name in asked.items() if id not in results})
    parts: list[dict[str, Any]] = []
    for id, name in asked.items():
        shown = results[id].get("content") or ""
        blocks = [{"type": "text", "text": shown}] if isinstance(shown, str) else shown
        text = _joined(block for block in blocks if block["type"] == "text")
        failed = FAILED if results[id].get("is_error") else ""
        yield {"role": "tool", "tool_call_id": id, "content": failed + text}
        if pictures := [block for block in blocks if block["type"] != "text"]:
            parts.append({"type": "text", "text": f"From the result of {name}:"})
            parts += [_part(block) for block in pictures]
    parts += [_part(block) for _, block in turn.of("text", "image", "document")]
    if len(parts) == 1 and parts[0]["type"] == "text":
        yield {"role": "user", "content": parts[0]["text"]}
    elif parts:
        yield {"role": "user", "content": parts}


def _part(block: Mapping[str, Any]) -> dict[str, Any]:
    if block["type"] == "text":
        return {"type": "text", "text": block["text"]}
    source = block["source"]
    if source["type"] == "text":
        heads = [block[name] for name in ("title", "context") if block.get(name)]
        return {"type": "text", "text": "\n".join([*heads, source["data"]])}
    is_address = source["type"] == "url"
    url = source["url"] if is_address else f"data:{source['media_type']};base64,{source['data']}"
    if block["type"] == "image":
        return {"type": "image_url", "image_url": {"url": url}}
    return {"type": "file", "file": {"filename": block.get("title") or "document.pdf", "file_data": url}}


def _joined(blocks: Iterable[Mapping[str, Any]]) -> str:
    """The texts as one, a line for each."""
    return "\n".join(block["text"] for block in blocks)


def _system(system: Any) -> list[dict[str, Any]]:
    texts = [system] if isinstance(system, str) else [block["text"] for block in system or ()]
    kept = [text for text in texts if text and not text.startswith(ATTRIBUTION)]
    return [{"role": "system", "content": "\n\n".join(kept)}] if kept else []


# --- tools and output -------------------------------------------------------------------------------------------------
def _tools(body: Mapping[str, Any]) -> dict[str, Any]:
    chat: dict[str, Any] = {}
    if tools := body.get("tools"):
        chat["tools"] = [{"type": "function", "function": _function(tool)} for tool in tools]
    if tools and (choice := body.get("tool_choice")):
        words = {"auto": "auto", "any": "required", "none": "none"}
        named = {"type": "function", "function": {"name": short_name(choice.get("name", ""))}}
        chat["tool_choice"] = words.get(choice["type"], named)
        if choice.get("disable_parallel_tool_use"):
            chat["parallel_tool_calls"] = False
    return chat


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    function: dict[str, Any] = {"name": short_name(tool["name"])}
    if tool.get("description"):
        function["description"] = tool["description"]
    function["parameters"] = {"type": "object", **tool["input_schema"]}
    if tool.get("strict"):
        function["strict"] = True
    return function


def _output(body: Mapping[str, Any]) -> dict[str, Any]:
    """The answer's shape and how much the model should think.

    Whether to think is a switch of local models' templates alone; clouds reason as they do without being told.
    """
    chat: dict[str, Any] = {}
    config = body.get("output_config") or {}
    if shape := config.get("format") or body.get("output_format"):
        named = {"name": SCHEMA_NAME, "schema": shape["schema"], "strict": True}
        chat["response_format"] = {"type": "json_schema", "json_schema": named}
    thinking = (body.get("thinking") or {}).get("type")
    if config.get("effort") and thinking != "disabled":
        chat["reasoning_effort"] = config["effort"]
    elif thinking is not None:
        thinks = thinking != "disabled"
        chat["chat_template_kwargs"] = {"enable_thinking": thinks, "thinking": thinks}
    return chat
