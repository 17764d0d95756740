"""What follows for an answer from tools and formats: how it is read, what bounds it, what cannot be promised."""

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


def test_plain_answers_of_models_that_do_not_reason_are_not_read_at_all() -> None:
    for request in (chat(), GenerateRequest("completion")):
        shape = shaping(reasons=False).shape(request)
        assert (shape.reading, shape.form) == (None, None)
    assert shaping().shape(GenerateRequest("completion")).reading is None


def test_a_model_that_reasons_is_always_read() -> None:
    """With the tools that may be called, and from where the prompt left off."""
    reading = shaping().shape(chat(), "(").reading
    assert reading is not None
    parts = reading.parser().push("a)[f:1]")
    assert "".join(getattr(part, "text", "") for part in parts) == "a[f:1]", "no calls were asked for"


def test_each_choice_has_a_parser_of_its_own() -> None:
    reading = shaping(reasons=False).shape(chat("auto")).reading
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
def test_calls_end_as_openai_ends_them(choice: GenerateRequest, most: int | None, finish: str) -> None:
    reading = shaping().shape(choice).reading
    assert reading is not None
    assert (reading.most_calls, reading.after_calls) == (most, finish)


def test_control_tokens_are_found_by_their_texts() -> None:
    reading = shaping(shows=frozenset({"<call>", "<nowhere>"}), ends=frozenset({"<end>"})).shape(chat()).reading
    assert reading is not None
    assert (reading.shown, reading.ends) == ({7}, {8})


def asked(request: GenerateRequest, **dialect: Any) -> tuple[Form | None, str]:
    shape = shaping(**dialect).shape(request)
    return shape.form, shape.param


def test_a_format_stands_after_the_thought() -> None:
    assert asked(chat(form=FORMAT, form_param="regex")) == (Then((Literal("()"), FORMAT)), "regex")


def test_a_completion_has_no_family_and_its_format_stands_alone() -> None:
    assert asked(GenerateRequest("completion", form=FORMAT, form_param="regex")) == (FORMAT, "regex")


def test_a_forced_call_is_a_form() -> None:
    add = Then((Literal("[add:"), Json(True), Literal("]")))
    sub = Then((Literal("[sub:"), Json(True), Literal("]")))
    assert asked(chat("named", "sub", parallel=False)) == (Repeat(OneOf((sub,)), 1, 1), "tools")
    forced = Repeat(OneOf((add, sub)), 1, None)
    assert asked(chat("required")) == (forced, "tools")
    assert asked(chat("required", form=FORMAT, form_param="regex")) == (forced, "tools"), "no content, no format"
    assert asked(chat("auto")) == (None, "")


def test_with_tools_to_choose_from_an_answer_is_a_call_or_has_the_format() -> None:
    form, param = asked(chat("auto", form=FORMAT, form_param="regex"), reasons=False)
    assert isinstance(form, OneOf)
    assert form.parts[0] == FORMAT
    assert isinstance(form.parts[1], Repeat)
    assert param == "regex"


@pytest.mark.parametrize(
    ("request_", "param"),
    [(chat("required"), "tool_choice"), (chat("auto", form=FORMAT, form_param="regex"), "regex")],
)
def test_a_family_whose_calls_cannot_be_forced_says_so(request_: GenerateRequest, param: str) -> None:
    with pytest.raises(BadRequestError, match="marks") as caught:
        asked(request_, forces=False)
    assert (caught.value.param, caught.value.code) == (param, Code.UNSUPPORTED_PARAMETER)


def test_only_what_was_asked_for_is_promised() -> None:
    """Calls that the model may make are held to their shape where that is possible, strict ones always."""
    loose, strict = chat("auto"), chat("auto", form=FORMAT, form_param="regex")
    assert not shaping().shape(loose).promised
    assert shaping().shape(strict).promised
    assert shaping().shape(chat("required")).promised


def test_a_family_that_cannot_hold_strict_tools_says_so() -> None:
    """What is promised has a form."""
    request = GenerateRequest("chat", tools=(Tool("add"), Tool("sub", strict=True)), choice=ToolChoice("auto"))
    with pytest.raises(BadRequestError, match="marks") as caught:
        asked(request)
    assert (caught.value.param, caught.value.code) == ("tools", Code.UNSUPPORTED_PARAMETER)
    shape = Shaping(Llama3(), CONTROLS.get).shape(request, "<|end_header_id|>")
    assert shape.promised
    assert shape.form is not None
