"""Workers that fail, grow or end: their memory, their messages and their environment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import orjson
import pytest

from headgate.shared.asgi import Response
from headgate.shared.hop import BrokenError
from headgate.shared.sse import SseSplitter
from inference import worker_link
from inference.api.relay import Flow
from inference.authority.effects import Checkpoint, StopWorker
from inference.authority.events import CrashReported
from inference.authority.quarantine import MAX_IN_A_ROW, Crash
from inference.authority.runners.worker_runner import WorkerRunner
from inference.authority.state import Timing
from inference.errors import ModelFailed
from inference.protocol import ExitCause, ModelState
from inference.workers.child_environment import child_environment
from inference.workers.exit_cause import most_telling_line
from inference.workers.helper_client import run_helper
from inference.workers.os_api import private_bytes
from tests.rigs.asgi import ask
from tests.rigs.authority_rig import MIB, FakeAccelerator, Start, empty, services


async def test_worker_that_outgrows_its_reservation_reserves_more_or_is_unloaded(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Two workers grow from 100 MiB to over 400 MiB with a limit of 614 MiB: one may grow, the other is unloaded.

    At least 319 MiB are booked for a worker in the end: 64 MiB and a tenth may be missing.
    """
    caplog.set_level("INFO")
    service = await start(
        {"small": {}, "a": {}, "b": {}},
        {name: {"grow": 400 * MIB} for name in "ab"},
        parts={"timing": Timing(watch_seconds=0.1)},
        MEMORY_LIMIT_GB="0.6",
    )
    authority = service.authority
    small, a, b = (authority.resolve(name) for name in ("small", "a", "b"))
    await authority.load(small)
    await authority.load(a)
    await authority.reached(lambda: authority.ledger.owned_by("a")["cpu"] > 310 * MIB)
    assert a.running is not None
    seen = private_bytes(a.running.worker.pid)
    if seen is None:
        pytest.skip("reads a process's memory from /proc, which Linux has")
    assert authority.ledger.owned_by("a")["cpu"] <= seen + MIB
    assert "the worker of a uses" in caplog.text
    assert authority.ledger.owned_by("small")["cpu"] == 100 * MIB, "a worker within its reservation is unchanged"
    await authority.unload(small)
    lease = await authority.ask(b).wait(10)
    assert lease is not None
    await b.becomes(ModelState.DRAINING)
    assert a.state is ModelState.READY
    lease.release(completed=True)
    await b.becomes(ModelState.COLD)
    assert not authority.ledger.owned_by("b")
    await authority.unload(a)
    await authority.emptied()


def test_private_memory_of_an_ended_process_is_unknown() -> None:
    assert private_bytes(2**22 + 1) is None


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Lets this process open `count` more descriptors; those below the highest open one are used first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("count", [0, 2, 4])
async def test_load_without_descriptors_fails_and_releases_its_reservation(start: Start, count: int) -> None:
    service = await start({"a": {}})
    authority, model = service.authority, service.authority.resolve("a")
    await authority.measure(model)
    before = len(os.listdir("/dev/fd"))
    with descriptors_left(count), pytest.raises(ModelFailed, match="cannot start a worker"):
        await authority.load(model)
    assert len(os.listdir("/dev/fd")) == before
    assert empty(service)
    await model.becomes(ModelState.COLD)
    await authority.load(model)


async def test_model_is_unloaded_if_file_descriptors_for_its_offload_are_missing(start: Start) -> None:
    service = await start({"a": {"idle_timeout": 60}}, accelerator=FakeAccelerator())
    authority, model = service.authority, service.authority.resolve("a")
    await authority.load(model)
    await service.clock.advance(59)
    with descriptors_left(1):
        await service.clock.advance(2)
    await authority.reached(lambda: model.state is ModelState.COLD and empty(service))


async def test_booking_of_an_ended_worker_is_released_although_its_device_cannot_be_read(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = FakeAccelerator()
    service = await start({"a": {}}, accelerator=accelerator, parts={"timing": Timing(return_seconds=0.6)})
    authority, model = service.authority, service.authority.resolve("a")
    await authority.load(model)
    accelerator.failure = OSError("no such device")
    await authority.unload(model)
    assert model.state is ModelState.COLD
    await authority.emptied(seconds=10)
    assert "; the rest counts as foreign" in caplog.text
    assert caplog.text.count("no such device") == 1, "repeated failures are logged once"
    accelerator.failure = None
    await authority.load(model)
    await authority.unload(model)
    await authority.emptied(seconds=10)
    assert authority.ledger.accounts["gpu-0"].foreign_bytes == 0


LOADED = "02:21:09.355 info    headgate.worker loaded model=demo seconds=1.11 stored_tokens=0"


def test_normal_log_line_is_not_the_reason_of_an_exit() -> None:
    assert most_telling_line(["sched_reserve: graph: nodes = 204", LOADED]) == "sched_reserve: graph: nodes = 204"
    assert most_telling_line([LOADED, ""]) == ""


def test_error_log_line_is_the_reason_of_an_exit() -> None:
    complaint = "02:21:10.000 error   headgate.worker the device does not answer"
    assert most_telling_line([complaint, LOADED]) == complaint


@pytest.mark.parametrize(
    "message",
    [
        {"tag": "ready", "buffers": 7},
        {"tag": "ready", "buffers": [7]},
        {"tag": "grant", "devices": [{"id": "gpu-0", "unknown": 1}]},
        {"tag": ["ready"]},
        {"tag": "beat", "unknown": 1},
        ["ready"],
    ],
    ids=["buffers", "buffer", "device", "tag", "field", "array"],
)
def test_invalid_worker_message_raises_value_error(message: object) -> None:
    with pytest.raises(ValueError, match="not a "):
        worker_link.decode(json.dumps(message).encode())


SECRETS = {
    "INFERENCE_TOKEN": "a",
    "GATEWAY_API_KEY": "b",
    "GATEWAY_ADMIN_KEY": "c",
    "GEMINI_API_KEY": "d",
    "hf_token": "e",
    "AWS_SECRET_ACCESS_KEY": "f",
    "PGPASSWORD": "g",
    "DB_PASSWORD": "h",
    "DATABASE_URL": "postgres://me:word@host/db",
    "HTTPS_PROXY": "http://me:word@proxy:3128",
    "CLIENT_SECRET_2": "i",
}
HARMLESS = {
    "PATH": "/bin",
    "HOME": "/root",
    "PWD": "/srv",
    "CUDA_VISIBLE_DEVICES": "GPU-1",
    "TOKENIZERS_PARALLELISM": "false",
    "LD_LIBRARY_PATH": "/usr/local/cuda/lib64",
    "KEYBOARD": "us",
    "NO_PROXY": "localhost",
}


def test_child_environment_has_no_secrets_and_keeps_other_variables() -> None:
    found = child_environment({"X": "1"}, {**SECRETS, **HARMLESS})
    assert not set(SECRETS) & set(found)
    assert found.items() >= HARMLESS.items()
    assert found["X"] == "1"


def test_numpy_starts_no_threads_unless_the_operator_wants_some() -> None:
    """OpenBLAS starts its threads when numpy is imported."""
    count = "import numpy, os; print(len(os.listdir('/proc/self/task')))"

    def threads(environ: dict[str, str]) -> int:
        done = subprocess.run(
            [sys.executable, "-c", count], env=child_environment({}, environ), capture_output=True, check=True
        )
        return int(done.stdout)

    if not Path("/proc/self/task").exists():
        pytest.skip("lists the threads of a process in /proc, which Linux has")
    assert threads({}) == 1
    if len(os.sched_getaffinity(0)) > 1:
        assert threads({"OPENBLAS_NUM_THREADS": "2"}) == 2


def test_tunables_of_the_operator_come_after_those_of_the_service() -> None:
    own = child_environment({}, {})["GLIBC_TUNABLES"]
    assert (
        child_environment({}, {"GLIBC_TUNABLES": "glibc.malloc.check=1"})["GLIBC_TUNABLES"]
        == f"{own}:glibc.malloc.check=1"
    )


async def test_environments_of_workers_and_helpers_have_no_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    async with services(tmp_path, monkeypatch) as start:
        service = await start({"a": {}})
        model = service.authority.resolve("a")
        await service.authority.load(model)
        assert model.running is not None
        seen = Path(f"/proc/{model.running.worker.pid}/environ")
        if not seen.exists():
            pytest.skip("reads a process's environment from /proc, which Linux has")
        names = {entry.partition(b"=")[0].decode() for entry in seen.read_bytes().split(b"\0")}
    assert "HEADGATE_WORKER_PARENT" in names
    assert not set(SECRETS) & names
    assert "devices" in await run_helper("devices", {}, seconds=30, environment={"CUDA_VISIBLE_DEVICES": ""})
    assert set(SECRETS) <= set(os.environ)


WHOLE = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'


class DyingAnswer:
    """An answer that ends with an error after `piece`."""

    def __init__(self, piece: bytes) -> None:
        self._piece = piece

    def listen(self, on_piece: Callable[[bytes], None], on_end: Callable[[BrokenError | None], None]) -> None:
        on_piece(self._piece)
        on_end(BrokenError("the connection was closed"))

    def pause(self) -> None:
        """Nothing more is delivered."""


@pytest.mark.parametrize("cut", [0, 1, 2, 20, len(WHOLE) - 6])
def test_error_after_a_partial_frame_is_a_separate_frame(cut: int) -> None:
    sent = b""

    async def send(message: object) -> None:
        nonlocal sent
        sent += dict(message).get("body", b"")  # type: ignore[call-overload]

    async def broken() -> None:
        out = Response(send, "req-1")
        await out.begin(200, [])
        with pytest.raises(BrokenError):
            await Flow(DyingAnswer((WHOLE * 2)[: len(WHOLE) * 2 - cut]), out).run()  # type: ignore[arg-type]
        await out.fail(ModelFailed("the worker died"))

    asyncio.run(broken())
    first, *between, last = (frame.data for frame in SseSplitter().feed(sent))
    assert first == WHOLE[6:-2]
    assert len(between) <= 1
    assert orjson.loads(last or b"")["error"]["message"] == "the worker died"


CHAT = "/v1/chat/completions"
ROW = tuple(f"{number:016x}" for number in range(MAX_IN_A_ROW))
ALONE = Crash(ExitCause.ASSERT, "it aborted", alone=True)


async def test_only_computed_answers_clear_the_requests_confirmed_in_a_row(start: Start) -> None:
    """Tokenizing and refused requests do not clear them."""
    service = await start({"a": {}})
    model = service.authority.resolve("a")
    await service.authority.load(model)
    for key in ROW:
        for _ in range(2):
            service.authority.dispatch(CrashReported("a", key, ALONE))
    body = {"model": "a", "messages": [{"role": "user", "content": "Hello!"}]}
    for path, more, status in (("/tokenize", {}, 200), (CHAT, {"max_tokens": -1}, 400)):
        assert (await ask(service.app, "POST", path, {**body, **more})).status == status
        assert model.quarantine.in_a_row == ROW
        assert not model.in_flight
    assert (await ask(service.app, "POST", CHAT, body)).status == 200
    assert model.quarantine.in_a_row == ()


def test_worker_that_is_stopped_right_after_a_suspension_began_is_killed() -> None:
    """A suspended process cannot read the message to stop."""
    calls: list[str] = []

    class Process:
        def note_suspending(self) -> None:
            calls.append("suspend")

        def stop(self) -> None:
            calls.append("stop")

    none: Any = None
    runner = WorkerRunner(none, none, none, on_ready=none, on_exit=none)
    runner.processes["a#1"] = cast("Any", Process())
    for effect in Checkpoint("suspend", "a#1", "cuda", "gpu-0", 1, 1.0), StopWorker("a#1"):
        if (work := runner.performers[type(effect)](effect)) is not None:
            work.close()
    assert calls == ["suspend", "stop"]
