"""Decides how many proposed tokens of a sequence a step verifies.

A step computes the last token of a sequence together with its proposed next tokens. Each proposal that equals the token
drawn at its place saves a step; the others have cost time for nothing. A proposal is worth its time while

    probability that it and all before it are accepted  >  time of a proposed token / time of a token without proposals

The probability is measured per answer and per model; if proposals cost no time, also where nothing is verified. The
times are measured per number of sequences in a step: with more of them the batch is used better without proposals, and
the ratio is higher.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

from inference.worker.steps import Candidate

MAX_PROPOSED = 16
"""Maximum number of proposed tokens of a sequence in a step."""

MARGIN = 1.3
"""The ratio of times is multiplied by this: a later proposal must gain more tokens per second than the earlier ones
have reached already, and measurements vary."""

FIRST_RATIO = 0.25
"""Assumed ratio of times per sequence before a measurement; 0.2 to 0.3 on two cores."""

FIRST_RATE = 0.5
"""Assumed share of correct proposals of a model before its first one."""

PRIOR_TOKENS = 2.0
"""Weight of the rate of the model in the estimate for an answer, in tokens."""

ANSWER_MEMORY, MODEL_MEMORY = 0.9, 0.98
"""A step with proposals for an answer multiplies the weight of earlier proposals: in the rate of the answer by the
first of these, in the rate of the model by the second."""

MEASURED_STEPS, MIN_STEPS = 7, 3
"""Times are medians of this number of steps, because other programs delay single steps. Nothing is verified before the
least number of steps without proposals."""

PLAIN_INTERVAL = 64
"""After this number of steps two are computed without proposals, to measure their time again."""

TRIAL_STEPS = 16
"""After this number of steps without proposals, times the number of sequences in a step, one likely token per sequence
is verified although it is not worth its time, so that the times are measured again. With eight sequences that costs
0.6 % of the time."""

COSTLY_TRIAL_STEPS, COSTLY_TRIAL_TOKENS = 64, 4
"""The same for a source that takes time. Several tokens are verified, also unlikely ones: their rate is not known
otherwise, and the time per token is longest for a single one. The first trials come at once if a proposal is worth its
assumed time (up to three sequences); the others are delayed by half as many steps as the source has tokens to compute
first."""


class ProposalSource(Protocol):
    """Where proposals come from. Used on the engine thread only."""

    @property
    def is_free(self) -> bool:
        """Whether a proposal that is not verified costs no time; then the rates are measured without verification."""
        ...

    @property
    def seconds(self) -> float:
        """The time that the last call of `propose` took for proposals."""
        ...

    def propose(self, candidates: Sequence[Candidate]) -> Sequence[Sequence[int]]:
        """Up to `most` (0 or more) next tokens of each candidate. The tokens of a job begin with those of the last
        call."""
        ...

    def behind(self, candidate: Candidate) -> int:
        """How many tokens the source has to compute before its first proposal, at most."""
        ...

    def removed(self, slot: int, start: int) -> None:
        """The tokens of `slot` from `start` on were removed from the context of the model."""
        ...

    def end(self, job: int) -> None:
        """Forgets a job, which may be unknown."""
        ...


@dataclass(slots=True)
class AcceptanceRate:
    """Correct and wrong proposals; earlier ones have less weight. Tokens behind a wrong one do not count."""

    memory: float
    correct: float = 0.0
    wrong: float = 0.0

    def note(self, proposed: int, correct: int) -> None:
        """The first `correct` of `proposed` tokens were right."""
        self.correct = self.correct * self.memory + correct
        self.wrong = self.wrong * self.memory + (correct < proposed)

    def share(self, prior: float) -> float:
        """The probability that a token is accepted; `prior` without observations."""
        return (self.correct + prior * PRIOR_TOKENS) / (self.correct + self.wrong + PRIOR_TOKENS)


def _last() -> deque[float]:
    return deque(maxlen=MEASURED_STEPS)


@dataclass(slots=True)
class _Times:
    """Times of the last steps with one number of sequences, in seconds.

    `plain`: of a step without proposals. `proposal`: of a proposed token, with the delay of the next step. `steps`,
    `unmeasured`: steps since the last one with proposals, and since the last one in `plain`. `proposed`: number of
    proposed tokens in the last step that had some.
    """

    plain: deque[float] = field(default_factory=_last)
    proposal: deque[float] = field(default_factory=_last)
    steps: int = 0
    unmeasured: int = 0
    proposed: int = 0

    def needed(self, sequences: int) -> float:
        """The probability from which on a proposal is worth its time; infinite if a step without any is due."""
        if len(self.plain) < MIN_STEPS or self.unmeasured >= PLAIN_INTERVAL:
            return math.inf
        return MARGIN * self.ratio(sequences)

    def ratio(self, sequences: int) -> float:
        """Time of a proposed token over the time of a token without proposals."""
        if not self.proposal or (plain := median(self.plain)) == 0:
            return FIRST_RATIO * sequences
        return median(self.proposal) * sequences / plain


@dataclass(slots=True)
class _Answer:
    """The state of one answer. `proposed`: its next tokens as the source proposed them, verified or not."""

    rate: AcceptanceRate = field(default_factory=lambda: AcceptanceRate(ANSWER_MEMORY))
    proposed: Sequence[int] = ()


class Speculation:
    """Proposals for the answers of one model, by job, and the measurements of the model."""

    def __init__(self, source: ProposalSource) -> None:
        self._source = source
        self._rate = AcceptanceRate(MODEL_MEMORY)
        self._answers: dict[int, _Answer] = {}
        self._times: dict[int, _Times] = {}

    def propose(self, candidates: Sequence[Candidate], sequences: int) -> list[Sequence[int]]:
        """The tokens to verify for each candidate in a step of `sequences` sequences."""
        times = self._of(sequences)
        needed = times.needed(sequences)
        answers, lengths = [], []
        for candidate in candidates:
            if (answer := self._answers.get(candidate.job)) is None:
                answer = self._answers[candidate.job] = _Answer()
            answer.proposed = ()
            answers.append(answer)
            lengths.append(min(candidate.most, self._length(candidate, answer.rate, times, needed, sequences)))
        if self._source.is_free:
            asked = [candidate._replace(most=MAX_PROPOSED) for candidate in candidates]
        elif any(lengths):
            asked = [candidate._replace(most=length) for candidate, length in zip(candidates, lengths, strict=True)]
        else:
            return [()] * len(candidates)
        found = self._source.propose(asked)
        for answer, proposed in zip(answers, found, strict=True):
            answer.proposed = proposed
        return [proposed[:length] for proposed, length in zip(found, lengths, strict=True)]

    def removed(self, slot: int, start: int) -> None:
        """See `ProposalSource`."""
        self._source.removed(slot, start)

    def note_drawn(self, job: int, tokens: Sequence[int]) -> None:
        """A step has drawn `tokens` for `job`, which were proposed or not."""
        if (answer := self._answers.get(job)) is None or not answer.proposed:
            return
        pairs = list(zip(answer.proposed, tokens, strict=False))
        correct = next((at for at, (one, other) in enumerate(pairs) if one != other), len(pairs))
        answer.proposed = ()
        answer.rate.note(len(pairs), correct)
        self._rate.note(len(pairs), correct)

    def end(self, job: int) -> None:
        """Forgets a job, which may be unknown."""
        self._answers.pop(job, None)
        self._source.end(job)

    def note_step(self, sequences: int, proposed: int, seconds: float) -> None:
        """A step that only decodes took `seconds`, with `proposed` proposed tokens of all its sequences.

        The time of their source is added.
        """
        times = self._of(sequences)
        times.unmeasured += 1
        longer = max(0.0, seconds - median(times.plain)) if times.plain else 0.0
        if proposed:
            times.steps, times.proposed = 0, proposed
            times.proposal.append((longer + self._source.seconds) / proposed)
            return
        times.steps += 1
        if times.steps == 1 and times.proposal:  # llama.cpp builds a new graph after a step of another shape
            times.proposal[-1] += longer / times.proposed
        else:
            times.unmeasured = 0
            times.plain.append(seconds)

    def _length(self, candidate: Candidate, rate: AcceptanceRate, times: _Times, needed: float, sequences: int) -> int:
        """How many proposed tokens are worth their time, if a token must be accepted with the probability `needed`."""
        if needed == math.inf:
            return 0
        is_promising = MARGIN * FIRST_RATIO * sequences < 1
        if not self._source.is_free and is_promising and len(times.proposal) < MIN_STEPS:
            return COSTLY_TRIAL_TOKENS
        share = rate.share(self._rate.share(FIRST_RATE))
        if needed < share:  # the n-th proposal is worth its time while share ** n >= needed
            least = share**MAX_PROPOSED
            return MAX_PROPOSED if needed <= least else int(math.log(needed) / math.log(share))
        if self._source.is_free:
            return int(share > FIRST_RATE and times.steps >= TRIAL_STEPS * sequences)
        waited = times.steps - COSTLY_TRIAL_STEPS * sequences
        return COSTLY_TRIAL_TOKENS if waited >= 0 and waited >= self._source.behind(candidate) // 2 else 0

    def _of(self, sequences: int) -> _Times:
        return self._times.setdefault(sequences, _Times())
