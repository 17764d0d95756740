"""Tools and formats end to end with the official client: constrained demo models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from headgate.shared.state_directory import INFERENCE_TOKEN
from tests.rigs.processes import wait_until
from tests.rigs.stack import CALLING, Stack

ROUTES = """
routes:
  demo: {chain: [local/demo-mini, local/demo]}
  mini: {chain: [local/demo-mini]}
  "*": {chain: ["local/*"]}
"""
MESSAGES: Any = [{"role": "user", "content": "Bring two litres of water to the mill."}]


class Bring(pydantic.BaseModel):
    """Brings water."""

    litres: Literal[1, 2, 3]
    to: Literal["mill", "gate"]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("tools"), models=CALLING, gateway=ROUTES).start()
    yield stack
    stack.kill()


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=stack.base_url, api_key=stack.key, max_retries=0, timeout=60) as client:
        yield client


def test_configured_tools_capability_is_listed(stack: Stack) -> None:
    """The template of the demo models has no tools; the configured capability takes precedence."""

    def capabilities(name: str) -> list[str]:
        found: list[str] = stack.ask(f"/v1/models/{name}")["headgate"]["capabilities"]
        return found

    wait_until("the models are measured", lambda: capabilities("demo-mini") != [])
    assert capabilities("demo") == ["chat", "completions", "tools"]
    assert capabilities("demo-mini") == ["chat", "completions"]


def test_forced_call_goes_to_a_tier_with_tools(client: openai.OpenAI) -> None:
    """The first candidate does not support tools."""
    raw = client.chat.completions.with_raw_response.create(
        model="demo",
        messages=MESSAGES,
        tools=[openai.pydantic_function_tool(Bring)],
        tool_choice={"type": "function", "function": {"name": "Bring"}},
        parallel_tool_calls=False,
    )
    assert raw.headers["x-headgate-model"] == "local/demo"
    [choice] = raw.parse().choices
    assert choice.finish_reason == "stop"
    assert choice.message.content is None
    assert choice.message.tool_calls
    [call] = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "Bring"
    Bring.model_validate_json(call.function.arguments)


def test_inference_service_streams_the_same_chunks_as_the_gateway(stack: Stack, client: openai.OpenAI) -> None:
    """Apart from names, and from parts of arguments that the gateway joins."""
    token = stack.state.read_secret(INFERENCE_TOKEN)
    assert token is not None
    result = []
    with openai.OpenAI(base_url=stack.inference.url + "/v1", api_key=token, max_retries=0, timeout=60) as direct:
        for fields in (direct, client):
            chunks = fields.chat.completions.create(
                model="demo",
                messages=MESSAGES,
                tools=[openai.pydantic_function_tool(Bring)],
                tool_choice="required",
                parallel_tool_calls=False,
                temperature=0,
                stream=True,
            )
            result.append(_joined([_nameless(chunk.model_dump(exclude_unset=True)) for chunk in chunks]))
    assert result[0] == result[1]
    assert result[0][0]["choices"][0]["delta"] == {"role": "assistant", "content": None}


def _nameless(chunk: dict[str, Any]) -> dict[str, Any]:
    """A chunk without ids and times."""
    for choice in chunk["choices"]:
        for call in choice["delta"].get("tool_calls") or ():
            call.pop("id", None)
    return {name: value for name, value in chunk.items() if name not in ("id", "created", "usage")}


def test_gateway_passes_extensions_on(client: openai.OpenAI) -> None:
    result = client.chat.completions.create(
        model="demo", messages=MESSAGES, extra_body={"guided_choice": ["yes", "no"]}
    )
    assert result.choices[0].message.content in ("yes", "no")
    text = client.completions.create(model="demo", prompt="Water", extra_body={"regex": "[a-c]{3}"})
    assert len(text.choices[0].text) == 3
    assert set(text.choices[0].text) <= set("abc")


def test_request_that_no_tier_supports_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="mini", messages=MESSAGES, tools=[openai.pydantic_function_tool(Bring)])
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "tools")
    unenforceable = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {"type": "null"}}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="demo", messages=MESSAGES, response_format=unenforceable)  # type: ignore[call-overload]
    assert caught.value.param == "response_format"


def test_agent_uses_the_responses_api_with_a_local_model(client: openai.OpenAI) -> None:
    """One turn calls a function, the next builds on it, a third has a format; streamed and whole are equal."""
    schema = openai.pydantic_function_tool(Bring)["function"]
    fields: Any = {
        "model": "demo", "instructions": "You bring water.", "tools": [{"type": "function", **schema}],
        "tool_choice": {"type": "function", "name": "Bring"}, "temperature": 0,
    }  # fmt: skip
    question: Any = [{"type": "message", "role": "user", "content": MESSAGES[0]["content"]}]
    whole = client.responses.create(input=question, **fields)
    with client.responses.stream(input=question, **fields) as stream:
        numbers = [event.sequence_number for event in stream]
        streamed = stream.get_final_response()
    assert numbers == list(range(len(numbers)))
    call, same = whole.output[-1], streamed.output[-1]
    assert call.type == same.type == "function_call"
    assert call.arguments == same.arguments
    Bring.model_validate_json(call.arguments)
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "done"}]
    next_fields: Any = {"previous_response_id": whole.id, "tools": fields["tools"], "max_output_tokens": 16}
    after = client.responses.create(model="demo", input=output, **next_fields)
    assert after.status in ("completed", "incomplete")
    assert after.usage is not None
    assert whole.usage is not None
    assert after.usage.input_tokens > whole.usage.input_tokens
    parsed = client.responses.parse(model="demo", input=question, text_format=Bring)
    assert isinstance(parsed.output_parsed, Bring)


def _joined(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Chunks with only arguments of a call are joined to the one before."""
    whole: list[dict[str, Any]] = []
    for chunk in chunks:
        before, now = (_continued(item) for item in (whole[-1] if whole else {}, chunk))
        if before is not None and now is not None:
            before["arguments"] += now["arguments"]
        else:
            whole.append(chunk)
    return whole


def _continued(chunk: dict[str, Any]) -> dict[str, Any] | None:
    """The function of a chunk that has only arguments."""
    calls = [call for choice in chunk.get("choices", ()) for call in choice["delta"].get("tool_calls") or ()]
    is_more = len(calls) == 1 and "id" not in calls[0] and set(calls[0]["function"]) == {"arguments"}
    return calls[0]["function"] if is_more else None
