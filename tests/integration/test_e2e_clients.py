"""Official clients against all services: Anthropic's and Ollama's. Routes as variants of one model."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import anthropic
import ollama
import pytest

from tests.rigs.stack import CALLING, LOCAL_ROUTES, Stack

MESSAGES: Any = [{"role": "user", "content": "What turns the wheel of a mill?"}]
BRING: Any = {
    "name": "bring",
    "description": "Brings water.",
    "input_schema": {
        "type": "object",
        "properties": {"litres": {"enum": [1, 2, 3]}, "to": {"enum": ["mill", "gate"]}},
        "required": ["litres", "to"],
        "additionalProperties": False,
    },
    "strict": True,
}

ROUTES = f"""{LOCAL_ROUTES}
  demo-precise:
    chain: [local/demo]
    parameters: {{defaults: {{max_tokens: 6}}, overrides: {{temperature: 0}}, remove: [seed]}}
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("clients"), models=CALLING, gateway=ROUTES).start()
    yield stack
    stack.kill()


@pytest.fixture
def client(stack: Stack) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=stack.gateway_url, api_key=stack.key, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def llama(stack: Stack) -> Iterator[ollama.Client]:
    with ollama.Client(host=stack.gateway_url, headers={"authorization": f"Bearer {stack.key}"}) as llama:
        yield llama


def test_anthropic_client_gets_answers_streams_and_stop_sequences(client: anthropic.Anthropic) -> None:
    fields: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "extra_body": {"temperature": 0}}
    whole = client.messages.create(max_tokens=12, **fields)
    assert whole.content[0].type == "text"
    assert whole.usage.output_tokens <= 12
    with client.messages.stream(max_tokens=12, **fields) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    total = final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0)
    assert client.messages.count_tokens(model="demo", messages=MESSAGES).input_tokens == total
    word = text.split()[-1]
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 2048 maximum"):
        client.messages.create(max_tokens=12, model="demo", messages=[{"role": "user", "content": "mill " * 9000}])
    stopped = client.messages.create(max_tokens=12, stop_sequences=["nothing of this", word], **fields)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    agents = client.messages.create(max_tokens=32_000, stop_sequences=[word], **fields)
    assert agents.stop_reason == "stop_sequence"


def test_anthropic_client_gets_tool_calls_and_sends_their_results(client: anthropic.Anthropic) -> None:
    first = client.messages.create(
        model="demo", max_tokens=200, messages=MESSAGES, tools=[BRING], tool_choice={"type": "tool", "name": "bring"}
    )
    assert first.stop_reason == "tool_use"
    uses = [block for block in first.content if block.type == "tool_use"]
    assert uses and all(use.input["to"] in ("mill", "gate") for use in uses)
    results: Any = [
        {"type": "tool_result", "tool_use_id": use.id, "content": "done", "is_error": False} for use in uses
    ]
    history: Any = [*MESSAGES, first.to_param(), {"role": "user", "content": results}]
    counted = client.messages.count_tokens(model="demo", messages=history, tools=[BRING]).input_tokens
    assert counted > client.messages.count_tokens(model="demo", messages=history).input_tokens, "tools take tokens"
    second = client.messages.create(model="demo", max_tokens=20, messages=history, tools=[BRING])
    assert second.usage.input_tokens + (second.usage.cache_read_input_tokens or 0) == counted
    prefilled = client.messages.create(
        model="demo", max_tokens=8, messages=[*MESSAGES, {"role": "assistant", "content": "The river"}]
    )
    assert prefilled.content


def test_ollama_client_chats_generates_and_streams(llama: ollama.Client) -> None:
    options = {"temperature": 0, "num_predict": 8, "num_ctx": 512}
    whole = llama.chat("demo:latest", MESSAGES, options=options)
    assert (whole.model, whole.done, whole.message.role) == ("demo", True, "assistant")
    assert 0 < (whole.eval_count or 0) <= 8
    parts = list(llama.chat("demo", MESSAGES, options=options, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    last = parts[-1]
    assert (last.done_reason, last.eval_count, last.prompt_eval_count) == (
        whole.done_reason, whole.eval_count, whole.prompt_eval_count,
    )  # fmt: skip
    assert 0 < (last.prompt_eval_duration or 0) <= (last.total_duration or 0)
    prompt = MESSAGES[0]["content"]
    assert llama.generate("demo", prompt, options=options).response == whole.message.content
    raw = list(llama.generate("demo", "The mill", raw=True, options=options, stream=True))
    assert raw[-1].done
    assert "".join(part.response or "" for part in raw)
    assert llama.generate("demo").done_reason == "load"


def test_ollama_client_gets_formats_and_sends_tool_results(llama: ollama.Client) -> None:
    schema = {"type": "object", "properties": {"litres": {"enum": [1, 2]}}, "required": ["litres"]}
    shaped = llama.chat("demo", MESSAGES, format=schema, options={"temperature": 0})
    assert json.loads(shaped.message.content or "")["litres"] in (1, 2)
    tool: Any = {"type": "function", "function": {"name": "bring", "parameters": BRING["input_schema"]}}
    call: Any = {"function": {"name": "bring", "arguments": {"litres": 1, "to": "mill"}}}
    history = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_name": "bring", "content": "done"},
    ]
    again = llama.chat("demo", history, tools=[tool], options={"num_predict": 4})
    assert again.done


def test_ollama_client_sees_models_and_errors(stack: Stack, llama: ollama.Client) -> None:
    listed = {model.model: model for model in llama.list().models}
    assert {"demo", "demo-mini", "demo-precise"} <= listed.keys()
    for name in ("demo", "demo-precise:latest"):
        shown = llama.show(name)
        assert shown.capabilities == ["completion", "tools"]
        assert (shown.modelinfo or {})["headgate.context_length"] == 2048
    llama.generate("demo")
    (running,) = [model for model in llama.ps().models if model.model == "demo"]
    assert (running.context_length, running.size_vram) == (2048, 0)
    with urllib.request.urlopen(f"{stack.gateway_url}/", timeout=10) as answer:
        assert answer.read() == b"Ollama is running"
    head = urllib.request.Request(f"{stack.gateway_url}/", method="HEAD")
    with urllib.request.urlopen(head, timeout=10) as answer:
        assert answer.status == 200
    assert stack.ask("/api/version")["version"]
    with pytest.raises(ollama.ResponseError, match="did you mean 'demo'") as caught:
        llama.chat("demmo", MESSAGES)
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="unknown model"):
        llama.show("nothing")
    with pytest.raises(ollama.ResponseError, match=r"options\.temperature") as caught:
        list(llama.chat("demo", MESSAGES, options={"temperature": 7}, stream=True))
    assert caught.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="unknown path"):
        llama.pull("demo")
    with ollama.Client(host=stack.gateway_url) as anonymous, pytest.raises(ollama.ResponseError, match="key"):
        anonymous.list()
    with pytest.raises(ollama.ResponseError, match="embeddings"):
        llama.embed("demo", "water")


def test_route_with_parameters_is_a_variant_of_a_loaded_model(stack: Stack, llama: ollama.Client) -> None:
    body = {"model": "demo-precise", "messages": MESSAGES, "temperature": 2, "seed": 5}
    answers = [stack.ask("/v1/chat/completions", body) for _ in range(2)]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"]["completion_tokens"] <= 6
    assert llama.chat("demo-precise", MESSAGES).message.content == answers[0]["choices"][0]["message"]["content"]
    assert "demo-precise" in [model["id"] for model in stack.ask("/v1/models")["data"]]
    (loads,) = [model["headgate"]["loads"] for model in stack.ask("/v1/models")["data"] if model["id"] == "demo"]
    assert loads == 1
