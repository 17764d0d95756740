"""Messages of earlier answers in requests to OpenAI and Google: reasoning, names of results, incomplete arguments."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.apis.openai.frames import Endpoint, Flavor
from tests.rigs.fake_provider import rules
from tests.rigs.typed_bodies import to_openai

QUESTION = {"role": "user", "content": "Look."}


def call(id: str, name: str, arguments: str = "{}") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def sent(flavor: Flavor, *messages: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages that are sent, after the checks of the provider's rules."""
    body = to_openai(Endpoint.CHAT, {"messages": [QUESTION, *messages]}, "m", flavor)
    rules.openai_chat(body, flavor)
    found: list[dict[str, Any]] = body["messages"][1:]
    return found


@pytest.mark.parametrize("flavor", [Flavor.OPENAI, Flavor.GOOGLE])
def test_reasoning_of_another_provider_is_left_out(flavor: Flavor) -> None:
    answer = {"role": "assistant", "content": "Hi", "reasoning": "Hm.", "reasoning_details": [{"text": "Hm."}]}
    assert sent(flavor, answer, QUESTION) == [{"role": "assistant", "content": "Hi"}, QUESTION]


def test_reasoning_is_sent_to_compatible_servers() -> None:
    answer = {"role": "assistant", "content": "Hi", "reasoning": "Hm.", "annotations": []}
    body = to_openai(Endpoint.CHAT, {"messages": [QUESTION, answer]}, "m", Flavor.COMPATIBLE)
    assert body["messages"][1] == {"role": "assistant", "content": "Hi", "reasoning": "Hm."}


def test_thought_signature_beside_text_is_sent_to_google_only() -> None:
    answer = {"role": "assistant", "content": "Hi", "extra_content": {"google": {"thought_signature": "s"}}}
    assert sent(Flavor.GOOGLE, answer, QUESTION)[0] == answer
    assert sent(Flavor.OPENAI, answer, QUESTION)[0] == {"role": "assistant", "content": "Hi"}


def test_results_get_the_names_of_their_functions_for_google() -> None:
    calls = {"role": "assistant", "content": None, "tool_calls": [call("a", "look"), call("b", "hear")]}
    results = [{"role": "tool", "tool_call_id": id, "content": "dark"} for id in ("b", "a")]
    assert [message.get("name") for message in sent(Flavor.GOOGLE, calls, *results)] == [None, "hear", "look"]
    assert [message.get("name") for message in sent(Flavor.OPENAI, calls, *results)] == [None, None, None]


def test_name_of_a_result_is_kept_for_google_and_dropped_for_openai() -> None:
    calls = {"role": "assistant", "content": None, "tool_calls": [call("a", "look")]}
    result = {"role": "tool", "tool_call_id": "a", "content": "dark", "name": "peer"}
    assert sent(Flavor.GOOGLE, calls, result)[1]["name"] == "peer"
    assert "name" not in sent(Flavor.OPENAI, calls, result)[1]


def test_result_without_its_call_is_refused_by_the_provider() -> None:
    result = {"role": "tool", "tool_call_id": "a", "content": "dark"}
    with pytest.raises(rules.RefusedError):
        sent(Flavor.GOOGLE, result)


def test_custom_call_is_sent_unchanged() -> None:
    custom = {"id": "a", "type": "custom", "custom": {"name": "patch", "input": "x"}}
    body = to_openai(
        Endpoint.CHAT, {"messages": [QUESTION, {"role": "assistant", "tool_calls": [custom]}]}, "m", Flavor.GOOGLE
    )
    assert body["messages"][1]["tool_calls"] == [custom]


@pytest.mark.parametrize("flavor", Flavor)
def test_call_without_a_function_is_sent_without_it(flavor: Flavor) -> None:
    history = {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": None}]}
    result = {"role": "tool", "tool_call_id": "a", "content": "dark"}
    body = to_openai(Endpoint.CHAT, {"messages": [QUESTION, history, result]}, "m", flavor)
    assert body["messages"] == [
        QUESTION,
        {"role": "assistant", "tool_calls": [{"id": "a", "type": "function"}]},
        result,
    ]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('{"at": "the ri', {"arguments": '{"at": "the ri'}),
        ("[1]", {"arguments": "[1]"}),
        ("", {}),
        ("null", {"arguments": "null"}),
    ],
)
def test_arguments_that_are_no_object_are_wrapped_for_google(written: str, read: dict[str, Any]) -> None:
    """Agents send incomplete arguments back with the error of the failed call."""
    calls = {"role": "assistant", "content": None, "tool_calls": [call("a", "look", written)]}
    result = {"role": "tool", "tool_call_id": "a", "content": "no JSON"}
    (function,) = (message["function"] for message in sent(Flavor.GOOGLE, calls, result)[0]["tool_calls"])
    assert json.loads(function["arguments"]) == read
    assert sent(Flavor.OPENAI, calls, result)[0]["tool_calls"][0]["function"]["arguments"] == written
