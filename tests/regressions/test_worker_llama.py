"""Behaviour of the worker on top of llama.cpp: contexts, vocabularies, threads, locks."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference import worker_link
from inference.worker import llama
from inference.worker.backend import Decode
from inference.worker.llama import context as room
from inference.worker.llama.binding import lib
from inference.worker.steps import Row
from tests.fuzz.test_damaged_headers import CORPUS
from tests.rigs import tiny_bert, tiny_gguf
from tests.rigs.engine_rig import engine_rig, start
from tests.rigs.worker_rig import WorkerRig, grant_for

COMPUTES_WAITS_READS = {
    "llama_decode": "compute",
    "llama_synchronize": "wait",
    "llama_get_embeddings_seq": "read",
    "llama_get_logits_ith": "read",
}


class Recorder:
    """llama.cpp with a record of its calls that compute, wait and read; `status` replaces the result of decoding."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.status: int | None = None

    def noted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls.append(COMPUTES_WAITS_READS[name])
            return self.status if name == "llama_decode" and self.status is not None else function(*arguments)

        return call

    def __getattr__(self, name: str) -> Any:
        function = getattr(lib, name)
        return self.noted(name, function) if name in COMPUTES_WAITS_READS else function


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(room, "lib", recorder)
    monkeypatch.setattr(room, "_logits_ith", recorder.noted("llama_get_logits_ith", room._logits_ith))
    return recorder


@contextlib.contextmanager
def opened(path: Path, pooling: int | None = None, **changes: Any) -> Iterator[llama.Context]:
    start()
    grant = grant_for(path, threads=1, **changes)
    model = llama.Model(str(path), llama.model_params(grant))
    context = llama.Context(model, llama.context_params(grant, pooling=pooling))
    try:
        yield context
    finally:
        context.close()
        model.close()


def test_step_is_synchronized_before_its_logits_are_read(recorder: Recorder) -> None:
    with opened(tiny_gguf.generative()) as context:
        recorder.calls.clear()
        status, last = context.decode([Row(0, 0, 0, [5, 6, 7], True)])
        assert status is Decode.OK
        context.logits(last[0])
        assert recorder.calls == ["compute", "wait", "read"]


def test_image_is_synchronized_within_its_own_step(recorder: Recorder) -> None:
    with opened(tiny_gguf.generative()) as context:
        recorder.calls.clear()
        rows = np.zeros((4, context.model.n_embd), np.float32)
        positions = np.arange(4, dtype=np.int32)
        assert context.decode_image(0, positions, rows, non_causal=True) is Decode.OK
        assert context.decode_image(0, positions + 4, rows, non_causal=False) is Decode.OK
        assert recorder.calls == ["compute", "wait"] * 2


def test_pooled_batch_is_synchronized_before_its_vectors_are_read(recorder: Recorder) -> None:
    with opened(tiny_gguf.embedding(), lib.LLAMA_POOLING_TYPE_MEAN) as context:
        recorder.calls.clear()
        status, vectors = context.pool([Row(0, 0, 0, [5, 6], True), Row(1, 1, 0, [7], True)])
        assert (status, len(vectors)) == (Decode.OK, 2)
        assert recorder.calls == ["compute", "wait", "read", "read"]


@pytest.mark.parametrize("status", [Decode.NO_ROOM, Decode.COMPUTE_FAILED])
def test_failed_step_is_not_synchronized(recorder: Recorder, status: Decode) -> None:
    with opened(tiny_gguf.generative()) as context:
        recorder.calls.clear()
        recorder.status = status.value
        assert context.decode([Row(0, 0, 0, [5], True)])[0] is status
        assert recorder.calls == ["compute"]


@pytest.mark.parametrize("name", ["llama_decode", "llama_synchronize"])
def test_interpreter_lock_is_released_while_a_device_computes(name: str) -> None:
    held = type(getattr(ctypes.PyDLL(lib._lib._name), name))._flags_
    assert type(getattr(lib, name))._flags_ != held


CONTEXT = 256
PROMPT = [3 + number % 50 for number in range(40)]


def test_full_slot_with_an_image_does_not_affect_steps_of_other_slots() -> None:
    """A slot with an image holds more cells than positions."""
    with engine_rig(tiny_gguf.generative(), parallel=3, context_length=CONTEXT, batch=CONTEXT) as rig:
        context = rig.context
        for slot, tokens in ((0, PROMPT), (1, (PROMPT * 7)[:CONTEXT]), (2, PROMPT)):
            assert context.decode([Row(slot, slot, 0, tokens, True)])[0] is Decode.OK
        lib.llama_memory_seq_add(context.memory, 1, 1, -1, -1)  # two cells at one position, as an image has them
        status, last = context.decode([Row(slot, slot, len(PROMPT), [9], True) for slot in (0, 2)])
        assert status is Decode.OK
        np.testing.assert_allclose(context.logits(last[0]), context.logits(last[1]), atol=1e-3)
        assert [lib.llama_memory_seq_pos_max(context.memory, slot) for slot in range(3)] == [40, CONTEXT - 2, 40]


MAX_BYTES = 1.5e6


def test_token_pieces_are_not_cached() -> None:
    start()
    path = tiny_gguf.generative(extra_words=3_000)
    model = llama.Model(str(path), llama.model_params(grant_for(path), vocab_only=True))
    try:
        tracemalloc.start()
        pieces = sum(len(model.piece(token)) for token in range(model.n_vocab))
        kept, _peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        model.close()
    assert model.n_vocab > 20_000 and pieces > 20_000
    assert kept < MAX_BYTES


def test_context_of_an_encoder_is_limited_to_its_position_table(tmp_path: Path) -> None:
    """llama.cpp aborts beyond the table."""
    with WorkerRig(tmp_path, grant_for(tiny_bert.embedding(positions=128), context_length=512)) as worker:
        assert worker.ready().context_length == 128
        status, answer = worker.post("/v1/embeddings", {"input": [5] * 129})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert answer["error"]["headgate"] == {"context_length": 128, "prompt_tokens": 129, "max_tokens": None}
        assert worker.post("/v1/embeddings", {"input": [5] * 128})[0] == 200


def test_unusable_tokenizer_ends_the_worker_before_it_is_ready(tmp_path: Path) -> None:
    """The worker tokenizes a text while it loads, because llama.cpp aborts at the first one."""
    path = tmp_path / "other.gguf"
    path.write_bytes(next(item.content for item in CORPUS if item.name == "tokenizer-other"))
    with WorkerRig(tmp_path, grant_for(path)) as rig:
        with pytest.raises(AssertionError, match="ended without Ready"):
            rig.expect(worker_link.Ready)
        assert rig.process.wait(10) == -signal.SIGABRT


def _threads_when_ready(root: Path, computing: int) -> int:
    root.mkdir()
    with WorkerRig(root, grant_for(tiny_gguf.generative(), threads=computing)) as rig:
        rig.ready()
        rig.next_beat()  # all threads of the worker run
        return len(os.listdir(f"/proc/{rig.process.pid}/task"))


@pytest.mark.skipif(sys.platform != "linux", reason="counts a process's threads in /proc, which Linux has")
def test_warm_up_leaves_no_compute_threads(tmp_path: Path) -> None:
    assert _threads_when_ready(tmp_path / "one", 1) == _threads_when_ready(tmp_path / "three", 3)
