"""The required form of an answer, as a tree.

Dialects describe forced tool calls with it, requests describe constrained answers. `constraints` turns a form into
token masks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Literal:
    """Exactly this text."""

    text: str


@dataclass(frozen=True, slots=True)
class Marker:
    """The control token of this text; the text itself if the vocabulary has no such token."""

    text: str


@dataclass(frozen=True, slots=True)
class Json:
    """A JSON value that satisfies `schema` (True: any value; a plain object for json_object).

    `strict` rejects a schema with keywords that cannot be enforced; otherwise such keywords are left to the model.
    `closed`: objects that declare properties have no others, unless the schema states `additionalProperties`.
    """

    schema: Mapping[str, Any] | bool
    strict: bool = True
    closed: bool = False


@dataclass(frozen=True, slots=True)
class Regex:
    """A text that matches the whole pattern, in the syntax of Rust's regex crate without look-around."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar of the request: GBNF as in llama.cpp, or Lark as in llguidance."""

    source: str


@dataclass(frozen=True, slots=True)
class AnyText:
    """Any text, also an empty one, that contains neither a text of `without` nor a control token, and that does not
    begin (after white space) with a text of `unopened`.
    """

    without: tuple[str, ...] = ()
    unopened: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sequence:
    """One form after the other."""

    parts: tuple[Form, ...]


@dataclass(frozen=True, slots=True)
class OneOf:
    """Any one of the forms."""

    parts: tuple[Form, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`part` from `least` to `most` times (None: unlimited), separated by `between`."""

    part: Form
    least: int = 1
    most: int | None = None
    between: Form | None = None


Form = Literal | Marker | Json | Regex | Grammar | AnyText | Sequence | OneOf | Repeat
