"""Which JSON schemas OpenAI's strict mode takes, and what it is sent of those that it does not."""

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
from gateway.providers.openai.openai_models import most_tokens
from gateway.providers.openai.openai_schema import is_strict
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
    """What OpenAI gets of a request that came in Anthropic's dialect, checked as it would."""
    asked = {"model": "m", "max_tokens": 32_000, "messages": [{"role": "user", "content": "Hi"}], **more}
    body = parse_messages(orjson.dumps(asked)).body
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
def test_strict_schemas_are_known(schema: Any) -> None:
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
def test_schemas_that_strict_mode_refuses_are_known(schema: Any) -> None:
    assert not is_strict(schema)
    assert openai_problem(schema) is not None


def test_a_type_that_nobody_knows_is_not_strict() -> None:
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
            lambda said: {
                "type": "object",
                "properties": said[0],
                "required": list(said[1]),
                "additionalProperties": said[2],
            }
        )
    ),
    max_leaves=5,
)


@given(_ANY)
def test_strict_is_what_openai_takes(schema: dict[str, Any]) -> None:
    assert is_strict(schema) == (openai_problem(schema) is None)


@given(ODD_SCHEMAS)
def test_whatever_stands_in_a_schema_has_an_answer(schema: Any) -> None:
    """Nobody has checked it by then."""
    assert is_strict(schema) in (True, False)


@pytest.mark.parametrize(("schema", "strict"), [(CLOSED, True), (OPTIONAL, False)])
def test_a_format_of_anthropics_dialect_is_strict_where_openai_can(schema: dict[str, Any], strict: bool) -> None:
    """Anthropic takes properties that may be absent; OpenAI answered them with a 400, which was passed on."""
    format = {"type": "json_schema", "schema": schema}
    tools = [{"name": name, "input_schema": schema, "strict": asked} for name, asked in (("t", True), ("free", False))]
    request = sent(output_config={"format": format}, tools=tools)
    assert request["response_format"]["json_schema"] == {"name": "answer", "schema": schema, "strict": strict}
    assert [tool["function"].get("strict", False) for tool in request["tools"]] == [strict, False]
    inner = parse_messages(
        orjson.dumps(
            {
                "model": "m",
                "max_tokens": 5,
                "messages": [{"role": "user", "content": "Hi"}],
                "tools": tools,
                "output_config": {"format": format},
            }
        )
    ).body
    given = json_of(inner)
    assert given["response_format"]["json_schema"]["strict"] and given["tools"][0]["function"]["strict"]
    elsewhere = to_openai(Endpoint.CHAT, inner, "m", Flavor.COMPATIBLE)
    assert elsewhere["response_format"]["json_schema"]["strict"]


def test_strictness_in_openais_own_dialect_is_the_callers_affair() -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": OPTIONAL, "strict": True}}
    asked = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "response_format": shape}
    body = parse(Endpoint.CHAT, orjson.dumps({**asked, "max_completion_tokens": 99_000})).body
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
def test_the_longest_answers_are_known_by_names(model: str, most: int | None) -> None:
    assert most_tokens(model) == most


@pytest.mark.parametrize(
    ("model", "asked", "told"),
    [("gpt-4o", 32_000, 16_384), ("gpt-4o", 1, 1), ("gpt-5-mini", 32_000, 32_000), ("own", 32_000, 32_000)],
)
def test_max_tokens_that_had_to_be_named_is_what_the_model_takes(model: str, asked: int, told: int) -> None:
    """Agents name 32,000 and more whatever the model; gpt-4o answered that with a 400, which was passed on."""
    assert sent(model, max_tokens=asked)["max_completion_tokens"] == told
