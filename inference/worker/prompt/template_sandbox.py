"""What a chat template finds when it runs: filters, functions, tags, no way out of the sandbox; bounds nothing."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_RENDERED_CHARS = 1 << 25
MAX_PROBLEM_CHARS = 10_000


class TooLongError(Exception):
    """A template wrote more text than any context holds."""


class Sandbox(ImmutableSandboxedEnvironment):
    """As model authors expect it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation], **options
        )
        self.filters["tojson"] = to_json
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = strftime_now


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what a training run learns from; for a prompt it is its content."""

    tags = frozenset(["generation"])  # type: ignore[assignment]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def written(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """The text of the template; raises TooLongError, and whatever the template raises."""
    parts: list[str] = []
    size = 0
    for part in template.generate(variables):
        parts.append(part)
        size += len(part)
        if size > MAX_RENDERED_CHARS:
            raise TooLongError
    return "".join(parts)


def problem(error: Exception) -> str:
    """What went wrong in a template, in its own words where it has any."""
    if isinstance(error, TooLongError):
        return f"it wrote more than {MAX_RENDERED_CHARS} characters"
    if isinstance(error, MemoryError):
        return "it ran out of memory"
    if isinstance(error, RecursionError):
        return type(error).__name__
    return str(error)[:MAX_PROBLEM_CHARS] or type(error).__name__


def raise_exception(message: str) -> None:
    """A template refuses the messages."""
    raise jinja2.TemplateError(message)


def strftime_now(format: str) -> str:
    """The time, where the machine is."""
    return datetime.datetime.now().astimezone().strftime(format)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
    **_options: Any,
) -> str:
    """Plain JSON, not the HTML-safe form of Jinja's own filter, with the options that model authors know it by."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_listed
    )


def _listed(value: Any) -> list[Any]:
    """What `map` and its like give is written as a list."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON serializable")
