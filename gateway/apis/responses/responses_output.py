"""The output items of one Response while they are generated, and their events.

An event is (type, fields); the writer of the stream numbers them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.apis.lenient_json import is_complete
from gateway.apis.responses.responses_items import seal

ResponsesEvent = tuple[str, dict[str, Any]]
Logprobs = Sequence[Mapping[str, Any]]

IN_PROGRESS, COMPLETED, INCOMPLETE = "in_progress", "completed", "incomplete"


class Item(ABC):
    """One output item; `index` is its place in the output."""

    def __init__(self, id: str, index: int) -> None:
        self.id = id
        self.index = index
        self.status = IN_PROGRESS

    def opened(self) -> list[ResponsesEvent]:
        """The events that begin the empty item."""
        return [("response.output_item.added", {"output_index": self.index, "item": self.object()})]

    def closed(self, status: str) -> list[ResponsesEvent]:
        """The events that end the item and its parts."""
        self.status = status
        return [*self._ended(), ("response.output_item.done", {"output_index": self.index, "item": self.object()})]

    @abstractmethod
    def object(self) -> dict[str, Any]:
        """The item as JSON."""

    @abstractmethod
    def _ended(self) -> list[ResponsesEvent]:
        """The events that end the parts of the item."""

    def _at(self, content_index: int | None = None) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self.id, "output_index": self.index}
        return place if content_index is None else {**place, "content_index": content_index}


class Reasoning(Item):
    """The reasoning of a model as text, without a summary."""

    def __init__(self, id: str, index: int, *, with_encrypted_content: bool) -> None:
        super().__init__(id, index)
        self._pieces: list[str] = []
        self._with_encrypted_content = with_encrypted_content

    def opened(self) -> list[ResponsesEvent]:
        """The events that begin the item and its only part."""
        part = {"type": "reasoning_text", "text": ""}
        return [*super().opened(), ("response.content_part.added", {**self._at(0), "part": part})]

    def add(self, text: str) -> list[ResponsesEvent]:
        """Adds text."""
        self._pieces.append(text)
        return [("response.reasoning_text.delta", {**self._at(0), "delta": text})]

    def object(self) -> dict[str, Any]:
        """See `Item`."""
        text = "".join(self._pieces)
        found = {
            "id": self.id,
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": text}] if text else [],
            "status": self.status,
        }
        return {**found, "encrypted_content": seal(text)} if self._with_encrypted_content and text else found

    def _ended(self) -> list[ResponsesEvent]:
        text = "".join(self._pieces)
        part = {"type": "reasoning_text", "text": text}
        return [
            ("response.reasoning_text.done", {**self._at(0), "text": text}),
            ("response.content_part.done", {**self._at(0), "part": part}),
        ]


class _Part:
    """A part of a message: text, or a refusal."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.pieces: list[str] = []
        self.logprobs: list[Mapping[str, Any]] = []

    def object(self) -> dict[str, Any]:
        text = "".join(self.pieces)
        if self.kind == "refusal":
            return {"type": "refusal", "refusal": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self.logprobs)}


class Message(Item):
    """A message of the model, with text and refusal parts."""

    def __init__(self, id: str, index: int) -> None:
        super().__init__(id, index)
        self._parts: list[_Part] = []

    def add_text(self, text: str, logprobs: Logprobs = ()) -> list[ResponsesEvent]:
        """Adds text with the log probabilities of its tokens."""
        events = self._start_part("output_text")
        part = self._parts[-1]
        part.pieces.append(text)
        part.logprobs += logprobs
        fields = {**self._at(len(self._parts) - 1), "delta": text, "logprobs": _brief(logprobs)}
        return [*events, ("response.output_text.delta", fields)]

    def add_refusal(self, text: str) -> list[ResponsesEvent]:
        """Adds text of a refusal."""
        events = self._start_part("refusal")
        self._parts[-1].pieces.append(text)
        return [*events, ("response.refusal.delta", {**self._at(len(self._parts) - 1), "delta": text})]

    def add_logprobs(self, logprobs: Logprobs) -> list[ResponsesEvent]:
        """Adds log probabilities of tokens without a complete character."""
        return self.add_text("", logprobs) if logprobs else []

    def object(self) -> dict[str, Any]:
        """See `Item`."""
        content = [part.object() for part in self._parts]
        return {"id": self.id, "type": "message", "role": "assistant", "status": self.status, "content": content}

    def _start_part(self, kind: str) -> list[ResponsesEvent]:
        if self._parts and self._parts[-1].kind == kind:
            return []
        ended = self._ended()
        self._parts.append(_Part(kind))
        place = self._at(len(self._parts) - 1)
        return [*ended, ("response.content_part.added", {**place, "part": self._parts[-1].object()})]

    def _ended(self) -> list[ResponsesEvent]:
        if not self._parts:
            return []
        place, whole = self._at(len(self._parts) - 1), self._parts[-1].object()
        if whole["type"] == "refusal":
            done: ResponsesEvent = ("response.refusal.done", {**place, "refusal": whole["refusal"]})
        else:
            fields = {**place, "text": whole["text"], "logprobs": _brief(whole["logprobs"])}
            done = ("response.output_text.done", fields)
        return [done, ("response.content_part.done", {**place, "part": whole})]


class Call(Item):
    """One function call. `key` is its `index` among the tool calls of the chat completion.

    `name` and `namespace` are those of the request.
    """

    def __init__(self, id: str, index: int, key: int, call_id: str, name: str, namespace: str) -> None:
        super().__init__(id, index)
        self.key = key
        self.call_id = call_id
        self._name = name
        self._namespace = namespace
        self._pieces: list[str] = []

    @property
    def is_whole(self) -> bool:
        """Whether the arguments are complete JSON; some tiers interleave the arguments of several calls."""
        return is_complete("".join(self._pieces))

    def matches(self, key: int | None, call_id: str) -> bool:
        """Whether a piece with this index (None if missing) and id (empty if missing) belongs to this call."""
        return key in (None, self.key) and call_id in ("", self.call_id)

    def add(self, arguments: str) -> list[ResponsesEvent]:
        """Adds a piece of the arguments."""
        self._pieces.append(arguments)
        return [("response.function_call_arguments.delta", {**self._at(), "delta": arguments})]

    def closed(self, status: str) -> list[ResponsesEvent]:
        """See `Item`. Empty arguments become `{}`, because clients parse JSON."""
        nothing = status == COMPLETED and not self._pieces
        return [*(self.add("{}") if nothing else ()), *super().closed(status)]

    def object(self) -> dict[str, Any]:
        """See `Item`."""
        found = {
            "id": self.id,
            "type": "function_call",
            "status": self.status,
            "arguments": "".join(self._pieces),
            "call_id": self.call_id,
            "name": self._name,
        }
        return {**found, "namespace": self._namespace} if self._namespace else found

    def _ended(self) -> list[ResponsesEvent]:
        whole = {**self._at(), "arguments": "".join(self._pieces)}
        return [("response.function_call_arguments.done", whole)]


def _brief(logprobs: Logprobs) -> list[dict[str, Any]]:
    """Log probabilities for text events, without the bytes of tokens, which only the final part contains."""
    return [
        {
            "token": one["token"],
            "logprob": one["logprob"],
            "top_logprobs": [_brief_top(top) for top in one["top_logprobs"]],
        }
        for one in logprobs
    ]


def _brief_top(top: Mapping[str, Any]) -> dict[str, Any]:
    return {"token": top["token"], "logprob": top["logprob"]}
