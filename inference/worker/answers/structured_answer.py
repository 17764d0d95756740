"""Follows an answer with reasoning and tool calls from token to token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from inference.worker.answers.generation import Generation, Output
from inference.worker.backend import TokenSampler, Vocabulary
from inference.worker.dialects.answer_parts import AnswerParser, CallBegin, Content, Part, Reasoning
from inference.worker.worker_requests import AnswerPrefix


@dataclass(frozen=True, slots=True)
class Reading:
    """How the answers of one request are parsed.

    `parser` creates a parser for each choice. `parsed`: control tokens whose texts the parser gets; `ends`: tokens
    that end an answer in addition to the vocabulary's own. `call_id` creates ids for calls without one. An answer ends
    before a call beyond `max_calls` (None: no limit).
    """

    parser: Callable[[], AnswerParser]
    call_id: Callable[[], str]
    parsed: frozenset[int] = frozenset()
    ends: frozenset[int] = frozenset()
    max_calls: int | None = None
    after_calls: str = "tool_calls"
    """The finish reason of an answer with tool calls that ended normally."""
    forced: bool = False
    """Whether the answer must be calls: the rest of an incomplete first call is then not content."""


class StructuredGeneration(Generation):
    """One choice of one request, on the engine's thread. Stop strings apply to content alone and span no other part.

    Log probabilities are those of all generated tokens up to a stop string or the end token.
    """

    def __init__(
        self,
        choice: int,
        sampler: TokenSampler,
        vocabulary: Vocabulary,
        max_tokens: int,
        stops: Sequence[str],
        reading: Reading,
        parser: AnswerParser,
    ) -> None:
        """`parser` belongs to this choice only."""
        super().__init__(choice, sampler, vocabulary, max_tokens, stops)
        self._reading = reading
        self._parser = parser
        self._ends = vocabulary.end_tokens | reading.ends
        self._parts: list[Part] = []
        self._content = 0
        """Characters that the parser classified as content; those that are shown are `_shown`."""
        self._before: int | None = None
        """Characters before the present run of content that are not content: reasoning, calls and their markers. Text
        that the parser holds back counts too, so it may be too high. None outside such a run.
        """
        self._called = False
        self._complete = False
        self._in_reasoning = False
        self._reasoning_tokens = 0
        self._undecided = 0

    def resume(self, prefix: AnswerPrefix) -> None:
        """Continues an interrupted answer: inside its reasoning as long as it has no content."""
        super().resume(prefix)
        self._reasoning_tokens = prefix.reasoning
        self._in_reasoning = prefix.reasoning > 0 and not prefix.content

    def accept(self, token: int, logprob: float | None = None, top: Sequence[tuple[int, float]] = ()) -> Output | None:
        """The output for the token, None while it is held back; an output with `finish` is the last."""
        self.tokens += 1
        self._undecided += 1
        is_end = token in self._ends
        is_parsed = token in self._reading.parsed
        piece = b"" if is_end and not is_parsed else self._vocabulary.piece(token, special=is_parsed)
        if logprob is not None and not is_end:
            self._score(token, logprob, top)
        if decoded := self._detokenizer.push(piece):
            self._decoded += len(decoded)
            self._take(self._parser.push(decoded))
        if self._stops.matched is not None or self._complete:
            return self._close("stop", cut=True)
        if is_end or self.tokens >= self._max_tokens:
            return self._close("stop" if is_end else "length")
        return self._added(None) if self._parts else None

    def _close(self, finish: str, *, cut: bool = False) -> Output:
        if not cut:
            drops = self._reading.forced and finish == "length"
            if rest := self._detokenizer.flush():
                self._decoded += len(rest)
                self._take(self._parser.push(rest), drops=drops)
            self._take(self._parser.flush(), drops=drops)
            self._show(self._unseen(self._stops.flush()))
            if self._in_reasoning:
                self._reasoning_tokens += self._undecided
        if self._stops.matched is not None:
            finish = "stop"
        elif self._called and finish == "stop":
            finish = self._reading.after_calls
        return self._added(finish)

    def _take(self, parts: Iterable[Part], *, drops: bool = False) -> None:
        """Adds parts of the parser until a stop string or a call beyond the limit. `drops`: content is dropped, and
        stop strings in it are ignored.
        """
        for part in parts:
            if self._stops.matched is not None or self._complete:
                return
            self._count(part)
            if isinstance(part, Content):
                if drops:
                    continue
                self._content += len(part.text)
                before = self._decoded - self._content
                self._before = before if self._before is None else min(before, self._before)
                self._show(self._unseen(self._stops.push(part.text)))
                continue
            self._show(self._unseen(self._stops.flush()))
            self._before = None
            if isinstance(part, CallBegin):
                self._begin(part)
            else:
                self._parts.append(part)

    def _show(self, text: str) -> None:
        self._shown += len(text)
        if text and self._parts and isinstance(last := self._parts[-1], Content):
            self._parts[-1] = Content(last.text + text)
        elif text:
            self._parts.append(Content(text))

    def _begin(self, call: CallBegin) -> None:
        if self._reading.max_calls is not None and call.index >= self._reading.max_calls:
            self._complete = True
            return
        self._called = True
        self._parts.append(call if call.id else replace(call, id=self._reading.call_id()))

    def _count(self, part: Part) -> None:
        """Counts reasoning tokens. One token without text after the reasoning counts too, as the mark of its end."""
        if isinstance(part, Reasoning):
            self._reasoning_tokens += self._undecided
            self._in_reasoning = True
        elif self._in_reasoning:
            self._reasoning_tokens += min(1, self._undecided - 1)
            self._in_reasoning = False
        self._undecided = 0

    def _added(self, finish: str | None) -> Output:
        parts = tuple(self._parts)
        self._parts.clear()
        ready = self._logprobs
        if self._shown < self._content and self._before is not None:
            # Content that is held back, or was cut away by a stop string, keeps the log probabilities of its tokens.
            end = self._before + self._shown
            ready = [item for item in ready if item.offset < end]
        self._logprobs = [] if finish is not None else self._logprobs[len(ready) :]
        return Output(
            self.choice,
            "",
            self.tokens,
            self.cached or 0,
            tuple(ready),
            finish,
            None,
            parts,
            self._reasoning_tokens,
            stop=self._stops.matched if finish is not None else None,
        )
