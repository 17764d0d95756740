"""Joins the pieces of an interrupted answer: keeps the text that the client has, and rewrites what follows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.apis.lenient_json import dumps, mapping, text
from gateway.apis.openai.frames import CONTENT, FINISH, Comment, Data, DeltaKind, Done, Finishes, Frame
from gateway.routing.resume_policy import PartialAnswer, ResumeMethod, estimated_tokens

MAX_CHARACTERS = 2**20
"""A longer answer is not kept, and so not resumed."""

MIN_OVERLAP = 8
"""A shorter repetition may be a coincidence: another `e` may follow `ee`."""
MAX_OVERLAP = 400
"""Characters at the end of the text in which a repetition is searched."""

_REASONING = ("reasoning_content", "reasoning")
_TEXTS = frozenset({"role", "content", *_REASONING, "thinking_blocks"})
"""Fields of a delta that can be resumed. Signed thinking can be resumed only after text has followed it."""


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
        """Whether the last text was signed thinking; only its own model can continue it."""
        self.has_begun = False
        self._beginning: list[dict[str, Any]] = []
        """Chunks up to the first content, with role and id."""
        self._finishes = Finishes(choices)
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._characters = 0
        self._frames = 0

    def note(self, frames: Iterable[Frame]) -> None:
        """Records frames that the client gets."""
        for frame in frames:
            if not isinstance(frame, Data):
                continue
            if frame.kind is FINISH:
                self._finishes.note(frame)
            if not self.has_begun:
                if (chunk := _chunk_of(frame)) is not None:
                    self._beginning.append(chunk)
                self.has_begun = frame.kind is CONTENT or frame.kind is FINISH
            if self._obstacle is None:
                self._read(_chunk_of(frame))

    @property
    def head(self) -> Head:
        """Id and creation time of the answer, from its first chunk that has an id."""
        named = (chunk for chunk in self._beginning if chunk.get("id"))
        return next((Head(chunk["id"], chunk.get("created")) for chunk in named), Head())

    @property
    def choices_with_role(self) -> frozenset[Any]:
        """The choices whose role the client has."""
        choices = (choice for chunk in self._beginning for choice in chunk["choices"])
        return frozenset(choice.get("index", 0) for choice in choices if "role" in mapping(choice, "delta"))

    @property
    def partial(self) -> PartialAnswer:
        """The text that the client has."""
        try:
            content, reasoning = _paired("".join(self._content)), _paired("".join(self._reasoning))
        except ValueError:
            self._drop_text("malformed")
            return PartialAnswer(tokens=self._frames)
        return PartialAnswer(content, reasoning, max(self._frames, estimated_tokens(content + reasoning)))

    @property
    def obstacle(self) -> str | None:
        """Why the answer cannot be resumed; None when it can. Read `partial` first, which detects malformed text."""
        return self._obstacle or ("shape" if self._is_signed else None)

    @property
    def is_finished(self) -> bool:
        """Whether the client has the finish reason of every choice, and so the whole answer."""
        return self._finishes.are_all

    def _read(self, chunk: Mapping[str, Any] | None) -> None:
        if chunk is None or len(chunk["choices"]) > 1:
            self._drop_text("malformed")
        elif choices := chunk["choices"]:
            self._read_choice(choices[0])

    def _read_choice(self, choice: Mapping[str, Any]) -> None:
        delta = mapping(choice, "delta")
        if not _TEXTS.issuperset(delta) and any(value for name, value in delta.items() if name not in _TEXTS):
            self._drop_text("shape")  # a refusal or a tool call
            return
        content = text(delta, "content") or text(choice, "text")
        reasoning = text(delta, "reasoning_content") or text(delta, "reasoning")
        self._is_signed = not content and (self._is_signed or bool(delta.get("thinking_blocks")))
        self._content.append(content)
        self._reasoning.append(reasoning)
        self._frames += bool(content or reasoning)
        self._characters += len(content) + len(reasoning)
        if self._characters > MAX_CHARACTERS:
            self._drop_text("too_long")

    def _drop_text(self, obstacle: str) -> None:
        self._obstacle = obstacle
        self._content, self._reasoning = [], []


class Splice:
    """Rewrites the frames of one continuation so that they follow `partial`. Does not raise for malformed chunks."""

    def __init__(self, sent: SentAnswer, partial: PartialAnswer, method: ResumeMethod, stops: Sequence[str]) -> None:
        """`stops`: the stop strings of the request. One may begin in `partial` and end in the continuation, which a
        cloud does not detect.
        """
        self._head = sent.head
        self._choices_with_role = set(sent.choices_with_role)
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
        chunk = _chunk_of(Data(frame.payload, frame.kind))  # parsed again, because it is changed here
        if chunk is None:
            return [frame]
        if self._head.id is not None:
            chunk["id"], chunk["created"] = self._head.id, self._head.created
        if isinstance(usage := chunk.get("usage"), dict):
            chunk["usage"] = self._whole_usage(usage)
        for choice in chunk["choices"]:
            self._drop_repeated_role(choice)
        if self._partial.is_empty or not chunk["choices"]:  # without text so far the answer may have any shape
            return [Data(dumps(chunk), frame.kind)]
        return self._choice(chunk, chunk["choices"][0])

    def _drop_repeated_role(self, choice: dict[str, Any]) -> None:
        """Removes a repeated role, which clients would append to the first one."""
        delta, index = choice.get("delta"), choice.get("index", 0)
        if delta and "role" in delta:
            if index in self._choices_with_role:
                del delta["role"]
            self._choices_with_role.add(index)

    def _choice(self, chunk: dict[str, Any], choice: dict[str, Any]) -> list[Frame]:
        delta = choice.get("delta")
        holder, name = (choice, "text") if delta is None else (delta, "content")
        if delta is not None and self._partial.content:  # reasoning about the continuation is not shown
            for reasoning in _REASONING:
                delta.pop(reasoning, None)
        finishes = choice.get("finish_reason") is not None
        text = self._new_text(holder.get(name) or "", finishes)
        if text is None:
            choice["finish_reason"], finishes = "stop", True
            self._is_ended = True
        if text or holder.get(name) is not None:
            holder[name] = text or ""
        has_text = bool(text) or any(delta.get(reasoning) for reasoning in _REASONING if delta)
        if not (has_text or finishes or chunk.get("usage") or (delta and "role" in delta)):
            return []
        kind = DeltaKind.FINISH if finishes else DeltaKind.CONTENT if has_text else DeltaKind.OTHER
        return [Data(dumps(chunk), kind), *([Done()] if self._is_ended else [])]

    def _new_text(self, text: str, final: bool) -> str | None:
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
    """How many characters at the start of `text` repeat the white space at the end of `sent`; None while undecided.

    The API removes that white space from a prefilled message, so the model may write it again.
    """
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


def _paired(text: str) -> str:
    """`text` with one character for each surrogate pair, which two chunks may divide; ValueError for half a pair."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")


def _chunk_of(frame: Data) -> dict[str, Any] | None:
    """The chunk in `frame`; None for another payload, also for text in another form, such as a list of parts."""
    try:
        chunk = frame.parsed()
    except ValueError:
        return None
    if not isinstance(chunk, dict) or not isinstance(choices := chunk.get("choices"), list):
        return None
    for choice in choices:
        if not isinstance(choice, dict) or not isinstance(choice.get("text"), str | None):
            return None
        delta = choice.get("delta")
        if delta is not None and not (isinstance(delta, dict) and isinstance(delta.get("content"), str | None)):
            return None
    return chunk
