"""Reads the prompt of a checked request in either API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.rigs.fake_provider.answers import Prompt, pieces


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else ()
    texts = [part.get("text") or _text_of(part.get("content")) for part in parts if isinstance(part, Mapping)]
    return " ".join(text for text in texts if text)


def _last_user(messages: list[Any]) -> str:
    return next((_text_of(m.get("content")) for m in reversed(messages) if m.get("role") in ("user", "tool")), "")


def _tokens(messages: list[Any], *more: Any) -> int:
    return sum(len(pieces(_text_of(message.get("content")))) + 3 for message in messages) + sum(
        len(pieces(str(item))) for item in more if item
    )


def openai_chat(flavor: str, body: Mapping[str, Any]) -> Prompt:
    choice = body.get("tool_choice") or "auto"
    stop = body.get("stop") or ()
    return Prompt(
        dialect=flavor,
        model=body["model"],
        text=_last_user(body["messages"]),
        tokens=_tokens(body["messages"], body.get("tools")),
        tools=[
            {"name": tool["function"]["name"], "schema": tool["function"].get("parameters")}
            for tool in body.get("tools") or ()
            if tool.get("type") == "function"
        ],
        choice=choice if isinstance(choice, str) else choice["function"]["name"],
        parallel=body.get("parallel_tool_calls") is not False,
        max_tokens=body.get("max_completion_tokens") or body.get("max_tokens"),
        stops=[stop] if isinstance(stop, str) else stop,
    )


def openai_text(flavor: str, body: Mapping[str, Any]) -> Prompt:
    given = body["prompt"]
    text = given if isinstance(given, str) else str(given[0]) if given else ""
    return Prompt(flavor, body["model"], text, len(pieces(text)), max_tokens=body.get("max_tokens"))


def anthropic(body: Mapping[str, Any]) -> Prompt:
    choice = body.get("tool_choice") or {"type": "auto"}
    named = {"any": "required", "tool": choice.get("name", "")}
    return Prompt(
        dialect="anthropic",
        model=body["model"],
        text=_last_user(body["messages"]),
        tokens=_tokens(body["messages"], body.get("system"), body.get("tools")),
        tools=[{"name": tool["name"], "schema": tool["input_schema"]} for tool in body.get("tools") or ()],
        choice=named.get(choice["type"], choice["type"]),
        parallel=not choice.get("disable_parallel_tool_use"),
        max_tokens=body.get("max_tokens"),
        stops=body.get("stop_sequences") or (),
    )
