"""Translates the chunks of one chat stream into the events of one Response (pure; does not raise).

`response.created` and `response.in_progress` come first, then the items one after the other (tool calls whose arguments
are interleaved end together), then exactly one of `response.completed`, `response.incomplete` and `response.failed`.
Events are numbered from 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.apis.lenient_json import count, dumps, mapping, objects, text
from gateway.apis.openai.frames import Comment, Data, Frame
from gateway.apis.responses.responses_output import (
    COMPLETED,
    IN_PROGRESS,
    INCOMPLETE,
    Call,
    Item,
    Message,
    Reasoning,
    ResponsesEvent,
)
from inference.protocol import CODES, Code

_INCOMPLETE: Mapping[str, str] = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Finish reasons of a chat that make a Response incomplete, with the API's reasons."""


@dataclass(frozen=True, slots=True)
class Head:
    """The fields of a Response that are known before its content. `id` is without `resp_`; the ids of items are derived
    from it. `created_at` is in seconds since the epoch; `model` is the requested one.
    """

    id: str
    created_at: int
    model: str
    echo: Mapping[str, Any]
    names: Mapping[str, tuple[str, str]]
    with_encrypted_content: bool = False


@dataclass(slots=True)
class _Unnamed:
    """A call whose name has not arrived; some tiers send it after the id."""

    call_id: str = ""
    pieces: list[str] = field(default_factory=list)


class Answer:
    """One Response while it is generated: `add` each chunk, then `close`; `object` is the Response so far."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._items: list[Item] = []
        self._open: Item | None = None
        self._unfinished_calls: list[Call] = []
        self._reason: str | None = None
        self._logprobs: list[dict[str, Any]] = []
        self._usage: Mapping[str, Any] | None = None
        self._tier = "default"
        self._model: str | None = None
        self._has_late_arguments = False
        self._unnamed: dict[int | None, _Unnamed] = {}

    # --- content ------------------------------------------------------------------------------------------------------
    def add(self, chunk: Mapping[str, Any]) -> list[ResponsesEvent]:
        """The events for one chunk; call `begin` before the first."""
        if isinstance(usage := chunk.get("usage"), dict):
            self._usage = usage
        if isinstance(tier := chunk.get("service_tier"), str):
            self._tier = tier
        events: list[ResponsesEvent] = []
        for choice in objects(chunk, "choices"):
            if choice.get("index", 0) == 0 and not self._has_late_arguments:
                events += self._add_choice(choice)
        return events

    def begin(self, model: Any) -> list[ResponsesEvent]:
        """The first events; `model` is the model of the first chunk, if it has one."""
        self._model = model if isinstance(model, str) and model else self._head.model
        fields = {"response": self.object(IN_PROGRESS)}
        return [("response.created", fields), ("response.in_progress", fields)]

    @property
    def has_begun(self) -> bool:
        """Whether `begin` was called."""
        return self._model is not None

    @property
    def has_late_arguments(self) -> bool:
        """Whether a tier sent arguments for a call that had already ended. Events cannot represent them."""
        return self._has_late_arguments

    def _add_choice(self, choice: Mapping[str, Any]) -> list[ResponsesEvent]:
        events: list[ResponsesEvent] = []
        delta = mapping(choice, "delta")
        thought, content = text(delta, "reasoning_content") or text(delta, "reasoning"), text(delta, "content")
        calls = objects(delta, "tool_calls")
        if isinstance(logprobs := choice.get("logprobs"), dict) and (content or not (thought or calls)):
            self._logprobs += [_logprob(token) for token in objects(logprobs, "content")]
        if thought:
            events += self._add_reasoning(thought)
        if content:
            events += self._add_text(content)
        if refused := text(delta, "refusal"):
            message, opened = self._message()
            events += [*opened, *message.add_refusal(refused)]
        for call in calls:
            events += self._add_call(call)
        if isinstance(reason := choice.get("finish_reason"), str):
            self._reason = reason
        return events

    def _add_reasoning(self, text: str) -> list[ResponsesEvent]:
        if isinstance(item := self._open, Reasoning):
            return item.add(text)
        item = Reasoning(self._id("rs"), len(self._items), with_encrypted_content=self._head.with_encrypted_content)
        return [*self._start_item(item), *item.add(text)]

    def _add_text(self, text: str) -> list[ResponsesEvent]:
        message, opened = self._message()
        logprobs, self._logprobs = self._logprobs, []
        return [*opened, *message.add_text(text, logprobs)]

    def _message(self) -> tuple[Message, list[ResponsesEvent]]:
        if isinstance(message := self._open, Message):
            return message, []
        message = Message(self._id("msg"), len(self._items))
        return message, self._start_item(message)

    def _add_call(self, call: Mapping[str, Any]) -> list[ResponsesEvent]:
        function = mapping(call, "function")
        arguments, name = text(function, "arguments"), text(function, "name")
        key, call_id = call.get("index"), text(call, "id")
        key = key if isinstance(key, int) else None
        for item in (self._open, *self._unfinished_calls):
            if isinstance(item, Call) and item.matches(key, call_id):
                return item.add(arguments) if arguments else []
        if not name:
            self._add_unnamed(key, call_id, arguments)
            return []
        early = self._unnamed.pop(key, None) or _Unnamed()
        arguments = "".join(early.pieces) + arguments
        own, namespace = self._head.names.get(name, (name, ""))
        index = len(self._items)
        call_id = call_id or early.call_id or f"call_{self._head.id}{index:02d}"
        item = Call(self._id("fc"), index, index if key is None else key, call_id, own, namespace)
        return [*self._start_item(item), *(item.add(arguments) if arguments else ())]

    def _add_unnamed(self, key: int | None, call_id: str, arguments: str) -> None:
        if key not in self._unnamed and any(
            isinstance(item, Call) and item.matches(key, call_id) for item in self._items
        ):
            self._has_late_arguments = bool(arguments)
            return
        early = self._unnamed.setdefault(key, _Unnamed())
        early.call_id = call_id or early.call_id
        early.pieces.append(arguments)

    def _id(self, kind: str) -> str:
        return f"{kind}_{self._head.id}{len(self._items):02d}"

    def _start_item(self, item: Item) -> list[ResponsesEvent]:
        left = self._open
        if isinstance(left, Call) and not left.is_whole:
            self._unfinished_calls.append(left)
            closed = []
        else:
            closed = self._close_open(COMPLETED)
        self._items.append(item)
        self._open = item
        return [*closed, *item.opened()]

    def _close_open(self, status: str) -> list[ResponsesEvent]:
        item, self._open = self._open, None
        if item is None:
            return []
        events: list[ResponsesEvent] = []
        if isinstance(item, Message):
            logprobs, self._logprobs = self._logprobs, []
            events = item.add_logprobs(logprobs)
        return [*events, *item.closed(status)]

    # --- end ----------------------------------------------------------------------------------------------------------
    def close(self, now: int) -> list[ResponsesEvent]:
        """The last events of a complete answer; `now` is in seconds since the epoch."""
        events: list[ResponsesEvent] = []
        if not self._items and not self._incomplete_reason:
            events = self._add_text("")  # an empty answer is valid
        status = self._status
        for call in self._unfinished_calls:
            events += call.closed(COMPLETED if call.is_whole else status)
        events += self._close_open(status)
        return [*events, (f"response.{self._status}", {"response": self.object(self._status, now)})]

    def fail(self, code: str, message: str) -> list[ResponsesEvent]:
        """The last event of an interrupted answer; open items become incomplete."""
        for item in self._items:
            item.status = COMPLETED if item.status == COMPLETED else INCOMPLETE
        error = {"code": _error_code(code), "message": message}
        return [("response.failed", {"response": {**self.object("failed"), "error": error}})]

    def whole(self, now: int) -> dict[str, Any]:
        """The Response after `close`."""
        return self.object(self._status, now)

    @property
    def output(self) -> list[dict[str, Any]]:
        """The items so far."""
        return [item.object() for item in self._items]

    @property
    def _incomplete_reason(self) -> str | None:
        return _INCOMPLETE.get(self._reason or "")

    @property
    def _status(self) -> str:
        return INCOMPLETE if self._incomplete_reason else COMPLETED

    def object(self, status: str, now: int | None = None) -> dict[str, Any]:
        """The Response object with the items so far."""
        is_over = status in (COMPLETED, INCOMPLETE)
        found = {
            "id": f"resp_{self._head.id}",
            "object": "response",
            "created_at": self._head.created_at,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": self._incomplete_reason} if status == INCOMPLETE else None,
            "model": self._model or self._head.model,
            "output": self.output,
            **self._head.echo,
            "service_tier": self._tier,
            "usage": _usage(self._usage) if is_over else None,
        }
        return {**found, "completed_at": now} if status == COMPLETED else found


class Stream:
    """The bytes of one streamed Response: `feed` frames, then `end` or `end_with_error`.

    `is_whole`: the answer is complete.
    """

    def __init__(self, head: Head) -> None:
        self.answer = Answer(head)
        self._number = 0
        self._over = False
        self.is_whole = False

    def feed(self, frames: Sequence[Frame]) -> bytes:
        """The bytes for `frames`; comments are relayed unchanged."""
        out: list[bytes] = []
        for frame in frames:
            if isinstance(frame, Comment):
                out.append(frame.frame)
            elif isinstance(frame, Data) and not self._over:
                chunk = frame.parsed()
                model = chunk.get("model")
                begun = self._begun(model) if model or chunk.get("choices") else []  # Azure's first chunk has no model
                out.append(self._encode([*begun, *self.answer.add(chunk)]))
                if self.answer.has_late_arguments:
                    out.append(
                        self.end_with_error(Code.MODEL_FAILED, "the tier continued a function call that had ended")
                    )
        return b"".join(out)

    def end(self, now: int) -> bytes:
        """The last bytes of a complete answer; `now` is in seconds since the epoch."""
        if self._over:
            return b""
        self.is_whole = True
        return self._last([*self._begun(None), *self.answer.close(now)])

    def end_with_error(self, code: str, message: str) -> bytes:
        """The last bytes of an interrupted answer: `response.failed` for clients that process events, and an `error`
        event, for which the official clients raise an exception.

        For a prompt that is too long, `error` comes first, as from OpenAI: LangChain recognizes the exception of the
        official client, but not `response.failed`.
        """
        if self._over:
            return b""
        error = {"type": _error_code(code), "code": str(code), "message": message, "param": None}
        raised: ResponsesEvent = ("error", {"code": str(code), "message": message, "param": None, "error": error})
        begun, failed = self._begun(None), self.answer.fail(code, message)
        is_overflow = code == Code.CONTEXT_LENGTH_EXCEEDED
        return self._last([*begun, raised, *failed] if is_overflow else [*begun, *failed, raised])

    def _begun(self, model: Any) -> list[ResponsesEvent]:
        return [] if self.answer.has_begun else self.answer.begin(model)

    def _last(self, events: Sequence[ResponsesEvent]) -> bytes:
        self._over = True
        return self._encode(events)

    def _encode(self, events: Sequence[ResponsesEvent]) -> bytes:
        out: list[bytes] = []
        for kind, fields in events:
            data = dumps({"type": kind, "sequence_number": self._number, **fields})
            out.append(b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n")
            self._number += 1
        return b"".join(out)


def answered(head: Head, completion: Mapping[str, Any], now: int) -> Answer:
    """The finished answer for a `chat.completion` object."""
    answer = Answer(head)
    answer.begin(completion.get("model"))
    choices = [{**choice, "delta": _numbered(choice["message"])} for choice in completion["choices"][:1]]
    answer.add({**completion, "choices": choices})
    answer.close(now)
    return answer


def _numbered(message: Mapping[str, Any]) -> dict[str, Any]:
    """A complete message as one delta."""
    calls = message.get("tool_calls") or ()
    return {**message, "tool_calls": [{**call, "index": index} for index, call in enumerate(calls)]}


# --- helpers ----------------------------------------------------------------------------------------------------------
def _logprob(token: Mapping[str, Any]) -> dict[str, Any]:
    top = objects(token, "top_logprobs")
    return {**_one_logprob(token), "top_logprobs": [_one_logprob(other) for other in top]}


def _one_logprob(token: Mapping[str, Any]) -> dict[str, Any]:
    return {"token": token.get("token", ""), "bytes": token.get("bytes") or [], "logprob": token.get("logprob", 0.0)}


def _usage(usage: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The Response's usage for the usage of a chat; None without counts."""
    if usage is None:
        return None
    prompt_details, completion_details = usage.get("prompt_tokens_details"), usage.get("completion_tokens_details")
    prompt, completion = count(usage, "prompt_tokens"), count(usage, "completion_tokens")
    return {
        "input_tokens": prompt,
        "input_tokens_details": {
            "cached_tokens": count(prompt_details, "cached_tokens"),
            "cache_write_tokens": count(prompt_details, "cache_write_tokens"),
        },
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": count(completion_details, "reasoning_tokens")},
        "total_tokens": count(usage, "total_tokens") or prompt + completion,
    }


def _error_code(code: str) -> str:
    """The API's code for a failed Response. A prompt that is too long keeps Headgate's code, because the API has none
    for it and agents look for this code.
    """
    if code == Code.CONTEXT_LENGTH_EXCEEDED:
        return str(code)
    known = CODES[Code(code)] if code in frozenset(Code) else None
    return "rate_limit_exceeded" if known is not None and known.status == 429 else "server_error"
