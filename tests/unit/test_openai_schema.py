"""JSON schemas and OpenAI's strict mode: detection, and requests of the Messages API; limits of answers by model."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.lib._pydantic import to_strict_json_schema
from pydantic import BaseModel, Field

from gateway.apis.messages.messages_request import parse as parse_messages
from gateway.apis.openai.frames import Endpoint, Flavor
from gateway.apis.openai.generation_request import parse
from gateway.providers.openai.openai_request import answer_limit, is_strict
from tests.rigs.fake_provider import rules
from tests.rigs.fake_provider.schemas import openai_problem
from tests.rigs.odd_schemas import ODD_SCHEMAS
from tests.rigs.typed_bodies import json_of, to_openai
from tests.rigs.typed_bodies import unsupported_by_openai as unsupported_params

CLOSED: dict[str, Any] = {
    "type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False,
}  # fmt: skip
OPTIONAL: dict[str, Any] = {**CLOSED, "properties": {**CLOSED["properties"], "b": {"type": "string"}}}


class Wheel(BaseModel):
    metres: float = Field(gt=0)
    spare: Wheel | None = None


def sent(to: str = "gpt-4o", **more: Any) -> dict[str, Any]:
    """The request to OpenAI for a Messages request, after the checks of OpenAI's API."""
    given = {"model": "m", "max_tokens": 32_000, "messages": [{"role": "user", "content": "Hi"}], **more}
    body = parse_messages(orjson.dumps(given)).body
    request = to_openai(Endpoint.CHAT, body, to, Flavor.OPENAI)
    assert not unsupported_params(body, Flavor.OPENAI, model=to)
    rules.openai_chat(request, "openai")
    return request


@pytest.mark.parametrize(
    "schema",
    [
        CLOSED,
        to_strict_json_schema(Wheel),
        {"type": "object", "additionalProperties": False},
        {
            **CLOSED,
            "properties": {"a": {"type": ["array", "null"], "items": {"$ref": "#/$defs/n"}, "maxItems": 3}},
            "$defs": {"n": {"type": "integer", "enum": [1, 2]}},
        },
        {**CLOSED, "properties": {"a": {"anyOf": [CLOSED, {"type": "string", "const": "x"}]}}},
    ],
)
def test_strict_schemas_are_detected(schema: Any) -> None:
    assert is_strict(schema)
    assert openai_problem(schema) is None


@pytest.mark.parametrize(
    "schema",
    [
        None,
        {},
        {"type": "array", "items": CLOSED},
        {**CLOSED, "anyOf": [CLOSED]},
        OPTIONAL,
        {**CLOSED, "additionalProperties": True},
        {**CLOSED, "properties": {"a": True}},
        {**CLOSED, "properties": {"a": {}}},
        {**CLOSED, "properties": {"a": {"type": "string", "maxLength": 3}}},
        {**CLOSED, "properties": {"a": {"type": "string", "format": "phone"}}},
        {**CLOSED, "properties": {"a": {"type": "array", "items": OPTIONAL}}},
        {**CLOSED, "properties": {"a": {"anyOf": [OPTIONAL]}}},
        {**CLOSED, "$defs": {"b": OPTIONAL}},
        {**CLOSED, "properties": {"a": {"enum": [1, 2]}}},
        {**CLOSED, "properties": {"a": {"anyOf": [CLOSED, {"const": "x"}]}}},
        {**CLOSED, "properties": {"a": {"$ref": "#/$defs/b", "description": "B."}}, "$defs": {"b": CLOSED}},
        {**CLOSED, "required": ["a", "b"]},
        {**CLOSED, "properties": "a"},
    ],
)
def test_schemas_that_strict_mode_rejects_are_detected(schema: Any) -> None:
    assert not is_strict(schema)
    assert openai_problem(schema) is not None


def test_unknown_type_is_not_strict() -> None:
    assert not is_strict({**CLOSED, "properties": {"a": {"type": "text"}}})


_ANY = st.recursive(
    st.sampled_from(
        [
            {"type": "string"},
            {"enum": [1]},
            {"type": "integer", "minimum": 1},
            {"$ref": "#"},
            {"$ref": "#", "title": "T"},
            {},
            {"not": {}},
        ]
    ),
    lambda inner: (
        inner.map(lambda one: {"type": "array", "items": one})
        | st.lists(inner, min_size=1, max_size=3).map(lambda all_: {"anyOf": all_})
        | st.tuples(st.dictionaries(st.sampled_from("ab"), inner), st.sampled_from(["", "a", "ab"]), st.booleans()).map(
            lambda parts: {
                "type": "object",
                "properties": parts[0],
                "required": list(parts[1]),
                "additionalProperties": parts[2],
            }
        )
    ),
    max_leaves=5,
)


@given(_ANY)
def test_strict_schemas_are_those_that_openai_accepts(schema: dict[str, Any]) -> None:
    assert is_strict(schema) == (openai_problem(schema) is None)


@given(ODD_SCHEMAS)
def test_arbitrary_schema_is_classified(schema: Any) -> None:
    assert is_strict(schema) in (True, False)


@pytest.mark.parametrize(("schema", "strict"), [(CLOSED, True), (OPTIONAL, False)])
def test_format_of_a_messages_request_is_strict_if_openai_accepts_it(schema: dict[str, Any], strict: bool) -> None:
    """OpenAI answers 400 to optional properties in strict mode."""
    format = {"type": "json_schema", "schema": schema}
    tools = [{"name": name, "input_schema": schema, "strict": wish} for name, wish in (("t", True), ("free", False))]
    request = sent(output_config={"format": format}, tools=tools)
    assert request["response_format"]["json_schema"] == {"name": "answer", "schema": schema, "strict": strict}
    assert [tool["function"].get("strict", False) for tool in request["tools"]] == [strict, False]
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
    inner = parse_messages(orjson.dumps({**body, "tools": tools, "output_config": {"format": format}})).body
    given = json_of(inner)
    assert given["response_format"]["json_schema"]["strict"] and given["tools"][0]["function"]["strict"]
    elsewhere = to_openai(Endpoint.CHAT, inner, "m", Flavor.COMPATIBLE)
    assert elsewhere["response_format"]["json_schema"]["strict"]


def test_strictness_of_an_openai_request_is_not_changed() -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": OPTIONAL, "strict": True}}
    given = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "response_format": shape}
    body = parse(Endpoint.CHAT, orjson.dumps({**given, "max_completion_tokens": 99_000})).body
    request = to_openai(Endpoint.CHAT, body, "gpt-4o", Flavor.OPENAI)
    assert (request["response_format"], request["max_completion_tokens"]) == (shape, 99_000)


@pytest.mark.parametrize(
    ("model", "most"),
    [
        ("gpt-3.5-turbo", 4_096), ("gpt-4", 8_192), ("gpt-4-turbo-2024-04-09", 4_096), ("gpt-4-0125-preview", 4_096),
        ("gpt-4o-2024-05-13", 4_096), ("gpt-4o", 16_384), ("openai/GPT-4o-mini", 16_384), ("gpt-5-chat-latest", 16_384),
        ("gpt-5.1-chat-latest", 16_384), ("ft:gpt-4.1-mini:us", 32_768), ("o1-mini", 65_536), ("o1", 100_000),
        ("o4-mini", 100_000), ("gpt-5.1", 128_000), ("gpt-6", None), ("my-deployment", None),
    ],
)  # fmt: skip
def test_limit_of_answers_follows_from_the_model_name(model: str, most: int | None) -> None:
    assert answer_limit(model) == most


@pytest.mark.parametrize(
    ("model", "given", "expected"),
    [("gpt-4o", 32_000, 16_384), ("gpt-4o", 1, 1), ("gpt-5-mini", 32_000, 32_000), ("own", 32_000, 32_000)],
)
def test_max_tokens_of_a_messages_request_is_limited_to_the_models_maximum(
    model: str, given: int, expected: int
) -> None:
    """Agents set 32,000 and more for each model; gpt-4o answers 400."""
    assert sent(model, max_tokens=given)["max_completion_tokens"] == expected
