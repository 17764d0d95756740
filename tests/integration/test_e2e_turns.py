"""Two real models with memory for one of them: under mixed traffic every request is answered."""

from __future__ import annotations

import threading
from pathlib import Path

from tests.rigs.processes import wait_until
from tests.rigs.stack import LOCAL_ROUTES, Stack, chat_body

MODELS = """
models:
  demo: {path: bundled:demo, context_length: 512, parallel: 2, min_residency: 0.2, warm: false}
  demo-mini: {path: bundled:demo-mini, context_length: 512, parallel: 2, min_residency: 0.2, warm: false}
"""
SWAPS = 3
LIMIT_GB = "0.1"
"""The two models need about 79 and 70 MiB."""


def test_two_models_that_do_not_fit_together_both_answer_under_load(tmp_path: Path) -> None:
    gateway = LOCAL_ROUTES.replace(", local/demo-mini", "")
    stack = Stack(tmp_path, MODELS, gateway, {"INFERENCE_MEMORY_LIMIT_GB": LIMIT_GB})
    stack.start()
    answered: dict[str, list[str]] = {"demo": [], "demo-mini": []}
    failed: list[BaseException] = []
    over = threading.Event()

    def client(name: str) -> None:
        try:
            while not over.is_set():
                answer = stack.ask("/v1/chat/completions", chat_body("Hello!", name, max_tokens=4), seconds=90)
                answered[name].append(answer["model"])
        except BaseException as error:
            failed.append(error)

    def loads() -> int:
        return sum(stack.model(name)["loads"] for name in answered)

    clients = [threading.Thread(target=client, args=(name,)) for name in answered for _ in range(2)]
    try:
        for thread in clients:
            thread.start()
        wait_until("enough swaps", lambda: failed or loads() > SWAPS, seconds=90, every=0.3)
        over.set()
        for thread in clients:
            thread.join(60)
        assert failed == []
        assert {name: set(models) for name, models in answered.items()} == {name: {name} for name in answered}
    finally:
        over.set()
        stack.kill()
