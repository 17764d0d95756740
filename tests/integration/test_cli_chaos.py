"""`headgate chaos` with canned services and simulated devices: effects, refusals and undoing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headgate.cli import chaos
from headgate.cli.main import main
from headgate.shared.errors import HeadgateError
from headgate.shared.state_directory import StateDir
from inference.devices.simgpu.control import SOCKET_NAME
from inference.protocol import ModelState, ModelStatus
from inference.workers.orphans import FAMILY_ENV
from inference.workers.os_api import socket_directory
from tests.rigs.canned_http import Canned, canned_service
from tests.rigs.processes import forget_own, free_port, wait_until
from tests.rigs.sim_devices import SimDevices

MIB = 2**20
CPU = {"id": "cpu", "kind": "cpu", "name": "host"}
SIMULATED = [{"id": name, "kind": "sim", "name": "simulated GPU"} for name in ("gpu-0", "gpu-1")]
REAL = {"id": "gpu-0", "kind": "CUDA", "name": "NVIDIA H100"}
SLEEPER = "import sys, time; print('started', file=sys.stderr, flush=True); time.sleep(600)"


@pytest.fixture(autouse=True)
def private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    forget_own(monkeypatch)
    monkeypatch.setenv("HEADGATE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("INFERENCE_TOKEN", "token-of-a-test")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Starts a canned inference service with these devices and models."""
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
    """Two simulated devices in the state directory of the service."""
    serve([*SIMULATED, CPU])
    (socket_directory(StateDir(tmp_path / "state")) / SOCKET_NAME).symlink_to(devices.socket_path)
    yield devices
    devices.control.send("heal")


@contextmanager
def _sleeper(*arguments: str, environ: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", SLEEPER, *arguments]
    with subprocess.Popen(command, env={**os.environ, **environ}, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert process.stderr.readline()
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    """A process with the arguments and the environment of a worker."""
    with _sleeper("-m", "inference.worker", environ={FAMILY_ENV: "token"}) as process:
        yield process


@pytest.mark.parametrize(("devices_there", "words"), [([CPU], "this system has none"), ([REAL, CPU], "NVIDIA H100")])
def test_service_without_simulated_devices_is_refused(serve: Any, capsys: Any, devices_there: Any, words: str) -> None:
    """The message lists the accelerators and shows how to start a simulated system."""
    serve(devices_there)
    assert main(["chaos", "worker-kill"]) == 2
    errors = capsys.readouterr().err
    assert words in errors
    assert "INFERENCE_DEVICES=sim:" in errors


def test_all_faults_are_listed_without_a_service(capsys: Any) -> None:
    assert main(["chaos"]) == 0
    output = capsys.readouterr().out
    assert all(name in output for name in chaos.FAULTS)
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
def test_device_fault_stays_until_it_is_undone(
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
def test_seconds_option_undoes_only_its_own_fault(rig: SimDevices, capsys: Any, fault: str) -> None:
    other = "device-stall" if fault != "device-stall" else "device-slow"
    assert main(["chaos", other]) == 0
    before = [_faults(rig, name) for name in ("gpu-0", "gpu-1")]
    assert main(["chaos", fault, "--seconds", "0"]) == 0
    assert [_faults(rig, name) for name in ("gpu-0", "gpu-1")] == before
    assert "undone" in capsys.readouterr().err


def test_fault_is_undone_by_sigterm(rig: SimDevices, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(chaos.time, "sleep", lambda _seconds: os.kill(os.getpid(), signal.SIGTERM))
    before = _faults(rig, "gpu-0")
    with pytest.raises(SystemExit) as ended:
        main(["chaos", "device-slow", "--seconds", "60"])
    assert (ended.value.code, _faults(rig, "gpu-0")) == (128 + signal.SIGTERM, before)
    assert "undone after 0s" in capsys.readouterr().err


def _faults(rig: SimDevices, device: str) -> dict[str, Any]:
    fields = ("lost", "stalled", "slow_seconds", "refusing", "total_bytes", "foreign_bytes", "late_bytes")
    status = rig.status(device)
    return {name: status[name] for name in fields}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["device-cut", "--device", "gpu-7"], "unknown simulated device 'gpu-7'; simulated devices: gpu-0, gpu-1"),
        (["device-shrink", "--amount", "much"], "--amount much"),
        (["device-slow", "--amount", "1MiB"], "--amount 1MiB: write seconds, for example 0.5"),
        (["oom-load", "--amount", "1.5"], "--amount 1.5: write a number of allocations, for example 2"),
        (["device-cut", "--amount", "3"], "does not accept --amount"),
        (["device-return", "--seconds", "1"], "does not accept --seconds; undo: "),
        (["worker-kill"], "no model is loaded"),
    ],
)
def test_invalid_options_are_explained(rig: SimDevices, capsys: Any, words: list[str], message: str) -> None:
    assert main(["chaos", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["device-cut", "--model", "demo"], "device-cut acts on a device; it does not accept --model"),
        (["worker-kill", "--device", "gpu-0"], "worker-kill acts on a model; it does not accept --device"),
        (["inference-kill", "--model", "demo"], "inference-kill acts on a service; it does not accept --model"),
        (["worker-kill", "--amount", "3"], "worker-kill does not accept --amount"),
        (["worker-kill", "--seconds", "1"], "does not accept --seconds; undo: "),
        (["gateway-kill", "--seconds", "1"], "does not accept --seconds; undo: "),
    ],
)
def test_options_of_other_faults_are_refused_before_any_request(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, words: list[str], message: str
) -> None:
    monkeypatch.setenv("INFERENCE_PORT", "1")  # no service listens there
    assert main(["chaos", *words]) == 2
    assert message in capsys.readouterr().err


def test_undoing_without_a_simulator_fails_with_a_message(
    rig: SimDevices, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    path = socket_directory(StateDir(tmp_path / "state")) / SOCKET_NAME
    monkeypatch.setattr(chaos.time, "sleep", lambda _seconds: path.unlink())
    assert main(["chaos", "device-cut", "--device", "gpu-0", "--seconds", "1"]) == HeadgateError.exit_code
    assert "undoing device-cut on gpu-0 failed: no simulated device answers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fault", "number"),
    [("worker-kill", signal.SIGKILL), ("worker-abort", signal.SIGABRT), ("oom-compute", signal.SIGABRT)],
)
def test_worker_faults_end_the_worker_with_their_signal(
    serve: Any, worker: subprocess.Popen[bytes], capsys: Any, fault: str, number: int
) -> None:
    """oom-compute also writes CUDA's message about missing memory."""
    serve([*SIMULATED, CPU], [_status("idle", None), _status("demo", worker.pid)])
    assert main(["chaos", fault]) == 0
    _out, errors = worker.communicate(timeout=20)
    assert worker.returncode == -number
    assert (b"out of memory" in errors) == (fault == "oom-compute")
    assert f"demo (pid {worker.pid}" in capsys.readouterr().err


def test_worker_stops_and_continues(serve: Any, worker: subprocess.Popen[bytes]) -> None:
    serve([*SIMULATED, CPU], [_status("demo", worker.pid)])
    assert main(["chaos", "worker-stop", "--model", "demo"]) == 0
    wait_until("the worker is stopped", lambda: _run_state(worker.pid) == "T")
    assert main(["chaos", "worker-cont", "--model", "demo"]) == 0
    wait_until("the worker continues", lambda: _run_state(worker.pid) != "T")
    assert main(["chaos", "worker-stop", "--seconds", "0"]) == 0
    wait_until("the worker continues", lambda: _run_state(worker.pid) != "T")


@pytest.mark.parametrize(
    ("name", "words"),
    [("other", "unknown model 'other'; models: demo, idle"), ("idle", "idle is not loaded (it is cold)")],
)
def test_model_without_a_worker_is_refused(serve: Any, capsys: Any, name: str, words: str) -> None:
    serve([*SIMULATED, CPU], [_status("demo", 1), _status("idle", None)])
    assert main(["chaos", "worker-kill", "--model", name]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "environ"),
    [
        pytest.param(["sleep"], {}, id="any process"),
        pytest.param(["--cov=inference.worker.engine"], {}, id="pytest with module names"),
        pytest.param(["-c", "python -m inference.worker"], {FAMILY_ENV: "token"}, id="shell of a service"),
        pytest.param(["-m", "inference.worker"], {}, id="not started by a service"),
    ],
)
def test_processes_that_are_not_workers_are_not_signalled(
    serve: Any, capsys: Any, arguments: list[str], environ: Mapping[str, str]
) -> None:
    """The service may run on another machine, where the pid is that of another process."""
    with _sleeper(*arguments, environ=environ) as process:
        serve([*SIMULATED, CPU], [_status("demo", process.pid)])
        assert main(["chaos", "worker-stop"]) == 1
        assert main(["chaos", "worker-kill"]) == 1
        assert _run_state(process.pid) == "S"
    assert "not a worker on this machine" in capsys.readouterr().err


LISTENER = """
import socket, sys, time
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("name", ["inference", "gate"])
def test_process_with_other_arguments_is_not_taken_for_the_service(name: str) -> None:
    """An editor or a shell may have the name of the service within its arguments."""
    with (
        _listener("gateway", "/home/user/inference-notes") as (_process, port),
        pytest.raises(HeadgateError, match="cannot find the process"),
    ):
        chaos.service_pid(f"http://127.0.0.1:{port}", name)


def test_gateway_to_kill_is_found_by_its_port(serve: Any, monkeypatch: Any, capsys: Any) -> None:
    serve([*SIMULATED, CPU])
    with _listener("gateway") as (process, port):
        monkeypatch.setenv("GATEWAY_PORT", str(port))
        assert main(["chaos", "gateway-kill"]) == 0
        assert process.wait(20) == -signal.SIGKILL
    assert f"pid {process.pid}" in capsys.readouterr().err


@contextmanager
def _listener(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    with subprocess.Popen([sys.executable, "-c", LISTENER, *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def test_missing_service_is_reported() -> None:
    with pytest.raises(HeadgateError, match="cannot find the process"):
        chaos.service_pid(f"http://127.0.0.1:{free_port()}", "gateway")


def _status(name: str, pid: int | None) -> ModelStatus:
    cold = ModelStatus(id=name, state=ModelState.COLD)
    return cold if pid is None else replace(cold, state=ModelState.BUSY, devices=("gpu-0",), in_flight=1, pid=pid)


def _run_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
