"""Client libraries recognise `context_length_exceeded` by the text of the message.

LangChain looks for the code in the text of the exception, which is only the message in openai 3, and for `exceeds the
context window` in errors within a stream. LiteLLM looks for the beginning of OpenAI's sentence. Clients of Anthropic's
API look for `prompt is too long`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import openai
import orjson
import pytest

from gateway.apis.openai.frames import Endpoint
from gateway.apis.openai.generation_request import parse
from gateway.routing.candidate_outcomes import CandidateOutcome, no_answer
from gateway.routing.chain import Candidate, Drop
from inference.protocol import Code, context_overflow
from inference.worker.api import generation_body
from inference.worker.prompt.prompts import Prompts
from inference.worker.worker_errors import BadRequestError
from inference.worker.worker_requests import Facts
from tests.rigs.chat_templates import chat_template
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.fake_provider import KEY as CLOUD_KEY
from tests.rigs.fake_provider import FakeProvider
from tests.rigs.gateway_rig import CONFIG, KEY, Gateway

MARKS = ("context_length_exceeded", "this model's maximum context length is", "exceeds the context window")
"""Texts that LangChain and LiteLLM look for, in lower case."""
LONG = "the water of the mill turns the wheel " * 40


class Letters:
    """One token per character; the longest piece has 10 characters."""

    bos = None
    adds_bos = False
    longest_piece = 10
    fill_tokens = None

    def text_of(self, token: int | None) -> str:
        return ""

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        return [ord(letter) for letter in text]


def refused(endpoint: str, **body: Any) -> BadRequestError:
    """The error of a worker whose model has a context of 10 tokens."""
    facts = Facts("tiny", 10, 300, 64, ("embeddings",) if endpoint == "embedding" else ("chat", "completions"))
    prompts = Prompts(Letters(), chat_template("{{ messages[0].content }}"), facts)
    with pytest.raises(BadRequestError) as caught:
        if endpoint == "embedding":
            prompts.embed(generation_body.embedding(body, facts)[1])
        else:
            prompts.generate(getattr(generation_body, endpoint)(body, facts))
    return caught.value


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    ("endpoint", "body", "message"),
    [
        (
            "chat",
            {"messages": user("x" * 20)},
            (
                "This model's maximum context length is 10 tokens, but the messages take 20 tokens "
                "(context_length_exceeded). The request exceeds the context window. A prompt of up to 9 tokens leaves "
                "room for an answer. Shorten the messages, or use a model with a longer context."
            ),
        ),
        (
            "chat",
            {"messages": user("x" * 200)},
            (
                "This model's maximum context length is 10 tokens, but the messages take at least 20 tokens "
                "(context_length_exceeded). The request exceeds the context window. A prompt of up to 9 tokens leaves "
                "room for an answer. Shorten the messages, or use a model with a longer context."
            ),
        ),
        (
            "chat",
            {"messages": user("x" * 6), "answer_so_far": {"content": "y" * 6}},
            (
                "This model's maximum context length is 10 tokens, but the prompt and the answer so far take 12 tokens "
                "(context_length_exceeded). The request exceeds the context window. A prompt of up to 9 tokens leaves "
                "room for an answer. Shorten the prompt, or use a model with a longer context."
            ),
        ),
        (
            "completion",
            {"prompt": "x" * 10, "max_tokens": 5},
            (
                "This model's maximum context length is 10 tokens, but the prompt takes 10 tokens "
                "(context_length_exceeded). The request exceeds the context window. A prompt of up to 9 tokens leaves "
                "room for an answer. Shorten the prompt, or use a model with a longer context."
            ),
        ),
        (
            "embedding",
            {"input": ["x", "x" * 11]},
            (
                "This model's maximum context length is 10 tokens, but input[1] takes 11 tokens "
                "(context_length_exceeded). The request exceeds the context window. "
                "Shorten input[1], or use a model with a longer context."
            ),
        ),
        (
            "chat",
            {"messages": user("x"), "max_tokens": 11},
            (
                "This model's maximum context length is 10 tokens, but max_tokens is 11 (context_length_exceeded). The "
                "request exceeds the context window. The context holds the prompt and the "
                "answer together; make max_tokens less than 10, or remove it."
            ),
        ),
    ],
)
def test_context_overflow_message_of_the_worker_is_recognised_by_clients(
    endpoint: str, body: dict[str, Any], message: str
) -> None:
    assert refused(endpoint, **body).message == message
    assert all(mark in message.lower() for mark in MARKS)


LOCAL, MINI = Candidate("local", "a", 0), Candidate("local", "b", 1)


@pytest.mark.parametrize(
    ("endpoint", "numbers", "beginning"),
    [
        (
            Endpoint.CHAT,
            {"context_length": 20, "prompt_tokens": 25, "max_tokens": None},
            (
                "This model's maximum context length is 20 tokens, but the messages take 25 tokens "
                "(context_length_exceeded). The request exceeds the context window."
            ),
        ),
        (
            Endpoint.COMPLETIONS,
            {"context_length": 20, "prompt_tokens": 25, "max_tokens": None},
            (
                "This model's maximum context length is 20 tokens, but the prompt takes 25 tokens "
                "(context_length_exceeded). The request exceeds the context window."
            ),
        ),
        (
            Endpoint.CHAT,
            {"context_length": 20, "prompt_tokens": 5, "max_tokens": 21},
            (
                "This model's maximum context length is 20 tokens, but max_tokens is 21 (context_length_exceeded). "
                "The request exceeds the context window."
            ),
        ),
        (Endpoint.CHAT, None, "The request exceeds the context window of every model (context_length_exceeded)."),
    ],
)
def test_context_overflow_message_of_the_gateway_is_recognised_by_clients(
    endpoint: Endpoint, numbers: dict[str, int | None] | None, beginning: str
) -> None:
    prompt = {"prompt": "x"} if endpoint is Endpoint.COMPLETIONS else {"messages": user("x")}
    request = parse(endpoint, orjson.dumps({"model": "m", **prompt}))
    smaller = {"context_length": 10, "prompt_tokens": 25, "max_tokens": None}
    error = no_answer(
        request,
        [
            CandidateOutcome(LOCAL, "context_too_small", "too small", drop=Drop.CONTEXT, details=numbers and smaller),
            CandidateOutcome(MINI, "context_length", "too long", drop=Drop.CONTEXT, details=numbers),
        ],
        None,
    )
    end = " No model behind 'm' can take this request: local/a: too small; local/b: too long"
    assert error.message == beginning + end


@pytest.fixture
async def gateway(tmp_path: Path, fake: FakeInference) -> AsyncIterator[Gateway]:
    async with Gateway(tmp_path, fake.url, CONFIG) as gateway:
        yield gateway


ENDPOINTS: dict[str, dict[str, Any]] = {
    "chat.completions": {"messages": user(LONG)},
    "completions": {"prompt": LONG},
    "responses": {"input": LONG},
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_clients_recognise_context_overflow_by_the_text_of_the_exception(
    gateway: Gateway, fake: FakeInference, endpoint: str, stream: bool
) -> None:
    """Both tiers refuse: the first before an attempt, the second with its own message."""
    fake.models["demo"] = replace(fake.models["demo"], context_length=1000)
    fake.counts["demo"] = 1200
    fake.answers["demo-mini"] = Answer(refuse=Code.CONTEXT_LENGTH_EXCEEDED, message="too long")
    await gateway.look()
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0) as client:
        create: Any = client
        for name in endpoint.split("."):
            create = getattr(create, name)
        with pytest.raises(openai.BadRequestError) as caught:
            await create.create(model="demo", stream=stream, **ENDPOINTS[endpoint])
    assert caught.value.code == "context_length_exceeded"
    assert all(mark in caught.value.message.lower() for mark in MARKS)
    verb = "the prompt takes" if endpoint == "completions" else "the messages take"
    assert f"length is 1000 tokens, but {verb} 1200 tokens (context_length_exceeded)." in caught.value.message


@pytest.mark.timeout(60)
async def test_context_overflow_within_a_stream_keeps_its_message(gateway: Gateway, fake: FakeInference) -> None:
    """The error comes after the first token of the answer, so it is a frame."""
    words = context_overflow(10, "the messages take 20 tokens")
    fake.answers["demo"] = Answer(words=("Hi",), finish=None, error=Code.CONTEXT_LENGTH_EXCEEDED, message=words)
    await gateway.look()
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0) as client:
        stream = await client.chat.completions.create(model="demo", stream=True, messages=user("Hi"))  # type: ignore[call-overload]
        with pytest.raises(openai.APIError) as caught:
            async for _ in stream:
                pass
    assert all(mark in str(caught.value).lower() for mark in MARKS)


CLOUDS = """
providers:
  openai: {{kind: openai, api_key: "${{env:CLOUD}}", base_url: {url}/v1, flavor: openai}}
  google: {{kind: openai, api_key: "${{env:CLOUD}}", base_url: {url}/v1beta/openai/}}
  anthropic: {{kind: anthropic, api_key: "${{env:CLOUD}}", base_url: {url}}}
routes:
  openai: {{chain: [openai/fault-context]}}
  google: {{chain: [google/fault-context]}}
  anthropic: {{chain: [anthropic/fault-context]}}
  several: {{chain: [openai/fault-context, google/fault-context, anthropic/fault-context]}}
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", ["openai", "google", "anthropic", "several"])
async def test_clients_recognise_a_context_overflow_that_a_cloud_reports(
    tmp_path: Path, fake: FakeInference, cloud: FakeProvider, model: str, stream: bool
) -> None:
    async with Gateway(tmp_path, fake.url, CLOUDS.format(url=cloud.url), {"CLOUD": CLOUD_KEY}) as gateway:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0) as client:
            for create in (
                client.chat.completions.create(model=model, stream=stream, messages=user("Hi")),  # type: ignore[call-overload]
                client.responses.create(model=model, stream=stream, input="Hi"),
            ):
                with pytest.raises(openai.BadRequestError) as caught:
                    await create
                assert "context_length_exceeded" in caught.value.message
                assert "exceeds the context window" in caught.value.message
        async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=KEY, max_retries=0) as claude:
            with pytest.raises(anthropic.BadRequestError) as refused:
                await claude.messages.create(model=model, stream=stream, max_tokens=9, messages=user("Hi"))  # type: ignore[call-overload]
            assert str(refused.value).count("prompt is too long") == 1
