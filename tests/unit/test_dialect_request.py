"""OpenAI requests for Anthropic, Google and OpenAI: translated, dropped and unsupported fields."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import pytest
from anthropic.types.message_create_params import MessageCreateParamsStreaming
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_params

from gateway.apis.openai.frames import Endpoint, Flavor
from gateway.apis.openai.generation_request import BODIES
from gateway.errors import UpstreamError
from gateway.providers import provider_fields as fields
from gateway.providers.anthropic.anthropic_request import DEFAULT_MAX_TOKENS, OPENING, takes_prefill
from gateway.providers.openai.openai_request import flavor_of
from headgate.shared.bodies.body_decoder import json_schema
from tests.rigs.fake_provider import rules
from tests.rigs.fake_provider.strict import request_of
from tests.rigs.typed_bodies import needs_sampling_version, to_anthropic, to_openai, unsupported_by_openai
from tests.rigs.typed_bodies import unsupported_by_anthropic as unsupported_params

MODEL = "claude-opus-5"
PNG = "data:image/png;base64," + base64.b64encode(b"\x89PNG fake").decode()
PDF = "data:application/pdf;base64," + base64.b64encode(b"%PDF fake").decode()
TOOL = {
    "type": "function",
    "function": {"name": "level", "description": "River level.", "parameters": {"type": "object", "properties": {}}},
}


def user(content: Any = "Hi") -> dict[str, Any]:
    return {"role": "user", "content": content}


def calls(*ids: str, name: str = "level", arguments: str = "{}") -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}} for id in ids
        ],
    }


def result(id: str, content: Any = "3 m") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}


def translated(*messages: dict[str, Any], model: str = MODEL, **more: Any) -> dict[str, Any]:
    """The request, after the checks of the API's rules and of the SDK's type."""
    request = to_anthropic({"messages": list(messages), "model": "x", **more}, model)
    rules.anthropic(request, "2023-06-01" if needs_sampling_version(request) else "2026-10-21")
    request_of(MessageCreateParamsStreaming, request)
    return request


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


# --- messages ---------------------------------------------------------------------------------------------------------
def test_minimal_request_is_translated() -> None:
    assert translated(user("Hi")) == {
        "model": MODEL,
        "max_tokens": DEFAULT_MAX_TOKENS,
        "messages": [{"role": "user", "content": [text("Hi")]}],
        "stream": True,
    }


def test_system_and_developer_messages_become_one_system_prompt() -> None:
    request = translated(
        {"role": "system", "content": "Be brief."},
        user("Hi"),
        {"role": "developer", "content": [text("Be kind."), text("Be clear.")]},
    )
    assert request["system"] == "Be brief.\n\nBe kind.\n\nBe clear."
    assert len(request["messages"]) == 1


def test_system_prompt_without_other_messages_becomes_a_message_of_the_user() -> None:
    request = translated({"role": "system", "content": "Tell a joke."})
    assert "system" not in request
    assert request["messages"] == [user([text("Tell a joke.")])]


def test_adjacent_messages_of_one_role_become_one_turn() -> None:
    request = translated(user("A"), user("B"), {"role": "assistant", "content": "C"}, user("D"))
    assert request["messages"] == [
        user([text("A"), text("B")]),
        {"role": "assistant", "content": [text("C")]},
        user([text("D")]),
    ]


def test_conversation_that_starts_with_the_assistant_gets_an_opening() -> None:
    request = translated({"role": "assistant", "content": "Welcome!"}, user("Hi"))
    assert request["messages"][0] == user([text(OPENING)])


def test_last_assistant_turn_is_a_prefill_without_trailing_space() -> None:
    messages = user("Hi"), {"role": "assistant", "content": "The answer is \n"}
    request = translated(*messages, model="claude-opus-4-5", continue_final_message=True)
    assert request["messages"][-1] == {"role": "assistant", "content": [text("The answer is")]}


@pytest.mark.parametrize(
    ("model", "takes"),
    [("claude-3-haiku-x", True), ("claude-sonnet-4-5", True), ("claude-opus-4-6", False), ("claude-opus-5", False)],
)
def test_prefill_is_unsupported_by_models_after_4_5(model: str, takes: bool) -> None:
    messages = [user(), {"role": "assistant", "content": "So"}, {"role": "system", "content": "Be brief."}, user(" ")]
    assert takes_prefill(model) is takes
    assert tuple(unsupported_params({"messages": messages}, model)) == (() if takes else ("messages",))
    assert not unsupported_params({"messages": messages})
    if takes:
        translated(*messages, model=model)
    else:
        with pytest.raises(UpstreamError, match="last message"):
            translated(*messages, model=model)


def test_blank_texts_are_left_out() -> None:
    request = translated(user(""), {"role": "assistant", "content": " "}, user([text("\n"), text("Hi")]))
    assert request["messages"] == [user([text("Hi")])]


def test_images_from_data_urls_and_addresses_are_translated() -> None:
    request = translated(
        user(
            [
                text("Look"),
                {"type": "image_url", "image_url": {"url": PNG, "detail": "high"}},
                {"type": "image_url", "image_url": {"url": "https://example.com/a.jpg"}},
            ]
        )
    )
    assert request["messages"][0]["content"][1:] == [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG.partition(",")[2]}},
        {"type": "image", "source": {"type": "url", "url": "https://example.com/a.jpg"}},
    ]


def test_pdf_is_a_document_with_an_optional_title() -> None:
    part = {"type": "file", "file": {"filename": "mill.pdf", "file_data": PDF}}
    block = translated(user([part]))["messages"][0]["content"][0]
    assert (block["type"], block["title"], block["source"]["media_type"]) == ("document", "mill.pdf", "application/pdf")
    assert "title" not in translated(user([{"type": "file", "file": {"file_data": PDF}}]))["messages"][0]["content"][0]


def test_last_turn_with_tool_calls_is_not_changed() -> None:
    request = to_anthropic({"messages": [user(), calls("a")], "tools": [TOOL]}, "claude-opus-4-5")
    assert request["messages"][-1]["content"][0]["type"] == "tool_use"


def test_refusal_in_the_history_is_text_of_the_assistant() -> None:
    request = translated(user("Hi"), {"role": "assistant", "content": None, "refusal": "No."}, user("Why?"))
    assert request["messages"][1]["content"] == [text("No.")]


def test_reasoning_in_the_history_is_left_out() -> None:
    message = {"role": "assistant", "content": "4", "reasoning_content": "Two and two."}
    assert "Two and two" not in json.dumps(translated(user("2+2?"), message, user("Sure?")))


# --- tools ------------------------------------------------------------------------------------------------------------
def test_results_of_several_calls_are_the_start_of_one_user_turn() -> None:
    request = translated(user("Levels?"), calls("a", "b"), result("a"), result("b"), user("Well?"), tools=[TOOL])
    assert request["messages"][1]["content"] == [
        {"type": "tool_use", "id": "a", "name": "level", "input": {}},
        {"type": "tool_use", "id": "b", "name": "level", "input": {}},
    ]
    assert request["messages"][2]["content"] == [
        {"type": "tool_result", "tool_use_id": "a", "content": [text("3 m")]},
        {"type": "tool_result", "tool_use_id": "b", "content": [text("3 m")]},
        text("Well?"),
    ]


def test_text_between_call_and_result_moves_after_the_result() -> None:
    request = translated(user(), calls("a"), user("Wait"), result("a"), tools=[TOOL])
    assert [block["type"] for block in request["messages"][2]["content"]] == ["tool_result", "text"]


def test_empty_result_has_no_content() -> None:
    request = translated(user(), calls("a"), result("a", ""), tools=[TOOL])
    assert request["messages"][2]["content"] == [{"type": "tool_result", "tool_use_id": "a"}]


def test_invalid_ids_are_replaced_consistently_and_uniquely() -> None:
    request = translated(user(), calls("f.x:1", "f_x_1"), result("f_x_1"), result("f.x:1"), tools=[TOOL])
    used = [block["id"] for block in request["messages"][1]["content"]]
    answered = [block["tool_use_id"] for block in request["messages"][2]["content"]]
    assert len(set(used)) == 2
    assert answered == list(reversed(used))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {}),
        ('{"river": "Iller"}', {"river": "Iller"}),
        ("[1]", {"arguments": "[1]"}),
        ("{broken", {"arguments": "{broken"}),
    ],
)
def test_arguments_become_an_object(arguments: str, expected: dict[str, Any]) -> None:
    request = translated(user(), calls("a", arguments=arguments), result("a"), tools=[TOOL])
    assert request["messages"][1]["content"][0]["input"] == expected


def test_tool_definitions_are_translated() -> None:
    bare = {"type": "function", "function": {"name": "now", "strict": True}}
    assert translated(user(), tools=[TOOL, bare])["tools"] == [
        {"name": "level", "description": "River level.", "input_schema": {"type": "object", "properties": {}}},
        {
            "name": "now",
            "input_schema": {"type": "object", "properties": {}, "additionalProperties": False},
            "strict": True,
        },
    ]


@pytest.mark.parametrize(
    ("choice", "parallel", "expected"),
    [
        (None, None, None),
        (None, True, None),
        (None, False, {"type": "auto", "disable_parallel_tool_use": True}),
        ("auto", None, {"type": "auto"}),
        ("none", False, {"type": "none"}),
        ("required", None, {"type": "any"}),
        ("required", False, {"type": "any", "disable_parallel_tool_use": True}),
        ({"type": "function", "function": {"name": "level"}}, None, {"type": "tool", "name": "level"}),
    ],
)
def test_tool_choice_is_translated(choice: Any, parallel: bool | None, expected: dict[str, Any] | None) -> None:
    request = translated(user(), tools=[TOOL], tool_choice=choice, parallel_tool_calls=parallel)
    assert request.get("tool_choice") == expected


def test_tools_in_the_history_are_defined_without_being_callable() -> None:
    request = translated(user(), calls("a"), result("a"))
    assert request["tools"] == [{"name": "level", "input_schema": {"type": "object"}}]
    assert request["tool_choice"] == {"type": "none"}


# --- parameters -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, DEFAULT_MAX_TOKENS),
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 8}, 8),
        ({"max_tokens": 7, "max_completion_tokens": 8}, 8),
        ({"max_tokens": None}, DEFAULT_MAX_TOKENS),
    ],
)
def test_max_tokens_has_a_default_for_anthropic(given: dict[str, Any], expected: int) -> None:
    assert translated(user(), **given)["max_tokens"] == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"temperature": 0}, {"temperature": 0}),
        ({"temperature": 1.7}, {"temperature": 1}),
        ({"top_p": 0.9}, {"top_p": 0.9}),
        ({"top_p": 1}, {}),
        ({"temperature": 0.3, "top_p": 0.9}, {"temperature": 0.3}),
        ({"temperature": 1, "top_p": 0.9}, {"top_p": 0.9}),
        ({"top_k": 40}, {"top_k": 40}),
        ({"top_k": -1}, {}),
    ],
)
def test_sampling_is_sent_to_models_that_accept_it(given: dict[str, Any], expected: dict[str, Any]) -> None:
    for model in (
        "claude-sonnet-4-6",
        "claude-haiku-4-5-20251001",
        "claude-opus-4-20250514",
        "claude-3-haiku-20240307",
    ):
        request = translated(user(), model=model, **given)
        assert {name: request[name] for name in ("temperature", "top_p", "top_k") if name in request} == expected
        assert needs_sampling_version(request) is bool(expected)


@pytest.mark.parametrize("model", ["claude-opus-4-7", "claude-sonnet-5-5", "claude-opus-5", "claude-of-tomorrow"])
def test_sampling_is_left_out_for_models_that_reject_it(model: str) -> None:
    request = translated(user(), model=model, temperature=0, top_p=0.5, top_k=3)
    assert not needs_sampling_version(request)


def test_stop_sequences_are_translated() -> None:
    assert translated(user(), stop="END")["stop_sequences"] == ["END"]
    assert translated(user(), stop=["A", "B"])["stop_sequences"] == ["A", "B"]


SHOWN = {"type": "adaptive", "display": "summarized"}


@pytest.mark.parametrize(
    ("model", "effort", "expected"),
    [
        ("claude-opus-5", "minimal", {"output_config": {"effort": "low"}}),
        ("claude-opus-5", "max", {"output_config": {"effort": "max"}, "thinking": SHOWN}),
        ("claude-opus-4-6", "xhigh", {"output_config": {"effort": "high"}, "thinking": {"type": "adaptive"}}),
        ("claude-opus-4-5", "low", {"output_config": {"effort": "low"}}),
        ("claude-sonnet-4-5-20250929", "high", {}),
        ("claude-haiku-4-5", "high", {}),
        ("claude-opus-5", "none", {"thinking": {"type": "disabled"}}),
        ("claude-opus-5", "unknown", {}),
    ],
)
def test_reasoning_effort_is_translated(model: str, effort: str, expected: dict[str, Any]) -> None:
    request = translated(user(), model=model, reasoning_effort=effort)
    assert {name: request[name] for name in ("output_config", "thinking") if name in request} == expected


def test_thinking_is_left_out_beside_forced_tools_or_sampling() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    for choice, thinks in (
        ("auto", True),
        ("required", False),
        ({"type": "function", "function": {"name": "f"}}, False),
    ):
        request = translated(user(), reasoning_effort="high", tools=tools, tool_choice=choice)
        assert ("thinking" in request) is thinks
    assert "thinking" not in translated(user(), model="claude-opus-4-6", reasoning_effort="high", temperature=0.5)
    assert "thinking" in translated(user(), reasoning_effort="high", temperature=0.5)


def test_objects_of_a_schema_are_closed() -> None:
    point = {"type": "object", "properties": {"x": {"type": "number"}}}
    schema = {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/p"}, "all": {"type": "array", "items": point}},
        "$defs": {"p": point},
        "additionalProperties": True,
    }
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    closed = {**point, "additionalProperties": False}
    assert translated(user(), response_format=shape)["output_config"]["format"]["schema"] == {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/p"}, "all": {"type": "array", "items": closed}},
        "$defs": {"p": closed},
        "additionalProperties": False,
    }
    assert "additionalProperties" not in point
    given = {"messages": [user()], "response_format": shape}
    assert tuple(unsupported_params(given, "claude-3-5-haiku-latest")) == ("response_format",)
    assert not unsupported_params(given, "claude-haiku-4-5") and not unsupported_params(given)


def test_nullable_object_of_a_schema_is_closed() -> None:
    schema = {"type": ["object", "null"], "properties": {}}
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    found = translated(user(), response_format=shape)["output_config"]["format"]["schema"]
    assert found == {**schema, "additionalProperties": False}


def test_json_schema_is_an_output_format() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False}
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    request = translated(user(), response_format=shape)
    assert request["output_config"] == {"format": {"type": "json_schema", "schema": schema}}
    assert "output_config" not in translated(user(), response_format={"type": "text"})


def test_user_is_sent_as_metadata() -> None:
    assert translated(user(), user="u-1")["metadata"] == {"user_id": "u-1"}


def test_fields_of_other_providers_are_dropped() -> None:
    given = {"store": True, "metadata": {"a": "b"}, "service_tier": "flex", "min_p": 0.1, "verbosity": "low"}
    assert translated(user(), **given) == translated(user())


ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}}

UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"n": 2}, "n"),
    ({"logprobs": True}, "logprobs"),
    ({"logit_bias": {"1": 5}}, "logit_bias"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"presence_penalty": -1}, "presence_penalty"),
    ({"seed": 0}, "seed"),
    ({"stop": "\n\n"}, "stop"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"grammar": "root ::= x"}, "grammar"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"tools": [{"type": "custom", "custom": {"name": "c"}}]}, "tools"),
    ({"tools": [TOOL], "tool_choice": ALLOWED}, "tool_choice"),
    ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages"),
    ({"messages": [user("")]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "type": "custom"}]}]}, "messages"),
    (
        {"messages": [user([{"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}}])]},
        "messages[0].content",
    ),
    (
        {"messages": [user([{"type": "image_url", "image_url": {"url": "data:image/tiff;base64,AA=="}}])]},
        "messages[0].content",
    ),
    ({"messages": [user([{"type": "file", "file": {"file_id": "f-1"}}])]}, "messages[0].content"),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "image_url", "image_url": {"url": PNG}}]}]},
        "messages[0].content",
    ),
]


@pytest.mark.parametrize(("change", "param"), UNSUPPORTED)
def test_unsupported_field_is_an_error_with_its_name(change: dict[str, Any], param: str) -> None:
    body = {"model": "x", "messages": [user()], **change}
    assert tuple(unsupported_params(body)) == (param,)
    with pytest.raises(UpstreamError) as caught:
        to_anthropic(body, MODEL)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "unsupported_parameter", param)
    assert param in caught.value.message


@pytest.mark.parametrize(
    "harmless",
    [
        {"n": 1},
        {"logprobs": False},
        {"logit_bias": {}},
        {"frequency_penalty": 0},
        {"seed": None},
        {"modalities": ["text"]},
    ],
)
def test_default_values_of_unsupported_fields_are_accepted(harmless: dict[str, Any]) -> None:
    assert not unsupported_params({"messages": [user()], **harmless})
    assert translated(user(), **harmless) == translated(user())


# --- OpenAI's API -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("flavor", "audio", "refused"),
    [
        (Flavor.OPENAI, {"voice": "alloy", "format": "wav"}, ("audio",)),
        (Flavor.OPENAI, {"voice": "alloy", "format": "pcm16"}, ()),
        (Flavor.OPENAI, {"voice": "alloy"}, ()),
        (Flavor.OPENAI, None, ()),
        (Flavor.COMPATIBLE, {"voice": "alloy", "format": "wav"}, ()),
    ],
)
def test_audio_of_openai_is_supported_in_formats_that_can_be_streamed(
    flavor: Flavor, audio: Any, refused: tuple[str, ...]
) -> None:
    """Each answer is streamed from the provider, also one that the client gets as a whole."""
    body = {"model": "m", "messages": [user()], "audio": audio}
    assert tuple(unsupported_by_openai(body, flavor)) == refused
    if refused:
        with pytest.raises(UpstreamError, match="pcm16"):
            to_openai(Endpoint.CHAT, body, "gpt-audio", flavor)
    else:
        assert to_openai(Endpoint.CHAT, body, "gpt-audio", flavor).get("audio") == audio


@pytest.mark.parametrize(
    ("host", "path", "flavor"),
    [
        ("api.openai.com", "/v1/", Flavor.OPENAI),
        ("eu.api.openai.com", "/v1/", Flavor.OPENAI),
        ("api.openai.com.evil.example", "/v1/", Flavor.COMPATIBLE),
        ("mill.openai.azure.com", "/openai/v1/", Flavor.OPENAI),
        ("mill.openai.azure.us", "/openai/v1/", Flavor.OPENAI),
        ("mill.services.ai.azure.com", "/openai/v1/", Flavor.OPENAI),
        ("mill.openai.azure.com.evil.example", "/openai/v1/", Flavor.COMPATIBLE),
        ("generativelanguage.googleapis.com", "/v1beta/openai/", Flavor.GOOGLE),
        ("127.0.0.1", "/v1beta/openai/", Flavor.GOOGLE),
        ("openrouter.ai", "/api/v1/", Flavor.COMPATIBLE),
    ],
)
def test_flavor_follows_from_the_address(host: str, path: str, flavor: Flavor) -> None:
    assert flavor_of(host, path) is flavor


def test_usage_is_always_requested() -> None:
    for flavor in Flavor:
        body = {"messages": [user()], "stream": False, "stream_options": {"include_usage": False}}
        request = to_openai(Endpoint.CHAT, body, "m", flavor)
        assert request["stream"] is True
        assert request["stream_options"] == {"include_usage": True}
    keep = to_openai(Endpoint.CHAT, {"stream_options": {"include_obfuscation": False}}, "m", Flavor.OPENAI)
    assert keep["stream_options"] == {"include_usage": True, "include_obfuscation": False}


def test_max_tokens_is_renamed_for_openai_only() -> None:
    body = {"messages": [user()], "max_tokens": 5}
    assert to_openai(Endpoint.CHAT, body, "m", Flavor.OPENAI)["max_completion_tokens"] == 5
    assert "max_tokens" not in to_openai(Endpoint.CHAT, body, "m", Flavor.OPENAI)
    for flavor in (Flavor.GOOGLE, Flavor.COMPATIBLE):
        assert to_openai(Endpoint.CHAT, body, "m", flavor)["max_tokens"] == 5
    both = to_openai(Endpoint.CHAT, {**body, "max_completion_tokens": 9}, "m", Flavor.OPENAI)
    assert (both.get("max_tokens"), both["max_completion_tokens"]) == (None, 9)


SAMPLING = {"temperature": 0, "top_p": 0.5}
NOTHING = {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "logprobs": False, "stop": []}


def sent_to_openai(model: str, **more: Any) -> dict[str, Any]:
    """The request, after the checks of OpenAI's rules."""
    request = to_openai(Endpoint.CHAT, {"messages": [user()], **more}, model, Flavor.OPENAI)
    rules.openai_chat(request, "openai")
    return request


@pytest.mark.parametrize(
    ("model", "effort", "samples"),
    [
        ("gpt-5", None, False),
        ("gpt-5-mini-2025-08-07", "minimal", False),
        ("o1", None, False),
        ("o3-mini", "low", False),
        ("o4-mini", None, False),
        ("ft:o4-mini-2025-04-16:org::id", None, False),
        ("gpt-5.1-chat-latest", None, False),
        ("gpt-5.2", "low", False),
        ("gpt-5.2-pro", None, False),
        ("gpt-5.1-codex-mini", None, False),
        ("gpt-5.5", None, False),
        ("gpt-5.2", None, True),
        ("gpt-5.4-mini-2026-03-17", None, True),
        ("ft:gpt-5.1-2025-11-13:my-pro::id", None, True),
        ("GPT-5.1", None, True),
        ("openai/gpt-5.1", None, True),
        ("openai/gpt-5", None, False),
        ("models/gpt-5", None, False),
        ("GPT-5", None, False),
        ("a/models/O3", None, False),
        ("openai/GPT-4.1", None, True),
        ("openai/GPT-5-Chat-latest", None, True),
        ("openai/gpt-oss-120b", None, True),
        ("gpt-6-luna", "none", False),
        ("gpt-5.2-2025-12-11", "none", True),
        ("gpt-5-chat-latest", None, True),
        ("gpt-4.1", None, True),
        ("gpt-35-turbo", None, True),
        ("chatgpt-4o-latest", None, True),
        ("my-own-o3", None, True),
    ],
)
def test_sampling_is_left_out_for_reasoning_models_of_openai(model: str, effort: str | None, samples: bool) -> None:
    sent = sent_to_openai(model, **SAMPLING, reasoning_effort=effort)
    assert (SAMPLING.items() <= sent.items(), SAMPLING.keys() <= sent.keys()) == (samples, samples)
    assert not unsupported_by_openai({**SAMPLING, **NOTHING}, Flavor.OPENAI, model=model)
    assert to_openai(Endpoint.CHAT, {**SAMPLING}, model, Flavor.COMPATIBLE)["temperature"] == 0


def test_default_values_are_left_out_for_reasoning_models() -> None:
    assert NOTHING.keys().isdisjoint(sent_to_openai("gpt-5", **NOTHING))
    assert sent_to_openai("gpt-5.4", **NOTHING, reasoning_effort="none")["logprobs"] is False
    assert sent_to_openai("gpt-4o", **NOTHING).items() >= NOTHING.items()


REASONING_UNSUPPORTED: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("gpt-5", {"frequency_penalty": 0.5}, ("frequency_penalty",)),
    ("gpt-5.2", {"presence_penalty": -1, "reasoning_effort": "none"}, ("presence_penalty",)),
    ("o3", {"logit_bias": {"5": 1}}, ("logit_bias",)),
    ("o3", {"logprobs": True, "top_logprobs": 2}, ("logprobs", "top_logprobs")),
    ("gpt-5.2", {"logprobs": True, "reasoning_effort": "low"}, ("logprobs",)),
    ("openai/GPT-5", {"logprobs": True}, ("logprobs",)),
    ("gpt-5-nano", {"stop": "END"}, ("stop",)),
    ("o4-mini", {"stop": list("abcde")}, ("stop",)),
]


@pytest.mark.parametrize(("model", "change", "params"), REASONING_UNSUPPORTED)
def test_fields_with_a_visible_effect_make_a_reasoning_model_unsuitable(
    model: str, change: dict[str, Any], params: tuple[str, ...]
) -> None:
    body = {"messages": [user()], **change}
    assert tuple(unsupported_by_openai(body, Flavor.OPENAI, model=model)) == params
    with pytest.raises(UpstreamError) as caught:
        to_openai(Endpoint.CHAT, body, model, Flavor.OPENAI)
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", params[0])
    assert not unsupported_by_openai(body, Flavor.COMPATIBLE, model=model)


def test_fields_that_some_reasoning_models_accept_are_sent() -> None:
    assert sent_to_openai("gpt-5.1", logprobs=True, reasoning_effort="none")["logprobs"] is True
    for model in ("o1", "o3-mini-2025-01-31", "gpt-4.1"):
        assert sent_to_openai(model, stop=["a", "b"])["stop"] == ["a", "b"]


def test_more_than_four_stop_strings_are_unsupported_by_openai_and_google() -> None:
    for endpoint, flavor, refused in (
        (Endpoint.CHAT, Flavor.OPENAI, True),
        (Endpoint.COMPLETIONS, Flavor.OPENAI, True),
        (Endpoint.CHAT, Flavor.GOOGLE, True),
        (Endpoint.CHAT, Flavor.COMPATIBLE, False),
    ):
        for stop in ("END", list("abcd"), list("abcde")):
            too_many = refused and len(stop) > 4
            assert tuple(unsupported_by_openai({"stop": stop}, flavor, endpoint)) == (("stop",) if too_many else ())


def test_schema_in_json_object_is_sent_to_compatible_servers_only() -> None:
    """llama.cpp reads it; OpenAI and Google do not."""
    for shape, asks in (({"type": "json_object"}, False), ({"type": "json_object", "schema": {}}, True)):
        body = {"messages": [user()], "response_format": shape}
        for flavor in Flavor:
            refused = asks and flavor is not Flavor.COMPATIBLE
            assert tuple(unsupported_by_openai(body, flavor)) == (("response_format",) if refused else ())
            if not refused:
                assert to_openai(Endpoint.CHAT, body, "m", flavor)["response_format"] == shape


def test_sampling_extensions_are_dropped_and_grammars_are_unsupported() -> None:
    body = {"messages": [user()], "top_k": 3, "min_p": 0.1, "repeat_penalty": 1.1, "chat_template_kwargs": {}}
    for flavor in Flavor:
        request = to_openai(Endpoint.CHAT, body, "m", flavor)
        assert set(request) == {"messages", "model", "stream", "stream_options"}
        assert tuple(unsupported_by_openai({**body, "grammar": "x"}, flavor)) == ("grammar",)


def test_fields_that_google_does_not_support_are_adapted_or_refused() -> None:
    body = {"messages": [user()], "user": "u", "store": True, "reasoning_effort": "xhigh", "temperature": 1.5}
    request = to_openai(Endpoint.CHAT, body, "gemini", Flavor.GOOGLE)
    rules.openai_chat(request, "google")
    assert request["reasoning_effort"] == "high"
    assert request["temperature"] == 1.5
    unsupported = unsupported_by_openai({"seed": 1, "parallel_tool_calls": False, "n": 2}, Flavor.GOOGLE)
    assert tuple(unsupported) == ("parallel_tool_calls", "seed")


def test_reasoning_of_another_provider_is_sent_to_compatible_servers_only() -> None:
    message = {"role": "assistant", "content": "4", "reasoning_content": "2+2"}
    body = {"messages": [user(), message, user()]}
    assert to_openai(Endpoint.CHAT, body, "m", Flavor.OPENAI)["messages"][1] == {"role": "assistant", "content": "4"}
    assert to_openai(Endpoint.CHAT, body, "m", Flavor.COMPATIBLE)["messages"][1] == message
    assert message["reasoning_content"] == "2+2"


# --- the tables -------------------------------------------------------------------------------------------------------
def _keys(typed_dict: Any) -> set[str]:
    return set(typed_dict.__annotations__)


def fields_of(endpoint: Endpoint) -> set[str]:
    """The names that the gateway accepts."""
    return {*json_schema(BODIES[endpoint][0])[0]["properties"]}


CHAT_KEYS = _keys(chat_params.CompletionCreateParamsBase) | fields_of(Endpoint.CHAT) | {"stream"}


@pytest.mark.parametrize(
    ("profile", "known"),
    [
        (fields.OPENAI_CHAT, CHAT_KEYS),
        (fields.GOOGLE_CHAT, CHAT_KEYS),
        (fields.ANTHROPIC_CHAT, CHAT_KEYS),
        (
            fields.OPENAI_COMPLETIONS,
            _keys(completion_create_params.CompletionCreateParamsBase) | fields_of(Endpoint.COMPLETIONS) | {"stream"},
        ),
        (
            fields.OPENAI_EMBEDDINGS,
            _keys(embedding_create_params.EmbeddingCreateParams) | fields_of(Endpoint.EMBEDDINGS),
        ),
    ],
)
def test_each_field_has_one_treatment(profile: fields.Profile, known: set[str]) -> None:
    """Fields of the SDK's types and of the gateway's own request types."""
    decided: Mapping[str, int] = {
        name: (name in profile.takes)
        + (name in profile.refuses and name not in profile.takes)
        + (name in profile.drops)
        for name in known
    }
    assert {name: times for name, times in decided.items() if times != 1} == {}


def test_fields_sent_to_openai_are_those_of_its_sdk() -> None:
    assert fields.OPENAI_CHAT.takes <= _keys(chat_params.CompletionCreateParamsBase) | {"stream"}
    assert fields.GOOGLE_CHAT.takes <= fields.OPENAI_CHAT.takes


def test_unsupported_endpoints_of_a_provider_are_an_error() -> None:
    for endpoint, flavor in ((Endpoint.RERANK, Flavor.OPENAI), (Endpoint.COMPLETIONS, Flavor.GOOGLE)):
        assert tuple(unsupported_by_openai({"model": "m"}, flavor, endpoint)) == ("model",)
        with pytest.raises(UpstreamError, match=f"it has no /v1/{endpoint}"):
            to_openai(endpoint, {"model": "m"}, "m", flavor)


def test_completions_are_streamed_and_embeddings_are_not() -> None:
    completion = to_openai(Endpoint.COMPLETIONS, {"model": "a", "prompt": "Once"}, "m", Flavor.OPENAI)
    assert completion == {"model": "m", "prompt": "Once", "stream": True, "stream_options": {"include_usage": True}}
    vectors = to_openai(Endpoint.EMBEDDINGS, {"model": "a", "input": "Once"}, "m", Flavor.OPENAI)
    assert vectors == {"model": "m", "input": "Once"}


def test_effort_is_limited_to_the_highest_of_the_provider() -> None:
    body = {"messages": [user()], "reasoning_effort": "max"}
    sent = {flavor: to_openai(Endpoint.CHAT, body, "m", flavor)["reasoning_effort"] for flavor in Flavor}
    assert sent == {Flavor.OPENAI: "xhigh", Flavor.GOOGLE: "high", Flavor.COMPATIBLE: "max"}


@pytest.mark.parametrize(
    ("flavor", "model", "effort", "sent"),
    [
        (Flavor.OPENAI, "gpt-4o", "none", None),
        (Flavor.OPENAI, "ft:gpt-4.1-mini:mill", "high", None),
        (Flavor.OPENAI, "gpt-3.5-turbo", "low", None),
        (Flavor.OPENAI, "gpt-5-chat-latest", "low", None),
        (Flavor.OPENAI, "gpt-5.1", "none", "none"),
        (Flavor.OPENAI, "gpt-5", "none", "minimal"),
        (Flavor.OPENAI, "gpt-5", "xhigh", "high"),
        (Flavor.OPENAI, "openai/gpt-5-mini-2025-08-07", "minimal", "minimal"),
        (Flavor.OPENAI, "gpt-5-pro", "low", "high"),
        (Flavor.OPENAI, "gpt-5-codex", "minimal", "low"),
        (Flavor.OPENAI, "gpt-5.1", "minimal", "low"),
        (Flavor.OPENAI, "gpt-5.1", "max", "high"),
        (Flavor.OPENAI, "gpt-5.1-codex", "none", "low"),
        (Flavor.OPENAI, "gpt-5.1-codex-max", "max", "xhigh"),
        (Flavor.OPENAI, "gpt-5.2-chat-latest", "high", "medium"),
        (Flavor.OPENAI, "gpt-5.2-pro", "none", "medium"),
        (Flavor.OPENAI, "gpt-5.5", "max", "xhigh"),
        (Flavor.OPENAI, "gpt-5.5", "none", "none"),
        (Flavor.OPENAI, "o4-mini", "max", "high"),
        (Flavor.OPENAI, "o3", "minimal", "low"),
        (Flavor.OPENAI, "our-own-name", "odd", "odd"),
        (Flavor.OPENAI, "our-own-name", "low", "low"),
        (Flavor.COMPATIBLE, "gpt-4o", "none", "none"),
        (Flavor.GOOGLE, "gemini-2.5-pro", "none", "minimal"),
        (Flavor.GOOGLE, "models/gemini-3-pro", "none", "minimal"),
        (Flavor.GOOGLE, "gemini-2.5-flash", "none", "none"),
        (Flavor.GOOGLE, "gemini-2.5-pro", "max", "high"),
    ],
)
def test_unsupported_effort_becomes_the_next_higher_one_of_the_model(
    flavor: Flavor, model: str, effort: str, sent: str | None
) -> None:
    """Or the highest one."""
    body = to_openai(Endpoint.CHAT, {"messages": [user()], "reasoning_effort": effort}, model, flavor)
    assert body.get("reasoning_effort") == sent
    rules.openai_chat(body, flavor)


def test_sampling_is_left_out_for_models_that_always_reason() -> None:
    body = {"messages": [user()], "reasoning_effort": "none", "temperature": 0}
    assert "temperature" in to_openai(Endpoint.CHAT, body, "gpt-5.2", Flavor.OPENAI)
    for model in ("gpt-5.2-pro", "gpt-5.2-codex", "gpt-5.2-chat-latest"):
        sent = to_openai(Endpoint.CHAT, body, model, Flavor.OPENAI)
        assert "temperature" not in sent
        rules.openai_chat(sent, Flavor.OPENAI)


def test_thought_signatures_in_the_history_are_sent_as_each_provider_requires() -> None:
    signed = {"google": {"thought_signature": "s"}}

    def sent(flavor: Flavor, model: str, **more: Any) -> list[dict[str, Any]]:
        calls = [{"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}} for id in ("a", "b")]
        calls[0] |= more
        body = {"messages": [user(), {"role": "assistant", "tool_calls": calls}]}
        found: list[dict[str, Any]] = to_openai(Endpoint.CHAT, body, model, flavor)["messages"][1]["tool_calls"]
        return found

    unsigned = {"google": {"thought_signature": "skip_thought_signature_validator"}}
    assert [call.get("extra_content") for call in sent(Flavor.GOOGLE, "gemini-3-pro")] == [unsigned, None]
    assert sent(Flavor.GOOGLE, "gemini-3-pro", extra_content=signed)[0]["extra_content"] == signed
    assert "extra_content" not in sent(Flavor.GOOGLE, "gemini-2.5-flash")[0]
    assert "extra_content" not in sent(Flavor.OPENAI, "gpt-5", extra_content=signed)[0]
    assert sent(Flavor.COMPATIBLE, "gemini-3-pro", extra_content=signed)[0]["extra_content"] == signed
