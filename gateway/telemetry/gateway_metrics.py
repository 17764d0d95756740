"""Prometheus metrics of the gateway, in base units. No label identifies a user."""

from __future__ import annotations

import contextlib
import functools
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from gateway.breaker.permits import BreakerState

disable_created_metrics()  # type: ignore[no-untyped-call]  # halves the number of time series

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
_INTER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 5, 15)
_OVERHEAD = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.1, 0.5)


class _Times(Collector):
    """A histogram without labels for one thread. `Histogram` takes a lock and searches at each observation, which costs
    four times as much, and a stream makes one observation per frame."""

    def __init__(self, name: str, documentation: str, bounds: Sequence[float], registry: CollectorRegistry) -> None:
        self._name, self._documentation, self._bounds = name, documentation, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, seconds: float) -> None:
        """Adds one observation."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """The metric as the registry exports it."""
        ends = [floatToGoString(bound) for bound in (*self._bounds, math.inf)]  # type: ignore[no-untyped-call]
        family = HistogramMetricFamily(self._name, self._documentation)
        family.add_metric([], list(zip(ends, accumulate(self._counts), strict=True)), self._sum)
        yield family


class Telemetry:
    """The metrics of one gateway, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._requests = Counter(
            "gateway_requests_total",
            "Requests by route, answering tier and outcome",
            ["route", "tier", "outcome"],
            registry=registry,
        )
        self._attempts = Counter(
            "gateway_attempts_total",
            "Attempts by provider, model and outcome",
            ["provider", "model", "outcome"],
            registry=registry,
        )
        self.requests = functools.cache(self._requests.labels)
        """The counter of one route, tier and outcome. Cached: `labels` takes longer than `inc`."""
        self.attempts = functools.cache(self._attempts.labels)
        """The counter of one provider, model and outcome."""
        self.breaker_state = Gauge(
            "gateway_breaker_state", "0 closed, 1 half-open, 2 open", ["provider", "model"], registry=registry
        )
        self.probes = Counter(
            "gateway_probes_total",
            "Probes of the inference service by purpose and result",
            ["purpose", "result"],
            registry=registry,
        )
        self.fallback = Counter(
            "gateway_fallback_total",
            "Answers by another candidate than the first of the chain",
            ["from", "to", "reason"],
            registry=registry,
        )
        self.resume = Counter(
            "gateway_resume_total", "Answers that broke off, by result of the resume", ["result"], registry=registry
        )
        self.ttft = _Times("gateway_ttft_seconds", "Time from a request to its first token", _TTFT, registry)
        self.inter_token = _Times(
            "gateway_inter_token_seconds", "Time between two frames of an answer", _INTER_TOKEN, registry
        )
        self.overhead = _Times(
            "gateway_overhead_seconds", "Time of a request spent in the gateway itself", _OVERHEAD, registry
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

    def on_breaker(self, provider: str, model: str, state: BreakerState | None) -> None:
        """Sets the state of a breaker; None removes a breaker that no longer exists."""
        if state is not None:
            self.breaker_state.labels(provider, model).set(int(state))
        else:
            with contextlib.suppress(KeyError):  # the breaker never changed its state
                self.breaker_state.remove(provider, model)

    def on_probe(self, purpose: str, result: str) -> None:
        """Counts a probe of the inference service."""
        self.probes.labels(purpose, result).inc()

    def render(self) -> bytes:
        """All metrics in the text format of Prometheus."""
        return generate_latest(self.registry)
