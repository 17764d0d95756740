"""Real workers with rerankers: scores match the arithmetic of the network, alone and in a batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests.rigs import tiny_bert, tiny_gguf
from tests.rigs.worker_rig import WorkerRig, grant_for

PATH = "/v1/rerank"
MODELS = {
    "cross-encoder": lambda: tiny_bert.cross_encoder(),
    "yes or no": lambda: tiny_gguf.yes_no_reranker(),
}


@pytest.fixture(scope="module", params=MODELS)
def worker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerRig]:
    """`ubatch` is small, so that the generative model reads in pieces."""
    grant = grant_for(MODELS[request.param](), context_length=256, batch=128, ubatch=32)
    with WorkerRig(tmp_path_factory.mktemp("worker"), grant) as rig:
        assert rig.ready().capabilities == ("rerank",)
        yield rig


def ranked(worker: WorkerRig, query: str, documents: list[Any], **more: object) -> list[dict[str, Any]]:
    status, response = worker.post(PATH, {"query": query, "documents": documents, **more})
    assert status == 200, response
    assert response["object"] == "list"
    assert response["model"] == "tiny"
    results: list[dict[str, Any]] = response["results"]
    return results


def scores(worker: WorkerRig, query: str, documents: list[Any]) -> list[float]:
    return [
        item["relevance_score"] for item in sorted(ranked(worker, query, documents), key=lambda item: item["index"])
    ]


def test_documents_are_sorted_by_scores_between_0_and_1(worker: WorkerRig) -> None:
    results = ranked(worker, "water", ["the mill", "a gate of water", {"text": "stream"}, ""])
    found = [item["relevance_score"] for item in results]
    assert sorted(found, reverse=True) == found
    assert len(set(found)) == 4
    assert all(0.0 < score < 1.0 for score in found)
    assert sorted(item["index"] for item in results) == [0, 1, 2, 3]


def test_top_n_limits_the_results_and_documents_are_returned_on_request(worker: WorkerRig) -> None:
    documents = ["the mill", {"text": "water"}, "gate"]
    everything = ranked(worker, "water", documents)
    best = ranked(worker, "water", documents, top_n=2, return_documents=True)
    assert [item["index"] for item in best] == [item["index"] for item in everything[:2]]
    texts = ["the mill", "water", "gate"]
    assert [item["document"] for item in best] == [{"text": texts[item["index"]]} for item in best]
    assert "document" not in everything[0]
    assert len(ranked(worker, "water", documents, top_n=50)) == 3


def test_scores_are_the_same_in_a_batch(worker: WorkerRig) -> None:
    """More pairs than slots, more tokens than a batch."""
    documents = [f"text number {number} " * (1 + number % 5) for number in range(20)]
    together = scores(worker, "which number", documents)
    for number in (0, 7, 19):
        assert scores(worker, "which number", [documents[number]])[0] == pytest.approx(together[number], abs=5e-3)


def test_pair_that_is_too_long_is_refused_with_the_document_and_both_lengths(worker: WorkerRig) -> None:
    status, response = worker.post(PATH, {"query": "water", "documents": ["mill", "x" * 400]})
    error = response["error"]
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "documents[1]")
    assert str(error["headgate"]["prompt_tokens"]) in error["message"]
    assert str(error["headgate"]["context_length"]) in error["message"]
    assert scores(worker, "water", ["mill"])


def test_other_endpoints_are_refused(worker: WorkerRig) -> None:
    for path, body in (
        ("/v1/embeddings", {"input": "x"}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        status, response = worker.post(path, body)
        error = response["error"]
        assert (status, error["code"], error["param"]) == (400, "unsupported_parameter", "model")
        assert error["message"].endswith("; it supports /v1/rerank")


def test_usage_counts_every_pair(worker: WorkerRig) -> None:
    _status, one = worker.post(PATH, {"query": "water", "documents": ["mill"]})
    _status, two = worker.post(PATH, {"query": "water", "documents": ["mill", "mill"]})
    assert one["usage"]["total_tokens"] == one["usage"]["prompt_tokens"] > 2
    assert two["usage"]["prompt_tokens"] == 2 * one["usage"]["prompt_tokens"]


def test_cross_encoder_uses_its_own_separators(tmp_path: Path) -> None:
    """[CLS] query [SEP] document [SEP], computed here from the tensors of the file."""
    model = tiny_bert.cross_encoder(positions=64)
    with WorkerRig(tmp_path, grant_for(model, context_length=64)) as worker:
        worker.ready()
        tokens = [
            token
            for part in ("[CLS] the water [SEP]", "a mill [SEP]")
            for token in worker.post("/tokenize", {"content": part})[1]["tokens"]
        ]
        assert scores(worker, "the water", ["a mill"])[0] == pytest.approx(_reference(model, tokens), abs=5e-3)


def _reference(path: Path, tokens: list[int], heads: int = 4) -> float:
    """BERT with a classification head over its first token, in float32."""
    w = {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(path).tensors}

    def norm(x: np.ndarray) -> np.ndarray:
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)

    x = norm(w["token_embd.weight"][tokens] + w["position_embd.weight"][: len(tokens)] + w["token_types.weight"][0])
    for layer in range(2):
        q, k, v = (
            (x @ w[f"blk.{layer}.attn_{part}.weight"].T).reshape(len(tokens), heads, -1).transpose(1, 0, 2)
            for part in "qkv"
        )
        weights = np.exp(q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1]))
        seen = ((weights / weights.sum(-1, keepdims=True)) @ v).transpose(1, 0, 2).reshape(len(tokens), -1)
        x = norm(x + seen @ w[f"blk.{layer}.attn_output.weight"].T)
        up = x @ w[f"blk.{layer}.ffn_up.weight"].T
        gelu = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
        x = norm(x + gelu @ w[f"blk.{layer}.ffn_down.weight"].T)
    answer = w["cls.output.weight"] @ np.tanh(w["cls.weight"] @ x[0])
    return float(1 / (1 + np.exp(-answer[0])))
