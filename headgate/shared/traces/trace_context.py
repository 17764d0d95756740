"""W3C trace context (https://www.w3.org/TR/trace-context/): the ids of a span, the headers that carry them, and a span
as plain data.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
_MAX_STATE_CHARS = 512

AttributeValue = str | int | float | bool


class SpanContext(NamedTuple):
    """The ids of one span. Spans without `is_sampled` are not exported; the trace headers are passed on anyway.

    `parent_id` is None for the first span of a trace. `state` is the `tracestate` of the client.
    """

    trace_id: int
    span_id: int
    parent_id: int | None = None
    is_sampled: bool = True
    state: str = ""

    def child(self, span_id: int) -> SpanContext:
        """The context of a child span with the id `span_id`."""
        return SpanContext(self.trace_id, span_id, self.span_id, self.is_sampled, self.state)

    @property
    def traceparent(self) -> str:
        """The value of the header `traceparent`, with this span as the parent."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.is_sampled:02x}"

    def headers(self) -> dict[str, str]:
        """The headers of a request whose spans are children of this span."""
        parent = {TRACEPARENT: self.traceparent}
        return parent | {TRACESTATE: self.state} if self.state else parent


def parse(traceparent: str, tracestate: str = "") -> SpanContext | None:
    """The client's span, from the headers of its request; None without a valid `traceparent`.

    An invalid `tracestate` is dropped.
    """
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None:
        return None
    version, trace, span, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not int(trace, 16) or not int(span, 16):
        return None
    is_usable = tracestate.isascii() and tracestate.isprintable() and len(tracestate) <= _MAX_STATE_CHARS
    is_sampled = bool(int(flags, 16) & _SAMPLED)
    return SpanContext(int(trace, 16), int(span, 16), None, is_sampled, tracestate if is_usable else "")


class Span(NamedTuple):
    """A span that has ended. Times are Unix seconds; `kind` is `server`, `client` or `internal`.

    `error` is its `error.type`; None when it did not fail.
    """

    name: str
    context: SpanContext
    began: float
    ended: float
    kind: str = "internal"
    attributes: Mapping[str, AttributeValue | None] = {}
    """Attributes that are None are left out."""
    error: str | None = None
