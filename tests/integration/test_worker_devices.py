"""A worker on a device that ggml reaches over RPC: registration, buffers, loss of the device."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from inference import worker_link
from tests.rigs import tiny_gguf
from tests.rigs.processes import free_port, wait_until
from tests.rigs.worker_rig import WorkerRig, grant_for

SERVE = """
import ctypes, sys
from inference.devices.simgpu.rpc_server import library, rpc_library
by_name = library().ggml_backend_dev_by_name
by_name.restype = ctypes.c_void_p
cpu = by_name(b"CPU")
start = rpc_library().ggml_backend_rpc_start_server
start.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p)]
start(sys.argv[1].encode(), None, 1, 1, (ctypes.c_void_p * 1)(cpu))
"""


@pytest.fixture
def endpoint() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    port = free_port()
    with subprocess.Popen(
        [sys.executable, "-c", SERVE, f"127.0.0.1:{port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:

        def listens() -> bool:
            with socket.socket() as sock:
                return sock.connect_ex(("127.0.0.1", port)) == 0

        wait_until("the device listens", listens)
        yield f"127.0.0.1:{port}", server
        server.kill()


def test_model_is_loaded_on_the_remote_device(tmp_path: Path, endpoint: tuple[str, subprocess.Popen[bytes]]) -> None:
    """Weights, cache and compute buffers are on it; the worker aborts when the device is lost."""
    address, server = endpoint
    device = worker_link.DeviceGrant("gpu-0", "gpu", rpc_endpoint=address)
    with WorkerRig(tmp_path, grant_for(tiny_gguf.generative(), devices=(device,), gpu_layers=-1)) as rig:
        ready = rig.ready()
        there = {buffer.kind: buffer.bytes for buffer in ready.buffers if buffer.device == "gpu-0"}
        assert there["weights"] > 100_000
        assert there["kv"] == 1024 * 4 * 2 * 2 * 32 * 2
        assert there["compute"] > 0
        body = {"prompt": "the water", "max_tokens": 8, "temperature": 0}
        assert rig.post("/v1/completions", body)[1]["usage"]["completion_tokens"] == 8
        server.kill()
        server.wait(10)
        with pytest.raises(OSError):
            rig.post("/v1/completions", {**body, "prompt": "something else"})
        assert rig.wait(10) == -signal.SIGABRT
        assert "Remote RPC server" in rig.log


def test_layers_can_stay_on_the_host(tmp_path: Path, endpoint: tuple[str, subprocess.Popen[bytes]]) -> None:
    """gpu_layers 0 does not use the device; 1 puts one layer there."""
    device = worker_link.DeviceGrant("gpu-0", "gpu", rpc_endpoint=endpoint[0])
    for layers, somewhere in ((0, {"cpu"}), (1, {"cpu", "gpu-0"})):
        root = tmp_path / str(layers)
        root.mkdir()
        with WorkerRig(root, grant_for(tiny_gguf.generative(), devices=(device,), gpu_layers=layers)) as rig:
            ready = rig.ready()
            assert {buffer.device for buffer in ready.buffers if buffer.kind in ("weights", "kv")} == somewhere


def test_unreachable_device_is_named(tmp_path: Path) -> None:
    device = worker_link.DeviceGrant("gpu-0", "gpu", rpc_endpoint=f"127.0.0.1:{free_port()}")
    with WorkerRig(tmp_path, grant_for(tiny_gguf.generative(), devices=(device,), gpu_layers=-1)) as rig:
        failed = rig.expect(worker_link.Failed)
        assert failed.cause == "device_lost"
        assert "127.0.0.1" in failed.message
