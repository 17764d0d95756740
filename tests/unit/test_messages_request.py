"""Anthropic Messages bodies are translated into chat bodies; a rejection names the field. Listings of models."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.apis import image_policy
from gateway.apis.messages import messages_request
from gateway.apis.messages.messages_request import long_names, parse, to_chat
from gateway.apis.messages_body import IGNORED, CountedRequest, MessagesRequest, decode_messages
from gateway.apis.openai import generation_request
from gateway.apis.openai.frames import Endpoint
from gateway.endpoints.model_routes import anthropic_entry, anthropic_list
from gateway.errors import RequestError
from headgate.shared.bodies.body_decoder import json_schema
from tests.rigs.typed_bodies import chat as chat_body
from tests.rigs.typed_bodies import json_of

PNG = "iVBORw0KGgo="
TOOL = {"name": "look", "description": "Looks.", "input_schema": {"properties": {"at": {"type": "string"}}}}
HI = {"role": "user", "content": "Hi"}


def body(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": "demo", "max_tokens": 50, "messages": list(messages) or [HI], **more}


def use(id: str, name: str = "look", **input: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": name, "input": input}


def result(id: str, content: Any = "done", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, "content": content, **more}


def chat(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The translated body; it passes the checks of chat bodies."""
    request = parse(json.dumps(body(*messages, **more)).encode())
    generation_request.parse(Endpoint.CHAT, json.dumps(json_of(request.body)).encode())
    return json_of(request.body)


def refused(*messages: Any, **more: Any) -> str:
    """The field named by the error."""
    with pytest.raises(RequestError) as caught:
        parse(json.dumps(body(*messages, **more)).encode())
    assert caught.value.status == 400
    assert caught.value.param is not None
    return caught.value.param


def test_minimal_request_is_translated() -> None:
    assert chat() == {"model": "demo", "max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}]}


def test_parameters_are_renamed() -> None:
    sent = chat(
        stop_sequences=["END"], stream=True, temperature=0.5, top_p=0.9, top_k=20, metadata={"user_id": "u1"},
        service_tier="standard_only",
    )  # fmt: skip
    assert {name: value for name, value in sent.items() if name not in ("model", "messages", "max_tokens")} == {
        "stop": ["END"], "stream": True, "temperature": 0.5, "top_p": 0.9, "top_k": 20, "user": "u1",
        "service_tier": "default",
    }  # fmt: skip
    assert chat(service_tier="auto")["service_tier"] == "auto"
    assert "user" not in chat(metadata={"user_id": "u" * 65})
    assert "stop" not in chat(stop_sequences=[], metadata={})


def test_request_is_typed_and_keeps_its_origin() -> None:
    raw = json.dumps(body(tools=[TOOL], stream=True, cache_control={"type": "ephemeral"})).encode()
    request = parse(raw)
    assert (request.endpoint, request.model, request.stream, request.max_tokens) == (Endpoint.CHAT, "demo", True, 50)
    assert (request.size_bytes, request.is_plain, request.needs) == (len(raw), False, {"chat", "tools"})
    assert json_of(chat_body(request.body).origin) == json.loads(raw)


def test_max_tokens_of_an_agent_is_only_an_upper_bound() -> None:
    request = parse(json.dumps(body(max_tokens=32_000)).encode())
    assert (request.answer_limit(8192), request.answer_limit(64_000)) == (8192, 32_000)
    plain = generation_request.typed(Endpoint.CHAT, request.body, 1)
    assert plain.answer_limit(8192) == 32_000


def test_counting_needs_no_max_tokens() -> None:
    raw = json.dumps({"model": "demo", "messages": [HI]}).encode()
    assert parse(raw, counting=True).max_tokens is None
    with pytest.raises(RequestError, match="`max_tokens` is required"):
        parse(raw)


def test_system_blocks_are_joined_without_the_billing_header() -> None:
    blocks = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=1a2b3;"},
        {"type": "text", "text": "You mill.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        {"type": "text", "text": ""},
        {"type": "text", "text": "Be brief."},
    ]
    assert chat(system=blocks)["messages"][0] == {"role": "system", "content": "You mill.\n\nBe brief."}
    assert chat(system="You mill.")["messages"][0] == {"role": "system", "content": "You mill."}
    assert [message["role"] for message in chat(system="")["messages"]] == ["user"]


def test_adjacent_messages_of_one_role_are_joined() -> None:
    later = {"role": "system", "content": [{"type": "text", "text": "Now in verse."}]}
    sent = chat(HI, {"role": "user", "content": [{"type": "text", "text": "there"}]}, later, HI)["messages"]
    texts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]
    assert sent == [
        {"role": "user", "content": texts},
        {"role": "system", "content": "Now in verse."},
        {"role": "user", "content": "Hi"},
    ]


def test_images_and_documents_are_translated() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
    address = {"type": "image", "source": {"type": "url", "url": "https://a.example/b.png"}}
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}
    text = {
        "type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Water."}, "title": "Mills",
        "context": None, "citations": {"enabled": False},
    }  # fmt: skip
    content = [image, address, pdf, {**pdf, "title": "a.pdf"}, text]
    sent = chat({"role": "user", "content": content})["messages"][0]["content"]
    assert sent == [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
        {"type": "image_url", "image_url": {"url": "https://a.example/b.png"}},
        {"type": "file", "file": {"filename": "document.pdf", "file_data": "data:application/pdf;base64,JVBERi0="}},
        {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERi0="}},
        {"type": "text", "text": "Mills\nWater."},
    ]


def test_downloaded_image_does_not_change_the_origin() -> None:
    address = {"type": "image", "source": {"type": "url", "url": "https://a.example/b.png"}}
    given = parse(json.dumps(body({"role": "user", "content": [address]})).encode()).body
    remotes = image_policy.remote_images(given)
    found = image_policy.inlined(chat_body(given), {remotes[0]: f"data:image/png;base64,{PNG}"})
    assert json_of(found)["messages"][0]["content"][0]["image_url"]["url"].startswith("data:")
    assert found.origin == chat_body(given).origin is not None


def test_results_have_the_order_of_the_calls() -> None:
    sent = chat(
        HI,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Two of them.", "signature": "abc"},
                {"type": "redacted_thinking", "data": "hidden"},
                {"type": "text", "text": "I look."},
                use("a", at="x"),
                use("b", "hear"),
            ],
        },
        {"role": "user", "content": [result("b", "hum"), {"type": "text", "text": "Go on."}]},
        {"role": "user", "content": [result("a", [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}])]},
    )["messages"]
    assert sent[1:] == [
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Two of them.",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"at":"x"}'}},
                {"id": "b", "type": "function", "function": {"name": "hear", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "1\n2"},
        {"role": "tool", "tool_call_id": "b", "content": "hum"},
        {"role": "user", "content": "Go on."},
    ]


def test_failed_result_is_marked_and_its_images_move_to_the_user() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
    empty = {"type": "tool_result", "tool_use_id": "b"}
    sent = chat(
        HI,
        {"role": "assistant", "content": [use("a"), use("b"), use("c")]},
        {"role": "user", "content": [result("a", "no such file", is_error=True), empty, result("c", [image])]},
    )["messages"]
    assert sent[1]["content"] is None
    assert [message["content"] for message in sent[2:5]] == ["Error: no such file", "", ""]
    assert sent[5] == {
        "role": "user",
        "content": [
            {"type": "text", "text": "From the result of look:"},
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
        ],
    }


def test_last_assistant_turn_is_continued() -> None:
    sent = chat(HI, {"role": "assistant", "content": "The mill"})
    assert sent["continue_final_message"] is True
    assert sent["messages"][-1] == {"role": "assistant", "content": "The mill"}
    hidden = {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}
    assert chat(HI, hidden)["messages"][-1] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    ("choice", "inner"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "look"}, {"tool_choice": {"type": "function", "function": {"name": "look"}}}),
        ({"type": "auto", "disable_parallel_tool_use": True}, {"tool_choice": "auto", "parallel_tool_calls": False}),
        (None, {}),
    ],
    ids=["auto", "any", "none", "tool", "one-by-one", "nothing"],
)
def test_tool_choice_is_translated(choice: Any, inner: dict[str, Any]) -> None:
    sent = chat(tools=[TOOL], tool_choice=choice)
    assert {name: sent[name] for name in ("tool_choice", "parallel_tool_calls") if name in sent} == inner


def test_tools_are_translated() -> None:
    bare = {
        "type": "custom", "name": "go", "input_schema": {"type": "object"}, "strict": True, "defer_loading": False,
        "eager_input_streaming": None, "input_examples": [{}], "allowed_callers": ["direct"],
    }  # fmt: skip
    assert chat(tools=[TOOL, bare])["tools"] == [
        {
            "type": "function",
            "function": {
                "name": "look",
                "description": "Looks.",
                "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
            },
        },
        {"type": "function", "function": {"name": "go", "parameters": {"type": "object"}, "strict": True}},
    ]
    assert "tools" not in chat(tools=[], tool_choice={"type": "none"})


@pytest.mark.parametrize(
    ("given", "inner"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000}, True),
        ({"thinking": {"type": "adaptive", "display": None}}, True),
        ({"thinking": {"type": "between_tools"}}, True),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}, False),
    ],
    ids=["enabled", "adaptive", "between_tools", "disabled"],
)
def test_thinking_is_an_argument_of_the_chat_template(given: dict[str, Any], inner: bool) -> None:
    sent = chat(**given)
    assert sent["chat_template_kwargs"] == {"enable_thinking": inner, "thinking": inner}
    assert "reasoning_effort" not in sent


def test_effort_and_format_are_translated() -> None:
    shape = {"type": "json_schema", "schema": {"type": "object"}}
    sent = chat(output_config={"effort": "high", "format": shape, "task_budget": {}}, thinking={"type": "adaptive"})
    assert sent["reasoning_effort"] == "high"
    assert "chat_template_kwargs" not in sent
    inner = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True}}
    assert sent["response_format"] == chat(output_format=shape)["response_format"] == inner


def test_tools_of_anthropic_are_left_out_if_configured() -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    given = json.dumps(body(tools=[search, TOOL, "x"], tool_choice={"type": "auto"})).encode()
    with pytest.raises(RequestError, match=r"tools\[1\]"):
        parse(given, omit_hosted_tools=True)
    kept = parse(json.dumps(body(tools=[search, TOOL], tool_choice={"type": "auto"})).encode(), omit_hosted_tools=True)
    assert [tool["function"]["name"] for tool in json_of(kept.body)["tools"]] == ["look"]
    none = parse(json.dumps(body(tools=[search], tool_choice={"type": "auto"})).encode(), omit_hosted_tools=True)
    assert not {"tools", "tool_choice"} & set(json_of(none.body))
    assert json_of(parse(json.dumps(body()).encode(), omit_hosted_tools=True).body) == chat()


def test_fields_without_effect_are_accepted() -> None:
    assert chat(**{name: {"any": "thing"} for name in IGNORED}) == chat()
    assert all(IGNORED.values())


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"model": None}, "model"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"temprature": 1}, "temprature"),
        ({"n": 2}, "n"),
        ({"temperature": 1.5}, "temperature"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"container": "c1"}, "container"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"inference_geo": "eu"}, "inference_geo"),
        ({"compaction": {"type": "auto"}}, "compaction"),
        ({"metadata": {"user_id": 5}}, "metadata.user_id"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tools": [{**TOOL, "colour": 1}]}, "tools[0].colour"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [{**TOOL, "allowed_callers": ["code_execution_20260120"]}]}, "tools[0].allowed_callers"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "no"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
        (
            {
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
                "output_format": {"type": "json_schema", "schema": {}},
            },
            "output_format",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rejection_names_the_field(more: dict[str, Any], param: str) -> None:
    assert refused(**more) == param


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": "x", "name": "y"}], "messages[0].name"),
        ([{"role": "user", "content": [{"type": "text", "txt": "y"}]}], "messages[0].content[0].txt"),
        ([{"role": "user", "content": [{"type": "text", "text": "y", "colour": 1}]}], "messages[0].content[0].colour"),
        ([{"role": "user", "content": [{"type": "poem"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "search_result"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [use("a")]}], "messages[0].content[0].type"),
        ([HI, {"role": "assistant", "content": [{"type": "server_tool_use"}]}], "messages[1].content[0].type"),
        (
            [HI, {"role": "assistant", "content": [{"type": "web_search_tool_result"}]}],
            "messages[1].content[0].type",
        ),
        (
            [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}]}],
            "messages[0].content[0].source.url",
        ),
        (
            [{"role": "user", "content": [{"type": "document", "source": {"type": "file", "file_id": "f"}}]}],
            "messages[0].content[0].source.type",
        ),
        (
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "document", "source": {"type": "text", "data": "x"}, "citations": {"enabled": True}}
                    ],
                }
            ],
            "messages[0].content[0].citations.enabled",
        ),
        ([{"role": "user", "content": [result("a")]}], "messages[0].content[0].tool_use_id"),
        ([HI, {"role": "assistant", "content": [use("a")]}], "messages"),
        ([HI, {"role": "assistant", "content": [use("a")]}, HI], "messages"),
        ([HI, {"role": "assistant", "content": [use("a")]}, {"role": "system", "content": "x"}, HI], "messages"),
        ([HI, {"role": "assistant", "content": [use("a"), use("a")]}], "messages[1].content[1].id"),
        (
            [
                HI,
                {"role": "assistant", "content": [use("a")]},
                {"role": "user", "content": [result("a"), result("a")]},
            ],
            "messages[2].content[1].tool_use_id",
        ),
    ],
    ids=[
        "role", "no-content", "unknown-field", "no-text", "unknown-in-block", "unknown-type", "search-result",
        "call-of-the-user", "server-tool", "its-result", "image-address", "document-file", "citations",
        "result-of-nothing", "no-result-at-all", "no-result", "system-between", "one-id-twice", "two-results",
    ],
)  # fmt: skip
def test_rejection_names_the_message_and_the_block(messages: list[dict[str, Any]], param: str) -> None:
    assert refused(*messages) == param


def test_misspelled_field_is_rejected_with_a_suggestion() -> None:
    with pytest.raises(RequestError, match="did you mean `temperature`"):
        parse(json.dumps(body(temprature=1)).encode())


def test_schema_has_all_fields_and_the_required_ones() -> None:
    schema, parts = json_schema(MessagesRequest)
    assert sorted(schema["required"]) == ["max_tokens", "messages", "model"]
    assert sorted(json_schema(CountedRequest)[0]["required"]) == ["messages", "model"]
    assert schema["additionalProperties"] is False
    assert schema["properties"].keys() > IGNORED.keys()
    json.dumps([schema, parts])


def test_to_chat_does_not_change_the_body() -> None:
    given = body(HI, {"role": "assistant", "content": [use("a", at=1)]}, {"role": "user", "content": [result("a")]})
    decoded = decode_messages(given)
    assert to_chat(decoded).origin is decoded
    assert json_of(decoded) == given
    assert messages_request.ATTRIBUTION.endswith(":")


def test_shortened_tool_names_are_mapped_back() -> None:
    long = "look_" * 20
    (short,) = (tool["function"]["name"] for tool in chat(tools=[{**TOOL, "name": long}])["tools"])
    assert short != long
    assert long_names(decode_messages(body(tools=[TOOL, {**TOOL, "name": long}]))) == {short: long}
    assert long_names(decode_messages(body())) == {}


def test_listing_of_models_has_pages_and_context_lengths() -> None:
    demo = {"id": "demo", "object": "model", "headgate": {"context_length": 4096}}
    page = anthropic_list([demo, {"id": "cloud", "object": "model"}])
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("demo", "cloud", False)
    assert page["data"] == [anthropic_entry(demo), anthropic_entry({"id": "cloud"})]
    assert (anthropic_entry(demo)["max_tokens"], anthropic_entry({"id": "cloud"})["max_tokens"]) == (4096, None)
    assert anthropic_list([]) == {"data": [], "has_more": False, "first_id": None, "last_id": None}
