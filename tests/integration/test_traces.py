"""Traces from the client to the tokens: real services, a demo model, and a collector that reads OTLP."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.rigs.stack import Stack, chat_body
from tests.rigs.trace_collector import TraceCollector, trace_collector

MODELS = "models:\n  demo: {path: bundled:demo, context_length: 512, parallel: 1}\n"
ROUTES = 'routes: {"*": {chain: ["local/*"]}}\n'
CLIENT_SPAN = "00f067aa0ba902b7"
SERVER, CLIENT = 2, 3
CLOCKS_NS = 20_000_000
"""The largest difference between the clocks of the processes."""


@pytest.fixture(scope="module")
def collector() -> Iterator[TraceCollector]:
    with trace_collector() as started:
        yield started


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, collector: TraceCollector) -> Iterator[Stack]:
    """Both services export to the collector."""
    env = collector.environment
    stack = Stack(tmp_path_factory.mktemp("traces"), MODELS, ROUTES, inference_env=env, gateway_env=env).start()
    yield stack
    stack.kill()


def ask(stack: Stack, trace: str, flags: str = "01", **more: Any) -> bytes:
    request = urllib.request.Request(
        stack.base_url + "/chat/completions",
        data=json.dumps(chat_body("Hello!", **{"max_tokens": 8, **more})).encode(),
        headers={
            "authorization": f"Bearer {stack.key}",
            "content-type": "application/json",
            "traceparent": f"00-{trace}-{CLIENT_SPAN}-{flags}",
        },
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return bytes(answer.read())


def test_one_trace_leads_from_the_client_to_the_tokens(stack: Stack, collector: TraceCollector) -> None:
    """The first request loads the model. Each stage has a span with the right parent, within its time."""
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    ask(stack, trace, stream=True, stream_options={"include_usage": True})
    front, back = "headgate-gateway", "headgate-inference"
    stages = [f"{back} {stage}" for stage in ("prepare", "prefill", "decode")]
    server, attempt = f"{front} POST /v1/chat/completions", f"{front} chat demo"
    relay, queue, load = (f"{back} {name}" for name in ("POST /v1/chat/completions", "queue", "load"))
    spans = collector.wait_for(trace, server, attempt, relay, queue, load, *stages)
    spans.pop(f"{back} slot", None)  # only where the wait is not short
    assert {name: span.parent for name, span in spans.items()} == {
        server: CLIENT_SPAN,
        attempt: spans[server].id,
        relay: spans[attempt].id,
        queue: spans[relay].id,
        load: spans[queue].id,
        **dict.fromkeys(stages, spans[relay].id),
    }
    assert (spans[server].kind, spans[attempt].kind, spans[relay].kind) == (SERVER, CLIENT, SERVER)
    by_id = {span.id: span for span in spans.values()}
    for span in spans.values():
        outer = by_id.get(span.parent, span)
        assert outer.began - CLOCKS_NS <= span.began <= span.ended <= outer.ended + CLOCKS_NS, span
    assert spans[load].ended <= spans[stages[0]].began + CLOCKS_NS
    about, prefill, decode = (spans[name].attributes for name in (attempt, *stages[1:]))
    assert about["gen_ai.operation.name"] == "chat"
    assert about["gen_ai.provider.name"] == "llama.cpp"
    assert about["gen_ai.request.model"] == about["gen_ai.response.model"] == "demo"
    assert about["gen_ai.usage.output_tokens"] == decode["gen_ai.usage.output_tokens"] > 0
    assert about["gen_ai.usage.input_tokens"] == prefill["gen_ai.usage.input_tokens"] > 0
    assert about["gen_ai.response.time_to_first_chunk"] > 0
    assert stack.inference.url == f"http://{about['server.address']}:{about['server.port']}"
    assert not any(span.failed for span in spans.values())
    assert "Hello" not in str(collector.spans)


def test_a_failed_request_of_the_client_is_no_failure_of_the_gateway(stack: Stack, collector: TraceCollector) -> None:
    """A request for an unknown model: its span has no error, and the explain record names the trace.

    The request before it has a trace that the client does not record. The services do not record it either.
    """
    unrecorded, trace = "5bf92f3577b34da6a3ce929d0e0e4736", "6bf92f3577b34da6a3ce929d0e0e4736"
    ask(stack, unrecorded, flags="00")
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(stack, trace, model="no-such-model")
    refused.value.close()
    spans = collector.wait_for(trace, "headgate-gateway POST /v1/chat/completions")
    (span,) = spans.values()
    assert span.attributes["http.response.status_code"] == 404
    assert span.attributes["headgate.outcome"] == "model_not_found"
    assert not span.failed
    record = stack.ask(f"/admin/requests/{span.attributes['headgate.request_id']}")
    assert record["trace"] == trace
    assert collector.of_trace(unrecorded) == {}
