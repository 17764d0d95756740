"""The stored row of a request, from its explain record."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.routing.explain_record import Record
from gateway.usage.prices import Price, cost, price_of
from gateway.usage.usage_file import UsageRow

BYTES_PER_TOKEN = 4
"""An estimate for prompts of answers that ended without a usage."""


def usage_row(record: Record, tier: str, prices: Mapping[str, Price]) -> UsageRow:
    """The row of an ended request. An attempt without a usage counts its pieces, and its prompt by its size."""
    prompt, cached = record.prompt_tokens, record.cached_tokens or 0
    if prompt is None:
        prompt = record.size_bytes // BYTES_PER_TOKEN if record.pieces else 0
    completion = (record.completion_tokens or 0) + record.pieces
    price = price_of(record.answered_by, prices) if record.answered_by else Price(0.0, 0.0)
    return UsageRow(
        at=record.started,
        id=record.id,
        key=record.key,
        endpoint=record.endpoint,
        route=record.route,
        tier=tier,
        model=record.answered_by or "",
        requested=record.model.encode("utf-8", "replace").decode(),
        prompt_tokens=prompt,
        cached_tokens=cached,
        completion_tokens=completion,
        ttft_seconds=record.first_token_seconds,
        seconds=record.total_seconds or 0.0,
        outcome=record.outcome,
        reason=record.reason,
        dollars=None if price is None else cost(price, prompt, completion, cached),
    )
