"""Renders a model's chat template in a sandbox, bounded in time and size; never tokenizes and never trusts content.

A message may contain the text of a control token (`<|im_end|>`). Rendered as it is, it would end its turn. Such texts
are broken up by a marker before rendering; afterwards the prompt is cut at the markers and each piece is tokenized by
itself, so that a control token can only come from the template.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import json
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from inference.worker.core.dialects import detect
from inference.worker.errors import BadRequestError

MAX_TEMPLATE_CHARS = 1 << 20
MAX_RENDERED_CHARS = 1 << 25
RENDER_SECONDS = 5.0


class TemplateTooLargeError(Exception):
    """A template tried to build more text than any context holds."""


class _TimeUpError(BaseException):
    """Raised inside a rendering thread that took too long; no `except Exception` of a template's filters stops it."""


_PADDING = frozenset(["center", "ljust", "rjust", "zfill", "expandtabs"])
_WIDTH = re.compile(r"\d{5}")


class _Generator(CodeGenerator):
    """Compiles `~` into a call that looks at the size of the result."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - the name is Jinja's
        """Writes the expression."""
        self.write("environment.concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with bounds on what one operation can build."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])
    code_generator_class = _Generator

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Refuses methods that pad a text to any width."""
        return attr not in _PADDING and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuses results that explode: a string times a large number, a large power, a wide format."""
        if operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
            if len(left) + len(right) > MAX_RENDERED_CHARS:
                raise TemplateTooLargeError
        elif operator == "*":
            sized, times = (left, right) if isinstance(left, (str, list, tuple)) else (right, left)
            if (
                isinstance(sized, (str, list, tuple))
                and isinstance(times, int)
                and len(sized) * times > MAX_RENDERED_CHARS
            ):
                raise TemplateTooLargeError
        elif (operator == "%" and isinstance(left, str) and _WIDTH.search(left)) or (
            operator == "**" and isinstance(right, (int, float)) and abs(right) > 64
        ):
            raise TemplateTooLargeError
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, /, *arguments: Any, **named: Any) -> Any:
        """Refuses a replacement or a join whose result explodes."""
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str) and arguments:
            _check_method(owner, obj.__name__, arguments)
        return super().call(context, obj, *arguments, **named)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """The text of a block; what a template builds out of what it built doubles with every round of a loop."""
        return _joined(parts)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what a training run learns from; for a prompt it is its content."""

    tags = frozenset(["generation"])  # type: ignore[assignment]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template. `render` is thread-safe. `dialect` is how its family writes tools, calls and reasoning."""

    def __init__(self, source: str, *, bos: str, eos: str, control_texts: Sequence[str]) -> None:
        """Raises ValueError with a sentence when the template does not compile or is too long."""
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ValueError(f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS} are read")
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        for name in ("center", "format", "indent", "wordwrap"):
            environment.filters[name] = _bounded(environment.filters[name])
        environment.filters["replace"] = _replace
        environment.filters["join"] = _join
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, SyntaxError, ValueError, ArithmeticError, LookupError, TypeError) as error:
            raise ValueError(f"the chat template does not compile: {error}") from None
        except (RecursionError, MemoryError) as error:
            raise ValueError(f"the chat template is nested too deeply ({type(error).__name__})") from None
        self.dialect = detect(source, control_texts)
        self._special = {"bos_token": bos, "eos_token": eos}
        self._marker = f"hg{secrets.token_hex(12)}"
        texts = [text for text in control_texts if len(text) > 1]
        self._control = re.compile("|".join(re.escape(text) for text in texts)) if texts else None

    def render(
        self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any], *, generate: bool
    ) -> list[str]:
        """The prompt, in pieces that must be tokenized separately; usually one.

        `arguments` are the caller's extra template variables, `generate` opens the assistant's turn at the end. Raises
        BadRequestError with the template's own words, or when it takes too long.
        """
        shown = [self._defuse(message) for message in messages]
        if self._reads_parts:
            shown = list(map(_in_parts, shown))
        return self._rendered(shown, arguments, generate=generate).split(self._marker)

    @functools.cached_property
    def _reads_parts(self) -> bool:
        """Whether it takes contents as lists of parts only, as some of models that see do: a text would be lost."""
        probe = {"role": "user", "content": "hgprobe"}
        said = []
        for message in (probe, _in_parts(probe)):
            try:
                said.append("hgprobe" in self._rendered([message], {}, generate=True))
            except BadRequestError:
                said.append(False)
        return said == [False, True]

    def _rendered(self, messages: Sequence[Any], arguments: Mapping[str, Any], *, generate: bool) -> str:
        variables = {
            "tools": None,
            "documents": None,
            **{name: self._defuse(value) for name, value in arguments.items()},
            **self._special,
            "messages": messages,
            "add_generation_prompt": generate,
        }
        return self._run(variables)

    def defused(self, text: str) -> list[str]:
        """`text` of a caller in pieces none of which contains the text of a control token."""
        return str(self._defuse(text)).split(self._marker)

    def _defuse(self, value: Any) -> Any:
        """`value` with every control token's text in it broken by the marker."""
        if isinstance(value, str):
            if self._control is None:
                return value
            # Breaking after one character leaves both halves harmless; what they form with their neighbors is cut too.
            broken = value
            while (again := self._control.sub(lambda m: m[0][0] + self._marker + m[0][1:], broken)) != broken:
                broken = again
            return broken
        if isinstance(value, Mapping):
            return {self._defuse(name): self._defuse(item) for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._defuse(item) for item in value]
        return value

    def _run(self, variables: Mapping[str, Any]) -> str:
        render = _Rendering(self._template, variables)
        try:
            return render.result(RENDER_SECONDS)
        except _TimeUpError:
            problem = f"it took longer than {RENDER_SECONDS:g} s"
        except TemplateTooLargeError:
            problem = f"it wrote more than {MAX_RENDERED_CHARS} characters"
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            ArithmeticError,
            LookupError,
        ) as error:
            problem = str(error).replace(self._marker, "") or type(error).__name__
        except (RecursionError, MemoryError) as error:
            problem = type(error).__name__
        raise BadRequestError(f"the model's chat template refused these messages: {problem}", "messages")


class _Rendering:
    """One rendering in a thread of its own, which is interrupted when its time is up.

    A template of a GGUF is foreign code; a thread can be stopped at any bytecode by an exception set from outside, and
    the sandbox bounds what a single bytecode can do.
    """

    def __init__(self, template: jinja2.Template, variables: Mapping[str, Any]) -> None:
        self._template = template
        self._variables = variables
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._text = ""
        self._error: BaseException | None = None

    def result(self, seconds: float) -> str:
        thread = threading.Thread(target=self._work, name="template", daemon=True)
        thread.start()
        if not self._over.wait(seconds):
            with self._lock:
                if not self._over.is_set() and thread.ident is not None:
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(thread.ident), ctypes.py_object(_TimeUpError)
                    )
            raise _TimeUpError
        if self._error is not None:
            raise self._error
        return self._text

    def _work(self) -> None:
        try:
            self._render()
        except _TimeUpError:
            self._over.set()  # the exception arrived after the last check; nobody waits any more

    def _render(self) -> None:
        try:
            parts: list[str] = []
            size = 0
            for part in self._template.generate(self._variables):
                parts.append(part)
                size += len(part)
                if size > MAX_RENDERED_CHARS:
                    raise TemplateTooLargeError
            self._text = "".join(parts)
        except BaseException as error:  # handed to the thread that waits
            self._error = error
        with self._lock:
            self._over.set()


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """`message` with a text as the one part of its content."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _bounded(filter: Callable[..., Any]) -> Callable[..., Any]:
    """`filter` without widths of five digits."""

    @functools.wraps(filter)
    def checked(value: Any, *arguments: Any, **named: Any) -> Any:
        wide = any(isinstance(item, int) and item > 9999 for item in (*arguments, *named.values()))
        if wide or (filter.__name__ == "do_format" and _WIDTH.search(str(value))):
            raise TemplateTooLargeError
        return filter(value, *arguments, **named)

    return checked


def _joined(parts: Iterable[str]) -> str:
    texts = list(parts)
    if sum(map(len, texts)) > MAX_RENDERED_CHARS:
        raise TemplateTooLargeError
    return "".join(texts)


def _check_method(owner: str, name: str, arguments: Sequence[Any]) -> None:
    """Refuses a call of `owner.name(*arguments)` with an enormous result; wrong types fail by themselves."""
    size = 0
    if name == "replace" and len(arguments) > 1 and isinstance(arguments[0], str) and isinstance(arguments[1], str):
        size = len(owner) + owner.count(arguments[0]) * (len(arguments[1]) - len(arguments[0]))
    elif name == "join" and isinstance(arguments[0], (list, tuple)):
        size = sum(len(item) + len(owner) for item in arguments[0] if isinstance(item, str))
    if size > MAX_RENDERED_CHARS:
        raise TemplateTooLargeError


def _replace(value: Any, old: str, new: str, count: int = -1) -> str:
    text = str(value)
    _check_method(text, "replace", (str(old), str(new)))
    return text.replace(str(old), str(new), count)


@jinja2.pass_environment
def _join(environment: jinja2.Environment, value: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
    items = list(value) if attribute is None else list(map(make_attrgetter(environment, attribute), value))
    texts = list(map(str, items))
    _check_method(d, "join", (texts,))
    return d.join(texts)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().astimezone().strftime(format)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_options: Any) -> str:
    """As model authors expect it: plain JSON, not the HTML-safe form of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, default=_listed)


def _listed(value: Any) -> list[Any]:
    """What `map` and its like give is written as a list."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON serializable")
