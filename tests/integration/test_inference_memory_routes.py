"""`/memory/*` agrees with the ledger, the devices and the records, in MiB and percent."""

from __future__ import annotations

from typing import Any

import pytest

from inference.app import Service
from inference.authority.placement.ledger import Phase
from tests.rigs.asgi import ask
from tests.rigs.authority_rig import MIB, FakeAccelerator, FakeEstimator, SharedDevice, Start


async def get(service: Service, path: str, status: int = 200) -> Any:
    answer = await ask(service.app, "GET", path)
    assert answer.status == status, answer.body
    return answer.body


async def post(service: Service, path: str, body: Any = None, status: int = 200) -> Any:
    answer = await ask(service.app, "POST", path, body)
    assert answer.status == status, answer.body
    return answer.body


async def test_totals_are_the_sums_of_the_accelerators(start: Start) -> None:
    accelerator = FakeAccelerator()
    service = await start({"a": {}, "b": {}}, accelerator=accelerator)
    await service.authority.load(service.authority.resolve("a"), 10)
    accelerator.used_bytes = 350 * MIB  # 100 MiB of it are the model
    stats = await get(service, "/memory/stats")
    device = stats["per_device"]["gpu-0"]
    assert (stats["total_mb"], stats["used_mb"], stats["free_mb"]) == (1000, 350, 650)
    assert (stats["used_percent"], stats["allocated_mb"], device["foreign_mb"]) == (35, 100, 250)
    assert (stats["budget_total_mb"], stats["budget_usable_mb"], device["room_mb"]) == (1000, 900, 550)
    assert (stats["models_loaded"], stats["models_offloaded"], stats["gpu_available"]) == (1, 0, True)
    assert stats["pressure_level"] == device["pressure_level"] == "low"
    host = stats["per_device"]["cpu"]
    assert stats["cpu_budget_total_mb"] == host["total_mb"] > stats["cpu_budget_usable_mb"] > 0
    assert stats["cpu_used_mb"] == 0
    assert stats["limit_mb"] is None
    accelerator.used_bytes = 0


async def test_totals_without_an_accelerator_are_those_of_the_host(start: Start) -> None:
    service = await start({"a": {}}, MEMORY_LIMIT_GB="0.5")
    await service.authority.load(service.authority.resolve("a"), 10)
    stats = await get(service, "/memory/stats")
    assert stats["total_mb"] == stats["cpu_budget_total_mb"] == stats["per_device"]["cpu"]["total_mb"]
    assert (stats["allocated_mb"], stats["cpu_used_mb"], stats["gpu_available"]) == (100, 100, False)
    assert stats["limit_mb"] == stats["budget_usable_mb"] == 512


async def test_evictions_are_counted_and_listed_with_their_reason(start: Start) -> None:
    service = await start({"a": {}, "b": {}}, MEMORY_LIMIT_GB="0.15", ENABLE_CPU_OFFLOAD="false")
    for name in ("a", "b", "a"):
        with service.authority.ask(service.authority.resolve(name)) as ticket:
            await ticket.wait(10)
    stats = await get(service, "/memory/stats")
    assert (stats["total_evictions"], stats["total_unloads"], stats["total_offloads"]) == (2, 2, 0)
    listed = await get(service, "/memory/evictions")
    assert listed["total"] == 2
    assert [record["model_name"] for record in listed["evictions"]] == ["a", "b"]
    (last,) = (await get(service, "/memory/evictions?limit=1"))["evictions"]
    assert (last["reason"], last["action"], last["memory_freed_mb"]) == ("memory wanted", "unload", 100)
    assert "room for a" in last["explanation"]
    assert last["timestamp"] > 1e9


async def test_models_have_their_devices_and_usage(start: Start) -> None:
    service = await start({"a": {}, "b": {}})
    model = service.authority.resolve("a")
    lease = await service.authority.ask(model).wait(10)
    assert lease is not None
    used, cold = (await get(service, "/memory/models"))["models"]
    assert (used["model_name"], used["location"], used["state"]) == ("a", "cpu", "busy")
    assert (used["ref_count"], used["use_count"], used["idle_seconds"]) == (1, 1, None)
    assert used["memory_mb"] == {"predicted": 100, "observed": 100}
    assert used["devices_mb"] == {"cpu": 100}
    assert (cold["location"], cold["use_count"], cold["memory_mb"]["observed"]) == ("disk", 0, None)
    lease.release()
    idle, _ = (await get(service, "/memory/models"))["models"]
    assert idle["ref_count"] == 0
    assert idle["idle_seconds"] >= 0


async def test_warm_model_is_listed_with_its_host_memory(start: Start) -> None:
    service = await start({"a": {}}, {"a": {"saved": 2**20}})
    model = service.authority.resolve("a")
    await service.authority.load(model, 10)
    await post(service, "/models/a/offload")
    (listed,) = (await get(service, "/memory/models"))["models"]
    (kept,) = (await get(service, "/memory/offloaded"))["offloaded"]
    (cached,) = (await get(service, "/memory/kv"))["models"]
    held = sum(service.authority.ledger.owned_by("a").values())
    assert (listed["location"], listed["memory_mb"]["observed"]) == ("host", round(held / MIB, 3))
    assert (await get(service, "/v1/models/a"))["headgate"]["actual_bytes"] == held
    assert (kept["model_key"], kept["original_device"], kept["bytes"]) == ("a", "cpu", held)
    assert kept["seconds_offloaded"] >= 0
    assert (cached["kv_cells_reserved"], cached["saved_sequences"]) == (0, 1)
    assert (cached["tiers"]["hot"]["budget_mb"], cached["tiers"]["ram"]["mb"]) == (0, 1)
    stats = await get(service, "/memory/stats")
    assert (stats["models_loaded"], stats["models_offloaded"], stats["total_offloads"]) == (0, 1, 1)
    await post(service, "/models/a/load")
    stats = await get(service, "/memory/stats")
    assert (stats["models_loaded"], stats["models_offloaded"], stats["total_restorations"]) == (1, 0, 1)
    assert (await post(service, "/memory/gc"))["models"] == ["a"]


async def test_a_pool_is_reported_with_its_cells(start: Start) -> None:
    pool = {"context_length": 512, "parallel": 4, "kv_cells": 1000}
    service = await start({"a": pool, "b": {"context_length": 512, "parallel": 2}}, {"a": {}, "b": {}})
    for name in ("a", "b"):
        await service.authority.load(service.authority.resolve(name), 10)
    models = {item["model_name"]: item for item in (await get(service, "/memory/kv"))["models"]}
    assert [models[name]["kv_cells_reserved"] for name in ("a", "b")] == [1000, 1024]
    assert (await get(service, "/v1/models/a"))["headgate"]["kv_cells"] == 1000
    assert (await get(service, "/v1/models/b"))["headgate"]["kv_cells"] is None


async def test_fragmentation_compares_the_ledger_with_readings(start: Start) -> None:
    accelerator = FakeAccelerator()
    service = await start({"a": {"context_length": 512, "parallel": 2}}, {"a": {}}, accelerator=accelerator)
    loaded = service.authority.resolve("a")
    await service.authority.load(loaded, 10)
    await service.authority.reached(lambda: loaded.running is not None and loaded.running.worker.beat is not None)
    accelerator.used_bytes = 100 * MIB
    found = await get(service, "/memory/fragmentation")
    (model,) = found["models"]
    assert (model["tracked_mb"], model["allocated_mb"]) == (100, 36)
    assert model["process_mb"] > 1
    assert (model["kv_cells_used"], model["kv_cells_reserved"]) == (0, 1024)
    device = found["devices"]["gpu-0"]
    assert (device["tracked_mb"], device["observed_mb"], device["difference_mb"]) == (100, 100, 0)
    assert found["room_mb"] == found["largest_room_mb"] == 800
    assert (found["fragmentation_percent"], found["num_alloc_retries"], found["num_ooms"]) == (0, 0, 0)
    accelerator.used_bytes = 0


async def test_out_of_memory_and_reduced_loads_are_counted(start: Start) -> None:
    estimator = FakeEstimator()
    estimator.sizes["b"] = 200
    models = {"a": {}, "b": {"oom_policy": "reduce"}}
    service = await start(models, {"a": {"fail": "oom_load"}}, estimator=estimator, MEMORY_LIMIT_GB="0.12")
    await post(service, "/models/b/load", status=503)
    found = await get(service, "/memory/fragmentation")
    assert (found["num_alloc_retries"], found["num_ooms"]) == (2, 0)
    await post(service, "/models/a/load", status=503)
    found = await get(service, "/memory/fragmentation")
    assert (found["num_alloc_retries"], found["num_ooms"]) == (2, 1)


async def test_health_names_the_full_device_and_the_users_of_its_memory(start: Start) -> None:
    accelerator = FakeAccelerator()
    service = await start({"a": {}}, accelerator=accelerator)
    well = await get(service, "/memory/health")
    assert well["healthy"]
    assert (well["pressure"], well["used_percent"], well["message"]) == ("low", 0, "all devices are healthy")
    accelerator.used_bytes = 950 * MIB
    ill = await get(service, "/memory/health", 503)
    assert (ill["healthy"], ill["pressure"], ill["used_percent"]) == (False, "critical", 95)
    assert (
        ill["message"]
        == "gpu-0 is at critical pressure: 950 MiB of 1000 MiB are in use, 950 MiB of it by other programs"
    )
    assert (await ask(service.app, "GET", "/health", key=None)).body["message"] == ill["message"]
    assert (await ask(service.app, "GET", "/livez", key=None)).status == 200


async def test_evict_command_returns_the_released_memory(start: Start) -> None:
    service = await start({"a": {"min_residency": 1000}, "b": {"pinned": True}})
    assert await post(service, "/memory/evict/a") == {"model_name": "a", "evicted": False, "memory_freed_mb": 0}
    for name in ("a", "b"):
        await service.authority.load(service.authority.resolve(name), 10)
    gone = await post(service, "/memory/evict/a")
    assert (gone["evicted"], gone["memory_freed_mb"], gone["reason"], gone["action"]) == (
        True,
        100,
        "by hand",
        "unload",
    )
    refused = await post(service, "/memory/evict/b", status=400)
    assert "pinned" in refused["error"]["message"]
    assert refused["error"]["param"] == "model"
    assert service.authority.resolve("b").running is not None


async def test_evict_command_waits_at_most_the_drain_time_for_running_answers(start: Start) -> None:
    service = await start({"a": {}}, DRAIN_SECONDS="0.2")
    assert await service.authority.ask(service.authority.resolve("a")).wait(10)
    assert (await post(service, "/memory/evict/a"))["evicted"]


async def test_gc_unloads_only_idle_models(start: Start) -> None:
    models: dict[str, Any] = {"idle": {}, "busy": {}, "young": {"min_residency": 1000}, "pinned": {"pinned": True}}
    service = await start(models, MEMORY_LIMIT_GB="1")
    for name in models:
        await service.authority.load(service.authority.resolve(name), 10)
    lease = await service.authority.ask(service.authority.resolve("busy")).wait(10)
    assert lease is not None
    answer = await post(service, "/memory/gc")
    assert (answer["models_unloaded"], answer["models"]) == (1, ["idle"])
    assert answer["freed_mb"] == pytest.approx(100 + answer["trimmed_mb"])
    assert [model.id for model in service.authority.models.values() if model.running] == ["busy", "young", "pinned"]


async def test_refused_load_fits_after_defragmenting(start: Start) -> None:
    """A worker grew beyond its reservation, and shrinks when it drops retained prefixes."""
    service = await start({"a": {"pinned": True}, "b": {}}, {"a": {"grow": 250 * MIB}}, MEMORY_LIMIT_GB="0.35")
    authority, model = service.authority, service.authority.resolve("a")
    await authority.load(model, 10)
    assert model.running is not None
    running = model.running
    await authority.reached(lambda: running.grown_bytes > 150 * MIB)
    await post(service, "/models/b/load", status=503)
    held = authority.ledger.holdings[running.holding].bytes["cpu"]
    answer = await post(service, "/memory/defragment")
    assert answer["trimmed_mb"] >= 250
    assert answer["reclaimed_mb"] == pytest.approx(held / MIB - 100, abs=0.01)
    assert answer["largest_room_mb"]["after"] > answer["largest_room_mb"]["before"]
    assert authority.ledger.holdings[running.holding].phase is Phase.RESIDENT
    await post(service, "/models/b/load")


async def test_defragmenting_moves_idle_models_so_that_a_large_one_fits(start: Start) -> None:
    estimator = FakeEstimator()
    estimator.sizes = {"a": 400, "b": 300, "large": 700}
    machine = SharedDevice(count=2)
    models: dict[str, Any] = {"a": {"pinned": True}, "b": {"pinned": True}, "large": {}}
    service = await start(models, accelerator=machine, estimator=estimator)
    machine.service = service
    for name in ("a", "b"):
        await service.authority.load(service.authority.resolve(name), 10)
    first = (await get(service, "/v1/models/a"))["headgate"]["devices"][0]
    second = {"gpu-0": "gpu-1", "gpu-1": "gpu-0"}[first]
    await post(service, "/models/b/move", {"device": second})
    scattered = await get(service, "/memory/fragmentation")
    assert (scattered["room_mb"], scattered["largest_room_mb"]) == (1100, 600)
    await post(service, "/models/large/load", status=503)
    refused = await post(service, "/models/large/load?evict=false", status=503)
    assert "short" in refused["error"]["message"]
    answer = await post(service, "/memory/defragment")
    assert answer["moved"] == [{"model_name": "b", "source": second, "target": first}]
    assert (answer["refused"], answer["largest_room_mb"]) == ([], {"before": 600, "after": 900})
    await post(service, "/models/large/load")
    assert all(model.running for model in service.authority.models.values())


async def test_invalid_input_gets_the_error_envelope(start: Start) -> None:
    service = await start({"a": {}})
    for method, path, body, status, code in (
        ("POST", "/memory/evict/nope", None, 404, "model_not_found"),
        ("POST", "/memory/evict/a?action=burn", None, 400, "invalid_request"),
        ("GET", "/memory/evictions?limit=0", None, 400, "invalid_request"),
        ("GET", "/memory/evictions?limit=x", None, 400, "invalid_request"),
        ("GET", "/memory/history?minutes=-1", None, 400, "invalid_request"),
        ("GET", "/memory/history?minutes=nan", None, 400, "invalid_request"),
        ("POST", "/memory/plan", {"model": "a", "contex": 1}, 400, "invalid_request"),
        ("POST", "/memory/plan", {"model": "a", "context_length": "many"}, 400, "invalid_request"),
        ("POST", "/memory/plan", [], 400, "invalid_request"),
        ("POST", "/memory/plan", {"model": "a", "context_length": 512, "kv_cells": 500}, 400, "invalid_request"),
        ("POST", "/memory/dump", {"large_objects": -1}, 400, "invalid_request"),
        ("POST", "/memory/dump/compare", {"before": "dump-1"}, 400, "invalid_request"),
        ("POST", "/memory/dump/compare", {"before": "dump-1", "after": "dump-9"}, 404, "not_found"),
        ("GET", "/memory/nope", None, 404, "not_found"),
        ("DELETE", "/memory/stats", None, 405, "method_not_allowed"),
    ):
        answer = await ask(service.app, method, path, body)
        assert (answer.status, answer.body["error"]["code"]) == (status, code), path
        assert set(answer.body["error"]) >= {"message", "type", "param", "code"}
    answer = await ask(service.app, "POST", "/memory/plan", raw=b"{")
    assert (answer.status, answer.body["error"]["code"]) == (400, "invalid_json")
    for fields, words in (
        (
            {"fit": "contxt"},
            "fit: Input should be 'off', 'context', 'experts', 'layers' or 'auto'; did you mean 'context'?",
        ),
        ({"ubatch": 4096}, "ubatch 4096 is larger than batch 2048; make it 2048 or less"),
    ):
        answer = await ask(service.app, "POST", "/memory/plan", {"model": "a", **fields})
        assert (answer.status, answer.body["error"]["message"], answer.body["error"]["param"]) == (400, words, *fields)
