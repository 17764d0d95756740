"""The Prometheus metrics of the inference service: counters, histograms, and the gauges that each scrape reads from the
state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from inference.authority.handlers.queries import device_view, pressure_view
from inference.authority.state import ModelRecord, State
from inference.protocol import DeviceState, ModelState, Priority

_RESTORE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
_LOAD_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
_RATIO_BUCKETS = (0.5, 0.8, 0.9, 0.95, 0.98, 1.0, 1.02, 1.05, 1.1, 1.25, 2.0)
_COOLDOWN = "Time until a model is tried again after a failure, or with its configured settings after out-of-memory"
OTHER_MODEL = "*"
"""The label of requests for models that do not exist: names that clients choose are not labels."""
ACCOUNTS = ("capacity", "free", "foreign", "reserved", "resident", "releasing", "cached", "shortfall")


class Metrics:
    """One registry per service. `gauges` gives the gauges of a scrape."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.gauges: Callable[[], Iterator[GaugeMetricFamily]] = lambda: iter(())
        self.registry.register(self)
        self.placements = Counter(
            "inference_placement_total", "Placement decisions", ["result", "reason"],
            registry=self.registry,
        )  # fmt: skip
        self.evictions = Counter(
            "inference_evictions_total", "Models that left their device", ["action", "reason"], registry=self.registry
        )
        self.load_seconds = Histogram(
            "inference_load_seconds", "Load time, from reservation to ready", ["model", "tier"], buckets=_LOAD_BUCKETS,
            registry=self.registry,
        )  # fmt: skip
        self.kv_restore_seconds = Histogram(
            "inference_kv_restore_seconds", "Loading a stored sequence into the context", buckets=_RESTORE_BUCKETS,
            registry=self.registry,
        )  # fmt: skip
        self.estimate_error = Histogram(
            "inference_estimate_error_ratio", "Bytes allocated over bytes predicted", buckets=_RATIO_BUCKETS,
            registry=self.registry,
        )  # fmt: skip
        self.exits = Counter(
            "inference_worker_exits_total", "Ends of worker processes", ["model", "cause"], registry=self.registry
        )
        self.recoveries = Counter("inference_recovery_total", "Automatic recoveries", ["kind"], registry=self.registry)
        self.timeouts = Counter(
            "inference_timeouts_total", "Waits that ended at their deadline", ["kind"], registry=self.registry
        )
        self.restorations = Counter(
            "inference_restorations_total", "Restorations of warm models", registry=self.registry
        )
        self.alloc_retries = Counter(
            "inference_alloc_retries_total", "Loads repeated with smaller settings after out-of-memory",
            registry=self.registry,
        )  # fmt: skip
        self.tokens = Counter(
            "inference_tokens_total", "Tokens as the workers count them", ["model", "kind"], registry=self.registry
        )

        self.requests = Counter(
            "inference_requests_total", "Requests by model and outcome", ["model", "outcome"], registry=self.registry
        )
        self.kv_hits = Counter(
            "inference_kv_hits_total", "Prompts that continued a sequence", ["model", "tier"], registry=self.registry
        )
        self.kv_misses = Counter(
            "inference_kv_misses_total", "Prompts that continued no sequence", ["model"], registry=self.registry
        )
        self.kv_evicted = Counter(
            "inference_kv_evicted_total", "Stored sequences removed for room", ["model"], registry=self.registry
        )
        self.kv_invalid = Counter(
            "inference_kv_invalid_total", "Stored sequences removed: damaged, or of another model",
            ["model"], registry=self.registry,
        )  # fmt: skip
        self.kv_prefetches = Counter(
            "inference_kv_prefetches_total", "Sequences read from disk for waiting requests", ["model", "result"],
            registry=self.registry,
        )  # fmt: skip
        self.kv_transfer_bytes = Counter(
            "inference_kv_transfer_bytes_total", "Bytes of sequences moved between tiers", ["model", "direction"],
            registry=self.registry,
        )  # fmt: skip
        self.kv_transfer_seconds = Counter(
            "inference_kv_transfer_seconds_total",
            "Time to move sequences between tiers",
            ["model", "direction"],
            registry=self.registry,
        )

    def collect(self) -> Iterator[Metric]:
        """The gauges of this moment; called by the registry."""
        yield from self.gauges()

    def total(self, counter: Counter, **labels: Collection[str]) -> int:
        """The sum of a counter over the series whose labels are among the given ones."""
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


def gauges(state: State, now: float) -> Iterator[GaugeMetricFamily]:
    """Every gauge of this moment."""
    yield from _devices(state, now)
    yield from _models(state, now)
    yield from _workers(state)


def numbered(states: type[ModelState] | type[DeviceState]) -> str:
    """The numbers of states: `0 cold, 1 loading, ...`, in the order of their declaration."""
    return ", ".join(f"{number} {state}" for number, state in enumerate(states))


def _devices(state: State, now: float) -> Iterator[GaugeMetricFamily]:
    account = GaugeMetricFamily(
        "inference_device_bytes", "Memory by account of the ledger", labels=["device", "account"]
    )
    used = GaugeMetricFamily("inference_device_utilization_ratio", "Share of the device in use", labels=["device"])
    health = GaugeMetricFamily("inference_device_state", numbered(DeviceState), labels=["device"])
    level = GaugeMetricFamily("inference_pressure_level", "0 low to 4 emergency", labels=["device"])
    memory = GaugeMetricFamily(
        "inference_device_memory_bytes", "Memory as the device reports it", labels=["device", "kind"]
    )
    for device, (use, rank) in pressure_view.levels(state, now).items():
        balance = state.ledger.balance(device)
        for name in ACCOUNTS:
            account.add_metric([device, name], getattr(balance, f"{name}_bytes"))
        used.add_metric([device], use.share)
        level.add_metric([device], rank)
        if (reading := device_view.reading(state, device, now)) is not None:
            health.add_metric([device], list(DeviceState).index(reading.state))
            memory.add_metric([device, "total"], reading.total_bytes)
            memory.add_metric([device, "used"], reading.used_bytes)
            memory.add_metric([device, "free"], reading.free_bytes)
    yield from (account, used, health, level, memory)


def _models(state: State, now: float) -> Iterator[GaugeMetricFamily]:
    states = GaugeMetricFamily("inference_model_state", numbered(ModelState), labels=["model"])
    refs = GaugeMetricFamily("inference_model_refs", "Requests in flight", labels=["model"])
    queued = GaugeMetricFamily("inference_queue_depth", "Requests that wait", labels=["model", "priority"])
    rest = GaugeMetricFamily("inference_recovery_cooldown_seconds", _COOLDOWN, labels=["model"])
    for model in state.models.values():
        states.add_metric([model.id], list(ModelState).index(model.state))
        refs.add_metric([model.id], state.in_flight(model))
        for priority in Priority:
            queued.add_metric([model.id, str(priority)], model.queue.count(priority))
        rest.add_metric([model.id], cooldown_seconds(model, now))
    yield from (states, refs, queued, rest)


def cooldown_seconds(model: ModelRecord, now: float) -> float:
    """Seconds until the model is tried again after a failure, or with its configured settings after a shortage."""
    backoff = model.retry_at - now if model.state is ModelState.FAILED else 0.0
    return max(0.0, backoff, model.reduction.rest(now), model.on_cpu_until - now)


def _workers(state: State) -> Iterator[GaugeMetricFamily]:
    size = GaugeMetricFamily("inference_model_bytes", "Bytes of a model", labels=["model", "kind"])
    kv = GaugeMetricFamily("inference_kv_bytes", "Bytes of sequences", labels=["model", "tier"])
    sequences = GaugeMetricFamily("inference_sequences", "Sequences in the engine", labels=["model", "state"])
    slots = GaugeMetricFamily("inference_slots", "Slots of loaded models", labels=["model", "state"])
    caches = state.ledger.caches
    for model in state.models.values():
        kinds = bytes_by_kind(state, model)
        for kind, count in kinds.items():
            size.add_metric([model.id, kind], count)
        if "kv" in kinds:
            kv.add_metric([model.id, "hot"], kinds["kv"])
        if model.id in caches:
            kv.add_metric([model.id, "ram"], caches[model.id].used_bytes)
        if model.kv_counts.disk_bytes:
            kv.add_metric([model.id, "disk"], model.kv_counts.disk_bytes)
        worker = state.worker_of(model)
        if worker is not None and (beat := worker.beat) is not None:
            sequences.add_metric([model.id, "active"], beat.active)
            sequences.add_metric([model.id, "queued"], beat.queued)
            busy = min(beat.active, model.effective.parallel)
            slots.add_metric([model.id, "busy"], busy)
            slots.add_metric([model.id, "free"], model.effective.parallel - busy)
    yield from (size, kv, sequences, slots)


def bytes_by_kind(state: State, model: ModelRecord) -> dict[str, int]:
    """The bytes that the worker of a model allocated: weights, kv, compute, other."""
    worker = state.worker_of(model)
    if worker is None or worker.ready is None or model.state is ModelState.WARM:
        return {}
    kinds: dict[str, int] = {}
    for buffer in worker.ready.buffers:
        kinds[buffer.kind] = kinds.get(buffer.kind, 0) + buffer.bytes
    return kinds
