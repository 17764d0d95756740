"""Reloads of the configuration of the inference service."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from inference import settings
from inference.devices.device import Reading
from inference.errors import ModelNotFound
from inference.protocol import ModelState
from tests.rigs.authority_rig import FakeAccelerator, Start, rewrite
from tests.rigs.processes import inference_service, wait_until


def test_reload_reads_dot_env_again(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "models.yaml").write_text("models: {}")
    service = inference_service(tmp_path, tmp_path / "config").start(wait_for="/readyz")
    try:
        at_start = {"MAX_BODY_MB": "1", "WARM_CHECKPOINT": "off", "ENABLE_LAZY_MODEL_LOADING": "false"}
        lines = "".join(f"INFERENCE_{name}={value}\n" for name, value in at_start.items())
        (tmp_path / ".env").write_text(f"INFERENCE_MAX_MODELS=1\n{lines}")
        service.signal(signal.SIGHUP)
        wait_until("the change is logged", lambda: "INFERENCE_MAX_MODELS changed" in service.log)
        logged = [f"INFERENCE_{name} changed (applied at the next start)" for name in at_start]
        wait_until("the settings that need a restart are logged", lambda: all(line in service.log for line in logged))
        (tmp_path / ".env").write_text("INFERENCE_MAX_MODLES=1\n")
        service.signal(signal.SIGHUP)
        wait_until("the mistake is logged", lambda: "did you mean INFERENCE_MAX_MODELS?" in service.log)
    finally:
        service.kill()


class UnknownSize(FakeAccelerator):
    """A device without a known size."""

    def readings(self) -> tuple[Reading, ...]:
        return (Reading("cpu", "cpu", "unknown", 0, 0, 0),)


async def test_event_listeners_see_the_removal_of_a_cold_model(start: Start, tmp_path: Path) -> None:
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


async def test_limit_for_devices_of_unknown_size_is_kept_by_a_reload(start: Start, tmp_path: Path) -> None:
    authority = (await start({"a": {}}, probes=[UnknownSize()])).authority
    for environ, limit in (({}, 16 * 2**30), ({"INFERENCE_MEMORY_LIMIT_GB": "1"}, 2**30), ({}, 16 * 2**30)):
        authority.reload(settings.load(tmp_path, {"INFERENCE_FORCE_CPU_MODE": "true", **environ}, {}))
        assert authority.ledger.limit_bytes == limit


async def test_accelerators_that_were_not_looked_for_are_found_at_the_next_start(start: Start, tmp_path: Path) -> None:
    """A service that starts with INFERENCE_FORCE_CPU_MODE has no readings of accelerators."""
    authority = (await start({"a": {}})).authority
    assert authority.reload(settings.load(tmp_path, {}, {})) == [
        "INFERENCE_FORCE_CPU_MODE changed (applied at the next start)"
    ]


async def test_forced_cpu_mode_is_switched_by_a_reload(start: Start, tmp_path: Path) -> None:
    """A service that has found accelerators need not start again."""
    authority = (await start({"a": {}}, accelerator=FakeAccelerator())).authority
    for forced, device in (("true", "cpu"), ("false", "gpu-0")):
        changes = authority.reload(settings.load(tmp_path, {"INFERENCE_FORCE_CPU_MODE": forced}, {}))
        assert changes == ["INFERENCE_FORCE_CPU_MODE changed"]
        model = authority.resolve("a")
        await authority.load(model, 10)
        assert authority.status(model).devices == (device,)
        await authority.unload(model)


async def test_model_that_is_added_again_while_it_drains_stays_configured(start: Start, tmp_path: Path) -> None:
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
