"""Decodes the JSON body of a request into a typed object, and encodes typed objects as JSON values.

A body type is a `msgspec.Struct`. It declares the fields, their bounds and the texts of errors. Validation,
error messages with the parameter's path, and JSON Schema are derived from it. The gateway decodes the bodies of its
clients with this module, and the inference service and its workers decode the bodies that the gateway sends.
"""

from __future__ import annotations

import functools
import json
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
from msgspec import UNSET, Meta
from msgspec import inspect as types

from headgate.shared.errors import did_you_mean
from headgate.shared.parameters import BY_NAME, PARAMETERS, Parameter, json_kind

INVALID = "invalid_request"
UNSUPPORTED = "unsupported_parameter"

EXTRA = "$extra"
"""The encoded name of `Extensible.extra`."""

HOP_FIELDS = frozenset(("answer_so_far", "prompt_usage"))
"""Fields that the gateway sends to local models. They are not in the schemas for its clients: it refuses a client's
`answer_so_far` and ignores a client's `stream_options.prompt_usage`."""

_MISSING = re.compile(r"Object missing required field `([^`]*)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_AT = re.compile(r" - at `(key in )?\$(.*)`$", re.DOTALL)
_STEP = re.compile(r"\.([A-Za-z_$][\w$]*)|\[(\d+)\]")


class Extensible(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An object that may have unknown fields. `keep_extra` puts them into `extra`, and `as_json` out again."""

    extra: dict[str, Any] | None = msgspec.field(default=None, name=EXTRA)


class Body(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A request body: unknown fields are rejected, and null counts as absent.

    `has_extra`: an object inside has an `extra` mapping.
    """

    has_extra: bool = msgspec.field(default=False, name="$has_extra")


Text = Annotated[str, msgspec.Meta(min_length=1)]
Object = dict[str, Any]

B = TypeVar("B", bound=Body)
S = TypeVar("S", bound=msgspec.Struct)


def expected(text: str) -> dict[str, Any]:
    """Metadata of a type: its name in the error message for a value of another JSON type."""
    return {"expected": text}


def must(text: str) -> dict[str, Any]:
    """Metadata of a type: the error message for a value of another shape, after the parameter's name."""
    return {"must": text}


class InvalidBodyError(Exception):
    """A body is refused because of the parameter `param`. `code` is the error code for the client."""

    def __init__(self, message: str, param: str, code: str) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


def not_finite(raw: bytes) -> str | None:
    """The first top-level field of the JSON object `raw` whose value is NaN or infinite; None if there is none.

    Python writes such values, but JSON does not allow them.
    """
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    fields = body.items() if isinstance(body, dict) else ()
    return next((name for name, value in fields if isinstance(value, float) and not math.isfinite(value)), None)


def refuse(param: str, message: str, code: str = INVALID) -> NoReturn:
    """Raises the InvalidBodyError for `param`."""
    raise InvalidBodyError(message, param, code)


def refused_types(why: Callable[[str], str | None]) -> dict[str, Any]:
    """Metadata of a union of tagged types. `why` returns why a type is refused; None for an unknown type."""
    return {"refused": why}


def decode(given: Mapping[str, Any], type_: type[B], path: str) -> B:
    """`given` as a `type_`. Raises InvalidBodyError.

    `path` is the endpoint, for the message about an unknown field. It is empty on the local hop, where `HOP_FIELDS` are
    accepted. Fields whose JSON names begin with `$` are internal and are refused.
    """
    if not _internal_fields(type_, bool(path)).isdisjoint(given):
        refuse_unknown(next(name for name in given if name in _internal_fields(type_, bool(path))), type_, "", path)
    prepare(type_)
    try:
        body = msgspec.convert(given, type_)
    except msgspec.ValidationError as error:
        _explain(str(error), given, type_, path)
    return body


_preparing = threading.Lock()


@functools.cache
def prepare(type_: Any) -> None:
    """Makes msgspec inspect `type_` before the first conversion, in one thread at a time.

    msgspec (0.22) does that at the first conversion, without a lock: two threads at once end the process by SIGSEGV.
    """
    with _preparing:
        msgspec.json.Decoder(type_)


@functools.cache
def _internal_fields(type_: type[Body], is_public: bool) -> frozenset[str]:
    names = type_.__struct_encode_fields__
    return frozenset(name for name in names if name.startswith("$") or (is_public and name in HOP_FIELDS))


def keep_extra(found: msgspec.Struct, given: Mapping[str, Any]) -> bool:
    """Fills `extra` of `found` and of all objects in it from `given`; returns whether a field was added."""
    names, is_extensible = _layout(type(found))
    is_kept = False
    if is_extensible and not names.issuperset(given):
        found.extra = {name: value for name, value in given.items() if name not in names}  # type: ignore[attr-defined]
        is_kept = True
    for name, value in given.items():
        kind = type(value)
        if kind is dict:
            if isinstance(inner := getattr(found, name, None), msgspec.Struct) and keep_extra(inner, value):
                is_kept = True
        elif kind is list and type(inner := getattr(found, name, None)) is list:
            for one, item in zip(inner, value, strict=True):
                if isinstance(one, msgspec.Struct) and keep_extra(one, item):
                    is_kept = True
    return is_kept


@functools.cache
def _layout(type_: type[msgspec.Struct]) -> tuple[frozenset[str], bool]:
    """The names of the fields in JSON, and whether the type has `extra`."""
    names = {*type_.__struct_encode_fields__} - {EXTRA}
    if type_.__struct_config__.tag is not None:
        names.add(str(type_.__struct_config__.tag_field))
    return frozenset(names), issubclass(type_, Extensible)


def as_json(body: msgspec.Struct) -> dict[str, Any]:
    """A body, or an object from inside a body, as a new JSON object; absent and internal fields are left out.

    `origin` and `$from_messages` are internal fields of `ChatRequest` (`gateway.apis.openai.generation_request`).
    """
    if getattr(body, "origin", None) is not None:
        body = msgspec.structs.replace(body, origin=None)
    found: dict[str, Any] = msgspec.to_builtins(body)
    found.pop("$from_messages", None)
    if found.pop("$has_extra", not isinstance(body, Body)):
        _merge(found)
    return found


def _merge(value: Any) -> None:
    """Puts the fields of every `extra` beside the known ones."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if type(value) is dict:
            if EXTRA in value:
                value |= {name: more for name, more in value.pop(EXTRA).items() if name not in value}
            waiting += value.values()
        elif type(value) is list:
            waiting += value


# --- errors -----------------------------------------------------------------------------------------------------------
def refuse_unknown(name: str, type_: type[msgspec.Struct], prefix: str, path: str) -> NoReturn:
    """Raises the InvalidBodyError for a field that `type_` does not have."""
    known = [one for one in _layout(type_)[0] if one[0] != "$" and not (path and one in HOP_FIELDS)]
    param = f"{prefix}{name[:64]}"
    if not path:
        refuse(param, f"unknown field {name[:64]!r}" + did_you_mean(name, known, shown=str))
    advice = did_you_mean(name, known, "leave it out", shown=lambda near: f"`{prefix}{near}`")
    refuse(param, f"`{param}` is not a parameter of {path}{advice}", UNSUPPORTED)


def _explain(message: str, given: Mapping[str, Any], type_: type[msgspec.Struct], path: str) -> NoReturn:
    """Raises the InvalidBodyError for a ValidationError with this message."""
    at = _AT.search(message)
    message = message if at is None else message[: at.start()]
    value: Any = given
    node: types.Type = _type_info(type_)
    param = ""
    for step in _STEP.finditer(at[2]) if at is not None else ():
        name, index = step[1], step[2]
        if name is not None:
            _check_refused(node, value, name, param)
            node = _tags_of(node, name) or _field_of(_fitting(node, value), name)
            value = value.get(name)
            param = f"{param}.{name}" if param else name
        else:
            node = _items_of(_fitting(node, value))
            value = value[int(index)]
            param = f"{param}[{index}]"
    if missing := _MISSING.match(message):
        _refuse_missing(param, missing[1])
    if unknown := _UNKNOWN.match(message):
        struct = _fitting(node, value)
        assert isinstance(struct, types.StructType), "only objects have unknown fields"
        refuse_unknown(unknown[1], struct.cls, f"{param}." if param else "", path)
    if value is None and not param.endswith("]"):
        owner, _, name = param.rpartition(".")
        _refuse_missing(owner, name)
    refuse(param, f"`{param}` {_problem(node, value)}")


def _check_refused(node: types.Type, value: Any, name: str, owner: str) -> None:
    """Raises the InvalidBodyError for an object whose type is refused with a reason."""
    why: Callable[[str], str | None] | None = _metadata(node).get("refused")
    if why is None or _tags_of(node, name) is None or not isinstance(kind := value.get(name), str):
        return
    if (reason := why(kind)) is not None:
        message = f"`{owner}` of type {kind[:60]} is not accepted: {reason}"
        refuse(f"{owner}.{name}", message, UNSUPPORTED)


def _refuse_missing(owner: str, name: str) -> NoReturn:
    if owner:
        refuse(f"{owner}.{name}", f"`{owner}` needs `{name}`")
    refuse(name, f"`{name}` is required but missing")


@functools.cache
def _type_info(type_: type[msgspec.Struct]) -> types.Type:
    return types.type_info(type_)


def _variants(node: types.Type) -> Iterator[types.Type]:
    """The types that a value may have, without metadata and null."""
    if isinstance(node, types.Metadata):
        yield from _variants(node.type)
    elif isinstance(node, types.UnionType):
        for one in node.types:
            yield from _variants(one)
    elif not isinstance(node, types.NoneType):
        yield node


def _fitting(node: types.Type, value: Any) -> types.Type:
    """The variant of `node` that fits the JSON type of `value`, and its tag if the variants have tags."""
    fitting = [one for one in _variants(node) if _takes(one, value)]
    for one in fitting:
        if isinstance(one, types.StructType) and one.tag_field is not None and one.tag == value.get(one.tag_field):
            return one
    return fitting[0]


_JSON_TYPES: Mapping[type[types.Type], tuple[tuple[type, ...], str]] = {
    types.StrType: ((str,), "a string"),
    types.IntType: ((int,), "a whole number"),
    types.FloatType: ((int, float), "a number"),
    types.BoolType: ((bool,), "true or false"),
    types.ListType: ((list,), "an array"),
    types.DictType: ((dict,), "an object"),
    types.StructType: ((dict,), "an object"),
}


def _takes(node: types.Type, value: Any) -> bool:
    """Whether `value` has the JSON type of `node`."""
    if isinstance(node, types.LiteralType):
        return isinstance(value, str)
    return type(value) in _JSON_TYPES[type(node)][0]


def _expected(node: types.Type) -> str:
    if isinstance(node, types.LiteralType):
        return f"one of {', '.join(map(str, node.values))}"
    return _JSON_TYPES[type(node)][1]


def _field_of(node: types.Type, name: str) -> types.Type:
    assert isinstance(node, types.StructType), "mappings take any value"
    return next(field.type for field in node.fields if field.encode_name == name)


def _tags_of(node: types.Type, name: str) -> types.LiteralType | None:
    """The allowed values of the field `name` if it selects the variant of `node`, else None."""
    tags = [one.tag for one in _variants(node) if isinstance(one, types.StructType) and one.tag_field == name]
    return types.LiteralType(tuple(map(str, tags))) if tags else None


def _items_of(node: types.Type) -> types.Type:
    assert isinstance(node, types.ListType)
    return node.item_type


def _metadata(node: types.Type) -> Mapping[str, Any]:
    """The `extra` of a type's `Meta`."""
    found: dict[str, Any] = {}
    waiting: list[types.Type] = [node]
    while waiting:
        one = waiting.pop()
        if isinstance(one, types.Metadata):
            found |= one.extra or {}
            waiting.append(one.type)
        elif isinstance(one, types.UnionType):
            waiting += one.types
    return found


def _problem(node: types.Type, value: Any) -> str:
    """What is wrong with `value`, as the rest of a sentence that begins with the parameter's name."""
    if isinstance(value, float) and 2**63 <= abs(value) < math.inf and _has_integer(node):
        value = int(value)  # orjson decodes whole numbers beyond 64 bits as floats
    metadata = _metadata(node)
    row: Parameter | None = metadata.get("parameter")
    if row is not None and (problem := row.problem(value)) is not None:
        return problem
    if (text := metadata.get("must")) is not None:
        return str(text)
    variants = list(_variants(node))
    fitting = [one for one in variants if _takes(one, value)]
    if not fitting:
        names = metadata.get("expected") or " or ".join(dict.fromkeys(map(_expected, variants)))
        if isinstance(value, float) and _has_integer(node):
            return f"must be {names}; it is {value}"
        return f"must be {names}, not {json_kind(value)}"
    return _bounds_problem(fitting[0], value)


def _has_integer(node: types.Type) -> bool:
    return any(isinstance(one, types.IntType) for one in _variants(node))


def _bounds_problem(node: types.Type, value: Any) -> str:
    """What is wrong with a `value` of the right JSON type, as the rest of a sentence that begins with its name."""
    match node:
        case types.LiteralType():
            return f"must be {_expected(node)}; it is {value[:60]!r}"
        case types.IntType() | types.FloatType():
            low, high = node.ge, node.le
            if high is None:
                return f"must be at least {low}; it is {value}"
            return f"must be between {low} and {high}; it is {value}"
        case types.StrType() if node.max_length is not None and len(value) > node.max_length:
            return f"may hold at most {node.max_length} characters; it has {len(value)}"
        case types.ListType() if node.max_length is not None and len(value) > node.max_length:
            return f"may hold at most {node.max_length} items; it has {len(value)}"
    return "must not be empty"


def json_schema(type_: type[Body], *, is_public: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
    """The JSON Schema of `type_`, and by name the schemas that it refers to. They have no rules between fields.

    With `is_public`, HOP_FIELDS are left out.
    """
    (reference,), components = msgspec.json.schema_components((type_,), ref_template="#/components/schemas/{name}")
    for schema in components.values():
        properties = schema.get("properties", {})
        for name in [name for name in properties if name.startswith("$") or (is_public and name in HOP_FIELDS)]:
            del properties[name]
    root = components.pop(reference["$ref"].rpartition("/")[2])
    return root, {name: components[name] for name in sorted(_referenced(root, components))}


def _referenced(schema: Any, components: Mapping[str, Any]) -> set[str]:
    """The names of the components that `schema` needs."""
    found: set[str] = set()
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            name = str(one.get("$ref", "")).rpartition("/")[2]
            if name in components and name not in found:
                found.add(name)
                waiting.append(components[name])
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
    return found


def is_set(value: Any) -> bool:
    """Whether a field of a struct holds a value."""
    return value is not None and value is not UNSET


# --- generation parameters --------------------------------------------------------------------------------------------
def parameter_type(row: Parameter) -> Any:
    """The type of a generation parameter."""
    kind: Any = {"boolean": bool, "strings": list[Any], "integer": int, "number": float}[row.kind]
    bounds: dict[str, Any] = {}
    if row.kind in ("integer", "number"):
        low = min(row.low, -1) if row.minus_one else row.low
        bounds = {name: kind(bound) for name, bound in (("ge", low), ("le", row.high)) if abs(bound) != float("inf")}
    schema = {name: value for name, value in row.schema().items() if name not in ("type", "minimum", "maximum")}
    return Annotated[kind, Meta(**bounds, extra_json_schema=schema, extra={"parameter": row})] | None


def with_parameters(name: str, base: type[Body], rows: Iterable[Parameter]) -> Any:
    """A subclass of `base` that has these generation parameters as fields."""
    fields = [(row.name, parameter_type(row), None) for row in rows]
    return msgspec.defstruct(name, fields, bases=(base,), kw_only=True)


def check_parameters(given: Mapping[str, Any], names: Set[str]) -> None:
    """Raises InvalidBodyError for a parameter in `names` that breaks a rule which its type cannot express: bounds with
    a gap, sizes in bytes, the only value of a boolean.
    """
    for name, value in given.items():
        if value is None or name not in names:
            continue
        if (problem := BY_NAME[name].problem(value)) is not None:
            code = INVALID if BY_NAME[name].only is None else UNSUPPORTED
            refuse(name, f"`{name}` {problem}", code)


CHECKED = frozenset(row.name for row in PARAMETERS if row.minus_one or row.kind == "strings" or row.only is not None)
"""Parameters with a rule that `check_parameters` checks."""
