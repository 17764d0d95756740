"""The stored row of a request, from its explain record."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.routing.explain_record import Record
from gateway.usage.prices import Price, cost, price_of
from gateway.usage.usage_file import UsageRow


def usage_row(record: Record, tier: str, prices: Mapping[str, Price]) -> UsageRow:
    """The row of an ended request."""
    (prompt, completion), cached = record.tokens, record.cached_tokens or 0
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
