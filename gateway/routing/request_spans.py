"""The spans of one request in the gateway, from its explain record, with OpenTelemetry's conventions for generative AI
(https://github.com/open-telemetry/semantic-conventions-genai). They hold no prompt and no answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gateway.breaker.outcome import LOCAL, End, provider_key
from gateway.routing.explain_record import AttemptRecord, Record
from headgate.shared.traces.trace_context import Span, SpanContext

LOCAL_PROVIDER = "llama.cpp"
"""`gen_ai.provider.name` of local models; a cloud has its name in gateway.yaml."""

_OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
}
_NO_FAILURE = frozenset({"success", *(str(end) for end in End)})
"""Outcomes for which no provider is to blame."""


def request_spans(record: Record, addresses: Mapping[str, tuple[str, int]]) -> Iterator[Span]:
    """A server span for the request and a client span for each of its attempts; none without a trace.

    `addresses`: host and port by key of the provider.
    """
    if record.trace is None:
        return
    is_refused = record.status is not None and 400 <= record.status < 500
    yield Span(
        f"POST {record.endpoint}",
        record.trace,
        record.started,
        record.started + (record.total_seconds or 0.0),
        "server",
        {
            "http.request.method": "POST",
            "url.path": record.endpoint,
            "http.response.status_code": record.status,
            "gen_ai.request.model": record.model or None,
            "headgate.request_id": record.id,
            "headgate.key": record.key or None,
            "headgate.route": record.route or None,
            "headgate.answered_by": record.answered_by,
            "headgate.tier": record.tier,
            "headgate.reason": _unless(record.reason, "none"),
            "headgate.outcome": _unless(record.outcome, "success"),
        },
        None if is_refused or record.outcome in _NO_FAILURE else record.outcome,
    )
    for attempt in record.attempts:
        if attempt.span is not None:
            yield _attempt(record, attempt, attempt.span, addresses)


def _attempt(
    record: Record, attempt: AttemptRecord, span: SpanContext, addresses: Mapping[str, tuple[str, int]]
) -> Span:
    provider, _, model = attempt.name.partition("/")
    operation = _OPERATIONS.get(record.endpoint, "chat")
    host, port = addresses.get(provider_key(attempt.node) if attempt.node else provider, (None, None))
    began, first = attempt.began_seconds, record.first_token_seconds
    has_first = first is not None and began <= first <= began + attempt.seconds
    is_last = attempt is record.attempts[-1]
    return Span(
        f"{operation} {model}",
        span,
        record.started + began,
        record.started + began + attempt.seconds,
        "client",
        {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": LOCAL_PROVIDER if provider == LOCAL else provider,
            "gen_ai.request.model": model,
            "gen_ai.response.model": model if provider == LOCAL and attempt.outcome == "success" else None,
            "gen_ai.request.stream": True if record.stream else None,
            "gen_ai.request.max_tokens": record.max_tokens,
            "gen_ai.response.time_to_first_chunk": first - began if first is not None and has_first else None,
            "gen_ai.usage.input_tokens": record.prompt_tokens if is_last else None,
            "gen_ai.usage.output_tokens": record.completion_tokens if is_last else None,
            "gen_ai.usage.cache_read.input_tokens": record.cached_tokens if is_last else None,
            "server.address": host,
            "server.port": port,
            "headgate.outcome": _unless(attempt.outcome, "success"),
        },
        None if attempt.outcome in _NO_FAILURE else attempt.outcome,
    )


def _unless(value: str, usual: str) -> str | None:
    """None for the usual value: every attribute has a cost."""
    return None if value == usual else value
