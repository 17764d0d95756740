"""What the fake provider answers, without a wire format: deterministic, with the dialect and model in the text.

By default a model echoes: `[anthropic claude-x] What is a mill?`. With tools, `tool_choice` required or a named one
makes it call (all tools when several may be called at once). POST /_fake/answers sets another answer for every request
that follows (or for one `dialect` or `model`): text, reasoning, tools, refusal, stop, cached_tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

_PIECES = re.compile(r"\s*\S+\s*|\s+")
CREATED = 1_700_000_000
FINGERPRINT = "fp_0123456789"


@dataclass(frozen=True, slots=True)
class ToolUse:
    name: str
    arguments: Mapping[str, Any]

    @property
    def json(self) -> str:
        return json.dumps(self.arguments, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Answer:
    """`stop`: stop, length, tool_calls, content_filter, stop_sequence, pause_turn, context. Tokens are word counts."""

    text: str = ""
    reasoning: str = ""
    tools: tuple[ToolUse, ...] = ()
    refusal: str = ""
    stop: str = "stop"
    stop_sequence: str | None = None
    cached_tokens: int = 0
    cache_write_tokens: int = 0

    @property
    def pieces(self) -> list[str]:
        return pieces(self.text)

    @property
    def completion_tokens(self) -> int:
        parts = "".join((self.text, self.reasoning, self.refusal, *(tool.json for tool in self.tools)))
        return max(1, len(_PIECES.findall(parts)))

    @property
    def reasoning_tokens(self) -> int:
        return len(pieces(self.reasoning))


@dataclass(frozen=True, slots=True)
class Prompt:
    """The content of a request in any dialect. `choice`: auto, none, required, or a tool's name."""

    dialect: str
    model: str
    text: str
    tokens: int
    tools: Sequence[Mapping[str, Any]] = ()
    choice: str = "auto"
    parallel: bool = True
    max_tokens: int | None = None
    stops: Sequence[str] = ()


def pieces(text: str) -> list[str]:
    return _PIECES.findall(text)


class Answers:
    """Set answers, the latest that matches first, else the echo."""

    def __init__(self) -> None:
        self._set: list[tuple[str | None, str | None, Answer]] = []

    def set(self, answer: Answer, dialect: str | None = None, model: str | None = None) -> None:
        self._set.insert(0, (dialect, model, answer))

    def set_json(self, data: Mapping[str, Any]) -> None:
        given = dict(data)
        dialect, model = given.pop("dialect", None), given.pop("model", None)
        if unknown := set(given) - {item.name for item in fields(Answer)}:
            raise ValueError(f"unknown fields {sorted(unknown)}")
        given["tools"] = tuple(ToolUse(tool["name"], tool["arguments"]) for tool in given.get("tools", ()))
        if given["tools"]:
            given.setdefault("stop", "tool_calls")
        self.set(Answer(**given), dialect, model)

    def clear(self) -> None:
        self._set.clear()

    def answer(self, prompt: Prompt) -> Answer:
        for dialect, model, answer in self._set:
            if dialect in (None, prompt.dialect) and model in (None, prompt.model):
                return answer
        wanted = [tool for tool in prompt.tools if prompt.choice in ("required", tool["name"])]
        if wanted:
            calls = tuple(ToolUse(tool["name"], _arguments(tool, prompt.text)) for tool in wanted)
            return Answer(tools=calls if prompt.parallel else calls[:1], stop="tool_calls")
        return _limited(f"[{prompt.dialect} {prompt.model}] {prompt.text}", prompt)


def _limited(text: str, prompt: Prompt) -> Answer:
    for stop in prompt.stops:
        if stop in text:
            return Answer(text=text.partition(stop)[0], stop="stop_sequence", stop_sequence=stop)
    parts = pieces(text)
    if prompt.max_tokens is not None and len(parts) > prompt.max_tokens:
        return Answer(text="".join(parts[: prompt.max_tokens]), stop="length")
    return Answer(text=text)


def _arguments(tool: Mapping[str, Any], text: str) -> dict[str, Any]:
    """A value of the right type for every property of the tool's schema."""
    samples: Mapping[str, Any] = {"integer": 7, "number": 1.5, "boolean": True, "array": [], "object": {}}
    properties = (tool.get("schema") or {}).get("properties") or {}
    return {name: samples.get(schema.get("type"), text) for name, schema in properties.items()}


def call_id(prefix: str, number: int, index: int) -> str:
    return f"{prefix}_{number:06d}{index:02d}"
