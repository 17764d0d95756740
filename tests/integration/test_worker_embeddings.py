"""A real worker with an embedding model: vectors of length 1, pooled as its file says, alone and in a batch."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import numpy as np
import pytest

from inference.worker import llama
from inference.worker.llama.binding import lib
from inference.worker.steps import Row
from tests.rigs import engine_rig, tiny_gguf
from tests.rigs.worker_rig import WorkerRig, grant_for

PATH = "/v1/embeddings"


@pytest.fixture(scope="module", params=["mean", "cls", "last"])
def pooling(request: pytest.FixtureRequest) -> str:
    """The pooling that the file declares."""
    return str(request.param)


@pytest.fixture(scope="module")
def worker(pooling: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerRig]:
    model = tiny_gguf.embedding(pooling)
    with WorkerRig(tmp_path_factory.mktemp("worker"), grant_for(model, context_length=256)) as rig:
        assert rig.ready().capabilities == ("embeddings",)
        yield rig


def vectors(worker: WorkerRig, **body: object) -> np.ndarray:
    status, response = worker.post(PATH, body)
    assert status == 200, response
    assert [item["index"] for item in response["data"]] == list(range(len(response["data"])))
    return np.array([item["embedding"] for item in response["data"]])


def test_vectors_have_length_one_and_differ_between_texts(worker: WorkerRig) -> None:
    found = vectors(worker, input=["the water", "the mill", "the water"])
    assert found.shape == (3, 64)
    assert np.linalg.norm(found, axis=1) == pytest.approx(1.0, abs=1e-5)
    assert found[0] == pytest.approx(found[2], abs=1e-5)
    assert np.abs(found[0] - found[1]).max() > 1e-3


def test_vector_is_pooled_with_the_type_in_the_file(worker: WorkerRig, pooling: str) -> None:
    """The mean of the vectors of single tokens, the first of them, or the last."""
    tokens = [(7 * number) % 250 for number in range(40)]
    engine_rig.start()
    assert worker.grant is not None
    model = llama.Model(worker.grant.path, llama.model_params(worker.grant))
    context = llama.Context(model, llama.context_params(worker.grant, pooling=llama.POOLING_NONE))
    context.decode([Row(0, 0, 0, tokens, True)], every=True)
    pointers = [lib.llama_get_embeddings_ith(context.handle, number) for number in range(len(tokens))]
    each = np.array([np.ctypeslib.as_array(pointer, shape=(model.n_embd,)) for pointer in pointers])
    context.close()
    model.close()
    named = {"mean": each.mean(axis=0), "cls": each[0], "last": each[-1]}
    found = vectors(worker, input=tokens)[0]
    alike = {name: float(found @ vector) / float(np.linalg.norm(vector)) for name, vector in named.items()}
    assert alike.pop(pooling) > 0.9999
    assert max(alike.values()) < 0.99


def test_vectors_are_the_same_in_a_batch(worker: WorkerRig) -> None:
    """More inputs than slots and more tokens than a batch; results are equal up to rounding in half precision."""
    texts = [f"text number {number} " * (1 + number % 7) for number in range(30)]
    together = vectors(worker, input=texts)
    for number in (0, 6, 29):
        alone = vectors(worker, input=texts[number])[0]
        assert float(together[number] @ alone) > 0.9999
        others = [float(vector @ alone) for other, vector in enumerate(together) if other != number]
        assert max(others) < float(together[number] @ alone)


def test_token_ids_base64_and_dimensions_are_supported(worker: WorkerRig) -> None:
    ids = worker.post("/tokenize", {"content": "the water", "add_special": True})[1]["tokens"]
    plain = vectors(worker, input="the water")[0]
    assert vectors(worker, input=ids)[0] == pytest.approx(plain, abs=1e-5)
    _status, response = worker.post(PATH, {"input": "the water", "encoding_format": "base64"})
    raw = np.frombuffer(base64.b64decode(response["data"][0]["embedding"]), "<f4")
    assert raw == pytest.approx(plain, abs=1e-6)
    short = vectors(worker, input="the water", dimensions=16)[0]
    assert short == pytest.approx(plain[:16] / np.linalg.norm(plain[:16]), abs=1e-5)


def test_usage_counts_every_input(worker: WorkerRig) -> None:
    counts = [
        len(worker.post("/tokenize", {"content": text, "add_special": True})[1]["tokens"]) for text in ("a", "b c")
    ]
    _status, response = worker.post(PATH, {"input": ["a", "b c"]})
    assert response["usage"] == {"prompt_tokens": sum(counts), "total_tokens": sum(counts)}
    assert response["model"] == "tiny"


def test_inputs_that_are_too_long_and_chats_are_refused(worker: WorkerRig) -> None:
    status, response = worker.post(PATH, {"input": ["ok", "x" * 2000]})
    assert (status, response["error"]["code"], response["error"]["param"]) == (
        400,
        "context_length_exceeded",
        "input[1]",
    )
    assert worker.post(PATH, {"input": [5] * 256})[0] == 200
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/rerank", {"query": "x", "documents": ["y"]}),
    ):
        status, response = worker.post(path, body)
        error = response["error"]
        assert (status, error["code"], error["param"]) == (400, "unsupported_parameter", "model")
        assert error["message"].endswith("; it supports /v1/embeddings")
