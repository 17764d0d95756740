"""Translates refusals of llguidance into messages for clients."""

from __future__ import annotations

import re
from collections.abc import Callable

_MOST = 300
"""Limit in characters."""


def reason(message: str) -> str:
    """The reason for a refusal, from llguidance's message of several lines."""
    lines = message.split("\n")
    detail = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), "")
    if detail or "regex parse error" in lines[0]:
        return f"a regular expression cannot be read: {detail or 'it is malformed'}"[:_MOST]
    first = _REFERENCE.sub("what a $ref points at", lines[0].strip())
    for pattern, written in _TRANSLATIONS:
        if found := pattern.search(first):
            return written(found)[:_MOST]
    return (_EXPRESSION.sub("", first).strip() or "it is too complex")[:_MOST]


_REFERENCE = re.compile(r"json-schema:/[^\s'\"]*")
_EXPRESSION = re.compile(r":?\s*\((?:And|Or|Not|SearchRegex|Regex|Concat|Repeat|JsonQuote|Literal)\b.*")
"""A regular expression in llguidance's internal notation."""
_PLAIN = {"lexer error": "this cannot be read"}
_Translation = tuple[re.Pattern[str], Callable[[re.Match[str]], str]]
_TRANSLATIONS: tuple[_Translation, ...] = (
    (re.compile(r"^NoExtension"), lambda found: "nothing can satisfy it"),
    (
        re.compile(r"^oneOf constraints"),
        lambda found: (
            "a value could satisfy several options of oneOf; use anyOf, or a required property whose const differs"
        ),
    ),
    (
        re.compile(r"Regex is empty"),
        lambda found: "nothing can satisfy it: no text has all patterns, formats and lengths of one string",
    ),
    (
        re.compile(r"^Unable to determine if regex is empty"),
        lambda found: (
            "the patterns, formats and lengths of one string are too large together; use fewer or shorter ones"
        ),
    ),
    (re.compile(r"^Unsatisfiable schema: (.*)"), lambda found: f"nothing can satisfy it: {found[1]}"),
    (
        re.compile(r"^patternProperty regexes (.*) are not disjoint"),
        lambda found: f"a key can match two of patternProperties, {found[1]}; write them so that none does",
    ),
    (
        re.compile(r"^(?:at )?([0-9]+)\(([0-9]+)\): (.*)"),
        lambda found: f"in line {found[1]}, column {found[2]} of the grammar: {_PLAIN.get(found[3], found[3])}",
    ),
)
