"""Translates answers, whole and streamed, and errors from OpenAI's to Ollama's format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from gateway.apis.lenient_json import arguments, count, dumps, mapping, objects, text
from gateway.apis.openai.frames import Data, Frame
from gateway.errors import GatewayError

ERROR: Mapping[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string", "minLength": 1}},
}
"""The body of every error, in JSON Schema."""

_CALLS = ("tool_calls", "function_call")


class Clock(Protocol):
    """The time of one request."""

    def now(self) -> str:
        """The date and time in ISO 8601."""
        ...

    def elapsed_nanoseconds(self) -> int:
        """The time since the request arrived."""
        ...


class AnswerContext(NamedTuple):
    """What the translation of an answer needs to know about its request.

    `text_fields` makes the fields for text and reasoning, which differ between `/api/chat` and `/api/generate`.
    """

    model: str
    clock: Clock
    text_fields: Callable[[str, str], dict[str, Any]]
    only_loads: bool = False


def in_message(content: str, thinking: str) -> dict[str, Any]:
    """A part of an answer of `/api/chat`."""
    return {"message": {"role": "assistant", "content": content, **({"thinking": thinking} if thinking else {})}}


def in_response(content: str, thinking: str) -> dict[str, Any]:
    """A part of an answer of `/api/generate`."""
    return {"response": content, **({"thinking": thinking} if thinking else {})}


def error_body(error: GatewayError) -> dict[str, Any]:
    """The body for `error`."""
    return {"error": error.message}


def whole(answer: Mapping[str, Any], how: AnswerContext) -> dict[str, Any]:
    """The answer for a `chat.completion` or a `text_completion`. Its durations are those of the whole request."""
    choice = answer["choices"][0]
    message = mapping(choice, "message")
    content = text(message, "content") + text(message, "refusal") + text(choice, "text")
    thinking = text(message, "reasoning_content") or text(message, "reasoning")
    found = how.text_fields("", "") if how.only_loads else how.text_fields(content, thinking)
    calls = [_called(call, mapping(call, "function")) for call in objects(message, "tool_calls")]
    if calls and not how.only_loads:
        found["message"]["tool_calls"] = calls
    if logprobs := objects(mapping(choice, "logprobs"), "content"):
        found["logprobs"] = logprobs
    elapsed = how.clock.elapsed_nanoseconds()
    ended = _end(how, choice.get("finish_reason"), answer.get("usage"), elapsed, elapsed, elapsed)
    return {"model": text(answer, "model") or how.model, "created_at": how.clock.now(), **found, **ended}


def _called(call: Mapping[str, Any], function: Mapping[str, Any]) -> dict[str, Any]:
    made = {"function": {"name": text(function, "name"), "arguments": arguments(text(function, "arguments"))}}
    return {"id": id, **made} if (id := text(call, "id")) else made


def _end(
    how: AnswerContext, finish_reason: Any, usage: Any, total: int, prompt_evaluation: int, evaluation: int
) -> dict[str, Any]:
    """The last fields of an answer; durations in nanoseconds."""
    reason = "load" if how.only_loads else "stop" if finish_reason in _CALLS else str(finish_reason or "stop")
    ended: dict[str, Any] = {"done": True, "done_reason": reason, "total_duration": total, "load_duration": 0}
    if how.only_loads:
        return {**ended, "load_duration": total}
    return {
        **ended,
        "prompt_eval_count": count(usage, "prompt_tokens"),
        "prompt_eval_duration": prompt_evaluation,
        "eval_count": count(usage, "completion_tokens"),
        "eval_duration": evaluation,
    }


def embeddings(answer: Mapping[str, Any], how: AnswerContext) -> dict[str, Any]:
    """The answer of `/api/embed`."""
    return {
        "model": text(answer, "model") or how.model,
        "embeddings": [item["embedding"] for item in objects(answer, "data")],
        "total_duration": how.clock.elapsed_nanoseconds(),
        "load_duration": 0,
        "prompt_eval_count": count(answer.get("usage"), "prompt_tokens"),
    }


def single_embedding(answer: Mapping[str, Any], how: AnswerContext) -> dict[str, Any]:
    """The answer of `/api/embeddings`."""
    return {"embedding": answer["data"][0]["embedding"]}


@dataclass(slots=True)
class _Call:
    """A tool call that arrives in pieces."""

    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)


class OllamaLines:
    """The writer of one stream, a JSON object per line; see `gateway.apis.public_api.Writer`.

    Tool calls are written when they are complete, before the last line.
    """

    media_type = b"application/x-ndjson"

    def __init__(self, how: AnswerContext) -> None:
        self._how = how
        self._model = how.model
        self._calls: dict[Any, _Call] = {}
        self._finish_reason: Any = None
        self._usage: Any = None
        self._began_after: int | None = None
        """Nanoseconds from the request to the first part of the answer."""

    def write(self, frames: Sequence[Frame]) -> bytes:
        """The lines for `frames`; comments are left out."""
        out: list[bytes] = []
        for frame in frames:
            if isinstance(frame, Data):
                self._chunk(frame.parsed(), out)
        return b"".join(out)

    def end(self) -> bytes:
        """The tool calls, and the last line."""
        how = self._how
        calls = [
            _called({"id": call.id}, {"name": call.name, "arguments": "".join(call.pieces)})
            for call in self._calls.values()
            if call.name
        ]
        out = []
        if calls and not how.only_loads:
            out.append(
                self._line({"message": {**how.text_fields("", "")["message"], "tool_calls": calls}, "done": False})
            )
        total = how.clock.elapsed_nanoseconds()
        began = total if self._began_after is None else self._began_after
        ended = _end(how, self._finish_reason, self._usage, total, began, total - began)
        return b"".join([*out, self._line({**how.text_fields("", ""), **ended})])

    def end_with_error(self, code: str, message: str) -> bytes:
        """The line with the error of an interrupted answer."""
        return dumps({"error": message}) + b"\n"

    def _chunk(self, chunk: Mapping[str, Any], out: list[bytes]) -> None:
        if chunk.get("usage") is not None:
            self._usage = chunk["usage"]
        self._model = text(chunk, "model") or self._model
        for choice in objects(chunk, "choices"):
            delta = mapping(choice, "delta")
            if choice.get("finish_reason") is not None:
                self._finish_reason = choice["finish_reason"]
            for piece in objects(delta, "tool_calls"):
                self._piece(piece)
            content = text(delta, "content") + text(delta, "refusal") + text(choice, "text")
            thinking = text(delta, "reasoning_content") or text(delta, "reasoning")
            if (content or thinking) and not self._how.only_loads:
                self._note_begun()
                logprobs = objects(mapping(choice, "logprobs"), "content")
                more = {"logprobs": logprobs} if logprobs else {}
                out.append(self._line({**self._how.text_fields(content, thinking), "done": False, **more}))

    def _piece(self, piece: Mapping[str, Any]) -> None:
        self._note_begun()
        function = mapping(piece, "function")
        call = self._calls.setdefault(piece.get("index", 0), _Call())
        call.id = text(piece, "id") or call.id
        call.name = text(function, "name") or call.name
        call.pieces.append(text(function, "arguments"))

    def _note_begun(self) -> None:
        if self._began_after is None:
            self._began_after = self._how.clock.elapsed_nanoseconds()

    def _line(self, fields: Mapping[str, Any]) -> bytes:
        return dumps({"model": self._model, "created_at": self._how.clock.now(), **fields}) + b"\n"
