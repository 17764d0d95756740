"""Answers are divided into the same parts however their text arrives, and forms are parsed as they were forced."""
# ruff: noqa: RUF001 - the bars in DeepSeek's tokens are its own

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.worker.dialects import Dialect
from inference.worker.dialects.answer_parts import (
    CallArguments,
    CallBegin,
    Content,
    Part,
    Reasoning,
    Tool,
    ToolChoice,
)
from inference.worker.dialects.families.deepseek import DeepSeek
from inference.worker.dialects.families.dsml import Dsml
from inference.worker.dialects.families.harmony import Harmony
from inference.worker.dialects.families.hermes import Generic, Hermes
from inference.worker.dialects.families.llama3 import Llama3
from inference.worker.dialects.families.mistral import Mistral
from inference.worker.dialects.families.qwenxml import QwenXml
from inference.worker.dialects.forms import AnyText, Form, Json, Literal, Marker, OneOf, Regex, Repeat
from inference.worker.dialects.forms import Sequence as Then
from inference.worker.dialects.reading import ValueEnd
from inference.worker.dialects.thinking import BRACKETS, TAGS

pytestmark = pytest.mark.unmeasured

MOST = settings.default.max_examples if settings.default is not None else 100
SOME, FEW = settings(max_examples=MOST // 2), settings(max_examples=MOST // 5)
"""There are many families; shared properties are drawn for each of them."""

TOOLS = (Tool("now"), Tool("get_weather"), Tool("größe-1.5"))
HEADER = "<|start_header_id|>assistant<|end_header_id|>\n\n"
START = "<|start|>assistant"

FAMILIES: dict[str, tuple[Dialect, str]] = {
    "hermes": (Hermes(), "assistant\n"),
    "hermes, thinking": (Hermes(TAGS), "assistant\n"),
    "hermes, thought begun": (Hermes(TAGS), "assistant\n<think>\n"),
    "hermes, thought over": (Hermes(TAGS), "assistant\n<think>\n\n</think>\n\n"),
    "llama3": (Llama3(), HEADER),
    "llama3, thought begun": (Llama3(TAGS), HEADER + "<think>\n"),
    "mistral": (Mistral(), "[/INST]"),
    "mistral, lists": (Mistral(lists=True), "[/INST]"),
    "mistral, ids, thinking": (Mistral(BRACKETS, ids=True), "[/INST]"),
    "deepseek": (DeepSeek(), "<｜Assistant｜>"),
    "deepseek, fenced, thought begun": (DeepSeek(TAGS, fenced=True), "<｜Assistant｜><think>\n"),
    "harmony": (Harmony(), START),
    "harmony, thought begun": (Harmony(), f"{START}<|channel|>analysis<|message|>"),
    "dsml": (Dsml(), "<｜Assistant｜></think>"),
    "dsml, thought begun": (Dsml(TAGS, block="function_calls"), "<｜Assistant｜><think>"),
    "qwen-xml": (QwenXml(), "assistant\n"),
    "qwen-xml, thought begun": (QwenXml(TAGS), "assistant\n<think>\n"),
    "generic": (Generic(), "assistant: "),
}
TAGGED = {"qwen-xml", "deepseek-dsml"}
"""Dialects whose arguments are not written as JSON."""
EXACT = [name for name, (dialect, _) in FAMILIES.items() if not dialect.always_has_parts]
"""Families that show text that is not a call unchanged."""

MARKERS = [
    "<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]",
    "[CALL_ID]", "[ARGS]", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "```json\n", "```", "<|start|>assistant", "<|channel|>analysis",
    "<|channel|>commentary", "<|channel|>final", "<|message|>", "<|constrain|>json", "<|end|>", "<|call|>",
    "<|return|>", " to=functions.now", " to=assistant", " to=python",
    "<function=now>", "<function=", "<parameter=city>", "\n</parameter>", "</function>", "<｜DSML｜tool_calls>",
    '<｜DSML｜invoke name="now">', '<｜DSML｜parameter name="a" string="true">', "</｜DSML｜parameter>",
    '<｜DSML｜parameter name="b" string="false">', "</｜DSML｜invoke>", "</｜DSML｜tool_calls>",
]  # fmt: skip
WHOLE = [
    '{"name": "now", "arguments": {}}', '{"name": "get_weather", "parameters": {"city": "Zoë 😀 }\\" {"}}',
    '{"parameters": {"a": [{}, "]"]}, "name": "now"}', '{"type": "function", "name": "no\\u0077", "id": "x"}',
    '[{"name": "now", "arguments": {"<": 1}, "id": "a", "more": [1, {"x": "}"}], "n": -1.5e3}, {"name": "now"}]',
    '{"name": "now", "arguments": null}', '{"name": "get_weather", "parameters": "{\\"city\\": \\"Zoë\\"}"}',
    '{"arguments": "", "name": "now"}', '{"name": "now", "arguments": "text"}',
    '{"a": {"b": ["c\\\\", "d\\"}"]}}', "now", "function", "analysis",
]  # fmt: skip
BITS = [
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    ":",
    ",",
    ";",
    " ",
    "\n",
    "\n\n",
    "<",
    "名",
    "é",
    "😀",
    "text",
    '"name"',
    "null",
    "1",
]


def joined(parts: Sequence[Part]) -> list[Part]:
    """Adjacent parts of one kind joined."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, CallArguments) and isinstance(last, CallArguments) and part.index == last.index:
            found[-1] = CallArguments(part.index, last.text + part.text)
        elif isinstance(part, Content) and isinstance(last, Content):
            found[-1] = Content(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            found[-1] = Reasoning(last.text + part.text)
        else:
            found.append(part)
    return found


def read(name: str, pieces: Sequence[str], tools: Sequence[Tool] = TOOLS) -> list[Part]:
    dialect, opened = FAMILIES[name]
    parser = dialect.parser(tools=tools, opened=opened)
    return joined([part for piece in [*pieces] for part in parser.push(piece)] + [*parser.flush()])


def text_of(parts: Sequence[Part], kind: type[Content] | type[Reasoning]) -> str:
    return "".join(part.text for part in parts if isinstance(part, kind))


@st.composite
def answers(draw: st.DrawFn) -> str:
    """Text with many markers, complete and broken."""
    broken = st.sampled_from(MARKERS).flatmap(lambda text: st.integers(1, len(text)).map(lambda end: text[:end]))
    piece = st.one_of(st.sampled_from(MARKERS), st.sampled_from(WHOLE), st.sampled_from(BITS), broken)
    return "".join(draw(st.lists(piece, max_size=14)))


def divided(text: str, cuts: Sequence[int]) -> list[str]:
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[left:right] for left, right in itertools.pairwise(edges)]


@pytest.mark.parametrize("name", FAMILIES)
@SOME
@given(text=answers(), cuts=st.lists(st.integers(0, 400), max_size=8), with_tools=st.booleans())
def test_parts_do_not_depend_on_the_pieces_of_the_text(name: str, text: str, cuts: list[int], with_tools: bool) -> None:
    """At once, in pieces, character by character; calls are numbered in order and only they have arguments."""
    tools = TOOLS if with_tools else ()
    whole = read(name, [text], tools)
    assert read(name, divided(text, cuts), tools) == whole
    assert read(name, list(text), tools) == whole
    begun = [part.index for part in whole if isinstance(part, CallBegin)]
    assert begun == list(range(len(begun)))
    if not tools:
        assert begun == []
    for before, part in itertools.pairwise([None, *whole]):
        if isinstance(part, CallArguments):
            assert isinstance(before, CallBegin)
            assert before.index == part.index


@pytest.mark.parametrize("name", EXACT)
@SOME
@given(text=answers())
def test_answer_without_a_call_is_complete(name: str, text: str) -> None:
    parts = read(name, [text])
    if not any(isinstance(part, CallBegin) for part in parts):
        assert text_of(parts, Content) == text
    assert text_of(read(name, [text], ()), Content) == text


# --- forms ------------------------------------------------------------------------------------------------------------
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6) | st.sampled_from(MARKERS),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)
SPOKEN = st.text('ab é漢😀\n \t.<{}"\\[]`|:', max_size=12)

Leaves = list[tuple[Form, str]]


def sampled(draw: st.DrawFn, form: Form) -> Leaves:
    """A text that `form` permits, in pieces, each with the form that it comes from."""
    if isinstance(form, (Literal, Marker)):
        return [(form, form.text)]
    if isinstance(form, Json):
        value = draw(st.dictionaries(st.text(max_size=3), VALUES, max_size=2))
        return [(form, json.dumps(value, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 1]))))]
    if isinstance(form, Regex):
        return [(form, draw(st.from_regex(form.pattern, fullmatch=True)))]
    if isinstance(form, AnyText):
        return [(form, draw(SPOKEN))]
    if isinstance(form, Then):
        return [leaf for part in form.parts for leaf in sampled(draw, part)]
    if isinstance(form, OneOf):
        return sampled(draw, draw(st.sampled_from(form.parts)))
    assert isinstance(form, Repeat)
    count = draw(st.integers(form.least, 2 if form.most is None else form.most))
    between = [] if form.between is None else [form.between]
    order = [part for _ in range(count) for part in (*between, form.part)]
    return [leaf for part in order[len(between) if count else 0 :] for leaf in sampled(draw, part)]


def called(parts: Sequence[Part]) -> list[str]:
    return [part.text for part in parts if isinstance(part, CallArguments)]


FORCING = [name for name, (dialect, _) in FAMILIES.items() if dialect.name not in TAGGED]
FREE = [name for name in FORCING if not name.startswith("llama3")]


def form_of(name: str, choice: ToolChoice) -> Form:
    dialect, opened = FAMILIES[name]
    form = dialect.form(TOOLS, choice, opened=opened)
    assert form is not None
    return form


def thoughts(leaves: Leaves) -> str:
    """The reasoning of a sample: all free text before the answer."""
    return "".join(text for form, text in leaves if isinstance(form, AnyText))


@pytest.mark.parametrize("name", FORCING)
@FEW
@given(data=st.data(), parallel=st.booleans())
def test_forced_calls_are_parsed_as_calls(name: str, data: st.DataObject, parallel: bool) -> None:
    """The same number of calls with exact arguments; other text is reasoning or an announcement."""
    leaves = sampled(data.draw, form_of(name, ToolChoice("required", parallel=parallel)))
    parts = read(name, ["".join(text for _, text in leaves)])
    written = [text for form, text in leaves if isinstance(form, Json)]
    assert called(parts) == written
    assert len(written) == 1 or parallel
    assert {part.name for part in parts if isinstance(part, CallBegin)} <= {tool.name for tool in TOOLS}
    if not name.startswith("harmony"):
        assert text_of(parts, Content) == ""
        assert text_of(parts, Reasoning) == thoughts(leaves).strip(" \t\r\n")


@pytest.mark.parametrize("name", FORCING)
@FEW
@given(data=st.data())
def test_only_the_named_tool_is_called(name: str, data: st.DataObject) -> None:
    leaves = sampled(data.draw, form_of(name, ToolChoice("named", "get_weather")))
    parts = read(name, ["".join(text for _, text in leaves)])
    assert [part.name for part in parts if isinstance(part, CallBegin)] == ["get_weather"]


@pytest.mark.parametrize("name", FREE)
@FEW
@given(data=st.data())
def test_optional_calls_are_parsed_as_calls(name: str, data: st.DataObject) -> None:
    """Text before them is shown."""
    leaves = sampled(data.draw, form_of(name, ToolChoice("auto")))
    parts = read(name, ["".join(text for _, text in leaves)])
    assert called(parts) == [text for form, text in leaves if isinstance(form, Json)]
    shown = text_of(parts, Reasoning) + text_of(parts, Content)
    assert sorted("".join(shown.split())) == sorted("".join(thoughts(leaves).split()))


@pytest.mark.parametrize("name", FAMILIES)
@FEW
@given(data=st.data())
def test_constrained_answer_is_content(name: str, data: st.DataObject) -> None:
    dialect, opened = FAMILIES[name]
    leaves = sampled(data.draw, dialect.wrap(Json(True), opened=opened))
    parts = read(name, ["".join(text for _, text in leaves)], ())
    assert text_of(parts, Content) == leaves[-1][1]
    assert "".join(text_of(parts, Reasoning).split()) == "".join(thoughts(leaves).split())


ARGUMENTS = st.dictionaries(
    st.text("abé", min_size=1, max_size=3), SPOKEN.filter(lambda text: "<" not in text), max_size=3
)


@pytest.mark.parametrize("name", [name for name, (dialect, _) in FAMILIES.items() if dialect.name in TAGGED])
@FEW
@given(given_arguments=ARGUMENTS, count=st.integers(1, 2))
def test_tagged_arguments_are_parsed_exactly(name: str, given_arguments: dict[str, str], count: int) -> None:
    """Exact texts, as JSON."""
    if name.startswith("dsml"):
        body = "".join(
            f'<｜DSML｜parameter name="{key}" string="true">{given_arguments[key]}</｜DSML｜parameter>\n'
            for key in given_arguments
        )
        text = f'<｜DSML｜invoke name="now">\n{body}</｜DSML｜invoke>\n' * count
    else:
        body = "".join(f"<parameter={key}>\n{given_arguments[key]}\n</parameter>\n" for key in given_arguments)
        text = f"<tool_call>\n<function=now>\n{body}</function>\n</tool_call>\n" * count
    tool = Tool("now", parameters={"properties": {key: {"type": "string"} for key in given_arguments}})
    begun = "</think>\n" if "thought" in name else ""
    parts = read(name, list(begun + text), (tool,))
    assert [json.loads(arguments) for arguments in called(parts)] == [given_arguments] * count
    assert text_of(parts, Content).strip() == ""


BEFORE = {
    "hermes": '<tool_call>\n{"name": "now", "arguments": ',
    "llama3": '{"name": "now", "parameters": ',
    "mistral": "[TOOL_CALLS]now[ARGS]",
    "mistral, lists": '[TOOL_CALLS][{"name": "now", "arguments": ',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>",
    "harmony": "<|channel|>commentary to=functions.now <|constrain|>json<|message|>",
}


@pytest.mark.parametrize("name", BEFORE)
@FEW
@given(value=st.dictionaries(st.text(max_size=5), VALUES, max_size=4))
def test_arguments_are_streamed_at_once(name: str, value: dict[str, Any]) -> None:
    """Every character of them at once."""
    dialect, opened = FAMILIES[name]
    parser = dialect.parser(tools=TOOLS, opened=opened)
    assert parser.push(BEFORE[name]) == []
    text = json.dumps(value, ensure_ascii=False)
    assert parser.push(text[0]) == [CallBegin(0, "now"), CallArguments(0, text[0])]
    for char in text[1:]:
        assert parser.push(char) == [CallArguments(0, char)]


@given(value=VALUES, after=st.text(max_size=5), cuts=st.lists(st.integers(0, 100)))
def test_end_of_a_json_value_is_that_of_a_json_parser(value: Any, after: str, cuts: list[int]) -> None:
    if not isinstance(value, (dict, list, str)):
        value = [value]
    text = json.dumps(value, ensure_ascii=False)
    end, at, over = ValueEnd(), 0, False
    for piece in divided(text + after, cuts):
        stop, over = end.scan(piece, 0)
        at += stop
        if over:
            break
    assert over
    assert end.whole
    assert at == len(text)
