"""Which parameters the models of OpenAI accept, by model name, from OpenAI's documentation.

A name without a known generation, such as a custom deployment name, is treated as a model that does not reason.
"""

from __future__ import annotations

import re

_BEFORE = r"(?:[^:/]*/)*(?:ft:)?"
"""The optional part before a name: prefixes such as `models/`, and `ft:` of a fine-tuned model."""


def _named(pattern: str) -> re.Pattern[str]:
    return re.compile(_BEFORE + pattern, re.IGNORECASE)


_REASONS = _named(r"(o\d|codex-|gpt-([5-9]|[12]\d)(?!\d|-chat))")
"""The o series and GPT-5 and later except `gpt-5-chat`. They answer 400 to sampling parameters."""

_SAMPLES_UNTHINKING = _named(r"gpt-5\.\d")
"""GPT-5.1 and later 5.x models accept sampling parameters while their effort is `none`."""

_UNTHINKING = _named(r"gpt-5\.[1-4](?!\d|[^:]*-(chat|codex|pro))")
"""Models whose default effort is `none`. For GPT-5.5 and later, and for the excluded variants, it is `medium` or
higher."""

_NEVER_REASONS = _named(r"(gpt-(3\.5|4)|chatgpt-4o|gpt-5-chat)")
"""Models that do not reason. They answer 400 to an effort; models with unknown names may accept one."""

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""All efforts, lowest first."""

_EFFORTS_OF = (
    (_NEVER_REASONS, ()),
    (_named(r"gpt-5\.\d+-chat"), ("medium",)),
    (_named(r"gpt-5-pro"), ("high",)),
    (_named(r"gpt-5\.\d[^:]*-pro"), ("medium", "high", "xhigh")),
    (_named(r"(o\d|codex-|gpt-5-codex|gpt-5\.1-codex(?!-max))"), ("low", "medium", "high")),
    (_named(r"gpt-5(?![.\d])"), ("minimal", "low", "medium", "high")),
    (_named(r"gpt-5\.1(?!\d|-codex)"), ("none", "low", "medium", "high")),
    (_named(r"gpt-5\.\d[^:]*-codex"), ("low", "medium", "high", "xhigh")),
    (_named(r"gpt-5\.\d"), ("none", "low", "medium", "high", "xhigh")),
    (_named(""), ("none", "minimal", "low", "medium", "high", "xhigh")),
)
"""The known efforts of a model, lowest first, by the first matching pattern; the API answers 400 to others.

`max` is left out: later models accept it, and they accept the next lower one as well."""

_STOPS = _named(r"o(1|3-mini)(?!\d)")
"""Reasoning models that accept `stop`: those before o3 and o4-mini."""

_MOST_TOKENS = (
    (_named(r"gpt-3\.5|gpt-4-(turbo|\d{4}-preview|vision)|gpt-4o-2024-05-13"), 4_096),
    (_named(r"gpt-4(-0314|-0613)?$"), 8_192),
    (_named(r"gpt-4o|chatgpt-4o|gpt-4\.5|gpt-5(\.\d)?-chat"), 16_384),
    (_named(r"gpt-4\.1|o1-preview"), 32_768),
    (_named(r"o1-mini"), 65_536),
    (_named(r"o[134](?!\d)"), 100_000),
    (_named(r"gpt-5(?!\d)"), 128_000),
)
"""The known maximum of `max_completion_tokens`, by the first pattern that matches; the API answers 400 to more."""


def most_tokens(model: str) -> int | None:
    """The largest `max_completion_tokens` that `model` accepts; None if it is unknown."""
    return next((most for name, most in _MOST_TOKENS if name.match(model)), None)


def reasons(model: str) -> bool:
    """Whether `model` reasons, and so accepts neither penalties nor a logit bias, whatever its effort."""
    return _REASONS.match(model) is not None


def effort_for(effort: str, model: str) -> str | None:
    """`effort` if `model` accepts it, else the next higher one, else its highest; None for a model without efforts.

    An unknown effort is returned unchanged.
    """
    taken: tuple[str, ...] = next(efforts for name, efforts in _EFFORTS_OF if name.match(model))
    if not taken:
        return None
    if effort not in _EFFORTS:
        return effort
    least = _EFFORTS.index(effort)
    return next((other for other in taken if _EFFORTS.index(other) >= least), taken[-1])


def takes_sampling(model: str, effort: str | None) -> bool:
    """Whether a reasoning `model` accepts `temperature`, `top_p`, `logprobs` with this effort (None: its default)."""
    given = None if effort is None else effort_for(effort, model)
    unthinking = {None: _UNTHINKING, "none": _SAMPLES_UNTHINKING}.get(given)
    return unthinking is not None and unthinking.match(model) is not None


def takes_stop(model: str) -> bool:
    """Whether `model` accepts `stop`."""
    return not reasons(model) or _STOPS.match(model) is not None
