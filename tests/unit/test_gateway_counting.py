"""Prompt tokens are counted by the inference service; counts are cached."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from gateway.apis.openai.frames import Endpoint
from gateway.errors import UpstreamError, UpstreamKind
from gateway.providers.local.token_count import REMEMBERED, Counter
from tests.rigs.typed_bodies import decoded

BODY = {"messages": [{"role": "user", "content": "the mill"}], "max_tokens": 7, "stream": True}


class Service:
    """Counts the bytes of a body, or gives `answer`."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, Any, float]] = []
        self.answer: Any = None

    async def __call__(self, path: str, body: bytes, seconds: float) -> Any:
        self.requests.append((path, orjson.loads(body), seconds))
        if isinstance(self.answer, Exception):
            raise self.answer
        return {"tokens": [], "count": len(body)} if self.answer is None else self.answer


async def test_only_fields_of_the_prompt_are_sent_and_counts_are_cached() -> None:
    service = Service()
    counter = Counter(service)
    body = {**BODY, "tools": [{"type": "function"}], "reasoning_effort": None, "temperature": 0.5}
    count = await counter.count("demo", decoded(body), 2.0)
    assert service.requests == [
        ("/tokenize", {"model": "demo", "messages": body["messages"], "tools": [{"type": "function"}]}, 2.0)
    ]
    assert await counter.count("demo", decoded({**body, "temperature": 1.0}), 2.0) == count
    assert len(service.requests) == 1
    await counter.count("demo-mini", decoded(body), 2.0)
    completion = decoded({"prompt": "the mill", "suffix": "."}, Endpoint.COMPLETIONS)
    await counter.count("demo", completion, 1.0)
    assert service.requests[-1][1] == {"model": "demo", "prompt": "the mill", "suffix": "."}
    assert len(service.requests) == 3


async def test_errors_are_raised_and_not_cached() -> None:
    service = Service()
    counter = Counter(service)
    service.answer = UpstreamError(UpstreamKind.TIMEOUT, "nothing for 2 s")
    with pytest.raises(UpstreamError, match="nothing for 2 s"):
        await counter.count("demo", decoded(BODY), 2.0)
    for junk in ({}, [], {"count": "7"}):
        service.answer = junk
        with pytest.raises(UpstreamError, match="no count"):
            await counter.count("demo", decoded(BODY), 2.0)
    service.answer = {"count": 5}
    assert await counter.count("demo", decoded(BODY), 2.0) == 5


async def test_cache_is_cleared_for_another_service() -> None:
    service, other = Service(), Service()
    counter = Counter(service)
    await counter.count("demo", decoded(BODY), 2.0)
    counter.use(other)
    await counter.count("demo", decoded(BODY), 2.0)
    assert (len(service.requests), len(other.requests)) == (1, 1)


async def test_least_recently_used_count_is_dropped() -> None:
    service = Service()
    counter = Counter(service)
    for number in range(REMEMBERED + 1):
        await counter.count("demo", decoded({"prompt": f"{number}"}, Endpoint.COMPLETIONS), 1.0)
        await counter.count("demo", decoded({"prompt": "0"}, Endpoint.COMPLETIONS), 1.0)
    assert len(service.requests) == REMEMBERED + 1
    await counter.count("demo", decoded({"prompt": "1"}, Endpoint.COMPLETIONS), 1.0)
    assert len(service.requests) == REMEMBERED + 2


async def test_count_of_a_large_prompt_is_cached() -> None:
    service = Service()
    counter = Counter(service)
    large = decoded({"prompt": "mill " * 2**18}, Endpoint.COMPLETIONS)
    for _ in range(2):
        await counter.count("demo", large, 1.0)
    assert len(service.requests) == 1
