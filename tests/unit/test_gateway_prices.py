"""Prices and the cost of an answer."""

from __future__ import annotations

import pytest

from gateway.usage.prices import LIST_PRICES, Price, cost, price_of


@pytest.mark.parametrize(
    ("name", "price"),
    [
        ("openai/gpt-4o-mini", LIST_PRICES["gpt-4o-mini"]),
        ("openai/gpt-4o-mini-2024-07-18", LIST_PRICES["gpt-4o-mini"]),
        ("anthropic/claude-haiku-4-5-20251001", LIST_PRICES["claude-haiku-4-5"]),
        ("openai/gpt-4o-mini-audio", None),
        ("openai/unheard-of", None),
        ("local/demo", Price(0.0, 0.0)),
        ("openai/own", Price(1.0, 2.0)),
        ("openai/own-2026-01-01", Price(1.0, 2.0)),
        ("local/paid", Price(3.0, 4.0)),
    ],
)
def test_configured_prices_replace_list_prices_and_local_models_are_free(name: str, price: Price | None) -> None:
    assert price_of(name, {"openai/own": Price(1.0, 2.0), "local/paid": Price(3.0, 4.0)}) == price


def test_cached_prompt_tokens_have_their_own_price() -> None:
    assert cost(Price(2.0, 8.0, 0.5), 1_000_000, 500_000, 400_000) == pytest.approx(0.6 * 2 + 0.4 * 0.5 + 4.0)
    assert cost(Price(2.0, 8.0), 1_000_000, 0, 400_000) == pytest.approx(2.0)
    assert cost(Price(2.0, 8.0, 0.5), 100, 0, 400) == pytest.approx(100 * 0.5 / 1e6), "more cached than prompt tokens"


def test_input_prices_are_positive_and_cached_input_costs_no_more() -> None:
    for price in LIST_PRICES.values():
        assert price.input > 0
        assert price.output >= 0
        assert price.cached_input is None or price.cached_input <= price.input
