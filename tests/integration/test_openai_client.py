"""OpenAI's own client, everything of it that this gateway serves: chat, completions, embeddings, models, errors."""

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
from tests.rigs.fake_provider.answers import Answer as Said
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
def all_of_it(running: Tiers) -> Tiers:
    running.forget()
    return running


@pytest.fixture
def client(all_of_it: Tiers) -> openai.AsyncOpenAI:
    return all_of_it.client


# --- chat -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model", ["demo", "gpt", "gpt-5", "claude"])
async def test_chat_whole_and_streamed(client: openai.AsyncOpenAI, model: str) -> None:
    whole = await client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=50)
    strictly(ChatCompletion, whole.to_dict())
    said, usage = "", None
    stream = await client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=50, stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        strictly(ChatCompletionChunk, chunk.to_dict())
        said += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert said == whole.choices[0].message.content
    assert usage is not None
    assert whole.usage is not None
    assert usage.total_tokens == whole.usage.total_tokens


@pytest.mark.parametrize("model", ["demo", "gpt", "gpt-5", "claude"])
@pytest.mark.parametrize("beta", [False, True])
async def test_structured_chat_is_parsed(all_of_it: Tiers, model: str, beta: bool) -> None:
    all_of_it.local.answers["demo"] = Answer(words=SUM)
    all_of_it.cloud.answers.set(Said(text="".join(SUM)))
    chat = all_of_it.client.beta.chat if beta else all_of_it.client.chat
    parsed = await chat.completions.parse(model=model, messages=MESSAGES, response_format=Sum)
    assert parsed.choices[0].message.parsed == Sum(a=1, b=2)
    async with chat.completions.stream(model=model, messages=MESSAGES, response_format=Sum) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_completion()
    assert "".join(event.delta for event in events if event.type == "content.delta") == "".join(SUM)
    assert events[-1].type == "content.done"
    assert final.choices[0].message.parsed == Sum(a=1, b=2)


@pytest.mark.parametrize("model", ["demo", "gpt", "gpt-5", "claude"])
async def test_an_image_reaches_every_tier(all_of_it: Tiers, model: str) -> None:
    url = "data:image/png;base64,iVBORw0KGgo="
    asked: Any = [{"role": "user", "content": [
        {"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
    ]}]  # fmt: skip
    for stream in (False, True):
        answer: Any = await all_of_it.client.chat.completions.create(model=model, messages=asked, stream=stream)
        if stream:
            assert [chunk async for chunk in answer]
        sent = all_of_it.local.seen[-1] if model == "demo" else all_of_it.cloud.records[-1]
        (message,) = sent.body["messages"]
        if model == "claude":
            source = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
            assert message["content"][1] == {"type": "image", "source": source}
        else:
            assert message == asked[0]


@pytest.mark.parametrize("model", ["gpt", "claude"])
async def test_function_calls_are_parsed_whole_and_streamed(client: openai.AsyncOpenAI, model: str) -> None:
    tools: Any = [openai.pydantic_function_tool(Sum, name="add")]
    asked: dict[str, Any] = {"model": model, "messages": MESSAGES, "tools": tools, "tool_choice": "required"}
    parsed = await client.chat.completions.parse(**asked)
    call = (parsed.choices[0].message.tool_calls or [])[0]
    assert call.function.parsed_arguments == Sum(a=7, b=7)
    async with client.chat.completions.stream(**asked) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    call = (final.choices[0].message.tool_calls or [])[0]
    assert call.function.parsed_arguments == Sum(a=7, b=7)
    answered: list[Any] = [*MESSAGES, final.choices[0].message]
    answered.append({"role": "tool", "tool_call_id": call.id, "content": "14"})
    last = await client.chat.completions.create(model=model, messages=answered, tools=tools)
    assert last.choices[0].finish_reason == "stop"


async def test_log_probabilities_and_choices(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="gpt", messages=MESSAGES, logprobs=True, top_logprobs=2, n=2, seed=1
    )
    assert len(answer.choices) == 2
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content


async def test_an_answer_that_reached_its_limit_is_no_parsed_one(all_of_it: Tiers) -> None:
    all_of_it.local.answers["demo"] = Answer(words=SUM[:2], finish="length")
    with pytest.raises(openai.LengthFinishReasonError):
        await all_of_it.client.chat.completions.parse(model="demo", messages=MESSAGES, response_format=Sum)


async def test_a_stream_that_breaks_off_raises(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="cut", messages=[{"role": "user", "content": "one two three four"}], stream=True
    )
    said = ""
    with pytest.raises(openai.APIError) as caught:
        async for chunk in stream:
            said += chunk.choices[0].delta.content or ""
    assert said
    assert "broke off" in caught.value.message


async def test_raw_and_streaming_responses_show_headers(client: openai.AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(model="demo", messages=MESSAGES)
    assert raw.headers["x-headgate-model"] == "local/demo"
    assert raw.parse().choices[0].message.content == "Hello there!"
    assert raw.request_id == raw.headers["x-request-id"]
    async with client.chat.completions.with_streaming_response.create(
        model="demo", messages=MESSAGES, stream=True
    ) as response:
        lines = [line async for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all(line.startswith("data: ") for line in lines)


# --- the rest of it ---------------------------------------------------------------------------------------------------
async def test_completions_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    whole = await client.completions.create(model="demo", prompt="Once")
    stream = await client.completions.create(model="demo", prompt="Once", stream=True)
    said = "".join([choice.text async for chunk in stream for choice in chunk.choices])
    assert said == whole.choices[0].text == "Hello there!"


async def test_embeddings_as_numbers_and_as_base64(client: openai.AsyncOpenAI) -> None:
    numbers = await client.embeddings.create(model="vectors", input=["a", "b"], encoding_format="float")
    packed = await client.embeddings.create(model="vectors", input=["a", "b"])  # the client asks for base64 by itself
    kept: Any = await client.embeddings.create(model="vectors", input=["a", "b"], encoding_format="base64")
    assert [item.index for item in numbers.data] == [0, 1]
    assert packed.data[0].embedding == pytest.approx(numbers.data[0].embedding)
    assert isinstance(kept.data[0].embedding, str)
    local = await client.embeddings.create(model="demo", input="a", encoding_format="float")
    assert local.data[0].embedding == [0.5, 0.25]


async def test_models_are_listed_and_found(client: openai.AsyncOpenAI) -> None:
    listed = [model.id async for model in client.models.list()]
    assert {"demo", "gpt", "claude"} <= {*listed}
    assert (await client.models.retrieve("demo")).id == "demo"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("nobody")


# --- errors -----------------------------------------------------------------------------------------------------------
async def ask(client: openai.AsyncOpenAI, **body: Any) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as caught:
        await client.chat.completions.create(**{"model": "demo", "messages": MESSAGES, **body})
    return caught.value


async def test_every_class_of_error_is_what_it_says(all_of_it: Tiers) -> None:
    client, local = all_of_it.client, all_of_it.local
    wrong = await ask(client.with_options(api_key="wrong"))
    assert (type(wrong), wrong.code) == (openai.AuthenticationError, "invalid_api_key")
    bad = await ask(client, temperature=5)
    assert (type(bad), bad.param) == (openai.BadRequestError, "temperature")
    nobody = await ask(client, model="nobody")
    assert (type(nobody), nobody.code) == (openai.NotFoundError, "model_not_found")
    for model, code, kind in (
        ("crowded", Code.QUEUE_FULL, openai.RateLimitError),
        ("demo", Code.MODEL_FAILED, openai.InternalServerError),
        ("demo", Code.POISON_REQUEST, openai.UnprocessableEntityError),
        ("demo", Code.CONTEXT_LENGTH_EXCEEDED, openai.BadRequestError),
    ):
        local.answers[model] = Answer(refuse=code, retry_after=7)
        said = await ask(client, model=model)
        assert type(said) is kind, said
        assert said.request_id == said.response.headers["x-request-id"]
        if kind is openai.RateLimitError:
            assert said.response.headers["retry-after"] == "7"


async def test_errors_in_responses_are_the_same_classes(all_of_it: Tiers) -> None:
    client = all_of_it.client
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="wrong").responses.create(model="demo", input="Hi")
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model="nobody", input="Hi")
    all_of_it.local.answers["busier"] = Answer(refuse=Code.QUEUE_FULL, retry_after=7)
    with pytest.raises(openai.RateLimitError) as caught:
        await client.responses.create(model="busier", input="Hi", stream=True)
    assert caught.value.response.headers["retry-after"] == "7"


async def test_a_clouds_rate_limit_is_told_with_its_wait(client: openai.AsyncOpenAI) -> None:
    said = await ask(client, model="busy")
    assert (type(said), said.status_code, said.code) == (openai.InternalServerError, 503, "no_tier_available")
    assert 6 <= int(said.response.headers["retry-after"]) <= 7


async def test_a_client_that_says_how_long_it_waits_is_answered_in_time(all_of_it: Tiers) -> None:
    """It hears why before its own time-out; one that does not say times out by itself."""
    all_of_it.local.answers["demo"] = Answer(hold=asyncio.Event())
    hasty = all_of_it.client.with_options(timeout=0.5)
    said = await ask(hasty)
    assert (type(said), said.code) == (openai.InternalServerError, "deadline_exceeded")
    silent: Any = {"x-stainless-read-timeout": openai.Omit()}
    with pytest.raises(openai.APITimeoutError):
        await hasty.chat.completions.create(model="demo", messages=MESSAGES, extra_headers=silent)


async def test_the_client_tries_again_where_that_helps_and_not_where_it_cannot(all_of_it: Tiers) -> None:
    eager = all_of_it.client.with_options(max_retries=2)
    local = all_of_it.local
    local.queue["hurried"] = [Answer(refuse=Code.QUEUE_FULL, retry_after=1)]
    before = len(local.seen)
    assert (await eager.chat.completions.create(model="hurried", messages=MESSAGES)).choices
    assert len(local.seen) - before == 2
    local.answers["demo"] = Answer(refuse=Code.POISON_REQUEST)
    before = len(local.seen)
    await ask(eager)
    assert len(local.seen) - before == 1


async def test_the_synchronous_client(all_of_it: Tiers) -> None:
    all_of_it.local.answers["demo"] = Answer(words=SUM)

    def work() -> None:
        with openai.OpenAI(**all_of_it.options) as client:
            whole = client.chat.completions.create(model="demo", messages=MESSAGES)
            stream = client.chat.completions.create(model="demo", messages=MESSAGES, stream=True)
            said = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
            assert said == whole.choices[0].message.content
            parsed = client.chat.completions.parse(model="demo", messages=MESSAGES, response_format=Sum)
            assert parsed.choices[0].message.parsed == Sum(a=1, b=2)
            with client.chat.completions.stream(model="demo", messages=MESSAGES, response_format=Sum) as helper:
                helper.until_done()
                assert helper.get_final_completion().choices[0].message.parsed == Sum(a=1, b=2)
            assert json.loads(client.completions.create(model="demo", prompt="x").choices[0].text) == {"a": 1, "b": 2}
            assert client.embeddings.create(model="vectors", input="a").data
            assert client.models.list().data
            with pytest.raises(openai.NotFoundError):
                client.chat.completions.create(model="nobody", messages=MESSAGES)

    await asyncio.to_thread(work)
