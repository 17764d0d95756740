"""Cold models that rerank, embed, read images or use an adapter load for the first request, through all services."""

from __future__ import annotations

import base64
import json
import urllib.error
from collections.abc import Iterator

import pytest

from inference.estimate.overheads import CPU_OVERHEAD_BYTES
from inference.worker.prompt.vision import HELD_BYTES
from tests.rigs import tiny_bert, tiny_gguf, tiny_projector
from tests.rigs.stack import Stack

ROUTES = 'routes: {"*": {chain: ["local/*"]}}\n'


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    models = {
        "judge": {"path": str(tiny_bert.cross_encoder()), "context_length": 128},
        "embed": {"path": str(tiny_bert.embedding()), "context_length": 128},
        "seer": {
            "path": str(tiny_gguf.generative()), "context_length": 256, "mmproj": str(tiny_projector.projector()),
        },
        "plain": {"path": str(tiny_gguf.generative()), "context_length": 256},
        "adapted": {
            "path": str(tiny_gguf.generative()), "context_length": 256,
            "lora": [str(tiny_gguf.lora(seed=7)), str(tiny_gguf.lora(seed=8))],
        },
    }  # fmt: skip
    settings = {name: {"parallel": 2, "batch": 256, "ubatch": 128, **model} for name, model in models.items()}
    stack = Stack(tmp_path_factory.mktemp("stack"), models=json.dumps({"models": settings}), gateway=ROUTES).start()
    yield stack
    stack.kill()


def test_cold_reranker_loads_and_answers(stack: Stack) -> None:
    assert stack.model("judge")["state"] == "cold"
    body = {"model": "judge", "query": "water", "documents": ["the mill", {"text": "water"}, "gate"], "top_n": 2}
    answer = stack.ask("/v1/rerank", body)
    assert answer["model"] == "judge"
    assert len(answer["results"]) == 2
    assert stack.ask("/v1/rerank", body, direct=True) == answer
    assert stack.model("judge")["capabilities"] == ["rerank"]


def test_embedding_model_answers_and_refuses_to_rerank(stack: Stack) -> None:
    answer = stack.ask("/v1/embeddings", {"model": "embed", "input": ["water", "mill"]})
    assert [len(item["embedding"]) for item in answer["data"]] == [64, 64]
    with pytest.raises(urllib.error.HTTPError) as caught:
        stack.ask("/v1/rerank", {"model": "embed", "query": "water", "documents": ["mill"]})
    with caught.value as refused:
        assert (refused.code, json.load(refused)["error"]["code"]) == (400, "unsupported_parameter")


def test_image_is_accepted_by_a_cold_model_with_vision_and_refused_by_one_without(stack: Stack) -> None:
    """Capabilities are known before the load."""
    url = "data:image/png;base64," + base64.b64encode(tiny_projector.png()).decode()
    content = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": url}}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4}
    answer = stack.ask("/v1/chat/completions", {**body, "model": "seer"})
    text = {**body, "model": "seer", "messages": [{"role": "user", "content": "look"}]}
    without = stack.ask("/v1/chat/completions", text)
    assert answer["usage"]["prompt_tokens"] == without["usage"]["prompt_tokens"] + 16
    with pytest.raises(urllib.error.HTTPError) as caught:
        stack.ask("/v1/chat/completions", {**body, "model": "plain"})
    with caught.value as refused:
        assert refused.code == 400


def test_estimate_includes_adapters_and_outputs_of_a_pooled_batch(stack: Stack) -> None:
    """The size of an adapter is in its file; a pooled batch has one row of logits and of embeddings per token."""
    adapters = sum(tiny_gguf.lora(seed=seed).stat().st_size for seed in (7, 8))
    assert _overhead(stack, "adapted") - _overhead(stack, "plain") == adapters
    seen = _overhead(stack, "seer") - _overhead(stack, "plain") - HELD_BYTES
    assert tiny_projector.projector().stat().st_size // 2 < seen < 2**22
    vocabulary = 153
    assert _overhead(stack, "embed") - CPU_OVERHEAD_BYTES == 128 * (vocabulary + 64) * 4
    assert stack.ask("/models/adapted/load", {}, direct=True)["headgate"]["state"] == "ready"


def _overhead(stack: Stack, name: str) -> int:
    """Bytes of a dry run beyond weights, KV cache and compute buffers."""
    plan = stack.ask("/memory/plan", {"model": name}, direct=True)
    return int(plan["estimate"]["devices"]["cpu"]["overhead_bytes"])
