"""Decides when a prompt has to be counted, and what its count means for a context; counts nothing itself.

A body whose bytes would fit at LEAST_BYTES_PER_TOKEN, with what a template writes around them and `max_tokens`, is far
from the context and is not counted. Ordinary text has twice as many bytes per token; what has fewer than that is
refused by the model itself, and another tier is asked then.
"""

from __future__ import annotations

from enum import Enum

from gateway.routing.chain import Candidate, Drop, Dropped

TEMPLATE_TOKENS = 512
"""What a chat template may add beside the messages: a system message of its own, the way to call tools. The marks
around each message are shorter than the JSON around it."""

LEAST_BYTES_PER_TOKEN = 2
"""Of a body, whose JSON is longer than the texts in it. Only odd texts have fewer, such as long rows of digits."""

BYTES_PER_TOKEN = 4
"""Of ordinary text; only for expectations, never for whether something fits."""


class Fit(Enum):
    """What of a request fits a context."""

    WHOLE = "whole"
    """the prompt and all of `max_tokens`"""
    PROMPT = "prompt"
    """the prompt and at least one token: the answer may end with `length` before `max_tokens`"""
    NOTHING = "nothing"


def is_far(size_bytes: int, max_tokens: int | None, context_length: int) -> bool:
    """Whether a body of `size_bytes` is so far from the context that its tokens need not be counted."""
    return size_bytes / LEAST_BYTES_PER_TOKEN + TEMPLATE_TOKENS + (max_tokens or 1) <= context_length


def fit(prompt_tokens: int, max_tokens: int | None, context_length: int) -> Fit:
    """What fits of a prompt with so many tokens and an answer of at most `max_tokens`."""
    if prompt_tokens >= context_length or (max_tokens or 0) > context_length:
        return Fit.NOTHING
    return Fit.WHOLE if prompt_tokens + (max_tokens or 1) <= context_length else Fit.PROMPT


def about_tokens(size_bytes: int) -> int:
    """Roughly how many tokens a body of `size_bytes` has, rather too few."""
    return size_bytes // BYTES_PER_TOKEN


def is_alternative(context_length: int | None, to: int) -> bool:
    """Whether a tier with such a context (None: nobody knows) may hold what one with a context of `to` cannot."""
    return context_length is None or context_length > to


def too_long(candidate: Candidate, prompt_tokens: int, max_tokens: int | None, context_length: int) -> Dropped:
    """The verdict on a prompt that leaves no room for an answer, or on an answer longer than the whole context."""
    if prompt_tokens >= context_length:
        said = f"the prompt has {prompt_tokens} tokens, and its context holds {context_length}"
        param = None
    else:
        said = f"max_tokens is {max_tokens}, and its context holds {context_length} tokens, prompt and answer together"
        param = "max_tokens"
    details = {"context_length": context_length, "prompt_tokens": prompt_tokens, "max_tokens": max_tokens}
    return Dropped(candidate, Drop.CONTEXT, said, param=param, details=details)


def little_room(candidate: Candidate, prompt_tokens: int, max_tokens: int, context_length: int, to: str) -> Dropped:
    """The verdict on a prompt that fits and an answer that may not, where the tier `to` holds both."""
    said = f"{prompt_tokens} tokens and max_tokens of {max_tokens} exceed its context of {context_length}"
    return Dropped(candidate, Drop.ROOM, f"{said}; {to} holds both and is asked first")
