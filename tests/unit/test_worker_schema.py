"""JSON schemas lowered to what masks enforce: references, drafts, equivalent keywords, patterns, rejections."""

from __future__ import annotations

import math
from typing import Any

import pytest

from inference.worker.constraints import patterns
from inference.worker.constraints.keywords import lower
from inference.worker.constraints.schema_limits import MAX_DEPTH, MAX_PATTERNS, MAX_PROPERTIES, Allowance, SchemaError

pytestmark = pytest.mark.unmeasured

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
DRAFT_2020 = "https://json-schema.org/draft/2020-12/schema"
DRAFT_4 = "http://json-schema.org/draft-04/schema#"
TAGGED = {
    "A": {"type": "object", "properties": {"kind": {"const": "a"}}, "required": ["kind"]},
    "B": {"type": "object", "properties": {"kind": {"enum": ["b", "c"]}}, "required": ["kind"]},
}

LOWERED: list[tuple[Any, Any]] = [
    (True, {}),
    ({"title": "t", "description": "d", "default": 1, "examples": [1], "x-any": {}, "deprecated": True}, {}),
    ({"type": ["string", "null"], "maxLength": 3.0}, {"type": ["string", "null"], "maxLength": 3}),
    ({"items": [{"type": "null"}], "additionalItems": False}, {"prefixItems": [{"type": "null"}], "items": False}),
    ({"items": {"type": "null"}, "additionalItems": False}, {"items": {"type": "null"}}),
    ({"prefixItems": [True], "items": False}, {"prefixItems": [True], "items": False}),
    ({"minimum": 3, "exclusiveMinimum": True}, {"minimum": 3.00000000000001}),
    ({"exclusiveMinimum": 0, "minimum": -1.0, "maximum": 5}, {"minimum": 1e-22, "maximum": 5}),
    ({"exclusiveMaximum": -100, "minimum": -0.5}, {"maximum": -100.000000000001, "minimum": -0.5}),
    ({"exclusiveMaximum": 100.0, "exclusiveMinimum": -5}, {"exclusiveMaximum": 100, "exclusiveMinimum": -5}),
    ({"exclusiveMinimum": 10**15}, {"minimum": 10**15 + 1}),
    ({"exclusiveMaximum": -(2**53)}, {"maximum": -(2**53) - 2}),
    ({"exclusiveMinimum": 0.5, "maximum": 0.30000000000000004}, {"exclusiveMinimum": 0.5, "maximum": 0.3}),
    ({"maximum": 1.9999999999999998, "minimum": 5e-324}, {"maximum": 1.99999999999999, "minimum": 1e-22}),
    ({"type": ["integer", "null"], "exclusiveMinimum": 3.0}, {"type": ["integer", "null"], "exclusiveMinimum": 3}),
    ({"maximum": 3, "exclusiveMaximum": False}, {"maximum": 3}),
    ({"if": {"type": "null"}, "uniqueItems": False, "minContains": 3}, {}),
    ({"maxItems": 1, "uniqueItems": True}, {"maxItems": 1}),
    ({"contains": {}, "minContains": 0}, {}),
    (
        {"unevaluatedProperties": False, "properties": {"a": True}},
        {"additionalProperties": False, "properties": {"a": True}},
    ),
    ({"unevaluatedProperties": False, "additionalProperties": True}, {"additionalProperties": True}),
    ({"unevaluatedItems": False, "prefixItems": [True]}, {"items": False, "prefixItems": [True]}),
    ({"unevaluatedItems": False, "items": True}, {"items": True}),
    ({"propertyNames": {"type": "string"}}, {}),
    ({"propertyNames": {"pattern": "^a"}}, {"patternProperties": {"^a": True}, "additionalProperties": False}),
    (
        {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "null"}},
        {"properties": {"a": {"type": "null"}, "b": {"type": "null"}}, "additionalProperties": False},
    ),
    (
        {"dependentRequired": {"a": ["b"]}},
        {"allOf": [{"anyOf": [{"properties": {"a": False}}, {"allOf": [{"required": ["a", "b"]}]}]}]},
    ),
    (
        {"dependencies": {"a": {"type": "null"}}, "allOf": [True]},
        {
            "allOf": [
                True,
                {"anyOf": [{"properties": {"a": False}}, {"allOf": [{"required": ["a"]}, {"type": "null"}]}]},
            ]
        },
    ),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, {"anyOf": [{"type": "integer"}, {"type": "string"}]}),
    (
        {"oneOf": [{"enum": ["a"]}, {"const": 1}, {"const": "b"}]},
        {"anyOf": [{"enum": ["a"]}, {"const": 1}, {"const": "b"}]},
    ),
    (
        {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], "$defs": TAGGED},
        {"anyOf": [{"$ref": "#/$defs/d0"}, {"$ref": "#/$defs/d1"}], "$defs": {"d1": TAGGED["B"], "d0": TAGGED["A"]}},
    ),
    ({"anyOf": [True], "oneOf": [{"type": "null"}]}, {"anyOf": [True], "allOf": [{"anyOf": [{"type": "null"}]}]}),
    ({"oneOf": [{"minimum": 1}, {"maximum": 2}]}, {"oneOf": [{"minimum": 1}, {"maximum": 2}]}),
    (
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "null"}}},
        {"$ref": "#/$defs/d0", "$defs": {"d0": {"type": "null"}}},
    ),
    (
        {
            "$id": "https://e.x/root",
            "$ref": "item#n",
            "$defs": {"i": {"$id": "item", "$defs": {"n": {"$anchor": "n"}}}},
        },
        {"$ref": "#/$defs/d0", "$defs": {"d0": {}}},
    ),
    (
        {"$schema": DRAFT_7, "$ref": "#/definitions/a", "type": "null", "definitions": {"a": True}},
        {"$ref": "#/$defs/d0", "$defs": {"d0": {}}},
    ),
    (
        {"$schema": DRAFT_4, "id": "https://e.x/", "$ref": "#/x/0", "x": [{"id": "y", "type": "null"}]},
        {"$ref": "#/$defs/d0", "$defs": {"d0": {"type": "null"}}},
    ),
    ({"items": {"$ref": "#"}}, {"items": {"$ref": "#/$defs/d0"}, "$defs": {"d0": {"items": {"$ref": "#/$defs/d0"}}}}),
    ({"required": ["a", "a"], "properties": {"$ref": True}}, {"required": ["a"], "properties": {"$ref": True}}),
    ({"multipleOf": 2.0, "allOf": [{"multipleOf": 0.05}]}, {"multipleOf": 2, "allOf": [{"multipleOf": 0.05}]}),
    ({"minProperties": 2, "required": ["a"]}, {"minProperties": 2, "required": ["a"]}),
]


@pytest.mark.parametrize(("schema", "lowered"), LOWERED, ids=range(len(LOWERED)))
def test_schema_is_lowered_to_the_same_meaning(schema: Any, lowered: Any) -> None:
    assert lower(schema, strict=True) == lowered
    if "oneOf" not in lowered:
        assert lower(schema, strict=False) == lowered


def test_date_becomes_a_pattern_and_other_formats_stay() -> None:
    (pattern,) = lower({"format": "date"}, strict=True)["allOf"]
    assert "-02-29" in pattern["pattern"]
    assert lower({"format": "uuid"}, strict=True) == {"format": "uuid"}


NARROWING: list[tuple[Any, str]] = [
    ({"uniqueItems": True}, "/uniqueItems"),
    ({"not": {"type": "null"}}, "/not"),
    ({"if": True, "then": False}, "/if"),
    ({"contains": {"type": "null"}}, "/contains"),
    ({"propertyNames": {"maxLength": 3}}, "/propertyNames"),
    ({"propertyNames": {"enum": ["a"]}, "properties": {"a": True}}, "/propertyNames"),
    ({"unevaluatedProperties": False, "allOf": [True]}, "/unevaluatedProperties"),
    ({"unevaluatedItems": False, "$ref": "#/$defs/a", "$defs": {"a": True}}, "/unevaluatedItems"),
    ({"properties": {"a": {"format": "regex"}}}, "/properties/a/format"),
    ({"pattern": "(?!a)"}, "/pattern"),
    ({"const": 2**53 + 1}, "/const"),
    ({"enum": [{"a": [2**60]}]}, "/enum"),
    ({"const": 1.9999999999999998}, "/const"),
    ({"const": 1e-30}, "/const"),
    ({"minimum": -(2**60)}, "/minimum"),
    ({"multipleOf": 123456789}, "/multipleOf"),
    ({"multipleOf": 1e-9}, "/multipleOf"),
    ({"maxItems": 10**7}, "/maxItems"),
    ({"minProperties": 2}, "/minProperties"),
]


@pytest.mark.parametrize(("schema", "place"), NARROWING, ids=range(len(NARROWING)))
def test_restriction_that_is_not_enforced_is_an_error_only_if_strict(schema: Any, place: str) -> None:
    with pytest.raises(SchemaError) as caught:
        lower(schema, strict=True)
    assert str(caught.value).endswith(f"(at {place})")
    lower(schema, strict=False)


REJECTED: list[tuple[Any, str]] = [
    (3, "must be an object, true or false"),
    (False, "which no value satisfies"),
    ({"type": "any"}, "'any' is not one of"),
    ({"type": []}, "not empty"),
    ({"type": [1]}, "is not one of"),
    ({"enum": []}, "not empty"),
    ({"anyOf": {}}, "must be a list"),
    ({"properties": []}, "must be an object"),
    ({"properties": {"a": 1}}, "(at /properties/a)"),
    ({"properties": {f"p{n}": True for n in range(MAX_PROPERTIES + 1)}}, "at most"),
    ({"patternProperties": {"(?=a)": True}}, "a pattern has a group"),
    ({"required": True}, "list of names"),
    ({"required": [1]}, "list of names"),
    ({"minLength": -1}, "whole number"),
    ({"minLength": True}, "whole number"),
    ({"minLength": math.inf}, "whole number"),
    ({"maxLength": math.nan}, "whole number"),
    ({"items": [True], "prefixItems": [{"type": "null"}]}, "use prefixItems"),
    ({"$schema": DRAFT_2020, "items": [True]}, "use prefixItems"),
    ({"patternProperties": {f"^{n}$": True for n in range(MAX_PATTERNS + 1)}}, "more than 64 patternProperties"),
    ({"minItems": 10**7}, "more than"),
    ({"minimum": "1"}, "must be a number"),
    ({"exclusiveMinimum": True}, "must be a number"),
    ({"multipleOf": 0}, "above 0"),
    ({"multipleOf": "2"}, "above 0"),
    ({"pattern": 1}, "must be a string"),
    ({"format": 1}, "must be a string"),
    ({"dependentRequired": {"a": {}}}, "list of names"),
    ({"dependentRequired": {"a": [1]}}, "list of names"),
    ({"$ref": 1}, "must be a string"),
    ({"$ref": "other.json"}, "points outside"),
    ({"$ref": "#/nowhere"}, "points to a location that does not exist"),
    ({"$ref": "#/a/5", "a": [1]}, "points to a location that does not exist"),
    ({"$ref": "#name"}, "names an anchor"),
    ({"$ref": "http://[x"}, "(at /$ref)"),
    ({"$dynamicRef": "#a"}, "use $ref"),
    ({"properties": {"a": {"$schema": DRAFT_7}}}, "another JSON schema version"),
]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("schema", "reason"), REJECTED, ids=range(len(REJECTED)))
def test_invalid_schema_is_always_rejected(schema: Any, reason: str, strict: bool) -> None:
    with pytest.raises(SchemaError) as caught:
        lower(schema, strict=strict)
    assert reason in str(caught.value)


def test_other_dialects_are_rejected_if_strict() -> None:
    with pytest.raises(SchemaError, match="schema versions"):
        lower({"$schema": "https://example.com/mine"}, strict=True)
    assert lower({"$schema": "https://example.com/mine"}, strict=False) == {}


def test_depth_and_size_are_limited() -> None:
    deep: Any = True
    for _ in range(MAX_DEPTH + 2):
        deep = {"items": deep}
    with pytest.raises(SchemaError, match="levels deep"):
        lower(deep, strict=True)
    with pytest.raises(SchemaError, match="too large"):
        lower({"anyOf": [{"type": "null"}] * 10_001}, strict=True)


def test_expensive_keywords_are_counted_over_all_schemas_of_a_form() -> None:
    """Many small schemas cost as much as a large one."""
    allowance = Allowance()
    half = {"patternProperties": {f"^{n}$": True for n in range(MAX_PATTERNS // 2)}}
    lower(half, strict=True, allowance=allowance)
    lower(half, strict=True, allowance=allowance)
    with pytest.raises(SchemaError, match="more than 64 patternProperties"):
        lower({"properties": {"a": half}}, strict=True, allowance=allowance)
    names = [f"p{n}" for n in range(1000)]
    options = [{"type": "object", "properties": {"t": {"const": f"{n}"}}, "required": [*names, "t"]} for n in range(30)]
    with pytest.raises(SchemaError, match="exclude each other"):
        lower({"oneOf": options}, strict=True)
    assert "anyOf" in lower({"oneOf": options}, strict=False)
    assert "anyOf" in lower({"oneOf": options[:10]}, strict=True)


PATTERNS = [
    ("a.c", r"a[^\n\r\u{2028}\u{2029}]c"),
    (r"^\d+\w\D$", r"^\d+\w\D$"),
    (r"\/\-\.", r"\/\-\."),
    (r"(?<year>\d)(?:a)(b)", r"(?:\d)(?:a)(b)"),
    (r"\u00e9\x41\u{1F600}\cJ\0", r"\u{00e9}\u{41}\u{1F600}\x0a\x00"),
    (r"\p{Letter}", r"\p{Letter}"),
    (r"[a-z\d_-]", r"[a-z\d_\-]"),
    (r"[-a&&b~[]", r"[\-a\&\&b\~\[]"),
    (r"[^\b]", r"[^\x08]"),
    ("[]|[^]", r"[^\x00-\u{10ffff}]|(?s:.)"),
    ("a\nb", r"a\x0ab"),
]


@pytest.mark.parametrize(("pattern", "translated"), PATTERNS)
def test_patterns_are_translated_from_ecma_262_to_rust(pattern: str, translated: str) -> None:
    assert patterns.of_ecma(pattern) == translated


@pytest.mark.parametrize(
    "pattern", ["a\\", "[a", "(?=a)", "(?<=a)", "(?<n", r"\1", r"\q", r"\b", "[a--b]", "(?i)a", "a" * 9000]
)
def test_patterns_without_a_counterpart_are_rejected(pattern: str) -> None:
    with pytest.raises(patterns.PatternError):
        patterns.of_ecma(pattern)


def test_white_space_is_that_of_ecma() -> None:
    """The byte order mark is white space, NEL is not."""
    blanks = patterns.of_ecma(r"\s")
    assert "feff" in blanks
    assert "85" not in blanks
    assert patterns.of_ecma(r"[\S]").startswith("[[^")


def test_anchors_of_a_pattern_for_a_whole_text_are_dropped() -> None:
    """Escaped ones stay."""
    assert patterns.of_whole_text("^a|b$") == "a|b"
    assert patterns.of_whole_text(r"a\$") == r"a\$"
    assert patterns.of_whole_text(r"a\\$") == r"a\\"
    with pytest.raises(patterns.PatternError, match="one line"):
        patterns.of_whole_text("(?x)a\nb")


NESTED = {"properties": {"x": True}}
CLOSED: list[tuple[Any, Any]] = [
    (
        {"allOf": [{"properties": {"a": NESTED, "b": NESTED}}, {"properties": {"a": {"properties": {"y": True}}}}]},
        {
            "allOf": [
                {"properties": {"a": NESTED, "b": {**NESTED, "additionalProperties": False}}},
                {"properties": {"a": {"properties": {"y": True}}}},
            ],
            "properties": {"a": True, "b": True},
            "additionalProperties": False,
        },
    ),
    (
        {"allOf": [{"items": NESTED}, {"items": {"required": ["y"]}}]},
        {"allOf": [{"items": NESTED}, {"items": {"required": ["y"]}}]},
    ),
    (
        {"allOf": [{"properties": {"a": True}}], "title": "one part"},
        {"allOf": [{"properties": {"a": True}, "additionalProperties": False}]},
    ),
    (
        {"properties": {"a": {"properties": {"b": True}}, "c": {"type": "object"}}},
        {
            "properties": {"a": {"properties": {"b": True}, "additionalProperties": False}, "c": {"type": "object"}},
            "additionalProperties": False,
        },
    ),
    ({"properties": {}}, {"properties": {}, "additionalProperties": False}),
    *[
        ({"properties": {"a": True}, **given}, {"properties": {"a": True}, **given})
        for given in ({"const": {"a": 1, "b": 2}}, {"enum": [{"a": 1, "b": 2}, None]})
    ],
    (
        {"properties": {"a": True}, "enum": [None]},
        {"properties": {"a": True}, "enum": [None], "additionalProperties": False},
    ),
    (
        {"properties": {"a": {"type": "null"}}, "required": ["a", "b"]},
        {"properties": {"a": {"type": "null"}, "b": True}, "required": ["a", "b"], "additionalProperties": False},
    ),
    (
        {"properties": {"a": True}, "patternProperties": {"^x": True}},
        {"properties": {"a": True}, "patternProperties": {"^x": True}, "additionalProperties": False},
    ),
    *[
        (
            {"properties": {"a": True}, "additionalProperties": stated},
            {"properties": {"a": True}, "additionalProperties": stated},
        )
        for stated in (True, False, {"type": "null"})
    ],
    (
        {"anyOf": [{"properties": {"a": True}}, {"type": "null"}], "title": "each option on its own"},
        {"anyOf": [{"properties": {"a": True}, "additionalProperties": False}, {"type": "null"}]},
    ),
    (
        {"properties": {"a": True}, "anyOf": [{"required": ["a"]}, {"properties": {"b": False}}]},
        {
            "properties": {"a": True, "b": True},
            "anyOf": [{"required": ["a"]}, {"properties": {"b": False}}],
            "additionalProperties": False,
        },
    ),
    (
        {"allOf": [{"properties": {"a": True}}, {"properties": {"b": {"type": "null"}}}]},
        {
            "allOf": [{"properties": {"a": True}}, {"properties": {"b": {"type": "null"}}}],
            "properties": {"b": True, "a": True},
            "additionalProperties": False,
        },
    ),
    (
        {"properties": {"a": True}, "allOf": [{"additionalProperties": {"type": "null"}}]},
        {"properties": {"a": True}, "allOf": [{"additionalProperties": {"type": "null"}}]},
    ),
    (
        {"properties": {"a": True}, "allOf": [{"patternProperties": {"^x": True}}]},
        {"properties": {"a": True}, "allOf": [{"patternProperties": {"^x": True}}]},
    ),
    (
        {"properties": {"a": True}, "dependentSchemas": {"a": {"properties": {"b": True}}}},
        {
            "properties": {"a": True, "b": True},
            "additionalProperties": False,
            "allOf": [
                {"anyOf": [{"properties": {"a": False}}, {"allOf": [{"required": ["a"]}, {"properties": {"b": True}}]}]}
            ],
        },
    ),
    (
        {"propertyNames": {"enum": ["a"]}, "allOf": [{"properties": {"b": True}}]},
        {"properties": {"a": True}, "allOf": [{"properties": {"b": True}}], "additionalProperties": False},
    ),
    (
        {
            "properties": {
                "own": {"$ref": "#/$defs/base"},
                "more": {"allOf": [{"$ref": "#/$defs/base"}], "required": ["y"]},
            },
            "$defs": {"base": {"properties": {"x": True}}},
        },
        {
            "properties": {
                "own": {"$ref": "#/$defs/d0"},
                "more": {
                    "allOf": [{"$ref": "#/$defs/d1"}],
                    "required": ["y"],
                    "properties": {"y": True, "x": True},
                    "additionalProperties": False,
                },
            },
            "additionalProperties": False,
            "$defs": {
                "d0": {"properties": {"x": True}, "additionalProperties": False},
                "d1": {"properties": {"x": True}},
            },
        },
    ),
]


@pytest.mark.parametrize(("schema", "lowered"), CLOSED, ids=lambda value: str(value)[:60])
def test_objects_that_declare_properties_are_closed(schema: Any, lowered: Any) -> None:
    """A definition in several parts is closed as a whole; given `additionalProperties` are kept."""
    assert lower(schema, strict=True, closed=True) == lowered


def test_number_of_references_for_one_object_is_limited() -> None:
    schema = {
        "properties": {f"p{n}": {"allOf": [{"$ref": "#/$defs/wide"}], "minProperties": 0} for n in range(999)},
        "$defs": {"wide": {"allOf": [{"properties": {"a": True}} for _ in range(300)]}},
    }
    with pytest.raises(SchemaError, match="too many references refer to one object"):
        lower(schema, strict=True, closed=True)
