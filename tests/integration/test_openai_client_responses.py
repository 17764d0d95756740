"""OpenAI's client with the Responses API: every helper, against the local tier and clouds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai
import pytest
import pytest_asyncio
from openai.types.responses import Response
from pydantic import BaseModel

from inference.protocol import Code
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.fake_provider import FakeProvider
from tests.rigs.fake_provider import answers as fake_provider
from tests.rigs.fake_provider.answers import ToolUse
from tests.rigs.fake_provider.strict import strictly
from tests.rigs.gateway_rig import ADMIN, KEY, Gateway
from tests.rigs.openai_tiers import Tiers, tiers

pytestmark = [pytest.mark.timeout(60), pytest.mark.asyncio(loop_scope="module")]

ADD: Any = {
    "type": "function",
    "name": "add",
    "description": "Adds two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "strict": True,
}


class Sum(BaseModel):
    a: int
    b: int


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Tiers]:
    async with tiers(tmp_path_factory.mktemp("responses")) as running:
        yield running


@pytest.fixture
def fake(running: Tiers) -> FakeInference:
    running.forget()
    return running.local


@pytest.fixture
def cloud(running: Tiers) -> FakeProvider:
    running.forget()
    return running.cloud


@pytest.fixture
def gateway(running: Tiers) -> Gateway:
    running.forget()
    return running.gateway


@pytest.fixture
def client(running: Tiers) -> openai.AsyncOpenAI:
    running.forget()
    return running.client


async def events_of(client: openai.AsyncOpenAI, **body: Any) -> list[Any]:
    """The events of one streamed request."""
    body = {"model": "demo", "input": "Hi", **body}
    stream: Any = await client.responses.create(stream=True, **body)
    return [event async for event in stream]


# --- answers ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model", ["demo", "gpt", "claude"])
async def test_every_tier_gives_the_same_answer_whole_and_streamed(client: openai.AsyncOpenAI, model: str) -> None:
    whole = await client.responses.create(model=model, input="Hi", instructions="Be brief.")
    strictly(Response, whole.to_dict())
    assert whole.status == "completed"
    assert whole.usage is not None
    assert whole.usage.output_tokens > 0
    events = await events_of(client, model=model, instructions="Be brief.")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[1].type) == ("response.created", "response.in_progress")
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == whole.output_text
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text


@pytest.mark.parametrize("model", ["gpt", "claude"])
async def test_parallel_function_calls_and_their_outputs_work(
    client: openai.AsyncOpenAI, cloud: FakeProvider, model: str
) -> None:
    """An agent sends back every item that it received, and the outputs of the functions."""
    tools = (ToolUse("add", {"a": 1, "b": 2}), ToolUse("add", {"a": 3, "b": 4}))
    cloud.answers.set(fake_provider.Answer(text="Let me.", tools=tools, stop="tool_calls"))
    conversation: list[Any] = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Add."}]}]
    options: dict[str, Any] = {
        "model": model, "tools": [ADD], "store": False, "parallel_tool_calls": True, "tool_choice": "auto",
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "c", "instructions": "You are an agent.",
        "reasoning": {"effort": "medium", "summary": "auto"}, "extra_body": {"client_metadata": {"x": "y"}},
    }  # fmt: skip
    events = await events_of(client, input=conversation, **options)
    output = events[-1].response.output
    calls = [item for item in output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
    assert [event.item for event in events if event.type == "response.output_item.done"] == output
    cloud.answers.clear()
    conversation += [item.to_dict() for item in output]
    conversation += [{"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in calls]
    answer = await client.responses.create(input=conversation, **options)
    assert answer.output_text
    sent = json.dumps((await cloud.record()).body)
    assert all(call.call_id in sent for call in calls)


async def test_encrypted_reasoning_can_be_sent_back_to_another_tier(
    client: openai.AsyncOpenAI, cloud: FakeProvider, fake: FakeInference
) -> None:
    """Its text is in the answer too, but a client may keep the encrypted content only."""
    cloud.answers.set(fake_provider.Answer(text="4", reasoning="2 and 2"))
    include: Any = ["reasoning.encrypted_content"]
    answer = await client.responses.create(model="claude", input="2+2?", include=include)
    thought, message = answer.output
    assert (thought.type, message.type, answer.output_text) == ("reasoning", "message", "4")
    assert thought.type == "reasoning"
    assert thought.content is not None
    assert thought.content[0].text == "2 and 2"
    assert thought.encrypted_content is not None
    kept: Any = {"type": "reasoning", "id": thought.id, "summary": [], "encrypted_content": thought.encrypted_content}
    asked: Any = {"role": "user", "content": "Why?"}
    await client.responses.create(model="demo", input=[kept, message.to_dict(), asked])
    restored = {"role": "assistant", "reasoning_content": "2 and 2", "content": "4"}
    assert fake.seen[-1].body["messages"] == [restored, asked]
    events = await events_of(client, model="claude", include=include)
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == "2 and 2"


async def test_structured_output_is_parsed_by_the_client(client: openai.AsyncOpenAI, fake: FakeInference) -> None:
    fake.answers["demo"] = Answer(words=('{"a":', "1,", '"b":2}'))
    parsed = await client.responses.parse(model="demo", input="Sum", text_format=Sum)
    assert parsed.output_parsed == Sum(a=1, b=2)
    body = fake.seen[-1].body["response_format"]
    assert (body["type"], body["json_schema"]["strict"]) == ("json_schema", True)
    async with client.responses.stream(model="demo", input="Sum", text_format=Sum) as stream:
        snapshots = [event.snapshot async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert snapshots[-1] == '{"a":1,"b":2}'
    assert final.output_parsed == Sum(a=1, b=2)


async def test_function_arguments_are_parsed_by_the_client(client: openai.AsyncOpenAI, cloud: FakeProvider) -> None:
    tool: Any = openai.pydantic_function_tool(Sum, name="add")
    flat: Any = {"type": "function", **tool["function"]}
    async with client.responses.stream(model="gpt", input="Add", tools=[flat], tool_choice="required") as stream:
        deltas = [event async for event in stream if event.type == "response.function_call_arguments.delta"]
        final = await stream.get_final_response()
    call = final.output[0]
    assert call.type == "function_call"
    assert call.parsed_arguments == {"a": 7, "b": 7}
    assert deltas[-1].snapshot == call.arguments
    assert (await cloud.record()).body["tool_choice"] == "required"


async def test_log_probabilities_are_sent_with_their_text(client: openai.AsyncOpenAI, cloud: FakeProvider) -> None:
    include: Any = ["message.output_text.logprobs"]
    answer = await client.responses.create(model="gpt", input="Hi", include=include, top_logprobs=2)
    message = answer.output[0]
    assert message.type == "message"
    assert message.content[0].type == "output_text"
    assert "".join(one.token for one in message.content[0].logprobs or ()) == answer.output_text
    assert (await cloud.record()).body["top_logprobs"] == 2
    events = await events_of(client, model="gpt", include=include)
    assert all(event.logprobs for event in events if event.type == "response.output_text.delta")


async def test_answer_cut_by_its_limit_is_incomplete(client: openai.AsyncOpenAI, fake: FakeInference) -> None:
    fake.answers["demo"] = Answer(finish="length")
    events = await events_of(client, max_output_tokens=3)
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.incomplete_details.reason == "max_output_tokens"
    assert fake.seen[-1].body["max_completion_tokens"] == 3


async def test_image_data_is_sent_to_the_tier_and_an_unlisted_url_is_refused(
    client: openai.AsyncOpenAI, cloud: FakeProvider
) -> None:
    url = "data:image/png;base64,iVBORw0KGgo="
    part: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": url, "detail": "auto"}]}]
    await client.responses.create(model="gpt", input=part)
    assert url in json.dumps((await cloud.record()).body)
    part[0]["content"][0]["image_url"] = "https://example.com/a.png"
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="gpt", input=part)
    assert caught.value.param == "input"


# --- conversations ----------------------------------------------------------------------------------------------------
async def test_response_can_be_continued_read_and_deleted(client: openai.AsyncOpenAI, fake: FakeInference) -> None:
    first = await client.responses.create(model="demo", input="One", instructions="Be brief.")
    events = await events_of(client, input="Two", previous_response_id=first.id)
    second = events[-1].response
    assert second.previous_response_id == first.id
    assert fake.seen[-1].body["messages"] == [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Hello there!"},
        {"role": "user", "content": "Two"},
    ]
    assert await client.responses.retrieve(second.id) == second
    other = client.with_options(api_key=ADMIN)
    with pytest.raises(openai.NotFoundError):
        await other.responses.retrieve(second.id)
    with pytest.raises(openai.BadRequestError) as caught:
        await other.responses.create(model="demo", input="Three", previous_response_id=second.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(first.id)
    third = await client.responses.create(model="demo", input="Three", previous_response_id=second.id)
    assert len(fake.seen[-1].body["messages"]) == 5
    assert third.id != second.id
    with pytest.raises(openai.BadRequestError):
        await client.responses.retrieve(second.id, stream=True)


async def test_input_token_count_uses_the_same_request(client: openai.AsyncOpenAI, fake: FakeInference) -> None:
    fake.counts["demo"] = 42
    first = await client.responses.create(model="demo", input="One")
    body: dict[str, Any] = {"model": "demo", "input": "Two", "previous_response_id": first.id}
    counted = await client.responses.input_tokens.count(**body)
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", 42)
    await client.responses.create(**body)
    assert fake.counted[-1]["messages"] == fake.seen[-1].body["messages"]
    counted = await client.responses.input_tokens.count(model="claude", input="Two")
    assert counted.input_tokens > 0


async def test_response_with_store_false_is_not_kept(client: openai.AsyncOpenAI) -> None:
    whole = await client.responses.create(model="demo", input="One", store=False)
    streamed = (await events_of(client, store=False))[-1].response
    for answer in (whole, streamed):
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(answer.id)


async def test_conversations_are_not_in_logs_or_records(
    gateway: Gateway, client: openai.AsyncOpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    first = await client.responses.create(model="demo", input="canary-input", instructions="canary-rules")
    raw = await client.responses.with_raw_response.create(
        model="demo", input="canary-again", previous_response_id=first.id, metadata={"a": "canary-meta"}
    )
    record = (await gateway.admin("GET", f"/admin/requests/{raw.headers['x-request-id']}")).text
    assert "canary" not in record
    ours = [entry.getMessage() for entry in caplog.records if entry.name.startswith(("gateway", "headgate"))]
    assert ours
    assert not [line for line in ours if "canary" in line]


# --- errors and special cases -----------------------------------------------------------------------------------------
async def test_broken_stream_has_a_failed_event_and_raises_in_the_helper(client: openai.AsyncOpenAI) -> None:
    stream: Any = await client.responses.create(model="cut", input="one two three four", stream=True)
    events = []
    with pytest.raises(openai.APIError) as caught:
        async for event in stream:
            events.append(event)  # noqa: PERF401
    assert "was interrupted" in caught.value.message
    assert events[-1].type == "response.failed"
    assert events[-1].response.status == "failed"
    assert events[-1].response.error.code == "server_error"
    assert any(event.type == "response.output_text.delta" for event in events)
    with pytest.raises(openai.APIError):
        async with client.responses.stream(model="cut", input="one two three four") as helper:
            await helper.get_final_response()
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(events[-1].response.id)


async def test_resumed_answer_is_one_sequence_of_events(client: openai.AsyncOpenAI, fake: FakeInference) -> None:
    words = ("one ", "two ", "three ", "four")
    fake.queue["demo"] = [Answer(words=words[:2], cut=True), Answer(words=words)]
    async with client.responses.stream(model="demo", input="Count") as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert final.output_text == "one two three four"
    assert len(final.output) == 1
    assert [event.type for event in events].count("response.output_item.added") == 1


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "unsupported_parameter", "tools[0].type"),
        ({"tools": [{"type": "custom", "name": "patch"}]}, "unsupported_parameter", "tools[0].type"),
        ({"conversation": "conv_1"}, "unsupported_parameter", "conversation"),
        ({"background": True}, "unsupported_parameter", "background"),
        ({"truncation": "sometimes"}, "invalid_request", "truncation"),
        ({"temperature": 3}, "invalid_request", "temperature"),
    ],
)
async def test_unsupported_fields_are_refused_by_name(
    client: openai.AsyncOpenAI, body: dict[str, Any], code: str, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(**{"model": "demo", "input": "Hi", **body})
    assert (caught.value.code, caught.value.param) == (code, param)


async def test_compact_endpoint_is_not_found(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await client.responses.compact(model="demo", input="Hi")
    assert caught.value.code == "not_found"
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="wrong").responses.compact(model="demo", input="Hi")


async def test_hosted_tools_are_dropped_if_configured(
    gateway: Gateway, client: openai.AsyncOpenAI, cloud: FakeProvider
) -> None:
    gateway.environ["GATEWAY_HOSTED_TOOLS"] = "leave_out"
    try:
        await gateway.runtime.reload()
        answer = await client.responses.create(model="gpt", input="Hi", tools=[ADD, {"type": "web_search"}])
    finally:
        del gateway.environ["GATEWAY_HOSTED_TOOLS"]
        await gateway.runtime.reload()
    assert [tool.type for tool in answer.tools] == ["function"]
    assert len((await cloud.record()).body["tools"]) == 1


async def test_error_of_the_inference_service_names_the_field_of_the_responses_api(
    client: openai.AsyncOpenAI, fake: FakeInference
) -> None:
    fake.answers["demo"] = Answer(refuse=Code.CONTEXT_LENGTH_EXCEEDED, message="too long")
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="demo", input="Hi")
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")


async def test_progress_comments_are_not_events(client: openai.AsyncOpenAI, fake: FakeInference) -> None:
    """They are in the stream: with a timeout of 1.5 s the gateway forwards them after 0.5 s."""
    fake.answers["demo"] = Answer(comments=10, pause=0.1)
    impatient = client.with_options(timeout=1.5)
    create = impatient.responses.with_streaming_response.create
    async with create(model="demo", input="Hi", stream=True) as response:
        assert [line async for line in response.iter_lines() if line.startswith(": headgate")]
    events = await events_of(impatient)
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_synchronous_client_and_raw_answers_work(gateway: Gateway) -> None:
    def work() -> None:
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0, timeout=20) as client:
            whole = client.responses.create(model="demo", input="Hi")
            with client.responses.stream(model="demo", input="Hi") as stream:
                for _ in stream:
                    pass
                assert stream.get_final_response().output_text == whole.output_text
            assert client.responses.retrieve(whole.id).id == whole.id
            raw = client.responses.with_raw_response.create(model="demo", input="Hi")
            assert raw.headers["x-headgate-model"] == "local/demo"
            assert raw.parse().output_text == whole.output_text
            with client.responses.with_streaming_response.create(model="demo", input="Hi") as response:
                assert response.parse().output_text == whole.output_text
            beta = client.beta.responses.create(model="demo", input="Hi")
            assert beta.status == "completed"

    await asyncio.to_thread(work)


async def test_frames_have_one_event_type_and_one_line_of_data(gateway: Gateway) -> None:
    """Read without the client, which would accept other frames too."""
    async with httpx2.AsyncClient(base_url=gateway.url, headers={"authorization": f"Bearer {KEY}"}) as plain:
        answer = await plain.post("/v1/responses", json={"model": "demo", "input": "Hi", "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-headgate-tier"] == "local"
    for frame in answer.text.strip().split("\n\n"):
        event, data = frame.split("\n")
        assert json.loads(data.removeprefix("data: "))["type"] == event.removeprefix("event: ")
    assert "[DONE]" not in answer.text
