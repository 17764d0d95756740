"""A sandbox in which a template pays for what it builds, before it is built; decides nothing about who is too poor.

A thread can be stopped between two operations of Python and not within one, so here no single operation may take long
or much: it is known, it is paid at the size of all that it looks at or makes, counted as if nothing in it were shared,
and what is neither known nor affordable raises CostlyError. The bounds hold for the operations that are listed here;
all others are refused by default.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinMethodType
from typing import Any

import jinja2
from jinja2 import nodes, pass_context, pass_environment
from jinja2.compiler import CodeGenerator, Frame
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context, Macro, Undefined
from markupsafe import Markup

from inference.worker.prompt.template_sandbox import Sandbox, strftime_now, to_json

ALLOWANCE_BYTES = 1 << 26
"""Of one rendering, for everything that it builds, together. A character counts as one byte, so that at most four times
as much is ever taken; ordinary templates build their prompt two to five times over."""
_NODE_BYTES = 32
_MAX_BITS = 64
_MAX_FORMAT = 64
_MAX_INDENT = 8

_FREE_METHODS = frozenset(
    [
        "startswith",
        "endswith",
        "find",
        "rfind",
        "index",
        "rindex",
        "count",
        "get",
        "keys",
        "values",
        "items",
        "isdigit",
        "isalpha",
        "isalnum",
        "isspace",
        "isupper",
        "islower",
        "isnumeric",
        "isdecimal",
    ]
)
_COPYING_METHODS = frozenset(
    [
        "strip",
        "lstrip",
        "rstrip",
        "upper",
        "lower",
        "title",
        "capitalize",
        "removeprefix",
        "removesuffix",
        "partition",
        "rpartition",
        "copy",
    ]
)
_STRIPPED_PER_BYTE = 1
_COMPARISONS_PER_BYTE = {
    **dict.fromkeys(["rfind", "rindex", "rsplit", "rpartition"], 4),
    **dict.fromkeys(["strip", "lstrip", "rstrip"], _STRIPPED_PER_BYTE),
}
"""Methods that may compare each character with each one of their first argument, and how many such pairs are paid like
a byte, besides: so the whole allowance lasts a tenth of a second or two. Searches from the front never do."""
_COPYING_FILTERS = ("string", "upper", "lower", "capitalize", "title", "safe", "int", "float")
_FREE_FILTERS = ("default", "d", "first", "last", "length", "count", "abs", "items", "map", "attr", "select", "reject")
_FREE_FILTERS_BY_ATTRIBUTE = ("selectattr", "rejectattr")
_VARIABLES = ("_loop_vars", "_block_vars")
"""Compiled templates name them in every call, for functions that want the context; all others never see them."""
_COSTLY_TESTS = ("upper", "lower")
"""They write out what they look at."""


class CostlyError(Exception):
    """A template does what may take long, or more than its allowance."""


class _Purse(threading.local):
    """What the rendering on this thread may still build."""

    left = ALLOWANCE_BYTES


_purse = _Purse()


def begin() -> None:
    """A rendering begins on this thread."""
    _purse.left = ALLOWANCE_BYTES


def _pay(size: int) -> None:
    if size > _purse.left:
        raise CostlyError
    _purse.left -= size


def _pay_for(value: Any) -> None:
    _pay(_size(value, _purse.left))


def _size(value: Any, most: int) -> int:
    """Bytes of a value, shared parts counted as often as they are seen; raises CostlyError beyond `most`, and for what
    is none of the kinds that a request consists of.
    """
    found = 0
    left = [value]
    while left:
        item = left.pop()
        kind = type(item)
        found += _NODE_BYTES
        if kind is str or kind is Markup:
            found += len(item)
        elif kind is int:
            found += item.bit_length() // 3
        elif kind is list or kind is tuple:
            found += 8 * len(item)
            if found <= most:
                left += item
        elif kind is dict:
            found += 16 * len(item)
            if found <= most:
                left += item
                left += item.values()
        elif not (item is None or kind is bool or kind is float or isinstance(item, Undefined)):
            raise CostlyError
        if found > most:
            raise CostlyError
    return found


class _Generator(CodeGenerator):
    """Compiles what builds texts, lists and copies of their parts into calls that pay."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - the name is Jinja's
        """`a ~ b`."""
        self._called("joined", node.nodes, frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        """`[a, b]`."""
        self._built(node.items, lambda: super(_Generator, self).visit_List(node, frame))

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        """`(a, b)`, which may also be what is assigned to."""
        items = [] if node.ctx == "store" else node.items
        self._built(items, lambda: super(_Generator, self).visit_Tuple(node, frame))

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        """`{a: b}`."""
        items = [item for pair in node.items for item in (pair.key, pair.value)]
        self._built(items, lambda: super(_Generator, self).visit_Dict(node, frame))

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        """`a[b:c]` copies, `a[b]` does not."""
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        nothing = nodes.Const(None)
        edges = [edge or nothing for edge in (node.arg.start, node.arg.stop, node.arg.step)]
        self._called("cut", [node.node, *edges], frame)

    def _built(self, items: list[nodes.Expr], write: Callable[[], None]) -> None:
        pays = any(not isinstance(item, nodes.Const) for item in items)
        self.write("environment.built(" if pays else "(")
        write()
        self.write(")")

    def _called(self, name: str, arguments: list[nodes.Expr], frame: Frame) -> None:
        self.write(f"environment.{name}(")
        for argument in arguments:
            self.visit(argument, frame)
            self.write(", ")
        self.write(")")


class Frugal(Sandbox):
    """The sandbox. Nothing is computed while a template is compiled."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])
    code_generator_class = _Generator

    def __init__(self) -> None:
        super().__init__(optimized=False, finalize=_shown)
        known = self.filters
        self.filters = dict.fromkeys(known, _costly)
        self.filters |= {name: known[name] for name in (*_FREE_FILTERS, *_FREE_FILTERS_BY_ATTRIBUTE)}
        self.filters |= {name: _paid(known[name]) for name in _COPYING_FILTERS}
        self.filters |= {"tojson": _to_json, "replace": _replace, "join": _join, "list": _list, "trim": _trim}
        self.tests = {**self.tests, **dict.fromkeys(_COSTLY_TESTS, _costly)}
        free = {name: self.globals[name] for name in ("range", "dict", "namespace", "raise_exception")}
        self.globals = {**dict.fromkeys(self.globals, _costly), **free, "strftime_now": _strftime_now}
        self._functions = [*free.values(), _strftime_now]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Pays for texts and lists that grow; numbers stay small."""
        if isinstance(left, (int, float)) and isinstance(right, (int, float)):
            if operator == "**" or any(
                isinstance(item, int) and item.bit_length() > _MAX_BITS for item in (left, right)
            ):
                raise CostlyError
        elif operator == "+":
            if isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
                _pay_for(left)
                _pay_for(right)
        elif operator == "*":
            sized, times = (left, right) if isinstance(right, int) else (right, left)
            if isinstance(sized, (str, list, tuple)) and isinstance(times, int):
                each = len(sized) if isinstance(sized, str) else _size(sized, _purse.left)
                _pay(_NODE_BYTES + each * max(times, 0))
        elif isinstance(left, str):
            raise CostlyError  # a format
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *arguments: Any, **named: Any) -> Any:
        """Calls macros, and the functions and methods that are known; pays for lists among what they are given."""
        given = [value for name, value in named.items() if name not in _VARIABLES] if named else []
        if isinstance(obj, BuiltinMethodType):
            _pay_for_method(obj, arguments, is_named=bool(given))
        elif not isinstance(obj, (Macro, Undefined)) and not any(obj is known for known in self._functions):
            raise CostlyError
        for argument in (*arguments, *given):
            if isinstance(argument, (list, tuple, dict)):
                _pay_for(argument)
        return super().call(context, obj, *arguments, **named)

    @staticmethod
    def built(value: Any) -> Any:
        """What a literal made."""
        _pay_for(value)
        return value

    @staticmethod
    def cut(value: Any, start: Any, stop: Any, step: Any) -> Any:
        """A slice."""
        if isinstance(value, (str, list, tuple)):
            _pay(_NODE_BYTES + 8 * len(value))
        return value[start:stop:step]

    @staticmethod
    def joined(*parts: Any) -> str:
        """Values as texts, one behind the other."""
        return Frugal.concat([_text(part) for part in parts])

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """The text of a block or a macro."""
        texts = list(parts)
        _pay(sum(map(len, texts)))
        return "".join(texts)


@pass_context  # so that nothing is written out while a template is compiled
def _shown(_context: Context, value: Any) -> Any:
    """A value that becomes text."""
    if type(value) is not str:
        _pay_for(value)
    return value


def _text(value: Any) -> str:
    if type(value) is str:
        return value
    _pay_for(value)
    return str(value)


def _costly(*_arguments: Any, **_named: Any) -> Any:
    raise CostlyError


def _paid(filter: Callable[..., Any]) -> Callable[..., Any]:
    """`filter`, of which the first argument is what it writes out."""

    @functools.wraps(filter)
    def paying(value: Any, *arguments: Any, **named: Any) -> Any:
        _pay_for(value)
        return filter(value, *arguments, **named)

    return paying


def _pay_for_method(method: BuiltinMethodType, arguments: tuple[Any, ...], *, is_named: bool) -> None:
    owner, name = method.__self__, method.__name__
    if type(owner) not in (str, list, tuple, dict) or is_named:
        raise CostlyError
    if name in _COMPARISONS_PER_BYTE and arguments:
        _pay_for_comparing(owner, arguments[0], _COMPARISONS_PER_BYTE[name])
    if name in _FREE_METHODS:
        return
    if name in _COPYING_METHODS:
        _pay_for(owner)
    elif isinstance(owner, str) and name in ("split", "rsplit", "splitlines"):
        pieces = owner.count(arguments[0]) + 1 if arguments and isinstance(arguments[0], str) else len(owner) // 2 + 1
        _pay(len(owner) + 2 * _NODE_BYTES * pieces)
    elif isinstance(owner, str) and name == "replace" and len(arguments) > 1:
        _pay_for_replacing(owner, str(arguments[0]), str(arguments[1]))
    elif isinstance(owner, str) and name == "join" and len(arguments) == 1 and type(arguments[0]) in (list, tuple):
        _pay(_size(arguments[0], _purse.left) + len(owner) * len(arguments[0]))
    else:
        raise CostlyError


def _pay_for_comparing(text: Any, other: Any, comparisons_per_byte: int) -> None:
    if isinstance(other, str):
        _pay(len(text) * len(other) // comparisons_per_byte)


def _pay_for_replacing(text: str, old: str, new: str) -> None:
    _pay(len(text) + text.count(old) * len(new))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
    **options: Any,
) -> str:
    if isinstance(value, Iterator):
        value = list(value)
    if not (indent is None or (isinstance(indent, int) and indent <= _MAX_INDENT)):
        raise CostlyError
    if not (separators is None or (isinstance(separators, (list, tuple)) and all(map(_is_short, separators)))):
        raise CostlyError
    size = _size(value, _purse.left) if not isinstance(value, Undefined) else _NODE_BYTES
    _pay(size * size.bit_length() if sort_keys else size)  # each key is compared as often as halving all leaves one
    return to_json(value, ensure_ascii, indent, separators, sort_keys)


def _is_short(text: Any) -> bool:
    return isinstance(text, str) and len(text) <= _MAX_INDENT


def _replace(value: Any, old: Any, new: Any, count: int = -1) -> str:
    text, old, new = _text(value), _text(old), _text(new)
    _pay_for_replacing(text, old, new)
    return text.replace(old, new, count)


def _trim(value: Any, chars: Any = None) -> str:
    text = value if isinstance(value, str) else _text(value)
    _pay_for(text)
    _pay_for_comparing(text, chars, _STRIPPED_PER_BYTE)
    return text.strip(chars)


def _list(value: Any) -> list[Any]:
    if isinstance(value, str):
        _pay(2 * _NODE_BYTES * len(value))
    found = list(value)
    _pay_for(found)
    return found


@pass_environment
def _join(environment: jinja2.Environment, value: Any, d: Any = "", attribute: str | None = None) -> str:
    items = _list(value if attribute is None else map(make_attrgetter(environment, attribute), value))
    between = _text(d)
    texts = list(map(_text, items))
    _pay(sum(map(len, texts)) + len(between) * len(texts))
    return between.join(texts)


def _strftime_now(format: Any) -> str:
    if not isinstance(format, str) or len(format) > _MAX_FORMAT:
        raise CostlyError
    return strftime_now(format)
