"""A simulated device is a GPU for llama.cpp: loads, refusals and losses are those of a real one."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inference import worker_link
from inference.devices.simgpu.control import SimulatorError
from inference.devices.simgpu.rpc_wire import Command, request
from inference.protocol import ExitCause
from inference.workers.exit_cause import ExitEvidence, classify
from tests.rigs import tiny_gguf
from tests.rigs.processes import descendants_of, wait_until
from tests.rigs.sim_devices import SimDevices
from tests.rigs.worker_rig import WorkerRig, grant_for

pytestmark = pytest.mark.unmeasured

MIB = 2**20
SIZE = 600 * MIB
ASK = {"prompt": "the water", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def shared() -> Iterator[SimDevices]:
    with SimDevices(SIZE, SIZE) as devices:
        yield devices


@pytest.fixture
def devices(shared: SimDevices) -> Iterator[SimDevices]:
    """Healthy and empty devices."""
    shared.control.send("heal")
    wait_until("the devices are empty", lambda: is_empty(shared))
    yield shared


def is_empty(devices: SimDevices) -> bool:
    return not any(device["used_bytes"] or device["connections"] for device in devices.control.send("status").values())


def grant(devices: SimDevices, *names: str, **changes: Any) -> worker_link.Grant:
    there = tuple(devices.grant(name) for name in names or ("gpu-0",))
    return grant_for(tiny_gguf.generative(), **{"devices": there, "gpu_layers": -1, **changes})


def on(ready: worker_link.Ready, device: str) -> int:
    return sum(buffer.bytes for buffer in ready.buffers if buffer.device == device)


def test_reported_buffers_equal_the_count_of_the_device(tmp_path: Path, devices: SimDevices) -> None:
    """Within 0.02 MiB per buffer, because the log has two decimals. At the end of the worker every byte is released."""
    before = devices.status()
    with WorkerRig(tmp_path, grant(devices)) as rig:
        ready = rig.ready()
        there = devices.status()
        buffers = there["allocations"] - before["allocations"]
        assert buffers >= 3  # weights, cache, compute
        assert abs(on(ready, "gpu-0") - there["used_bytes"]) <= 0.02 * MIB * buffers
        assert devices.status("gpu-1")["used_bytes"] == 0
        assert there["free_bytes"] == SIZE - there["used_bytes"]
        assert rig.post("/v1/completions", ASK)[1]["usage"]["completion_tokens"] == 8
        assert devices.status()["used_bytes"] == there["used_bytes"]
        rig.send(worker_link.Stop())
        assert rig.wait() == 0
    wait_until("the memory is back", lambda: is_empty(devices))
    after = devices.status()
    assert after["allocations"] - before["allocations"] == after["frees"] - before["frees"]


@pytest.mark.parametrize("room_bytes", [MIB // 8, 3 * MIB // 2], ids=["weights", "cache"])
def test_load_over_capacity_fails_with_oom_load(tmp_path: Path, devices: SimDevices, room_bytes: int) -> None:
    """The worker reports oom_load and ends; nothing remains."""
    devices.send("shrink", bytes=room_bytes)
    with WorkerRig(tmp_path, grant(devices)) as rig:
        assert rig.expect(worker_link.Failed).cause == ExitCause.OOM_LOAD
        assert rig.wait() >= 0
    wait_until("the memory is back", lambda: is_empty(devices))
    assert devices.status()["refusals"] >= 1


def test_allocation_can_be_refused_on_command(tmp_path: Path, devices: SimDevices) -> None:
    """The device refuses one allocation although it has free memory: that load fails, and the next one succeeds."""
    devices.send("refuse", count=1)
    with WorkerRig(tmp_path, grant(devices)) as rig:
        assert rig.expect(worker_link.Failed).cause == ExitCause.OOM_LOAD
    assert not devices.status()["refusing"]
    again = tmp_path / "again"
    again.mkdir()
    with WorkerRig(again, grant(devices)) as rig:
        assert on(rig.ready(), "gpu-0") > 0


def test_capacity_is_shared_by_all_clients_and_foreign_processes(tmp_path: Path, devices: SimDevices) -> None:
    """A second worker gets only the memory that the first and a foreign process left."""
    with WorkerRig(tmp_path, grant(devices)) as rig:
        rig.ready()
        used = devices.status()["used_bytes"]
        there = devices.send("foreign", bytes=SIZE - used - used // 2)
        assert (there["free_bytes"], there["used_bytes"]) == (used // 2, SIZE - used // 2)
        second = tmp_path / "second"
        second.mkdir()
        with WorkerRig(second, grant(devices)) as other:
            assert other.expect(worker_link.Failed).cause == ExitCause.OOM_LOAD
        assert rig.post("/v1/completions", ASK)[0] == 200


def test_cut_device_ends_its_worker_with_device_lost(tmp_path: Path, devices: SimDevices) -> None:
    """The next step aborts the process with a text for device_lost; the returned device is empty and usable."""
    with WorkerRig(tmp_path, grant(devices)) as rig:
        rig.ready()
        there = devices.send("cut")
        assert (there["lost"], there["used_bytes"], there["connections"]) == (True, 0, 0)
        with pytest.raises((OSError, AssertionError)):
            rig.post("/v1/completions", ASK)
        status = rig.wait()
        assert status == -signal.SIGABRT
        assert classify(ExitEvidence(status, last_text=rig.log)) is ExitCause.DEVICE_LOST
    lost = tmp_path / "lost"
    lost.mkdir()
    with WorkerRig(lost, grant(devices)) as rig:
        assert rig.expect(worker_link.Failed).cause == ExitCause.DEVICE_LOST
    devices.send("return")
    back = tmp_path / "back"
    back.mkdir()
    with WorkerRig(back, grant(devices)) as rig:
        rig.ready()
        assert rig.post("/v1/completions", ASK)[0] == 200


def test_stalled_device_blocks_its_worker_and_frees_memory_when_it_is_killed(
    tmp_path: Path, devices: SimDevices
) -> None:
    """The step in the heartbeat grows without an end; SIGKILL frees the device."""
    with WorkerRig(tmp_path, grant(devices)) as rig:
        rig.ready()
        devices.send("stall")
        with rig.connection(seconds=30) as connection:
            connection.request("POST", "/v1/completions", b'{"prompt": "x"}', {"content-type": "application/json"})
            wait_until("a step hangs", lambda: (rig.next_beat().step_seconds or 0) > 0.6)
            rig.process.kill()
            rig.wait()
            wait_until("the memory is back", lambda: is_empty(devices))


def test_memory_can_be_released_late(tmp_path: Path, devices: SimDevices) -> None:
    devices.send("late")
    with WorkerRig(tmp_path, grant(devices)) as rig:
        rig.ready()
        used = devices.status()["used_bytes"]
    wait_until("the worker ended", lambda: devices.status()["connections"] == 0)
    assert devices.status()["used_bytes"] == devices.status()["late_bytes"] >= used
    assert devices.send("settle")["used_bytes"] == 0


@pytest.mark.skipif(sys.platform != "linux", reason="processes can be suspended on Linux only")
def test_suspended_worker_answers_only_after_it_is_resumed(tmp_path: Path, devices: SimDevices) -> None:
    """Its bytes are in host memory in between, and there must be room to restore them."""
    with WorkerRig(tmp_path, grant(devices)) as rig:
        rig.ready()
        first = rig.post("/v1/completions", ASK)[1]["choices"]
        pid, used = rig.process.pid, devices.status()["used_bytes"]
        there = devices.send("suspend", pid=pid)
        assert (there["used_bytes"], there["suspended_bytes"], there["free_bytes"]) == (0, used, SIZE)
        for do, other, words in (
            ("suspend", pid, "suspended on gpu-0 already"),
            ("suspend", os.getpid(), "has no memory on gpu-0"),
            ("resume", 1, "not suspended"),
        ):
            with pytest.raises(SimulatorError, match=words):
                devices.send(do, pid=other)
        with rig.connection(seconds=30) as connection:
            connection.request("POST", "/v1/completions", json.dumps(ASK), {"content-type": "application/json"})
            wait_until("a step waits", lambda: (rig.next_beat().step_seconds or 0) > 0.3)
            devices.send("shrink", bytes=used - 1)
            with pytest.raises(
                SimulatorError, match=f"needs {used} bytes of gpu-0, which has too little free memory"
            ) as refused:
                devices.send("resume", pid=pid)
            assert refused.value.by_device_state
            devices.send("heal")
            assert devices.send("resume", pid=pid)["used_bytes"] == used
            assert json.load(connection.getresponse())["choices"] == first


@pytest.mark.skipif(sys.platform != "linux", reason="processes can be suspended on Linux only")
def test_computing_worker_is_not_suspended(tmp_path: Path, devices: SimDevices) -> None:
    """A stalled device refuses the command, and the worker continues when the device does."""
    with WorkerRig(tmp_path, grant(devices)) as rig:
        rig.ready()
        devices.send("stall")
        with pytest.raises(SimulatorError, match="is using gpu-0"):
            devices.send("suspend", pid=rig.process.pid)
        devices.send("heal")
        assert rig.post("/v1/completions", ASK)[0] == 200
        devices.send("suspend", pid=rig.process.pid)
        rig.process.kill()
        wait_until("all memory is released", lambda: is_empty(devices) and not devices.status()["suspended_bytes"])


def test_model_on_two_devices_is_counted_on_each(tmp_path: Path, devices: SimDevices) -> None:
    """Buffers are assigned to the right device, although ggml numbers remote devices in two ways."""
    with WorkerRig(tmp_path, grant(devices, "gpu-1", "gpu-0", tensor_split=(0.5, 0.5))) as rig:
        ready = rig.ready()
        for name in ("gpu-0", "gpu-1"):
            used = devices.status(name)["used_bytes"]
            assert used > 0
            assert abs(on(ready, name) - used) <= 0.2 * MIB
        assert rig.post("/v1/completions", ASK)[0] == 200


def test_servers_end_with_the_simulator(tmp_path: Path) -> None:
    """Closing its stdin or killing it: no ggml server survives."""
    for how in ("let go", "killed"):
        with SimDevices(SIZE) as devices:
            wait_until("the spare server starts", lambda: descendants_of(devices.process.pid))
            mine = descendants_of(devices.process.pid)
            if how == "killed":
                devices.process.kill()
            else:
                assert devices.process.stdin is not None
                devices.process.stdin.close()
                devices.process.stdin = None
            devices.process.wait(10)
            wait_until("its servers are gone", lambda: not any(Path(f"/proc/{pid}").exists() for pid in mine))  # noqa: B023


def test_connection_with_queries_only_uses_the_spare_server(devices: SimDevices) -> None:
    """llama.cpp connects several times before it allocates: the same server answers each time."""
    address = devices.status()["endpoint"].rsplit(":", 1)
    for _ in range(5):
        before = set(descendants_of(devices.process.pid))
        with socket.create_connection((address[0], int(address[1])), timeout=20) as client:
            client.sendall(request(Command.HELLO, bytes(24)))
            assert client.recv(36, socket.MSG_WAITALL)[:8] == (28).to_bytes(8, "little")
        wait_until("the connection ended", lambda: devices.status()["connections"] == 0)
        assert before <= set(descendants_of(devices.process.pid))
