"""Trace headers, the spans that are made from records, and the exporter with and without a collector."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import sys
import time

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan

from gateway.routing.explain_record import AttemptRecord, Record
from gateway.routing.request_spans import request_spans
from headgate.shared.traces import otlp_encoder, otlp_tracer, tracing
from headgate.shared.traces.otlp_tracer import Tracer
from headgate.shared.traces.trace_context import Span, SpanContext, parse
from inference.api.relay_spans import RelayTrace, relay_spans, worker_spans
from inference.worker_link import Timings
from tests.rigs.processes import free_port
from tests.rigs.trace_collector import trace_collector

TRACE, PARENT = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
HEADER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
OWN = SpanContext(TRACE, 7, PARENT)
ADDRESSES = {"local": ("127.0.0.1", 8085), "openai": ("api.openai.com", 443)}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the developer's OTEL_* variables; those of a test are removed after it."""
    for name in (*(name for name in os.environ if name.startswith("OTEL_")), *tracing.ENDPOINTS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


# --- headers ----------------------------------------------------------------------------------------------------------
def test_the_headers_of_a_trace_are_read_and_written() -> None:
    assert parse(HEADER, "vendor=1") == SpanContext(TRACE, PARENT, None, True, "vendor=1")
    own = SpanContext(TRACE, PARENT, None, True, "vendor=1").child(7)
    assert own.headers() == {
        "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000007-01",
        "tracestate": "vendor=1",
    }
    assert own.parent_id == PARENT
    assert OWN.headers() == {"traceparent": own.traceparent}
    unrecorded = parse(HEADER[:-2] + "02")
    assert unrecorded is not None
    assert not unrecorded.is_sampled
    assert unrecorded.traceparent == HEADER[:-2] + "00"


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        HEADER.upper(),
        HEADER + "-more",
        "ff" + HEADER[2:],
        HEADER.replace("4bf92f3577b34da6a3ce929d0e0e4736", "0" * 32),
        HEADER.replace("00f067aa0ba902b7", "0" * 16),
    ],
)
def test_an_invalid_trace_header_is_ignored(header: str) -> None:
    assert parse(header) is None


def test_headers_of_later_versions_are_read_and_a_bad_state_is_dropped() -> None:
    assert parse("01" + HEADER[2:] + "-more", "a=\x00b") == SpanContext(TRACE, PARENT)
    assert parse(HEADER, "a=" + "b" * 600) == SpanContext(TRACE, PARENT)


# --- the gateway ------------------------------------------------------------------------------------------------------
def record(**fields: object) -> Record:
    made = Record("req_1", 1000.0, "/v1/chat/completions", model="fast", trace=OWN, total_seconds=3.0)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_a_record_gives_a_server_span_and_a_client_span_for_each_attempt() -> None:
    """The failed first attempt has its error, the second one the usage and the time to its own first token."""
    made = record(
        stream=True, route="fast", key="app", outcome="success", status=200, tier="cloud", reason="queue_full",
        answered_by="openai/gpt-5", first_token_seconds=2.0, prompt_tokens=10, completion_tokens=5, cached_tokens=4,
        attempts=[
            AttemptRecord("local/demo", "queue_full", "", 0.5, (), 0.25, OWN.child(8)),
            AttemptRecord("openai/gpt-5", "success", "", 2.0, (), 1.0, OWN.child(9)),
        ],
    )  # fmt: skip
    server, first, second = request_spans(made, ADDRESSES)
    assert (server.name, server.context, server.kind) == ("POST /v1/chat/completions", OWN, "server")
    assert (server.began, server.ended, server.error) == (1000.0, 1003.0, None)
    assert server.attributes["http.response.status_code"] == 200
    assert server.attributes["headgate.reason"] == "queue_full"
    assert (first.name, first.context.parent_id, first.kind) == ("chat demo", OWN.span_id, "client")
    assert (first.began, first.ended, first.error) == (1000.25, 1000.75, "queue_full")
    assert first.attributes["gen_ai.provider.name"] == "llama.cpp"
    assert first.attributes["gen_ai.response.time_to_first_chunk"] is None
    assert first.attributes["gen_ai.usage.output_tokens"] is None
    assert (second.name, second.context.span_id, second.error) == ("chat gpt-5", 9, None)
    assert second.attributes == {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "openai", "gen_ai.request.model": "gpt-5",
        "gen_ai.response.model": None, "gen_ai.request.stream": True, "gen_ai.request.max_tokens": None,
        "gen_ai.response.time_to_first_chunk": 1.0, "gen_ai.usage.input_tokens": 10, "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 4, "server.address": "api.openai.com", "server.port": 443,
        "headgate.outcome": None,
    }  # fmt: skip


def test_only_failures_of_the_service_are_errors() -> None:
    outcomes = {
        ("model_not_found", 404): None,
        ("client_left", None): None,
        ("no_tier_available", 503): "no_tier_available",
        ("broken", 200): "broken",
    }
    for (outcome, status), error in outcomes.items():
        (span,) = request_spans(record(outcome=outcome, status=status), ADDRESSES)
        assert span.error == error


def test_attempts_without_a_span_and_requests_without_a_trace_have_none() -> None:
    counted = record(endpoint="/v1/embeddings", attempts=[AttemptRecord("x/y", "success", "", 1.0)])
    assert len(list(request_spans(counted, {}))) == 1
    counted.attempts[0].span = OWN.child(8)
    _, span = request_spans(counted, {})
    assert span.name == "embeddings y"
    assert span.attributes["server.address"] is None
    assert list(request_spans(record(trace=None), ADDRESSES)) == []


# --- the inference service --------------------------------------------------------------------------------------------
def test_a_wait_has_a_queue_span_with_the_load_during_it() -> None:
    """The authority's clock is 900 s behind. The load began before the wait; a later wait is for a loaded model.

    A wait of less than a millisecond has no span, in the worker neither.
    """
    trace = RelayTrace(OWN, "/v1/chat/completions", began=1000.0, began_at=100.0, model="demo", outcome="success")
    loading, loaded, refused = trace.begin_wait(100.0), trace.begin_wait(106.0), trace.begin_wait(107.0)
    loading.ended_at, loading.load_began_at, loading.load_ended_at = 105.0, 99.0, 104.0
    loaded.ended_at, loaded.load_began_at, loaded.load_ended_at = 106.5, 99.0, 104.0
    assert refused.ended_at is None
    trace.begin_wait(107.5).ended_at = 107.5005
    spans = list(relay_spans(trace, 108.0, itertools.count(20).__next__))
    assert [(span.name, span.began, span.ended) for span in spans] == [
        ("POST /v1/chat/completions", 1000.0, 1008.0),
        ("queue", 1000.0, 1005.0),
        ("load", 1000.0, 1004.0),
        ("queue", 1006.0, 1006.5),
        ("queue", 1007.0, 1008.0),
    ]
    assert [span.context.parent_id for span in spans] == [PARENT, 7, 20, 7, 7]
    assert spans[0].attributes["http.response.status_code"] == 200
    assert spans[0].error is None
    at_once = Timings(HEADER, 1.0, 2.0, 2.0, 4.0, 6.0, 10, 4, 5)
    assert [span.name for span in worker_spans(at_once, lambda: 1)] == ["prepare", "prefill", "decode"]


def test_span_of_a_relayed_request_has_its_status_and_its_error() -> None:
    for outcome, status, error in (
        ("status_400", 400, "status_400"),
        ("queue_full", None, "queue_full"),
        ("client_left", None, None),
    ):
        trace = RelayTrace(OWN, "/v1/embeddings", 1000.0, 0.0, "demo", outcome)
        (span,) = relay_spans(trace, 1.0, itertools.count(20).__next__)
        assert (span.attributes["http.response.status_code"], span.error) == (status, error)


def test_a_worker_reports_the_stages_of_an_answer_up_to_its_end() -> None:
    whole = Timings(HEADER, 1.0, 2.0, 3.0, 4.0, 6.0, 10, 4, 5)
    spans = list(worker_spans(whole, itertools.count(30).__next__))
    assert [(span.name, span.began, span.ended) for span in spans] == [
        ("prepare", 1.0, 2.0),
        ("slot", 2.0, 3.0),
        ("prefill", 3.0, 4.0),
        ("decode", 4.0, 6.0),
    ]
    assert {span.context.parent_id for span in spans} == {PARENT}
    assert spans[3].attributes == {"gen_ai.usage.output_tokens": 5}
    cancelled = Timings(HEADER, 1.0, 2.0, 3.0, None, 6.0, 10, 0, 0)
    assert [span.name for span in worker_spans(cancelled, lambda: 1)] == ["prepare", "slot", "prefill"]
    assert list(worker_spans(Timings("?", 1.0, 2.0, None, None, 3.0, 0, 0, 0), lambda: 1)) == []


# --- the exporter -----------------------------------------------------------------------------------------------------
def started(monkeypatch: pytest.MonkeyPatch, **environment: str) -> Tracer | None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return tracing.start("headgate-test", os.environ)


def test_spans_arrive_at_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request with a trace continues it, one without begins a trace; unsampled spans are not sent."""
    with trace_collector() as collector:
        tracer = started(monkeypatch, **collector.environment)
        assert tracer is not None
        own = tracer.begin({"traceparent": HEADER, "tracestate": "vendor=1"})
        assert (own.trace_id, own.parent_id, own.is_sampled, own.state) == (TRACE, PARENT, True, "vendor=1")
        root = tracer.begin({})
        assert (root.parent_id, root.is_sampled) == (None, True)
        silent = tracer.begin({"traceparent": HEADER[:-2] + "00"})
        tracer.export(
            [
                Span("one", own, 1.0, 2.0, "server", {"a": 1, "b": None}, "broken"),
                Span("two", root, 2.0, 1.0),
                Span("three", silent, 1.0, 2.0),
            ]
        )
        tracer.close()
    one, two = sorted(collector.spans, key=lambda span: span.name)
    assert (one.service, one.trace, one.parent) == ("headgate-test", f"{TRACE:032x}", f"{PARENT:016x}")
    assert (one.kind, one.began, one.ended, one.failed) == (2, 10**9, 2 * 10**9, True)
    assert one.attributes == {"a": 1, "error.type": "broken"}
    assert (two.kind, two.parent, two.began, two.ended, two.failed) == (1, "", 2 * 10**9, 2 * 10**9, False)


def test_the_encoder_gives_what_the_sdks_encoder_gives() -> None:
    """Also for values that are equal but not of the same type, and for spans of other libraries."""
    own = trace.SpanContext(TRACE, 7, False, trace.TraceFlags(1), trace.TraceState([("a", "1"), ("b", "2")]))
    resource, scope = Resource({"service.name": "test"}), otlp_encoder.SCOPE
    kinds = (trace.SpanKind.SERVER, trace.SpanKind.CLIENT, trace.SpanKind.INTERNAL)
    values = (1, 1.0, True, "1", "", 0, 0.0, False, -1, 2**62, "text with ä")
    spans = [
        ReadableSpan(
            f"span {number % 2}", own, parent, resource, {"first": values[number], "second": values[-1 - number]},
            kind=kinds[number % 3], status=trace.Status(status), start_time=10**18 + number, end_time=2 * 10**18,
            instrumentation_scope=scope,
        )
        for number, (parent, status) in enumerate(
            itertools.product(
                (None, trace.SpanContext(TRACE, 8, True), trace.SpanContext(TRACE, 9, False)),
                (trace.StatusCode.UNSET, trace.StatusCode.ERROR, trace.StatusCode.UNSET),
            )
        )
    ]  # fmt: skip
    spans.append(ReadableSpan("bare", own, None, resource, {}, start_time=1, end_time=2, instrumentation_scope=scope))
    assert otlp_encoder.encode_spans(spans) == encode_spans(spans)
    event = Event("event", {"sequence": [1, 2]}, 5)
    foreign = ReadableSpan("foreign", own, None, resource, {"sequence": (1, 2)}, [event], start_time=1, end_time=2)
    assert otlp_encoder.encode_spans([foreign]) == encode_spans([foreign])


def test_the_sdks_exporter_takes_another_encoder() -> None:
    """A version of the SDK without this global name would export spans at several times the cost."""
    assert "encode_spans" in OTLPSpanExporter.export.__code__.co_names


def test_the_sampler_and_the_name_of_the_environment_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with trace_collector() as collector:
        tracer = started(
            monkeypatch, OTEL_TRACES_SAMPLER="always_off", OTEL_SERVICE_NAME="mine", **collector.environment
        )
        assert tracer is not None
        assert not tracer.begin({"traceparent": HEADER}).is_sampled
        tracer.export([Span("one", OWN, 1.0, 2.0)])
        tracer.close()
    assert [span.service for span in collector.spans] == ["mine"]


@pytest.mark.parametrize("answers", [False, True], ids=["dead port", "silent collector"])
def test_a_dead_collector_delays_nothing(
    answers: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """More spans than the queue holds are dropped at once, the end waits a limited time, the SDK logs once a minute."""
    monkeypatch.setattr(otlp_tracer, "CLOSE_SECONDS", 0.2)
    with socket.socket() as listening:
        port = free_port()
        if answers:
            listening.bind(("127.0.0.1", port))
            listening.listen()
        settings = {"OTEL_BSP_MAX_QUEUE_SIZE": "50", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "10"}
        tracer = started(monkeypatch, OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{port}", **settings)
        assert tracer is not None
        began = time.monotonic()
        for _ in range(200):
            tracer.export([Span("one", OWN, 1.0, 2.0)])
        assert time.monotonic() - began < 0.5
        tracer.close()
        assert time.monotonic() - began < 2.0
        for name in otlp_tracer.SDK_LOGGERS:
            for number in range(3):
                logging.getLogger(name).warning("dropped %d", number)
    assert "the last spans were not sent to the collector" in caplog.text
    assert sum(line.name in otlp_tracer.SDK_LOGGERS for line in caplog.records) <= 1


def test_a_defect_in_a_span_is_logged_and_fails_no_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with trace_collector() as collector:
        tracer = started(monkeypatch, **collector.environment)
        assert tracer is not None
        tracer.export(Span("one", OWN, 1.0, 2.0, kind) for kind in ("no such kind",))
        tracer.close()
    assert "the spans of a request could not be exported" in caplog.text


def test_traces_are_off_without_a_collector(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert started(monkeypatch) is None
        assert started(monkeypatch, OTEL_EXPORTER_OTLP_ENDPOINT="http://x", OTEL_SDK_DISABLED="true") is None
        assert started(monkeypatch, OTEL_SDK_DISABLED="", OTEL_TRACES_EXPORTER="none") is None
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("environment", "advice"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318"}, "must begin with http:// or https://"),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "TRACES_PROTOCOL=http/protobuf",
        ),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_BSP_MAX_QUEUE_SIZE": "1"}, "does not accept"),
    ],
)
def test_unusable_settings_turn_traces_off_with_a_reason(
    environment: dict[str, str], advice: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert started(monkeypatch, **environment) is None
    assert "traces are off" in caplog.text
    assert advice in caplog.text


def test_a_missing_extra_is_one_line_that_names_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "headgate.shared.traces.otlp_tracer", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    assert started(monkeypatch, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:4318") is None
    assert len(caplog.records) == 1
    assert "pip install 'headgate[otel]'" in caplog.text
