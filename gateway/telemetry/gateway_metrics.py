"""Counts and times what the gateway does, as Prometheus metrics in base units; decides nothing, labels no user."""

from __future__ import annotations

import contextlib

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest

from gateway.breaker.permits import State
from gateway.telemetry.metric_counters import Counts, Times

disable_created_metrics()  # type: ignore[no-untyped-call]  # a time series per time series that nobody reads

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
_INTER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 5, 15)
_OVERHEAD = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.1, 0.5)


class Telemetry:
    """The metrics of one gateway, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        to = self.registry
        self.requests = Counts(
            "gateway_requests_total", "Requests by route, answering tier and outcome", ["route", "tier", "outcome"], to
        )
        self.attempts = Counts(
            "gateway_attempts_total", "Attempts at tiers by verdict", ["provider", "model", "outcome"], to
        )
        self.breaker_state = Gauge(
            "gateway_breaker_state", "0 closed, 1 half-open, 2 open", ["provider", "model"], registry=to
        )
        self.probes = Counter(
            "gateway_probes_total",
            "Probes of our own service by what they were for and found",
            ["purpose", "result"],
            registry=to,
        )
        self.fallback = Counter(
            "gateway_fallback_total",
            "Answers that did not come from the first choice",
            ["from", "to", "reason"],
            registry=to,
        )
        self.resume = Counter(
            "gateway_resume_total", "Answers that broke off, by what became of them", ["result"], registry=to
        )
        self.ttft = Times("gateway_ttft_seconds", "From the request to its first token", _TTFT, to)
        self.inter_token = Times("gateway_inter_token_seconds", "Between two frames of an answer", _INTER_TOKEN, to)
        self.overhead = Times(
            "gateway_overhead_seconds", "Time of a request spent in the gateway itself", _OVERHEAD, to
        )
        self.in_flight = Gauge("gateway_in_flight", "Requests being served", registry=to)
        self.queue_depth = Gauge("gateway_queue_depth", "Requests waiting for a place", registry=to)
        self.rate_limited = Counter(
            "gateway_rate_limited_total", "Requests beyond what their key may do, by limit", ["limit"], registry=to
        )
        self.disconnects = Counter("gateway_client_disconnect_total", "Callers who left before the end", registry=to)

    def on_breaker(self, provider: str, model: str, state: State | None) -> None:
        """A breaker moved, or was forgotten (None)."""
        if state is not None:
            self.breaker_state.labels(provider, model).set(int(state))
        else:
            with contextlib.suppress(KeyError):  # it never had a sample
                self.breaker_state.remove(provider, model)

    def on_probe(self, purpose: str, finding: str) -> None:
        """A probe of our own service came back."""
        self.probes.labels(purpose, finding).inc()

    def render(self) -> bytes:
        """The text exposition of everything."""
        return generate_latest(self.registry)
