"""Counts of prompt tokens: when one is needed, how it is cached, and whether the prompt fits."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.apis.openai.frames import Endpoint
from gateway.errors import UpstreamError, UpstreamKind
from gateway.providers.local.local_provider import REMEMBERED, Counter
from gateway.routing.candidate_checks import (
    MIN_BYTES_PER_TOKEN,
    TEMPLATE_TOKENS,
    Fit,
    about_tokens,
    certainly_fits,
    fit,
    is_alternative,
    little_room,
    too_long,
)
from gateway.routing.chain import Candidate, Drop
from tests.rigs.typed_bodies import decoded

LOCAL = Candidate("local", "a", 0)


@pytest.mark.parametrize(
    ("tokens", "most", "context", "found"),
    [
        (100, None, 101, Fit.WHOLE),
        (100, None, 100, Fit.NOTHING),
        (101, 1, 100, Fit.NOTHING),
        (60, 40, 100, Fit.WHOLE),
        (60, 41, 100, Fit.PROMPT),
        (99, 2, 100, Fit.PROMPT),
        (99, 1, 100, Fit.WHOLE),
        (1, 101, 100, Fit.NOTHING),
        (1, 100, 100, Fit.PROMPT),
        (100, 0, 101, Fit.WHOLE),
    ],
)
def test_context_needs_room_for_the_prompt_and_the_answer(
    tokens: int, most: int | None, context: int, found: Fit
) -> None:
    assert fit(tokens, most, context) is found


def test_only_prompts_near_the_context_length_are_counted() -> None:
    assert certainly_fits(1000, 100, 500 + 100 + TEMPLATE_TOKENS)
    assert not certainly_fits(1000, 100, 500 + 100 + TEMPLATE_TOKENS - 1)
    assert not certainly_fits(1001, 100, 500 + 100 + TEMPLATE_TOKENS)
    assert certainly_fits(1000, None, 500 + 1 + TEMPLATE_TOKENS)


@given(st.integers(0, 10**6), st.none() | st.integers(0, 10**6), st.integers(1, 10**6), st.data())
def test_prompt_that_is_not_counted_fits(size: int, most: int | None, context: int, data: st.DataObject) -> None:
    tokens = data.draw(st.integers(0, size // MIN_BYTES_PER_TOKEN + TEMPLATE_TOKENS))
    if certainly_fits(size, most, context):
        assert fit(tokens, most, context) is Fit.WHOLE


def test_larger_or_unknown_contexts_are_alternatives() -> None:
    assert is_alternative(None, 100)
    assert is_alternative(101, 100)
    assert not is_alternative(100, 100)


def test_reasons_contain_the_numbers() -> None:
    prompt = too_long(LOCAL, 120, 30, 100)
    assert (prompt.drop, prompt.param) == (Drop.CONTEXT, None)
    assert prompt.message == "the prompt has 120 tokens, and the model's context holds 100"
    assert prompt.details == {"context_length": 100, "prompt_tokens": 120, "max_tokens": 30}
    answer = too_long(LOCAL, 20, 130, 100)
    assert (answer.param, "max_tokens is 130" in answer.message) == ("max_tokens", True)
    narrow = little_room(LOCAL, 80, 30, 100, "local/b")
    assert narrow.drop is Drop.ROOM
    assert (
        "80 tokens and max_tokens of 30 exceed its context of 100; the context of local/b holds both" in narrow.message
    )


def test_estimate_of_tokens_is_a_quarter_of_the_bytes() -> None:
    assert (about_tokens(0), about_tokens(7), about_tokens(4000)) == (0, 1, 1000)


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
    counter = Counter(lambda _: service)
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
    counter = Counter(lambda _: service)
    service.answer = UpstreamError(UpstreamKind.TIMEOUT, "no data for 2 s")
    with pytest.raises(UpstreamError, match="no data for 2 s"):
        await counter.count("demo", decoded(BODY), 2.0)
    for junk in ({}, [], {"count": "7"}):
        service.answer = junk
        with pytest.raises(UpstreamError, match="no count"):
            await counter.count("demo", decoded(BODY), 2.0)
    service.answer = {"count": 5}
    assert await counter.count("demo", decoded(BODY), 2.0) == 5


async def test_least_recently_used_count_is_dropped() -> None:
    service = Service()
    counter = Counter(lambda _: service)
    for number in range(REMEMBERED + 1):
        await counter.count("demo", decoded({"prompt": f"{number}"}, Endpoint.COMPLETIONS), 1.0)
        await counter.count("demo", decoded({"prompt": "0"}, Endpoint.COMPLETIONS), 1.0)
    assert len(service.requests) == REMEMBERED + 1
    await counter.count("demo", decoded({"prompt": "1"}, Endpoint.COMPLETIONS), 1.0)
    assert len(service.requests) == REMEMBERED + 2


async def test_count_of_a_large_prompt_is_cached() -> None:
    service = Service()
    counter = Counter(lambda _: service)
    large = decoded({"prompt": "mill " * 2**18}, Endpoint.COMPLETIONS)
    for _ in range(2):
        await counter.count("demo", large, 1.0)
    assert len(service.requests) == 1
