"""One client's large request held up everybody else's streams, or kept a tokenizer busy for a minute."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.rigs import tiny_gguf
from tests.rigs.worker_rig import WorkerRig, grant_for

CHAT = "/v1/chat/completions"


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
def test_streams_go_on_while_a_large_request_is_read(worker: WorkerRig, path: str, body: Any, status: int) -> None:
    """The longest pause of a stream beside it is a part of the time that reading takes, not all of it."""
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
    assert min(shares) < 0.5, f"longest pause per time of reading: {shares}"


def test_a_text_full_of_control_tokens_is_tokenized_in_linear_time(worker: WorkerRig) -> None:
    """llama.cpp takes the square of their number: ten times the text took a hundred times as long."""

    def seconds(count: int) -> float:
        started = time.monotonic()
        status, said = worker.post("/tokenize", {"content": "<|im_end|>" * count})
        assert (status, said["count"]) == (200, count)
        return time.monotonic() - started

    assert seconds(100_000) < 40 * max(seconds(10_000) for _ in range(3))
