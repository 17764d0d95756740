"""What the models of Anthropic take, by their names, as its documentation says; sends nothing and refuses nothing.

A name that tells no generation is taken for the newest, because what the newest refuse is the smaller loss to leave
out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_EARLY = re.compile(r"claude-(3|(opus|sonnet|haiku)-4(-[0-6])?(-\d{8}|-latest)?$)")
"""Models up to 4.6. They take sampling parameters (under the older API version), thinking with a budget, and no effort
above high; later ones answer 400 to any of them."""

_NO_EFFORT = re.compile(r"claude-(3|(opus-4(-[01])?|(sonnet|haiku)-4(-[0-5])?)(-\d{8}|-latest)?$)")
"""Models that have no `output_config.effort`."""

_BEFORE_4_6 = re.compile(r"claude-(3|(opus|sonnet|haiku)-4(-[0-5])?(-\d{8}|-latest)?$)")
"""Models up to 4.5. They go on with a last assistant message, and think with a budget or not at all."""

_BEFORE_4_8 = re.compile(r"claude-(3|(opus|sonnet|haiku)-4(-[0-7])?(-\d{8}|-latest)?$)")
"""Models up to 4.7. They answer 400 to a system message inside a conversation."""

_ALWAYS_THINKS = re.compile(r"claude-(fable|mythos)-")
"""Models whose thinking cannot be turned off."""


_NO_FORMAT = re.compile(r"claude-(3|(opus|sonnet)-4(-0)?(-\d{8}|-latest)?$)")
"""Models that have no `output_config.format`."""


def takes_format(model: str) -> bool:
    """Whether `model` can be held to a JSON schema."""
    return _NO_FORMAT.match(model) is None


def takes_sampling(model: str) -> bool:
    """Whether `model` takes `temperature`, `top_p` and `top_k`."""
    return _EARLY.match(model) is not None


def takes_prefill(model: str) -> bool:
    """Whether `model` goes on with a last assistant message, as resuming a broken answer needs."""
    return _BEFORE_4_6.match(model) is not None


def takes_later_system(model: str) -> bool:
    """Whether `model` takes system messages inside a conversation."""
    return _BEFORE_4_8.match(model) is None


def effort_for(effort: str, model: str) -> str | None:
    """`effort` as `model` takes it, the nearest that it has; None for a model that has none."""
    if _NO_EFFORT.match(model):
        return None
    return "high" if effort in ("xhigh", "max") and _EARLY.match(model) else effort


def thinking_by_effort(model: str) -> Mapping[str, Any] | None:
    """The thinking of somebody who only said how much; None for a model that needs a budget or does not think.

    Models that show none of their thinking by default are asked for its summary: a long silence looks like a failure.
    """
    display = {} if _EARLY.match(model) else {"display": "summarized"}
    return thinking_for({"type": "adaptive", **display}, model)


def thinking_for(thinking: Mapping[str, Any], model: str) -> Mapping[str, Any] | None:
    """`thinking` as `model` takes it; None where the model's own way is the nearest to what was asked.

    A budget becomes thinking as much as the model itself sees fit where there are no budgets any more.
    """
    kind = thinking["type"]
    if kind == "disabled":
        return None if _ALWAYS_THINKS.match(model) else thinking
    if kind == "enabled" and not _EARLY.match(model):
        return {"type": "adaptive", **({"display": thinking["display"]} if thinking.get("display") else {})}
    if kind == "adaptive" and _BEFORE_4_6.match(model):
        return None
    if kind == "between_tools" and _EARLY.match(model):
        return None
    return thinking
