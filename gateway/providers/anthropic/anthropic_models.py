"""Which parameters the models of Anthropic accept, by model name, from Anthropic's documentation.

A name without a known generation is treated as the newest, because the newest models accept the fewest parameters.
"""

from __future__ import annotations

import re

from gateway.apis.messages_body import AdaptiveThinking, DisabledThinking, Effort, EnabledThinking, Thinking

_EARLY = re.compile(r"claude-(3|(opus|sonnet|haiku)-4(-[0-6])?(-\d{8}|-latest)?$)")
"""Models up to 4.6. They accept sampling parameters (with API version SAMPLING_VERSION) and thinking with a budget, but
no effort above `high`. Later models answer 400 to sampling parameters and budgets."""

_NO_EFFORT = re.compile(r"claude-(3|(opus-4(-[01])?|(sonnet|haiku)-4(-[0-5])?)(-\d{8}|-latest)?$)")
"""Models that have no `output_config.effort`."""

_BEFORE_4_6 = re.compile(r"claude-(3|(opus|sonnet|haiku)-4(-[0-5])?(-\d{8}|-latest)?$)")
"""Models up to 4.5. They continue a last assistant message, and think with a budget or not at all."""

_BEFORE_4_8 = re.compile(r"claude-(3|(opus|sonnet|haiku)-4(-[0-7])?(-\d{8}|-latest)?$)")
"""Models up to 4.7. They answer 400 to a system message inside a conversation."""

_ALWAYS_THINKS = re.compile(r"claude-(fable|mythos)-")
"""Models whose thinking cannot be turned off."""

_NO_FORMAT = re.compile(r"claude-(3|(opus|sonnet)-4(-0)?(-\d{8}|-latest)?$)")
"""Models that have no `output_config.format`."""


def takes_format(model: str) -> bool:
    """Whether `model` accepts a JSON schema for its answer."""
    return _NO_FORMAT.match(model) is None


def takes_sampling(model: str) -> bool:
    """Whether `model` accepts `temperature`, `top_p` and `top_k`."""
    return _EARLY.match(model) is not None


def takes_prefill(model: str) -> bool:
    """Whether `model` continues a last assistant message, which resuming a cut answer needs."""
    return _BEFORE_4_6.match(model) is not None


def takes_later_system(model: str) -> bool:
    """Whether `model` accepts system messages inside a conversation."""
    return _BEFORE_4_8.match(model) is None


def effort_for(effort: Effort, model: str) -> Effort | None:
    """The effort of `model` that is nearest to `effort`; None for a model without efforts."""
    if _NO_EFFORT.match(model):
        return None
    return "high" if effort in ("xhigh", "max") and _EARLY.match(model) else effort


def thinking_by_effort(model: str) -> Thinking | None:
    """`thinking` for a request with an effort only; None for a model that needs a budget or does not think.

    Models that hide their thinking by default are asked for a summary, because a long silence looks like a failure.
    """
    return thinking_for(AdaptiveThinking(display=None if _EARLY.match(model) else "summarized"), model)


def thinking_for(thinking: Thinking, model: str) -> Thinking | None:
    """`thinking` as `model` accepts it; None where the model's default is the nearest.

    A budget becomes adaptive thinking for models without budgets.
    """
    match thinking:
        case DisabledThinking():
            return None if _ALWAYS_THINKS.match(model) else thinking
        case EnabledThinking():
            return thinking if _EARLY.match(model) else AdaptiveThinking(display=thinking.display)
        case AdaptiveThinking():
            return None if _BEFORE_4_6.match(model) else thinking
    return None if _EARLY.match(model) else thinking
