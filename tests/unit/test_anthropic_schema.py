"""JSON schemas for Anthropic: translated keywords, keywords that move to the description, unsuitable schemas."""

from __future__ import annotations

import enum
from typing import Annotated, Any, Literal

import orjson
import pytest
from anthropic import transform_schema
from hypothesis import given
from hypothesis import strategies as st
from openai.lib._pydantic import to_strict_json_schema
from pydantic import BaseModel, Field

from gateway.apis.messages.messages_request import parse
from gateway.errors import UpstreamError
from gateway.providers.anthropic.anthropic_schema import to_anthropic_schema
from tests.rigs.fake_provider import rules
from tests.rigs.fake_provider.schemas import anthropic_problem
from tests.rigs.odd_schemas import ODD_SCHEMAS
from tests.rigs.typed_bodies import to_anthropic
from tests.rigs.typed_bodies import unsupported_by_anthropic as unsupported_params

MODEL = "claude-opus-5"


class Grain(enum.StrEnum):
    RYE = "rye"
    OATS = "oats"


class Wheel(BaseModel):
    kind: Literal["wheel"]
    metres: float = Field(gt=0, multiple_of=0.5)


class Stone(BaseModel):
    kind: Literal["stone"]
    age: int | None = Field(default=None, ge=0, le=400)


class Mill(BaseModel):
    name: str = Field(min_length=1, max_length=10, pattern="^[a-z]+$", description="What people call it.")
    grains: list[Grain] = Field(min_length=2, max_length=3)
    rivers: list[str] = Field(min_length=1)
    part: Annotated[Wheel | Stone, Field(discriminator="kind")]
    spare: Wheel = Field(description="In the shed.")


CLOSED: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def body_of(schema: Any) -> dict[str, Any]:
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    return {"messages": [{"role": "user", "content": "Hi"}], "response_format": shape}


def refusal(schema: Any) -> UpstreamError:
    with pytest.raises(UpstreamError) as caught:
        to_anthropic_schema(schema, "response_format")
    return caught.value


@pytest.mark.parametrize("schema", [to_strict_json_schema(Mill), Mill.model_json_schema()])
def test_schema_of_the_official_openai_client_is_translated(schema: dict[str, Any]) -> None:
    """Anthropic answers 400 to bounds such as maxLength; they move to the description."""
    assert not unsupported_params(body_of(schema), MODEL)
    sent = to_anthropic(body_of(schema), MODEL)
    rules.anthropic(sent, "2026-10-21")
    translated = sent["output_config"]["format"]["schema"]
    name = translated["properties"]["name"]
    assert name["description"] == 'What people call it.\n\n{maxLength: 10, minLength: 1, pattern: "^[a-z]+$"}'
    assert translated["properties"]["grains"]["description"] == "{maxItems: 3, minItems: 2}"
    assert translated["properties"]["rivers"]["minItems"] == 1
    assert "anyOf" in translated["properties"]["part"] and "oneOf" not in translated["properties"]["part"]
    assert "multipleOf: 0.5" in translated["$defs"]["Wheel"]["properties"]["metres"]["description"]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 1, "maximum": 10, "description": "A number"},
        {"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 0, "uniqueItems": True},
        {"type": "string", "format": "date"},
        {"enum": ["a", None], "type": ["string", "null"]},
        {"const": 3, "title": "Three"},
        {"oneOf": [{"type": "null"}, {"type": "boolean"}], "title": "T"},
        {"allOf": [{"type": "object", "properties": {}, "required": []}]},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"type": "null"}}},
        {"type": "object", "additionalProperties": False},
    ],
)
def test_result_equals_that_of_anthropics_client(schema: dict[str, Any]) -> None:
    got = to_anthropic_schema(schema, "x")
    assert {**got, "description": None} == {**transform_schema(schema), "description": None}
    assert anthropic_problem(got) is None and anthropic_problem(transform_schema(schema)) is None


def test_keywords_that_anthropics_client_drops_are_kept() -> None:
    schema: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "properties": {
            "at": {"$ref": "#/definitions/p", "description": "Where."},
            "all": {"items": {"type": ["string", "null"], "format": "phone"}, "minItems": 2},
            "listed": {"type": "array"},
            "odd": {"type": "object", "enum": [{"a": 1}], "const": {"a": 1}, "properties": {}},
        },
        "definitions": {"p": {"type": ["object", "null"], "properties": {"a": CLOSED}, "additionalProperties": True}},
    }
    before = str(schema)
    got = to_anthropic_schema(schema, "x")
    assert str(schema) == before
    assert anthropic_problem(got) is None
    assert got == {
        "definitions": {"p": {"type": ["object", "null"], "properties": {"a": CLOSED}, "additionalProperties": False}},
        "type": "object",
        "properties": {
            "at": {"anyOf": [{"$ref": "#/definitions/p"}], "description": "Where."},
            "all": {
                "type": "array",
                "items": {"type": ["string", "null"], "description": '{format: "phone"}'},
                "description": "{minItems: 2}",
            },
            "listed": {"type": "array"},
            "odd": {
                "type": "object",
                "properties": {},
                "additionalProperties": False,
                "description": '{enum: [{"a":1}], const: {"a":1}}',
            },
        },
        "additionalProperties": False,
    }


def test_type_beside_a_union_of_objects_is_left_out() -> None:
    variant = {"type": "object", "properties": {}, "additionalProperties": False}
    got = to_anthropic_schema({"type": "object", "anyOf": [variant]}, "x")
    assert got == {"anyOf": [variant]}


_OPEN = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [_OPEN, {**_OPEN, "title": "Another"}]},
        {"allOf": [_OPEN, {"$ref": "#/$defs/b"}], "$defs": {"b": _OPEN}},
        {"allOf": [{"anyOf": [{"type": "null"}, _OPEN]}, {"$ref": "#/$defs/b", "title": "B"}], "$defs": {"b": _OPEN}},
        *({**_OPEN, union: [_OPEN]} for union in ("anyOf", "oneOf", "allOf")),
    ],
)
def test_intersection_of_several_objects_is_unsuitable(schema: dict[str, Any]) -> None:
    """Anthropic requires closed objects; closed to different properties, they exclude each other."""
    assert "it cannot combine objects" in str(refusal(schema))
    assert tuple(unsupported_params(body_of(schema))) == ("response_format",)


@pytest.mark.parametrize("other", [{"type": "null"}, {"enum": ["a"]}])
def test_intersection_of_one_object_with_other_types_is_suitable(other: dict[str, Any]) -> None:
    assert to_anthropic_schema({"allOf": [_OPEN, other]}, "x") == {
        "allOf": [{**_OPEN, "additionalProperties": False}, other]
    }


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"description": "Anything."},
        {"type": "object"},
        {"type": "object", "additionalProperties": {"type": "integer"}},
        {"type": "object", "properties": {}, "additionalProperties": True},
        {"type": "object", "properties": {}, "patternProperties": {"^a": {"type": "null"}}},
        {"type": "object", "properties": {"any": {}}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}},
        {"$ref": "#/$defs/b", "$defs": {"a": {"type": "null"}}},
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
    ],
)
def test_schema_that_would_change_its_meaning_is_unsuitable(schema: Any) -> None:
    error = refusal(schema)
    assert (error.status, error.code, error.param) == (400, "unsupported_parameter", "response_format")
    if isinstance(schema, dict):
        assert anthropic_problem(schema) is not None
        assert tuple(unsupported_params(body_of(schema))) == ("response_format",)


def test_only_parameters_of_strict_tools_are_translated() -> None:
    parameters = {"type": "object", "properties": {"litres": {"type": "integer", "minimum": 1}}}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}
        for name, strict in (("a", True), ("b", False))
    ]
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools}
    strict, free = to_anthropic(body, MODEL)["tools"]
    rules.anthropic(to_anthropic(body, MODEL), "2026-10-21")
    assert strict["input_schema"]["properties"]["litres"] == {"type": "integer", "description": "{minimum: 1}"}
    assert strict["input_schema"]["additionalProperties"] is False
    assert free["input_schema"] == parameters


def with_tools(count: int, parameters: Any, strict: bool = True) -> dict[str, Any]:
    functions = [{"name": f"f{index}", "parameters": parameters, "strict": strict} for index in range(count)]
    tools = [{"type": "function", "function": function} for function in functions]
    return {"messages": [{"role": "user", "content": "Hi"}], "tools": tools}


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"any": {}}},
        {"type": "object", "additionalProperties": {"type": "string"}},
        {"type": "object", "properties": {}, "additionalProperties": True},
        {"type": "object", "patternProperties": {"^a": {"type": "null"}}},
        {"$ref": "#/$defs/a", "$defs": {"a": CLOSED}},
        *({"type": "object", union: [CLOSED]} for union in ("anyOf", "oneOf", "allOf")),
    ],
)
def test_parameters_that_a_strict_tool_cannot_have_are_unsuitable(parameters: Any) -> None:
    """Objects with arbitrary keys, and unions and references at the top."""
    assert tuple(unsupported_params(with_tools(1, parameters))) == ("tools",)
    assert not unsupported_params(with_tools(1, parameters, strict=False))


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object"}, {"additionalProperties": False}])
def test_strict_tool_without_parameters_has_an_empty_schema(parameters: Any) -> None:
    sent = to_anthropic(with_tools(20, parameters), MODEL)
    rules.anthropic(sent, "2026-10-21")
    assert sent["tools"][0]["input_schema"] == CLOSED


def test_more_than_twenty_strict_tools_are_unsuitable() -> None:
    assert tuple(unsupported_params(with_tools(21, CLOSED))) == ("tools",)
    assert not unsupported_params(with_tools(21, CLOSED, strict=False))
    with pytest.raises(UpstreamError, match="at most 20 tools with `strict`, not 21"):
        to_anthropic(with_tools(21, CLOSED), MODEL)


def test_schema_of_a_messages_request_is_not_checked() -> None:
    """It is sent to Anthropic unchanged."""
    format = {"type": "json_schema", "schema": {"type": "object", "properties": {"any": {}}}}
    given = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
    request = parse(orjson.dumps({**given, "output_config": {"format": format}}))
    assert not unsupported_params(request.body, MODEL)


_BOUNDS = st.fixed_dictionaries(
    {},
    optional={
        "minimum": st.integers(), "maxLength": st.integers(0), "pattern": st.text(), "uniqueItems": st.booleans(),
        "default": st.none() | st.integers(), "title": st.text(), "description": st.text(),
        "minItems": st.integers(0, 3), "format": st.sampled_from(["date", "phone"]), "not": st.just({}),
    },
)  # fmt: skip
_LEAF = st.sampled_from(["string", "integer", "number", "boolean", "null"]).map(lambda kind: {"type": kind})
_SCHEMAS: st.SearchStrategy[dict[str, Any]] = st.recursive(
    _LEAF | st.lists(st.text() | st.integers() | st.none(), min_size=1).map(lambda values: {"enum": values}),
    lambda inner: (
        inner.map(lambda one: {"type": "array", "items": one})
        | st.dictionaries(st.text(), inner, max_size=3).map(lambda named: {"type": "object", "properties": named})
        | st.tuples(st.sampled_from(["anyOf", "oneOf"]), st.lists(inner, min_size=1, max_size=3)).map(
            lambda pair: {pair[0]: pair[1]}
        )
        | st.tuples(inner, st.lists(_LEAF, max_size=2)).map(lambda pair: {"allOf": [pair[0], *pair[1]]})
    ),
    max_leaves=6,
)


@given(_SCHEMAS, _BOUNDS)
def test_translated_schema_is_valid_and_stable(schema: dict[str, Any], bounds: dict[str, Any]) -> None:
    got = to_anthropic_schema({**bounds, **schema}, "x")
    assert anthropic_problem(got) is None
    assert to_anthropic_schema(got, "x") == got


@given(ODD_SCHEMAS)
def test_arbitrary_schema_is_translated_or_rejected(schema: Any) -> None:
    try:
        to_anthropic_schema(schema, "x")
    except UpstreamError as error:
        assert error.param == "x"
