"""Messages of llguidance are translated for clients."""

from __future__ import annotations

import pytest

from inference.worker.constraints.reasons import reason

MESSAGES = [
    ("NoExtensionBias\n<non-verbose/>", "nothing can satisfy it"),
    ("oneOf constraints are not supported. Enable 'coerce_one_of'", "a value could satisfy several options of oneOf"),
    (
        'at 3(5): invalid regex "(?:a()" (in regex): regex parse error:\n    (?:a()\n    ^\nerror: unclosed group',
        "a regular expression cannot be read: unclosed group",
    ),
    ("regex parse error:", "a regular expression cannot be read: it is malformed"),
    (
        "Unsatisfiable schema: Regex is empty:  (And (SearchRegex /^a$/))",
        "no text has all patterns, formats and lengths",
    ),
    ("Unable to determine if regex is empty: (And (SearchRegex", "too large together"),
    ("Unsatisfiable schema: minLength (4) is greater", "nothing can satisfy it: minLength (4) is greater"),
    (
        "patternProperty regexes /^a/ and /a$/ are not disjoint",
        "a key can match two of patternProperties, /^a/ and /a$/",
    ),
    ('at 1(8): unknown name: "x"', 'in line 1, column 8 of the grammar: unknown name: "x"'),
    ("1(10): lexer error", "in line 1, column 10 of the grammar: this cannot be read"),
    ("circular reference json-schema:///#/$defs/d0", "circular reference what a $ref points at"),
    ("something else: (And (Or a b))", "something else"),
    ("(And (Or a b))", "it is too complex"),
]


@pytest.mark.parametrize(("message", "written"), MESSAGES)
def test_message_has_no_internal_details(message: str, written: str) -> None:
    """No positions in generated grammars, no expressions, no internal addresses."""
    assert written in reason(message)
    assert all(inside not in reason(message) for inside in ("(?:", "(And", "json-schema:", "Unsatisfiable", "at 3("))
    assert len(reason(message * 50)) <= 300
