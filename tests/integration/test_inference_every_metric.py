"""Every metric of the inference service exists with its labels and changes with the counted event."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from inference.app import Service
from inference.errors import InferenceError
from inference.protocol import DeviceState, ModelState
from tests.rigs.asgi import ask
from tests.rigs.authority_rig import MIB, FakeAccelerator, FakeEstimator, SharedDevice, Start

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "api.md"
NAMES: dict[str, set[str]] = {
    "inference_device_bytes": {"device", "account"},
    "inference_device_utilization_ratio": {"device"},
    "inference_device_state": {"device"},
    "inference_device_memory_bytes": {"device", "kind"},
    "inference_pressure_level": {"device"},
    "inference_model_state": {"model"},
    "inference_model_bytes": {"model", "kind"},
    "inference_model_refs": {"model"},
    "inference_sequences": {"model", "state"},
    "inference_slots": {"model", "state"},
    "inference_requests_total": {"model", "outcome"},
    "inference_placement_total": {"result", "reason"},
    "inference_evictions_total": {"action", "reason"},
    "inference_restorations_total": set(),
    "inference_load_seconds_count": {"model", "tier"},
    "inference_estimate_error_ratio_count": set(),
    "inference_alloc_retries_total": set(),
    "inference_worker_exits_total": {"model", "cause"},
    "inference_recovery_total": {"kind"},
    "inference_recovery_cooldown_seconds": {"model"},
    "inference_queue_depth": {"model", "priority"},
    "inference_timeouts_total": {"kind"},
    "inference_tokens_total": {"model", "kind"},
    "inference_kv_bytes": {"model", "tier"},
    "inference_kv_restore_seconds_count": set(),
    "inference_kv_hits_total": {"model", "tier"},
    "inference_kv_misses_total": {"model"},
    "inference_kv_evicted_total": {"model"},
    "inference_kv_invalid_total": {"model"},
    "inference_kv_prefetches_total": {"model", "result"},
    "inference_kv_transfer_bytes_total": {"model", "direction"},
    "inference_kv_transfer_seconds_total": {"model", "direction"},
}


def value(service: Service, name: str, **labels: str) -> float | None:
    """One sample; checks its labels."""
    found = service.metrics.registry.get_sample_value(name, labels)
    if found is not None:
        assert name in NAMES
        assert set(labels) == NAMES[name], name
    return found


Shown = Callable[[Start, pytest.MonkeyPatch], Awaitable[None]]
TABLE: dict[tuple[str, ...], Shown] = {}


def shows(*names: str) -> Callable[[Shown], Shown]:
    """Registers a function that changes these metrics."""

    def enter(function: Shown) -> Shown:
        TABLE[tuple("inference_" + name for name in names)] = function
        return function

    return enter


@shows("device_bytes", "device_memory_bytes", "device_utilization_ratio", "pressure_level", "device_state")
async def _a_device_fills_and_is_lost(start: Start, _patch: pytest.MonkeyPatch) -> None:
    gpu = FakeAccelerator()
    service = await start({"a": {}}, accelerator=gpu)
    assert value(service, "inference_device_bytes", device="gpu-0", account="foreign") == 0
    assert value(service, "inference_pressure_level", device="gpu-0") == 0
    assert value(service, "inference_device_state", device="gpu-0") == 0
    assert value(service, "inference_device_memory_bytes", device="gpu-0", kind="free") == 1000 * MIB
    gpu.used_bytes = 950 * MIB
    gpu.change(state=DeviceState.LOST)
    kinds = {"total": 1000, "used": 950, "free": 50}
    for kind, mib in kinds.items():
        assert value(service, "inference_device_memory_bytes", device="gpu-0", kind=kind) == mib * MIB
    assert value(service, "inference_device_bytes", device="gpu-0", account="foreign") == 950 * MIB
    assert value(service, "inference_device_utilization_ratio", device="gpu-0") == 0.95
    assert value(service, "inference_pressure_level", device="gpu-0") == 3
    assert value(service, "inference_device_state", device="gpu-0") == list(DeviceState).index(DeviceState.LOST)


@shows("model_state", "model_bytes", "kv_bytes", "load_seconds_count", "estimate_error_ratio_count", "placement_total")
async def _a_model_is_loaded(start: Start, _patch: pytest.MonkeyPatch) -> None:
    service = await start({"a": {}})
    assert value(service, "inference_model_state", model="a") == list(ModelState).index(ModelState.COLD)
    assert value(service, "inference_model_bytes", model="a", kind="kv") is None
    await service.authority.load(service.authority.resolve("a"), 10)
    assert value(service, "inference_model_state", model="a") == list(ModelState).index(ModelState.READY)
    assert value(service, "inference_model_bytes", model="a", kind="kv") == 36 * MIB
    assert value(service, "inference_kv_bytes", model="a", tier="hot") == 36 * MIB
    assert value(service, "inference_load_seconds_count", model="a", tier="cold") == 1
    assert value(service, "inference_estimate_error_ratio_count") == 1
    assert value(service, "inference_placement_total", result="free", reason="fits") == 1


@shows("model_refs", "sequences", "slots", "requests_total", "tokens_total")
async def _a_request_runs(start: Start, _patch: pytest.MonkeyPatch) -> None:
    service = await start({"a": {}}, {"a": {"answer_seconds": 2}})
    asking = asyncio.create_task(ask(service.app, "POST", "/v1/completions", {"model": "a", "prompt": "x"}))
    await service.authority.reached(lambda: value(service, "inference_sequences", model="a", state="active") == 1)
    assert value(service, "inference_model_refs", model="a") == 1
    assert value(service, "inference_slots", model="a", state="busy") == 1
    assert value(service, "inference_slots", model="a", state="free") == service.authority.model("a").spec.parallel - 1
    await service.authority.reached(lambda: value(service, "inference_tokens_total", model="a", kind="generated") == 10)
    assert value(service, "inference_tokens_total", model="a", kind="prompt") == 10
    await asking
    assert value(service, "inference_model_refs", model="a") == 0
    assert value(service, "inference_requests_total", model="a", outcome="success") == 1


@shows("evictions_total", "restorations_total")
async def _a_model_leaves_and_comes_back(start: Start, _patch: pytest.MonkeyPatch) -> None:
    service = await start({"a": {}}, {"a": {"saved": MIB}})
    model = service.authority.resolve("a")
    await service.authority.load(model, 10)
    assert value(service, "inference_restorations_total") == 0
    assert value(service, "inference_kv_bytes", model="a", tier="ram") == 0
    await service.authority.offload(model)
    await service.authority.reached(lambda: bool(service.authority.state.evictions))
    assert value(service, "inference_evictions_total", action="offload", reason="by hand") == 1
    assert value(service, "inference_kv_bytes", model="a", tier="ram") == MIB
    assert value(service, "inference_kv_bytes", model="a", tier="hot") is None
    await service.authority.load(model, 10)
    assert value(service, "inference_restorations_total") == 1
    assert value(service, "inference_load_seconds_count", model="a", tier="warm") == 1


KV_COUNTS = {
    "disk_sequences": 1, "disk_bytes": 5 * MIB, "hits_hot": 3, "hits_ram": 2, "hits_disk": 1, "misses": 4, "evicted": 5,
    "invalid": 6, "prefetched": 8, "prefetched_used": 7, "saved_bytes": 10, "save_seconds": 0.1,
    "loads": 2, "loaded_bytes": 20, "load_seconds": 0.2, "disk_written_bytes": 30, "disk_write_seconds": 0.3,
    "disk_read_bytes": 40, "disk_read_seconds": 0.4,
}  # fmt: skip
DIRECTIONS = ("save", "load", "write", "read")


@shows("kv_hits_total", "kv_misses_total", "kv_evicted_total", "kv_invalid_total", "kv_prefetches_total",
       "kv_transfer_bytes_total", "kv_transfer_seconds_total", "kv_restore_seconds_count")  # fmt: skip
async def _sequences_are_stored(start: Start, _patch: pytest.MonkeyPatch) -> None:
    """The counters continue when the worker is replaced."""
    service = await start({"a": {}}, {"a": {"kv_counts": KV_COUNTS}})
    model = service.authority.resolve("a")
    for times in (1, 2):
        await service.authority.load(model, 10)
        misses = 4 * times
        await service.authority.reached(
            lambda wanted=misses: value(service, "inference_kv_misses_total", model="a") == wanted
        )
        hits = [value(service, "inference_kv_hits_total", model="a", tier=tier) for tier in ("hot", "ram", "disk")]
        assert hits == [3 * times, 2 * times, times]
        assert value(service, "inference_kv_evicted_total", model="a") == 5 * times
        assert value(service, "inference_kv_invalid_total", model="a") == 6 * times
        assert value(service, "inference_kv_prefetches_total", model="a", result="read") == 8 * times
        assert value(service, "inference_kv_prefetches_total", model="a", result="used") == 7 * times
        for number, direction in enumerate(DIRECTIONS, start=1):
            labels = {"model": "a", "direction": direction}
            assert value(service, "inference_kv_transfer_bytes_total", **labels) == 10 * number * times
            seconds = value(service, "inference_kv_transfer_seconds_total", **labels)
            assert seconds == pytest.approx(0.1 * number * times)
        assert value(service, "inference_kv_restore_seconds_count") == 2 * times
        assert value(service, "inference_kv_bytes", model="a", tier="disk") == 5 * MIB
        await service.authority.unload(model)
    shown = (await ask(service.app, "GET", "/memory/kv")).body
    assert [(one["model_name"], one["tiers"]["disk"]["mb"]) for one in shown["models"]] == [("a", 5.0)]
    assert (shown["total"]["misses"], shown["total"]["hit_rate"]) == (8, 0.6)


@shows("worker_exits_total", "recovery_cooldown_seconds", "recovery_total")
async def _a_worker_fails_and_its_model_comes_back(start: Start, patch: pytest.MonkeyPatch) -> None:
    service = await start({"a": {}}, {"a": {"fail": "oom_load"}})
    model = service.authority.resolve("a")
    assert value(service, "inference_recovery_cooldown_seconds", model="a") == 0
    with pytest.raises(InferenceError):
        await service.authority.load(model, 10)
    assert value(service, "inference_worker_exits_total", model="a", cause="oom_load") == 1
    cooldown = value(service, "inference_recovery_cooldown_seconds", model="a")
    assert cooldown is not None
    assert 0 < cooldown <= 1
    patch.setenv("FAKE_WORKER", json.dumps({}))
    await service.authority.load(model, 10)
    assert value(service, "inference_recovery_total", kind="reload") == 1
    assert value(service, "inference_recovery_cooldown_seconds", model="a") == 0


@shows("alloc_retries_total")
async def _a_load_is_tried_with_less(start: Start, _patch: pytest.MonkeyPatch) -> None:
    estimator = FakeEstimator()
    estimator.sizes["a"] = 2000
    service = await start({"a": {"oom_policy": "reduce"}}, accelerator=SharedDevice(), estimator=estimator)
    with pytest.raises(InferenceError):
        await service.authority.load(service.authority.resolve("a"), 10)
    assert value(service, "inference_alloc_retries_total") == 2
    assert value(service, "inference_placement_total", result="cant_accommodate", reason="memory") == 1


@shows("queue_depth", "timeouts_total")
async def _waiting_requests_fail(start: Start, _patch: pytest.MonkeyPatch) -> None:
    estimator = FakeEstimator()
    estimator.gate = asyncio.Event()
    service = await start({"a": {}}, {"a": {"load_seconds": 60}}, estimator=estimator)
    model = service.authority.resolve("a")
    ticket = service.authority.ask(model, seconds=0.2)
    assert value(service, "inference_queue_depth", model="a", priority="normal") == 1
    with pytest.raises(InferenceError):
        await ticket.wait(10)
    assert value(service, "inference_timeouts_total", kind="queued") == 1
    assert value(service, "inference_queue_depth", model="a", priority="normal") == 0
    estimator.gate.set()
    ticket = service.authority.ask(model, seconds=1.0)
    with pytest.raises(InferenceError):
        await ticket.wait(10)
    assert value(service, "inference_timeouts_total", kind="loading") == 1


@pytest.mark.parametrize("names", TABLE, ids=lambda names: "-".join(name.removeprefix("inference_") for name in names))
async def test_metric_changes_when_its_cause_occurs(
    names: tuple[str, ...], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    await TABLE[names](start, monkeypatch)


def test_metrics_are_documented_with_their_labels() -> None:
    table = DOCUMENT.read_text(encoding="utf-8").partition("### Metrics\n")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| `(inference_\w+)` \| ([^|]*) \|", table, re.MULTILINE)
    assert {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows} == {
        name.removesuffix("_count"): labels for name, labels in NAMES.items()
    }


def test_every_metric_has_a_test() -> None:
    assert sorted(name for names in TABLE for name in names) == sorted(NAMES)


async def test_scrape_has_exactly_these_metrics(start: Start) -> None:
    service = await start({"a": {}})
    families = {family.name for family in service.metrics.registry.collect()}
    assert families == {name.removesuffix("_count").removesuffix("_total") for name in NAMES}
