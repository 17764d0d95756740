"""Real models: the longest prompt that fits goes to the first candidate, one more token to the next one."""

from __future__ import annotations

import asyncio
import json
import urllib.error
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.stack import Stack, chat_body

MODELS = """
models:
  narrow: {path: bundled:demo-mini, context_length: 64, parallel: 1}
  wide: {path: bundled:demo-mini, context_length: 256, parallel: 1}
"""
ROUTES = """
routes:
  narrow: {chain: [local/narrow, local/wide]}
  "*": {chain: ["local/*"]}
"""

pytestmark = pytest.mark.timeout(120)


def _body(words: int, **more: Any) -> dict[str, Any]:
    return chat_body("mill " * words, "narrow", **more)


async def test_token_count_of_a_prompt_selects_the_candidate_before_any_attempt(tmp_path: Path) -> None:
    stack = Stack(tmp_path, models=MODELS, gateway=ROUTES)

    async def counted(words: int) -> int:
        """Both models are the same file."""
        body = {"model": "wide", "messages": _body(words)["messages"]}
        return int((await asyncio.to_thread(stack.ask, "/tokenize", body, direct=True))["count"])

    async def answered(words: int, **more: Any) -> tuple[str, int]:
        """The model that answered, and its number of prompt tokens."""
        answer = await asyncio.to_thread(stack.ask, "/v1/chat/completions", _body(words, **more))
        return answer["model"], answer["usage"]["prompt_tokens"]

    await asyncio.to_thread(stack.start)
    try:
        await asyncio.to_thread(stack.ask, "/models/wide/load", {}, direct=True)
        few, many = await counted(1), await counted(11)
        each = (many - few) / 10
        longest = int((62 - few) / each)
        while await counted(longest + 1) <= 63:
            longest += 1
        fits = await counted(longest)
        assert await answered(longest + 1) == ("wide", await counted(longest + 1))
        assert stack.model("narrow")["state"] == "cold", "the prompt is counted without loading the model"
        assert await answered(longest, max_tokens=64 - fits) == ("narrow", fits)
        assert await answered(longest + 1) == ("wide", await counted(longest + 1)), "the same count when loaded"
        assert (await answered(longest, max_tokens=64 - fits + 1))[0] == "wide", "it has room for the whole answer"
        assert stack.model("narrow")["loads"] == 1
        with pytest.raises(urllib.error.HTTPError) as caught:
            await answered(400)
        error = json.load(caught.value)["error"]
        assert (caught.value.code, error["code"]) == (400, "context_length_exceeded")
        assert "holds 64" in error["message"]
        assert "holds 256" in error["message"]
        assert caught.value.headers["x-headgate-attempts"] == "0"
        assert all(breaker["state"] == "closed" for breaker in stack.breakers())
    finally:
        stack.kill()
