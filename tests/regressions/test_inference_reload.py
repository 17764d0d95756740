"""Reloads of the configuration of the inference service."""

from __future__ import annotations

import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from inference import settings
from inference.devices.device import Reading
from inference.errors import ModelNotFound
from inference.protocol import ModelState
from tests.rigs.authority_rig import FakeAccelerator, Start, reload, rewrite, services
from tests.rigs.processes import inference_service, wait_until


def test_reload_reads_dot_env_again(tmp_path: Path) -> None:
    """At the start a log line names settings without effect."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "models.yaml").write_text("models: {}")
    (tmp_path / ".env").write_text("INFERENCE_KV_POLICY=priority\n")
    service = inference_service(tmp_path, tmp_path / "config").start(wait_for="/readyz")
    try:
        wait_until(
            "it is logged", lambda: "set, and without effect in this version: INFERENCE_KV_POLICY" in service.log
        )
        (tmp_path / ".env").write_text("INFERENCE_MAX_MODELS=1\nINFERENCE_MAX_BODY_MB=1\n")
        service.signal(signal.SIGHUP)
        wait_until("the change is logged", lambda: "INFERENCE_MAX_MODELS changed" in service.log)
        assert "INFERENCE_MAX_BODY_MB changed (applied at the next start)" in service.log
        (tmp_path / ".env").write_text("INFERENCE_MAX_MODLES=1\n")
        service.signal(signal.SIGHUP)
        wait_until("the mistake is logged", lambda: "did you mean INFERENCE_MAX_MODELS?" in service.log)
    finally:
        service.kill()


class UnknownSize(FakeAccelerator):
    """A device without a known size."""

    def readings(self) -> tuple[Reading, ...]:
        return (Reading("cpu", "cpu", "unknown", 0, 0, 0),)


async def test_event_listeners_see_the_removal_of_a_cold_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with services(tmp_path, monkeypatch) as start:
        authority = (await start({"a": {}, "b": {}})).authority
        listening = authority.bus.listen()
        assert b"snapshot" in await anext(listening)
        while b'"b"' not in (frame := await anext(listening)):
            assert b"event: model" in frame
        rewrite(tmp_path, {"a": {}})
        authority.reload(settings.load(tmp_path, {"INFERENCE_FORCE_CPU_MODE": "true"}, {}))
        while b"event: removed" not in (frame := await anext(listening)):
            assert b"event: model" in frame
        data = frame.decode().partition("data: ")[2].splitlines()[0]
        assert json.loads(data)["id"] == "b"
        await listening.aclose()


async def test_limit_for_devices_of_unknown_size_is_kept_by_a_reload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with services(tmp_path, monkeypatch) as start:
        authority = (await start({"a": {}}, probes=[UnknownSize()])).authority
        for environ, limit in (({}, 16 * 2**30), ({"INFERENCE_MEMORY_LIMIT_GB": "1"}, 2**30), ({}, 16 * 2**30)):
            authority.reload(settings.load(tmp_path, {"INFERENCE_FORCE_CPU_MODE": "true", **environ}, {}))
            assert authority.ledger.limit_bytes == limit


async def test_model_that_is_added_again_while_it_drains_stays_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with services(tmp_path, monkeypatch) as start:
        service = await start({"a": {}, "b": {}})
        authority, model = service.authority, service.authority.resolve("a")
        environ = {"INFERENCE_FORCE_CPU_MODE": "true"}

        def reload(*names: str) -> list[str]:
            rewrite(tmp_path, {name: {} for name in names})
            return authority.reload(settings.load(tmp_path, environ, {}))

        lease = await authority.ask(model).wait(10)
        assert lease is not None
        assert reload("b") == ["model a removed"]
        with pytest.raises(ModelNotFound):
            authority.resolve("a")
        assert model.state is ModelState.DRAINING
        assert reload("a", "b") == ["model a added again"]
        waiting = authority.ask(authority.resolve("a"))
        lease.release(completed=True)
        assert await waiting.wait(10) is not None
        waiting.close()
        assert (authority.resolve("a").loads, list(authority.models)) == (2, ["a", "b"])
        reload("b")
        await authority.reached(lambda: list(authority.models) == ["b"])


S = ModelState


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    async with services(tmp_path, monkeypatch) as make:
        yield make


async def test_lowered_limit_drops_the_warm_model_with_the_lowest_value(start: Start, tmp_path: Path) -> None:
    """Two warm models have the same size; the new limit has room for one."""
    models: dict[str, dict[str, Any]] = {"a": {}, "b": {}}
    service = await start(models, {"a": {"buffers": 0}, "b": {"buffers": 0, "load_seconds": 0.5}})
    authority = service.authority
    for name in models:
        await authority.load(authority.resolve(name))
        await authority.offload(authority.resolve(name))
    held = authority.ledger.balance("cpu").ours_bytes
    total = authority.readings()[-1].total_bytes
    reload(service, tmp_path, models, FORCE_CPU_MODE="true", CPU_MEMORY_MAX_PERCENT=str(held * 0.75 / total))
    await authority.resolve("a").becomes(S.COLD)
    assert authority.resolve("b").state is S.WARM
    assert authority.ledger.excess("cpu") == 0


async def test_model_suspended_on_the_cpu_is_loaded_on_a_gpu_after_its_oom_policy_changes(
    start: Start, tmp_path: Path
) -> None:
    accelerator = FakeAccelerator()
    accelerator.used_bytes = 1000 * 2**20
    service = await start({"a": {"oom_policy": "cpu"}}, accelerator=accelerator)
    authority, model = service.authority, service.authority.resolve("a")
    await authority.load(model)
    assert authority.status(model).devices == ("cpu",)
    await authority.offload(model)
    assert model.state is S.WARM
    accelerator.used_bytes = 0
    reload(service, tmp_path, {"a": {"oom_policy": "fail_fast"}})
    await authority.load(model)
    assert authority.status(model).devices == ("gpu-0",)
