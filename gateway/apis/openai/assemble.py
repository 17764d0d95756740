"""Assembles the chunks of one OpenAI stream into the object of a non-streaming answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_JOINED = ("content", "reasoning_content", "reasoning", "refusal")
_SPOKEN = ("data", "transcript")
_MORE = ("system_fingerprint", "service_tier", "moderation")
_COPIED = frozenset(("id", "created", "model", *_MORE))
_END_FIELDS = ("stop_reason", "native_finish_reason", "stop_details")
"""Further fields about the end of a choice."""
_OBJECTS = {"chat.completion.chunk": "chat.completion", "text_completion": "text_completion"}


class _Choice:
    __slots__ = ("audio", "end_fields", "extra", "finish", "function", "logprobs", "role", "signed", "texts", "tools")

    def __init__(self) -> None:
        self.role = "assistant"
        self.texts: dict[str, list[str]] = {}
        self.tools: dict[int, dict[str, Any]] = {}
        self.function: dict[str, str] | None = None
        self.logprobs: dict[str, list[Any]] | None = None
        self.finish: str | None = None
        self.audio: dict[str, Any] = {}
        """Audio: lists of pieces, and fields that come once."""
        self.extra: dict[str, Any] = {}
        self.end_fields: dict[str, Any] = {}
        self.signed = 0
        """How many pieces of the reasoning belong to signed blocks."""


class Assembly:
    """Collects the chunks of a chat or text completion."""

    def __init__(self) -> None:
        self._head: dict[str, Any] = {}
        self._missing = set(_COPIED)
        """Head fields that are still missing or empty: Azure's first chunk has empty ones."""
        self._object: str | None = None
        self._choices: dict[int, _Choice] = {}
        self._usage: Mapping[str, Any] | None = None
        self.stream_bytes = 0
        """The size of the added chunks, counted by the caller."""

    def add(self, chunk: Any) -> None:
        """Adds one parsed chunk, in the order of the stream; raises ValueError for an invalid one."""
        if not isinstance(chunk, dict) or not isinstance(choices := chunk.get("choices"), list):
            raise ValueError("a chunk without choices")
        if self._object is None and (named := chunk.get("object")):
            self._object = _OBJECTS.get(str(named))
            if self._object is None:
                raise ValueError(f"a chunk of unknown type {named!r}")
        for name in self._missing.intersection(chunk):
            if (value := chunk[name]) is not None:
                self._head[name] = value
                if value:
                    self._missing.discard(name)
        if isinstance(usage := chunk.get("usage"), dict):
            self._usage = usage
        for part in choices:
            if not isinstance(part, dict) or not isinstance(index := part.get("index", 0), int):
                raise ValueError("a choice that is not an object, or with an invalid index")
            if (choice := self._choices.get(index)) is None:
                choice = self._choices[index] = _Choice()
            self._add_choice(choice, part)

    def _add_choice(self, choice: _Choice, part: Mapping[str, Any]) -> None:
        if part.get("finish_reason") is not None:
            choice.finish = part["finish_reason"]
            choice.end_fields = {name: part[name] for name in _END_FIELDS if part.get(name) is not None}
        if isinstance(logprobs := part.get("logprobs"), dict):
            choice.logprobs = choice.logprobs or {}
            for name, values in logprobs.items():
                if isinstance(values, list):
                    choice.logprobs.setdefault(name, []).extend(values)
        if isinstance(text := part.get("text"), str):
            choice.texts.setdefault("text", []).append(text)
        if isinstance(delta := part.get("delta"), dict):
            self._add_delta(choice, delta)

    def _add_delta(self, choice: _Choice, delta: Mapping[str, Any]) -> None:
        for name, value in delta.items():
            if value is None:
                continue
            if name in _JOINED and isinstance(value, str):
                choice.texts.setdefault(name, []).append(value)
            elif name == "role":
                choice.role = value
            elif name == "tool_calls" and isinstance(value, list):
                for call in value:
                    _add_tool(choice.tools, call)
            elif name == "function_call" and isinstance(value, dict):
                choice.function = choice.function or {"name": "", "arguments": ""}
                _append(choice.function, value)
            elif name == "thinking_blocks" and isinstance(value, list):
                for block in value:
                    _add_thought(choice, block)
            elif name == "audio" and isinstance(value, dict):
                _add_audio(choice.audio, value)
            elif isinstance(value, list) and isinstance(so_far := choice.extra.get(name), list):
                choice.extra[name] = [*so_far, *value]  # annotations come one by one
            else:
                choice.extra[name] = value

    @property
    def is_complete(self) -> bool:
        """Whether there is a choice and every choice has its finish reason."""
        return bool(self._choices) and all(choice.finish is not None for choice in self._choices.values())

    def result(self) -> dict[str, Any]:
        """The `chat.completion` or `text_completion` object; raises ValueError when nothing was added."""
        if self._object is None and not self._choices:
            raise ValueError("no chunk was added")
        kind = self._object
        if kind is None:
            is_text = any("text" in choice.texts for choice in self._choices.values())
            kind = "text_completion" if is_text else "chat.completion"
        build = _text_choice if kind == "text_completion" else _chat_choice
        answer: dict[str, Any] = {
            "id": self._head.get("id"),
            "object": kind,
            "created": self._head.get("created"),
            "model": self._head.get("model"),
            "choices": [build(index, self._choices[index]) for index in sorted(self._choices)],
        }
        if self._usage is not None:
            answer["usage"] = dict(self._usage)
        for name in _MORE:
            if name in self._head:
                answer[name] = self._head[name]
        return answer


def _add_tool(tools: dict[int, dict[str, Any]], call: Any) -> None:
    """Adds one tool-call delta: the first of an index has id and name, arguments come in pieces."""
    if not isinstance(call, dict) or not isinstance(index := call.get("index", len(tools)), int):
        raise ValueError("a tool call that is not an object, or with an invalid index")
    whole = tools.setdefault(index, {"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
    if call.get("id"):
        whole["id"] = call["id"]
    if call.get("type"):
        whole["type"] = call["type"]
    if call.get("extra_content"):
        whole["extra_content"] = call["extra_content"]  # Google's thought signature, which clients send back
    if isinstance(function := call.get("function"), dict):
        _append(whole["function"], function)


def _add_audio(audio: dict[str, Any], piece: Mapping[str, Any]) -> None:
    """Adds audio fields: pieces of base64 data or transcript, or an id."""
    for name, value in piece.items():
        if name in _SPOKEN and isinstance(value, str):
            audio.setdefault(name, []).append(value)
        elif name not in _SPOKEN:
            audio[name] = value


def _add_thought(choice: _Choice, block: Any) -> None:
    """Adds one thinking block: a complete one, or the signature of the reasoning since the last block."""
    if not isinstance(block, dict):
        raise ValueError("a thinking block that is not an object")
    if block.get("type") == "thinking" and "thinking" not in block:
        pieces = choice.texts.get("reasoning_content", [])
        block = {"type": "thinking", "thinking": "".join(pieces[choice.signed :]), **block}
        choice.signed = len(pieces)
    choice.extra.setdefault("thinking_blocks", []).append(block)


def _append(whole: dict[str, str], piece: Mapping[str, Any]) -> None:
    for key in ("name", "arguments"):
        if isinstance(more := piece.get(key), str):
            whole[key] += more


def _chat_choice(index: int, choice: _Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": choice.role, "content": None, "refusal": None}
    for name, pieces in choice.texts.items():
        if name != "text":
            message[name] = "".join(pieces)
    if choice.audio:
        message["audio"] = {name: "".join(value) if name in _SPOKEN else value for name, value in choice.audio.items()}
    elif message["content"] is None and not choice.tools and choice.function is None and message["refusal"] is None:
        message["content"] = ""  # an empty answer is valid
    if choice.tools:
        message["tool_calls"] = [choice.tools[at] for at in sorted(choice.tools)]
    if choice.function is not None:
        message["function_call"] = choice.function
    return {
        "index": index,
        "message": message | choice.extra,
        "logprobs": None if choice.logprobs is None else {"content": None, "refusal": None, **choice.logprobs},
        "finish_reason": choice.finish,
        **choice.end_fields,
    }


def _text_choice(index: int, choice: _Choice) -> dict[str, Any]:
    return {
        "index": index,
        "text": "".join(choice.texts.get("text", ())),
        "logprobs": choice.logprobs,
        "finish_reason": choice.finish,
        **choice.end_fields,
    }
