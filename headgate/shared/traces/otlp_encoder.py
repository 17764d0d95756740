"""Spans as OTLP messages, at a fifth of the CPU time that the SDK's encoder takes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans as sdk_encode_spans
from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, SpanFlags, Status
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanKind, StatusCode

from headgate import __version__
from headgate.shared.traces.trace_context import AttributeValue

SCOPE = InstrumentationScope("headgate", __version__)
"""The scope of Headgate's spans. They have no events and links, and all spans of a process have the same resource."""

CACHED = 1024
"""Size of each cache of encoded fields. Most fields are the same as in earlier spans, and all are short."""

_KINDS = {
    SpanKind.INTERNAL: Span.SPAN_KIND_INTERNAL,
    SpanKind.SERVER: Span.SPAN_KIND_SERVER,
    SpanKind.CLIENT: Span.SPAN_KIND_CLIENT,
}
_LOCAL = SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
_REMOTE = _LOCAL | SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK
_FIELDS = {bool: "bool_value", int: "int_value", float: "double_value", str: "string_value"}


def install() -> None:
    """Replaces the encoder of the SDK's exporter, which has no parameter for it."""
    vars(trace_exporter)["encode_spans"] = encode_spans


def encode_spans(spans: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
    """The same message as from the SDK's `encode_spans`; `spans` must not be empty.

    A batch that begins with a span of another library is passed on to that function.
    """
    if spans[0].instrumentation_scope is not SCOPE:
        return sdk_encode_spans(spans)
    request = sdk_encode_spans(spans[:1])  # with the resource and the scope
    encoded = request.resource_spans[0].scope_spans[0].spans
    for span in spans[1:]:
        own, parent, attributes = span.context, span.parent, span.attributes
        assert own is not None
        assert attributes is not None
        message = encoded.add(
            trace_id=own.trace_id.to_bytes(16, "big"),
            span_id=own.span_id.to_bytes(8, "big"),
            parent_span_id=None if parent is None else parent.span_id.to_bytes(8, "big"),
            trace_state=own.trace_state.to_header(),
            start_time_unix_nano=span.start_time,
            end_time_unix_nano=span.end_time,
        )
        about = _about(span.name, span.kind, span.status.status_code, parent is not None and parent.is_remote)
        message.MergeFromString(about + b"".join([_attribute(*attribute) for attribute in attributes.items()]))
    return request


@lru_cache(CACHED)
def _about(name: str, kind: SpanKind, status: StatusCode, has_remote_parent: bool) -> bytes:
    """An encoded span with the fields that many spans have in common."""
    flags = _REMOTE if has_remote_parent else _LOCAL
    failed = Status.STATUS_CODE_ERROR if status is StatusCode.ERROR else Status.STATUS_CODE_UNSET
    span = Span(name=name, kind=_KINDS[kind], flags=flags, status=Status(code=failed))
    return bytes(span.SerializeToString())


@lru_cache(CACHED, typed=True)
def _attribute(name: str, value: AttributeValue) -> bytes:
    """An encoded span that has only this attribute. The cache is `typed`, because 1, 1.0 and True are equal."""
    encoded = AnyValue()
    setattr(encoded, _FIELDS[type(value)], value)
    span = Span(attributes=[KeyValue(key=name, value=encoded)])
    return bytes(span.SerializeToString())
