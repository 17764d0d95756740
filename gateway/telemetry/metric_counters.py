"""Counts and times what every request and every token does; what a scrape reads is made of it when somebody scrapes.

The library's own counters and histograms lock, check and search at every step, which costs a request a thirtieth. These
are for one thread.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Counts(Collector):
    """A counter with labels."""

    def __init__(self, name: str, documentation: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self._described = name, documentation, labels
        self._counts: dict[tuple[str, ...], int] = {}
        registry.register(self)

    def count(self, *labels: str) -> None:
        """Adds one."""
        self._counts[labels] = self._counts.get(labels, 0) + 1

    def collect(self) -> Iterator[CounterMetricFamily]:
        """What the registry tells."""
        name, documentation, labels = self._described
        family = CounterMetricFamily(name, documentation, labels=labels)
        for said, count in self._counts.items():
            family.add_metric(said, count)
        yield family


class Times(Collector):
    """A histogram without labels; `bounds` are the upper ends of its buckets in seconds, in order."""

    def __init__(self, name: str, documentation: str, bounds: Sequence[float], registry: CollectorRegistry) -> None:
        self._described = name, documentation
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, seconds: float) -> None:
        """Adds one."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """What the registry tells."""
        ends = [floatToGoString(bound) for bound in (*self._bounds, math.inf)]  # type: ignore[no-untyped-call]
        buckets = list(zip(ends, accumulate(self._counts), strict=True))
        family = HistogramMetricFamily(*self._described)
        family.add_metric([], buckets, self._sum)
        yield family
