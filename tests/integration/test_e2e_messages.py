"""Anthropic's official client against all services: a demo model answers, calls tools and counts tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.rigs.stack import CALLING, Stack

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


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("messages"), models=CALLING).start()
    yield stack
    stack.kill()


@pytest.fixture
def client(stack: Stack) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=stack.gateway_url, api_key=stack.key, max_retries=0, timeout=60) as client:
        yield client


def test_demo_model_answers_streams_and_stops(client: anthropic.Anthropic) -> None:
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


def test_parallel_calls_and_their_results_work_on_a_demo_model(client: anthropic.Anthropic) -> None:
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
