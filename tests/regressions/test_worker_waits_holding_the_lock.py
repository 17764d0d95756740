"""On a device `llama_decode` returns early; whoever read outputs first waited for it and kept the interpreter lock."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference.worker import llama
from inference.worker.backend import Decode
from inference.worker.llama import context as room
from inference.worker.llama.binding import lib
from inference.worker.steps import Row
from tests.rigs import tiny_gguf
from tests.rigs.engine_rig import start
from tests.rigs.worker_rig import grant_for

COMPUTES_WAITS_READS = {
    "llama_decode": "compute",
    "llama_synchronize": "wait",
    "llama_get_embeddings_seq": "read",
    "llama_get_logits_ith": "read",
}


class Recorder:
    """llama.cpp itself, that notes which of its calls compute, wait and read; `status` is what decoding comes to."""

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


def test_a_step_is_waited_for_before_its_logits_are_read(recorder: Recorder) -> None:
    with opened(tiny_gguf.generative()) as context:
        recorder.calls.clear()
        status, last = context.decode([Row(0, 0, 0, [5, 6, 7], True)])
        assert status is Decode.OK
        context.logits(last[0])
        assert recorder.calls == ["compute", "wait", "read"]


def test_an_image_is_waited_for(recorder: Recorder) -> None:
    """So that its step lasts as long as it takes, and no longer one waits for it."""
    with opened(tiny_gguf.generative()) as context:
        recorder.calls.clear()
        rows = np.zeros((4, context.model.n_embd), np.float32)
        positions = np.arange(4, dtype=np.int32)
        assert context.decode_image(0, positions, rows, non_causal=True) is Decode.OK
        assert context.decode_image(0, positions + 4, rows, non_causal=False) is Decode.OK
        assert recorder.calls == ["compute", "wait"] * 2


def test_a_pooled_batch_is_waited_for_before_its_vectors_are_read(recorder: Recorder) -> None:
    with opened(tiny_gguf.embedding(), lib.LLAMA_POOLING_TYPE_MEAN) as context:
        recorder.calls.clear()
        status, vectors = context.pool([Row(0, 0, 0, [5, 6], True), Row(1, 1, 0, [7], True)])
        assert (status, len(vectors)) == (Decode.OK, 2)
        assert recorder.calls == ["compute", "wait", "read", "read"]


@pytest.mark.parametrize("status", [Decode.NO_ROOM, Decode.COMPUTE_FAILED])
def test_nothing_is_waited_for_that_was_not_computed(recorder: Recorder, status: Decode) -> None:
    with opened(tiny_gguf.generative()) as context:
        recorder.calls.clear()
        recorder.status = status.value
        assert context.decode([Row(0, 0, 0, [5], True)])[0] is status
        assert recorder.calls == ["compute"]


@pytest.mark.parametrize("name", ["llama_decode", "llama_synchronize"])
def test_the_lock_is_given_up_while_a_device_computes(name: str) -> None:
    held = type(getattr(ctypes.PyDLL(lib._lib._name), name))._flags_
    assert type(getattr(lib, name))._flags_ != held
