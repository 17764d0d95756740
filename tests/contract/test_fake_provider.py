"""The fake provider matches the real ones: types of the SDKs, documented formats, and their clients."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from headgate.shared.sse import SseSplitter
from tests.rigs.fake_provider import KEY, FakeProvider, Fault, documented
from tests.rigs.fake_provider.answers import Answer, ToolUse
from tests.rigs.fake_provider.strict import strictly
from tests.rigs.stack import fake_cloud

pytestmark = pytest.mark.unmeasured

ASK: list[Any] = [{"role": "user", "content": "What is a mill?"}]
ANSWERS: Mapping[str, Answer] = {
    "text": Answer(text="Water turns a wheel.\nAnd ümlauts."),
    "empty": Answer(),
    "length": Answer(text="Water", stop="length"),
    "tools": Answer(tools=(ToolUse("a", {"x": [1, "zwei"]}), ToolUse("b", {})), stop="tool_calls"),
    "text and tool": Answer(text="Let me see.", tools=(ToolUse("a", {"x": 1}),), stop="tool_calls"),
    "refusal": Answer(refusal="I cannot help with that.", stop="content_filter"),
    "cached": Answer(text="Yes.", cached_tokens=512, cache_write_tokens=3),
    "thinking": Answer(text="4", reasoning="Two and two make four."),
    "stop sequence": Answer(text="A", stop="stop_sequence", stop_sequence="B"),
    "pause": Answer(text="A", stop="pause_turn"),
    "context": Answer(text="A", stop="context"),
}


@pytest.fixture
async def fake() -> AsyncIterator[FakeProvider]:
    async with FakeProvider() as fake:
        yield fake


@pytest.fixture
async def http(fake: FakeProvider) -> AsyncIterator[httpx2.AsyncClient]:
    headers = {"Authorization": f"Bearer {KEY}", "anthropic-version": "2023-06-01"}
    async with httpx2.AsyncClient(base_url=fake.url, headers=headers, timeout=10) as client:
        yield client


async def events(http: httpx2.AsyncClient, path: str, body: Mapping[str, Any]) -> list[Any]:
    answer = await http.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    splitter = SseSplitter()
    found = [frame for frame in splitter.feed(answer.content) if frame.data is not None]
    assert answer.content.endswith((b"\n\n", b"\r\n\r\n"))
    return [json.loads(frame.data) if frame.data != b"[DONE]" else "[DONE]" for frame in found if frame.data]


# --- OpenAI and Google ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("prefix", ["/v1", "/v1beta/openai"])
@pytest.mark.parametrize("name", [name for name in ANSWERS if name != "thinking"])
async def test_openai_chunks_match_the_type_of_the_sdk(
    fake: FakeProvider, http: httpx2.AsyncClient, prefix: str, name: str
) -> None:
    fake.answers.set(ANSWERS[name])
    body = {"model": "m", "messages": ASK, "stream_options": {"include_usage": True}}
    *found, last = await events(http, prefix + "/chat/completions", body)
    assert last == "[DONE]"
    read = [strictly(ChatCompletionChunk, chunk) for chunk in found]
    assert read[0].choices[0].delta.role == "assistant"
    assert [bool(chunk.choices) for chunk in read] == [True] * (len(read) - 1) + [False]
    assert read[-1].usage is not None
    whole = (await http.post(prefix + "/chat/completions", json={"model": "m", "messages": ASK})).json()
    assert strictly(ChatCompletion, whole).choices[0].finish_reason == read[-2].choices[0].finish_reason


async def test_openai_text_completions_match_the_type_of_the_sdk(http: httpx2.AsyncClient) -> None:
    found = await events(http, "/v1/completions", {"model": "m", "prompt": "x", "stream_options": {}})
    for chunk in found[:-1]:
        for choice in chunk["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"  # null in streams, against the type
        strictly(Completion, chunk)
    strictly(Completion, (await http.post("/v1/completions", json={"model": "m", "prompt": "x"})).json())


async def test_openai_embeddings_and_models_match_the_types_of_the_sdk(http: httpx2.AsyncClient) -> None:
    strictly(
        CreateEmbeddingResponse, (await http.post("/v1/embeddings", json={"model": "m", "input": ["a", "b"]})).json()
    )
    http.headers.pop("anthropic-version")
    for item in (await http.get("/v1/models")).json()["data"]:
        strictly(Model, item)


def _shape(value: Any) -> Any:
    """Keys and JSON types without values; lists by their first item."""
    if isinstance(value, dict):
        return {name: _shape(item) for name, item in value.items()}
    return [_shape(value[0])] if isinstance(value, list) and value else type(value).__name__


def _has(shape: Any, example: Any, path: str = "") -> None:
    """Checks that everything in the documented example exists with its type."""
    if isinstance(example, dict):
        for name, inner in example.items():
            assert name in shape, f"{path}.{name} is documented and missing"
            _has(shape[name], inner, f"{path}.{name}")
    elif isinstance(example, list) and shape:
        _has(shape[0], example[0], path + "[0]")
    elif isinstance(example, str) and example != "NoneType":
        assert shape == example, path


async def test_answers_have_all_fields_of_the_documented_examples(http: httpx2.AsyncClient) -> None:
    strictly(ChatCompletion, documented.OPENAI_ANSWER)
    strictly(Message, documented.ANTHROPIC_ANSWER)
    whole = (await http.post("/v1/chat/completions", json={"model": "m", "messages": ASK})).json()
    _has(_shape(whole), _shape(documented.OPENAI_ANSWER))
    answer = await http.post("/v1/messages", json={"model": "m", "messages": ASK, "max_tokens": 9})
    _has(_shape(answer.json()), _shape(documented.ANTHROPIC_ANSWER))


# --- Anthropic --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", list(ANSWERS))
async def test_anthropic_events_match_the_type_of_the_sdk(
    fake: FakeProvider, http: httpx2.AsyncClient, name: str
) -> None:
    fake.answers.set(ANSWERS[name])
    body = {"model": "m", "messages": ASK, "max_tokens": 100}
    found = await events(http, "/v1/messages", body)
    read = [strictly(RawMessageStreamEvent, event) for event in found if event["type"] != "ping"]
    assert (read[0].type, read[-2].type, read[-1].type) == ("message_start", "message_delta", "message_stop")
    whole = strictly(Message, (await http.post("/v1/messages", json=body)).json())
    assert whole.stop_reason == read[-2].delta.stop_reason


@pytest.mark.parametrize("example", ["ANTHROPIC_TEXT", "ANTHROPIC_TOOL", "ANTHROPIC_THINKING"])
async def test_anthropic_streams_match_the_documented_ones(
    fake: FakeProvider, http: httpx2.AsyncClient, example: str
) -> None:
    fake.answers.set(
        Answer(text="A B", reasoning="C D", tools=(ToolUse("a", {"x": 1}), ToolUse("b", {})), stop="tool_calls")
    )
    ours = await events(http, "/v1/messages", {"model": "m", "messages": ASK, "max_tokens": 100})
    shapes: dict[Any, Any] = {}
    for event in ours:
        shapes.setdefault(_kind(event), _shape(event))
    for frame in SseSplitter().feed(getattr(documented, example)):
        event = json.loads(frame.data or b"")
        if event["type"] != "ping":
            strictly(RawMessageStreamEvent, event)
        _has(shapes[_kind(event)], _shape(event))


def _kind(event: Mapping[str, Any]) -> tuple[Any, ...]:
    inner = event.get("delta") or event.get("content_block") or {}
    return event["type"], inner.get("type")


async def test_anthropic_counts_tokens(http: httpx2.AsyncClient) -> None:
    answer = await http.post("/v1/messages/count_tokens", json={"model": "m", "messages": ASK})
    assert strictly(MessageTokensCount, answer.json()).input_tokens > 0


@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 429, 500, 504, 529])
async def test_anthropic_errors_match_the_type_of_the_sdk(http: httpx2.AsyncClient, status: int) -> None:
    answer = await http.post("/v1/messages", json={"model": f"fault-{status}", "messages": ASK, "max_tokens": 9})
    assert answer.status_code == status
    strictly(ErrorResponse, answer.json())


# --- the official clients ---------------------------------------------------------------------------------------------
async def test_openai_client_reads_a_tool_call(fake: FakeProvider) -> None:
    tools: Any = [
        {
            "type": "function",
            "function": {
                "name": "level",
                "parameters": {"type": "object", "properties": {"river": {"type": "string"}}},
            },
        }
    ]
    async with openai.AsyncOpenAI(api_key=KEY, base_url=fake.openai_url, max_retries=0) as client:
        async with client.chat.completions.stream(
            model="m", messages=ASK, tools=tools, tool_choice="required"
        ) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].finish_reason == "tool_calls"
        call = final.choices[0].message.tool_calls[0]  # type: ignore[index]
        assert json.loads(call.function.arguments) == {"river": "What is a mill?"}
        assert [model.id async for model in client.models.list()] == ["fake-large", "fake-small"]


async def test_anthropic_client_reads_thinking_and_tools(fake: FakeProvider) -> None:
    fake.answers.set(Answer(text="Yes", reasoning="Hm hm.", tools=(ToolUse("a", {"x": 1}),), stop="tool_calls"))
    async with anthropic.AsyncAnthropic(api_key=KEY, base_url=fake.url, max_retries=0) as client:
        async with client.messages.stream(model="m", max_tokens=50, messages=ASK) as stream:
            message = await stream.get_final_message()
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
        assert message.content[2].input == {"x": 1}  # type: ignore[union-attr]
        counted = await client.messages.count_tokens(model="m", messages=ASK)
        assert counted.input_tokens > 0


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("fault-429=3", openai.RateLimitError),
        ("fault-500", openai.InternalServerError),
        ("fault-context", openai.BadRequestError),
        ("fault-error-frame=1", openai.APIError),
        ("fault-reset", openai.APIConnectionError),
    ],
)
async def test_openai_client_recognises_the_failures(
    fake: FakeProvider, fault: str, expected: type[openai.OpenAIError]
) -> None:
    async with openai.AsyncOpenAI(api_key=KEY, base_url=fake.openai_url, max_retries=0) as client:
        with pytest.raises(expected):
            async for _ in await client.chat.completions.create(model=fault, messages=ASK, stream=True):
                pass


# --- strictness -------------------------------------------------------------------------------------------------------
BAD_OPENAI: list[tuple[dict[str, Any], str | None]] = [
    ({"grammar": "x"}, "unknown_parameter"),
    ({"temperature": 3}, "invalid_value"),
    ({"stream_options": {"include_usage": True}}, None),
    ({"messages": []}, "empty_array"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "invalid_value"),
    ({"messages": [{"role": "tool", "tool_call_id": "a", "content": "x"}]}, None),
    ({"messages": [{"role": "user", "content": "x", "reasoning_content": "y"}]}, "unknown_parameter"),
    ({"tool_choice": "auto"}, None),
    ({"model": "gpt-5", "max_tokens": 5}, "unsupported_parameter"),
    ({"model": "gpt-5", "temperature": 0}, "unsupported_value"),
    ({"model": "o3", "top_p": 0.5}, "unsupported_value"),
    ({"model": "gpt-5.5", "logprobs": True}, "unsupported_parameter"),
    ({"model": "gpt-5.2", "presence_penalty": 0, "reasoning_effort": "none"}, "unsupported_parameter"),
    ({"model": "gpt-5", "reasoning_effort": "none"}, "unsupported_value"),
    ({"model": "gpt-5.1", "reasoning_effort": "minimal"}, "unsupported_value"),
    ({"model": "o3", "reasoning_effort": "xhigh"}, "unsupported_value"),
    ({"model": "o4-mini", "stop": "END"}, "unsupported_parameter"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "array_above_max_length"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "missing_required_parameter"),
]


@pytest.mark.parametrize(("change", "code"), BAD_OPENAI)
async def test_fake_openai_refuses_what_the_real_api_refuses(
    http: httpx2.AsyncClient, change: dict[str, Any], code: str | None
) -> None:
    answer = await http.post("/v1/chat/completions", json={"model": "m", "messages": ASK, **change})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == code
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_fake_google_refuses_unknown_names_in_its_envelope(http: httpx2.AsyncClient) -> None:
    answer = await http.post("/v1beta/openai/chat/completions", json={"model": "m", "messages": ASK, "seed": 1})
    assert answer.status_code == 400
    assert answer.json()[0]["error"]["status"] == "INVALID_ARGUMENT"
    assert 'Unknown name "seed"' in answer.json()[0]["error"]["message"]


USE = {"type": "tool_use", "id": "t1", "name": "a", "input": {}}
TOOL = {"name": "a", "input_schema": {"type": "object"}}
BAD_ANTHROPIC: list[dict[str, Any]] = [
    {"max_tokens": None},
    {"n": 2},
    {"temperature": 1.5},
    {"temperature": 0.5, "top_p": 0.5},
    {"messages": []},
    {"messages": [{"role": "assistant", "content": "x"}]},
    {"messages": [*ASK, *ASK]},
    {"messages": [*ASK, {"role": "assistant", "content": "x "}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": " "}]}]},
    {"messages": [*ASK, {"role": "assistant", "content": [USE]}], "tools": [TOOL]},
    {"messages": [*ASK, {"role": "assistant", "content": [USE]}, *ASK], "tools": [TOOL]},
    {"messages": [{"role": "system", "content": "x"}]},
    {"tools": [{"name": "a b", "input_schema": {"type": "object"}}]},
    {"tools": [{"name": "a", "input_schema": {}}]},
    {"tool_choice": {"type": "auto"}},
    {"tools": [TOOL], "tool_choice": {"type": "required"}},
    {"stop_sequences": ["\n"]},
    {"output_config": {"format": {"type": "json_object"}}},
    {"thinking": {"type": "enabled", "budget_tokens": 10}},
    {"metadata": {"user": "x"}},
]


@pytest.mark.parametrize("change", BAD_ANTHROPIC)
async def test_fake_anthropic_refuses_what_the_real_api_refuses(
    http: httpx2.AsyncClient, change: dict[str, Any]
) -> None:
    body = {"model": "m", "messages": ASK, "max_tokens": 10, **change}
    answer = await http.post("/v1/messages", json={name: value for name, value in body.items() if value is not None})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_api_version_of_anthropic_is_required_and_decides_about_sampling(http: httpx2.AsyncClient) -> None:
    body = {"model": "m", "messages": ASK, "max_tokens": 10, "temperature": 1.0}
    assert (await http.post("/v1/messages", json=body)).status_code == 200
    later = await http.post("/v1/messages", json=body, headers={"anthropic-version": "2026-10-21"})
    assert "temperature: Extra inputs are not permitted" in later.text
    http.headers.pop("anthropic-version")
    assert (await http.post("/v1/messages", json=body)).status_code == 400


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_invalid_key_is_refused(http: httpx2.AsyncClient, path: str) -> None:
    http.headers["Authorization"] = "Bearer stolen"
    assert (await http.post(path, json={"model": "m", "messages": ASK, "max_tokens": 1})).status_code == 401


# --- controls ---------------------------------------------------------------------------------------------------------
async def test_faults_apply_in_order_and_by_api(fake: FakeProvider, http: httpx2.AsyncClient) -> None:
    fake.faults.add(Fault("status", status=503, count=2), Fault("status", status=529, dialect="anthropic", count=None))

    async def openai_status() -> int:
        return (await http.post("/v1/chat/completions", json={"model": "m", "messages": ASK})).status_code

    async def anthropic_status() -> int:
        return (await http.post("/v1/messages", json={"model": "m", "messages": ASK, "max_tokens": 1})).status_code

    assert [await openai_status() for _ in range(3)] == [503, 503, 200]
    assert [await anthropic_status() for _ in range(3)] == [529] * 3


async def test_controls_work_over_http(http: httpx2.AsyncClient) -> None:
    assert (await http.post("/_fake/faults", json={"kind": "status", "status": 500})).status_code == 200
    assert (await http.post("/_fake/faults", json={"kind": "flood"})).status_code == 400
    assert (await http.post("/_fake/answers", json={"text": "Set.", "dialect": "openai"})).status_code == 200
    body = {"model": "m", "messages": ASK}
    assert (await http.post("/v1/chat/completions", json=body)).status_code == 500
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    assert answer["choices"][0]["message"]["content"] == "Set."
    seen = (await http.get("/_fake/requests")).json()["requests"]
    assert [(item["status"], item["fault"], item["outcome"]) for item in seen] == [
        (500, "status", "faulted"),
        (200, None, "answered"),
    ]
    assert seen[0]["body"] == body


def test_fake_provider_runs_as_a_process(tmp_path: Path) -> None:
    service = fake_cloud(tmp_path).start()
    try:
        request = urllib.request.Request(
            service.url + "/v1/chat/completions",
            data=json.dumps({"model": "m", "messages": ASK}).encode(),
            headers={"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert json.load(answer)["choices"][0]["message"]["content"] == "[openai m] What is a mill?"
        assert service.stop() == 0
    finally:
        service.kill()
