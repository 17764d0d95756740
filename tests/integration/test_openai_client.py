"""OpenAI's client with everything that the gateway supports: chat, completions, embeddings, models, errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from inference.protocol import Code
from tests.rigs.fake_inference import Answer
from tests.rigs.fake_provider.answers import Answer as CloudAnswer
from tests.rigs.fake_provider.strict import strictly
from tests.rigs.openai_tiers import Tiers, tiers

pytestmark = [pytest.mark.timeout(60), pytest.mark.asyncio(loop_scope="module")]

MESSAGES: Any = [{"role": "user", "content": "Hello!"}]
SUM = ('{"a":', "1,", '"b":2}')


class Sum(BaseModel):
    a: int
    b: int


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Tiers]:
    async with tiers(tmp_path_factory.mktemp("openai")) as running:
        yield running


@pytest.fixture
def all_tiers(running: Tiers) -> Tiers:
    running.forget()
    return running


@pytest.fixture
def client(all_tiers: Tiers) -> openai.AsyncOpenAI:
    return all_tiers.client


# --- chat -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model", ["demo", "gpt", "gpt-5", "claude"])
async def test_chat_is_equal_whole_and_streamed(client: openai.AsyncOpenAI, model: str) -> None:
    whole = await client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=50)
    strictly(ChatCompletion, whole.to_dict())
    got, usage = "", None
    stream = await client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=50, stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        strictly(ChatCompletionChunk, chunk.to_dict())
        got += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert got == whole.choices[0].message.content
    assert usage is not None
    assert whole.usage is not None
    assert usage.total_tokens == whole.usage.total_tokens


@pytest.mark.parametrize("model", ["demo", "gpt", "gpt-5", "claude"])
@pytest.mark.parametrize("beta", [False, True])
async def test_structured_chat_is_parsed(all_tiers: Tiers, model: str, beta: bool) -> None:
    all_tiers.local.answers["demo"] = Answer(words=SUM)
    all_tiers.cloud.answers.set(CloudAnswer(text="".join(SUM)))
    chat = all_tiers.client.beta.chat if beta else all_tiers.client.chat
    parsed = await chat.completions.parse(model=model, messages=MESSAGES, response_format=Sum)
    assert parsed.choices[0].message.parsed == Sum(a=1, b=2)
    async with chat.completions.stream(model=model, messages=MESSAGES, response_format=Sum) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_completion()
    assert "".join(event.delta for event in events if event.type == "content.delta") == "".join(SUM)
    assert events[-1].type == "content.done"
    assert final.choices[0].message.parsed == Sum(a=1, b=2)


@pytest.mark.parametrize("model", ["demo", "gpt", "gpt-5", "claude"])
async def test_image_is_sent_to_every_tier(all_tiers: Tiers, model: str) -> None:
    url = "data:image/png;base64,iVBORw0KGgo="
    fields: Any = [{"role": "user", "content": [
        {"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
    ]}]  # fmt: skip
    for stream in (False, True):
        answer: Any = await all_tiers.client.chat.completions.create(model=model, messages=fields, stream=stream)
        if stream:
            assert [chunk async for chunk in answer]
        sent = all_tiers.local.seen[-1] if model == "demo" else all_tiers.cloud.records[-1]
        (message,) = sent.body["messages"]
        if model == "claude":
            source = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
            assert message["content"][1] == {"type": "image", "source": source}
        else:
            assert message == fields[0]


@pytest.mark.parametrize("model", ["gpt", "claude"])
async def test_function_calls_are_parsed_whole_and_streamed(client: openai.AsyncOpenAI, model: str) -> None:
    tools: Any = [openai.pydantic_function_tool(Sum, name="add")]
    fields: dict[str, Any] = {"model": model, "messages": MESSAGES, "tools": tools, "tool_choice": "required"}
    parsed = await client.chat.completions.parse(**fields)
    call = (parsed.choices[0].message.tool_calls or [])[0]
    assert call.function.parsed_arguments == Sum(a=7, b=7)
    async with client.chat.completions.stream(**fields) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    call = (final.choices[0].message.tool_calls or [])[0]
    assert call.function.parsed_arguments == Sum(a=7, b=7)
    answered: list[Any] = [*MESSAGES, final.choices[0].message]
    answered.append({"role": "tool", "tool_call_id": call.id, "content": "14"})
    last = await client.chat.completions.create(model=model, messages=answered, tools=tools)
    assert last.choices[0].finish_reason == "stop"


async def test_log_probabilities_and_choices_are_returned(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="gpt", messages=MESSAGES, logprobs=True, top_logprobs=2, n=2, seed=1
    )
    assert len(answer.choices) == 2
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content


async def test_answer_cut_by_its_limit_is_not_parsed(all_tiers: Tiers) -> None:
    all_tiers.local.answers["demo"] = Answer(words=SUM[:2], finish="length")
    with pytest.raises(openai.LengthFinishReasonError):
        await all_tiers.client.chat.completions.parse(model="demo", messages=MESSAGES, response_format=Sum)


async def test_broken_stream_raises(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="cut", messages=[{"role": "user", "content": "one two three four"}], stream=True
    )
    got = ""
    with pytest.raises(openai.APIError) as caught:
        async for chunk in stream:
            got += chunk.choices[0].delta.content or ""
    assert got
    assert "was interrupted" in caught.value.message


async def test_raw_and_streaming_responses_show_headers(client: openai.AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(model="demo", messages=MESSAGES)
    assert raw.headers["x-headgate-model"] == "local/demo"
    assert raw.parse().choices[0].message.content == "Hello there!"
    assert raw.request_id == raw.headers["x-request-id"]
    async with client.chat.completions.with_streaming_response.create(
        model="demo", messages=MESSAGES, stream=True
    ) as response:
        assert response.headers["x-headgate-model"] == "local/demo"
        lines = [line async for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all(line.startswith("data: ") for line in lines)


# --- completions, embeddings and models ------------------------------------------------------------------------------
async def test_completions_are_equal_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    whole = await client.completions.create(model="demo", prompt="Once")
    stream = await client.completions.create(model="demo", prompt="Once", stream=True)
    got = "".join([choice.text async for chunk in stream for choice in chunk.choices])
    assert got == whole.choices[0].text == "Hello there!"


async def test_embeddings_are_numbers_or_base64_as_requested(client: openai.AsyncOpenAI) -> None:
    numbers = await client.embeddings.create(model="vectors", input=["a", "b"], encoding_format="float")
    packed = await client.embeddings.create(model="vectors", input=["a", "b"])  # the client requests base64 by default
    kept: Any = await client.embeddings.create(model="vectors", input=["a", "b"], encoding_format="base64")
    assert [item.index for item in numbers.data] == [0, 1]
    assert packed.data[0].embedding == pytest.approx(numbers.data[0].embedding)
    assert isinstance(kept.data[0].embedding, str)
    local = await client.embeddings.create(model="demo", input="a", encoding_format="float")
    assert local.data[0].embedding == [0.5, 0.25]


async def test_models_are_listed_and_retrieved(client: openai.AsyncOpenAI) -> None:
    listed = [model.id async for model in client.models.list()]
    assert {"demo", "gpt", "claude"} <= {*listed}
    assert (await client.models.retrieve("demo")).id == "demo"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("unknown")


# --- errors -----------------------------------------------------------------------------------------------------------
async def ask(client: openai.AsyncOpenAI, **body: Any) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as caught:
        await client.chat.completions.create(**{"model": "demo", "messages": MESSAGES, **body})
    return caught.value


async def test_each_error_raises_its_class(all_tiers: Tiers) -> None:
    client, local = all_tiers.client, all_tiers.local
    wrong = await ask(client.with_options(api_key="wrong"))
    assert (type(wrong), wrong.code) == (openai.AuthenticationError, "invalid_api_key")
    bad = await ask(client, temperature=5)
    assert (type(bad), bad.param) == (openai.BadRequestError, "temperature")
    unknown = await ask(client, model="unknown")
    assert (type(unknown), unknown.code) == (openai.NotFoundError, "model_not_found")
    for model, code, kind in (
        ("crowded", Code.QUEUE_FULL, openai.RateLimitError),
        ("demo", Code.MODEL_FAILED, openai.InternalServerError),
        ("demo", Code.POISON_REQUEST, openai.UnprocessableEntityError),
        ("demo", Code.CONTEXT_LENGTH_EXCEEDED, openai.BadRequestError),
    ):
        local.answers[model] = Answer(refuse=code, retry_after=7)
        got = await ask(client, model=model)
        assert type(got) is kind, got
        assert got.request_id == got.response.headers["x-request-id"]
        if kind is openai.RateLimitError:
            assert got.response.headers["retry-after"] == "7"


async def test_errors_of_the_responses_api_raise_the_classes_of_the_sdk(all_tiers: Tiers) -> None:
    client = all_tiers.client
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="wrong").responses.create(model="demo", input="Hi")
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model="unknown", input="Hi")
    all_tiers.local.answers["busier"] = Answer(refuse=Code.QUEUE_FULL, retry_after=7)
    with pytest.raises(openai.RateLimitError) as caught:
        await client.responses.create(model="busier", input="Hi", stream=True)
    assert caught.value.response.headers["retry-after"] == "7"


async def test_rate_limit_of_a_cloud_is_reported_with_its_retry_after(client: openai.AsyncOpenAI) -> None:
    got = await ask(client, model="busy")
    assert (type(got), got.status_code, got.code) == (openai.InternalServerError, 503, "no_tier_available")
    assert 6 <= int(got.response.headers["retry-after"]) <= 7


async def test_client_with_a_timeout_header_is_answered_in_time(all_tiers: Tiers) -> None:
    """The reason arrives before the client times out; a client without a timeout header times out by itself."""
    all_tiers.local.answers["demo"] = Answer(hold=asyncio.Event())
    impatient = all_tiers.client.with_options(timeout=0.5)
    got = await ask(impatient)
    assert (type(got), got.code) == (openai.InternalServerError, "deadline_exceeded")
    silent: Any = {"x-stainless-read-timeout": openai.Omit()}
    with pytest.raises(openai.APITimeoutError):
        await impatient.chat.completions.create(model="demo", messages=MESSAGES, extra_headers=silent)


async def test_client_retries_only_retryable_errors(all_tiers: Tiers) -> None:
    eager = all_tiers.client.with_options(max_retries=2)
    local = all_tiers.local
    local.queue["hurried"] = [Answer(refuse=Code.QUEUE_FULL, retry_after=1)]
    before = len(local.seen)
    assert (await eager.chat.completions.create(model="hurried", messages=MESSAGES)).choices
    assert len(local.seen) - before == 2
    local.answers["demo"] = Answer(refuse=Code.POISON_REQUEST)
    before = len(local.seen)
    await ask(eager)
    assert len(local.seen) - before == 1


async def test_synchronous_client_works(all_tiers: Tiers) -> None:
    all_tiers.local.answers["demo"] = Answer(words=SUM)

    def work() -> None:
        with openai.OpenAI(**all_tiers.options) as client:
            whole = client.chat.completions.create(model="demo", messages=MESSAGES)
            stream = client.chat.completions.create(model="demo", messages=MESSAGES, stream=True)
            got = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
            assert got == whole.choices[0].message.content
            parsed = client.chat.completions.parse(model="demo", messages=MESSAGES, response_format=Sum)
            assert parsed.choices[0].message.parsed == Sum(a=1, b=2)
            with client.chat.completions.stream(model="demo", messages=MESSAGES, response_format=Sum) as helper:
                helper.until_done()
                assert helper.get_final_completion().choices[0].message.parsed == Sum(a=1, b=2)
            assert json.loads(client.completions.create(model="demo", prompt="x").choices[0].text) == {"a": 1, "b": 2}
            assert client.embeddings.create(model="vectors", input="a").data
            assert client.models.list().data
            with pytest.raises(openai.NotFoundError):
                client.chat.completions.create(model="unknown", messages=MESSAGES)

    await asyncio.to_thread(work)
