"""The Prometheus metrics of the inference service: names and labels; counts what it is told and decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

_RESTORE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
_LOAD_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
_RATIO_BUCKETS = (0.5, 0.8, 0.9, 0.95, 0.98, 1.0, 1.02, 1.05, 1.1, 1.25, 2.0)


class Metrics:
    """One registry per service. Gauges are read from the authority when somebody scrapes (`gauges`)."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.gauges: Callable[[], Iterator[GaugeMetricFamily]] = lambda: iter(())
        self.registry.register(self)
        self.placements = Counter(
            "inference_placement_total", "Decisions about where a model goes", ["result", "reason"],
            registry=self.registry,
        )  # fmt: skip
        self.evictions = Counter(
            "inference_evictions_total", "Models that left for a reason", ["action", "reason"], registry=self.registry
        )
        self.load_seconds = Histogram(
            "inference_load_seconds", "From reservation to ready", ["model", "tier"], buckets=_LOAD_BUCKETS,
            registry=self.registry,
        )  # fmt: skip
        self.kv_restore_seconds = Histogram(
            "inference_kv_restore_seconds", "Putting saved sequences back", buckets=_RESTORE_BUCKETS,
            registry=self.registry,
        )  # fmt: skip
        self.estimate_error = Histogram(
            "inference_estimate_error_ratio", "Bytes allocated over bytes predicted", buckets=_RATIO_BUCKETS,
            registry=self.registry,
        )  # fmt: skip
        self.exits = Counter(
            "inference_worker_exits_total", "Ends of worker processes", ["model", "cause"], registry=self.registry
        )
        self.recoveries = Counter(
            "inference_recovery_total", "Things that came back by themselves", ["kind"], registry=self.registry
        )
        self.timeouts = Counter(
            "inference_timeouts_total", "Waits that ended at their deadline", ["kind"], registry=self.registry
        )
        self.restorations = Counter(
            "inference_restorations_total", "Warm models that were ready again", registry=self.registry
        )
        self.alloc_retries = Counter(
            "inference_alloc_retries_total", "Loads tried again with less after memory was refused",
            registry=self.registry,
        )  # fmt: skip
        self.tokens = Counter(
            "inference_tokens_total", "Tokens as the workers count them", ["model", "kind"], registry=self.registry
        )

    def collect(self) -> Iterator[Metric]:
        """The gauges of this moment; called by the registry."""
        yield from self.gauges()

    def total(self, counter: Counter, **labels: Collection[str]) -> int:
        """What a counter says, summed over those of its series whose labels are among the ones given."""
        return int(
            sum(
                sample.value
                for metric in counter.collect()
                for sample in metric.samples
                if sample.name.endswith("_total")
                and all(sample.labels[name] in wanted for name, wanted in labels.items())
            )
        )

    def render(self) -> bytes:
        """The text exposition."""
        return generate_latest(self.registry)
