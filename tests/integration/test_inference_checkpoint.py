"""Checkpoints with a stub of the driver: a suspended model is restored, or becomes cold, exactly once."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from inference.app import Service
from inference.authority.events import SuspensionTested
from inference.authority.lifecycle import Action
from inference.devices.checkpoint_support import DriverSuspender
from inference.protocol import ModelState
from inference.workers.helper_client import run_helper
from tests.rigs.authority_rig import MIB, FakeAccelerator, Start
from tests.rigs.cuda_stub import CudaStub
from tests.rigs.live_authority import LiveModel as Model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="checkpoints are Linux's")
S = ModelState
SUSPENDS = ("cuInit", "cuCheckpointProcessLock", "cuCheckpointProcessCheckpoint", "cuCheckpointProcessGetState")
RESUMES = ("cuInit", "cuCheckpointProcessRestore", "cuCheckpointProcessUnlock", "cuCheckpointProcessGetState")


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CudaStub:
    stub = CudaStub(tmp_path / "cuda")
    for name, value in stub.env.items():
        monkeypatch.setenv(name, value)
    return stub


async def ready(start: Start, models: Sequence[str] = ("a",), **more: Any) -> tuple[Service, Model]:
    """A service with checkpoint support, and its first model, loaded on the device."""
    more.setdefault("accelerator", FakeAccelerator())
    service: Service = await start({name: {} for name in models}, **more)
    await service.authority.reached(lambda: "cuda" in service.authority.state.devices.suspension)
    proven(service)
    return service, await use(service, models[0])


def proven(service: Service) -> None:
    """As if its test had succeeded."""
    service.authority.dispatch(SuspensionTested("cuda", None))


def obstacle(service: Service) -> str | None:
    return service.authority.state.devices.suspension.get("cuda", "not tested")


async def use(service: Service, name: str = "a") -> Model:
    model = service.authority.resolve(name)
    lease = await service.authority.ask(model).wait(20)
    assert lease is not None
    lease.release(completed=True)
    return model


def booked(service: Service) -> tuple[int, int]:
    """Ours on the device and on the host, MiB."""
    ledger = service.authority.ledger
    return ledger.balance("gpu-0").ours_bytes // MIB, ledger.balance("cpu").ours_bytes // MIB


async def test_suspended_model_uses_only_host_memory_and_is_restored_exactly(start: Start, driver: CudaStub) -> None:
    """The same process; silent longer than any worker may be, it is not called hung."""
    service: Service = await start(
        {"a": {}}, accelerator=FakeAccelerator(), WARM_CHECKPOINT="auto", WORKER_SILENCE_SECONDS="1.5"
    )
    await service.authority.reached(lambda: obstacle(service) is None, seconds=30)
    model = await use(service)
    assert model.running is not None
    pid = model.running.worker.pid
    await service.authority.offload(model)
    assert model.state is S.WARM
    assert driver.state(pid) == 2
    await service.authority.reached(lambda: booked(service) == (0, 100))
    (kept,) = service.authority.offloaded()
    assert (kept["mechanism"], kept["original_device"], kept["bytes"]) == ("checkpoint", "gpu-0", 100 * MIB)
    assert service.authority.state.evictions[-1].action is Action.OFFLOAD
    ticks = service.authority.now + 2.5
    await service.authority.reached(lambda: service.authority.now > ticks)
    assert model.state is S.WARM
    await use(service)
    assert model.running.worker.pid == pid
    assert (driver.state(pid), booked(service), model.loads) == (0, (100, 0), 1)
    assert service.authority.state.restorations == 1
    await service.authority.offload(model)
    assert model.state is S.WARM


@pytest.mark.parametrize(
    ("way", "how", "call"),
    [
        *(("suspend", "error", call) for call in SUSPENDS),
        *(("suspend", "hang", call) for call in SUSPENDS[1:3]),
        *(("resume", "error", call) for call in RESUMES),
        *(("resume", "hang", call) for call in RESUMES[1:3]),
    ],
)
async def test_failed_driver_call_is_named(driver: CudaStub, way: str, call: str, how: str) -> None:
    suspender, process = DriverSuspender(), await asyncio.create_subprocess_exec("sleep", "60")
    if way == "resume":
        assert await suspender.run("suspend", "gpu-0", process.pid, 10) is None
    driver.set_faults(f"{how} {call} 999")
    failure = await suspender.run(way, "gpu-0", process.pid, 0.5 if how == "hang" else 10)
    process.kill()
    await process.wait()
    assert failure is not None
    assert call in failure.why


async def test_model_whose_suspension_fails_is_cold(start: Start, driver: CudaStub) -> None:
    """The process is killed, and the model is loaded from its file when it is wanted."""
    service, model = await ready(start)
    assert model.running is not None
    pid = model.running.worker.pid
    driver.set_faults("error cuCheckpointProcessCheckpoint 999")
    await service.authority.offload(model)
    await model.becomes(S.COLD)
    await service.authority.emptied()
    await use(service)
    assert model.loads == 2
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("error cuInit 999", "CUDA_ERROR_UNKNOWN (999)"),
        ("error cuCheckpointProcessLock 800", "CUDA_ERROR_NOT_PERMITTED (800)"),
        ("error cuCheckpointProcessUnlock 4242", "cuCheckpointProcessUnlock failed with CUresult 4242"),
        ("error cuMemAlloc_v2 1", "cuMemAlloc_v2 failed with CUDA_ERROR_INVALID_VALUE (1)"),
        ("hang cuCheckpointProcessRestore", "cuCheckpointProcessRestore did not return within 0.5 s"),
        ("corrupt", "its bytes changed"),
        ("version 12040", "older than 570"),
    ],
)
async def test_failed_check_at_start_has_a_reason(driver: CudaStub, fault: str, reason: str) -> None:
    """A sentence with the driver's own name for what happened."""
    driver.set_faults(fault)
    job = {"operation": "test", "seconds": 0.5 if "hang" in fault else 10}
    answer = await run_helper("checkpoint", job, seconds=30)
    assert reason in answer["error"]


async def test_models_are_kept_in_host_memory_without_a_driver(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """One line says why."""
    (tmp_path / "libcuda.so.1").write_bytes(b"no library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    service: Service = await start({"a": {}}, accelerator=FakeAccelerator(), WARM_CHECKPOINT="auto")
    await service.authority.reached(lambda: "libcuda" in str(obstacle(service)), seconds=30)
    assert "cannot open libcuda.so.1" in caplog.text
    model = await use(service)
    await service.authority.offload(model)
    assert service.authority.offloaded()[0]["mechanism"] == "resident"
