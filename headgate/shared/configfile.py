"""Reads a YAML file into a pydantic model. Reports every mistake with file, line and advice.

`${env:NAME}` inserts an environment variable. A value that consists of one unset or empty variable becomes a marker, so
that the caller can decide what it means (see `unset_name`; for example, a provider whose key is unset counts as not
configured). Inside a longer value an unset variable is empty. Error messages quote the file, but neither the values of
variables nor the values of secret settings. A secret that is written as the value of another setting is quoted.
"""

from __future__ import annotations

import re
import stat
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from headgate.shared.errors import ConfigError, Problem, did_you_mean
from headgate.shared.state_directory import SECRET_NAMES, packaged_defaults
from headgate.shared.units import parse_bytes, parse_duration

_ENV = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}")
_UNSET = "\x00unset:"
Path_ = tuple[str | int, ...]
M = TypeVar("M", bound=BaseModel)

# Patterns for the JSON schemas, which editors use. The parsers decide.
_DURATION_TEXT = Annotated[str, Field(pattern=r"^\s*(never|\d+(\.\d+)?\s*(ms|s|m|h|d)?)\s*$")]
_SIZE_TEXT = Annotated[str, Field(pattern=r"^\s*\d+(\.\d+)?\s*([KMGTkmgt]?[Ii]?[Bb])?\s*$")]

Duration = Annotated[float, BeforeValidator(parse_duration, json_schema_input_type=float | _DURATION_TEXT)]
"""A pydantic field type: seconds, written as `30s`, `250ms`, `5m`, `never` or a number."""

Bytes = Annotated[int, BeforeValidator(parse_bytes, json_schema_input_type=int | _SIZE_TEXT)]
"""A pydantic field type: bytes, written as `512MiB`, `2GiB` or a number."""


MAX_BYTES = 4 * 10**6
"""Size limit of a file."""

MAX_VALUES = 100_000
"""Limit of keys and values, with aliases expanded. A thousand models need a tenth of it."""

MAX_DEPTH = 64
"""Limit of nesting; the configuration needs six levels. A deeper file could exceed Python's recursion limit."""


_WRONG_KIND: Mapping[str, str] = {
    **dict.fromkeys(
        ("model_type", "model_attributes_type", "dict_type"),
        "expected settings as NAME: VALUE, one per line, or in braces; `{}` for none",
    ),
    **dict.fromkeys(("tuple_type", "list_type"), "expected a list, for example [a, b]; `[]` for none"),
}
"""Messages by pydantic's error type. They do not quote the value, which can be a secret in the wrong place."""


class _Filled(str):
    """A string with inserted variables. `written` is the text in the file."""

    __slots__ = ("written",)
    written: str


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys and limits depth and size."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._count = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """The next node with its children. Refuses too deep and too large documents."""
        self._depth += 1
        self._count += 1
        if self._depth > MAX_DEPTH or self._count > MAX_VALUES:
            raise _refused(_too_deep() if self._depth > MAX_DEPTH else _too_many(), self.get_mark())
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """The value of `node`. Turns invalid numbers and dates into a problem with the line."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, OverflowError) as error:
            raise _refused(f"invalid value: {error}", node.start_mark) from error


def _refused(what: str, mark: Any) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, what, mark)


def _too_deep() -> str:
    return f"nested too deeply: more than {MAX_DEPTH} levels"


def _too_many() -> str:
    return f"more than {MAX_VALUES} keys and values, with aliases expanded"


def _measure(node: yaml.Node, known: dict[yaml.Node, tuple[int, int] | None]) -> tuple[int, int]:
    """(values, depth) of `node` with expanded aliases; visits each node once. Refuses too deep and too large nodes."""
    if node in known:
        if (found := known[node]) is None:
            raise _refused("an alias contains itself", node.start_mark)
        return found
    known[node] = None
    inner: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        inner = [child for pair in node.value for child in pair]
    elif isinstance(node, yaml.SequenceNode):
        inner = node.value
    sizes = [_measure(child, known) for child in inner]
    count, depth = 1 + sum(size[0] for size in sizes), 1 + max((size[1] for size in sizes), default=0)
    if depth > MAX_DEPTH or count > MAX_VALUES:
        raise _refused(_too_deep() if depth > MAX_DEPTH else _too_many(), node.start_mark)
    known[node] = (count, depth)
    return count, depth


def _mapping(loader: yaml.SafeLoader, node: yaml.Node) -> dict[Any, Any]:
    assert isinstance(node, yaml.MappingNode)
    seen: set[str] = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _refused("a key must be text; quote it", key.start_mark)
        if key.value in seen:
            raise _refused(f"duplicate key {key.value!r}; remove one of them", key.start_mark)
        seen.add(key.value)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def unset_name(value: str | None) -> str | None:
    """NAME when `value` is a `${env:NAME}` whose variable is unset or empty, else None."""
    return value[len(_UNSET) :] if value is not None and value.startswith(_UNSET) else None


def read_yaml(
    path: Path, environ: Mapping[str, str], *, nothing: str = "{}"
) -> tuple[dict[str, Any], dict[Path_, int]]:
    """The mapping in `path` with variables inserted, and the 1-based line of each key and list item, by its path.

    Raises ConfigError when the file is missing, unreadable, too large, empty, not valid YAML or not a mapping. An empty
    file is an error because a full disk or an interrupted save leaves one; the message recommends to write `nothing`
    instead.
    """
    text = _read(path)
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is not None:
                _measure(node, {})
            data = loader.construct_document(node) if node is not None else None
        finally:
            loader.dispose()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError([Problem(f"not valid YAML: {error.reason}", file=path, line=line)]) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or "not valid YAML"
        if isinstance(error, yaml.composer.ComposerError) and problem == "but found another document":
            problem = "a second YAML document begins here (`---`); a file holds one document"
        raise ConfigError([Problem(problem, file=path, line=mark.line + 1 if mark else None)]) from error
    if data is None:
        raise ConfigError([Problem(f"the file is empty; if that is intended, write `{nothing}`", file=path)])
    if not isinstance(data, dict):
        raise ConfigError([Problem("the file must contain settings as NAME: VALUE", file=path, line=1)])
    lines: dict[Path_, int] = {}
    if node is not None:
        _collect_lines(node, (), lines)
    if malformed := list(_malformed_variables(data, ())):
        raise ConfigError([
            Problem(
                f"{text!r} is not a variable; write ${{env:NAME}}", key=".".join(map(str, at)), file=path,
                line=lines.get(at),
            )
            for at, text in malformed
        ])  # fmt: skip
    return _fill_env(data, environ), lines


def _malformed_variables(value: Any, at: Path_) -> Iterator[tuple[Path_, str]]:
    """Where a text in `value` has a `${env:` that does not begin a variable, and the beginning of that."""
    if isinstance(value, str):
        rest = _ENV.sub("", value)
        if (start := rest.find("${env:")) >= 0:
            yield at, rest[start : start + 20]
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _malformed_variables(inner, (*at, str(name)))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _malformed_variables(inner, (*at, index))


def _read(path: Path) -> str:
    """The text of `path`. Raises ConfigError when it is missing, unreadable, a pipe or larger than MAX_BYTES."""
    try:
        if stat.S_ISFIFO(path.stat().st_mode):  # opening it can block forever
            raise ConfigError([Problem("this is a pipe; use a file", file=path)])
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ConfigError([Problem(f"larger than the limit of {MAX_BYTES // 10**6} MB", file=path)])
        return raw.decode("utf-8")
    except FileNotFoundError:
        raise ConfigError([Problem(f"no such file; start from {packaged_defaults() / path.name}", file=path)]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(f"cannot be read: {error}", file=path)]) from error


def _collect_lines(node: yaml.Node, at: Path_, lines: dict[Path_, int]) -> None:
    lines.setdefault(at, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*at, str(key.value))
            lines[here] = key.start_mark.line + 1
            _collect_lines(value, here, lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[(*at, index)] = value.start_mark.line + 1
            _collect_lines(value, (*at, index), lines)


def _fill_env(value: Any, environ: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        if (whole := _ENV.fullmatch(value)) and not environ.get(whole[1]):
            return _UNSET + whole[1]
        filled = _ENV.sub(lambda match: environ.get(match[1], ""), value)
        if filled == value:
            return value
        result = _Filled(filled)
        result.written = value
        return result
    if isinstance(value, dict):
        return {str(key): _fill_env(inner, environ) for key, inner in value.items()}
    if isinstance(value, list):
        return [_fill_env(inner, environ) for inner in value]
    return value


def load(path: Path, model: type[M], environ: Mapping[str, str]) -> M:
    """The file `path` as a `model`. Raises ConfigError with all problems and their lines."""
    data, lines = read_yaml(path, environ)
    return validated(data, lines, path, model)


def validated(data: Mapping[str, Any], lines: Mapping[Path_, int], path: Path, model: type[M]) -> M:
    """The result of `read_yaml` as a `model`. Raises ConfigError with all problems and their lines."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError(list(problems_of(error, model, path, lines).values())) from error


def problems_of(
    error: ValidationError, model: type[BaseModel], path: Path | None, lines: Mapping[Path_, int]
) -> dict[Path_, Problem]:
    """Each pydantic error as a Problem with dotted key, nearest known line, and a suggestion for unknown keys.

    The problems are in order, by pydantic's location of the error.
    """
    found = [item for item in error.errors(include_url=False) if not _lacks_invalid_items_only(item)]
    return {tuple(item["loc"]): _problem(item, model, path, lines) for item in found}


def _lacks_invalid_items_only(item: Any) -> bool:
    """Whether a list is too short for pydantic only without its invalid items, which have errors of their own."""
    return bool(item["type"] == "too_short" and len(item["input"]) >= item["ctx"]["min_length"])


def _problem(item: Any, model: type[BaseModel], path: Path | None, lines: Mapping[Path_, int]) -> Problem:
    loc: Path_ = tuple(item["loc"])
    written = tuple(part for part in loc if not (isinstance(part, str) and part == "[key]"))
    line = next((lines[written[:end]] for end in range(len(written), 0, -1) if written[:end] in lines), None)
    if item["type"] == "extra_forbidden":
        known = _keys_at(model, loc[:-1])
        message = "unknown key" + did_you_mean(str(loc[-1]), known, f"known keys: {', '.join(known)}")
    elif item["type"] == "missing":
        message = "this key is required"
    elif item["type"] in _WRONG_KIND:
        message = _WRONG_KIND[item["type"]]
    elif item["type"] == "too_short":
        count = item["ctx"]["min_length"]
        message = f"the list must have at least {count} item{'s' if count > 1 else ''}"
    else:
        value = item.get("input")
        message = as_written(str(item["msg"]).removeprefix("Value error, "), value)
        if isinstance(value, str) and (name := unset_name(value)) is not None:
            message += f" (the variable {name} is not set)"
        elif item["type"] != "value_error" and not _may_be_secret(value, loc):
            message += f" (it is {value!r}){meant(item)}"
    return Problem(message, key=".".join(map(str, written)), file=path, line=line)


def meant(item: Any) -> str:
    """The end of the message for an error of pydantic: the allowed value that the given one resembles; can be empty."""
    if item["type"] not in ("literal_error", "enum"):
        return ""
    return did_you_mean(item.get("input"), re.findall(r"'([^']*)'", str(item["ctx"]["expected"])))


def as_written(message: str, value: Any) -> str:
    """`message` with `${env:NAME}` in place of the values of variables.

    Messages quote `value` as `repr` does, unchanged or in lower case.
    """
    if isinstance(value, _Filled):
        for text in (str(value), value.lower()):
            message = message.replace(repr(text), repr(value.written))
    elif isinstance(value, list):
        for inner in value:
            message = as_written(message, inner)
    return message


def _may_be_secret(value: Any, at: Path_) -> bool:
    return isinstance(value, (dict, list, _Filled)) or not SECRET_NAMES.isdisjoint(at)


def _keys_at(model: type[BaseModel], loc: Path_) -> list[str]:
    """Field names of the model at `loc` below `model`; empty when there is no model."""
    here: Any = model
    for part in loc:
        candidates = list(_models_in(here))
        owner = next((item for item in candidates if part in _fields(item)), None)
        if owner is not None:
            here = _fields(owner)[str(part)]
            continue
        here = typing.get_args(here)[-1] if typing.get_args(here) else here
    return sorted({name for item in _models_in(here) for name in _fields(item)})


def _fields(model: type[BaseModel]) -> dict[str, Any]:
    return {field.alias or name: field.annotation for name, field in model.model_fields.items()}


def _models_in(annotation: Any) -> typing.Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated):
        for inner in typing.get_args(annotation):
            yield from _models_in(inner)
