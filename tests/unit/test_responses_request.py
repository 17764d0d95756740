"""Responses bodies are translated into chat requests; what chat cannot express is rejected with the field's name."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from openai.types.responses import ResponseCreateParams

from gateway.apis.openai.frames import Endpoint, Flavor
from gateway.apis.openai.generation_request import parse as parse_chat
from gateway.apis.openai.generation_request import short_name
from gateway.apis.responses.responses_items import listed, messages_of, page, seal, unseal
from gateway.apis.responses.responses_request import Earlier, ResponsesRequest, decoded, references
from gateway.apis.responses_body import REFUSED, InputItem, MessageItem, responses_schema, stored_items
from gateway.errors import RequestError
from inference.protocol import Code
from tests.rigs.fake_provider import rules
from tests.rigs.typed_bodies import json_of, parse_responses, to_openai

PNG = "data:image/png;base64,iVBORw0KGgo="
PDF = "data:application/pdf;base64,JVBERi0="
ADD = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    "strict": False,
}

FIELDS = responses_schema()[0]["properties"].keys()


def nothing(_: str) -> None:
    """No earlier response or item is stored."""


def parsed(recall: Any = None, /, **body: Any) -> ResponsesRequest:
    raw = json.dumps({"model": "demo", "input": "Hi", **body}).encode()
    found = parse_responses(raw, recall or nothing, nothing)
    parse_chat(Endpoint.CHAT, json.dumps(json_of(found.request.body)).encode())  # the result is a valid chat body
    return found


def chat(**body: Any) -> dict[str, Any]:
    return json_of(parsed(**body).request.body)


def messages(*items: dict[str, Any], **body: Any) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = chat(input=list(items), **body)["messages"]
    return turns


def refusal(recall: Any = None, /, **body: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_responses(json.dumps({"model": "demo", "input": "Hi", **body}).encode(), recall or nothing, nothing)
    assert caught.value.status == 400
    return caught.value


def test_text_input_is_a_message_of_the_user() -> None:
    found = parsed()
    assert json_of(found.request.body) == {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
    assert (found.request.stream, found.request.is_plain, found.stored, found.with_encrypted_content) == (
        False,
        True,
        True,
        False,
    )
    assert found.items == (MessageItem(role="user", content="Hi"),)


def test_instructions_without_input_are_a_request() -> None:
    assert messages(instructions="Greet.") == [{"role": "system", "content": "Greet."}]


def test_stream_requests_usage_for_its_last_event() -> None:
    body = chat(stream=True, stream_options={"include_obfuscation": False})
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}


def test_fields_are_renamed_to_those_of_chat() -> None:
    body = chat(
        max_output_tokens=50, temperature=0.5, top_p=0.9, user="u", safety_identifier="s", prompt_cache_key="k",
        prompt_cache_retention="24h", service_tier="auto", reasoning={"effort": "high", "summary": "auto"},
        text={"verbosity": "low", "format": {"type": "text"}}, top_k=5, seed=7, stop=["a"],
        chat_template_kwargs={"x": 1}, metadata={"a": "b"}, truncation="disabled", background=False, store=False,
        prompt_cache_options={"mode": "implicit"}, client_metadata={"x": "y"}, max_tool_calls=3,
        include=["web_search_call.results"], parallel_tool_calls=True, tool_choice="auto", tools=[],
    )  # fmt: skip
    assert body == {
        "model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 50,
        "temperature": 0.5, "top_p": 0.9, "user": "u", "safety_identifier": "s", "prompt_cache_key": "k",
        "prompt_cache_retention": "24h", "service_tier": "auto", "reasoning_effort": "high", "verbosity": "low",
        "top_k": 5, "seed": 7, "stop": ["a"], "chat_template_kwargs": {"x": 1},
    }  # fmt: skip


def test_null_is_the_same_as_absent() -> None:
    absent: dict[str, Any] = dict.fromkeys(name for name in FIELDS if name not in ("model", "input"))
    assert chat(**absent) == chat()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, None),
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"top_logprobs": 3}, 3),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 5}, 5),
    ],
)
def test_logprobs_are_requested_by_include_or_by_number(body: dict[str, Any], expected: int | None) -> None:
    found = chat(**body)
    assert found.get("top_logprobs") == expected
    assert found.get("logprobs") == (None if expected is None else True)


def test_text_formats_become_response_formats() -> None:
    assert chat(text={"format": {"type": "json_object"}})["response_format"] == {"type": "json_object"}
    shape = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True, "description": None}
    assert chat(text={"format": shape})["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
    }


# --- items ------------------------------------------------------------------------------------------------------------
def test_items_of_an_agents_turn_become_one_assistant_message() -> None:
    turns = messages(
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List files"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "ls"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "shell", "arguments": '{"a":1}', "status": "completed"},
        {"type": "function_call", "call_id": "c2", "name": "shell", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "a.py"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "b.py"}]},
        {"role": "assistant", "content": "Two files."},
        {"role": "assistant", "content": "That is all."},
        {"role": "user", "content": ""},
        instructions="Be brief.",
    )
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "shell", "arguments": '{"a":1}'}},
        {"id": "c2", "type": "function", "function": {"name": "shell", "arguments": ""}},
    ]
    assert turns == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "List files"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "ls", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "a.py"},
        {"role": "tool", "tool_call_id": "c2", "content": "b.py"},
        {"role": "assistant", "content": "Two files."},
        {"role": "assistant", "content": "That is all."},
        {"role": "user", "content": ""},
    ]


def test_calls_without_text_have_null_content() -> None:
    turns = messages(
        {"role": "user", "content": "x"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
    )
    assert turns[1] == {
        "role": "assistant", "content": None, "reasoning_content": "hm",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }  # fmt: skip


def test_outputs_follow_their_calls_directly() -> None:
    turns = messages(
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "message", "role": "assistant", "content": "I call."},
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}"},
        {"role": "user", "content": "Hurry."},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": "2"},
        {"type": "function_call_output", "call_id": "unknown", "output": "3"},
    )
    assert [(message["role"], message["content"]) for message in turns] == [
        ("assistant", "I call."), ("tool", "1"), ("tool", "2"), ("user", "Hurry."), ("tool", "3"),
    ]  # fmt: skip
    assert [call["id"] for call in turns[0]["tool_calls"]] == ["c1", "c2"]


def test_output_without_a_call_is_a_message_of_the_user_with_the_tools_name() -> None:
    """Codex reports events in this form, for example that a goal was set."""
    picture = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    turns = messages(
        {"type": "function_call", "call_id": "c1", "name": "goal", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "set"},
        {"type": "function_call_output", "name": "objective", "namespace": "agent", "output": "Mill."},
        {"type": "function_call_output", "call_id": None, "output": [{"type": "input_text", "text": "x"}, picture]},
    )
    assert [message["role"] for message in turns] == ["assistant", "tool", "user", "user"]
    assert turns[2]["content"] == "Output of agent__objective:\n\nMill."
    assert turns[3]["content"] == [
        {"type": "text", "text": "Output of a tool:"},
        {"type": "text", "text": "x"},
        {"type": "image_url", "image_url": {"url": picture["image_url"]}},
    ]


def test_reasoning_after_a_call_starts_a_turn() -> None:
    turns = messages(
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "b"}]},
        {"role": "assistant", "content": "B"},
    )
    assert [message.get("reasoning_content") for message in turns] == [None, "b"]


def test_reasoning_at_the_end_is_dropped() -> None:
    turns = messages({"role": "user", "content": "x"}, {"type": "reasoning", "summary": [{"text": "cut"}]})
    assert turns == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("text", ["ls", "", "half \ud83d emoji", "ä"])
def test_reasoning_from_encrypted_content_is_restored_and_that_of_other_services_is_dropped(text: str) -> None:
    assert unseal(seal(text)) == text
    assert unseal("gAAAAABo") == ""
    assert unseal("headgate.1.***") == ""
    turns = messages(
        {"type": "reasoning", "summary": [], "encrypted_content": seal("thought")},
        {"role": "assistant", "content": "A"},
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"},
        {"role": "assistant", "content": "B"},
    )
    assert turns == [
        {"role": "assistant", "reasoning_content": "thought", "content": "A"},
        {"role": "assistant", "content": "B"},
    ]


def test_content_parts_keep_their_type() -> None:
    turns = messages(
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "See"},
                {"type": "input_image", "image_url": PNG, "detail": "original"},
                {"type": "input_image", "image_url": PNG},
                {"type": "input_file", "file_data": PDF, "filename": "a.pdf"},
                {"type": "input_file", "file_data": PDF},
                {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
            ],
        },
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"type": "function_call_output", "call_id": "c", "output": []},
    )
    assert turns[0]["content"] == [
        {"type": "text", "text": "See"},
        {"type": "image_url", "image_url": {"url": PNG, "detail": "high"}},
        {"type": "image_url", "image_url": {"url": PNG}},
        {"type": "file", "file": {"file_data": PDF, "filename": "a.pdf"}},
        {"type": "file", "file": {"file_data": PDF}},
        {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
    ]
    assert turns[1]["content"] == [{"type": "refusal", "refusal": "No."}]
    assert turns[2]["content"] == ""
    assert parsed(input=[{"role": "user", "content": [{"type": "input_image", "image_url": PNG}]}]).request.needs == {
        "chat",
        "vision",
    }


@pytest.mark.parametrize(
    ("given", "strict"), [({}, None), ({"strict": None}, None), ({"strict": False}, False), ({"strict": True}, True)]
)
def test_functions_are_strict_only_on_request(given: dict[str, Any], strict: bool | None) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    tool = {"type": "function", "name": "f", "parameters": {**parameters, "additionalProperties": False}, **given}
    found = parsed(tools=[tool])
    assert json_of(found.request.body)["tools"][0]["function"].get("strict") == strict
    assert found.echo["tools"][0]["strict"] == strict


def test_long_joined_names_are_shortened_and_mapped_back() -> None:
    """A namespace can make a name longer than the 64 characters that OpenAI accepts."""
    space, name = "mcp__codex_apps__github_enterprise_server", "list_pull_request_review_threads"
    tool = {"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}}
    others = [{**tool, "name": name + letter} for letter in "ab"]
    found = parsed(
        tools=[{"type": "namespace", "name": space, "tools": [tool, *others]}],
        tool_choice={"type": "function", "name": name, "namespace": space},
        input=[
            {"role": "user", "content": "Look."},
            {"type": "function_call", "call_id": "c", "name": name, "namespace": space, "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
        ],
    )
    first, *rest = found.names
    assert (found.names[first], len(set(found.names))) == ((name, space), 3)
    assert first.startswith(f"{space}__list") and {len(one) for one in (first, *rest)} == {64}
    assert json_of(found.request.body)["tool_choice"]["function"]["name"] == first
    assert json_of(found.request.body)["messages"][1]["tool_calls"][0]["function"]["name"] == first
    rules.openai_chat(to_openai(Endpoint.CHAT, found.request.body, "gpt-4.1", Flavor.OPENAI), "openai")


@pytest.mark.parametrize("chars", [1, 63, 64])
def test_names_of_up_to_64_characters_are_kept(chars: int) -> None:
    assert short_name("n" * chars) == "n" * chars
    assert short_name("n" * 65) != short_name("n" * 66)
    assert short_name(short_name("n" * 65)) == short_name("n" * 65)


def test_images_in_outputs_move_to_a_message_of_the_user() -> None:
    """Tool messages of OpenAI contain text only."""
    picture = {"type": "input_image", "image_url": PNG}
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "Look."},
        {"type": "function_call", "call_id": "c1", "name": "view", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "read", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [picture]},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "b"}, picture]},
        {"role": "user", "content": "And?"},
        {"type": "function_call_output", "call_id": "of before", "output": [picture]},
    ]
    turns = messages(*items)
    image = {"type": "image_url", "image_url": {"url": PNG}}
    assert turns[2:] == [
        {"role": "tool", "tool_call_id": "c1", "content": ""},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "b"}]},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "From the result of view:"}, image,
                {"type": "text", "text": "From the result of read:"}, image,
            ],
        },
        {"role": "user", "content": "And?"},
        {"role": "tool", "tool_call_id": "of before", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "From the result of a call:"}, image]},
    ]  # fmt: skip
    request = to_openai(Endpoint.CHAT, parsed(input=items[:-1]).request.body, "gpt-4.1", Flavor.OPENAI)
    rules.openai_chat(request, "openai")


def test_address_of_an_image_is_kept() -> None:
    url = "https://example.com/a.png"
    turns = messages({"role": "user", "content": [{"type": "input_image", "image_url": url}]})
    assert turns[0]["content"] == [{"type": "image_url", "image_url": {"url": url}}]


def test_leading_system_messages_are_joined_and_later_ones_stay() -> None:
    turns = messages(
        {"role": "developer", "content": "Use tabs."},
        {"role": "system", "content": [{"type": "input_text", "text": "No emoji."}]},
        {"role": "user", "content": "x"},
        {"role": "developer", "content": "Now spaces."},
        instructions="Be brief.",
    )
    assert turns == [
        {"role": "system", "content": "Be brief.\n\nUse tabs.\n\nNo emoji."},
        {"role": "user", "content": "x"},
        {"role": "developer", "content": "Now spaces."},
    ]
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    turns = messages({"role": "system", "content": "0"}, {"role": "developer", "content": parts}, instructions="I")
    assert turns == [{"role": "system", "content": "I\n\n0\n\na\n\nb"}]
    shown = [*parts, {"type": "input_image", "image_url": PNG}]
    turns = messages({"role": "system", "content": "0"}, {"role": "developer", "content": shown}, instructions="I")
    assert [message["role"] for message in turns] == ["system", "developer"]
    assert turns[0]["content"] == "I\n\n0"


# --- tools ------------------------------------------------------------------------------------------------------------
def test_functions_may_be_in_namespaces() -> None:
    mcp = {"type": "namespace", "name": "mcp__git", "description": "Git.", "tools": [{**ADD, "name": "log"}]}
    under = {"type": "namespace", "name": "web_", "tools": [{"type": "function", "name": "get"}]}
    found = parsed(tools=[ADD, mcp, under], parallel_tool_calls=False)
    body = json_of(found.request.body)
    assert body["tools"][0] == {"type": "function", "function": {k: v for k, v in ADD.items() if k != "type"}}
    assert [tool["function"]["name"] for tool in body["tools"]] == ["add", "mcp__git__log", "web_get"]
    assert (body["tool_choice"], body["parallel_tool_calls"]) == ("auto", False)
    assert found.names == {"add": ("add", ""), "mcp__git__log": ("log", "mcp__git"), "web_get": ("get", "web_")}
    assert found.request.needs == {"chat", "tools"}
    call = {"type": "function_call", "call_id": "c", "name": "log", "namespace": "mcp__git", "arguments": "{}"}
    assert messages(call)[0]["tool_calls"][0]["function"]["name"] == "mcp__git__log"


@pytest.mark.parametrize(
    ("choice", "inner", "shown"),
    [
        ("none", "none", ["add", "n__sub"]),
        ("required", "required", ["add", "n__sub"]),
        (
            {"type": "function", "name": "sub", "namespace": "n"},
            {"type": "function", "function": {"name": "n__sub"}},
            ["add", "n__sub"],
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]},
            "required",
            ["add"],
        ),
    ],
)
def test_tool_choice_is_translated(choice: Any, inner: Any, shown: list[str]) -> None:
    sub = {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "sub"}]}
    body = chat(tools=[ADD, sub], tool_choice=choice)
    assert body["tool_choice"] == inner
    assert [tool["function"]["name"] for tool in body["tools"]] == shown


# --- rejected fields --------------------------------------------------------------------------------------------------
HOSTED = ("web_search", "web_search_preview", "file_search", "code_interpreter", "computer", "mcp", "image_generation",
          "local_shell", "shell", "apply_patch", "tool_search")  # fmt: skip


@pytest.mark.parametrize("kind", HOSTED)
def test_hosted_tools_are_rejected_by_name(kind: str) -> None:
    error = refusal(tools=[ADD, {"type": kind}])
    assert (error.code, error.param) == (Code.UNSUPPORTED_PARAMETER, "tools[1].type")
    assert kind in error.message


def test_hosted_tools_are_left_out_if_configured() -> None:
    """The echo of the Response has no such tool either."""
    hosted = [{"type": kind} for kind in (*HOSTED, "custom")]
    raw = json.dumps({"model": "demo", "input": "Hi", "tools": [*hosted, ADD]}).encode()
    found = parse_responses(raw, nothing, nothing, omit_hosted_tools=True)
    assert [tool["function"]["name"] for tool in json_of(found.request.body)["tools"]] == ["add"]
    assert [tool["name"] for tool in found.echo["tools"]] == ["add"]
    none_left = parse_responses(
        b'{"model":"m","input":"x","tools":[{"type":"mcp"}]}', nothing, nothing, omit_hosted_tools=True
    )
    assert "tools" not in json_of(none_left.request.body)


@pytest.mark.parametrize(("tools", "param"), [("x", "tools"), ([5], "tools[0]"), ([{"name": "f"}], "tools[0].type")])
def test_invalid_tools_are_rejected_even_if_hosted_tools_are_left_out(tools: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_responses(
            json.dumps({"model": "demo", "input": "Hi", "tools": tools}).encode(),
            nothing,
            nothing,
            omit_hosted_tools=True,
        )
    assert caught.value.param == param


@pytest.mark.parametrize("kind", ["custom_tool_call", "compaction", "web_search_call", "local_shell_call", "mcp_call"])
def test_unsupported_items_are_rejected_by_name(kind: str) -> None:
    error = refusal(input=[{"role": "user", "content": "x"}, {"type": kind, "id": "x"}])
    assert (error.code, error.param) == (Code.UNSUPPORTED_PARAMETER, "input[1].type")
    assert kind in error.message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": None}, "model"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": ""}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"image": {}}, "image"),
        ({"access_programs": {}}, "access_programs"),
        ({"truncation": "some"}, "truncation"),
        ({"background": 1}, "background"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"xyzzy": 5}, "xyzzy"),
        ({"n": 2}, "n"),
        ({"stream_options": {}}, "stream_options"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {"": "x"}}, "metadata"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"include": ["everything"]}, "include[0]"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"tools": [{"type": "custom", "name": "patch"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]}, "tools[0].tools[0].type"),
        ({"tools": [ADD, ADD]}, "tools[1].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        (
            {
                "tools": [ADD],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            },
            "tool_choice.tools",
        ),
    ],
)
def test_error_names_its_field(body: dict[str, Any], param: str) -> None:
    error = refusal(**body)
    assert error.param == param
    assert f"`{param.split('.')[0].split('[')[0]}" in error.message or param == "tools[1].name"


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "input_image", "image_url": "http://example.com/a.png"}, "image_url"),
        ({"type": "input_image", "file_id": "file_1"}, "file_id"),
        ({"type": "input_image"}, "image_url"),
        ({"type": "input_file", "file_url": "https://example.com/a.pdf"}, "file_url"),
        ({"type": "input_file", "file_id": "file_1"}, "file_id"),
        ({"type": "input_file"}, "file_data"),
        ({"type": "input_file", "file_data": "JVBERi0="}, "file_data"),
    ],
)
def test_references_to_files_are_rejected(part: dict[str, Any], param: str) -> None:
    error = refusal(input=[{"role": "user", "content": [part]}])
    assert error.param == f"input[0].content[0].{param}"


def test_invalid_json_is_rejected() -> None:
    with pytest.raises(RequestError):
        parse_responses(b"{", nothing, nothing)


def typed(items: Iterable[dict[str, Any]]) -> list[InputItem]:
    return stored_items([{"type": "message", **item} for item in items])


# --- earlier responses ------------------------------------------------------------------------------------------------
def test_previous_response_is_continued_without_its_instructions() -> None:
    before = ({"role": "user", "content": "One"}, {"role": "assistant", "content": "1"})
    earlier = {"resp_1": Earlier(tuple(typed(before)), 500)}.get
    found = parsed(earlier, previous_response_id="resp_1", instructions="Be brief.", input="Two")
    assert json_of(found.request.body)["messages"] == [
        {"role": "system", "content": "Be brief."}, *before, {"role": "user", "content": "Two"},
    ]  # fmt: skip
    assert found.items == (*typed(before), MessageItem(role="user", content="Two"))
    assert found.request.size_bytes > 500
    assert found.echo["previous_response_id"] == "resp_1"


def test_unknown_previous_response_is_an_error_with_its_id() -> None:
    error = refusal(previous_response_id="resp_2")
    assert (error.code, error.param) == (Code.PREVIOUS_RESPONSE_NOT_FOUND, "previous_response_id")
    assert "resp_2" in error.message


def test_item_reference_is_replaced_by_the_stored_item() -> None:
    item = {"type": "message", "id": "msg_1", "role": "assistant", "content": [{"type": "output_text", "text": "1"}]}
    body = {"model": "demo", "input": [
        {"role": "user", "content": "One"}, {"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"},
        {"role": "user", "content": "Two"},
    ]}  # fmt: skip
    raw = json.dumps(body).encode()
    found = parse_responses(raw, nothing, {"msg_1": (*typed([item]), 500)}.get)
    assert json_of(found.request.body)["messages"] == [
        {"role": "user", "content": "One"}, {"role": "assistant", "content": "1"},
        {"role": "assistant", "content": "1"}, {"role": "user", "content": "Two"},
    ]  # fmt: skip
    assert [found.items[1], found.items[2]] == typed([item, item])
    assert found.request.size_bytes == len(raw) + 1000


@pytest.mark.parametrize("reference", [{"type": "item_reference", "id": "msg_2"}, {"id": "msg_2"}])
def test_unknown_item_is_an_error_with_advice(reference: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        parse_responses(json.dumps({"model": "demo", "input": [reference]}).encode(), nothing, nothing)
    assert (caught.value.status, caught.value.param) == (404, "input[0]")
    assert all(words in caught.value.message for words in ("msg_2", "Send the item itself", "store: false"))


# --- the list of input items ------------------------------------------------------------------------------------------
def test_input_items_are_listed_with_ids_types_and_parts() -> None:
    items = [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "1", "id": "msg_given", "status": "incomplete"},
        {"role": "user", "content": [{"type": "input_text", "text": "Two"}], "id": 5},
        {"type": "function_call_output", "call_id": "c", "output": "3"},
    ]
    assert listed(typed(items), "ab") == [
        {"id": "msg_abi00", "type": "message", "status": "completed", "role": "user",
         "content": [{"type": "input_text", "text": "One"}]},
        {"id": "msg_given", "type": "message", "status": "incomplete", "role": "assistant",
         "content": [{"type": "output_text", "text": "1", "annotations": []}]},
        {"id": "msg_abi02", "type": "message", "status": "completed", "role": "user",
         "content": [{"type": "input_text", "text": "Two"}]},
        {"id": "fco_abi03", "type": "function_call_output", "status": "completed", "call_id": "c", "output": "3"},
    ]  # fmt: skip
    assert messages_of(stored_items(listed(typed(items), "ab"))) == messages_of(typed(items))


def test_input_items_are_paginated() -> None:
    items = [{"id": f"i{number}"} for number in range(5)]

    def ids(**query: Any) -> tuple[list[str], bool]:
        found = page(items, **{"limit": 2, "after": None, "oldest_first": False, **query})
        kept = [item["id"] for item in found["data"]]
        assert (found["object"], found["first_id"]) == ("list", kept[0] if kept else None)
        assert found["last_id"] == (kept[-1] if kept else None)
        return kept, found["has_more"]

    assert ids() == (["i4", "i3"], True)
    assert ids(after="i3") == (["i2", "i1"], True)
    assert ids(after="i1") == (["i0"], False)
    assert ids(after="i0") == ([], False)
    assert ids(after="i1", oldest_first=True) == (["i2", "i3"], True)
    with pytest.raises(KeyError):
        ids(after="i9")


# --- completeness -----------------------------------------------------------------------------------------------------
def test_fields_of_the_official_client_are_accepted_or_rejected_with_a_reason() -> None:
    documented = {name for variant in ResponseCreateParams.__args__ for name in variant.__annotations__}
    assert documented <= {*FIELDS, *REFUSED}


def test_schema_is_closed_and_has_required_fields() -> None:
    described, parts = responses_schema()
    assert described["additionalProperties"] is False
    assert {"required": ["input"]} in described["anyOf"]
    json.dumps([described, parts])


def test_automatic_truncation_is_accepted() -> None:
    found = parsed(truncation="auto")
    assert "truncation" not in json_of(found.request.body)
    assert found.echo["truncation"] == "auto"


def test_parameters_of_llama_cpp_are_kept_and_minus_one_means_absent() -> None:
    body = chat(max_output_tokens=-1, seed=-1, mirostat=2, dry_multiplier=0.8, min_tokens=3, enable_thinking=False)
    assert "max_completion_tokens" not in body
    assert {name: body[name] for name in ("mirostat", "dry_multiplier", "min_tokens")} == {
        "mirostat": 2, "dry_multiplier": 0.8, "min_tokens": 3,
    }  # fmt: skip
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert parsed(max_output_tokens=-1).echo["max_output_tokens"] is None


@pytest.mark.parametrize(
    ("name", "own"),
    [("max_tokens", "max_output_tokens"), ("max_completion_tokens", "max_output_tokens"), ("n_probs", "top_logprobs")],
)
def test_parameter_of_chat_is_rejected_with_its_name_in_responses(name: str, own: str) -> None:
    error = refusal(**{name: 5})
    assert (error.param, error.code) == (name, Code.UNSUPPORTED_PARAMETER)
    assert f"calls it `{own}`" in error.message


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"input": "Hi"}, (None, [])),
        ({"previous_response_id": "resp_1"}, ("resp_1", [])),
        ({"input": [{"role": "user", "content": "Hi"}, {"type": "item_reference", "id": "msg_1"}]}, (None, ["msg_1"])),
    ],
)
def test_references_to_stored_responses_are_known_before_the_translation(
    body: dict[str, Any], expected: tuple[str | None, list[str]]
) -> None:
    assert references(decoded(json.dumps({"model": "demo", **body}).encode())) == expected
