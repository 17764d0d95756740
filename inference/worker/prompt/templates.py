"""Renders messages with a model's chat template.

A message may contain the text of a control token (`<|im_end|>`), which would end its turn. Such texts are split by a
marker before rendering. The rendered prompt is cut at the markers and each piece is tokenized separately, so that
control tokens come from the template alone.
"""

from __future__ import annotations

import functools
import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from inference.worker import bounded_child
from inference.worker.dialects import Dialect, detect
from inference.worker.dialects.answer_parts import Tool, ToolChoice
from inference.worker.dialects.conversation import (
    Roles,
    arranged,
    has_user_after_results,
    merge_into_results,
    needs_arranging,
)
from inference.worker.worker_errors import BadRequestError

MAX_TEMPLATE_CHARS = 1 << 20
MAX_PROBLEM_CHARS = 1000
_PROBE = "hgprobe"
"""A word that is searched for in rendered prompts."""

RENDER_SECONDS = 5.0
"""Limit of the computing time for one prompt."""
MEMORY_BYTES = 1 << 30
"""Address space of the child: 40 MB for the interpreter, 64 MiB for the stack, the rest for the template."""


class RefusedError(Exception):
    """The template refused its input, failed or reached a limit; the message says which."""


class OverLimitsError(RefusedError):
    """The template reached the limits of the child."""


class TemplateProcess:
    """A child process that renders templates. Thread-safe; it renders one prompt at a time.

    A chat template is code from a model file. It can take seconds or gigabytes within one operation of Python, which
    only the end of a process stops.
    """

    def __init__(self, render_seconds: float = RENDER_SECONDS, memory_bytes: int = MEMORY_BYTES) -> None:
        self._render_seconds = render_seconds
        self._memory_bytes = memory_bytes
        orders = orjson.dumps([render_seconds, memory_bytes]).decode()
        self._child = bounded_child.BoundedChild("inference.worker.prompt.template_sandbox", orders)
        self._lock = threading.Lock()

    def compile(self, source: str) -> None:
        """Raises ValueError with a message when the template does not compile."""
        try:
            kind, problem = self._run(source, None)
        except RefusedError as error:
            raise ValueError(f"the chat template does not compile: {error}") from None
        if kind == "invalid":
            raise ValueError(problem)

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """The prompt for variables that are JSON; raises RefusedError."""
        kind, text = self._run(source, variables)
        if kind != "text":
            raise RefusedError(text)
        return text

    def _run(self, source: str, variables: Mapping[str, Any] | None) -> tuple[str, str]:
        """The kind of the result ("text", "refused" or "invalid") and its text; without variables it only compiles."""
        try:
            with self._lock:
                answer = self._child.call(orjson.dumps([source, variables]))
        except bounded_child.OverLimitsError:
            raise OverLimitsError(
                f"it took longer than {self._render_seconds:g} s or more than {self._memory_bytes >> 20} MiB of memory"
            ) from None
        except (OSError, orjson.JSONEncodeError) as error:
            raise RefusedError(f"it cannot be rendered now ({type(error).__name__})") from None
        kind, text = orjson.loads(answer)
        return kind, text


@functools.cache
def shared_process() -> TemplateProcess:
    """The child process for all templates of this process."""
    return TemplateProcess()


@dataclass(frozen=True, slots=True)
class _Wants:
    """What a template needs.

    `parts`: contents as lists of parts, which some templates of vision models need. `nones`: None for missing tools
    and documents, which most templates test for; others iterate over them and need them undefined.
    """

    parts: bool = False
    nones: bool = True


class ControlTextSplitter:
    """Splits texts of control tokens by a secret marker, so that they are tokenized as plain text."""

    def __init__(self, control_texts: Sequence[str]) -> None:
        self.marker = f"hg{secrets.token_hex(12)}"
        texts = [text for text in control_texts if len(text) > 1]
        self._control = re.compile("|".join(re.escape(text) for text in texts)) if texts else None

    def pieces(self, text: str) -> list[str]:
        """`text` in pieces that contain no text of a control token."""
        return str(self.split(text)).split(self.marker)

    def split(self, value: Any) -> Any:
        """`value`, which is JSON, with the marker inside each text of a control token."""
        if isinstance(value, str):
            if self._control is None:
                return value
            # A marker after the first character can join the rest to its neighbors, so the result is checked again.
            split = value
            while (again := self._control.sub(lambda m: m[0][0] + self.marker + m[0][1:], split)) != split:
                split = again
            return split
        if isinstance(value, Mapping):
            return {self.split(name): self.split(item) for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.split(item) for item in value]
        return value


class ChatTemplate:
    """A compiled template. Thread-safe."""

    def __init__(
        self,
        source: str,
        *,
        bos: str,
        eos: str,
        control_texts: Sequence[str],
        with_tools: ChatTemplate | None = None,
        process: TemplateProcess | None = None,
    ) -> None:
        """`with_tools` is the file's other template, for requests with tools, where it has one. `process` renders; by
        default it is `shared_process`.

        Raises ValueError with a message when the template does not compile or is too long.
        """
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ValueError(f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS} are read")
        self.with_tools = self if with_tools is None else with_tools
        self._process = shared_process() if process is None else process
        self._process.compile(source)
        self._over_limits = ""
        self._source = source
        self._control_texts = control_texts
        self._special = {"bos_token": bos, "eos_token": eos}
        self._splitter = ControlTextSplitter(control_texts)

    def render(
        self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any], *, generate: bool
    ) -> list[str]:
        """The prompt, in pieces that must be tokenized separately; usually one.

        `arguments` are further template variables; `generate` opens the assistant's turn at the end. Raises
        BadRequestError with the template's message, or when it exceeds the limits.
        """
        if needs_arranging(messages):
            messages = arranged(messages, self._roles)
        if has_user_after_results(messages) and self._ends_with_results:
            messages = merge_into_results(messages)
        return self._rendered(messages, arguments, generate=generate)

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any], *, generate: bool
    ) -> list[str]:
        shown = [self._splitter.split(message) for message in messages]
        if self._wants.parts:
            shown = list(map(_in_parts, shown))
        return self._text(self._variables(shown, arguments, self._wants, generate=generate)).split(
            self._splitter.marker
        )

    @functools.cached_property
    def dialect(self) -> Dialect:
        """The notation of tools, calls and reasoning. A template that drops a given tool does not support tools."""
        known = detect(self._source, self._control_texts)
        if not known.has_call_notation:
            return known
        messages, variables = known.prepare([_user_message("Hi")], [Tool(_PROBE)], ToolChoice())
        try:
            presents = _PROBE in "".join(self.render(messages, variables, generate=True))
        except BadRequestError:
            presents = self._refuses([_user_message("Hi")], {})  # then the tool is not the reason
        return known if presents else detect(self._source, self._control_texts, presents=False)

    @functools.cached_property
    def _ends_with_results(self) -> bool:
        """Whether only an answer may follow a call's result, as in templates that require alternating turns."""
        call = {"id": "hgprobe00", "function": {"name": _PROBE, "arguments": {}}}
        turns = [
            _user_message("Hi"),
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": _PROBE},
        ]
        tools = [Tool(_PROBE)]
        shown, variables = self.dialect.prepare([*turns, _user_message("Hi")], tools, ToolChoice())
        return self._refuses(shown, variables) and not self._refuses(merge_into_results(shown), variables)

    @functools.cached_property
    def _roles(self) -> Roles:
        """The orders of roles that the template renders; all of them where it does not render a single message."""
        probe, answer = {"role": "system", "content": _PROBE}, {"role": "assistant", "content": "Hi"}
        user = _user_message("Hi")
        if not self._shows([_user_message(_PROBE)]):
            return Roles()
        first_system = self._shows([probe, user])
        begin = [{**probe, "content": "Hi"}] if first_system else []
        later_system = self._shows([*begin, user, probe, answer, user]) and self._shows(
            [*begin, user, answer, probe, user]
        )
        neighbors = self._shows([user, _user_message(_PROBE)]) and self._shows(
            [user, answer, {**answer, "content": _PROBE}, user]
        )
        return Roles(first_system, later_system, neighbors)

    def _shows(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the prompt contains the probe in the messages."""
        try:
            return _PROBE in "".join(self._rendered(messages, {}, generate=True))
        except BadRequestError:
            return False

    def _refuses(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> bool:
        try:
            self._rendered(messages, arguments, generate=True)
        except BadRequestError:
            return True
        return False

    @functools.cached_property
    def _wants(self) -> _Wants:
        """The form of messages in which the probe, one word, reaches the prompt.

        A template that exceeds the limits with one word always exceeds them. This is remembered, so that such a file
        costs the time only once.
        """
        for wants in (_Wants(), _Wants(parts=True), _Wants(nones=False), _Wants(parts=True, nones=False)):
            message = _in_parts(_user_message(_PROBE)) if wants.parts else _user_message(_PROBE)
            try:
                if _PROBE in self._process.render(self._source, self._variables([message], {}, wants, generate=True)):
                    return wants
            except OverLimitsError as error:
                self._over_limits = str(error)
                break
            except RefusedError:
                pass
        return _Wants()

    def _variables(
        self, messages: Sequence[Any], arguments: Mapping[str, Any], wants: _Wants, *, generate: bool
    ) -> dict[str, Any]:
        return {
            **({"tools": None, "documents": None} if wants.nones else {}),
            **{name: self._splitter.split(value) for name, value in arguments.items()},
            **self._special,
            "messages": messages,
            "add_generation_prompt": generate,
        }

    def pieces(self, text: str) -> list[str]:
        """`text` of a request in pieces that contain no text of a control token."""
        return self._splitter.pieces(text)

    def _text(self, variables: Mapping[str, Any]) -> str:
        try:
            if self._over_limits:
                raise OverLimitsError(self._over_limits)
            return self._process.render(self._source, variables)
        except RefusedError as error:
            problem = str(error).replace(self._splitter.marker, "")[:MAX_PROBLEM_CHARS]
            raise BadRequestError(f"the model's chat template refused these messages: {problem}", "messages") from None


def _user_message(text: str) -> Mapping[str, Any]:
    return {"role": "user", "content": text}


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """`message` with a text as the one part of its content."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
