"""Proposes the likeliest next tokens according to a draft model: a smaller model with the same vocabulary.

The draft model has a context of its own, with the same slots. A slot holds tokens that the same slot of the model
holds, and proposals behind them. Tokens that differ are removed, and missing ones computed, when proposals are wanted.
A long prompt is computed in pieces, one per step, so that the streams of the model continue meanwhile.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from inference.worker.backend import OK, Backend
from inference.worker.engine.prefill_pacing import Pace
from inference.worker.kv.catalog import common_prefix
from inference.worker.steps import Candidate

log = logging.getLogger("headgate.worker.draft")

PIECE_SECONDS = 0.08
"""Time for missing tokens in a step."""

USUAL_LAG = 2
"""Missing tokens of a sequence whose proposals were all accepted: the last proposal and the token drawn after it."""

MAX_FAILURES = 3
"""After this number of failures in a row the draft model is not used any more."""


class _Row(NamedTuple):
    """See `BatchRow`."""

    slot: int
    start: int
    tokens: Sequence[int]
    sample: bool
    every: bool = False


@dataclass(slots=True)
class _Held:
    """The tokens of a slot. The first `agreed` are known to be those of `job`."""

    tokens: array[int] = field(default_factory=lambda: array("i"))
    job: int = 0
    agreed: int = 0


class DraftModel:
    """Proposals of a draft model; see `ProposalSource`. An error of the draft model leaves a step without proposals."""

    is_free = False

    def __init__(
        self,
        backend: Backend,
        *,
        slots: int,
        context: int,
        batch: int,
        vocabulary: int,
        cells: int,
        clock: Callable[[], float],
    ) -> None:
        """`backend`: the context of the draft model, with sequences of up to `context` tokens and `batch` tokens per
        step. `vocabulary`: number of tokens that both models have. `cells`: as in `Limits`.
        """
        self.seconds = 0.0
        self._backend = backend
        self._held = [_Held() for _ in range(slots)]
        self._context = context
        self._vocabulary = vocabulary
        self._cells = cells
        self._clock = clock
        self._pace = Pace.first(batch)
        self._unsupported: set[int] = set()  # jobs with tokens that the draft model does not have, such as images
        self._failures = 0

    def propose(self, candidates: Sequence[Candidate]) -> list[Sequence[int]]:
        """Up to `most` tokens for each candidate; none while tokens before them are missing."""
        self.seconds = 0.0
        proposals: dict[int, list[int]] = {}
        wanted = self._fitting([item for item in candidates if item.most > 0 and item.job not in self._unsupported])
        if wanted and self._failures < MAX_FAILURES:
            try:
                ready = self._catch_up(wanted)
                started = self._clock()
                proposals = self._continue(ready)
                self.seconds = self._clock() - started
                self._failures = 0 if ready else self._failures
            except Exception:
                self._failures += 1
                is_last = self._failures >= MAX_FAILURES
                log.exception("the draft model failed%s", "; no more tokens are proposed" if is_last else "")
                self._clear()
        return [proposals.get(item.job, ()) for item in candidates]

    def behind(self, candidate: Candidate) -> int:
        """See `ProposalSource`."""
        held = self._held[candidate.slot]
        return len(candidate.tokens) - (held.agreed if held.job == candidate.job else 0)

    def removed(self, slot: int, start: int) -> None:
        """Removes these tokens from the context of the draft model as well."""
        held = self._held[slot]
        held.agreed = min(held.agreed, start)
        if start < len(held.tokens):
            self._backend.remove(slot, start)
            del held.tokens[start:]

    def end(self, job: int) -> None:
        """Forgets a job; its slot keeps its tokens as that of the model does."""
        self._unsupported.discard(job)

    def _fitting(self, wanted: Sequence[Candidate]) -> list[Candidate]:
        """The candidates whose tokens and proposals fit, with `most` limited by the context. In a shared pool of cells,
        other slots are emptied if their tokens do not fit beside these.
        """
        fitting = []
        room = self._cells or len(self._held) * self._context
        for item in wanted:
            most = min(item.most, self._context - len(item.tokens))
            if most > 0 and len(item.tokens) + most <= room:
                room -= len(item.tokens) + most
                fitting.append(item._replace(most=most))
        if self._cells:
            slots = {item.slot for item in fitting}
            for slot, held in enumerate(self._held):
                if slot not in slots and len(held.tokens) > room:
                    self.removed(slot, 0)
                elif slot not in slots:
                    room -= len(held.tokens)
        return fitting

    def _catch_up(self, wanted: Sequence[Candidate]) -> list[Candidate]:
        """Computes missing tokens, as many as a step may; returns the candidates that lack only the usual ones."""
        left = self._pace.budget(PIECE_SECONDS)
        rows, ready = [], []
        for item in wanted:
            start = self._align(item)
            missing = len(item.tokens) - start
            piece = item.tokens[start : start + min(missing - 1, left)] if missing > USUAL_LAG else item.tokens[start:]
            if not all(0 <= token < self._vocabulary for token in (*piece, item.tokens[-1])):
                self._unsupported.add(item.job)
                continue
            if missing > USUAL_LAG and piece:
                rows.append(_Row(item.slot, start, piece, sample=False))
                left -= len(piece)
                missing -= len(piece)
            if missing <= USUAL_LAG:
                ready.append(item)
        if rows:
            tokens = sum(len(row.tokens) for row in rows)
            started = self._clock()
            self._decode(rows)
            seconds = self._clock() - started
            self._pace = self._pace.observe(tokens, tokens, seconds, PIECE_SECONDS, decoding=0, prompts=len(rows))
        return ready

    def _align(self, item: Candidate) -> int:
        """Removes other tokens than those of the candidate from its slot; returns how many of its tokens remain.

        The last token of the candidate never remains, because its logits are needed.
        """
        held = self._held[item.slot]
        known = held.agreed if held.job == item.job else 0
        same = known + common_prefix(held.tokens[known:], item.tokens[known:], len(item.tokens) - 1 - known)
        self.removed(item.slot, same)
        held.job, held.agreed = item.job, same
        return same

    def _continue(self, ready: Sequence[Candidate]) -> dict[int, list[int]]:
        """The proposals by job. Each step computes one token of each candidate that needs further ones."""
        found: dict[int, list[int]] = {item.job: [] for item in ready}
        going = list(ready)
        tokens: dict[int, Sequence[int]] = {
            item.job: item.tokens[len(self._held[item.slot].tokens) :] for item in ready
        }
        while going:
            rows = [_Row(item.slot, len(self._held[item.slot].tokens), tokens[item.job], sample=True) for item in going]
            last = self._decode(rows)
            for item in going:
                token = self._choose(item, found[item.job], last[item.slot])
                found[item.job].append(token)
                tokens[item.job] = [token]
            going = [item for item in going if len(found[item.job]) < item.most]
        return found

    def _choose(self, item: Candidate, proposed: Sequence[int], index: int) -> int:
        """The likeliest token after those of the candidate and `proposed`, from the logits at a batch index."""
        return int(self._backend.logits(index)[: self._vocabulary].argmax())

    def _decode(self, rows: Sequence[_Row]) -> dict[int, int]:
        """Computes rows; returns the batch index of the last token of each slot."""
        rows = sorted(rows, key=attrgetter("slot"))
        status, last = self._backend.decode(rows)
        if status is not OK:
            raise RuntimeError(f"llama.cpp could not compute a step ({status.name.lower()})")
        for row in rows:
            self._held[row.slot].tokens.extend(row.tokens)
        return {row.slot: index for row, index in zip(rows, last, strict=True)}

    def _clear(self) -> None:
        """Empties the context after an error, whose effect on it is unknown."""
        for slot, held in enumerate(self._held):
            self._backend.remove(slot)
            held.tokens, held.agreed = array("i"), 0
