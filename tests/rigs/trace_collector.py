"""A collector of traces: an HTTP server that takes OTLP requests (protobuf) and keeps their spans."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.rigs.processes import wait_until


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as it arrived; ids are hexadecimal, times are nanoseconds of Unix time."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    kind: int
    began: int
    ended: int
    attributes: dict[str, Any]
    failed: bool


class TraceCollector:
    """What has arrived so far."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": self.url, "OTEL_BSP_SCHEDULE_DELAY": "50"}
        self.spans: list[ReceivedSpan] = []

    def add(self, body: bytes) -> None:
        """Keeps the spans of one request."""
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _plain(of_resource.resource.attributes)["service.name"]
            for of_scope in of_resource.scope_spans:
                self.spans += [
                    ReceivedSpan(
                        service,
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.kind,
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                        _plain(span.attributes),
                        span.status.code == 2,
                    )
                    for span in of_scope.spans
                ]

    def wait_for(self, trace: str, *names: str) -> dict[str, ReceivedSpan]:
        """The spans of a trace by `SERVICE NAME`, once those with `names` in this form have arrived."""
        return wait_until(
            f"the spans {names} of {trace}; arrived: {[span.name for span in self.spans]}",
            lambda: found if {*names} <= {*(found := self.of_trace(trace))} else None,
        )

    def of_trace(self, trace: str) -> dict[str, ReceivedSpan]:
        """The spans of a trace by `SERVICE NAME`."""
        return {f"{span.service} {span.name}": span for span in tuple(self.spans) if span.trace == trace}


def _plain(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


@contextmanager
def trace_collector() -> Iterator[TraceCollector]:
    """A collector on loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.add(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = TraceCollector(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
