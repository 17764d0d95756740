"""Joins the pieces of an answer that broke off: keeps the text that the client has, and rewrites what follows.

On the token path a payload is only appended to a list. Every `BATCH_SIZE` payloads, and after a break, their text is
extracted; most payloads differ only in their text and need not be parsed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.apis.lenient_json import mapping
from gateway.apis.openai.finish_reasons import Finishes
from gateway.apis.openai.frames import CONTENT, FINISH, Comment, Data, DeltaKind, Done, Frame
from gateway.routing.resume_policy import PartialAnswer, ResumeMethod, estimated_tokens

BATCH_SIZE = 64
MAX_CHARACTERS = 2**20
"""A longer answer is not kept, and so not resumed."""

MIN_OVERLAP = 8
"""A shorter repetition may be chance: after `ee` may come another `e`."""
MAX_OVERLAP = 400
"""Characters at the end of the text in which a repetition is searched."""

_REASONING = ("reasoning_content", "reasoning")
_TEXTS = frozenset({"role", "content", *_REASONING, "thinking_blocks"})
"""Fields of a delta that can be resumed. Signed thinking can be only when text has followed it."""


@dataclass(frozen=True, slots=True)
class Head:
    """The fields that are equal in all chunks of one answer."""

    id: Any = None
    created: Any = None


class SentAnswer:
    """The part of one answer with `choices` choices that the client has."""

    def __init__(self, obstacle: str | None = None, choices: int = 1) -> None:
        self._obstacle = obstacle
        self._is_signed = False
        """Whether signed thinking came last; only its own model can continue it."""
        self.has_begun = False
        self._beginning: list[bytes] = []
        """Payloads up to the first content, with role and id."""
        self._pending: list[bytes] = []
        self._finishes = Finishes(choices)
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._characters = 0
        self._frames = 0
        self._min_size = 0
        self._shape: tuple[bytes, bytes] | None = None
        """The bytes before and after the text in an ordinary frame."""
        self._cuts: list[bytes] = []
        """Texts of such frames, still escaped as JSON."""

    def note(self, frames: Iterable[Frame]) -> None:
        """Records frames that the client gets."""
        pending = self._pending
        for frame in frames:
            if isinstance(frame, Data):
                if frame.kind is FINISH:
                    self._finishes.note(frame.payload)
                if not self.has_begun:
                    self._beginning.append(frame.payload)
                    self.has_begun = frame.kind is CONTENT or frame.kind is FINISH
                if self._obstacle is None:
                    pending.append(frame.payload)
        if len(pending) >= BATCH_SIZE:
            self._extract()

    @property
    def head(self) -> Head:
        """Id and creation time of the answer, from its first chunk that has an id."""
        named = (chunk for payload in self._beginning if (chunk := _chunk_in(payload)) and chunk.get("id"))
        return next((Head(chunk["id"], chunk.get("created")) for chunk in named), Head())

    @property
    def roles(self) -> frozenset[Any]:
        """The choices whose role the client has."""
        chunks = filter(None, map(_chunk_in, self._beginning))
        choices = (choice for chunk in chunks for choice in chunk["choices"])
        return frozenset(choice.get("index", 0) for choice in choices if "role" in mapping(choice, "delta"))

    @property
    def partial(self) -> PartialAnswer:
        """The text that the client has."""
        self._extract()
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        return PartialAnswer(content, reasoning, max(self._frames, estimated_tokens(content + reasoning)))

    @property
    def obstacle(self) -> str | None:
        """Why the answer cannot be resumed, as far as `partial` was read; None when it can."""
        return self._obstacle or ("shape" if self._is_signed else None)

    @property
    def is_finished(self) -> bool:
        """Whether the client has the finish reason of every choice, and so the whole answer."""
        return self._finishes.are_all

    def _extract(self) -> None:
        payloads, self._pending = self._pending, []
        for payload in payloads:
            if self._shape is not None and len(payload) > self._min_size:
                before, behind = self._shape
                if payload.startswith(before) and payload.endswith(behind):
                    self._cuts.append(payload[len(before) : -len(behind)])
                    continue
            self._flush_cuts()
            if self._obstacle is None:
                self._read(payload)
        self._flush_cuts()

    def _flush_cuts(self) -> None:
        """Unescapes the collected texts."""
        pieces, self._cuts = self._cuts, []
        if not pieces or self._obstacle is not None:
            return
        try:
            text = orjson.loads(b'"' + b"".join(pieces) + b'"')
        except orjson.JSONDecodeError:
            self._drop_text("malformed")
            return
        self._add(text, "", len(pieces))

    def _learn_shape(self, payload: bytes, name: str, text: str) -> None:
        """Learns the shape of ordinary frames from one of them."""
        field = b'"%b":"' % name.encode()
        escaped = orjson.dumps(text)[1:-1]
        before, found, behind = payload.partition(field + escaped + b'"')
        if found:
            self._shape = before + field, b'"' + behind
            self._min_size = len(payload) - len(escaped)

    def _read(self, payload: bytes) -> None:
        chunk = _chunk_in(payload)
        if chunk is None:
            self._drop_text("malformed")
            return
        if len(chunk["choices"]) > 1:
            self._drop_text("malformed")
        elif choices := chunk["choices"]:
            self._read_choice(payload, choices[0])

    def _read_choice(self, payload: bytes, choice: Mapping[str, Any]) -> None:
        delta = choice.get("delta") or {}
        if any(value for name, value in delta.items() if name not in _TEXTS):
            self._drop_text("shape")  # a refusal or a tool call
            return
        self._is_signed = self._is_signed or bool(delta.get("thinking_blocks"))
        content = choice.get("text") or delta.get("content") or ""
        reasoning = next((delta[name] for name in _REASONING if delta.get(name)), "")
        if content and self._shape is None and choice.get("finish_reason") is None and len(delta) < 2:
            self._learn_shape(payload, "content" if delta else "text", content)
        self._add(content, reasoning, bool(content or reasoning))

    def _add(self, content: str, reasoning: str, frames: int) -> None:
        self._is_signed = self._is_signed and not content
        self._content.append(content)
        self._reasoning.append(reasoning)
        self._frames += frames
        self._characters += len(content) + len(reasoning)
        if self._characters > MAX_CHARACTERS:
            self._drop_text("too_long")

    def _drop_text(self, obstacle: str) -> None:
        self._obstacle = obstacle
        self._content, self._reasoning = [], []


class Splice:
    """Rewrites the frames of one continuation so that they follow `partial`. Does not raise for malformed chunks."""

    def __init__(self, sent: SentAnswer, partial: PartialAnswer, method: ResumeMethod, stops: Sequence[str]) -> None:
        """`stops` are the request's stop strings: one of them may begin in `partial`, which a cloud does not check."""
        self._head = sent.head
        self._roles = set(sent.roles)
        self._partial = partial
        self._method = method
        self._stops = () if method is ResumeMethod.CONTINUE else tuple(stops)
        self._pending_text: str | None = None if method in (ResumeMethod.RESTART, ResumeMethod.CONTINUE) else ""
        """Text that may still be a repetition; None once that is decided."""
        self._is_ended = False

    def join(self, frames: Iterable[Frame]) -> list[Frame]:
        """The frames for the client; may be empty. No frame follows a Done."""
        joined: list[Frame] = []
        for frame in frames:
            if self._is_ended:
                break
            if isinstance(frame, Data):
                joined += self._rewrite(frame)
            else:
                joined.append(frame)
        return joined

    def _rewrite(self, frame: Data) -> list[Frame]:
        chunk = _chunk_in(frame.payload)
        if chunk is None:
            return [frame]
        if self._head.id is not None:
            chunk["id"], chunk["created"] = self._head.id, self._head.created
        if isinstance(usage := chunk.get("usage"), dict):
            chunk["usage"] = self._whole_usage(usage)
        for choice in chunk["choices"]:
            self._drop_repeated_role(choice)
        if self._partial.is_empty or not chunk["choices"]:  # without text so far the answer may have any shape
            return [Data(orjson.dumps(chunk), frame.kind)]
        return self._choice(chunk, chunk["choices"][0])

    def _drop_repeated_role(self, choice: dict[str, Any]) -> None:
        """Clients would concatenate a repeated role."""
        delta, index = choice.get("delta"), choice.get("index", 0)
        if delta and "role" in delta:
            if index in self._roles:
                del delta["role"]
            self._roles.add(index)

    def _choice(self, chunk: dict[str, Any], choice: dict[str, Any]) -> list[Frame]:
        delta = choice.get("delta")
        place, name = (choice, "text") if delta is None else (delta, "content")
        if delta is not None and self._partial.content:  # reasoning about the continuation is not shown
            for reasoning in _REASONING:
                delta.pop(reasoning, None)
        finishes = choice.get("finish_reason") is not None
        text = self._place(place.get(name) or "", finishes)
        if text is None:
            choice["finish_reason"], finishes = "stop", True
            self._is_ended = True
        if text or place.get(name) is not None:
            place[name] = text or ""
        says = bool(text) or any(delta.get(reasoning) for reasoning in _REASONING if delta)
        if not (says or finishes or chunk.get("usage") or (delta and "role" in delta)):
            return []
        kind = DeltaKind.FINISH if finishes else DeltaKind.CONTENT if says else DeltaKind.OTHER
        return [Data(orjson.dumps(chunk), kind), *([Done()] if self._is_ended else [])]

    def _place(self, text: str, final: bool) -> str | None:
        """The new part of the pending text and `text`; None when a stop string ends the answer."""
        if self._pending_text is None:
            return text
        text = self._pending_text + text
        self._pending_text = text
        repeated = self._repetition(text, final)
        if repeated is None:
            return ""
        new = text[repeated:]
        met = stop_string_across(self._partial.content, new, self._stops)
        if met is True:
            return None
        if met is None and not final:
            return ""
        self._pending_text = None
        return new

    def _repetition(self, text: str, final: bool) -> int | None:
        """How many characters of `text` the client has already; None while undecided."""
        if self._method is ResumeMethod.PREFILL:
            return stripped_white_space(self._partial.content, text, final)
        return overlap(self._partial.content, text, final)

    def _whole_usage(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """The usage of the whole answer: prompt tokens that repeat the answer count as completion tokens."""
        prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if self._method is ResumeMethod.CONTINUE or not isinstance(prompt, int) or not isinstance(completion, int):
            return dict(usage)
        written = completion + self._partial.tokens
        if self._method is not ResumeMethod.RESTART:
            prompt = max(1, prompt - self._partial.tokens)
        return {
            **usage, "prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written,
        }  # fmt: skip


def overlap(sent: str, text: str, final: bool) -> int | None:
    """How many characters at the start of `text` repeat the end of `sent`; None while undecided.

    An answer that starts again from its beginning is one long repetition.
    """
    tail = sent[-MAX_OVERLAP:]
    if not final and (text in tail or sent.startswith(text)):
        return None
    if text.startswith(sent):
        return len(sent)
    sizes = range(min(len(tail), len(text)), MIN_OVERLAP - 1, -1)
    return next((size for size in sizes if tail.endswith(text[:size])), 0)


def stripped_white_space(sent: str, text: str, final: bool) -> int | None:
    """The same for a prefill, from which the API strips the white space at the end of `sent`."""
    space = sent[len(sent.rstrip()) :]
    if not final and len(text) < len(space) and space.startswith(text):
        return None
    return len(space) if text.startswith(space) else 0


def stop_string_across(sent: str, text: str, stops: Sequence[str]) -> bool | None:
    """Whether a stop string that begins in `sent` ends in `text`; None while undecided."""
    may = False
    for stop in stops:
        for size in range(1, len(stop)):
            if sent.endswith(stop[:size]):
                if text.startswith(stop[size:]):
                    return True
                may = may or stop[size:].startswith(text)
    return None if may else False


def resume_comment(name: str, characters: int, why: str) -> Comment:
    """A comment in the stream, for people: where the next piece begins, its candidate, and why."""
    return Comment(f": headgate resumed on {name} after {characters} characters ({why})\n\n".encode())


def _chunk_in(payload: bytes) -> dict[str, Any] | None:
    """The chunk, or None. A payload with half a surrogate pair is none, because it is not valid text."""
    try:
        chunk = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return None
    choices = chunk.get("choices") if isinstance(chunk, dict) else None
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        return None
    return dict(chunk)
