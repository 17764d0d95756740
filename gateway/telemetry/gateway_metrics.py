"""Prometheus metrics of the gateway, in base units. No label identifies a user."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from gateway.breaker.outcome import split_key
from gateway.breaker.permits import BreakerState

disable_created_metrics()  # type: ignore[no-untyped-call]  # halves the number of time series

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
_INTER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 5, 15)
_OVERHEAD = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.1, 0.5)


class Telemetry:
    """The metrics of one gateway, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        requests = Counter(
            "gateway_requests_total",
            "Requests by route, answering tier and outcome",
            ["route", "tier", "outcome"],
            registry=registry,
        )
        self._attempts = attempts = Counter(
            "gateway_attempts_total",
            "Attempts by provider, node of the inference service, model and outcome",
            ["provider", "node", "model", "outcome"],
            registry=registry,
        )
        self.requests = functools.cache(requests.labels)
        """The counter of one route, tier and outcome. Cached: `labels` takes longer than `inc`."""
        self.attempts = functools.cache(attempts.labels)
        """The counter of one provider, node, model and outcome."""
        self.breaker_state = Gauge(
            "gateway_breaker_state", "0 closed, 1 half-open, 2 open", ["provider", "node", "model"], registry=registry
        )
        self.node_up = Gauge(
            "gateway_node_up",
            "Whether the inference service answers, by node",
            ["node"],
            registry=registry,
        )
        self.probes = Counter(
            "gateway_probes_total",
            "Probes of the inference service by node, purpose and result",
            ["node", "purpose", "result"],
            registry=registry,
        )
        self.fallback = Counter(
            "gateway_fallback_total",
            "Answers by another candidate than the first of the chain",
            ["from", "to", "reason"],
            registry=registry,
        )
        self.resume = Counter(
            "gateway_resume_total", "Interrupted answers, by result of the resume", ["result"], registry=registry
        )
        self.ttft = Histogram(
            "gateway_ttft_seconds", "Time from a request to its first token", buckets=_TTFT, registry=registry
        )
        self.inter_token = Histogram(
            "gateway_inter_token_seconds",
            "Time between two frames of an answer",
            buckets=_INTER_TOKEN,
            registry=registry,
        )
        self.overhead = Histogram(
            "gateway_overhead_seconds",
            "Time of a request spent in the gateway itself",
            buckets=_OVERHEAD,
            registry=registry,
        )
        self.in_flight = Gauge("gateway_in_flight", "Requests being served", registry=registry)
        self.queue_depth = Gauge("gateway_queue_depth", "Requests waiting for admission", registry=registry)
        self.rate_limited = Counter(
            "gateway_rate_limited_total",
            "Requests refused by a rate limit of their key, by limit",
            ["limit"],
            registry=registry,
        )
        self.disconnects = Counter(
            "gateway_client_disconnect_total", "Clients that left before the end of their answer", registry=registry
        )

    def set_breakers(self, states: Mapping[tuple[str, str], BreakerState]) -> None:
        """Replaces the states of all breakers. `states` is by provider (`local@NODE` on a node) and model."""
        self.breaker_state.clear()
        for (key, model), state in states.items():
            self.breaker_state.labels(*split_key(key), model).set(int(state))

    def forget_node(self, node: str) -> None:
        """Removes the series of a node that has left. Names of nodes may be addresses, which change often."""
        self.node_up.remove_by_labels({"node": node})
        if node:  # attempts at clouds have an empty label, too
            self._attempts.remove_by_labels({"node": node})
            self.attempts.cache_clear()
            self.probes.remove_by_labels({"node": node})

    def watch_shared_state(self) -> tuple[Callable[[bool, int], None], Callable[[str], None]]:
        """Adds the metrics of the shared state. Returns two functions.

        The first sets whether the store answers and the number of gateways, the second counts a failed operation.
        """
        up = Gauge("gateway_shared_state_up", "Whether the store of the shared state answers", registry=self.registry)
        gateways = Gauge(
            "gateway_fleet_gateways", "Live gateways; without the store the last known number", registry=self.registry
        )
        errors = Counter(
            "gateway_shared_state_errors_total", "Failed operations of the shared state", ["operation"],
            registry=self.registry,
        )  # fmt: skip

        def on_state(is_up: bool, count: int) -> None:
            up.set(is_up)
            gateways.set(count)

        return on_state, lambda operation: errors.labels(operation).inc()

    def render(self) -> bytes:
        """All metrics in the text format of Prometheus."""
        return generate_latest(self.registry)
