"""Out of memory although the plan allowed it: the error, the learned head-room, and the attempts of each policy."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from headgate.shared.state_directory import StateDir
from inference.app import Service
from inference.authority.handlers.operating.startup import TICK_SECONDS
from inference.authority.handlers.running.oom_recovery import HEADROOM_CHECK_SECONDS
from inference.authority.views.inference_metrics import cooldown_seconds
from inference.errors import MemoryRefused
from inference.estimate.headroom import HALF_LIFE_SECONDS
from inference.estimate.headrooms import Headrooms
from inference.protocol import Code, ModelState
from inference.workers.hang_detection import HangTimeouts
from inference.workers.os_api import KernelOomKills
from inference.workers.worker_supervisor import Supervisor
from tests.rigs.asgi import ask
from tests.rigs.authority_rig import COMMAND, MIB, FakeEstimator, SharedDevice, Start

CUDA = "CUDA error: out of memory\n  current device: 0, in function alloc at ggml-cuda.cu:503\n"


async def begin(start: Start, spec: dict[str, Any], behavior: dict[str, Any], **environ: Any) -> Service:
    """One model `a` of 160 MiB on a GPU of 1,000 MiB."""
    device = SharedDevice()
    estimator = FakeEstimator()
    estimator.sizes["a"] = 160
    service: Service = await start({"a": spec}, {"a": behavior}, accelerator=device, estimator=estimator, **environ)
    device.service = service
    return service


async def die_computing(service: Service) -> None:
    """The model is loaded, and its worker aborts as CUDA's backend does without memory, while it is idle."""
    model = service.authority.resolve("a")
    await service.authority.load(model, 10)
    assert model.running is not None
    pid = model.running.worker.pid
    Path(f"/proc/{pid}/fd/2").write_text(CUDA)
    os.kill(pid, signal.SIGABRT)
    await service.authority.reached(lambda: model.running is None)
    assert service.crashes.of("a")[0]["cause"] == "oom_compute"
    await service.clock.advance(model.retry_at - service.authority.now)


def reserved(service: Service) -> int:
    """MiB that the planner would reserve on the GPU, from stored estimates."""
    return service.authority.resolve("a").estimates["gpu-0"].need["gpu-0"] // MIB


async def test_error_of_a_load_out_of_memory_has_numbers_and_the_next_plan_reserves_more(start: Start) -> None:
    """`memory_limit_exceeded` with the message and the memory of the device, and Retry-After; nothing stays booked."""
    service = await begin(start, {}, {"fail": "oom_load"})
    model = service.authority.resolve("a")
    with pytest.raises(MemoryRefused) as refused:
        await service.authority.load(model, 10)
    error = refused.value
    assert (error.code, error.status, error.details["cause"]) == (Code.MEMORY_LIMIT_EXCEEDED, 503, "oom_load")
    assert "ordered to fail with oom_load" in error.message
    assert "the next load plans 170.0 MiB" in error.message
    (short,) = error.details["devices"]
    assert (short["device"], short["need_bytes"]) == ("gpu-0", 170 * MIB)
    assert error.retry_after is not None
    assert 0 < error.retry_after <= 1

    await service.authority.emptied()
    await service.authority.measure(model)
    assert reserved(service) == 170
    assert model.estimates["gpu-0"].headroom_bytes == {"gpu-0": 10 * MIB}
    assert service.authority.status(model).headroom_bytes == 10 * MIB


async def test_learned_headroom_survives_a_restart_and_is_reserved_while_the_model_is_loaded(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A request that runs out of memory, also alone, gets `model_failed`; the next load reserves more."""
    service = await begin(start, {}, {"abort_answer": CUDA})
    answer = await ask(service.app, "POST", "/v1/completions", {"model": "a", "prompt": "x"})
    assert answer.status == 503
    assert answer.body["error"]["code"] == "model_failed"
    assert answer.body["error"]["headgate"]["cause"] == "oom_compute"
    await service.authority.emptied()
    monkeypatch.setenv("FAKE_WORKER", json.dumps({"a": {"buffers": 96 * MIB}}))
    await service.authority.load(service.authority.resolve("a"), 10)
    assert service.authority.ledger.balance("gpu-0").ours_bytes == 180 * MIB
    spec, (device, *_) = service.authority.resolve("a").spec, service.authority.readings()
    again = Headrooms(StateDir.from_env({"HEADGATE_STATE_DIR": str(tmp_path / "state")}))
    assert again.of(spec, device).compute_bytes == 20 * MIB
    spec.path.write_bytes(b"another file")
    assert again.of(spec, device).is_empty


async def test_model_with_decayed_headroom_is_measured_again(start: Start, tmp_path: Path) -> None:
    """Otherwise a model without requests would be refused forever because of an old shortage."""
    later = [0.0]
    state = StateDir.from_env({"HEADGATE_STATE_DIR": str(tmp_path / "state")})
    headrooms = Headrooms(state, clock=lambda: time.time() + later[0])
    service = await begin(start, {}, {}, parts={"headrooms": headrooms})
    await die_computing(service)
    model = service.authority.resolve("a")
    await service.authority.measure(model)
    assert reserved(service) == 170
    later[0] = HALF_LIFE_SECONDS
    await service.clock.advance(HEADROOM_CHECK_SECONDS)
    await service.authority.reached(lambda: "gpu-0" in model.estimates and reserved(service) == 165)


async def test_worker_killed_by_the_kernel_for_memory_is_reported(start: Start, tmp_path: Path) -> None:
    """In the message, the crash record and the head-room of the model. Other kills count for none of them."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/vmstat").write_text("oom_kill 0\n")
    state = StateDir.from_env({"HEADGATE_STATE_DIR": str(tmp_path / "state")})
    supervisor, headrooms = Supervisor(state, HangTimeouts(), command=COMMAND), Headrooms(state)
    supervisor.kills = KernelOomKills(tmp_path)
    service = await begin(start, {}, {}, parts={"supervisor": supervisor, "headrooms": headrooms})
    model = service.authority.resolve("a")
    for count in (0, 1):
        await service.authority.load(model, 10)
        assert model.running is not None
        (tmp_path / "proc/vmstat").write_text(f"oom_kill {count}\n")
        os.kill(model.running.worker.pid, signal.SIGKILL)
        await service.authority.reached(lambda: model.running is None)
    newest, before = service.crashes.of("a")
    assert (newest["cause"], before["cause"]) == ("killed", "killed")
    assert newest["message"] == "the kernel killed the worker because host memory ran out (killed)"
    assert "memory" not in before["message"]
    host = service.authority.reading("cpu")
    assert host is not None
    assert headrooms.of(model.spec, host).compute_bytes > 0


async def test_model_on_the_cpu_is_reported_and_returns_when_there_is_room(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the status and in the header of every answer; it moves when it is idle, without evictions."""
    service = await begin(start, {"oom_policy": "cpu"}, {"fail_on": {"gpu-0": "oom_load"}})
    authority, model = service.authority, service.authority.resolve("a")
    answer = await ask(service.app, "POST", "/v1/completions", {"model": "a", "prompt": "x"})
    assert (answer.status, answer.headers["x-headgate-device"]) == (200, "cpu")
    assert authority.status(model).fallback
    assert cooldown_seconds(model, authority.now) > 0
    await model.becomes(ModelState.READY)
    await service.clock.advance(TICK_SECONDS)
    assert authority.status(model).devices == ("cpu",), "the accelerator is not tried before the cooldown ends"
    monkeypatch.setenv("FAKE_WORKER", json.dumps({}))
    await service.clock.advance(cooldown_seconds(model, authority.now))
    await authority.reached(lambda: authority.status(model).devices == ("gpu-0",) and model.state is ModelState.READY)
    assert not authority.status(model).fallback
    answer = await ask(service.app, "POST", "/v1/completions", {"model": "a", "prompt": "x", "stream": True})
    assert answer.headers["x-headgate-device"] == "gpu-0"
    assert service.metrics.total(service.metrics.recoveries, kind=("accelerator",)) == 1


async def test_stream_that_waited_names_its_device_in_a_comment(start: Start) -> None:
    """Its headers were sent before the device was known."""
    service = await begin(start, {}, {"load_seconds": 2.0})
    answer = await ask(service.app, "POST", "/v1/completions", {"model": "a", "prompt": "x", "stream": True})
    assert "x-headgate-device" not in answer.headers
    assert b": headgate loading" in answer.body
    assert b": headgate device gpu-0\n\n" in answer.body
