"""Defragmenting releases retained prefixes of workers, so that a refused load succeeds."""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.stack import Stack, chat_body

MODELS = """
models:
  demo: {path: bundled:demo, context_length: 1024, parallel: 1, pinned: true}
  demo-mini: {path: bundled:demo-mini, context_length: 512, parallel: 1, pinned: true}
  host: {path: bundled:demo-mini, context_length: 512, parallel: 1, gpu_layers: 0, pinned: true}
  whole: {path: bundled:demo-mini, context_length: 512, parallel: 1, dedicated: true}
"""
OTHER = {"gpu-0": "gpu-1", "gpu-1": "gpu-0"}


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    started = Stack(tmp_path, models=MODELS, inference_env={"INFERENCE_DEVICES": "sim:2x300MiB"})
    started.inference.start(wait_for="/readyz")
    yield started
    started.kill()


def post(stack: Stack, path: str, body: Any = None) -> Any:
    return stack.ask(path, {} if body is None else body, direct=True)


def chat(stack: Stack, model: str) -> int:
    """Tokens of the prompt, which the worker retains."""
    answer = post(stack, "/v1/chat/completions", chat_body("hello " * 60, model, max_tokens=4))
    return int(answer["usage"]["prompt_tokens"])


def retained(stack: Stack) -> int:
    return sum(model["kv_cells_retained"] for model in stack.ask("/memory/kv", direct=True)["models"])


def test_dedicated_model_is_refused_and_fits_after_defragmenting(stack: Stack) -> None:
    """Right after an answer, before a heartbeat has reported its cells."""
    post(stack, "/memory/preload", {"models": ["demo", "demo-mini", "host"]})
    (home,) = stack.model("demo")["devices"]
    post(stack, "/models/demo-mini/move", {"device": OTHER[home]})
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(stack, "/models/whole/load")
    assert refused.value.code == 503
    assert "it is dedicated" in json.load(refused.value)["error"]["message"]
    tokens = chat(stack, "host") + chat(stack, "demo")
    answer = post(stack, "/memory/defragment")
    assert tokens <= answer["cells_released"] <= tokens + 8
    assert retained(stack) == 0
    assert answer["moved"] == [{"model_name": "demo-mini", "source": OTHER[home], "target": home}]
    post(stack, "/models/whole/load")
    devices = {name: stack.model(name)["devices"] for name in ("demo", "demo-mini", "whole")}
    assert devices == {"demo": [home], "demo-mini": [home], "whole": [OTHER[home]]}
