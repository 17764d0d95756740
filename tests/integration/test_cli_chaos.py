"""`headgate chaos` against canned services and real simulated devices: what it does, what it refuses, how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headgate.cli import chaos
from headgate.cli.main import main
from headgate.shared.errors import HeadgateError
from headgate.shared.state import StateDir
from inference.devices.simgpu.control import SOCKET_NAME
from inference.protocol import ModelState, ModelStatus
from inference.workers.os_api import socket_directory
from tests.rigs.canned_http import Canned, canned_service
from tests.rigs.processes import forget_own, free_port, wait_until
from tests.rigs.sim_devices import SimDevices

MIB = 2**20
CPU = {"id": "cpu", "kind": "cpu", "name": "host"}
SIMULATED = [{"id": name, "kind": "sim", "name": "simulated GPU"} for name in ("gpu-0", "gpu-1")]
REAL = {"id": "gpu-0", "kind": "CUDA", "name": "NVIDIA H100"}
SLEEPER = "import sys, time; print('inference.worker', file=sys.stderr, flush=True); time.sleep(600)"


@pytest.fixture(autouse=True)
def private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    forget_own(monkeypatch)
    monkeypatch.setenv("HEADGATE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("INFERENCE_TOKEN", "token-of-a-test")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Starts a canned inference service with these devices and models."""
    from contextlib import ExitStack

    with ExitStack() as stack:

        def start(devices: list[Mapping[str, Any]], models: list[ModelStatus] | None = None) -> None:
            service = stack.enter_context(
                canned_service(
                    {
                        "GET /devices": Canned({"devices": devices}),
                        "GET /v1/models": Canned({"data": [model.to_json() for model in models or []]}),
                    }
                )
            )
            monkeypatch.setenv("INFERENCE_PORT", service.url.rpartition(":")[2])

        yield start


@pytest.fixture(scope="module")
def devices() -> Iterator[SimDevices]:
    with SimDevices(64 * MIB, 48 * MIB) as devices:
        yield devices


@pytest.fixture
def rig(devices: SimDevices, serve: Callable[..., None], tmp_path: Path) -> Iterator[SimDevices]:
    """Two simulated devices where a service with this state directory has its own."""
    serve([*SIMULATED, CPU])
    (socket_directory(StateDir(tmp_path / "state")) / SOCKET_NAME).symlink_to(devices.socket_path)
    yield devices
    devices.control.tell("heal")


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    """A process that looks like a worker of this machine."""
    with subprocess.Popen([sys.executable, "-c", SLEEPER, "inference.worker"], stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert process.stderr.readline()
        yield process
        process.kill()


@pytest.mark.parametrize(
    ("devices_there", "words"), [([CPU], "accelerators of this one: none"), ([REAL, CPU], "NVIDIA H100")]
)
def test_real_devices_are_left_alone(serve: Any, capsys: Any, devices_there: Any, words: str) -> None:
    """Exit code 2, a sentence that says what is there, and how to start a system that may be broken."""
    serve(devices_there)
    assert main(["chaos", "worker-kill"]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "INFERENCE_DEVICES=sim:" in said


def test_without_a_fault_all_are_listed(capsys: Any) -> None:
    """Nothing is asked of any service for that."""
    assert main(["chaos"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in chaos.FAULTS)
    assert main(["chaos", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["faults"]) == len(chaos.FAULTS)


@pytest.mark.parametrize(
    ("fault", "more", "field", "during"),
    [
        ("device-cut", [], "lost", True),
        ("device-stall", [], "stalled", True),
        ("device-slow", ["--amount", "0.2"], "slow_seconds", 0.2),
        ("device-shrink", [], "total_bytes", 32 * MIB),
        ("device-shrink", ["--amount", "8MiB"], "total_bytes", 8 * MIB),
        ("device-foreign", [], "foreign_bytes", 32 * MIB),
        ("oom-load", [], "refusing", True),
        ("oom-context", ["--amount", "2"], "refusing", True),
    ],
)
def test_a_fault_of_a_device_stays_until_it_is_undone(
    rig: SimDevices, capsys: Any, fault: str, more: list[str], field: str, during: Any
) -> None:
    before = rig.status()[field]
    assert main(["chaos", fault, "--device", "gpu-0", *more]) == 0
    assert f"undo: {chaos.FAULTS[fault].undo}" in capsys.readouterr().err
    assert rig.status()[field] == during
    assert rig.status("gpu-1")[field] != during
    assert main(["chaos", "device-heal"]) == 0
    assert rig.status()[field] == before


@pytest.mark.parametrize("fault", ["device-cut", "device-stall", "device-slow", "device-shrink", "device-foreign",
                                   "device-late", "oom-load", "oom-context"])  # fmt: skip
def test_a_fault_for_some_seconds_ends_by_itself_and_ends_nothing_else(
    rig: SimDevices, capsys: Any, fault: str
) -> None:
    other = "device-stall" if fault != "device-stall" else "device-slow"
    assert main(["chaos", other]) == 0
    before = [_faults(rig, name) for name in ("gpu-0", "gpu-1")]
    assert main(["chaos", fault, "--seconds", "0"]) == 0
    assert [_faults(rig, name) for name in ("gpu-0", "gpu-1")] == before
    assert "undone" in capsys.readouterr().err


def _faults(rig: SimDevices, device: str) -> dict[str, Any]:
    told = ("lost", "stalled", "slow_seconds", "refusing", "total_bytes", "foreign_bytes", "late_bytes")
    status = rig.status(device)
    return {name: status[name] for name in told}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["device-cut", "--device", "gpu-7"], "gpu-7"),
        (["device-shrink", "--amount", "much"], "--amount much"),
        (["device-cut", "--amount", "3"], "takes no --amount"),
        (["device-return", "--seconds", "1"], "takes no --seconds, because it cannot be undone"),
        (["worker-kill"], "no model is loaded"),
    ],
)
def test_what_makes_no_sense_is_told(rig: SimDevices, capsys: Any, words: list[str], said: str) -> None:
    assert main(["chaos", *words]) != 0
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fault", "number"),
    [("worker-kill", signal.SIGKILL), ("worker-abort", signal.SIGABRT), ("oom-compute", signal.SIGABRT)],
)
def test_a_worker_ends_as_told(
    serve: Any, worker: subprocess.Popen[bytes], capsys: Any, fault: str, number: int
) -> None:
    """Its last words are those of CUDA where memory ran out, and nothing otherwise."""
    serve([*SIMULATED, CPU], [_status("idle", None), _status("demo", worker.pid)])
    assert main(["chaos", fault]) == 0
    _out, errors = worker.communicate(timeout=20)
    assert worker.returncode == -number
    assert (b"out of memory" in errors) == (fault == "oom-compute")
    assert f"demo (pid {worker.pid}" in capsys.readouterr().err


def test_a_worker_stands_still_and_goes_on(serve: Any, worker: subprocess.Popen[bytes]) -> None:
    serve([*SIMULATED, CPU], [_status("demo", worker.pid)])
    assert main(["chaos", "worker-stop", "--model", "demo"]) == 0
    wait_until("it stands still", lambda: _run_state(worker.pid) == "T")
    assert main(["chaos", "worker-cont", "--model", "demo"]) == 0
    wait_until("it goes on", lambda: _run_state(worker.pid) != "T")
    assert main(["chaos", "worker-stop", "--seconds", "0"]) == 0
    wait_until("it goes on", lambda: _run_state(worker.pid) != "T")


@pytest.mark.parametrize(
    ("name", "words"),
    [("other", "unknown model 'other'; models: demo, idle"), ("idle", "idle is not loaded (it is cold)")],
)
def test_a_model_without_a_worker_is_told(serve: Any, capsys: Any, name: str, words: str) -> None:
    serve([*SIMULATED, CPU], [_status("demo", 1), _status("idle", None)])
    assert main(["chaos", "worker-kill", "--model", name]) == 2
    assert words in capsys.readouterr().err


def test_a_process_that_is_no_worker_of_ours_is_not_touched(serve: Any, capsys: Any) -> None:
    """The service may run on another machine, where the number means another process."""
    serve([*SIMULATED, CPU], [_status("demo", os.getppid())])
    assert main(["chaos", "worker-kill"]) == 1
    assert "not a worker on this machine" in capsys.readouterr().err


LISTENER = """
import socket, sys, time
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
time.sleep(600)
"""


def test_a_service_is_killed_by_the_port_it_listens_on(serve: Any, monkeypatch: Any, capsys: Any) -> None:
    """And only if it is the one that was meant."""
    serve([*SIMULATED, CPU])
    command = [sys.executable, "-c", LISTENER, "gateway"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        try:
            with pytest.raises(HeadgateError, match="cannot find the process"):
                chaos.service_pid(f"http://127.0.0.1:{port}", "inference")
            monkeypatch.setenv("GATEWAY_PORT", str(port))
            assert main(["chaos", "gateway-kill"]) == 0
            assert process.wait(20) == -signal.SIGKILL
        finally:
            process.kill()
    assert f"pid {process.pid}" in capsys.readouterr().err


def test_a_service_that_cannot_be_found_is_told() -> None:
    with pytest.raises(HeadgateError, match="cannot find the process"):
        chaos.service_pid(f"http://127.0.0.1:{free_port()}", "gateway")


def _status(name: str, pid: int | None) -> ModelStatus:
    cold = ModelStatus(id=name, state=ModelState.COLD)
    return cold if pid is None else replace(cold, state=ModelState.BUSY, devices=("gpu-0",), in_flight=1, pid=pid)


def _run_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
