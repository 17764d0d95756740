"""Exports spans by OTLP over HTTP with OpenTelemetry's SDK.

A thread of the SDK makes the spans of many requests from plain data, one after the other, and sends them in a batch: in
the middle of a request the same work takes three times as long, because the CPU's caches hold other code. Its
queue is bounded: with a slow or dead collector spans are dropped, and requests continue.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Mapping, Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.sampling import DEFAULT_ON, Decision, Sampler

from headgate import __version__
from headgate.shared.traces import otlp_encoder
from headgate.shared.traces.span_ids import new_span_id, new_trace_id
from headgate.shared.traces.trace_context import TRACEPARENT, TRACESTATE, Span, SpanContext, parse

log = logging.getLogger(__name__)

CLOSE_SECONDS = 2.0
"""How long a service waits at its end for the last spans to be sent."""

COMPLAINT_SECONDS = 60.0
"""Shortest time between two log lines of the SDK about its collector."""

SDK_LOGGERS = ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.sdk._shared_internal")
"""Loggers of the SDK that log each retry and each dropped span while the collector does not answer."""

_KINDS = {kind.name.lower(): kind for kind in trace.SpanKind}
_SAMPLED, _NOT_SAMPLED = trace.TraceFlags(trace.TraceFlags.SAMPLED), trace.TraceFlags(trace.TraceFlags.DEFAULT)
_QUEUED = trace.SpanContext(1, 1, is_remote=False, trace_flags=_SAMPLED)
_OK, _FAILED = trace.Status(trace.StatusCode.UNSET), trace.Status(trace.StatusCode.ERROR)


class _RareLines(logging.Filter):
    """Passes one line per COMPLAINT_SECONDS."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is logged."""
        if record.created < self._next:
            return False
        self._next = record.created + COMPLAINT_SECONDS
        return True


_rare_lines = _RareLines()


def make_tracer(service: str) -> Tracer:
    """A tracer with the settings of the process environment (OTEL_*). Raises errors of the SDK for invalid settings.

    `service` is the `service.name` unless the environment has one.
    """
    for name in SDK_LOGGERS:
        logging.getLogger(name).addFilter(_rare_lines)
    attributes = {"service.version": __version__}
    is_named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    if not is_named:
        attributes["service.name"] = service
    otlp_encoder.install()
    provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
    return Tracer(provider.sampler, BatchSpanProcessor(_Exporter(provider.resource)))


class _Request(ReadableSpan):
    """The spans of one request in the SDK's queue, which looks only at `context`."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.spans = spans

    @property
    def context(self) -> trace.SpanContext:
        return _QUEUED


class _Exporter(OTLPSpanExporter):
    """Makes the spans of the queued requests and sends them."""

    def __init__(self, resource: Resource) -> None:
        super().__init__()
        self._resource = resource

    def export(self, batch: Sequence[ReadableSpan]) -> SpanExportResult:
        """Converts and sends a batch. Logs an error in a span and leaves out the request of this span."""
        converted: list[ReadableSpan] = []
        for request in batch:
            assert isinstance(request, _Request)
            try:
                converted += [self._converted(span) for span in request.spans if span.context.is_sampled]
            except Exception:
                log.exception("internal error: the spans of a request could not be exported")
        return super().export(converted) if converted else SpanExportResult.SUCCESS

    def _converted(self, span: Span) -> ReadableSpan:
        own = span.context
        attributes = {name: value for name, value in span.attributes.items() if value is not None}
        if span.error is not None:
            attributes["error.type"] = span.error
        parent = None
        if own.parent_id is not None:
            parent = _sdk_context(own, own.parent_id, is_remote=span.kind == "server")
        return ReadableSpan(
            span.name,
            context=_sdk_context(own, own.span_id),
            parent=parent,
            resource=self._resource,
            attributes=attributes,
            kind=_KINDS[span.kind],
            status=_OK if span.error is None else _FAILED,
            start_time=round(span.began * 1e9),
            end_time=round(max(span.began, span.ended) * 1e9),
            instrumentation_scope=otlp_encoder.SCOPE,
        )


class Tracer:
    """Begins spans and exports them."""

    def __init__(self, sampler: Sampler, processor: BatchSpanProcessor) -> None:
        self._sampler = sampler
        self._processor = processor

    def begin(self, headers: Mapping[str, str]) -> SpanContext:
        """The context of the span of a request with these headers: a child of the client's span, or a trace's root."""
        remote = parse(headers.get(TRACEPARENT, ""), headers.get(TRACESTATE, ""))
        if remote is None:
            trace_id = new_trace_id()
            return SpanContext(trace_id, new_span_id(), None, self._is_sampled(trace_id, None))
        is_sampled = self._is_sampled(remote.trace_id, remote)
        return SpanContext(remote.trace_id, new_span_id(), remote.span_id, is_sampled, remote.state)

    def export(self, spans: Iterable[Span]) -> None:
        """Queues the spans of a request; only sampled ones are sent. The sending thread iterates over `spans`."""
        self._processor.on_end(_Request(spans))

    def close(self) -> None:
        """Sends the queued spans within CLOSE_SECONDS; the rest is lost."""
        closing = threading.Thread(target=self._processor.shutdown, name="last-spans", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        if closing.is_alive():
            log.warning("the last spans were not sent to the collector within %g s and are lost", CLOSE_SECONDS)

    def _is_sampled(self, trace_id: int, parent: SpanContext | None) -> bool:
        """The decision of the sampler (OTEL_TRACES_SAMPLER; by default that of the parent, else yes)."""
        if self._sampler is DEFAULT_ON:
            return parent is None or parent.is_sampled
        context = Context()
        if parent is not None:
            remote = _sdk_context(parent, parent.span_id, is_remote=True)
            context = trace.set_span_in_context(trace.NonRecordingSpan(remote), context)
        decision: Decision = self._sampler.should_sample(context, trace_id, "request").decision
        return decision is Decision.RECORD_AND_SAMPLE


def _sdk_context(own: SpanContext, span_id: int, *, is_remote: bool = False) -> trace.SpanContext:
    """The span `span_id` of the trace of `own`."""
    state = trace.TraceState.from_header([own.state]) if own.state else None
    return trace.SpanContext(own.trace_id, span_id, is_remote, _SAMPLED if own.is_sampled else _NOT_SAMPLED, state)
