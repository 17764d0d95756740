"""The warm pool with real workers on the CPU: models are suspended and restored with their prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.rigs.stack import Stack, chat_body

MODELS = """
models:
  demo: {path: bundled:demo, context_length: 2048, parallel: 2, min_residency: 0}
  demo-mini: {path: bundled:demo-mini, context_length: 1024, parallel: 1, min_residency: 0, warm: false}
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    started = Stack(tmp_path_factory.mktemp("warm"), models=MODELS)
    started.inference.start(wait_for="/readyz")
    yield started
    started.kill()


def post(stack: Stack, path: str, body: Any = None) -> Any:
    return stack.ask(path, body if body is not None else {}, direct=True)


def tell(stack: Stack, text: str) -> dict[str, Any]:
    return dict(post(stack, "/v1/chat/completions", chat_body(text, max_tokens=16)))


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def booked(stack: Stack) -> int:
    (cpu,) = stack.ask("/devices", direct=True)["devices"]
    return int(cpu["ledger"]["resident_bytes"])


STORY = "Once upon a time there was a little girl. She liked to play in the garden with her dog. " * 8


def test_offloaded_model_gives_the_same_answer_with_a_cached_prompt(stack: Stack) -> None:
    """Its process stays and uses less memory; cached tokens show that its sequences were restored."""
    first = tell(stack, STORY)
    pid, before = stack.worker_pid("demo"), booked(stack)
    assert post(stack, "/models/demo/offload")["headgate"]["state"] == "warm"
    kept = stack.ask("/memory/offloaded", direct=True)["offloaded"]
    assert [item["model_key"] for item in kept] == ["demo"]
    assert kept[0]["mechanism"] == "standby"
    assert kept[0]["original_device"] == "cpu"
    assert kept[0]["bytes"] == booked(stack) < before
    assert kept[0]["tokens"] > 100
    again = tell(stack, STORY)
    assert text_of(again) == text_of(first)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    assert stack.worker_pid("demo") == pid
    assert booked(stack) == before
    assert stack.ask("/memory/offloaded", direct=True)["offloaded"] == []
    stats = stack.ask("/memory/stats", direct=True)
    assert (stats["total_offloads"], stats["total_restorations"], stats["models_offloaded"]) == (1, 1, 0)
