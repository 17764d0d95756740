"""Assembles the chunks of one OpenAI stream into the object of a non-streaming answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_JOINED = ("content", "reasoning_content", "reasoning", "refusal")
_SPOKEN = ("data", "transcript")
_MORE = ("system_fingerprint", "service_tier", "moderation")
_COPIED = frozenset(("id", "created", "model", *_MORE))
_ONCE = ("stop_reason", "native_finish_reason", "stop_details")
"""Further fields about the end of a choice."""
_OBJECTS = {"chat.completion.chunk": "chat.completion", "text_completion": "text_completion"}


@dataclass(slots=True)
class _Choice:
    role: str = "assistant"
    texts: dict[str, list[str]] = field(default_factory=dict)
    tools: dict[int, dict[str, Any]] = field(default_factory=dict)
    function: dict[str, str] | None = None
    logprobs: dict[str, list[Any]] | None = None
    finish: str | None = None
    audio: dict[str, Any] = field(default_factory=dict)
    """Audio: lists of pieces, and fields that come once."""
    extra: dict[str, Any] = field(default_factory=dict)
    once: dict[str, Any] = field(default_factory=dict)
    signed: int = 0
    """How many pieces of the reasoning belong to signed blocks."""


class Assembly:
    """Collects the chunks of a chat or text completion.

    Answers with one text, the usual case, have a fast path: the general one takes four times as long.
    """

    _first: dict[str, Any] | None = None
    _texts: list[str] | None = None
    _role: Any = "assistant"
    _finish: Any = None
    _usage: dict[str, Any] | None = None
    _any: _Any | None = None
    """The general path, once the answer has more than one text."""

    def add(self, chunk: Any) -> None:
        """Adds one parsed chunk, in the order of the stream; raises ValueError for an invalid one."""
        if self._any is None:
            if self._adds_text(chunk):
                return
            self._any = _Any()
            if self._first is not None:
                self._any.add(self._summed(self._first))
        self._any.add(chunk)

    def _adds_text(self, chunk: Any) -> bool:
        """Adds `chunk` on the fast path; False if it has more than a text and a finish reason of one choice."""
        if not isinstance(chunk, dict) or any(name in chunk for name in _MORE):
            return False
        if self._first is None and (
            chunk.get("object") != "chat.completion.chunk"
            or not chunk.get("id")
            or not chunk.get("created")
            or not chunk.get("model")
        ):
            return False
        choices = chunk.get("choices")
        if not isinstance(choices, list) or (choices and not self._adds_text_of(choices)):
            return False
        if self._first is None:
            self._first = chunk
        if isinstance(usage := chunk.get("usage"), dict):
            self._usage = usage
        return True

    def _adds_text_of(self, choices: list[Any]) -> bool:
        choice = choices[0]
        if len(choices) != 1 or not isinstance(choice, dict) or len(choice) != 4 or choice.get("index") != 0:
            return False
        delta = choice.get("delta")
        if not isinstance(delta, dict) or "finish_reason" not in choice or choice.get("logprobs", delta) is not None:
            return False
        role, content = delta.get("role"), delta.get("content")
        if len(delta) != (role is not None) + (content is not None):
            return False
        if content is not None and not isinstance(content, str):
            return False
        if self._texts is None:
            self._texts = []
        if content is not None:
            self._texts.append(content)
        if role is not None:
            self._role = role
        if choice["finish_reason"] is not None:
            self._finish = choice["finish_reason"]
        return True

    def _summed(self, first: Mapping[str, Any]) -> dict[str, Any]:
        """One chunk with the whole text so far."""
        delta: dict[str, Any] = {"role": self._role}
        if self._texts:
            delta["content"] = "".join(self._texts)
        choices = [] if self._texts is None else [{"delta": delta, "finish_reason": self._finish}]
        return {**first, "choices": choices, "usage": self._usage}

    @property
    def is_complete(self) -> bool:
        """Whether there is a choice and every choice has its finish reason."""
        return self._finish is not None if self._any is None else self._any.is_complete

    def result(self) -> dict[str, Any]:
        """The `chat.completion` or `text_completion` object; raises ValueError when nothing was added."""
        if self._any is not None:
            return self._any.result()
        if self._first is None:
            raise ValueError("no chunk was added")
        answer = {
            "id": self._first["id"],
            "object": "chat.completion",
            "created": self._first["created"],
            "model": self._first["model"],
            "choices": [],
        }
        if self._texts is not None:
            message = {"role": self._role, "content": "".join(self._texts), "refusal": None}
            answer["choices"] = [{"index": 0, "message": message, "logprobs": None, "finish_reason": self._finish}]
        if self._usage is not None:
            answer["usage"] = dict(self._usage)
        return answer


class _Any:
    """The general path: chunks with any content."""

    def __init__(self) -> None:
        self._head: dict[str, Any] = {}
        self._missing = _COPIED
        """Head fields that are still missing or empty: Azure's first chunk has empty ones."""
        self._object: str | None = None
        self._choices: dict[int, _Choice] = {}
        self._usage: Mapping[str, Any] | None = None

    def add(self, chunk: Any) -> None:
        if not isinstance(chunk, dict) or not isinstance(choices := chunk.get("choices"), list):
            raise ValueError("a chunk without choices")
        if self._object is None and (named := chunk.get("object")):
            self._object = _OBJECTS.get(str(named))
            if self._object is None:
                raise ValueError(f"a chunk of unknown type {named!r}")
        if not self._missing.isdisjoint(chunk):
            self._head |= {name: chunk[name] for name in self._missing if chunk.get(name) is not None}
            self._missing = frozenset(name for name in self._missing if not self._head.get(name))
        if isinstance(usage := chunk.get("usage"), dict):
            self._usage = usage
        for part in choices:
            if not isinstance(part, dict) or not isinstance(index := part.get("index", 0), int):
                raise ValueError("a choice that is not an object with an index")
            if (choice := self._choices.get(index)) is None:
                choice = self._choices[index] = _Choice()
            self._add_choice(choice, part)

    def _add_choice(self, choice: _Choice, part: Mapping[str, Any]) -> None:
        if part.get("finish_reason") is not None:
            choice.finish = part["finish_reason"]
            choice.once = {name: part[name] for name in _ONCE if part.get(name) is not None}
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
        return bool(self._choices) and all(choice.finish is not None for choice in self._choices.values())

    def result(self) -> dict[str, Any]:
        if self._object is None and not self._choices:
            raise ValueError("no chunk was added")
        is_text = any("text" in choice.texts for choice in self._choices.values())
        kind = self._object or ("text_completion" if is_text else "chat.completion")
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
        raise ValueError("a tool call that is not an object with an index")
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
    message |= {name: "".join(pieces) for name, pieces in choice.texts.items() if name != "text"}
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
        **choice.once,
    }


def _text_choice(index: int, choice: _Choice) -> dict[str, Any]:
    return {
        "index": index,
        "text": "".join(choice.texts.get("text", ())),
        "logprobs": choice.logprobs,
        "finish_reason": choice.finish,
        **choice.once,
    }
