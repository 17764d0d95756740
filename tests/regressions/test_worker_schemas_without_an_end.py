"""Schemas that nothing finite satisfies were accepted and failed late, or ran to the length limit."""

from __future__ import annotations

from typing import Any

import pytest

from inference.worker.constraints.schema import lower
from inference.worker.constraints.schema_limits import MAX_HOPS, SchemaError

LOOP = {"x": {"$ref": "#/$defs/x"}}


def objects(node: Any, **others: Any) -> dict[str, Any]:
    """An object that needs `n`."""
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
def test_what_needs_itself_is_refused(row: int, strict: bool) -> None:
    """With the reference that has no end and what to do about it."""
    with pytest.raises(SchemaError, match=r"no value that ends satisfies this \$ref.*optional.*\(at #"):
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
def test_what_can_end_is_kept(row: int) -> None:
    """Recursion itself is no fault."""
    assert "$ref" in str(lower(ENDING[row], strict=True))


def test_what_cannot_end_but_is_not_needed_is_left_out() -> None:
    """In every place where a schema may stand."""
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
    """References in place, one behind the other."""
    to = [{"$ref": f"#/$defs/d{n + 1}"} for n in range(links)]
    defs = {f"d{n}": {"allOf": [to[n]], **link} for n in range(links)}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{links}": {"type": "object"}}}


def test_chains_of_references_in_place_are_bounded() -> None:
    """Each was merged into the one before it: 4000 took seconds until their refusal."""
    lower(chain(MAX_HOPS), strict=True)
    with pytest.raises(SchemaError, match="lead from one to the next"):
        lower(chain(4000), strict=True)


def test_references_in_place_are_not_multiplied() -> None:
    """Two of each in the one before: 2^30 in the first."""
    double = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(30)}
    with pytest.raises(SchemaError, match="stand for one place"):
        lower({"$ref": "#/$defs/d0", "$defs": {**double, "d30": {"type": "object"}}}, strict=True)


def test_long_chains_through_values_are_seen_in_one_pass() -> None:
    """They are followed from their end."""
    links = {f"d{n}": objects({"$ref": f"#/$defs/d{n + 1}"}) for n in range(3000)}
    lowered = lower({"$ref": "#/$defs/d0", "$defs": {**links, "d3000": {"type": "null"}}}, strict=True)
    assert len(lowered["$defs"]) == 3001


def test_circles_that_are_too_entangled_are_refused() -> None:
    """Every pass learns of one more that has an end, and of the first in the last pass."""

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
    with pytest.raises(SchemaError, match="too entangled"):
        lower(circle(900), strict=True)
