"""Tools, formats and reasoning effort of a request."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from inference.protocol import Code
from inference.worker.api import generation_body
from inference.worker.dialects.answer_parts import Tool, ToolChoice
from inference.worker.dialects.forms import Grammar, Json, Literal, OneOf, Regex
from inference.worker.worker_errors import BadRequestError
from inference.worker.worker_requests import Facts, GenerateRequest

FACTS = Facts("tiny", 128, 300, 64, ("chat", "completions", "tools"))
HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}


def tool(name: str = "add", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


def chat(facts: Facts = FACTS, **fields: Any) -> GenerateRequest:
    return generation_body.chat({"messages": HELLO, **fields}, facts)


def test_tools_keep_all_their_fields() -> None:
    request = chat(tools=[tool(description="adds", parameters=SCHEMA, strict=True), tool("sub_2-b", parameters=None)])
    assert request.tools == (Tool("add", "adds", SCHEMA, True), Tool("sub_2-b"))
    assert request.choice == ToolChoice("auto")


@pytest.mark.parametrize(
    ("choice", "expected", "names"),
    [
        (None, ToolChoice("auto"), "ab"),
        ("auto", ToolChoice("auto"), "ab"),
        ("none", ToolChoice("none"), "ab"),
        ("required", ToolChoice("required"), "ab"),
        (named("b"), ToolChoice("named", "b"), "ab"),
        (allowed("auto", "b"), ToolChoice("auto"), "b"),
        (allowed("required", "b", "a"), ToolChoice("required"), "ab"),
    ],
    ids=str,
)
def test_tool_choice_is_decoded(choice: Any, expected: ToolChoice, names: str) -> None:
    request = chat(tools=[tool("a"), tool("b")], tool_choice=choice)
    assert request.choice == expected
    assert "".join(item.name for item in request.tools) == names


def test_parallel_calls_can_be_forbidden() -> None:
    assert chat(tools=[tool()], parallel_tool_calls=False).choice == ToolChoice("auto", None, False)


def test_tool_choice_without_tools_is_none() -> None:
    for fields in ({}, {"tools": []}, {"tools": None, "tool_choice": "auto"}, {"tool_choice": "none"}):
        assert chat(**fields).choice == ToolChoice("none")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": {}}, "tools"),
    ({"tools": ["add"]}, "tools[0]"),
    ({"tools": [{"type": "function"}]}, "tools[0]"),
    ({"tools": [{"function": {"name": "add"}}]}, "tools[0].type"),
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
    ({"tools": [tool("")]}, "tools[0].function.name"),
    ({"tools": [tool("a b")]}, "tools[0].function.name"),
    ({"tools": [tool("a" * 129)]}, "tools[0].function.name"),
    ({"tools": [tool("a\n")]}, "tools[0].function.name"),
    ({"tools": [tool(), tool()]}, "tools[1].function.name"),
    ({"tools": [tool(name) for name in map(str, range(129))]}, "tools"),
    ({"tools": [tool(description=5)]}, "tools[0].function.description"),
    ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
    ({"tools": [tool(parameters={"type": "string"})]}, "tools[0].function.parameters"),
    ({"tools": [tool(strict="yes")]}, "tools[0].function.strict"),
    ({"tools": [tool(parametres={})]}, "tools[0].function.parametres"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": named("add")}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": 5}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": named("sub")}, "tool_choice.function.name"),
    ({"tools": [tool()], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    ({"tools": [tool()], "tool_choice": allowed("none", "add")}, "tool_choice.allowed_tools.mode"),
    ({"tools": [tool()], "tool_choice": allowed("auto", "sub")}, "tool_choice.allowed_tools.tools[0].function.name"),
    ({"tools": [tool()], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"functions": [{"name": "add"}]}, "functions"),
    ({"function_call": {"name": "add"}}, "function_call"),
    ({"reasoning_effort": "immense"}, "reasoning_effort"),
    ({"reasoning_effort": 5}, "reasoning_effort"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}},
        "response_format.json_schema.strict",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "mood": 1}}},
        "response_format.json_schema.mood",
    ),
    ({"response_format": {"type": ["text"]}}, "response_format.type"),
    ({"response_format": {"type": "json_object", "schema": "x"}}, "response_format.schema"),
    ({"response_format": {"type": "json_object", "json_schema": {}}}, "response_format.json_schema"),
    ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}, "strict": True}},
        "response_format.strict",
    ),
    ({"json_schema": "x"}, "json_schema"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": "[]"}, "guided_json"),
    ({"regex": 5}, "regex"),
    ({"regex": ""}, "regex"),
    ({"regex": "a" * 70_000}, "regex"),
    ({"grammar": "a" * 300_000}, "grammar"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["a", ""]}, "guided_choice[1]"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs.json_object"),
    ({"regex": "a", "grammar": "b"}, "grammar"),
    ({"regex": "a", "response_format": {"type": "json_object"}}, "regex"),
    ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
    ({"tools": [tool()], "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=lambda value: str(value)[:60])
def test_invalid_tools_and_formats_are_a_400_with_the_param(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert len(caught.value.message) > 10


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"response_format": {"type": "json_object"}}, Json({"type": "object"}, closed=True)),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA, "json_schema": None}},
            Json(SCHEMA, closed=True),
        ),
        *[
            ({"response_format": {"type": "json_object", "schema": schema}}, Json({"type": "object"}, closed=True))
            for schema in ({}, True)
        ],
        (
            {"response_format": {"type": "json_object", "schema": {"required": ["a"]}}},
            Json({"type": "object", "required": ["a"]}, closed=True),
        ),
        *[
            ({"response_format": {"type": "json_object", "schema": schema}}, Json(schema, closed=True))
            for schema in (
                False,
                {"type": "array"},
                {"enum": [1, 2]},
                {"const": 1},
                {"$ref": "#/$defs/list", "$defs": {"list": {"type": "array"}}},
                {"anyOf": [{"type": "array"}, {"type": "null"}]},
            )
        ],
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            Json(SCHEMA, closed=True),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": False}}},
            Json(SCHEMA, strict=False, closed=True),
        ),
        ({"json_schema": SCHEMA}, Json(SCHEMA, closed=True)),
        ({"json_schema": True}, Json(True, closed=True)),
        ({"regex": "a+"}, Regex("a+")),
        ({"grammar": 'root ::= "a"'}, Grammar('root ::= "a"')),
        ({"guided_json": '{"type": "null"}'}, Json({"type": "null"}, closed=True)),
        ({"guided_regex": "a+"}, Regex("a+")),
        ({"guided_grammar": 'root ::= "a"'}, Grammar('root ::= "a"')),
        ({"guided_choice": ["a", "b"]}, OneOf((Literal("a"), Literal("b")))),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, Json(SCHEMA, closed=True)),
        ({"structured_outputs": {"json_object": True}}, Json({"type": "object"})),
    ],
    ids=str,
)
def test_format_is_decoded_into_a_form(fields: dict[str, Any], form: object) -> None:
    request = chat(**fields)
    assert (request.form, request.form_param) == (form, next(iter(fields)))


def test_format_text_requires_no_form() -> None:
    for fields in ({}, {"response_format": {"type": "text"}}, {"structured_outputs": {"json_object": False}}):
        assert (chat(**fields).form, chat(**fields).form_param) == (None, "")
    both = chat(response_format={"type": "text"}, regex="a")
    assert both.form == Regex("a")


def test_completions_accept_the_extensions() -> None:
    assert generation_body.completion({"prompt": "a", "regex": "b"}, FACTS).form == Regex("b")


def test_continued_message_cannot_have_a_required_form() -> None:
    begun = [*HELLO, {"role": "assistant", "content": "{"}]
    for fields in ({"regex": "a"}, {"tools": [tool()], "tool_choice": "required"}):
        with pytest.raises(BadRequestError) as caught:
            chat(**{"messages": begun, "continue_final_message": True, **fields})
        assert (caught.value.param, caught.value.code) == ("continue_final_message", Code.UNSUPPORTED_PARAMETER)
    assert chat(messages=begun, continue_final_message=True, tools=[tool()]).continue_final


def test_tools_for_a_model_without_them_are_an_unsupported_parameter() -> None:
    facts = Facts("tiny", 128, 300, 64, ("chat",))
    with pytest.raises(BadRequestError) as caught:
        chat(facts, tools=[tool()])
    assert (caught.value.param, caught.value.code) == ("tools", Code.UNSUPPORTED_PARAMETER)
    assert chat(facts, tools=[tool()], tool_choice="none").choice.mode == "none"


def test_superseded_fields_are_unsupported_parameters() -> None:
    """Another provider may support them."""
    with pytest.raises(BadRequestError, match="use tools") as caught:
        chat(functions=[{"name": "f"}])
    assert caught.value.code is Code.UNSUPPORTED_PARAMETER


def test_reasoning_effort_sets_the_variables_of_templates() -> None:
    """Levels and switches; arguments set by the client take precedence."""
    assert chat(reasoning_effort="low").template_arguments == {
        "reasoning_effort": "low", "enable_thinking": True, "thinking": True
    }  # fmt: skip
    assert chat(reasoning_effort="none").template_arguments == {"enable_thinking": False, "thinking": False}
    arguments = chat(reasoning_effort="low", chat_template_kwargs={"enable_thinking": False}).template_arguments
    assert arguments["enable_thinking"] is False
    assert chat().template_arguments == {}


@pytest.mark.parametrize(
    ("requested", "sent"),
    [("none", "low"), ("minimal", "low"), ("low", "low"), ("medium", "medium"), ("high", "high"), ("xhigh", "high"),
     ("max", "high")],
)  # fmt: skip
def test_gpt_oss_gets_the_nearest_known_level(requested: str, sent: str) -> None:
    """It always reasons, and knows only low, medium and high."""
    facts = dataclasses.replace(FACTS, family="harmony")
    assert chat(facts, reasoning_effort=requested).template_arguments["reasoning_effort"] == sent
    own = chat(facts, reasoning_effort=requested, chat_template_kwargs={"reasoning_effort": "xhigh"})
    assert own.template_arguments["reasoning_effort"] == "xhigh"


def test_function_call_in_the_history_becomes_a_tool_call() -> None:
    request = chat(
        messages=[
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "function", "name": "f", "content": "ok"},
        ]
    )
    assert request.messages[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert request.messages[1]["role"] == "tool"


def test_suffix_is_the_text_after_the_gap() -> None:
    assert generation_body.completion({"prompt": "a", "suffix": "b"}, FACTS).suffix == "b"
    assert generation_body.completion({"prompt": "a", "suffix": ""}, FACTS).suffix is None


def test_prompt_can_be_scored_without_an_answer() -> None:
    request = generation_body.completion({"prompt": "a", "echo": True, "logprobs": 1, "max_tokens": 0}, FACTS)
    assert (request.score_prompt, request.max_tokens) == (True, 0)
    assert not generation_body.completion({"prompt": "a", "echo": True}, FACTS).score_prompt
