"""Fifty oversized requests at once: each gets its own error, and other requests are not affected."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.rigs.stack import Stack, chat_body, until

MODELS = """
models:
  huge:
    path: bundled:demo
    context_length: 4096
    parallel: 64
  small:
    path: bundled:demo-mini
    context_length: 512
    parallel: 2
"""
ROUTES = """
routes:
  huge: {chain: [local/huge], fit_check: false}
  "*": {chain: ["local/*"]}
"""
LONG = "one two three four five six seven eight nine ten " * 200

pytestmark = pytest.mark.timeout(120)


async def ask(session: aiohttp.ClientSession, body: dict[str, Any]) -> tuple[int, str, str]:
    """Status, code of the error (empty: none) and its message."""
    async with session.post("/v1/chat/completions", json=body) as answer:
        if answer.status == 200:
            text = await answer.text()
            return 200, "" if "error" not in text else "error", text
        error = (await answer.json())["error"]
        return answer.status, error["code"], error["message"]


async def test_fifty_oversized_requests_leave_every_service_healthy(tmp_path: Path) -> None:
    """A prompt that is too long is 400, a model that cannot fit is 503 with numbers, and ordinary requests answer."""
    stack = Stack(tmp_path, models=MODELS, gateway=ROUTES, inference_env={"INFERENCE_MEMORY_LIMIT_GB": "0.1"})
    await asyncio.to_thread(stack.start)
    try:
        await asyncio.to_thread(stack.ask, "/models/small/load", {}, direct=True)
        before = stack.worker_pid("small"), stack.inference.pid, stack.front.pid
        kinds = {
            "too long": [chat_body(LONG, "small", stream=number % 2 == 0) for number in range(17)],
            "too large": [chat_body("Hello!", "huge", stream=number % 2 == 0) for number in range(17)],
            "both": [chat_body(LONG, "huge", stream=number % 2 == 0) for number in range(16)],
            "fine": [chat_body("Hello!", "small", max_tokens=4, stream=number % 2 == 0) for number in range(6)],
        }
        headers = {"authorization": f"Bearer {stack.key}"}
        async with aiohttp.ClientSession(stack.front.url, headers=headers) as session:
            requests = [(kind, ask(session, body)) for kind, bodies in kinds.items() for body in bodies]
            answers = await asyncio.gather(*(answer for _kind, answer in requests))
            counts = Counter(
                (kind, status, code) for (kind, _), (status, code, _) in zip(requests, answers, strict=True)
            )
        assert counts == {
            ("too long", 400, "context_length_exceeded"): 17,
            ("too large", 503, "no_tier_available"): 17,
            ("both", 503, "no_tier_available"): 16,
            ("fine", 200, ""): 6,
        }
        words = [message for (kind, _), (_, _, message) in zip(requests, answers, strict=True) if kind == "too large"]
        assert any("memory_limit_exceeded" in message and "MiB" in message for message in words)
        assert (stack.worker_pid("small"), stack.inference.pid, stack.front.pid) == before
        breakers = {entry["name"]: entry["state"] for entry in stack.breakers()}
        assert breakers["local/huge"] == "open"
        assert {state for name, state in breakers.items() if name != "local/huge"} <= {"closed"}
        assert stack.ask("/health", direct=True)["healthy"]
        ledger = stack.ask("/memory/models", direct=True)["models"]
        assert next(item for item in ledger if item["model_name"] == "huge")["state"] == "cold"
        await until("no request is open", lambda: stack.model("small")["in_flight"] == 0)
        assert stack.model("huge")["queued"] == 0
    finally:
        await asyncio.to_thread(stack.kill)
