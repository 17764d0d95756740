"""Whole messages sent back made the next request a 400: `reasoning` of one tier at another, a tool's result without its
function's name at Google, arguments that were cut.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.apis.openai.frames import Endpoint, Flavor
from tests.rigs.fake_provider import rules
from tests.rigs.typed_bodies import to_openai

ASKED = {"role": "user", "content": "Look."}


def call(id: str, name: str, arguments: str = "{}") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def sent(flavor: Flavor, *messages: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages as they are sent, which the fake of that address takes."""
    body = to_openai(Endpoint.CHAT, {"messages": [ASKED, *messages]}, "m", flavor)
    rules.openai_chat(body, flavor)
    found: list[dict[str, Any]] = body["messages"][1:]
    return found


@pytest.mark.parametrize("flavor", [Flavor.OPENAI, Flavor.GOOGLE])
def test_what_one_tier_wrote_beside_an_answer_is_not_shown_to_another(flavor: Flavor) -> None:
    """Addresses that are compatible call it so, with details beside it."""
    answer = {"role": "assistant", "content": "Hi", "reasoning": "Hm.", "reasoning_details": [{"text": "Hm."}]}
    assert sent(flavor, answer, ASKED) == [{"role": "assistant", "content": "Hi"}, ASKED]


def test_others_may_want_their_own_words_back() -> None:
    answer = {"role": "assistant", "content": "Hi", "reasoning": "Hm.", "annotations": []}
    assert sent_to_others(answer) == {"role": "assistant", "content": "Hi", "reasoning": "Hm."}


def sent_to_others(answer: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = to_openai(Endpoint.CHAT, {"messages": [ASKED, answer]}, "m", Flavor.COMPATIBLE)["messages"][
        1
    ]
    return found


def test_a_signature_of_googles_beside_a_text_is_googles_alone() -> None:
    answer = {"role": "assistant", "content": "Hi", "extra_content": {"google": {"thought_signature": "s"}}}
    assert sent(Flavor.GOOGLE, answer, ASKED)[0] == answer
    assert sent(Flavor.OPENAI, answer, ASKED)[0] == {"role": "assistant", "content": "Hi"}


def test_results_have_their_functions_names_at_google() -> None:
    calls = {"role": "assistant", "content": None, "tool_calls": [call("a", "look"), call("b", "hear")]}
    results = [{"role": "tool", "tool_call_id": id, "content": "dark"} for id in ("b", "a")]
    assert [message.get("name") for message in sent(Flavor.GOOGLE, calls, *results)] == [None, "hear", "look"]
    assert [message.get("name") for message in sent(Flavor.OPENAI, calls, *results)] == [None, None, None]


def test_a_name_that_the_caller_gave_a_result_stays_at_google_and_goes_at_openai() -> None:
    calls = {"role": "assistant", "content": None, "tool_calls": [call("a", "look")]}
    result = {"role": "tool", "tool_call_id": "a", "content": "dark", "name": "peer"}
    assert sent(Flavor.GOOGLE, calls, result)[1]["name"] == "peer"
    assert "name" not in sent(Flavor.OPENAI, calls, result)[1]


def test_a_result_without_its_call_is_left_to_google() -> None:
    result = {"role": "tool", "tool_call_id": "a", "content": "dark"}
    with pytest.raises(rules.RefusedError):
        sent(Flavor.GOOGLE, result)


def test_a_call_of_free_text_has_no_arguments() -> None:
    custom = {"id": "a", "type": "custom", "custom": {"name": "patch", "input": "x"}}
    body = to_openai(
        Endpoint.CHAT, {"messages": [ASKED, {"role": "assistant", "tool_calls": [custom]}]}, "m", Flavor.GOOGLE
    )
    assert body["messages"][1]["tool_calls"] == [custom]


@pytest.mark.parametrize("flavor", Flavor)
def test_a_call_whose_function_is_null_is_left_to_the_address(flavor: Flavor) -> None:
    """Google's could not be written, for which its breaker opened."""
    history = {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": None}]}
    result = {"role": "tool", "tool_call_id": "a", "content": "dark"}
    body = to_openai(Endpoint.CHAT, {"messages": [ASKED, history, result]}, "m", flavor)
    assert body["messages"] == [ASKED, {"role": "assistant", "tool_calls": [{"id": "a", "type": "function"}]}, result]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('{"at": "the ri', {"arguments": '{"at": "the ri'}),
        ("[1]", {"arguments": "[1]"}),
        ("", {}),
        ("null", {"arguments": "null"}),
    ],
)
def test_arguments_that_are_no_object_are_read_as_one(written: str, read: dict[str, Any]) -> None:
    """An answer that its limit cuts ends so, and agents send it back with the complaint of whoever could not run it."""
    calls = {"role": "assistant", "content": None, "tool_calls": [call("a", "look", written)]}
    result = {"role": "tool", "tool_call_id": "a", "content": "no JSON"}
    (function,) = (message["function"] for message in sent(Flavor.GOOGLE, calls, result)[0]["tool_calls"])
    assert json.loads(function["arguments"]) == read
    assert sent(Flavor.OPENAI, calls, result)[0]["tool_calls"][0]["function"]["arguments"] == written
