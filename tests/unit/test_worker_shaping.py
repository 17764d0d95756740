"""How answers with tools and formats are parsed and constrained."""

from __future__ import annotations

from typing import Any

import pytest

from inference.protocol import Code
from inference.worker.answers.answer_shape import Shaping
from inference.worker.dialects.answer_parts import Tool, ToolChoice
from inference.worker.dialects.families.llama3 import Llama3
from inference.worker.dialects.forms import Form, Json, Literal, OneOf, Regex, Repeat
from inference.worker.dialects.forms import Sequence as Then
from inference.worker.worker_errors import BadRequestError
from inference.worker.worker_requests import GenerateRequest
from tests.rigs.fake_dialect import MarkDialect

TOOLS = (Tool("add"), Tool("sub"))
FORMAT = Regex("a+")
CONTROLS = {"<call>": 7, "<end>": 8}


def shaping(**dialect: Any) -> Shaping:
    return Shaping(MarkDialect(**dialect), CONTROLS.get)


def chat(mode: Any = "none", name: str | None = None, *, parallel: bool = True, **fields: Any) -> GenerateRequest:
    return GenerateRequest("chat", tools=TOOLS, choice=ToolChoice(mode, name, parallel), **fields)


def test_plain_answers_without_reasoning_are_not_parsed() -> None:
    for request in (chat(), GenerateRequest("completion")):
        shape = shaping(always_has_parts=False).shape(request)
        assert (shape.reading, shape.form) == (None, None)
    assert shaping().shape(GenerateRequest("completion")).reading is None


def test_answers_with_reasoning_are_parsed_from_the_end_of_the_prompt() -> None:
    reading = shaping().shape(chat(), "(").reading
    assert reading is not None
    parts = reading.parser().push("a)[f:1]")
    assert "".join(getattr(part, "text", "") for part in parts) == "a[f:1]", "no tools were given"


def test_each_choice_of_an_answer_has_its_own_parser() -> None:
    reading = shaping(always_has_parts=False).shape(chat("auto")).reading
    assert reading is not None
    assert reading.parser() is not reading.parser()


@pytest.mark.parametrize(
    ("choice", "most", "finish"),
    [
        (chat("auto"), None, "tool_calls"),
        (chat("required"), None, "tool_calls"),
        (chat("named", "add"), None, "stop"),
        (chat("auto", parallel=False), 1, "tool_calls"),
    ],
)
def test_finish_reason_after_calls_is_that_of_openai(choice: GenerateRequest, most: int | None, finish: str) -> None:
    reading = shaping().shape(choice).reading
    assert reading is not None
    assert (reading.max_calls, reading.after_calls) == (most, finish)


def test_control_tokens_are_found_by_their_text() -> None:
    reading = shaping(shows=frozenset({"<call>", "<nowhere>"}), ends=frozenset({"<end>"})).shape(chat()).reading
    assert reading is not None
    assert (reading.parsed, reading.ends) == ({7}, {8})


def formed(request: GenerateRequest, **dialect: Any) -> tuple[Form | None, str]:
    shape = shaping(**dialect).shape(request)
    return shape.form, shape.param


def test_format_applies_after_reasoning() -> None:
    assert formed(chat(form=FORMAT, form_param="regex")) == (Then((Literal("()"), FORMAT)), "regex")
    assert formed(GenerateRequest("completion", form=FORMAT, form_param="regex")) == (FORMAT, "regex")


def test_forced_call_is_a_form() -> None:
    add = Then((Literal("[add:"), Json(True), Literal("]")))
    sub = Then((Literal("[sub:"), Json(True), Literal("]")))
    assert formed(chat("named", "sub", parallel=False)) == (Repeat(OneOf((sub,)), 1, 1), "tools")
    forced = Repeat(OneOf((add, sub)), 1, None)
    assert formed(chat("required")) == (forced, "tools")
    assert formed(chat("required", form=FORMAT, form_param="regex")) == (forced, "tools"), "there is no content"
    assert formed(chat("auto")) == (None, "")


def test_answer_with_optional_tools_is_a_call_or_has_the_format() -> None:
    form, param = formed(chat("auto", form=FORMAT, form_param="regex"), always_has_parts=False)
    assert isinstance(form, OneOf)
    assert form.parts[0] == FORMAT
    assert isinstance(form.parts[1], Repeat)
    assert param == "regex"


@pytest.mark.parametrize(
    ("request_", "param"), [(chat("required"), "tool_choice"), (chat("auto", form=FORMAT, form_param="regex"), "regex")]
)
def test_forced_call_is_unsupported_by_dialects_without_a_form(request_: GenerateRequest, param: str) -> None:
    with pytest.raises(BadRequestError, match="marks") as caught:
        formed(request_, forces=False)
    assert (caught.value.param, caught.value.code) == (param, Code.UNSUPPORTED_PARAMETER)


def test_form_is_required_only_if_the_client_requested_it() -> None:
    """Optional calls have a form where possible."""
    loose, strict = chat("auto"), chat("auto", form=FORMAT, form_param="regex")
    assert not shaping().shape(loose).guaranteed
    assert shaping().shape(strict).guaranteed
    assert shaping().shape(chat("required")).guaranteed


def test_strict_tools_are_unsupported_by_dialects_without_a_form() -> None:
    request = GenerateRequest("chat", tools=(Tool("add"), Tool("sub", strict=True)), choice=ToolChoice("auto"))
    with pytest.raises(BadRequestError, match="marks") as caught:
        formed(request)
    assert (caught.value.param, caught.value.code) == ("tools", Code.UNSUPPORTED_PARAMETER)
    shape = Shaping(Llama3(), CONTROLS.get).shape(request, "<|end_header_id|>")
    assert shape.guaranteed
    assert shape.form is not None
