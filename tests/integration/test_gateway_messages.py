"""The official Anthropic client against a local tier and clouds of every kind."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pydantic
import pytest
from anthropic import AsyncAnthropic, beta_async_tool
from anthropic.types import ModelInfo

from gateway.apis.messages.messages_answer import UNSIGNED
from gateway.apis.openai.generation_request import short_name
from inference.protocol import Code
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.fake_provider import KEY as CLOUD_KEY
from tests.rigs.fake_provider import FakeProvider, Fault
from tests.rigs.fake_provider.answers import Answer as CloudAnswer
from tests.rigs.fake_provider.answers import ToolUse
from tests.rigs.fake_provider.strict import strictly
from tests.rigs.gateway_rig import KEY, Gateway

pytestmark = pytest.mark.timeout(60)

CONFIG = """
providers:
  openai: {{kind: openai, api_key: "${{env:CLOUD}}", base_url: {url}/v1, flavor: openai}}
  azure: {{kind: openai, api_key: "${{env:CLOUD}}", base_url: {url}/openai/v1, flavor: openai}}
  google: {{kind: openai, api_key: "${{env:CLOUD}}", base_url: {url}/v1beta/openai/}}
  anthropic: {{kind: anthropic, api_key: "${{env:CLOUD}}", base_url: {url}}}
  nowhere: {{kind: anthropic, api_key: "${{env:CLOUD}}", base_url: "http://127.0.0.1:9"}}
max_body: 100000
routes:
  demo: {{chain: [local/demo]}}
  claude: {{chain: [anthropic/claude-opus-5]}}
  haiku: {{chain: [anthropic/claude-haiku-4-5]}}
  gpt: {{chain: [openai/gpt-5]}}
  azure: {{chain: [azure/gpt-4o]}}
  gemini: {{chain: [google/gemini]}}
  nowhere: {{chain: [nowhere/claude-opus-5]}}
  toolless: {{chain: [local/demo-mini, anthropic/claude-opus-5]}}
  breaking: {{chain: [anthropic/fault-cut=2, local/demo]}}
  thinks: {{chain: [anthropic/claude-opus-5, local/demo]}}
  away: {{chain: [local/away, anthropic/claude-opus-5]}}
"""
MESSAGES: Any = [{"role": "user", "content": "Hello!"}]
LOOK: Any = {
    "name": "look",
    "description": "Looks somewhere.",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
}
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()
HEAD = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 5, "model": "demo"}


def raw(*deltas: dict[str, Any], finish: str = "stop", **more: Any) -> Answer:
    """A local answer of these deltas."""
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in ({"role": "assistant"}, *deltas)]
    choices.append({"index": 0, "delta": {}, "finish_reason": finish, **more})
    chunks = [{**HEAD, "choices": [choice]} for choice in choices]
    usage = {"prompt_tokens": 20, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 16}}
    chunks.append({**HEAD, "choices": [], "usage": usage})
    frames = [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks]
    return Answer(raw=b"".join([*frames, b"data: [DONE]\n\n"]))


def call(index: int, id: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": "look", "arguments": json.dumps(arguments)}
    return {"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]}


@pytest.fixture
async def local() -> AsyncIterator[FakeInference]:
    async with FakeInference() as local:
        can = ("chat", "completions", "tools", "vision")
        local.models["demo"] = dataclasses.replace(local.models["demo"], capabilities=can)
        yield local


@pytest.fixture
async def gateway(tmp_path: Path, local: FakeInference, cloud: FakeProvider) -> AsyncIterator[Gateway]:
    config = CONFIG.format(url=cloud.url)
    async with Gateway(tmp_path, local.url, config, {"CLOUD": CLOUD_KEY}) as gateway:
        await gateway.look()
        yield gateway


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=gateway.url, api_key=KEY, max_retries=0, timeout=20) as client:
        yield client


# --- whole and streamed -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model", ["demo", "claude", "gpt", "azure", "gemini"])
async def test_every_tier_answers_whole_and_streamed(client: AsyncAnthropic, model: str) -> None:
    whole = await client.messages.create(model=model, max_tokens=50, messages=MESSAGES, system="Be brief.")
    assert (whole.type, whole.role, whole.stop_reason) == ("message", "assistant", "end_turn")
    assert whole.id.startswith("msg_")
    assert whole.usage.output_tokens > 0 and whole.usage.input_tokens > 0
    async with client.messages.stream(model=model, max_tokens=50, messages=MESSAGES, system="Be brief.") as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    got = "".join(block.text for block in whole.content if block.type == "text")
    assert text == await stream.get_final_text() == got
    assert final.usage == whole.usage
    assert final.model == whole.model
    assert final.stop_reason == "end_turn"


async def test_synchronous_client_and_raw_events_work(gateway: Gateway) -> None:
    def ask() -> list[str]:
        with anthropic.Anthropic(base_url=gateway.url, auth_token=KEY, max_retries=0) as client:
            client.messages.create(model="demo", max_tokens=5, messages=MESSAGES)
            return [event.type for event in client.messages.create(
                model="demo", max_tokens=5, messages=MESSAGES, stream=True
            )]  # fmt: skip

    kinds = await asyncio.to_thread(ask)
    assert kinds[:3] == ["message_start", "content_block_start", "content_block_delta"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


async def test_headers_have_the_model_and_one_request_id(client: AsyncAnthropic) -> None:
    got = await client.messages.with_raw_response.create(model="demo", max_tokens=5, messages=MESSAGES)
    assert got.headers["x-headgate-model"] == "local/demo"
    assert got.headers["request-id"] == got.headers["x-request-id"] == (await got.parse())._request_id
    async with client.messages.with_streaming_response.create(model="demo", max_tokens=5, messages=MESSAGES) as raw_one:
        assert json.loads(await raw_one.read())["type"] == "message"
    async with client.messages.stream(model="demo", max_tokens=5, messages=MESSAGES) as stream:
        await stream.until_done()
        assert stream.request_id == stream.response.headers["x-request-id"]


async def test_beta_fields_are_accepted_and_not_sent_to_a_local_model(
    client: AsyncAnthropic, local: FakeInference
) -> None:
    got = await client.beta.messages.create(
        model="demo",
        max_tokens=5,
        messages=MESSAGES,
        betas=["interleaved-thinking-2025-05-14", "context-management-2025-06-27"],
        context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
    )
    assert got.content[0].type == "text"
    assert set(local.seen[-1].body) == {"model", "max_tokens", "messages", "stream", "stream_options"}


async def test_client_reads_a_stream_that_begins_with_progress_comments(
    client: AsyncAnthropic, local: FakeInference
) -> None:
    local.answers["demo"] = Answer(comments=2)
    events = [event.type async for event in await client.messages.create(
        model="demo", max_tokens=5, messages=MESSAGES, stream=True
    )]  # fmt: skip
    assert events[0] == "message_start"


# --- agents -----------------------------------------------------------------------------------------------------------
AGENT: dict[str, Any] = {
    "max_tokens": 100,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
        {"type": "text", "text": "You mill.", "cache_control": {"type": "ephemeral"}},
    ],
    "tools": [{**LOOK, "cache_control": {"type": "ephemeral"}}],
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "medium"},
    "metadata": {"user_id": "u1"},
    "stop_sequences": ["END"],
}
"""The fields that a coding agent sends with every turn."""


def results_of(mill: str, dark: str) -> Any:
    """The results of two tool calls: first the error of `dark`, then a text and an image for `mill`."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
    return {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": dark, "content": "dark", "is_error": True},
            {"type": "tool_result", "tool_use_id": mill, "content": [{"type": "text", "text": "a mill"}, image]},
        ],
    }


async def test_parallel_tool_calls_of_a_coding_agent_work_on_a_local_model(
    client: AsyncAnthropic, local: FakeInference
) -> None:
    local.queue["demo"] = [
        raw({"reasoning_content": "Both."}, {"content": "I look."}, call(0, "c1", at="a"), call(1, "c2", at="b"),
            finish="tool_calls"),
        raw({"content": "Done."}, stop_reason="END"),
    ]  # fmt: skip
    fields = {"model": "demo", **AGENT}
    async with client.messages.stream(messages=MESSAGES, **fields) as stream:
        kinds = [event.type async for event in stream]
        first = await stream.get_final_message()
    assert {"thinking", "signature", "text", "input_json"} <= set(kinds)
    assert first.stop_reason == "tool_use"
    assert (first.usage.input_tokens, first.usage.cache_read_input_tokens) == (4, 16)
    uses = [block for block in first.content if block.type == "tool_use"]
    assert [(use.id, use.input) for use in uses] == [("c1", {"at": "a"}), ("c2", {"at": "b"})]
    history = [*MESSAGES, first.to_param(), results_of("c1", "c2")]
    second = await client.messages.create(messages=history, **fields)
    assert (second.stop_reason, second.stop_sequence) == ("stop_sequence", "END")
    sent = local.seen[-1].body
    assert sent["reasoning_effort"] == "medium"
    assert [message["role"] for message in sent["messages"]] == ["system", "user", "assistant", "tool", "tool", "user"]
    assert sent["messages"][0]["content"] == "You mill."
    assert sent["messages"][2]["reasoning_content"] == "Both."
    assert [message["content"] for message in sent["messages"][3:5]] == ["a mill", "Error: dark"]
    assert sent["messages"][5]["content"][1]["type"] == "image_url"


@pytest.mark.parametrize("model", ["gpt", "gemini"])
async def test_parallel_tool_calls_of_a_coding_agent_work_on_other_clouds(
    client: AsyncAnthropic, cloud: FakeProvider, model: str
) -> None:
    """Reasoning comes back with the history; only Anthropic has a field for it."""
    fields = {"model": model, **AGENT}
    if model == "gpt":
        del fields["stop_sequences"]  # reasoning models refuse them
    looks = (ToolUse("look", {"at": "a"}), ToolUse("look", {"at": "b"}))
    cloud.answers.set(CloudAnswer(text="I look.", reasoning="Both.", tools=looks, stop="tool_calls"))
    async with client.messages.stream(messages=MESSAGES, **fields) as stream:
        first = await stream.get_final_message()
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert first.stop_reason == "tool_use"
    mill, dark = [block.id for block in first.content if block.type == "tool_use"]
    cloud.answers.clear()
    history = [*MESSAGES, first.to_param(), results_of(mill, dark)]
    second = await client.messages.create(messages=history, **fields)
    assert second.stop_reason == "end_turn"
    sent = cloud.records[-1].body
    assert {name: sent[name] for name in sent if name.startswith("max_")} == {
        "max_completion_tokens" if model == "gpt" else "max_tokens": 100
    }
    assert [message["role"] for message in sent["messages"]] == ["system", "user", "assistant", "tool", "tool", "user"]
    assert [call["id"] for call in sent["messages"][2]["tool_calls"]] == [mill, dark]
    assert [message["content"] for message in sent["messages"][3:5]] == ["a mill", "Error: dark"]
    assert sent["messages"][5]["content"][1]["image_url"]["url"].endswith(PNG)


@pytest.mark.parametrize("model", ["gpt", "gemini", "claude"])
async def test_long_tool_names_are_shortened_for_other_clouds_and_restored(
    client: AsyncAnthropic, cloud: FakeProvider, model: str
) -> None:
    """Anthropic accepts 128 characters, OpenAI and Google 64."""
    name = "mcp__" + "looks_" * 20
    fields: Any = {"model": model, "max_tokens": 100, "tools": [{**LOOK, "name": name}], "messages": MESSAGES}
    fields["tool_choice"] = {"type": "tool", "name": name}
    expected = name if model == "claude" else short_name(name)
    cloud.answers.set(CloudAnswer(tools=(ToolUse(expected, {"at": "a"}),), stop="tool_calls"))
    whole = await client.messages.create(**fields)
    async with client.messages.stream(**fields) as stream:
        streamed = await stream.get_final_message()
    contents: list[Any] = [whole.content, streamed.content]
    for content in contents:
        assert [block.name for block in content if block.type == "tool_use"] == [name]
    id = next(block.id for block in whole.content if block.type == "tool_use")
    cloud.answers.clear()
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": "dark"}]}
    del fields["tool_choice"]
    await client.messages.create(**{**fields, "messages": [*MESSAGES, whole.to_param(), result]})
    body = cloud.records[-1].body
    if model != "claude":
        assert (
            body["tools"][0]["function"]["name"] == body["messages"][1]["tool_calls"][0]["function"]["name"] == expected
        )


async def test_max_tokens_beyond_a_local_context_is_reduced_to_the_context(
    client: AsyncAnthropic, local: FakeInference
) -> None:
    local.answers["demo"] = dataclasses.replace(Answer(), finish="length")
    got = await client.messages.create(model="demo", max_tokens=32_000, messages=MESSAGES, timeout=20)
    assert local.seen[-1].body["max_tokens"] == local.models["demo"].context_length == 4096
    assert got.stop_reason == "model_context_window_exceeded"
    short = await client.messages.create(model="demo", max_tokens=3, messages=MESSAGES)
    assert (local.seen[-1].body["max_tokens"], short.stop_reason) == (3, "max_tokens")


async def test_tool_runner_of_the_sdk_completes(client: AsyncAnthropic, local: FakeInference) -> None:
    looked: list[str] = []

    @beta_async_tool
    async def look(at: str) -> str:
        """Looks somewhere.

        Args:
            at: where
        """
        looked.append(at)
        return "a mill"

    local.queue["demo"] = [
        raw(call(0, "c1", at="the river"), finish="tool_calls"),
        raw({"content": "There is a mill."}),
    ]
    runner = client.beta.messages.tool_runner(model="demo", max_tokens=50, messages=MESSAGES, tools=[look])
    final = await runner.until_done()
    assert looked == ["the river"]
    assert final.content[0].type == "text"


class MillFacts(pydantic.BaseModel):
    """A mill."""

    wheels: int


@pytest.mark.parametrize("model", ["demo", "claude", "haiku", "gpt", "gemini"])
async def test_structured_output_is_parsed_by_the_sdk(
    client: AsyncAnthropic, local: FakeInference, cloud: FakeProvider, model: str
) -> None:
    """Whole, streamed and by the beta calls."""
    local.answers["demo"] = raw({"content": '{"wheels":'}, {"content": " 2}"})
    cloud.answers.set(CloudAnswer(text='{"wheels": 2}'))
    fields: dict[str, Any] = {"model": model, "max_tokens": 50, "messages": MESSAGES, "output_format": MillFacts}
    parsed = await client.messages.parse(**fields)
    assert parsed.parsed_output == MillFacts(wheels=2)
    async with client.messages.stream(**fields) as stream:
        assert (await stream.get_final_message()).parsed_output == MillFacts(wheels=2)
    assert (await client.beta.messages.parse(**fields)).parsed_output == MillFacts(wheels=2)
    async with client.beta.messages.stream(**fields) as beta:
        assert (await beta.get_final_message()).parsed_output == MillFacts(wheels=2)
    sent = local.seen if model == "demo" else cloud.records
    assert len(sent) == 4
    for one in sent:
        is_anthropic = model in ("claude", "haiku")
        shape = one.body["output_config"]["format"] if is_anthropic else one.body["response_format"]["json_schema"]
        assert shape["schema"]["properties"]["wheels"]["type"] == "integer"


@pytest.mark.parametrize("model", ["demo", "claude", "gpt", "gemini"])
async def test_plain_text_documents_are_accepted(
    client: AsyncAnthropic, local: FakeInference, cloud: FakeProvider, model: str
) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "The mill has two wheels."}
    document = {"type": "document", "source": source, "title": "Mills", "context": "A guide."}
    fields: Any = [{"role": "user", "content": [document, {"type": "text", "text": "How many?"}]}]
    await client.messages.create(model=model, max_tokens=50, messages=fields)
    sent = (local.seen if model == "demo" else cloud.records)[-1].body
    if model == "claude":
        assert sent["messages"] == fields
        with pytest.raises(anthropic.BadRequestError, match="text/plain"):
            source["media_type"] = "text/html"
            await client.messages.create(model=model, max_tokens=50, messages=fields)
        return
    expected = {"type": "text", "text": "Mills\nA guide.\nThe mill has two wheels."}
    assert sent["messages"][0]["content"] == [expected, {"type": "text", "text": "How many?"}]


async def test_prefill_is_continued_by_tiers_that_support_it(
    client: AsyncAnthropic, local: FakeInference, cloud: FakeProvider
) -> None:
    begun: Any = [*MESSAGES, {"role": "assistant", "content": "The mill"}]
    await client.messages.create(model="demo", max_tokens=5, messages=begun)
    assert local.seen[-1].body["continue_final_message"] is True
    await client.messages.create(model="haiku", max_tokens=5, messages=begun)
    assert cloud.records[-1].body["messages"][-1] == {"role": "assistant", "content": "The mill"}
    for model in ("claude", "gpt"):
        with pytest.raises(anthropic.BadRequestError, match="supports this request"):
            await client.messages.create(model=model, max_tokens=5, messages=begun)


# --- Anthropic as provider --------------------------------------------------------------------------------------------
async def test_thinking_of_anthropic_is_returned_unchanged(client: AsyncAnthropic, cloud: FakeProvider) -> None:
    cloud.answers.set(
        CloudAnswer(text="I look.", reasoning="Hm. Yes.", tools=(ToolUse("look", {"at": "a"}),), stop="tool_calls")
    )
    fields: dict[str, Any] = {
        "model": "claude",
        "max_tokens": 100,
        "tools": [LOOK],
        "system": [{"type": "text", "text": "You mill.", "cache_control": {"type": "ephemeral"}}],
        "thinking": {"type": "adaptive"},
    }
    whole = await client.messages.create(messages=MESSAGES, **fields)
    async with client.messages.stream(messages=MESSAGES, **fields) as stream:
        streamed = await stream.get_final_message()
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    assert [(block.type, getattr(block, "signature", "")) for block in streamed.content] == [
        (block.type, getattr(block, "signature", "")) for block in whole.content
    ]
    use = next(block for block in whole.content if block.type == "tool_use")
    results: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "x"}]}
    await client.messages.create(messages=[*MESSAGES, whole.to_param(), results], **fields)
    sent = cloud.records[-1].body
    assert sent["messages"][1]["content"][0] == whole.content[0].model_dump(exclude_none=True)
    assert sent["system"] == fields["system"]
    assert sent["thinking"] == {"type": "adaptive"}


async def test_thinking_of_local_models_is_not_sent_to_anthropic(
    client: AsyncAnthropic, local: FakeInference, cloud: FakeProvider
) -> None:
    local.answers["demo"] = raw({"reasoning_content": "Mine."}, {"content": "Yes."})
    first = await client.messages.create(model="demo", max_tokens=50, messages=MESSAGES)
    assert first.content[0].type == "thinking"
    await client.messages.create(model="claude", max_tokens=50, messages=[*MESSAGES, first.to_param(), *MESSAGES])
    assert cloud.records[-1].body["messages"][1]["content"] == [{"type": "text", "text": "Yes."}]


async def test_refusal_has_its_explanation(client: AsyncAnthropic, cloud: FakeProvider) -> None:
    cloud.answers.set(CloudAnswer(text="I", refusal="Not this.", stop="content_filter"))
    whole = await client.messages.create(model="claude", max_tokens=50, messages=MESSAGES)
    assert whole.stop_reason == "refusal"
    assert whole.stop_details is not None and whole.stop_details.explanation == "Not this."
    assert whole.stop_details.category == "general_harms"
    other = await client.messages.create(model="gpt", max_tokens=50, messages=MESSAGES)
    assert other.stop_reason == "refusal"


# --- counting ---------------------------------------------------------------------------------------------------------
async def test_anthropic_counts_tokens_for_its_own_models_only(client: AsyncAnthropic, cloud: FakeProvider) -> None:
    counted = await client.messages.count_tokens(model="claude", messages=MESSAGES, system="You mill.", tools=[LOOK])
    assert counted.input_tokens > 0
    assert cloud.records[-1].body["model"] == "claude-opus-5"
    again = await client.beta.messages.count_tokens(model="claude", messages=MESSAGES, betas=["x"])
    assert again.input_tokens > 0
    with pytest.raises(anthropic.BadRequestError, match="cannot count tokens") as caught:
        await client.messages.count_tokens(model="gpt", messages=MESSAGES)
    assert caught.value.error_code == "unsupported_parameter"
    with pytest.raises(anthropic.APIStatusError) as unreachable:
        await client.messages.count_tokens(model="nowhere", messages=MESSAGES)
    assert (unreachable.value.status_code, unreachable.value.type) == (503, "overloaded_error")
    passed = await client.messages.with_raw_response.count_tokens(model="toolless", messages=MESSAGES, tools=[LOOK])
    assert passed.headers["x-headgate-model"] == "anthropic/claude-opus-5"
    with pytest.raises(anthropic.APIStatusError, match="can answer"):
        await client.messages.count_tokens(
            model="claude", messages=MESSAGES, extra_headers={"x-headgate-policy": "local-only"}
        )


async def test_local_token_count_has_the_fields_of_the_generation_request(
    client: AsyncAnthropic, local: FakeInference
) -> None:
    local.counts["demo"] = 42
    counted = await client.messages.count_tokens(model="demo", messages=MESSAGES, system="You mill.", tools=[LOOK])
    assert counted.input_tokens == 42
    await client.messages.create(model="demo", max_tokens=5, messages=MESSAGES, system="You mill.", tools=[LOOK])
    fields = local.seen[-1].body
    assert local.counted[-1] == {name: fields[name] for name in ("model", "messages", "tools")}
    del local.counts["demo"]
    with pytest.raises(anthropic.BadRequestError, match="not counted"):
        await client.messages.count_tokens(model="demo", messages=MESSAGES)


async def test_models_are_listed_in_the_format_of_anthropic(client: AsyncAnthropic, gateway: Gateway) -> None:
    listed = {model.id: model async for model in client.models.list()}
    assert {"demo", "claude", "gpt"} <= set(listed)
    assert (listed["demo"].type, listed["demo"].lifecycle, listed["demo"].max_input_tokens) == ("model", "active", 4096)
    strictly(ModelInfo, {**(await client.models.retrieve("demo")).model_dump(exclude_none=True)})
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await client.models.retrieve("unknown")
    assert unknown.value.type == "not_found_error"
    plain = (await gateway.client.get("/v1/models")).json()
    assert plain["object"] == "list"


# --- errors -----------------------------------------------------------------------------------------------------------
async def test_errors_raise_the_exceptions_of_the_sdk(client: AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await client.messages.create(model="unknown", max_tokens=5, messages=MESSAGES)
    assert (unknown.value.type, unknown.value.error_code) == ("not_found_error", "model_not_found")
    assert unknown.value.request_id is not None
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        await client.messages.create(model="demo", max_tokens=0, messages=MESSAGES)
    wrong = client.with_options(api_key="wrong")
    with pytest.raises(anthropic.AuthenticationError) as refused:
        await wrong.messages.create(model="demo", max_tokens=5, messages=MESSAGES)
    assert refused.value.type == "authentication_error"
    with pytest.raises(anthropic.AuthenticationError):
        await wrong.messages.count_tokens(model="demo", messages=MESSAGES)
    long: Any = [{"role": "user", "content": "x" * 100_000}]
    with pytest.raises(anthropic.APIStatusError) as large:
        await client.messages.create(model="demo", max_tokens=5, messages=long)
    assert (large.value.status_code, large.value.type) == (413, "request_too_large")
    with pytest.raises(anthropic.NotFoundError) as none:
        await client.messages.batches.list()
    assert none.value.type == "not_found_error"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_every_refusal_has_the_error_envelope_of_anthropic(gateway: Gateway, path: str) -> None:
    method = await gateway.client.get(path)
    host = await gateway.client.post(path, headers={"host": "evil.example"})
    broken = await gateway.client.post(path, content=b"{")
    for answer, status in ((method, 405), (host, 403), (broken, 400)):
        got = answer.json()
        assert answer.status_code == status
        assert (got["type"], got["request_id"]) == ("error", answer.headers["request-id"])
        assert set(got["error"]) == {"type", "message", "details"}
    assert host.json()["error"]["type"] == "permission_error"


async def test_full_queue_and_broken_stream_raise_their_exceptions(
    client: AsyncAnthropic, local: FakeInference
) -> None:
    local.answers["demo"] = Answer(error=Code.MODEL_FAILED)
    with pytest.raises(anthropic.APIStatusError) as broken:
        async with client.messages.stream(model="demo", max_tokens=5, messages=MESSAGES, tools=[LOOK]) as stream:
            await stream.until_done()
    assert broken.value.type == "overloaded_error"
    assert broken.value.error_code == "model_failed"
    local.answers["demo"] = Answer(refuse=Code.QUEUE_FULL, retry_after=3)
    with pytest.raises(anthropic.RateLimitError) as full:
        await client.messages.create(model="demo", max_tokens=5, messages=MESSAGES)
    assert full.value.type == "rate_limit_error"
    assert int(full.value.response.headers["retry-after"]) >= 1


@pytest.mark.parametrize("model", ["demo", "breaking"])
async def test_resumed_answer_is_one_message(client: AsyncAnthropic, local: FakeInference, model: str) -> None:
    words = ("one ", "two ", "three")
    if model == "demo":
        local.queue["demo"] = [Answer(words=words[:2], cut=True), Answer(words=words)]
    async with client.messages.stream(model=model, max_tokens=50, messages=MESSAGES) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_message()
    assert (kinds.count("message_start"), kinds.count("message_stop"), kinds.count("content_block_start")) == (1, 1, 1)
    assert final.stop_reason == "end_turn"
    got = await stream.get_final_text()
    assert got == "one two three" if model == "demo" else got.startswith("[anthropic")


async def test_text_after_signed_thinking_is_resumed(
    client: AsyncAnthropic, local: FakeInference, cloud: FakeProvider
) -> None:
    """Signed thinking is complete; another tier continues the text."""
    cloud.answers.set(CloudAnswer(text="one two three", reasoning="Hm."))
    cloud.faults.add(Fault("cut", after=3, count=None))
    local.answers["demo"] = Answer(words=("one ", "two ", "three"))
    fields: dict[str, Any] = {"model": "thinks", "max_tokens": 2000, "thinking": {"type": "adaptive"}}
    async with client.messages.stream(messages=MESSAGES, **fields) as stream:
        final = await stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text"]
    assert final.content[0].type == "thinking" and final.content[0].signature != UNSIGNED
    assert await stream.get_final_text() == "one two three"
    assert local.seen[0].body["answer_so_far"] == {"content": "one ", "reasoning_content": "Hm."}


async def test_anthropic_gets_the_unchanged_request_when_the_local_tier_is_down(
    client: AsyncAnthropic, cloud: FakeProvider
) -> None:
    marked: Any = [{"role": "user", "content": [
        {"type": "text", "text": "Hello!", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    ]}]  # fmt: skip
    got = await client.messages.with_raw_response.create(model="away", max_tokens=5, messages=marked)
    assert got.headers["x-headgate-model"] == "anthropic/claude-opus-5"
    assert cloud.records[-1].body["messages"] == marked
