"""Lists of models in Anthropic's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

UNKNOWN_DATE = "1970-01-01T00:00:00Z"
"""The value of Anthropic's API for an unknown release date."""


def listing(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All of `models` (entries of OpenAI's listing) on one page."""
    found = [entry(model) for model in models]
    ends = (found[0]["id"], found[-1]["id"]) if found else (None, None)
    return {"data": found, "has_more": False, "first_id": ends[0], "last_id": ends[1]}


def entry(model: Mapping[str, Any]) -> dict[str, Any]:
    """One model, with its context length if it is known."""
    context = (model.get("headgate") or {}).get("context_length") or None
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": UNKNOWN_DATE,
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": context,
    }
