"""Asks the inference service how many tokens a prompt has, and remembers the last answers; decides nothing by them.

The service renders the body with the model's own template and vocabulary, loaded or not, so the count is the one that
a request with this body would be computed with. What is remembered are numbers under a digest, never prompts.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from hashlib import blake2b
from typing import Any

import orjson

from gateway.apis.openai.frames import Endpoint
from gateway.apis.schema.chat_request import AnyRequest
from gateway.errors import UpstreamError, UpstreamKind
from headgate.shared.bodies.body_decoder import as_json

REMEMBERED = 1024
"""Counts kept; the one not asked for longest leaves first."""

PATH = "/tokenize"

_LARGE_BYTES = 2**20
"""What is longer is digested in a thread, because other streams would wait for it."""

Ask = Callable[[str, bytes, float], Awaitable[Any]]
"""Posts a JSON body to a path of the service and returns the answer's JSON within so many seconds; raises
UpstreamError."""

_COUNTED: Mapping[Endpoint, tuple[str, ...]] = {
    Endpoint.CHAT: (
        "messages", "tools", "tool_choice", "parallel_tool_calls", "functions", "function_call",
        "chat_template_kwargs", "reasoning_effort", "continue_final_message", "add_generation_prompt",
    ),
    Endpoint.COMPLETIONS: ("prompt", "suffix"),
}  # fmt: skip
"""The fields that a prompt is made of."""


class Counter:
    """Counts for local models, one question each unless the answer is remembered."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._known: OrderedDict[bytes, int] = OrderedDict()

    def use(self, ask: Ask) -> None:
        """Asks another service from now on; what the old one counted is forgotten."""
        self._ask = ask
        self._known.clear()

    async def count(self, model: str, endpoint: Endpoint, body: AnyRequest, seconds: float) -> int:
        """Prompt tokens of a chat or completion `body` for the local `model`; of several prompts those of the longest.

        Raises UpstreamError: within `seconds` nothing was said, the service is not there, or it cannot count this
        (images, tools for a model that calls none); `context_length_exceeded` with the least number of tokens in
        `details["prompt_tokens"]` for a text so long that counting it would be a waste.
        """
        given = as_json(body)
        asked = orjson.dumps(
            {"model": model, **{name: given[name] for name in _COUNTED[endpoint] if name in given}},
            option=orjson.OPT_SORT_KEYS,
        )
        key = await _digest(asked)
        if (known := self._known.get(key)) is not None:
            self._known.move_to_end(key)
            return known
        ask = self._ask
        answer = await ask(PATH, asked, seconds)
        count = answer.get("count") if isinstance(answer, dict) else None
        if not isinstance(count, int):
            raise UpstreamError(UpstreamKind.MALFORMED, f"POST {PATH}: no count in the answer")
        if ask is self._ask:
            self._known[key] = count
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return count


async def _digest(asked: bytes) -> bytes:
    if len(asked) > _LARGE_BYTES:
        return await asyncio.to_thread(_digest_of, asked)
    return _digest_of(asked)


def _digest_of(asked: bytes) -> bytes:
    return blake2b(asked, digest_size=16).digest()
