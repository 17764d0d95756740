"""Requests made a worker grow far beyond what it had reserved: large bodies side by side, answers full of alternatives.

They stayed resident, too, because the allocator kept what one large request had used.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headgate.shared.parameters import Sampling
from inference.worker.sampling.sampling import ChainSampler
from tests.rigs import tiny_gguf
from tests.rigs.engine_rig import engine_rig
from tests.rigs.processes import wait_until
from tests.rigs.worker_rig import WorkerRig, grant_for

CHAT = "/v1/chat/completions"
ALLOWED_MIB = 120.0
"""Beyond the buffers that the worker reported: the interpreter, its libraries, and what requests take."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads a process's memory from /proc, which Linux has")


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
        return [status for status, _said in pool.map(lambda _number: rig.post(path, raw), range(count))]


def test_no_request_takes_more_than_the_worker_may_have(tmp_path: Path) -> None:
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
        # Python's own allocator keeps a part that is scattered, and how much is chance.
        wait_until(
            "what was used is given back",
            lambda: memory_mib(rig, "VmRSS") < reserved + ALLOWED_MIB * 0.75,
        )


def test_answers_that_wait_remember_no_tokens(tmp_path: Path) -> None:
    """Penalties look back over the whole answer. With a long context that is half a megabyte for each, taken when a
    request was queued; five hundred answers can wait.
    """
    with WorkerRig(tmp_path, grant_for(tiny_gguf.slow(), context_length=2**16, parallel=1)) as rig:
        rig.ready()
        body = json.dumps({**user("x"), "n": 16, "frequency_penalty": 1, "ignore_eos": True, "stream": True}).encode()
        with contextlib.ExitStack() as clients:
            before = memory_mib(rig, "VmRSS")
            for _ in range(24):
                clients.enter_context(rig.connection()).request("POST", CHAT, body)
            wait_until("they are queued", lambda: rig.fresh_beat().queued >= 24 * 16 - 1)
            assert memory_mib(rig, "VmRSS") < before + 40


def test_answers_that_go_on_remember_no_tokens_before_their_turn() -> None:
    """A hundred of them took 50 MiB, for the few tokens that penalties count of what was said before."""
    sampling = Sampling(frequency_penalty=1.0)
    with engine_rig(tiny_gguf.generative(), context_length=64, threads=1) as rig:
        before = process_mib(os.getpid(), "VmRSS")
        waiting = [ChainSampler(rig.model, rig.context, sampling, 0, 2**17) for _ in range(100)]
        for sampler in waiting:
            sampler.accept([101, 102])
        assert process_mib(os.getpid(), "VmRSS") < before + 20
        for sampler in waiting:
            sampler.close()


def test_log_probabilities_are_held_as_json_and_nothing_else() -> None:
    """An answer that is not streamed is held until it is whole; `size_bytes` is what that takes."""
    from inference.worker.answers.generation import TokenLogprob
    from inference.worker.api import logprob_writer

    held = logprob_writer.Logprobs("chat")
    item = TokenLogprob(b"a", -0.5, ((b"a", -0.5), (b"\xff", float("-inf"))) * 10, 0)
    for _ in range(1000):
        held.add([item])
    said = json.loads(held.json())
    assert len(said["content"]) == 1000
    assert said["content"][0]["top_logprobs"][1] == {"token": "\ufffd", "logprob": -9999.0, "bytes": [255]}
    assert sys.getsizeof(held.json()) < 1.1 * held.size_bytes + 200
