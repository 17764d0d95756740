"""What the models of OpenAI take, by their names, as its documentation says; sends nothing and refuses nothing.

A name that tells no generation is taken for a model that does not reason: names of one's own are mostly of such.
"""

from __future__ import annotations

import re

_BEFORE = r"(?:[^:/]*/)*(?:ft:)?"
"""What may stand before a name: prefixes such as `models/`, and the mark of a fine-tuned model."""


def _named(pattern: str) -> re.Pattern[str]:
    return re.compile(_BEFORE + pattern, re.IGNORECASE)


_REASONS = _named(r"(o\d|codex-|gpt-([5-9]|[12]\d)(?!\d|-chat))")
"""The o series and everything from GPT-5 on but `gpt-5-chat`. They answer 400 to sampling arguments."""

_SAMPLES_UNTHINKING = _named(r"gpt-5\.\d")
"""GPT-5.1 and its successors of that generation sample as they are told while their effort is `none`."""

_UNTHINKING = _named(r"gpt-5\.[1-4](?!\d|[^:]*-(chat|codex|pro))")
"""Those whose effort is `none` where nobody names one. From GPT-5.5 on it is `medium`, as it is for these variants or
higher."""

_NEVER_REASONS = _named(r"(gpt-(3\.5|4)|chatgpt-4o|gpt-5-chat)")
"""Models that are known not to reason. They answer 400 to an effort, which others of unknown names may have."""

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""All that callers name, from the least."""

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
"""Which of them a model takes, from the least and as far as they are known, by the first name that fits; others are
answered with 400. `max` is left out: later models than these know it, and they know the next lower one as well."""

_STOPS = _named(r"o(1|3-mini)(?!\d)")
"""Reasoning models that take `stop`: those before o3 and o4-mini."""

_MOST_TOKENS = (
    (_named(r"gpt-3\.5|gpt-4-(turbo|\d{4}-preview|vision)|gpt-4o-2024-05-13"), 4_096),
    (_named(r"gpt-4(-0314|-0613)?$"), 8_192),
    (_named(r"gpt-4o|chatgpt-4o|gpt-4\.5|gpt-5(\.\d)?-chat"), 16_384),
    (_named(r"gpt-4\.1|o1-preview"), 32_768),
    (_named(r"o1-mini"), 65_536),
    (_named(r"o[134](?!\d)"), 100_000),
    (_named(r"gpt-5(?!\d)"), 128_000),
)
"""The longest answers as far as they are known, of the first name that fits; more is answered with 400."""


def most_tokens(model: str) -> int | None:
    """The largest `max_completion_tokens` that `model` takes; None where its name does not tell."""
    return next((most for name, most in _MOST_TOKENS if name.match(model)), None)


def reasons(model: str) -> bool:
    """Whether `model` thinks, and so takes neither penalties nor a bias, whatever its effort."""
    return _REASONS.match(model) is not None


def effort_for(effort: str, model: str) -> str | None:
    """`effort` where `model` is known to take it, else the next higher one, else its highest; None where it has none.

    A word that is no effort stays as it is.
    """
    taken: tuple[str, ...] = next(efforts for name, efforts in _EFFORTS_OF if name.match(model))
    if not taken:
        return None
    if effort not in _EFFORTS:
        return effort
    least = _EFFORTS.index(effort)
    return next((other for other in taken if _EFFORTS.index(other) >= least), taken[-1])


def takes_sampling(model: str, effort: str | None) -> bool:
    """Whether a `model` that reasons, asked for this effort (None: for none by name), takes `temperature`, `top_p` and
    `logprobs`.
    """
    given = None if effort is None else effort_for(effort, model)
    unthinking = {None: _UNTHINKING, "none": _SAMPLES_UNTHINKING}.get(given)
    return unthinking is not None and unthinking.match(model) is not None


def takes_stop(model: str) -> bool:
    """Whether `model` takes `stop`."""
    return not reasons(model) or _STOPS.match(model) is not None
