"""Decides when the tokens of a prompt must be counted, and what the count means for a context.

A body is not counted when its bytes fit the context at LEAST_BYTES_PER_TOKEN, together with TEMPLATE_TOKENS and
`max_tokens`. Ordinary text has twice as many bytes per token. A prompt with fewer is refused by the model itself, and
the next candidate is tried.
"""

from __future__ import annotations

from enum import Enum

from gateway.routing.chain import Candidate, Drop, Dropped

TEMPLATE_TOKENS = 512
"""Tokens that a chat template may add: a system message of its own and the instructions for tool calls. The marks
around a message are shorter than the JSON around it."""

LEAST_BYTES_PER_TOKEN = 2
"""Lower bound for a body, whose JSON is longer than its texts. Only unusual text, such as rows of digits, has fewer."""

BYTES_PER_TOKEN = 4
"""Average of ordinary text; for estimates only."""


class Fit(Enum):
    """Which part of a request fits a context."""

    WHOLE = "whole"
    """the prompt and all of `max_tokens`"""
    PROMPT = "prompt"
    """the prompt and at least one token: the answer may end with `length` before `max_tokens`"""
    NOTHING = "nothing"


def is_far(size_bytes: int, max_tokens: int | None, context_length: int) -> bool:
    """Whether a body of `size_bytes` certainly fits the context, so that its tokens need not be counted."""
    return size_bytes / LEAST_BYTES_PER_TOKEN + TEMPLATE_TOKENS + (max_tokens or 1) <= context_length


def fit(prompt_tokens: int, max_tokens: int | None, context_length: int) -> Fit:
    """Which part of a prompt of `prompt_tokens` and an answer of at most `max_tokens` fits."""
    if prompt_tokens >= context_length or (max_tokens or 0) > context_length:
        return Fit.NOTHING
    return Fit.WHOLE if prompt_tokens + (max_tokens or 1) <= context_length else Fit.PROMPT


def about_tokens(size_bytes: int) -> int:
    """A low estimate of the tokens of a body of `size_bytes`."""
    return size_bytes // BYTES_PER_TOKEN


def is_alternative(context_length: int | None, to: int) -> bool:
    """Whether a context of `context_length` (None: unknown) may hold a prompt that a context of `to` does not."""
    return context_length is None or context_length > to


def too_long(candidate: Candidate, prompt_tokens: int, max_tokens: int | None, context_length: int) -> Dropped:
    """The reason for a prompt that leaves no room for an answer, or for a `max_tokens` beyond the whole context."""
    if prompt_tokens >= context_length:
        message = f"the prompt has {prompt_tokens} tokens, and its context holds {context_length}"
        param = None
    else:
        message = (
            f"max_tokens is {max_tokens}, and its context holds {context_length} tokens, prompt and answer together"
        )
        param = "max_tokens"
    details = {"context_length": context_length, "prompt_tokens": prompt_tokens, "max_tokens": max_tokens}
    return Dropped(candidate, Drop.CONTEXT, message, param=param, details=details)


def little_room(candidate: Candidate, prompt_tokens: int, max_tokens: int, context_length: int, to: str) -> Dropped:
    """The reason for a prompt that fits with an answer that may not, where candidate `to` holds both."""
    message = f"{prompt_tokens} tokens and max_tokens of {max_tokens} exceed its context of {context_length}"
    return Dropped(candidate, Drop.ROOM, f"{message}; {to} holds both and is tried first")
