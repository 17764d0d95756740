"""Tools and formats through the whole of Headgate with the official client: demo models are held to shapes."""

from __future__ import annotations

import json
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


def test_a_model_says_that_it_calls_tools(stack: Stack) -> None:
    """The demos' template presents none; what is configured is stronger than what a template can do."""

    def capabilities(name: str) -> list[str]:
        found: list[str] = stack.ask(f"/v1/models/{name}")["headgate"]["capabilities"]
        return found

    wait_until("the models are measured", lambda: capabilities("demo-mini") != [])
    assert capabilities("demo") == ["chat", "completions", "tools"]
    assert capabilities("demo-mini") == ["chat", "completions"]


def test_a_model_is_told_of_tools_that_its_template_does_not_present(client: openai.OpenAI) -> None:
    def prompt(**asked: Any) -> int:
        usage = client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=1, **asked).usage
        assert usage is not None
        return int(usage.prompt_tokens)

    tools = [openai.pydantic_function_tool(Bring)]
    assert prompt(tools=tools) > prompt(tools=tools, tool_choice="none") == prompt()


def test_a_forced_call_goes_to_the_tier_that_can_make_it(client: openai.OpenAI) -> None:
    """The first one of the chain calls no tools."""
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


def test_a_streamed_call_is_gathered_by_the_official_client(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="demo",
        messages=MESSAGES,
        tools=[openai.pydantic_function_tool(Bring)],
        tool_choice="required",
        parallel_tool_calls=False,
        stream_options={"include_usage": True},
    ) as stream:
        final = stream.get_final_completion()
    [choice] = final.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    assert isinstance(choice.message.tool_calls[0].function.parsed_arguments, Bring)
    assert final.usage is not None
    assert final.usage.completion_tokens > 0


def test_the_inference_service_says_the_same(stack: Stack, client: openai.OpenAI) -> None:
    """But for what names the answer, and for pieces of arguments that leave the gateway together."""
    token = stack.state.read_secret(INFERENCE_TOKEN)
    assert token is not None
    said = []
    with openai.OpenAI(base_url=stack.inference.url + "/v1", api_key=token, max_retries=0, timeout=60) as direct:
        for asked in (direct, client):
            chunks = asked.chat.completions.create(
                model="demo",
                messages=MESSAGES,
                tools=[openai.pydantic_function_tool(Bring)],
                tool_choice="required",
                parallel_tool_calls=False,
                temperature=0,
                stream=True,
            )
            said.append(_joined([_nameless(chunk.model_dump(exclude_unset=True)) for chunk in chunks]))
    assert said[0] == said[1]
    assert said[0][0]["choices"][0]["delta"] == {"role": "assistant", "content": None}


def _nameless(chunk: dict[str, Any]) -> dict[str, Any]:
    """A chunk without ids and times."""
    for choice in chunk["choices"]:
        for call in choice["delta"].get("tool_calls") or ():
            call.pop("id", None)
    return {name: value for name, value in chunk.items() if name not in ("id", "created", "usage")}


def test_a_format_is_kept_by_every_tier(client: openai.OpenAI) -> None:
    for model in ("demo", "mini"):
        parsed = client.chat.completions.parse(model=model, messages=MESSAGES, response_format=Bring)
        assert isinstance(parsed.choices[0].message.parsed, Bring)


def test_extensions_pass_the_gateway(client: openai.OpenAI) -> None:
    said = client.chat.completions.create(model="demo", messages=MESSAGES, extra_body={"guided_choice": ["yes", "no"]})
    assert said.choices[0].message.content in ("yes", "no")
    text = client.completions.create(model="demo", prompt="Water", extra_body={"regex": "[a-c]{3}"})
    assert len(text.choices[0].text) == 3
    assert set(text.choices[0].text) <= set("abc")


def test_a_conversation_with_a_result_goes_on(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "Bring", "arguments": json.dumps({"litres": 2})}}
    said = client.chat.completions.create(
        model="demo",
        messages=[
            *MESSAGES,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "done"},
        ],
        tools=[openai.pydantic_function_tool(Bring)],
        max_tokens=8,
    )
    assert said.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_what_no_tier_can_do_is_told_as_such(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="mini", messages=MESSAGES, tools=[openai.pydantic_function_tool(Bring)])
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "tools")
    unenforceable = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {"type": "null"}}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="demo", messages=MESSAGES, response_format=unenforceable)  # type: ignore[call-overload]
    assert caught.value.param == "response_format"


def test_an_agent_speaks_responses_with_a_local_model(client: openai.OpenAI) -> None:
    """One turn calls a function, the next builds on it, a third holds to a format; streamed and whole say the same."""
    schema = openai.pydantic_function_tool(Bring)["function"]
    asked: Any = {
        "model": "demo", "instructions": "You bring water.", "tools": [{"type": "function", **schema}],
        "tool_choice": {"type": "function", "name": "Bring"}, "temperature": 0,
    }  # fmt: skip
    question: Any = [{"type": "message", "role": "user", "content": MESSAGES[0]["content"]}]
    whole = client.responses.create(input=question, **asked)
    with client.responses.stream(input=question, **asked) as stream:
        numbers = [event.sequence_number for event in stream]
        streamed = stream.get_final_response()
    assert numbers == list(range(len(numbers)))
    call, same = whole.output[-1], streamed.output[-1]
    assert call.type == same.type == "function_call"
    assert call.arguments == same.arguments
    Bring.model_validate_json(call.arguments)
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "done"}]
    asked_again: Any = {"previous_response_id": whole.id, "tools": asked["tools"], "max_output_tokens": 16}
    after = client.responses.create(model="demo", input=output, **asked_again)
    assert after.status in ("completed", "incomplete")
    assert after.usage is not None
    assert whole.usage is not None
    assert after.usage.input_tokens > whole.usage.input_tokens
    parsed = client.responses.parse(model="demo", input=question, text_format=Bring)
    assert isinstance(parsed.output_parsed, Bring)


def _joined(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Chunks that only continue the arguments of a call are added to the one before."""
    whole: list[dict[str, Any]] = []
    for chunk in chunks:
        before, now = (_continued(item) for item in (whole[-1] if whole else {}, chunk))
        if before is not None and now is not None:
            before["arguments"] += now["arguments"]
        else:
            whole.append(chunk)
    return whole


def _continued(chunk: dict[str, Any]) -> dict[str, Any] | None:
    """The function of a chunk that brings arguments and nothing else."""
    calls = [call for choice in chunk.get("choices", ()) for call in choice["delta"].get("tool_calls") or ()]
    is_more = len(calls) == 1 and "id" not in calls[0] and set(calls[0]["function"]) == {"arguments"}
    return calls[0]["function"] if is_more else None
