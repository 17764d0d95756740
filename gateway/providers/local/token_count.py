"""Counts the tokens of a prompt through the inference service, with a cache of recent counts.

The service uses the model's template and vocabulary, also if the model is not loaded, so the count is exact. The cache
stores numbers by digest, not prompts.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from typing import Any

import orjson

from gateway.apis.openai.generation_request import AnyRequest
from gateway.errors import UpstreamError, UpstreamKind
from headgate.shared.bodies.body_decoder import as_json
from headgate.shared.bodies.openai_bodies import TokenizeBody

REMEMBERED = 1024
"""Entries of the cache (least recently used are removed)."""

PATH = "/tokenize"

_LARGE_BYTES = 2**20
"""Longer bodies are hashed in a thread, so that they do not block other streams."""

Ask = Callable[[str, bytes, float], Awaitable[Any]]
"""Posts a JSON body to a path of the service and returns the JSON answer within a number of seconds; raises
UpstreamError."""

_COUNTED = tuple(name for name in TokenizeBody.__struct_fields__ if name != "model")
"""The fields that make up a prompt."""


class Counter:
    """Counts prompt tokens of local models, with a cache."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._known: OrderedDict[bytes, int] = OrderedDict()

    def use(self, ask: Ask) -> None:
        """Switches to another service and clears the cache."""
        self._ask = ask
        self._known.clear()

    async def count(self, model: str, body: AnyRequest, seconds: float) -> int:
        """Prompt tokens of a chat or completion `body` for the local `model`; the longest of several prompts counts.

        Raises UpstreamError after `seconds`, if the service is not reachable, or if it cannot count this body (images,
        tools for a model without tool calls). A text that is far too long raises `context_length_exceeded` with a lower
        bound of its tokens in `details["prompt_tokens"]`.
        """
        fields: dict[str, Any] = {name: getattr(body, name, None) for name in _COUNTED}
        question = orjson.dumps(as_json(TokenizeBody(model=model, **fields)))
        key = await _digest(question)
        if (known := self._known.get(key)) is not None:
            self._known.move_to_end(key)
            return known
        ask = self._ask
        answer = await ask(PATH, question, seconds)
        count = answer.get("count") if isinstance(answer, dict) else None
        if not isinstance(count, int):
            raise UpstreamError(UpstreamKind.MALFORMED, f"POST {PATH}: no count in the answer")
        if ask is self._ask:
            self._known[key] = count
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return count


async def _digest(question: bytes) -> bytes:
    if len(question) > _LARGE_BYTES:
        return await asyncio.to_thread(_digest_of, question)
    return _digest_of(question)


def _digest_of(question: bytes) -> bytes:
    return blake2b(question, digest_size=16).digest()
