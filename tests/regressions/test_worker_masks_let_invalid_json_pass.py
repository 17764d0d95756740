"""Answers under strict were no instances of the schema: exclusive bounds, and keys in another spelling."""

from __future__ import annotations

from typing import Any

import pytest

from inference.worker.constraints import Compiler
from inference.worker.dialects.forms import Grammar, Json
from tests.rigs.vocabularies import PieceVocabulary

VOCABULARY = PieceVocabulary()
COMPILER = Compiler(VOCABULARY)
NUMBER: dict[str, Any] = {"type": "number"}
NAMED: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
ODD: dict[str, Any] = {"type": "object", "properties": {name: {"type": "integer"} for name in ('"q', "é", "\n", "\t")}}


def accepts(form: Json | Grammar, text: str) -> bool:
    """Whether the text is a whole answer."""
    mask = COMPILER.compile(form, "f").start()
    return VOCABULARY.follow(mask, text) and VOCABULARY.may_end(mask)


NUMBERS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, ["0.1", "0.0000001"], ["0", "0.0", "-0", "0.5"]),
    ({"exclusiveMinimum": 0, "maximum": 1e-20}, ["0.00000000000000000001"], ["0", "0.0"]),
    ({"exclusiveMinimum": -0.5, "exclusiveMaximum": 0}, ["-0.1", "-0.49"], ["-0", "-0.0", "0", "-0.5"]),
    ({"exclusiveMinimum": 1, "maximum": 1.5}, ["1.2", "1.5"], ["1", "1.0", "1.6"]),
    ({"minimum": 1.5, "exclusiveMaximum": 2}, ["1.5", "1.9", "1.9999"], ["2", "2.0"]),
    ({"allOf": [{"exclusiveMinimum": -2}, {"maximum": -1.5}]}, ["-1.5", "-1.99"], ["-2", "-2.0"]),
    ({"maximum": 1.9999999999999998}, ["1.9998"], ["2", "2.0"]),
    ({"exclusiveMaximum": 100}, ["99.9", "99"], ["100", "100.0"]),
    ({"exclusiveMaximum": 1e15}, ["999999999999999"], ["1000000000000000"]),
    ({"exclusiveMinimum": 0, "allOf": [{"type": "integer"}]}, ["1", "20"], ["0", "-1"]),
]


@pytest.mark.parametrize("row", range(len(NUMBERS)))
def test_an_exclusive_bound_is_excluded(row: int) -> None:
    """Also where both bounds have the same whole part, and where the bound is not read to its last digit."""
    bounds, said, unsaid = NUMBERS[row]
    form = Json({**NUMBER, **bounds})
    assert all(accepts(form, text) for text in said)
    assert not any(accepts(form, text) for text in unsaid)


KEYS: list[tuple[Any, list[str], list[str]]] = [
    (NAMED, ['{"a":1}', '{"a":1,"b":"x"}', '{"é":"\\n"}'], ['{"\\u0061":"x"}', '{"a":1,"\\u0061":"x"}']),
    ({"type": "object", "properties": {"a": False}}, ['{"b":1}'], ['{"a":1}', '{"\\u0061":1}']),
    ({"type": "object", "properties": {"a/b": {"type": "integer"}}}, ['{"a/b":1}'], ['{"a\\/b":"x"}']),
    (
        ODD,
        ['{"\\"q":1,"é":2,"\\n":3,"\\t":4}', '{"b":"x"}'],
        ['{"\\u0022q":"x"}', '{"\\u00e9":"x"}', '{"\\u000a":"x"}', '{"\\u000A":"x"}', '{"\\u0009":"x"}', '{"\\t":"x"}'],
    ),
    (
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        ['{"c":1}', '{"a":1,"b":1}'],
        ['{"a":1}', '{"\\u0061":1}'],
    ),
    (
        {"type": "object", "properties": {"\t": {"type": "integer"}}, "patternProperties": {"^\t": True}},
        ['{"\\t":1}', '{"\\tx":"y"}'],
        ['{"\\u0009":"x"}', '{"\\t":"x"}'],
    ),
    (
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}}},
        ['{"ab":1}', '{"b":"x"}'],
        ['{"ab":"x"}', '{"\\u0061":"x"}'],
    ),
    (
        {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False},
        ['{"a":"\\u001b"}'],
        ['{"\\u0061":"x"}'],
    ),
]


@pytest.mark.parametrize("row", range(len(KEYS)))
@pytest.mark.parametrize("strict", [True, False])
def test_a_named_key_has_one_spelling(row: int, strict: bool) -> None:
    """A reader undoes escapes: what is written as another key is the same one."""
    schema, said, unsaid = KEYS[row]
    assert all(accepts(Json(schema, strict), text) for text in said)
    assert not any(accepts(Json(schema, strict), text) for text in unsaid)


def test_schemas_in_grammars_have_the_same_keys() -> None:
    """They are lowered alike."""
    grammar = Grammar('start: %json {"type": "object", "properties": {"a": {"type": "integer"}}}')
    assert accepts(grammar, '{"b":"x"}')
    assert not accepts(grammar, '{"\\u0061":"x"}')


def test_there_is_no_year_0000() -> None:
    """Python's date begins with year 1."""
    date = Json({"type": "string", "format": "date"})
    assert all(accepts(date, f'"{said}"') for said in ("0001-01-01", "0400-02-29", "1000-12-31", "2000-02-29"))
    assert not any(accepts(date, f'"{said}"') for said in ("0000-01-01", "0000-02-29", "1900-02-29"))
