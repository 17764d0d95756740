"""Adds the chunks of one OpenAI stream up to the object a non-streaming caller gets; never invents a field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from gateway.core.unchecked import dumps, loads

_JOINED = ("content", "reasoning_content", "reasoning", "refusal")
_COPIED = frozenset(("id", "created", "model", "system_fingerprint", "service_tier"))
_TOLD = ("stop_reason", "native_finish_reason", "stop_details")
"""What a choice may say about its end beside the finish reason."""
_OBJECTS = {"chat.completion.chunk": "chat.completion", "text_completion": "text_completion"}


@dataclass(slots=True)
class _Choice:
    role: str = "assistant"
    texts: dict[str, list[str]] = field(default_factory=dict)
    tools: dict[int, dict[str, Any]] = field(default_factory=dict)
    function: dict[str, str] | None = None
    logprobs: dict[str, list[Any]] | None = None
    finish: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    told: dict[str, Any] = field(default_factory=dict)
    signed: int = 0
    """How many pieces of the reasoning belong to blocks that have their signature."""


@dataclass(frozen=True, slots=True)
class _Mold:
    """The bytes around the text of a chunk that has nothing else to say; `texts` is where that text goes."""

    before: bytes
    after: bytes
    texts: list[str]

    def text_of(self, payload: bytes) -> str | None:
        """The text of a chunk from this mold; None when it is from another."""
        begin, end = len(self.before), len(payload) - len(self.after)
        if end < begin + 2 or not payload.startswith(self.before) or not payload.endswith(self.after):
            return None
        try:
            text = orjson.loads(payload[begin:end])
        except orjson.JSONDecodeError:
            return None
        return text if isinstance(text, str) else None


_MOLDS_FROM, _MOLDS_TRIED = 4, 4
"""Chunks before the first that is looked at for a mold, which a short answer does not need; and how many are looked at:
a stream that has none by then writes them in another way."""


class Assembly:
    """Collects chunks of a chat or text completion. `read` and `add` raise ValueError for what is no chunk of one
    stream.

    Chunks of text differ in their text alone. One is taken apart, and the text of those that have the same bytes
    around theirs is cut out: a JSON value between bytes that were proven to surround one means the same as before.
    """

    def __init__(self) -> None:
        self._mold: _Mold | None = None
        self._molds_tried = 0
        self._read = 0
        self._head: dict[str, Any] = {}
        self._untold = _COPIED
        """What the head still lacks."""
        self._object: str | None = None
        self._choices: dict[int, _Choice] = {}
        self._usage: Mapping[str, Any] | None = None

    def read(self, payload: bytes) -> None:
        """The JSON of one chunk, in the order of the stream."""
        mold = self._mold
        if mold is not None and (text := mold.text_of(payload)) is not None:
            mold.texts.append(text)
            return
        chunk = loads(payload)
        self.add(chunk)
        self._read += 1
        if self._read > _MOLDS_FROM and self._mold is None and self._molds_tried < _MOLDS_TRIED:
            self._mold = self._mold_of(payload, chunk)

    def _mold_of(self, payload: bytes, chunk: Mapping[str, Any]) -> _Mold | None:
        """What surrounds the text of `payload`, when that is all it adds."""
        choices = chunk["choices"]
        if len(choices) != 1 or isinstance(chunk.get("usage"), dict):
            return None
        choice = choices[0]
        if choice.get("finish_reason") is not None or choice.get("logprobs") is not None:
            return None
        name, holder = ("text", choice) if "text" in choice else ("content", choice.get("delta"))
        if not isinstance(holder, dict) or (holder is not choice and list(holder) != [name]):
            return None
        if not holder[name] or not isinstance(holder[name], str):
            return None
        self._molds_tried += 1
        key = b'"%b":' % name.encode()
        before, found, after = payload.partition(key + dumps(holder[name]))
        mold = _Mold(before + key, after, self._choices[choice.get("index", 0)].texts[name])
        probe = orjson.loads(mold.before + b'""' + after) if found else None
        holder[name] = ""
        return mold if probe == chunk else None

    def add(self, chunk: Any) -> None:
        """One parsed chunk, in the order of the stream."""
        if not isinstance(chunk, dict) or not isinstance(choices := chunk.get("choices"), list):
            raise ValueError("a chunk without choices")
        if self._object is None:
            self._object = _OBJECTS.get(str(chunk.get("object")))
            if self._object is None:
                raise ValueError(f"a chunk of an unknown kind {chunk.get('object')!r}")
        if not self._untold.isdisjoint(chunk):
            self._head |= {name: chunk[name] for name in self._untold if chunk.get(name) is not None}
            self._untold -= self._head.keys()
        if isinstance(usage := chunk.get("usage"), dict):
            self._usage = usage
        for part in choices:
            if not isinstance(part, dict) or not isinstance(index := part.get("index", 0), int):
                raise ValueError("a choice that is no object with an index")
            if (choice := self._choices.get(index)) is None:
                choice = self._choices[index] = _Choice()
            self._add_choice(choice, part)

    def _add_choice(self, choice: _Choice, part: Mapping[str, Any]) -> None:
        if part.get("finish_reason") is not None:
            choice.finish = part["finish_reason"]
            choice.told = {name: part[name] for name in _TOLD if part.get(name) is not None}
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
            else:
                choice.extra[name] = value

    @property
    def is_complete(self) -> bool:
        """Whether there is a choice and every choice has its finish reason."""
        return bool(self._choices) and all(choice.finish is not None for choice in self._choices.values())

    def result(self) -> dict[str, Any]:
        """The `chat.completion` or `text_completion` object; raises ValueError when nothing was added."""
        if self._object is None:
            raise ValueError("no chunk was added")
        build = _text_choice if self._object == "text_completion" else _chat_choice
        answer = {
            "id": self._head.get("id"),
            "object": self._object,
            "created": self._head.get("created"),
            "model": self._head.get("model"),
            "choices": [build(index, self._choices[index]) for index in sorted(self._choices)],
        }
        if self._usage is not None:
            answer["usage"] = dict(self._usage)
        for name in ("system_fingerprint", "service_tier"):
            if name in self._head:
                answer[name] = self._head[name]
        return answer


def _add_tool(tools: dict[int, dict[str, Any]], call: Any) -> None:
    """One tool-call delta: the first of an index brings id and name, the arguments come in pieces."""
    if not isinstance(call, dict) or not isinstance(index := call.get("index", len(tools)), int):
        raise ValueError("a tool call that is no object with an index")
    whole = tools.setdefault(index, {"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
    if call.get("id"):
        whole["id"] = call["id"]
    if call.get("type"):
        whole["type"] = call["type"]
    if call.get("extra_content"):
        whole["extra_content"] = call["extra_content"]  # where Google's address puts what it wants back
    if isinstance(function := call.get("function"), dict):
        _append(whole["function"], function)


def _add_thought(choice: _Choice, block: Any) -> None:
    """One block of thinking: the signature of what was thought since the last one, or one that is whole."""
    if not isinstance(block, dict):
        raise ValueError("a block of thinking that is no object")
    if block.get("type") == "thinking" and "thinking" not in block:
        pieces = choice.texts.get("reasoning_content", [])
        block = {"type": "thinking", "thinking": "".join(pieces[choice.signed :]), **block}
        choice.signed = len(pieces)
    choice.extra.setdefault("thinking_blocks", []).append(block)


def _append(whole: dict[str, str], piece: Mapping[str, Any]) -> None:
    for key in ("name", "arguments"):
        if isinstance(said := piece.get(key), str):
            whole[key] += said


def _chat_choice(index: int, choice: _Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": choice.role, "content": None, "refusal": None}
    message |= {name: "".join(pieces) for name, pieces in choice.texts.items() if name != "text"}
    if message["content"] is None and not choice.tools and choice.function is None and message["refusal"] is None:
        message["content"] = ""  # an empty answer is an answer
    if choice.tools:
        message["tool_calls"] = [choice.tools[at] for at in sorted(choice.tools)]
    if choice.function is not None:
        message["function_call"] = choice.function
    return {
        "index": index,
        "message": message | choice.extra,
        "logprobs": choice.logprobs,
        "finish_reason": choice.finish,
        **choice.told,
    }


def _text_choice(index: int, choice: _Choice) -> dict[str, Any]:
    return {
        "index": index,
        "text": "".join(choice.texts.get("text", ())),
        "logprobs": choice.logprobs,
        "finish_reason": choice.finish,
        **choice.told,
    }
