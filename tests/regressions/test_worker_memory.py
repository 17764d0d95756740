"""Memory and time that requests take from a worker are limited."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from inference.worker.answers.generation import TokenLogprob
from inference.worker.api import response_writer
from inference.worker.llama.llama_process import MAX_LINE_CHARS, LogTail
from tests.rigs import tiny_gguf
from tests.rigs.processes import wait_until
from tests.rigs.worker_rig import WorkerRig, grant_for

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads a process's memory from /proc, which Linux has")

CHAT = "/v1/chat/completions"
ALLOWED_MIB = 120.0
"""Beyond the buffers that the worker reports: the interpreter, its libraries, and the memory of requests."""


def memory_mib(rig: WorkerRig, name: str) -> float:
    return process_mib(rig.process.pid, name)


def process_mib(pid: int, name: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name + ":"))


def user(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def all_at_once(rig: WorkerRig, count: int, path: str, body: Any) -> list[int]:
    raw = json.dumps(body).encode()
    with ThreadPoolExecutor(count) as pool:
        return [status for status, _answer in pool.map(lambda _number: rig.post(path, raw), range(count))]


@LINUX
def test_requests_of_any_size_stay_within_the_memory_of_the_worker(tmp_path: Path) -> None:
    with WorkerRig(tmp_path, grant_for(tiny_gguf.generative(), parallel=16)) as rig:
        reserved = sum(buffer.bytes for buffer in rig.ready().buffers) / 2**20
        assert memory_mib(rig, "VmRSS") < reserved + ALLOWED_MIB * 0.6, "idle"
        floods: list[tuple[int, str, Any, int]] = [
            (16, CHAT, user("x" * 8 * 2**20), 400),
            (16, CHAT, {"messages": user("hello")["messages"] * 10_000}, 400),
            (64, CHAT, {**user("hello"), "max_tokens": 8}, 200),
            (4, CHAT, {**user("x"), "n": 16, "logprobs": True, "top_logprobs": 20, "max_tokens": 60}, 200),
            (2, "/v1/completions", {"prompt": ["a"] * 64, "n": 2, "logprobs": 20, "max_tokens": 40}, 200),
            (2, "/v1/completions", {"prompt": [1] * 1_000_000}, 400),
            (2, "/tokenize", {"content": "a b" * 2**17}, 200),
            (2, "/tokenize", {"content": "x" * 2**22}, 400),
            (2, "/detokenize", {"tokens": [1] * 1_200_000}, 400),
        ]
        for count, path, body, status in floods:
            assert all_at_once(rig, count, path, body) == [status] * count, path
            peak = memory_mib(rig, "VmHWM")
            assert peak < reserved + ALLOWED_MIB, f"{peak:.0f} MiB after {str(body)[:60]}, {reserved:.0f} reserved"
        # Python's own allocator keeps a fragmented part of varying size.
        wait_until(
            "the memory is returned",
            lambda: memory_mib(rig, "VmRSS") < reserved + ALLOWED_MIB * 0.75,
        )


@LINUX
def test_queued_answers_allocate_no_token_history(tmp_path: Path) -> None:
    """Penalties use the tokens of the whole answer: half a megabyte each with a long context, for up to 500 answers."""
    with WorkerRig(tmp_path, grant_for(tiny_gguf.slow(), context_length=2**16, parallel=1)) as rig:
        rig.ready()
        body = json.dumps({**user("x"), "n": 16, "frequency_penalty": 1, "ignore_eos": True, "stream": True}).encode()
        with contextlib.ExitStack() as clients:
            before = memory_mib(rig, "VmRSS")
            for _ in range(24):
                clients.enter_context(rig.connection()).request("POST", CHAT, body)
            wait_until("the answers are queued", lambda: rig.fresh_beat().queued >= 24 * 16 - 1)
            assert memory_mib(rig, "VmRSS") < before + 40


def test_log_probabilities_of_a_whole_answer_are_held_as_json() -> None:
    """`size_bytes` is the length of the JSON without its names and brackets."""
    held = response_writer.Logprobs("chat")
    item = TokenLogprob(b"a", -0.5, ((b"a", -0.5), (b"\xff", float("-inf"))) * 10, 0)
    for _ in range(1000):
        held.add([item])
    written = json.loads(held.json())
    assert len(written["content"]) == 1000
    assert written["content"][0]["top_logprobs"][1] == {"token": "\ufffd", "logprob": -9999.0, "bytes": [255]}
    assert 0 < len(held.json()) - held.size_bytes < 100


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerRig]:
    grant = grant_for(tiny_gguf.slow(), context_length=4000, parallel=2)
    with WorkerRig(tmp_path_factory.mktemp("worker"), grant) as rig:
        rig.ready()
        yield rig


PARTS = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 200_000}]}
LARGE: list[tuple[str, str, Any, int]] = [
    ("a prompt of 2 MB", CHAT, {"messages": [{"role": "assistant", "content": "water " * 350_000}]}, 400),
    ("a message of many parts", CHAT, PARTS, 400),
    ("millions of token ids", "/v1/completions", {"prompt": [1] * 3_000_000}, 400),
    ("a text to tokenize", "/tokenize", {"content": "mill " * 200_000}, 200),
]


@pytest.mark.parametrize(("path", "body", "status"), [entry[1:] for entry in LARGE], ids=[entry[0] for entry in LARGE])
def test_streams_continue_while_a_large_request_is_read(worker: WorkerRig, path: str, body: Any, status: int) -> None:
    """In at least one of six tries, no pause of a concurrent stream is longer than half of the time of reading."""
    arrivals: list[float] = []
    streaming, enough = threading.Event(), threading.Event()

    def read() -> None:
        ask = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True}
        while not enough.is_set():
            for _chunk in worker.stream(CHAT, ask):
                arrivals.append(time.monotonic())
                streaming.set()
                if enough.is_set():
                    return

    reader = threading.Thread(target=read)
    reader.start()
    shares = []
    try:
        assert streaming.wait(20)
        raw = json.dumps(body).encode()
        for _ in range(6):
            started = time.monotonic()
            assert worker.post(path, raw)[0] == status
            ended = time.monotonic()
            moments = [started, *(moment for moment in arrivals if started < moment < ended), ended]
            shares.append(max(b - a for a, b in itertools.pairwise(moments)) / (ended - started))
    finally:
        enough.set()
        reader.join(20)
    assert min(shares) < 0.5, f"longest pause divided by the time of reading: {shares}"


def test_text_with_many_control_tokens_is_tokenized_in_linear_time(worker: WorkerRig) -> None:
    """llama.cpp alone needs quadratic time."""

    def seconds(count: int) -> float:
        started = time.monotonic()
        status, answer = worker.post("/tokenize", {"content": "<|im_end|>" * count})
        assert (status, answer["count"]) == (200, count)
        return time.monotonic() - started

    assert seconds(100_000) < 40 * max(seconds(10_000) for _ in range(3))


WARN, CONT = 3, 5


def test_long_log_line_is_cut_before_it_is_searched() -> None:
    echoed: list[str] = []
    tail = LogTail(echoed.append)
    tail.feed(WARN, "error: unknown model architecture: '" + "llama" * 10**6 + "'\n")
    tail.feed(WARN, "CPU model buffer size = 1.00 MiB\n")
    assert [len(line) for line in tail.lines] == [MAX_LINE_CHARS, 32]
    assert len(tail.complaints()) == len(echoed[0]) == MAX_LINE_CHARS
    assert [buffer.bytes for buffer in tail.buffers({})] == [2**20]


def test_log_line_without_an_end_is_limited() -> None:
    tail = LogTail(lambda line: None)
    for _ in range(1000):
        tail.feed(CONT, "x" * 10_000)
    assert len(tail._partial) == MAX_LINE_CHARS
