"""The link between supervisor and worker, for the fake and the real worker process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from headgate.shared.state_directory import StateDir
from inference.protocol import ExitCause
from inference.worker_link import DeviceGrant, Grant
from inference.workers.hang_detection import HangTimeouts
from inference.workers.worker_process import WorkerGone, WorkerProcess
from inference.workers.worker_supervisor import WORKER_COMMAND, Supervisor
from tests.rigs import tiny_gguf
from tests.rigs.processes import is_alive

pytestmark = pytest.mark.unmeasured

FAKE = (sys.executable, "-m", "tests.rigs.fake_worker")
COMMANDS = {"fake": FAKE, "real": WORKER_COMMAND}


@pytest.fixture(params=["fake", "real"])
async def supervisor(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(_state(tmp_path), HangTimeouts(), command=COMMANDS[request.param])
    yield supervisor
    await supervisor.close()
    assert not list(tmp_path.rglob("*.sock"))


def _state(tmp_path: Path) -> StateDir:
    return StateDir.from_env({"HEADGATE_STATE_DIR": str(tmp_path / "state")})


def _grant(path: Path | None = None) -> Grant:
    return Grant(
        "tiny",
        str(path or tiny_gguf.generative()),
        (DeviceGrant("cpu", "cpu"),),
        gpu_layers=0,
        context_length=256,
        reserved_bytes={"cpu": 2**27},
    )


async def _ready(supervisor: Supervisor) -> WorkerProcess:
    worker = supervisor.spawn("tiny", {}, lambda: None)
    async with asyncio.timeout(60):
        await worker.hello
        worker.grant(_grant())
        await worker.ready
    return worker


async def test_worker_sends_hello_loads_and_answers_on_its_socket(supervisor: Supervisor) -> None:
    worker = await _ready(supervisor)
    ready = worker.ready.result()
    assert ready.context_length == 256
    assert "chat" in ready.capabilities
    assert ready.buffers
    assert worker.progress == 1.0
    connector = aiohttp.UnixConnector(str(worker.socket_path))
    async with aiohttp.ClientSession("http://worker", connector=connector) as session:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, "stream": True}
        async with session.post("/v1/chat/completions", json=body) as answer:
            assert answer.status == 200
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")


async def test_idle_worker_sends_heartbeats(supervisor: Supervisor) -> None:
    worker = await _ready(supervisor)
    async with asyncio.timeout(5):
        while worker.beat is None:
            await asyncio.sleep(0.05)


async def test_stopped_worker_ends_as_requested_and_leaves_no_socket(supervisor: Supervisor) -> None:
    worker = await _ready(supervisor)
    worker.stop()
    async with asyncio.timeout(10):
        exit = await worker.exited
    assert exit.cause is ExitCause.REQUESTED
    assert not worker.socket_path.exists()
    assert not is_alive(worker.pid)


async def test_exit_of_a_killed_worker_is_noticed_at_once(supervisor: Supervisor) -> None:
    worker = await _ready(supervisor)
    began = asyncio.get_running_loop().time()
    os.kill(worker.pid, signal.SIGKILL)
    async with asyncio.timeout(5):
        exit = await worker.exited
    assert asyncio.get_running_loop().time() - began < 0.2
    assert (exit.cause, exit.status, exit.was_ready) == (ExitCause.KILLED, -signal.SIGKILL, True)


async def test_worker_stopped_before_its_grant_ends(supervisor: Supervisor) -> None:
    worker = supervisor.spawn("tiny", {}, lambda: None)
    async with asyncio.timeout(60):
        await worker.hello
        worker.stop()
        exit = await worker.exited
    assert exit.cause is ExitCause.REQUESTED
    with pytest.raises(WorkerGone):
        await worker.ready


# --- misbehavior: only the fake can do that ---------------------------------------------------------------------------
async def _misbehaving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timeouts: HangTimeouts | None = None, /, **how: object
) -> WorkerProcess:
    monkeypatch.setenv("FAKE_WORKER", json.dumps({"tiny": how, "*": how}))
    supervisor = Supervisor(_state(tmp_path), timeouts or HangTimeouts(), command=FAKE)
    worker = supervisor.spawn("tiny", {}, lambda: None)
    worker.hello.add_done_callback(lambda hello: None if hello.exception() else worker.grant(_grant()))
    return worker


async def test_reported_load_failure_keeps_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = await _misbehaving(tmp_path, monkeypatch, fail="oom_load")
    exit = await asyncio.wait_for(worker.exited, 20)
    assert exit.cause is ExitCause.OOM_LOAD
    assert "ordered to fail" in exit.message


async def test_abort_is_classified_by_its_last_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = await _misbehaving(tmp_path, monkeypatch, abort="CUDA error: uncorrectable ECC error encountered")
    exit = await asyncio.wait_for(worker.exited, 20)
    assert exit.cause is ExitCause.DEVICE_LOST
    assert exit.last_lines[-1] == "CUDA error: uncorrectable ECC error encountered"


async def test_exit_before_hello_is_a_startup_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = await _misbehaving(tmp_path, monkeypatch, exit=3)
    exit = await asyncio.wait_for(worker.exited, 20)
    assert (exit.cause, exit.status) == (ExitCause.STARTUP, 3)


async def test_worker_without_heartbeats_is_killed_as_hung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = await _misbehaving(tmp_path, monkeypatch, HangTimeouts(silence_seconds=1.0), silent_after=0.5)
    exit = await asyncio.wait_for(worker.exited, 30)
    assert exit.cause is ExitCause.HANG
    assert "silent" in exit.message


async def test_step_beyond_its_time_limit_is_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts = HangTimeouts(step_seconds=1.0, step_seconds_per_token=0.5)
    worker = await _misbehaving(tmp_path, monkeypatch, timeouts, step_seconds=2.0)
    exit = await asyncio.wait_for(worker.exited, 30)
    assert exit.cause is ExitCause.HANG
    assert "a step of 1 tokens" in exit.message


async def test_worker_that_ignores_stop_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference.workers.worker_process.STOP_SECONDS", 0.3)
    worker = await _misbehaving(tmp_path, monkeypatch, ignore_stop=True)
    await asyncio.wait_for(worker.ready, 20)
    worker.stop()
    exit = await asyncio.wait_for(worker.exited, 10)
    assert (exit.cause, exit.status) == (ExitCause.REQUESTED, -signal.SIGKILL)


async def test_sockets_work_with_a_long_state_directory(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 90) / ("e" * 60)
    supervisor = Supervisor(StateDir.from_env({"HEADGATE_STATE_DIR": str(deep)}), HangTimeouts(), command=FAKE)
    worker = await _ready(supervisor)
    assert len(os.fsencode(worker.socket_path)) < 104
    await supervisor.close()
    assert not worker.socket_path.parent.exists()
