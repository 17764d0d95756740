"""Prices of models: those of the configuration, else the providers' list prices when this version was written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from gateway.breaker.outcome import LOCAL


class Price(NamedTuple):
    """US dollars per million tokens. `cached_input`: for prompt tokens that the provider had cached; None: `input`."""

    input: float
    output: float
    cached_input: float | None = None


LIST_PRICES_DATE = "2025-12-01"
"""Providers change prices; `prices` in gateway.yaml replaces entries of this table."""

LIST_PRICES: Mapping[str, Price] = {
    "claude-haiku-4-5": Price(1.0, 5.0, 0.1),
    "claude-opus-4-1": Price(15.0, 75.0, 1.5),
    "claude-opus-4-5": Price(5.0, 25.0, 0.5),
    "claude-sonnet-4-5": Price(3.0, 15.0, 0.3),
    "gemini-2.5-flash": Price(0.3, 2.5, 0.03),
    "gemini-2.5-flash-lite": Price(0.1, 0.4, 0.01),
    "gemini-2.5-pro": Price(1.25, 10.0, 0.125),
    "gpt-4.1": Price(2.0, 8.0, 0.5),
    "gpt-4.1-mini": Price(0.4, 1.6, 0.1),
    "gpt-4.1-nano": Price(0.1, 0.4, 0.025),
    "gpt-4o": Price(2.5, 10.0, 1.25),
    "gpt-4o-mini": Price(0.15, 0.6, 0.075),
    "gpt-5": Price(1.25, 10.0, 0.125),
    "gpt-5-mini": Price(0.25, 2.0, 0.025),
    "gpt-5-nano": Price(0.05, 0.4, 0.005),
    "o3": Price(2.0, 8.0, 0.5),
    "o4-mini": Price(1.1, 4.4, 0.275),
    "text-embedding-3-large": Price(0.13, 0.0),
    "text-embedding-3-small": Price(0.02, 0.0),
}
"""By the name of the model without its provider and without a date at the end of the name."""

_DATE = re.compile(r"-(?:\d{8}|\d{4}-\d{2}-\d{2}|latest)$")
_MILLION = 1_000_000
_FREE = Price(0.0, 0.0)


def price_of(name: str, configured: Mapping[str, Price]) -> Price | None:
    """The price of PROVIDER/MODEL; None if it is unknown. Local models cost nothing unless configured."""
    provider, _, model = name.partition("/")
    if (found := configured.get(name)) is not None:
        return found
    if provider == LOCAL:
        return _FREE
    undated = _DATE.sub("", model)
    return configured.get(f"{provider}/{undated}") or LIST_PRICES.get(undated)


def cost(price: Price, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> float:
    """US dollars for one answer; `cached_tokens` are part of `prompt_tokens`."""
    cached = min(cached_tokens, prompt_tokens)
    cached_price = price.input if price.cached_input is None else price.cached_input
    return (
        (prompt_tokens - cached) * price.input + cached * cached_price + completion_tokens * price.output
    ) / _MILLION
