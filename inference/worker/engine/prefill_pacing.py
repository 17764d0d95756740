"""Decides how many prompt tokens a step may carry so that steps stay short; never reads a clock.

Decoding sequences wait for every step to end, and aborts and new requests are seen between steps. How many prompt
tokens fit into half a second differs by four orders of magnitude between machines, so it is learned.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

TOKEN_SECONDS = 0.002
"""A token of a prompt that takes longer counts so long. On a slow model every time below is longer in that proportion,
as its streams are slower: steps with room for less than a prompt, each beside a token for every stream, cost it a sixth
of what it can do."""

SLOWEST = 6
"""But no less than one part in so many of what it took."""

STEP_SECONDS = 0.4
"""What prompts take of a step that streams wait for: the pause of a stream."""

LONGEST_SECONDS = 1.0
"""What they take where fewer are held up by it than wait for it, up to STEP_SECONDS times the proportion: one stream
pauses once, and all others begin. Also where nobody is held up who has had more than a first token: requests that came
together wait for each other once. And how late an abort or a new request is seen."""

MIXED_SECONDS = 0.08
"""What prompts take of a step that also decodes, on average: what a reader of a stream may notice as a pause."""

CREDIT_SECONDS = 4.0
"""How much more than that prompts may take in all before streams have had steps to catch up in. Requests that come
together are so computed at once: paused once, a stream is faster afterwards than one that is held up at every token."""

DEBT_SECONDS = LONGEST_SECONDS / 2
"""How much of what a step took beyond that is made up for by the next ones: what the scheduler may exceed a budget by.
Where a step was longer for another reason, the pace is corrected instead."""

SMALLEST = 32
"""Where even these take longer they are taken all the same; also where learning begins."""


def counted(tokens: int, seconds: float) -> float:
    """What so many tokens of prompts count that took `seconds`."""
    return max(seconds / SLOWEST, min(seconds, tokens * TOKEN_SECONDS))


def weight(decoding: int, prompts: int) -> float:
    """What a second counts in which so many streams are held up for so many prompts: less the more wait for it."""
    return min(1.0, decoding / max(1, prompts))


@dataclass(frozen=True, slots=True)
class Pace:
    """`tokens` of prompts count STEP_SECONDS, as far as is known; a step carries at most `most`. `credit_seconds` is
    what decoding sequences may still be held up beyond MIXED_SECONDS a step; a second in which more wait for a first
    token than for a next one counts in that proportion (`weight`).

    With costs that stay as they are, prompts take no longer than they may: a step is never trusted to carry more than
    the one measured last would have carried in that time, and what is known at most doubles. A token of a prompt is
    taken to cost as much as one that is decoded, which is the dearer one. A step that was too long corrects it at once.
    """

    most: int
    tokens: int
    credit_seconds: float = CREDIT_SECONDS

    @classmethod
    def first(cls, most: int) -> Pace:
        """Before anything was measured: SMALLEST, however long a step may take."""
        return cls(most, int(SMALLEST * STEP_SECONDS / LONGEST_SECONDS))

    def seconds(self, decoding: int, prompts: int, *, just_begun: bool = False) -> float:
        """What `prompts` of the next step may count beside so many `decoding` sequences, of which none has had more
        than a first token where they have `just_begun`.
        """
        if not decoding:
            return LONGEST_SECONDS
        worth = LONGEST_SECONDS if just_begun else min(STEP_SECONDS * max(1.0, prompts / decoding), LONGEST_SECONDS)
        return min(worth, (MIXED_SECONDS + self.credit_seconds) / weight(decoding, prompts))

    def duration(self, tokens: int) -> float:
        """Seconds that so many tokens of prompts count, as far as is known; they take no less."""
        return tokens * STEP_SECONDS / max(1, self.tokens)

    def budget(self, seconds: float) -> int:
        """Tokens of prompts for a step in which they may count so much."""
        return min(self.most, max(SMALLEST, int(self.tokens * seconds / STEP_SECONDS)))

    def observe(
        self, prompt_tokens: int, all_tokens: int, seconds: float, allowed: float, *, decoding: int, prompts: int
    ) -> Pace:
        """The pace after a step that took `seconds` and whose prompts were `allowed` to count so many; for the last two
        see `seconds`.

        A short step that carried less than half of what it might can only show that prompts take less than was known:
        most of it was not theirs. Where nobody decoded nobody was held up, and whoever decodes next has not been.
        """
        spent = counted(prompt_tokens, seconds * prompt_tokens / max(1, all_tokens))
        credit = CREDIT_SECONDS
        if decoding:
            held_up = spent * weight(decoding, prompts)
            credit = min(CREDIT_SECONDS, max(-DEBT_SECONDS, self.credit_seconds + MIXED_SECONDS - held_up))
        known = self if credit == self.credit_seconds else replace(self, credit_seconds=credit)
        if prompt_tokens == 0:
            return known
        fitting = prompt_tokens * STEP_SECONDS / max(spent, 1e-9)
        tokens = int(min(2 * max(self.tokens, prompt_tokens), fitting))
        was_short = spent <= max(allowed, MIXED_SECONDS)  # in debt nothing is allowed
        if was_short and prompt_tokens * 2 < self.budget(allowed):
            tokens = max(self.tokens, tokens)
        return replace(known, tokens=tokens)
