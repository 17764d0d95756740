"""Follows one answer from token to token: text, stop strings, length, and log probabilities (also of its prompt)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from encodings.utf_8 import IncrementalDecoder
from typing import NamedTuple

import numpy as np

from inference.worker.backend import TokenSampler, Vocabulary
from inference.worker.dialects.answer_parts import Part, joined
from inference.worker.sampling import Distribution
from inference.worker.worker_errors import WorkerError
from inference.worker.worker_requests import AnswerPrefix


class Detokenizer:
    """Decodes UTF-8 in pieces; the result is the same as for all bytes decoded together, with U+FFFD for errors."""

    def __init__(self) -> None:
        self._decoder = IncrementalDecoder("replace")

    def push(self, piece: bytes) -> str:
        """The text that `piece` completes; bytes of an unfinished character are kept."""
        if piece.isascii() and not self._decoder.buffer:
            return piece.decode("ascii")  # the usual case; the decoder is Python code
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """The rest at the end: empty, or U+FFFD for an incomplete character."""
        return self._decoder.decode(b"", True)


class StopFilter:
    """Cuts text before the first stop string that is completed, however the text is divided into pieces.

    If one character completes several stop strings, the longest is cut, so that no part of it is shown.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string cannot be empty")
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found, None before."""

    def push(self, text: str) -> str:
        """The text that can be shown now. After a match it is always empty."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _end, start, self.matched = min(found)
            self._held = ""
            return text[:start]
        keep = max(_overlap(text, stop) for stop in self._stops)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The rest of the text at the end of an answer without a stop string: what was held back."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper prefix of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its log probability (None for the first of a prompt) and the likeliest alternatives; `offset` is where
    its text begins in the answer, or in the prompt, in characters.
    """

    piece: bytes
    logprob: float | None
    top: tuple[tuple[bytes, float], ...]
    offset: int


class Output(NamedTuple):
    """What one step added to one choice. The last one of a choice has `finish` or `error`. `tokens` is the number of
    tokens of the answer so far, `cached` that of the prompt tokens that did not have to be computed.

    `text` is the content of a plain answer. A structured answer has `parts` instead: content, reasoning and calls in
    their order. `tokens` includes `reasoning_tokens`.

    `prompt_logprobs` are the next log probabilities of the prompt, if they were requested. Their outputs have no text
    and precede the first output with text or a finish.

    `stop` is the stop string that ended the choice, if any.
    """

    choice: int
    text: str
    tokens: int
    cached: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: str | None = None
    error: WorkerError | None = None
    parts: tuple[Part, ...] = ()
    reasoning_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    stop: str | None = None

    def joined(self, later: Output) -> Output:
        """This output joined with the next one of the same choice, `later`. Neither has log probabilities."""
        return later._replace(text=self.text + later.text, parts=joined(self.parts, later.parts))


class Generation:
    """One choice of one request, on the engine's thread."""

    def __init__(
        self, choice: int, sampler: TokenSampler, vocabulary: Vocabulary, max_tokens: int, stops: Sequence[str]
    ) -> None:
        self.choice = choice
        self.sampler = sampler
        self.cached: int | None = None
        self.tokens = 0
        self._vocabulary = vocabulary
        self._ends = vocabulary.end_tokens
        self._max_tokens = max_tokens
        self._detokenizer = Detokenizer()
        self._stops = StopFilter(stops)
        self._decoded = 0
        self._shown = 0
        self._logprobs: list[TokenLogprob] = []
        self._begun = 0
        self._hidden = 0

    @property
    def is_fresh(self) -> bool:
        """Whether no token was drawn yet; those of a prefix do not count."""
        return self.tokens == self._begun

    def resume(self, prefix: AnswerPrefix) -> None:
        """Continues an interrupted answer after `prefix`, which the client has."""
        self.tokens = self._begun = prefix.tokens
        self._hidden = len(prefix.content) - len(self._stops.push(prefix.content))

    def accept(self, token: int, logprob: float | None = None, top: Sequence[tuple[int, float]] = ()) -> Output | None:
        """The output for the token, None while it is held back; an output with `finish` is the last."""
        self.tokens += 1
        if token in self._ends:
            return self._output(self._rest(), "stop")
        piece = self._vocabulary.piece(token)
        if logprob is not None:
            self._score(token, logprob, top)
        decoded = self._detokenizer.push(piece)
        self._decoded += len(decoded)
        text = self._unseen(self._stops.push(decoded))
        if self._stops.matched is not None:
            return self._output(text, "stop", cut=True)
        if self.tokens >= self._max_tokens:
            return self._output(text + self._rest(), "stop" if self._stops.matched is not None else "length")
        return self._output(text, None) if text else None

    def fail(self, error: WorkerError) -> Output:
        """The end of a choice that cannot continue."""
        return Output(self.choice, "", self.tokens, self.cached or 0, (), None, error)

    def _score(self, token: int, logprob: float, top: Sequence[tuple[int, float]]) -> None:
        """Keeps a token's log probability. Control tokens are named in it, although the answer does not show them."""
        named = tuple((self._vocabulary.piece(other, special=True), value) for other, value in top)
        self._logprobs.append(TokenLogprob(self._vocabulary.piece(token, special=True), logprob, named, self._decoded))

    def _rest(self) -> str:
        text = self._stops.push(self._detokenizer.flush())
        return self._unseen(text + self._stops.flush())

    def _unseen(self, text: str) -> str:
        """`text` without the part that the client has: `prefix` may end in the beginning of a stop string."""
        if not self._hidden:
            return text
        cut = min(self._hidden, len(text))
        self._hidden -= cut
        return text[cut:]

    def _output(self, text: str, finish: str | None, *, cut: bool = False) -> Output:
        self._shown += len(text)
        logprobs = self._ready(finish, cut) if self._logprobs else ()
        stop = self._stops.matched if finish is not None else None
        return Output(self.choice, text, self.tokens, self.cached or 0, logprobs, finish, stop=stop)

    def _ready(self, finish: str | None, cut: bool) -> tuple[TokenLogprob, ...]:
        """The log probabilities of the text that is sent now. Those of a stop string that was cut are dropped."""
        ready = [item for item in self._logprobs if item.offset < self._shown or (finish is not None and not cut)]
        self._logprobs = [] if finish is not None else self._logprobs[len(ready) :]
        return tuple(ready)


class Scoring:
    """The log probabilities of one prompt, on the engine's thread.

    A token that is computed again after a preemption is scored once. Pieces of control tokens have their text
    (`special=True`), and offsets count the characters of all pieces.
    """

    def __init__(self, prompt: Sequence[int], vocabulary: Vocabulary, alternatives: int) -> None:
        self._prompt = prompt
        self._vocabulary = vocabulary
        self._alternatives = alternatives
        self._detokenizer = Detokenizer()
        self._decoded = 0
        self._scored = 0

    def add(self, start: int, count: int, logits_at: Callable[[int], np.ndarray]) -> tuple[TokenLogprob, ...]:
        """The scores from `count` computed tokens from position `start` on. The logits of a token score the next one.

        `logits_at(n)` are the logits at the n-th of them. The first token of the prompt has no log probability.
        """
        found = []
        if self._scored == 0:
            found.append(self._entry(self._prompt[0], None))
            self._scored = 1
        for position in range(start, min(start + count, len(self._prompt) - 1)):
            if position + 1 == self._scored:
                found.append(self._entry(self._prompt[position + 1], Distribution.of(logits_at(position - start))))
                self._scored += 1
        return tuple(found)

    def _entry(self, token: int, distribution: Distribution | None) -> TokenLogprob:
        vocabulary = self._vocabulary
        piece = vocabulary.piece(token, special=True)
        offset = self._decoded
        self._decoded += len(self._detokenizer.push(piece))
        if distribution is None:
            return TokenLogprob(piece, None, (), offset)
        best = distribution.top(self._alternatives)
        top = tuple((vocabulary.piece(other, special=True), value) for other, value in best)
        return TokenLogprob(piece, distribution.logprob(token), top, offset)
