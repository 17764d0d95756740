"""Our own counters and histograms read as the library's do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest

from gateway.telemetry.metric_counters import Counts, Times

disable_created_metrics()  # type: ignore[no-untyped-call]  # as the gateway does

_BOUNDS = (0.1, 0.5, 1, 20)
_LABELS = st.tuples(st.sampled_from(["*", 'a"b', "x\ny"]), st.sampled_from(["local", "none"]))


@given(st.lists(_LABELS))
def test_counts_read_as_the_librarys(seen: list[tuple[str, str]]) -> None:
    """Whatever the labels hold, and before anything was counted too."""
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counts = Counts("t_requests_total", "Requests", ["route", "tier"], ours)
    counter = Counter("t_requests_total", "Requests", ["route", "tier"], registry=theirs)
    for labels in seen:
        counts.count(*labels)
        counter.labels(*labels).inc()
    assert generate_latest(ours) == generate_latest(theirs)


@given(st.lists(st.sampled_from([0.0, 0.1, 0.10001, 0.5, 1.0, 7.0, 20.0, 21.0])))
def test_times_read_as_the_librarys(seen: list[float]) -> None:
    """A time that is a bound itself is within it."""
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    times = Times("t_seconds", "Times", _BOUNDS, ours)
    histogram = Histogram("t_seconds", "Times", buckets=_BOUNDS, registry=theirs)
    for seconds in seen:
        times.observe(seconds)
        histogram.observe(seconds)
    assert generate_latest(ours) == generate_latest(theirs)
