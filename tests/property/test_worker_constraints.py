"""Random walks through masks of any schema continue or end, and end in JSON that satisfies the schema."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inference.worker.constraints import Compiler
from inference.worker.dialects.forms import Json
from inference.worker.worker_errors import BadRequestError
from tests.rigs.vocabularies import PieceVocabulary

pytestmark = pytest.mark.unmeasured

VOCABULARY = PieceVocabulary()
COMPILER = Compiler(VOCABULARY)
KEYS = ("a", "ab", "é", 'q"')
WALK = 400
"""Tokens after which a walk closes values where possible."""

SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-30, 30), st.sampled_from(["", "ab", "é\n", 'x"y', "abc"]))
LEAVES = st.one_of(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])}
    ),
    st.fixed_dictionaries({"enum": st.lists(SCALARS, min_size=1, max_size=3)}),
    st.fixed_dictionaries({"type": st.just("integer"), "minimum": st.integers(-20, 5), "maximum": st.integers(5, 30)}),
    st.fixed_dictionaries({"type": st.just("string"), "minLength": st.integers(0, 3), "maxLength": st.integers(3, 6)}),
    st.fixed_dictionaries({"multipleOf": st.integers(1, 7)}),
)


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {
            "type": st.just("object"),
            "properties": st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
            "required": st.lists(st.sampled_from(KEYS), max_size=3, unique=True),
        },
        optional={"additionalProperties": st.one_of(st.just(False), inner)},
    )


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        _objects(inner),
        st.fixed_dictionaries(
            {"type": st.just("array"), "items": inner, "minItems": st.integers(0, 2), "maxItems": st.integers(2, 3)}
        ),
        st.fixed_dictionaries({"prefixItems": st.lists(inner, min_size=1, max_size=2), "items": st.booleans()}),
        st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=3)}),
        st.fixed_dictionaries({"allOf": st.lists(inner, min_size=1, max_size=2)}),
    ),
    max_leaves=6,
)


def satisfies(value: Any, schema: Any) -> bool:
    """A direct implementation of the keywords above."""
    if isinstance(schema, bool):
        return schema
    return all(_RULES[key](value, schema[key], schema) for key in schema if key in _RULES)


def _is(value: Any, kind: str) -> bool:
    if kind in ("integer", "number"):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return is_number and (kind == "number" or value == int(value))
    return isinstance(value, {"null": type(None), "boolean": bool, "string": str, "array": list, "object": dict}[kind])


def _same(one: Any, other: Any) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


_RULES: dict[str, Any] = {
    "type": lambda value, operand, _schema: _is(value, operand),
    "enum": lambda value, operand, _schema: any(_same(value, item) for item in operand),
    "minimum": lambda value, operand, _schema: not _is(value, "number") or value >= operand,
    "maximum": lambda value, operand, _schema: not _is(value, "number") or value <= operand,
    "multipleOf": lambda value, operand, _schema: not _is(value, "number") or value % operand == 0,
    "minLength": lambda value, operand, _schema: not isinstance(value, str) or len(value) >= operand,
    "maxLength": lambda value, operand, _schema: not isinstance(value, str) or len(value) <= operand,
    "minItems": lambda value, operand, _schema: not isinstance(value, list) or len(value) >= operand,
    "maxItems": lambda value, operand, _schema: not isinstance(value, list) or len(value) <= operand,
    "prefixItems": lambda value, operand, _schema: (
        not isinstance(value, list) or all(map(satisfies, value, operand[: len(value)]))
    ),
    "items": lambda value, operand, schema: (
        not isinstance(value, list)
        or all(satisfies(item, operand) for item in value[len(schema.get("prefixItems", ())) :])
    ),
    "properties": lambda value, operand, _schema: (
        not isinstance(value, dict) or all(satisfies(value[key], operand[key]) for key in operand if key in value)
    ),
    "additionalProperties": lambda value, operand, schema: (
        not isinstance(value, dict)
        or all(satisfies(item, operand) for key, item in value.items() if key not in schema.get("properties", {}))
    ),
    "required": lambda value, operand, _schema: not isinstance(value, dict) or all(key in value for key in operand),
    "anyOf": lambda value, operand, _schema: any(satisfies(value, option) for option in operand),
    "allOf": lambda value, operand, _schema: all(satisfies(value, option) for option in operand),
}


def _walk(form: Json, chance: random.Random) -> bytes:
    """A random text that the mask allows; the walk prefers tokens that end or close."""
    mask = COMPILER.compile(form, "f").start()
    operand = b""
    for step in range(10 * WALK):
        allowed = VOCABULARY.allowed(mask)
        assert allowed, "nothing may follow"
        ends, others = sorted(allowed & VOCABULARY.end_tokens), sorted(allowed - VOCABULARY.end_tokens)
        if ends and (not others or step > WALK or chance.random() < 0.5):
            mask.accept(ends[0])
            return operand
        closing = [token for token in others if VOCABULARY.piece(token) in (b"}", b"]", b'"', b'"}')]
        token = chance.choice(closing if closing and (step > WALK or chance.random() < 0.4) else others)
        mask.accept(token)
        operand += VOCABULARY.piece(token)
    raise AssertionError("the walk does not end")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_every_walk_ends_in_json_that_satisfies_the_schema(schema: Any, seed: int) -> None:
    """With strict; a schema that cannot be satisfied or enforced is refused before the first token."""
    try:
        COMPILER.compile(Json(schema), "f")
    except BadRequestError:
        return
    chance = random.Random(seed)
    for _ in range(3):
        operand = _walk(Json(schema), chance)
        assert satisfies(json.loads(operand), schema), operand


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), closed=st.booleans())
def test_json_forms_without_a_schema_give_json(seed: int, closed: bool) -> None:
    """With `json_object` the value is an object, else any JSON value."""
    operand = json.loads(_walk(Json({"type": "object"} if closed else True), random.Random(seed)))
    assert isinstance(operand, dict) or not closed


OBJECTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        _objects(inner),
        st.fixed_dictionaries({"anyOf": st.lists(_objects(inner), min_size=1, max_size=2)}),
        st.fixed_dictionaries({"allOf": st.lists(_objects(inner), min_size=1, max_size=2)}),
    ),
    max_leaves=5,
)


def _has_only_declared(value: Any, schema: Any) -> bool:
    """Whether every property of every object in `value` is declared, or allowed by `additionalProperties`."""
    if not isinstance(value, dict) or not isinstance(schema, dict):
        return True
    if "anyOf" in schema:
        return any(satisfies(value, one) and _has_only_declared(value, one) for one in schema["anyOf"])
    parts = [schema, *schema.get("allOf", ())]
    if not any("properties" in part for part in parts):
        return True
    declared = {name for part in parts for name in (*part.get("properties", ()), *part.get("required", ()))}
    if not any("additionalProperties" in part for part in parts) and not value.keys() <= declared:
        return False
    return all(
        _has_only_declared(value[name], inner)
        for part in parts
        for name, inner in part.get("properties", {}).items()
        if name in value and "anyOf" not in part
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schema=OBJECTS, seed=st.integers(0, 2**32))
def test_walks_through_closed_objects_have_only_declared_properties(schema: Any, seed: int) -> None:
    """The texts satisfy the schema as well."""
    form = Json(schema, closed=True)
    try:
        COMPILER.compile(form, "f")
    except BadRequestError:
        return
    chance = random.Random(seed)
    for _ in range(3):
        operand = json.loads(_walk(form, chance))
        assert satisfies(operand, schema), operand
        assert _has_only_declared(operand, schema), operand


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schema=OBJECTS, seed=st.integers(0, 2**32))
def test_closed_schema_is_accepted_if_a_value_has_only_declared_properties(schema: Any, seed: int) -> None:
    try:
        operand = json.loads(_walk(Json(schema), random.Random(seed)))
    except BadRequestError:
        return
    if _has_only_declared(operand, schema):
        COMPILER.compile(Json(schema, closed=True), "f")
