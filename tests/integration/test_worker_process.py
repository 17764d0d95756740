"""The life of a worker process: hello, load or failure, drain, stop, end with its parent."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from inference import worker_link
from tests.rigs import tiny_gguf
from tests.rigs.processes import is_alive, wait_until
from tests.rigs.worker_rig import CPU, WorkerRig, grant_for

CHAT = "/v1/chat/completions"
LONG = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 400, "ignore_eos": True}
AWHILE = LONG | {"max_tokens": 150}
"""Long enough to last some tenths of a second on a slow model."""


def modules_mapped(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def test_hello_is_sent_before_llama_cpp_is_loaded(tmp_path: Path) -> None:
    """A waiting worker uses no device; the grant starts the load, and the worker reports its buffers."""
    with WorkerRig(tmp_path) as rig:
        hello = rig.expect(worker_link.Hello)
        assert hello.pid == rig.process.pid
        assert "libllama" not in modules_mapped(hello.pid)
        rig.send(grant_for(tiny_gguf.generative()))
        assert rig.expect(worker_link.LoadProgress).fraction <= 1.0
        ready = rig.ready()
        assert {buffer.kind for buffer in ready.buffers} >= {"weights", "kv", "compute"}
        assert {buffer.device for buffer in ready.buffers} == {"cpu"}
        kv = sum(buffer.bytes for buffer in ready.buffers if buffer.kind == "kv")
        assert kv == 1024 * 4 * 2 * 2 * 32 * 2, "cells x layers x (K and V) x width x 2 bytes"
        assert ready.capabilities == ("chat", "completions")
        assert ready.context_length == 1024
        with rig.connection() as connection:
            connection.request("GET", "/livez")
            assert connection.getresponse().status == 200


def test_idle_worker_sends_heartbeats(tmp_path: Path) -> None:
    with WorkerRig(tmp_path, grant_for(tiny_gguf.generative())) as rig:
        rig.ready()
        started = time.monotonic()
        for _ in range(3):
            beat = rig.next_beat(2 * worker_link.BEAT_SECONDS + 1)
            assert (beat.step_seconds, beat.active, beat.queued) == (None, 0, 0)
        assert time.monotonic() - started < 5 * worker_link.BEAT_SECONDS


GPU7 = worker_link.DeviceGrant("gpu-0", "gpu", "CUDA7")
BROKEN: list[tuple[str, dict[str, object], str, str]] = [
    ("no file", {"path": "/nowhere/x.gguf"}, "startup", "/nowhere/x.gguf"),
    ("no gguf", {"path": __file__}, "startup", "magic"),
    ("an image projector", {"mmproj": "/x.gguf"}, "startup", "mmproj"),
    ("a cache type", {"kv_type": "q2"}, "startup", "q2"),
    ("both kinds", {"capabilities": ("chat", "embeddings")}, "startup", "one model per use"),
    ("no such device", {"devices": (GPU7,), "gpu_layers": -1}, "device_lost", "CUDA7"),
    ("a LoRA that is none", {"lora": (__file__,)}, "startup", "LoRA"),
    ("more than can be counted", {"context_length": 2**30}, "startup", "parallel"),
]


@pytest.mark.parametrize(("changes", "cause", "words"), [entry[1:] for entry in BROKEN], ids=[e[0] for e in BROKEN])
def test_failed_load_is_explained_and_ends_the_worker(
    tmp_path: Path, changes: dict[str, object], cause: str, words: str
) -> None:
    with WorkerRig(tmp_path, grant_for(tiny_gguf.generative(), **changes)) as rig:
        failed = rig.expect(worker_link.Failed)
        assert failed.cause == cause
        assert words in failed.message
        assert rig.wait() == 1


@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a running process, which Linux alone can")
def test_cache_that_cannot_be_allocated_fails_the_load(tmp_path: Path) -> None:
    """llama.cpp returns NULL; the cause is memory."""
    import resource

    model = tiny_gguf.generative(layers=4, width=256, heads_kv=4)
    with WorkerRig(tmp_path) as rig:
        rig.expect(worker_link.Hello)
        resource.prlimit(rig.process.pid, resource.RLIMIT_AS, (2**31, 2**31))
        rig.send(grant_for(model, context_length=2**20, parallel=1))  # 4 GiB of cache
        failed = rig.expect(worker_link.Failed)
        assert failed.cause == "oom_load"
        assert "failed to allocate buffer" in failed.message
        assert rig.wait() == 1


def _refused(rig: WorkerRig) -> tuple[int, dict[str, Any]] | None:
    """The refusal of a short request; None while requests are accepted. A long request would outlast the stream."""
    status, response = rig.post(CHAT, LONG | {"max_tokens": 1})
    return None if status == 200 else (status, response)


def test_drain_finishes_streams_and_refuses_new_ones(tmp_path: Path) -> None:
    """Then the process ends with status 0."""
    with WorkerRig(tmp_path, grant_for(tiny_gguf.slow())) as rig:
        rig.ready()
        frames = rig.stream(CHAT, AWHILE)
        next(frames)
        rig.process.send_signal(signal.SIGTERM)
        status, response = wait_until("the worker drains", lambda: _refused(rig))
        assert (status, response["error"]["code"]) == (503, "model_loading")
        rest = list(frames)
        assert rest[-1] == b"data: [DONE]"
        assert rig.wait() == 0


def test_sigterm_drains_and_sigint_is_ignored(tmp_path: Path) -> None:
    with WorkerRig(tmp_path, grant_for(tiny_gguf.slow())) as rig:
        rig.ready()
        frames = rig.stream(CHAT, AWHILE)
        next(frames)
        rig.process.send_signal(signal.SIGINT)
        rig.process.send_signal(signal.SIGTERM)
        assert list(frames)[-1] == b"data: [DONE]"
        assert rig.wait() == 0


def test_sigterm_before_the_grant_ends_at_once(tmp_path: Path) -> None:
    with WorkerRig(tmp_path) as rig:
        rig.expect(worker_link.Hello)
        rig.process.send_signal(signal.SIGTERM)
        assert rig.wait(2) == 0


def test_stop_ends_streams_with_an_error(tmp_path: Path) -> None:
    """An error frame without [DONE]; whole answers get a 503."""
    with WorkerRig(tmp_path, grant_for(tiny_gguf.slow())) as rig:
        rig.ready()
        frames = rig.stream(CHAT, LONG)
        next(frames)
        answers: list[int] = []
        thread = threading.Thread(target=lambda: answers.append(rig.post(CHAT, LONG)[0]))
        thread.start()
        wait_until("both requests run", lambda: rig.fresh_beat().active == 2)
        started = time.monotonic()
        rig.send(worker_link.Stop())
        rest = list(frames)
        assert json.loads(rest[-1].removeprefix(b"data: "))["error"]["code"] == "model_loading"
        thread.join(5)
        assert answers == [503]
        assert rig.wait(5) == 0
        assert time.monotonic() - started < 10


def test_worker_ends_when_its_link_closes(tmp_path: Path) -> None:
    """Even during a stream."""
    with WorkerRig(tmp_path, grant_for(tiny_gguf.slow())) as rig:
        rig.ready()
        next(rig.stream(CHAT, LONG))
        rig.ours.shutdown(2)
        assert rig.wait(2) == 1


def test_killed_worker_leaves_no_open_port(tmp_path: Path) -> None:
    """The stream breaks off and the port is closed."""
    with WorkerRig(tmp_path, grant_for(tiny_gguf.slow())) as rig:
        rig.ready()
        frames = rig.stream(CHAT, LONG)
        next(frames)
        rig.process.kill()
        with contextlib.suppress(http.client.IncompleteRead, ConnectionResetError):
            assert b"data: [DONE]" not in list(frames)
        assert rig.wait(2) == -signal.SIGKILL
        with rig.connection() as connection, pytest.raises(ConnectionRefusedError):
            connection.request("GET", "/livez")


PARENT = """
import os, socket, subprocess, sys, time
from inference import worker_link as link
listener = socket.socket(socket.AF_UNIX); listener.bind(sys.argv[1]); listener.listen()
ours, theirs = socket.socketpair()
env = {**os.environ, link.LINK_FD_ENV: str(theirs.fileno()), link.SOCKET_FD_ENV: str(listener.fileno()),
       link.PARENT_ENV: str(os.getpid())}
child = subprocess.Popen([sys.executable, "-m", "inference.worker"], env=env, process_group=0,
                         pass_fds=(theirs.fileno(), listener.fileno(), ours.fileno()))
ours.recv(10)
print(child.pid, flush=True)
time.sleep(60)
"""


def test_worker_ends_with_its_parent(tmp_path: Path) -> None:
    """Even if another process, here the worker itself, keeps the other end of the link open."""
    script = textwrap.dedent(PARENT)
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "s")], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert is_alive(worker)
        parent.kill()
        parent.wait(5)
        wait_until("the worker is gone", lambda: not is_alive(worker), seconds=5)


def test_worker_started_by_a_user_prints_a_hint() -> None:
    done = subprocess.run([sys.executable, "-m", "inference.worker"], capture_output=True, text=True, timeout=20)
    assert done.returncode == 2
    assert "started by the inference service" in done.stderr
    assert "Traceback" not in done.stderr


def test_worker_whose_parent_is_not_the_service_ends() -> None:
    """As when the service has ended before the worker checks its parent."""
    env = {**os.environ, worker_link.LINK_FD_ENV: "0", worker_link.SOCKET_FD_ENV: "1", worker_link.PARENT_ENV: "1"}
    done = subprocess.run([sys.executable, "-m", "inference.worker"], env=env, capture_output=True, timeout=20)
    assert (done.returncode, done.stderr) == (1, b""), "the worker did not start"


def test_abort_in_ggml_is_written_to_stderr() -> None:
    """An abort inside ggml writes to stderr after the log lines before it and ends the process by SIGABRT."""
    script = (
        "import sys; from inference.worker import llama\n"
        "from inference.worker.llama import ggml_library, llama_process\n"
        "tail = llama_process.LogTail(print); llama.start(tail); tail.feed(2, 'the line before\\n')\n"
        "llama.on_abort(lambda text: sys.stderr.write('\\n'.join([*tail.lines, text])))\n"
        "import ctypes; ctypes.CDLL(None); ggml_library.library().ggml_abort(b'here.c', 7, b'it broke')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20)
    assert done.returncode == -signal.SIGABRT
    assert "the line before\nhere.c:7: it broke" in done.stderr


def test_model_with_a_quantized_cache_answers(tmp_path: Path) -> None:
    model = tiny_gguf.generative(width=128, heads=2, heads_kv=1)
    with WorkerRig(tmp_path, grant_for(model, kv_type="q8_0")) as rig:
        rig.ready()
        assert rig.post(CHAT, {**LONG, "max_tokens": 5})[0] == 200


@pytest.mark.parametrize("template", [None, " \n"])
def test_model_without_a_template_has_no_chat(tmp_path: Path, template: str | None) -> None:
    with WorkerRig(tmp_path, grant_for(tiny_gguf.generative(template=template), devices=(CPU,))) as rig:
        assert rig.ready().capabilities == ("completions",)
        status, response = rig.post(CHAT, LONG)
        error = response["error"]
        assert (status, error["code"], error["param"]) == (400, "unsupported_parameter", "model")
        assert error["message"] == "model 'tiny' does not support chats; it supports /v1/completions"
        status, response = rig.post("/tokenize", {"messages": LONG["messages"]})
        assert (status, response["error"]["param"]) == (400, "messages")


def test_waiting_stream_gets_progress_comments(tmp_path: Path) -> None:
    """One sequence at a time: the second stream gets its place in the queue until it runs."""
    with WorkerRig(tmp_path, grant_for(tiny_gguf.slow(), parallel=1, context_length=4000)) as rig:
        rig.ready()
        first = rig.stream(CHAT, {**LONG, "max_tokens": 3900})
        next(first)
        second = rig.stream(CHAT, {**LONG, "max_tokens": 5})
        comment = next(second)
        assert comment == b": headgate queued 1"
        first.close()
        assert list(second)[-1] == b"data: [DONE]"


def test_request_past_its_deadline_is_504(tmp_path: Path) -> None:
    with WorkerRig(tmp_path, grant_for(tiny_gguf.slow(), parallel=1)) as rig:
        rig.ready()
        frames = rig.stream(CHAT, AWHILE)
        next(frames)
        status, response = rig.post(CHAT, LONG, {"x-headgate-deadline-ms": "1"})
        assert (status, response["error"]["code"]) == (504, "deadline_exceeded")
        assert list(frames)[-1] == b"data: [DONE]"


def test_full_queue_is_429(tmp_path: Path) -> None:
    with WorkerRig(tmp_path, grant_for(tiny_gguf.slow(), parallel=1, queue_limit=0)) as rig:
        rig.ready()
        frames = rig.stream(CHAT, AWHILE)
        next(frames)
        status, response = rig.post(CHAT, {**LONG, "stream": True})
        assert (status, response["error"]["code"]) == (429, "queue_full")
        assert list(frames)[-1] == b"data: [DONE]"
