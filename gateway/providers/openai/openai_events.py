"""Classifies the chunks of an OpenAI stream (pure). Their bytes are relayed unchanged, except where tool calls need an
index or a chunk came in several lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gateway.apis.lenient_json import dumps, loads, mapping, objects
from gateway.apis.openai.frames import CONTENT, FINISH, OTHER, USAGE, Comment, Data, Done, Frame, has_content
from gateway.errors import UpstreamError, UpstreamKind
from gateway.providers.provider_errors import error_in, frame_error
from headgate.shared.sse import SseFrame

DONE = b"[DONE]"


class OpenAIStream:
    """The reader of one stream of `choices` choices, see `gateway.providers.cloud_stream.EventReader`."""

    def __init__(self, choices: int = 1, secrets: tuple[str, ...] = ()) -> None:
        self.is_complete = False
        self._choices = choices
        self._secrets = secrets
        self._opened: set[int] = set()
        self._finished: set[int] = set()
        self._has_content = False
        self._usage_chunk: Mapping[str, Any] | None = None
        """The last chunk with both choices and usage; it is not needed after a chunk with usage alone."""
        self._is_usage_relayed = False
        self._calls: dict[int, CallNumbers] = {}
        """The tool calls of each choice."""

    @property
    def is_finished(self) -> bool:
        """Whether every requested choice has its finish reason."""
        return self._finished >= self._opened and len(self._finished) >= self._choices

    def feed(self, frame: SseFrame) -> list[Frame]:
        """The frames that `frame` adds; raises UpstreamError for an error frame or an invalid chunk."""
        if frame.comment is not None:
            return [Comment(frame.comment)]
        data = frame.data
        if data is None or self.is_complete:
            return []
        if data.strip() == DONE:
            self.is_complete = True
            return []
        try:
            chunk = loads(data)
        except ValueError:
            raise _malformed("a chunk that is not JSON") from None
        choices = chunk.get("choices") if isinstance(chunk, dict) else None
        if (not isinstance(choices, list) or "error" in chunk) and (error := error_in(chunk)):
            raise frame_error(error, secrets=self._secrets)
        if not isinstance(choices, list):
            raise _malformed("a chunk without choices")
        has_usage = isinstance(chunk.get("usage"), dict)
        if not choices:
            self._is_usage_relayed |= has_usage
            return [Data(data, USAGE if has_usage else OTHER, chunk)]
        if has_usage:
            self._usage_chunk = chunk
        kind, is_changed = OTHER, data.find(b"\n") >= 0  # a chunk of several `data:` lines is sent as one
        for choice in choices:
            if not isinstance(choice, dict):
                raise _malformed("a choice that is not an object")
            index, delta = choice.get("index", 0), choice.get("delta")
            if not isinstance(index, int):
                raise _malformed("a choice whose index is not a number")
            self._opened.add(index)
            if isinstance(delta, dict) and "tool_calls" in delta and (pieces := objects(delta, "tool_calls")):
                is_changed |= self._calls.setdefault(index, CallNumbers()).number(pieces)
            if choice.get("finish_reason") is not None:
                self._finished.add(index)
                kind = FINISH
            elif kind is not FINISH and has_content(choice):
                kind = CONTENT
        self._has_content = self._has_content or kind is CONTENT
        return [Data(dumps(chunk) if is_changed else data, kind, chunk)]

    def end(self) -> list[Frame]:
        """The last frames after the end of the bytes or `[DONE]`: a usage chunk if it is missing, and `Done`.

        Raises UpstreamError if a finish reason is missing: EMPTY if there was no content either, else READ. A choice
        that did not begin lacks its finish reason, unless the provider sent `[DONE]`.
        """
        whole = bool(self._finished) and self._finished >= self._opened
        if not whole or not (self.is_complete or self.is_finished):
            if self._has_content or self._finished:
                raise UpstreamError(UpstreamKind.READ, "the stream ended before its finish reason")
            raise UpstreamError(UpstreamKind.EMPTY, "the stream ended with no content and no finish reason")
        if self._usage_chunk is None or self._is_usage_relayed:
            return [Done()]
        return [Data(dumps({**self._usage_chunk, "choices": []}), USAGE), Done()]


def whole_answer(body: bytes, secrets: tuple[str, ...] = ()) -> dict[str, Any]:
    """The object of an answer without a stream; raises UpstreamError unless every choice has its finish reason."""
    try:
        answer = loads(body)
    except ValueError:
        raise _malformed("an answer that is not JSON") from None
    if error := error_in(answer):
        raise frame_error(error, secrets=secrets)
    if not isinstance(answer, dict) or not isinstance(choices := answer.get("choices"), list):
        raise _malformed("an answer without choices")
    if not choices:
        raise UpstreamError(UpstreamKind.EMPTY, "the answer has no choices")
    for choice in choices:
        if not isinstance(choice, dict) or not (isinstance(choice.get("message"), dict) or "text" in choice):
            raise _malformed("a choice without a message")
        if choice.get("finish_reason") is None:
            raise UpstreamError(UpstreamKind.READ, "the answer has no finish reason")
    return answer


def _malformed(what: str) -> UpstreamError:
    return UpstreamError(UpstreamKind.MALFORMED, f"the provider sent {what}")


class CallNumbers:
    """Gives every tool call of one choice its own index.

    Google leaves `index` out or gives all parallel calls the same one, so that a client that joins pieces by index
    would merge several calls. Correct indices are kept.
    """

    def __init__(self) -> None:
        self._ids: dict[int, str | None] = {}
        """The ids of the calls by index."""
        self._latest: dict[int | None, int] = {}
        """The index that was last assigned, by the index of the provider; under None the last of all."""

    def number(self, pieces: Iterable[dict[str, Any]]) -> bool:
        """Sets the index of every piece of a delta's `tool_calls` in place; returns whether one changed."""
        is_changed = False
        for piece in pieces:
            given = piece.get("index")
            is_named = bool(mapping(piece, "function").get("name"))
            index = self._index_of(given if isinstance(given, int) else None, piece.get("id") or None, is_named)
            if index != given:
                piece["index"] = index
                is_changed = True
        return is_changed

    def _index_of(self, given: int | None, id: str | None, is_named: bool) -> int:
        known = self._latest.get(given)
        if id is not None:
            same = next((index for index, other in self._ids.items() if other == id), None)
            known = same if same is not None else known if known is not None and self._ids[known] is None else None
        elif given is None and is_named:
            known = None
        if known is None:
            free = max(self._ids, default=-1) + 1
            known = given if given is not None and given not in self._ids else free
        self._ids[known] = id or self._ids.get(known)
        self._latest[given] = self._latest[None] = known
        return known
