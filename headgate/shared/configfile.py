"""Reads a YAML file into a pydantic model and turns every mistake into file, line and advice; never applies anything.

Secrets are written `${env:NAME}`. A value that names an unset variable becomes the `Unset` marker string so that the
owner of the key can decide (a provider without its key is absent); see `unset_name`. Problems go into logs: they repeat
what was written, for whoever looks for it, though neither what `${env:NAME}` stands for nor what is written where a
secret belongs. A key that somebody writes out in the place of something else is repeated.
"""

from __future__ import annotations

import difflib
import re
import stat
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from headgate.shared.errors import ConfigError, Problem
from headgate.shared.state import SECRET_NAMES, packaged_defaults

_ENV = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}")
_UNSET = "\x00unset:"
Path_ = tuple[str | int, ...]
M = TypeVar("M", bound=BaseModel)


MOST_BYTES = 4 * 10**6
"""A larger file is no configuration."""

MOST_VALUES = 100_000
"""Keys and values of a file, each alias counted as what it stands for; a thousand models have a tenth of it."""

MOST_DEPTH = 64
"""Values inside values; our deepest is six. Python's own limit is a thousand calls, and a traceback."""


_WRONG_KIND: Mapping[str, str] = {
    **dict.fromkeys(
        ("model_type", "model_attributes_type", "dict_type"),
        "settings are needed here, each as NAME: VALUE on a line of its own below, or in braces; `{}` for none",
    ),
    **dict.fromkeys(("tuple_type", "list_type"), "a list is needed here, for example [a, b]; `[]` for none"),
}
"""What stands in the place of settings or of a list is not repeated: it may be the very key that belongs into it."""


class _Filled(str):
    """A text that holds the value of a variable; `written` is what stands in the file."""

    __slots__ = ("written",)
    written: str


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys, and sizes that Python's stack or memory would feel."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._count = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """The next node, with everything below it; refuses depth and number as they come."""
        self._depth += 1
        self._count += 1
        if self._depth > MOST_DEPTH or self._count > MOST_VALUES:
            raise _refused(_too_deep() if self._depth > MOST_DEPTH else _too_many(), self.get_mark())
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """The value of `node`; text that only looks like a number or a date is a problem with its line."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, OverflowError) as error:
            raise _refused(f"not a value of its kind: {error}", node.start_mark) from error


def _refused(what: str, mark: Any) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, what, mark)


def _too_deep() -> str:
    return f"nested too deeply: more than {MOST_DEPTH} values inside one another"


def _too_many() -> str:
    return f"more than {MOST_VALUES} keys and values, with each alias counted as what it stands for"


def _measure(node: yaml.Node, known: dict[yaml.Node, tuple[int, int] | None]) -> tuple[int, int]:
    """(values, depth) of `node` with its aliases written out, each node looked at once; refuses what is too much."""
    if node in known:
        if (found := known[node]) is None:
            raise _refused("an alias stands inside of what it stands for", node.start_mark)
        return found
    known[node] = None
    inner: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        inner = [one for pair in node.value for one in pair]
    elif isinstance(node, yaml.SequenceNode):
        inner = node.value
    sizes = [_measure(one, known) for one in inner]
    count, depth = 1 + sum(size[0] for size in sizes), 1 + max((size[1] for size in sizes), default=0)
    if depth > MOST_DEPTH or count > MOST_VALUES:
        raise _refused(_too_deep() if depth > MOST_DEPTH else _too_many(), node.start_mark)
    known[node] = (count, depth)
    return count, depth


def _mapping(loader: yaml.SafeLoader, node: yaml.Node) -> dict[Any, Any]:
    assert isinstance(node, yaml.MappingNode)
    seen: set[str] = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _refused("a key must be a plain name; quote it", key.start_mark)
        if key.value in seen:
            raise _refused(f"the key {key.value!r} stands twice in this mapping; remove one", key.start_mark)
        seen.add(key.value)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def unset_name(value: str | None) -> str | None:
    """The NAME when `value` came from a `${env:NAME}` whose variable is unset or empty, else None."""
    return value[len(_UNSET) :] if value is not None and value.startswith(_UNSET) else None


def read_yaml(
    path: Path, environ: Mapping[str, str], *, nothing: str = "{}"
) -> tuple[dict[str, Any], dict[Path_, int]]:
    """The mapping in `path` with `${env:NAME}` filled in, and the 1-based line of every key path.

    Raises ConfigError when the file is missing, not readable, too large, not YAML or not a mapping at the top. A file
    without content is an error too, because a full disk or an interrupted save leaves one; `nothing` is what a user
    writes who wants no settings.
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
        said = getattr(error, "problem", None) or "not valid YAML"
        if isinstance(error, yaml.composer.ComposerError) and said == "but found another document":
            said = "a second YAML document begins here (`---`); one file holds one document"
        raise ConfigError([Problem(said, file=path, line=mark.line + 1 if mark else None)]) from error
    if data is None:
        raise ConfigError([Problem(f"the file is empty; if that is intended, write `{nothing}`", file=path)])
    if not isinstance(data, dict):
        raise ConfigError([Problem("a mapping of settings is needed at the top of the file", file=path, line=1)])
    lines: dict[Path_, int] = {}
    if node is not None:
        _collect_lines(node, (), lines)
    return _fill_env(data, environ), lines


def _read(path: Path) -> str:
    """The text of `path`; raises ConfigError when there is none, or more than MOST_BYTES of it."""
    try:
        if stat.S_ISFIFO(path.stat().st_mode):  # nobody may ever write to it
            raise ConfigError([Problem("a pipe, and a file is needed", file=path)])
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
        if len(raw) > MOST_BYTES:
            raise ConfigError([Problem(f"larger than {MOST_BYTES // 10**6} MB, too large to be settings", file=path)])
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
        told = _Filled(filled)
        told.written = value
        return told
    if isinstance(value, dict):
        return {str(key): _fill_env(inner, environ) for key, inner in value.items()}
    if isinstance(value, list):
        return [_fill_env(inner, environ) for inner in value]
    return value


def load(path: Path, model: type[M], environ: Mapping[str, str]) -> M:
    """`path` validated as `model`; raises ConfigError with every problem found, each with its line."""
    data, lines = read_yaml(path, environ)
    return validated(data, lines, path, model)


def validated(data: Mapping[str, Any], lines: Mapping[Path_, int], path: Path, model: type[M]) -> M:
    """What `read_yaml` read from `path`, as `model`; raises ConfigError with every problem and its line."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError(problems_of(error, model, path, lines)) from error


def problems_of(
    error: ValidationError, model: type[BaseModel], path: Path | None, lines: Mapping[Path_, int]
) -> list[Problem]:
    """Each pydantic error as a Problem: dotted key, nearest known line, and a did-you-mean for unknown keys."""
    return [_problem(item, model, path, lines) for item in error.errors(include_url=False)]


def _problem(item: Any, model: type[BaseModel], path: Path | None, lines: Mapping[Path_, int]) -> Problem:
    loc: Path_ = tuple(item["loc"])
    written = tuple(part for part in loc if not (isinstance(part, str) and part == "[key]"))
    line = next((lines[written[:end]] for end in range(len(written), 0, -1) if written[:end] in lines), None)
    if item["type"] == "extra_forbidden":
        known = _keys_at(model, loc[:-1])
        near = difflib.get_close_matches(str(loc[-1]), known, n=1, cutoff=0.6)
        message = "unknown key" + (f"; did you mean {near[0]!r}?" if near else f"; known keys: {', '.join(known)}")
    elif item["type"] == "missing":
        message = "this key is needed and not there"
    elif item["type"] in _WRONG_KIND:
        message = _WRONG_KIND[item["type"]]
    else:
        said = item.get("input")
        message = as_written(str(item["msg"]).removeprefix("Value error, "), said)
        if isinstance(said, str) and (name := unset_name(said)) is not None:
            message += f" (the variable {name} is not set)"
        elif item["type"] != "value_error" and not _may_be_secret(said, loc):
            message += f" (it is {said!r})"
    return Problem(message, key=".".join(map(str, written)), file=path, line=line)


def as_written(message: str, value: Any) -> str:
    """`message` about `value` of the file, with `${env:NAME}` for what it was filled in with.

    A message quotes as `repr` does, the text as it is or in lower case.
    """
    if isinstance(value, _Filled):
        for text in (str(value), value.lower()):
            message = message.replace(repr(text), repr(value.written))
    elif isinstance(value, list):
        for inner in value:
            message = as_written(message, inner)
    return message


def _may_be_secret(said: Any, at: Path_) -> bool:
    return isinstance(said, (dict, list, _Filled)) or not SECRET_NAMES.isdisjoint(at)


def _keys_at(model: type[BaseModel], loc: Path_) -> list[str]:
    """Field names of the model found by walking `loc` from `model`; empty when the walk leaves models."""
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
