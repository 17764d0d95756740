"""The Jinja environment of chat templates, and the child process that renders in it."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Iterator
from typing import Any

import jinja2
import jinja2.ext
import orjson
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from inference.worker import bounded_child

MAX_RENDERED_CHARS = 1 << 25
MAX_PROBLEM_CHARS = 10_000
STACK_BYTES = 64 << 20
IDLE_SECONDS = 600.0
"""The child, which takes 14 MB, ends after this time without a request. Starting it takes 60 ms."""


class TooLongError(Exception):
    """The text has more than MAX_RENDERED_CHARS."""


class Sandbox(ImmutableSandboxedEnvironment):
    """A sandboxed environment with the options, filters and functions of the transformers library."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
        self.filters["tojson"] = to_json
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = strftime_now


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks text for training; a prompt contains that text without the tags."""

    tags = frozenset(["generation"])  # type: ignore[assignment]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """The rendered text. Raises TooLongError, and every error that the template raises."""
    parts: list[str] = []
    size = 0
    for part in template.generate(variables):
        parts.append(part)
        size += len(part)
        if size > MAX_RENDERED_CHARS:
            raise TooLongError
    return "".join(parts)


def problem(error: Exception) -> str:
    """The message of a template's error."""
    if isinstance(error, TooLongError):
        return f"it wrote more than {MAX_RENDERED_CHARS} characters"
    if isinstance(error, MemoryError):
        return "it ran out of memory"
    if isinstance(error, RecursionError):
        return type(error).__name__
    return str(error)[:MAX_PROBLEM_CHARS] or type(error).__name__


def raise_exception(message: str) -> None:
    """Rejects the messages. Templates call it."""
    raise jinja2.TemplateError(message)


def strftime_now(format: str) -> str:
    """The local time. Templates call it."""
    return datetime.datetime.now().astimezone().strftime(format)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
    **_options: Any,
) -> str:
    """JSON as the transformers library writes it, without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_as_list
    )


def _as_list(value: Any) -> list[Any]:
    """Iterators, such as the results of `map`, are rendered as lists."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON serializable")


def _compiled(source: str) -> jinja2.Template:
    """The compiled template; raises ValueError with a message for the client."""
    try:
        return Sandbox().from_string(source)
    except (RecursionError, MemoryError) as error:
        raise ValueError(f"the chat template is nested too deeply ({type(error).__name__})") from None
    except Exception as error:
        raise ValueError(f"the chat template does not compile: {error}") from None


def main(argv: list[str]) -> None:
    """The child: answers each request `[source, variables]` with `[kind, text]`.

    The kind is `text` with the prompt (empty if `variables` is null: only compiles), `refused` with an error of the
    template, or `invalid` with the reason why it does not compile. `argv` holds `[cpu_seconds, memory_bytes]` as JSON.
    """
    cpu_seconds, memory_bytes = orjson.loads(argv[0])
    compiled: dict[str, jinja2.Template] = {}

    def answer(question: bytes) -> bytes:
        source, variables = orjson.loads(question)
        try:
            if source not in compiled:
                compiled[source] = _compiled(source)
            result = ("text", "" if variables is None else render(compiled[source], variables))
        except ValueError as error:
            result = ("refused" if source in compiled else "invalid", problem(error))
        except Exception as error:
            result = ("refused", problem(error))
        return _encoded(*result)

    bounded_child.serve(
        answer,
        cpu_seconds=cpu_seconds,
        memory_bytes=memory_bytes,
        stack_bytes=STACK_BYTES,
        idle_seconds=IDLE_SECONDS,
    )


def _encoded(kind: str, text: str) -> bytes:
    try:
        return orjson.dumps([kind, text])
    except orjson.JSONEncodeError:  # a lone surrogate, which a template can produce
        return orjson.dumps([kind, text.encode("utf-8", "replace").decode()])


if __name__ == "__main__":
    main(sys.argv[1:])
