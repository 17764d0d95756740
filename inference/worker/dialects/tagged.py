"""Converts arguments between tags into a JSON object, and gives the form of such arguments.

Texts are written between their tags without quotes, other values as JSON. Texts are emitted as they arrive, other
values when they are complete, because a value that is not JSON is emitted as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

from inference.worker.dialects.answer_parts import Tool
from inference.worker.dialects.dialect import quoted
from inference.worker.dialects.forms import AnyText, Form, Json, OneOf, Repeat
from inference.worker.dialects.forms import Literal as Exactly
from inference.worker.dialects.reading import CallReader, Markers, NoCallError, Steps

Kind = Literal["text", "json", "either"]

KEY = re.compile(r"""[^<>"\n]+""")
_TYPES: Sequence[tuple[type, str]] = (
    (type(None), "null"), (bool, "boolean"), (int, "number"), (float, "number"), (list, "array"), (dict, "object"),
)  # fmt: skip
_CONSTANTS: Mapping[str, tuple[str, str]] = {
    "True": ("boolean", "true"),
    "False": ("boolean", "false"),
    "None": ("null", "null"),
}
"""Constants as Python prints them, which templates write into past calls and models imitate.
"""
_KEPT = ("$defs", "definitions")
"""Keywords with definitions for references."""
_MAX_REFERENCES = 8


def properties_of(tool: Tool | None) -> Mapping[str, Any]:
    """The schemas of a tool's parameters by name; a reference is replaced by its definition."""
    parameters = (tool.parameters or {}) if tool is not None else {}
    found = parameters.get("properties")
    return {key: _meant(schema, parameters) for key, schema in found.items()} if isinstance(found, Mapping) else {}


def _meant(schema: Any, root: Mapping[str, Any]) -> Any:
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        _, _, place = reference.partition("#/") if isinstance(reference, str) else ("", "", "")
        kind, _, name = place.partition("/")
        definitions = root.get(kind) if kind in _KEPT else None
        if not isinstance(definitions, Mapping) or name not in definitions:
            break
        schema = definitions[name]
    return schema


def types_of(schema: Any) -> frozenset[str]:
    """The JSON types that a schema names for its values, `number` for `integer` as well; empty where it names none."""
    if not isinstance(schema, Mapping):
        return frozenset()
    if isinstance(schema.get("enum"), list):
        return frozenset(_type_of(value) for value in schema["enum"])
    if "const" in schema:
        return frozenset({_type_of(schema["const"])})
    for key in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(key), list):
            found = [types_of(part) for part in parts]
            return frozenset().union(*found) if all(found) else frozenset()
    named = schema.get("type")
    names = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    return frozenset("number" if name == "integer" else str(name) for name in names)


def kind_of(schema: Any) -> Kind:
    """How a value of this schema is written between its tags; `either` if it depends on the value."""
    types = types_of(schema)
    if types == {"string"}:
        return "text"
    return "either" if not types or "string" in types else "json"


def arguments_form(tool: Tool, write: Callable[[str, Any], Form], anything: Form) -> tuple[Form, ...]:
    """The arguments of a call in the order of the tool's schema; `write` gives the form for a name and a schema.

    `anything` is an argument with any name, for tools that neither declare nor forbid properties.
    """
    parameters = tool.parameters
    if parameters is None:
        return ()
    required = parameters.get("required") or ()
    written = [(key, write(key, schema)) for key, schema in properties_of(tool).items()]
    if not written:
        allows_others = parameters.get("additionalProperties", "properties" not in parameters) is not False
        return (Repeat(anything, 0, None),) if allows_others else ()
    return tuple(form if key in required else Repeat(form, 0, 1) for key, form in written)


def text_form(schema: Any, without: str) -> Form:
    """The form of a text between its tags, without the string `without`, which is part of the closing tag. Only
    enumerated texts are enforced; lengths, patterns and formats are left to the model.
    """
    listed = schema.get("enum") if isinstance(schema, Mapping) else None
    if kind_of(schema) == "text" and isinstance(listed, list) and not any(without in text for text in listed):
        return OneOf(tuple(Exactly(text) for text in listed))
    return AnyText((without,))


def json_form(tool: Tool, schema: Any) -> Form:
    """The form of a value between its tags that is not a text."""
    if not isinstance(schema, Mapping):
        return Json(True, tool.strict)
    shared = {key: value for key, value in (tool.parameters or {}).items() if key in _KEPT}
    return Json({**shared, **schema}, tool.strict, closed=True)


def _type_of(value: Any) -> str:
    return next((name for kind, name in _TYPES if isinstance(value, kind)), "string")


class TaggedReader(CallReader):
    """A parser of calls with arguments between tags."""

    def object(self, name: str, arguments: Steps[None]) -> Steps[None]:
        """Begins a call and reads its arguments with `arguments`, which calls `value` for each. Other text ends the
        object; an argument that is cut by the end of the answer leaves it open.
        """
        self._begin(name, "")
        self.out.arguments("{")
        self._count = 0
        self._is_open = False
        try:
            yield from arguments
        except NoCallError:
            self.out.arguments("}")
            raise
        if not self._is_open:
            self.out.arguments("}")

    def value(self, key: str, end: Markers, kind: Kind, types: Collection[str] = ()) -> Steps[None]:
        """Reads a value and its end, and emits the argument. A cut value is emitted if it is a text.

        `types` are the known types of the value; a value that may be JSON or a text is JSON of these types only.
        """
        self.out.arguments(f"{', ' if self._count else ''}{quoted(key)}: ")
        self._count += 1
        if kind == "text":
            yield from self._text_value(end)
        else:
            yield from self._json_value(end, kind, types)
        self._read.clear()

    def _text_value(self, end: Markers) -> Steps[None]:
        self.out.arguments('"')
        while (match := end.search(self._text, self._at)) is None:
            self._escaped(len(self._text) if self._ended else end.unfinished(self._text, self._at))
            if self._ended:
                self._is_open = True
                return
            yield
        self._escaped(match.start())
        self._at = match.end()
        self.out.arguments('"')

    def _json_value(self, end: Markers, kind: Kind, types: Collection[str]) -> Steps[None]:
        pieces: list[str] = []
        while (match := end.search(self._text, self._at)) is None:
            if self._ended:
                self._is_open = True
                return
            stop = end.unfinished(self._text, self._at)
            pieces.append(self._text[self._at : stop])
            self._at = stop
            yield
        pieces.append(self._text[self._at : match.start()])
        self._at = match.end()
        self.out.arguments(_json(_as_meant("".join(pieces), types), types if kind == "either" else ()))

    def _escaped(self, stop: int) -> None:
        self.out.arguments(quoted(self._text[self._at : stop])[1:-1])
        self._at = stop


def _as_meant(text: str, types: Collection[str]) -> str:
    """`text`, or the JSON of a Python constant of one of the types."""
    kind, written = _CONSTANTS.get(text.strip(), ("", text))
    return written if kind in types else text


def _json(text: str, types: Collection[str]) -> str:
    """The value as JSON."""
    return text.strip() if _is_json(text, types) else quoted(text)


def _is_json(text: str, types: Collection[str]) -> bool:
    """Whether `text` is JSON of one of `types`, or of any type if there are none.

    If there are types, a quoted text does not count as JSON: it is a text with its quotes.
    """
    try:
        value = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return False
    kind = _type_of(value)
    return kind in types and kind != "string" if types else True


def _no_number(_text: str) -> None:
    raise ValueError
