"""A worker that had read its vocabulary for constraints kept the bytes of every token: 13 MB of 128,256 tokens."""

from __future__ import annotations

import tracemalloc

from inference.worker import llama
from tests.rigs import tiny_gguf
from tests.rigs.engine_rig import start
from tests.rigs.worker_rig import grant_for

MOST_BYTES = 1.5e6


def test_a_vocabulary_that_was_read_once_is_not_kept() -> None:
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
    assert kept < MOST_BYTES
