"""Decides how the answers to a request are parsed and which form they must have."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from inference.protocol import Code
from inference.worker.answers.structured_answer import Reading
from inference.worker.dialects import Dialect
from inference.worker.dialects.answer_parts import Tool, ToolChoice
from inference.worker.dialects.forms import Form, OneOf
from inference.worker.worker_errors import BadRequestError
from inference.worker.worker_requests import GenerateRequest

_CALL_PREFIX = "call_"


def new_call_id() -> str:
    """An id of a tool call, for families that write none."""
    return _CALL_PREFIX + secrets.token_hex(12)


@dataclass(frozen=True, slots=True)
class Shape:
    """How the answers of a request are parsed (`reading`, None: as plain text), and their form (None: any text).

    `param` is the parameter that requires the form. Without `guaranteed` an answer need not have the form.
    """

    reading: Reading | None = None
    form: Form | None = None
    param: str = ""
    guaranteed: bool = True


class Shaping:
    """Shapes for one model. Thread-safe. Without a dialect there is no chat."""

    def __init__(self, dialect: Dialect | None, token_of: Callable[[str], int | None]) -> None:
        """`token_of` returns the control token with a text, None where the vocabulary has none."""
        self._dialect = dialect
        self._token_of = token_of

    def shape(self, request: GenerateRequest, opened: str = "") -> Shape:
        """The shape for the request's tools and formats, for answers that begin after `opened`.

        Raises BadRequestError where the dialect cannot enforce them.
        """
        form, param = self._form(request, opened)
        is_free = request.choice.mode == "auto" and request.form is None
        guaranteed = not is_free or any(tool.strict for tool in request.tools)
        return Shape(self._reading(request, opened), form, param, guaranteed)

    def _reading(self, request: GenerateRequest, opened: str) -> Reading | None:
        dialect, choice = self._dialect, request.choice
        tools = request.tools if choice.mode != "none" else ()
        if request.kind != "chat" or dialect is None or not (tools or dialect.always_has_parts):
            return None
        return Reading(
            parser=lambda: dialect.parser(tools=tools, opened=opened),
            call_id=new_call_id,
            parsed=self._parsed,
            ends=self._ends,
            max_calls=None if choice.parallel else 1,
            # As in OpenAI's API: "stop" where the request names the function, else "tool_calls".
            after_calls="stop" if choice.mode == "named" else "tool_calls",
            forced=choice.mode in ("required", "named"),
        )

    @functools.cached_property
    def _parsed(self) -> frozenset[int]:
        return self._tokens(self._dialect.shows if self._dialect is not None else ())

    @functools.cached_property
    def _ends(self) -> frozenset[int]:
        return self._tokens(self._dialect.ends if self._dialect is not None else ())

    def _tokens(self, texts: Collection[str]) -> frozenset[int]:
        return frozenset(token for text in texts if (token := self._token_of(text)) is not None)

    def _form(self, request: GenerateRequest, opened: str) -> tuple[Form | None, str]:
        """The form and the parameter it comes from. With optional tools an answer is a tool call or has the
        required format; with a forced call the answer has no content, and the format is ignored.
        """
        dialect, choice = self._dialect, request.choice
        if request.kind != "chat" or dialect is None:
            return request.form, request.form_param
        if choice.mode in ("required", "named"):
            return self._calls(dialect, request.tools, choice, opened, "tool_choice"), "tools"
        calls = dialect.form(request.tools, choice, opened=opened) if choice.mode == "auto" else None
        if calls is None and choice.mode == "auto" and any(tool.strict for tool in request.tools):
            raise BadRequestError(
                f"tool calls of this model ({dialect.name}) cannot be restricted to schemas; remove strict",
                "tools",
                code=_UNSUPPORTED,
            )
        if request.form is None:
            return calls, "tools" if calls is not None else ""
        shaped = dialect.wrap(request.form, opened=opened)
        if choice.mode == "none":
            return shaped, request.form_param
        must = ToolChoice("required", None, choice.parallel)
        called = self._calls(dialect, request.tools, must, opened, request.form_param)
        return OneOf((shaped, called)), request.form_param

    def _calls(self, dialect: Dialect, tools: Sequence[Tool], choice: ToolChoice, opened: str, param: str) -> Form:
        form = dialect.form(tools, choice, opened=opened)
        if form is None:
            raise BadRequestError(
                f"tool calls of this model ({dialect.name}) cannot be forced; remove {param}", param, code=_UNSUPPORTED
            )
        return form


_UNSUPPORTED = Code.UNSUPPORTED_PARAMETER
