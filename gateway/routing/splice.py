"""Makes one stream of the pieces of an answer that broke off: keeps what was said, joins what follows; opens none.

On the token path a payload is only put on a list. Every `FOLD` payloads, and when a stream broke, their text is taken
out; most differ from one another in their text alone, and need not be parsed for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.apis.lenient_json import mapping
from gateway.apis.openai.finish_reasons import Finishes
from gateway.apis.openai.frames import CONTENT, FINISH, Comment, Data, DeltaKind, Done, Frame
from gateway.routing.resume_policy import How, Said, estimated_tokens

FOLD = 64
MAX_SAID_CHARACTERS = 2**20
"""An answer longer than this is not kept, and so not resumed."""

LEAST_OVERLAP = 8
"""Fewer characters that an answer seems to repeat may be chance: `ee` can go on with `e`."""
MOST_OVERLAP = 400
"""How far back a repetition is looked for."""

_REASONING = ("reasoning_content", "reasoning")
_TEXTS = frozenset({"role", "content", *_REASONING, "thinking_blocks"})
"""What may be gone on behind: signed thinking only once text has followed, which says that it is over."""


@dataclass(frozen=True, slots=True)
class Head:
    """What every chunk of one answer says alike."""

    id: Any = None
    created: Any = None


class Kept:
    """What the caller has of one answer of `choices`."""

    def __init__(self, why_not: str | None = None, choices: int = 1) -> None:
        self._why_not = why_not
        self._is_signed = False
        """Whether signed thinking came last, which no other answer's can follow."""
        self.has_begun = False
        self._beginning: list[bytes] = []
        """What came up to the first content: who speaks, under which name."""
        self._pending: list[bytes] = []
        self._finishes = Finishes(choices)
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._characters = 0
        self._frames = 0
        self._least = 0
        self._usual: tuple[bytes, bytes] | None = None
        """What stands before and behind the text in a frame of plain text."""
        self._cut_out: list[bytes] = []
        """Texts of such frames, still as JSON has them."""

    def note(self, frames: Iterable[Frame]) -> None:
        """Frames that the caller gets."""
        pending = self._pending
        for frame in frames:
            if isinstance(frame, Data):
                if frame.kind is FINISH:
                    self._finishes.note(frame.payload)
                if not self.has_begun:
                    self._beginning.append(frame.payload)
                    self.has_begun = frame.kind is CONTENT or frame.kind is FINISH
                if self._why_not is None:
                    pending.append(frame.payload)
        if len(pending) >= FOLD:
            self._fold()

    @property
    def head(self) -> Head:
        """What the first chunk says that names the answer."""
        named = (chunk for payload in self._beginning if (chunk := _chunk_in(payload)) and chunk.get("id"))
        return next((Head(chunk["id"], chunk.get("created")) for chunk in named), Head())

    @property
    def roles(self) -> frozenset[Any]:
        """The choices whose role was told."""
        chunks = filter(None, map(_chunk_in, self._beginning))
        choices = (choice for chunk in chunks for choice in chunk["choices"])
        return frozenset(choice.get("index", 0) for choice in choices if "role" in mapping(choice, "delta"))

    @property
    def said(self) -> Said:
        """The text so far."""
        self._fold()
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        return Said(content, reasoning, max(self._frames, estimated_tokens(content + reasoning)))

    @property
    def why_not(self) -> str | None:
        """Why it cannot go on once it has begun, as far as `said` was read; None when it can."""
        return self._why_not or ("shape" if self._is_signed else None)

    @property
    def is_finished(self) -> bool:
        """Whether the caller has the finish reason of every choice, and so the whole answer."""
        return self._finishes.are_all

    def _fold(self) -> None:
        payloads, self._pending = self._pending, []
        for payload in payloads:
            if self._usual is not None and len(payload) > self._least:
                before, behind = self._usual
                if payload.startswith(before) and payload.endswith(behind):
                    self._cut_out.append(payload[len(before) : -len(behind)])
                    continue
            self._settle()
            if self._why_not is None:
                self._read(payload)
        self._settle()

    def _settle(self) -> None:
        """Makes text of what was cut out of frames."""
        pieces, self._cut_out = self._cut_out, []
        if not pieces or self._why_not is not None:
            return
        try:
            text = orjson.loads(b'"' + b"".join(pieces) + b'"')
        except orjson.JSONDecodeError:
            self._give_up("malformed")
            return
        self._add(text, "", len(pieces))

    def _learn(self, payload: bytes, name: str, text: str) -> None:
        """Learns what is usual from a frame of plain text."""
        field = b'"%b":"' % name.encode()
        said = orjson.dumps(text)[1:-1]
        before, found, behind = payload.partition(field + said + b'"')
        if found:
            self._usual = before + field, b'"' + behind
            self._least = len(payload) - len(said)

    def _read(self, payload: bytes) -> None:
        chunk = _chunk_in(payload)
        if chunk is None:
            self._give_up("malformed")
            return
        if len(chunk["choices"]) > 1:
            self._give_up("malformed")
        elif choices := chunk["choices"]:
            self._read_choice(payload, choices[0])

    def _read_choice(self, payload: bytes, choice: Mapping[str, Any]) -> None:
        delta = choice.get("delta") or {}
        if any(value for name, value in delta.items() if name not in _TEXTS):
            self._give_up("shape")  # a refusal or a call, which nobody goes on with
            return
        self._is_signed = self._is_signed or bool(delta.get("thinking_blocks"))
        content = choice.get("text") or delta.get("content") or ""
        reasoning = next((delta[name] for name in _REASONING if delta.get(name)), "")
        if content and self._usual is None and choice.get("finish_reason") is None and len(delta) < 2:
            self._learn(payload, "content" if delta else "text", content)
        self._add(content, reasoning, bool(content or reasoning))

    def _add(self, content: str, reasoning: str, frames: int) -> None:
        self._is_signed = self._is_signed and not content
        self._content.append(content)
        self._reasoning.append(reasoning)
        self._frames += frames
        self._characters += len(content) + len(reasoning)
        if self._characters > MAX_SAID_CHARACTERS:
            self._give_up("too_long")

    def _give_up(self, why_not: str) -> None:
        self._why_not = why_not
        self._content, self._reasoning = [], []


class Splice:
    """Rewrites the frames of one continuation so that they follow what was `said`. Never raises on chunks."""

    def __init__(self, kept: Kept, said: Said, how: How, stops: Sequence[str]) -> None:
        """`stops` are the request's stop strings: a cloud does not know that one may have begun before it."""
        self._head = kept.head
        self._roles = set(kept.roles)
        self._said = said
        self._how = how
        self._stops = () if how is How.SO_FAR else tuple(stops)
        self._held: str | None = None if how in (How.AGAIN, How.SO_FAR) else ""
        """Text whose place is not known yet; None once it is."""
        self._over = False

    def join(self, frames: Iterable[Frame]) -> list[Frame]:
        """What the caller gets of `frames`; may be nothing. After a Done nothing follows."""
        joined: list[Frame] = []
        for frame in frames:
            if self._over:
                break
            if isinstance(frame, Data):
                joined += self._chunk(frame)
            else:
                joined.append(frame)
        return joined

    def _chunk(self, frame: Data) -> list[Frame]:
        chunk = _chunk_in(frame.payload)
        if chunk is None:
            return [frame]
        if self._head.id is not None:
            chunk["id"], chunk["created"] = self._head.id, self._head.created
        if isinstance(usage := chunk.get("usage"), dict):
            chunk["usage"] = self._whole(usage)
        for choice in chunk["choices"]:
            self._tell_role_once(choice)
        if self._said.is_empty or not chunk["choices"]:  # an answer that begins only now is of any shape
            return [Data(orjson.dumps(chunk), frame.kind)]
        return self._choice(chunk, chunk["choices"][0])

    def _tell_role_once(self, choice: dict[str, Any]) -> None:
        """Clients join what is told twice."""
        delta, index = choice.get("delta"), choice.get("index", 0)
        if delta and "role" in delta:
            if index in self._roles:
                del delta["role"]
            self._roles.add(index)

    def _choice(self, chunk: dict[str, Any], choice: dict[str, Any]) -> list[Frame]:
        delta = choice.get("delta")
        place, name = (choice, "text") if delta is None else (delta, "content")
        if delta is not None and self._said.content:  # a thought about going on is no thought about the question
            for reasoning in _REASONING:
                delta.pop(reasoning, None)
        finishes = choice.get("finish_reason") is not None
        text = self._placed(place.get(name) or "", finishes)
        if text is None:
            choice["finish_reason"], finishes = "stop", True
            self._over = True
        if text or place.get(name) is not None:
            place[name] = text or ""
        says = bool(text) or any(delta.get(reasoning) for reasoning in _REASONING if delta)
        if not (says or finishes or chunk.get("usage") or (delta and "role" in delta)):
            return []
        kind = DeltaKind.FINISH if finishes else DeltaKind.CONTENT if says else DeltaKind.OTHER
        return [Data(orjson.dumps(chunk), kind), *([Done()] if self._over else [])]

    def _placed(self, text: str, final: bool) -> str | None:
        """What of `text`, and of what was held, can be shown now; None when a stop string ends the answer here."""
        if self._held is None:
            return text
        text = self._held + text
        self._held = text
        repeated = self._repeated(text, final)
        if repeated is None:
            return ""
        new = text[repeated:]
        met = across(self._said.content, new, self._stops)
        if met is True:
            return None
        if met is None and not final:
            return ""
        self._held = None
        return new

    def _repeated(self, text: str, final: bool) -> int | None:
        """How many characters of `text` the caller has already; None as long as more may tell."""
        if self._how is How.PREFILL:
            return white_space(self._said.content, text, final)
        return overlap(self._said.content, text, final)

    def _whole(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """The usage of the whole answer: what a cloud read of it counts as written."""
        prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if self._how is How.SO_FAR or not isinstance(prompt, int) or not isinstance(completion, int):
            return dict(usage)
        written = completion + self._said.tokens
        if self._how is not How.AGAIN:
            prompt = max(1, prompt - self._said.tokens)
        return {
            **usage, "prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written,
        }  # fmt: skip


def overlap(said: str, text: str, final: bool) -> int | None:
    """How many characters at the beginning of `text` repeat the end of `said`; None as long as more may tell.

    An answer that begins all over is one long repetition.
    """
    tail = said[-MOST_OVERLAP:]
    if not final and (text in tail or said.startswith(text)):
        return None
    if text.startswith(said):
        return len(said)
    sizes = range(min(len(tail), len(text)), LEAST_OVERLAP - 1, -1)
    return next((size for size in sizes if tail.endswith(text[:size])), 0)


def white_space(said: str, text: str, final: bool) -> int | None:
    """The same where `text` goes on behind `said` without the white space at its end, which no prefill may have."""
    space = said[len(said.rstrip()) :]
    if not final and len(text) < len(space) and space.startswith(text):
        return None
    return len(space) if text.startswith(space) else 0


def across(said: str, text: str, stops: Sequence[str]) -> bool | None:
    """Whether a stop string that begins in `said` ends in `text`; None as long as it may."""
    may = False
    for stop in stops:
        for size in range(1, len(stop)):
            if said.endswith(stop[:size]):
                if text.startswith(stop[size:]):
                    return True
                may = may or stop[size:].startswith(text)
    return None if may else False


def hop_comment(name: str, characters: int, why: str) -> Comment:
    """Tells people who read the stream where another piece begins, who gives it, and why."""
    return Comment(f": headgate resumed on {name} after {characters} characters ({why})\n\n".encode())


def _chunk_in(payload: bytes) -> dict[str, Any] | None:
    """The chunk, or None. Half an emoji in an escape is none: no text can be made of it."""
    try:
        chunk = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return None
    choices = chunk.get("choices") if isinstance(chunk, dict) else None
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        return None
    return dict(chunk)
