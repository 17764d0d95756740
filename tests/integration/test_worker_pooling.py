"""How models pool the vectors of tokens, and which kinds of pooling are refused at load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from inference import worker_link
from inference.protocol import ExitCause
from tests.rigs import tiny_bert, tiny_gguf
from tests.rigs.worker_rig import WorkerRig, grant_for

PATH = "/v1/embeddings"


def embedded(worker: WorkerRig, texts: list[str]) -> np.ndarray:
    status, response = worker.post(PATH, {"input": texts})
    assert status == 200, response
    return np.array([item["embedding"] for item in response["data"]])


def test_causal_model_with_last_token_pooling_reads_in_pieces(tmp_path: Path) -> None:
    """A physical batch of 16 tokens gives the result of one of 256."""
    model = tiny_gguf.embedding("last")
    texts = ["water " * 40, "a mill", "the gate " * 20]
    with WorkerRig(tmp_path, grant_for(model, context_length=256, batch=64, ubatch=16)) as small:
        small.ready()
        pieces = embedded(small, texts)
    with WorkerRig(tmp_path, grant_for(model, context_length=256, batch=256, ubatch=256)) as large:
        large.ready()
        whole = embedded(large, texts)
    assert np.sum(pieces * whole, axis=1) == pytest.approx(1.0, abs=1e-3)
    assert abs(float(pieces[0] @ pieces[1])) < 0.99


def test_encoder_pools_with_the_type_in_its_file(tmp_path: Path) -> None:
    """The same weights with two poolings give two vectors; a text has the same vector alone and in a batch."""
    found = {}
    for pooling in ("cls", "mean"):
        with WorkerRig(tmp_path, grant_for(tiny_bert.embedding(pooling=pooling), context_length=128)) as worker:
            assert worker.ready().capabilities == ("embeddings",)
            found[pooling] = embedded(worker, ["the water of the mill", "gate"])
            alone = embedded(worker, ["gate"])[0]
        assert float(found[pooling][1] @ alone) == pytest.approx(1.0, abs=1e-3)
    assert abs(float(found["cls"][0] @ found["mean"][0])) < 0.99


@pytest.mark.parametrize(
    ("model", "capabilities", "says"),
    [
        (lambda: tiny_gguf.embedding("none"), ("embeddings",), "its pooling type is none"),
        (lambda: tiny_bert.embedding(pooling=None), None, "has no KV cache"),
        (lambda: tiny_bert.embedding(), ("rerank",), "no classification head"),
        (lambda: tiny_bert.cross_encoder(), ("embeddings",), "reranking model"),
        (lambda: tiny_bert.cross_encoder(head=3), None, "3 classes"),
        (lambda: tiny_gguf.yes_no_reranker(labels=("score",)), None, "this one has 1"),
        (lambda: tiny_gguf.generative(), ("chat", "rerank"), "one model per use"),
    ],
    ids=["none", "no pooling", "no head", "not an embedder", "a classifier", "one answer", "two tasks"],
)
def test_unsupported_pooling_is_refused_at_load(
    tmp_path: Path, model: Callable[[], Path], capabilities: tuple[str, ...] | None, says: str
) -> None:
    with WorkerRig(tmp_path, grant_for(model(), context_length=128, capabilities=capabilities)) as worker:
        failed = worker.expect(worker_link.Failed)
        assert says in failed.message
        assert failed.cause == ExitCause.STARTUP
        assert worker.wait() == 1
