"""`chaos device-cut --model M` cut every device, and `worker-kill --seconds 5` killed first and complained then."""

from __future__ import annotations

from typing import Any

import pytest

from headgate.cli import chaos
from headgate.cli.main import main
from headgate.shared.errors import HeadgateError
from headgate.shared.state import StateDir
from inference.devices.simgpu.control import SOCKET_NAME
from inference.workers.os_api import socket_directory
from tests.rigs.canned_http import Canned, canned_service
from tests.rigs.sim_devices import SimDevices


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["device-cut", "--model", "demo"], "device-cut acts on a device; it takes no --model"),
        (["worker-kill", "--device", "gpu-0"], "worker-kill acts on a model; it takes no --device"),
        (["inference-kill", "--model", "demo"], "inference-kill acts on a service; it takes no --model"),
        (["worker-kill", "--amount", "3"], "worker-kill takes no --amount"),
        (["worker-kill", "--seconds", "1"], "takes no --seconds, because it cannot be undone"),
        (["gateway-kill", "--seconds", "1"], "takes no --seconds, because it cannot be undone"),
    ],
)
def test_what_does_not_apply_is_refused_before_anything_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: Any, words: list[str], said: str
) -> None:
    """No service runs here: a command that had gone further would have said so."""
    monkeypatch.setenv("HEADGATE_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("INFERENCE_PORT", "1")
    assert main(["chaos", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_simulator_that_ends_before_the_undoing_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: Any
) -> None:
    """And an unknown device is a mistake of the caller's, as an unknown model is."""
    monkeypatch.setenv("HEADGATE_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("INFERENCE_TOKEN", "token-of-a-test")
    devices = {"devices": [{"id": "gpu-0", "kind": "sim", "name": "simulated GPU"}]}
    with SimDevices(64 * 2**20) as rig, canned_service({"GET /devices": Canned(devices)}) as service:
        monkeypatch.setenv("INFERENCE_PORT", service.url.rpartition(":")[2])
        path = socket_directory(StateDir(tmp_path)) / SOCKET_NAME
        path.symlink_to(rig.socket_path)
        assert main(["chaos", "device-cut", "--device", "gpu-7"]) == 2
        assert "unknown simulated device 'gpu-7'; simulated devices: gpu-0" in capsys.readouterr().err
        with monkeypatch.context() as patched:
            patched.setattr(chaos.time, "sleep", lambda _seconds: path.unlink())
            assert main(["chaos", "device-cut", "--seconds", "1"]) == HeadgateError.exit_code
    assert "undoing device-cut on gpu-0 failed: no simulated device answers" in capsys.readouterr().err
