"""Which texts grammars, patterns and schemas accept, and which schemas are refused."""

from __future__ import annotations

from typing import Any

import pytest

from inference.worker.constraints import Compiler
from inference.worker.constraints.keywords import lower
from inference.worker.constraints.schema_limits import MAX_HOPS, SchemaError
from inference.worker.dialects.forms import Form, Grammar, Json, Regex
from inference.worker.worker_errors import BadRequestError, ConstraintError
from tests.rigs.vocabularies import PieceVocabulary

VOCABULARY = PieceVocabulary()
COMPILER = Compiler(VOCABULARY)
NUMBER: dict[str, Any] = {"type": "number"}
NAMED: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
ODD: dict[str, Any] = {"type": "object", "properties": {name: {"type": "integer"} for name in ('"q', "é", "\n", "\t")}}


def accepts(form: Form, text: str) -> bool:
    """Whether the text is a complete answer."""
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
def test_numbers_keep_within_their_bounds(row: int) -> None:
    bounds, accepted, rejected = NUMBERS[row]
    form = Json({**NUMBER, **bounds})
    assert all(accepts(form, text) for text in accepted)
    assert not any(accepts(form, text) for text in rejected)


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
def test_named_key_cannot_be_written_with_escapes(row: int, strict: bool) -> None:
    """An escaped spelling is the same key to a JSON parser, so it would bypass the schema of the key."""
    schema, accepted, rejected = KEYS[row]
    assert all(accepts(Json(schema, strict), text) for text in accepted)
    assert not any(accepts(Json(schema, strict), text) for text in rejected)


def test_schema_within_a_grammar_has_the_same_rule_for_keys() -> None:
    grammar = Grammar('start: %json {"type": "object", "properties": {"a": {"type": "integer"}}}')
    assert accepts(grammar, '{"b":"x"}')
    assert not accepts(grammar, '{"\\u0061":"x"}')


def test_dates_begin_with_year_1() -> None:
    date = Json({"type": "string", "format": "date"})
    assert all(accepts(date, f'"{day}"') for day in ("0001-01-01", "0400-02-29", "1000-12-31", "2000-02-29"))
    assert not any(accepts(date, f'"{day}"') for day in ("0000-01-01", "0000-02-29", "1900-02-29"))


READ: list[tuple[Form, list[str], list[str]]] = [
    (Regex("(?x)a b # c"), ["ab"], ["ab\n", "a b", "ab # c"]),
    (Regex("(?ix)a b"), ["aB"], ["a b"]),
    (Regex("(?i)a b"), ["A b"], ["ab", "a b\n"]),
    (Grammar('root ::= start\nstart ::= "a"'), ["a"], ["start"]),
    (Grammar('root ::= start start-rule # start\nstart ::= "a"\nstart-rule ::= "start" [start]'), ["astarts"], ["aa"]),
    (Grammar('root ::= (("a"{1,3}){1,3})'), ["a", "a" * 9], ["", "a" * 10]),
    (Grammar('root ::= (("ab"+)?)*'), ["", "abab"], ["a"]),
    (Grammar(r"root ::= [^\r\n\x0b\x0c\x85\u2028\u2029]+"), ["a", "\u3000"], ["\x85", "\u2028"]),
    (Grammar(r'root ::= "\u3000" | [\u3040-\u309F\U000E0001] root'), ["\u3000", "あ\U000e0001\u3000"], ["x"]),
    (Grammar("root ::= [a&&b]"), ["a", "&", "b"], ["x"]),
    (Grammar("root ::= [a~~b] [~-]"), ["a~", "~-"], ["x~"]),
    (Grammar("root ::= [+--/]"), ["+", ",", "-", "/"], ["."]),
    (Grammar("root ::= [^!--]"), ["a", "."], ["!", "-", "+"]),
    (Grammar("root ::= [a^-]"), ["a", "^", "-"], ["b"]),
    (Grammar(r"root ::= [\]\[-] [--a]"), ["]-", "[a", "-0"], ["b"]),
    (Grammar('\ufeffroot ::= "a"'), ["a"], ["\ufeffa"]),
    (Grammar('\ufeffstart: "a"'), ["a"], ["\ufeffa"]),
    (Grammar('start: "%json {" // %json {\n'), ["%json {"], ["{}"]),
    (Grammar('start: "a" # %json {'), ["a"], ["a{}"]),
    (Grammar('start: "@part0" /@x\\/y/ // @part0'), ["@part0@x/y"], ["@part0"]),
    (Grammar('start: %json {"type": "integer"} "@" // "\n'), ["3@"], ["3"]),
]


@pytest.mark.parametrize("row", range(len(READ)))
def test_valid_grammars_and_patterns_accept_exactly_their_texts(row: int) -> None:
    """Comments, names, byte order marks and text that only looks like a keyword."""
    form, accepted, rejected = READ[row]
    assert all(accepts(form, text) for text in accepted)
    assert not any(accepts(form, text) for text in rejected)


@pytest.mark.parametrize("name", ["part0", "part1", "other"])
def test_grammar_cannot_refer_to_internal_grammars(name: str) -> None:
    with pytest.raises(BadRequestError, match=f"names @{name}, but there is no other grammar"):
        COMPILER.compile(Grammar(f'start: "a" @{name}?'), "grammar")


def test_error_of_a_masked_token_names_other_parameters_as_the_cause() -> None:
    mask = COMPILER.compile(Grammar('start: "a" r\nr: "b" r'), "grammar").start()
    with pytest.raises(ConstraintError, match="other parameters exclude every token"):
        mask.accept(min(VOCABULARY.end_tokens))


LOOP = {"x": {"$ref": "#/$defs/x"}}


def objects(node: Any, **others: Any) -> dict[str, Any]:
    """An object with the required property `n`."""
    return {"type": "object", "properties": {"n": node}, "required": ["n"], **others}


ENDLESS: list[Any] = [
    objects({"$ref": "#/$defs/x"}, **{"$defs": LOOP}),
    objects({"$ref": "#"}),
    objects({"anyOf": [{"$ref": "#"}, {"$ref": "#/$defs/x"}]}, **{"$defs": LOOP}),
    objects({"allOf": [{"$ref": "#"}, {"type": "object"}]}),
    objects({"type": "array", "items": {"$ref": "#"}, "minItems": 1}),
    objects({"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}),
    objects({"$ref": "#/$defs/m"}, **{"$defs": {"m": objects({"$ref": "#"})}}),
    {"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/y"}, "y": {"$ref": "#/$defs/x"}}},
    {"$ref": "#/$defs/x", "$defs": {"x": False}},
]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("row", range(len(ENDLESS)))
def test_schema_that_requires_itself_is_refused(row: int, strict: bool) -> None:
    """The message names the endless reference and the remedy."""
    with pytest.raises(SchemaError, match=r"no finite value satisfies this \$ref.*optional.*\(at #"):
        lower(ENDLESS[row], strict=strict)


ENDING: list[Any] = [
    objects({"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
    {"type": "object", "properties": {"n": {"$ref": "#"}}},
    objects({"type": "array", "items": {"$ref": "#"}}),
    objects({"type": ["array", "null"], "items": {"$ref": "#"}, "minItems": 2}),
    {"properties": {"n": {"$ref": "#"}}, "required": ["n"]},
    objects({"$ref": "#/$defs/m"}, **{"$defs": {"m": {"oneOf": [objects({"$ref": "#"}), {"type": "string"}]}}}),
]


@pytest.mark.parametrize("row", range(len(ENDING)))
def test_recursive_schema_with_an_end_is_kept(row: int) -> None:
    assert "$ref" in str(lower(ENDING[row], strict=True))


def test_optional_parts_with_a_ref_to_itself_become_false() -> None:
    dead = {"$ref": "#/$defs/x"}
    parts = {
        "properties": {"a": dead},
        "patternProperties": {"^b": dead},
        "additionalProperties": dead,
        "prefixItems": [dead],
        "items": dead,
        "anyOf": [dead, True],
    }
    lowered = lower({**parts, "$defs": LOOP}, strict=True)
    assert lowered == {
        "properties": {"a": False},
        "patternProperties": {"^b": False},
        "additionalProperties": False,
        "prefixItems": [False],
        "items": False,
        "anyOf": [False, True],
    }
    kept = lower({"items": {"$ref": "#/$defs/y"}, "$defs": {**LOOP, "y": {"items": dead}}}, strict=True)
    assert kept == {"items": {"$ref": "#/$defs/d0"}, "$defs": {"d0": {"items": False}}}


def chain(links: int, **link: Any) -> dict[str, Any]:
    """References that lead from one to the next."""
    to = [{"$ref": f"#/$defs/d{n + 1}"} for n in range(links)]
    defs = {f"d{n}": {"allOf": [to[n]], **link} for n in range(links)}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{links}": {"type": "object"}}}


def test_chains_of_references_are_limited() -> None:
    lower(chain(MAX_HOPS), strict=True)
    with pytest.raises(SchemaError, match="a chain of more than"):
        lower(chain(4000), strict=True)


def test_references_that_double_at_each_level_are_refused() -> None:
    double = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(30)}
    with pytest.raises(SchemaError, match="references are merged into one schema"):
        lower({"$ref": "#/$defs/d0", "$defs": {**double, "d30": {"type": "object"}}}, strict=True)


def test_long_chains_through_properties_are_lowered_in_one_pass() -> None:
    links = {f"d{n}": objects({"$ref": f"#/$defs/d{n + 1}"}) for n in range(3000)}
    lowered = lower({"$ref": "#/$defs/d0", "$defs": {**links, "d3000": {"type": "null"}}}, strict=True)
    assert len(lowered["$defs"]) == 3001


def test_circular_references_that_need_too_many_passes_are_refused() -> None:

    def circle(links: int) -> dict[str, Any]:
        refs = [{"$ref": f"#/$defs/d{n}"} for n in range(links + 1)]
        defs = {
            f"d{n}": objects(refs[n + 1], properties={"n": refs[n + 1], "before": refs[n - 1]}) for n in range(1, links)
        }
        return {
            "items": refs[0],
            "$defs": {"d0": {"items": refs[links]}, **defs, f"d{links}": {"items": refs[links - 1]}},
        }

    assert len(lower(circle(60), strict=True)["$defs"]) == 61
    with pytest.raises(SchemaError, match="too complex"):
        lower(circle(900), strict=True)
