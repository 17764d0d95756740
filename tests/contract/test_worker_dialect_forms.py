"""The forms that dialects force match the masks, in vocabularies with and without the tokens of their families."""
# ruff: noqa: RUF001 - the bars in DeepSeek's tokens are its own

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from inference.worker.constraints import Compiler
from inference.worker.dialects import Dialect
from inference.worker.dialects.answer_parts import CallBegin, Tool, ToolChoice
from inference.worker.dialects.families.deepseek import DeepSeek
from inference.worker.dialects.families.dsml import Dsml
from inference.worker.dialects.families.harmony import Harmony
from inference.worker.dialects.families.hermes import Generic, Hermes
from inference.worker.dialects.families.llama3 import Llama3
from inference.worker.dialects.families.mistral import Mistral
from inference.worker.dialects.families.qwenxml import QwenXml
from inference.worker.dialects.forms import Form, Json
from inference.worker.dialects.thinking import BRACKETS, TAGS


class Vocabulary:
    """Single bytes, marker tokens, which are control tokens or plain ones, and one end token."""

    def __init__(self, markers: Iterable[str], *, control: bool = False) -> None:
        self._markers = sorted(markers, key=len, reverse=True)
        self._are_control = control
        self.n_vocab = 256 + len(self._markers) + 1
        self.end = self.n_vocab - 1
        self.end_tokens = frozenset({self.end})
        self._pattern = re.compile("|".join(map(re.escape, self._markers)) or "(?!)")

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Bytes of a token."""
        if token < 256:
            return bytes([token])
        shown = special or (token != self.end and not self._are_control)
        return [*self._markers, "</s>"][token - 256].encode() if shown else b""

    def tokens(self, text: str) -> list[int]:
        """The text with markers as tokens if there are any, and the end."""
        found, at = [], 0
        for match in self._pattern.finditer(text):
            found += [*text[at : match.start()].encode(), 256 + self._markers.index(match[0])]
            at = match.end()
        return [*found, *text[at:].encode(), self.end]


TOOLS = (
    Tool("get_weather", parameters={"properties": {"city": {"type": "string"}}, "required": ["city"]}),
    Tool("now"),
)
PARIS = '{"city": "Paris <tool_call> }"}'
START = "<|start|>assistant"

AUTO, ONE, MANY = ToolChoice(), ToolChoice("required", parallel=False), ToolChoice("required")
NAMED = ToolChoice("named", "now")

HERMES = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
WEATHER, NOW = HERMES.format("get_weather", PARIS), HERMES.format("now", "{}")
OLD = '[TOOL_CALLS][{{"name": "now", "arguments": {{}}{}}}]'
NEW = "[TOOL_CALLS]get_weather[ARGS]" + PARIS
NEWER = "[TOOL_CALLS]now[CALL_ID]{}[ARGS]{{}}"
FENCED = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
BARE = "<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>" + PARIS + "<｜tool▁call▁end｜>"
CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
THOUGHT = f"<|channel|>analysis<|message|>Now {{}}!<|end|>{START}"
CALL = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
ROLE = " to=functions.get_weather<|channel|>commentary json<|message|>" + PARIS
FINAL = "<|channel|>final<|message|>"

XML = "<tool_call>\n<function={}>\n{}</function>\n</tool_call>"
XML_NOW = XML.format("now", "")
XML_WEATHER = XML.format("get_weather", "<parameter=city>\nParis <tool_call> }}\n\n</parameter>\n")
DSML, DSML_END = "<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>"
DSML_NOW = '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n'
DSML_WEATHER = (
    '<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Paris\n</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
)

ROWS: list[tuple[Dialect, str, ToolChoice, list[str], list[str]]] = [
    (Hermes(), "", MANY, [NOW, f"{WEATHER}\n{NOW}\n{NOW}"], ["", f"So {NOW}", f"{NOW} so", NOW[:-1], NOW * 2]),
    (Hermes(), "", ONE, [NOW, WEATHER], [f"{NOW}\n{NOW}"]),
    (Hermes(), "", NAMED, [NOW], [WEATHER, f"{NOW}\n{NOW}", ""]),
    (Hermes(), "", AUTO, ["", "Hi <tool", "{}\n", NOW, f"So: {WEATHER}\n{NOW}"], ["<tool_call>", f"{NOW} so"]),
    (Hermes(TAGS), "", MANY, [NOW, f"<think>\nHm. <\n</think>\n\n{NOW}"], [f"<think>{NOW}", "<think></think>"]),
    (Hermes(TAGS), "<think>", MANY, [f"Hm.</think>{NOW}", f"Hm.</think>\n\n{WEATHER}"], [NOW, f"</think> So {NOW}"]),
    (Hermes(TAGS), "</think>", MANY, [NOW], [f"<think></think>{NOW}"]),
    (Hermes(TAGS), "", AUTO, ["Hi", "<think>\nHm.</think>\n\nHi", f"<think>Hm.</think>Hi {NOW}"], ["<tool_call>"]),
    (Hermes(TAGS), "<think>", AUTO, ["</think>", f"Hm.</think>\n\nHi {NOW}"], ["Hm.", f"</think>{NOW} so"]),
    (Generic(), "", MANY, [NOW, f"{WEATHER}\n{NOW}"], ["Hi"]),
    (Llama3(), "", MANY, ['{"name": "now", "parameters": {}}'], ["", '{"name": "x", "parameters": {}}', "Hi"]),
    (Mistral(), "", MANY, [NEW, f"{NEW}[TOOL_CALLS]now[ARGS]{{}}"], ["", f"So {NEW}", f"{NEW} "]),
    (Mistral(), "", AUTO, ["", "Hi [", NEW, f"So {NEW}{NEW}"], ["[TOOL_CALLS]", f"{NEW} so"]),
    (Mistral(ids=True), "", ONE, [NEWER.format("abcDEF123")], [NEW, NEWER.format("a")]),
    (
        Mistral(lists=True), "", MANY,
        [OLD.format(""), OLD.format(', "id": "abcDEF123"'), OLD.format("}, {\"name\": \"now\", \"arguments\": {}")],
        ["", "[TOOL_CALLS][]", OLD.format(', "id": "a"')],
    ),
    (Mistral(BRACKETS), "", MANY, [NEW, f"[THINK]a[b[/THINK]\n{NEW}"], ["[THINK]"]),
    (DeepSeek(), "", MANY, [CALLS + BARE * 3 + CALLS_END], [CALLS + FENCED + CALLS_END, CALLS + CALLS_END, BARE]),
    (DeepSeek(fenced=True), "", MANY, [f"{CALLS}{FENCED}\n{FENCED}{CALLS_END}"], [CALLS + BARE + CALLS_END]),
    (DeepSeek(TAGS), "<think>\n", ONE, [f"Hm <\n</think>\n\n{CALLS}{BARE}{CALLS_END}"], [CALLS + BARE + CALLS_END]),
    (DeepSeek(), "", AUTO, ["Hi", f"So:\n{CALLS}{BARE}{CALLS_END}"], [CALLS + BARE]),
    (QwenXml(), "", MANY, [XML_NOW, f"{XML_WEATHER}\n{XML_NOW}"], ["", XML.format("get_weather", ""), f"{XML_NOW} so"]),
    (QwenXml(), "", NAMED, [XML_NOW], [XML_WEATHER, f"{XML_NOW}\n{XML_NOW}"]),
    (QwenXml(TAGS), "<think>", AUTO, ["</think>Hi", f"Hm.</think>So: {XML_WEATHER}"], ["Hm.", f"</think>{XML_NOW} so"]),
    (Dsml(), "", MANY, [DSML + DSML_NOW + DSML_WEATHER + DSML_END], ["", DSML + DSML_END, DSML_NOW, DSML + DSML_NOW]),
    (Dsml(), "", AUTO, ["Hi", f"So:\n\n{DSML}{DSML_WEATHER}{DSML_END}"], [DSML + DSML_NOW]),
    (Dsml(TAGS, block="function_calls"), "<think>", ONE, [
        f"Hm</think>{DSML}{DSML_NOW}{DSML_END}".replace("tool_calls", "function_calls")], [DSML + DSML_NOW + DSML_END]),
    (Harmony(), START, MANY, [CALL, ROLE, THOUGHT + CALL, THOUGHT * 2 + ROLE], [FINAL + "Hi", THOUGHT, CALL + THOUGHT]),
    (Harmony(), START, NAMED, [CALL, THOUGHT + CALL], [ROLE]),
    (Harmony(), START, AUTO, [CALL, THOUGHT + FINAL + "Hi {}", FINAL, THOUGHT + ROLE], ["Hi", THOUGHT]),
    (Harmony(), f"{START}<|channel|>analysis<|message|>", ONE, [f" so<|end|>{START}{CALL}"], [CALL]),
]  # fmt: skip

MARKERS = [
    "<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]",
    CALLS, CALLS_END, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<|start|>", "<|channel|>",
    "<|constrain|>", "<|message|>", "<|end|>", "｜DSML｜", "<|python_tag|>",
]  # fmt: skip
VOCABULARIES = {"control": Vocabulary(MARKERS, control=True), "plain": Vocabulary(MARKERS), "none": Vocabulary(())}
"""By the kind of their markers: GGUFs have them as control tokens, as plain tokens, or not at all."""
COMPILERS = {name: Compiler(vocabulary) for name, vocabulary in VOCABULARIES.items()}


def tried(dialect: Dialect) -> list[str]:
    """Vocabularies of the models of a family."""
    return ["control"] if dialect.name == "harmony" else [*VOCABULARIES]


def accepts(name: str, form: Form, text: str) -> bool:
    """Whether the text is a complete answer of the form."""
    vocabulary = VOCABULARIES[name]
    mask = COMPILERS[name].compile(form, "tools").start()
    for token in vocabulary.tokens(text):
        logits = np.zeros(vocabulary.n_vocab, np.float32)
        mask.apply(logits)
        if not np.isfinite(logits[token]):
            return False
        if token != vocabulary.end:
            mask.accept(token)
    return True


@pytest.mark.parametrize(("row", "name"), [(row, name) for row in range(len(ROWS)) for name in tried(ROWS[row][0])])
def test_forced_calls_have_the_format_of_their_family(row: int, name: str) -> None:
    """Complete answers pass, others do not; a marker within a JSON string is text."""
    dialect, opened, choice, whole, others = ROWS[row]
    form = dialect.form(TOOLS, choice, opened=opened)
    assert form is not None
    # In such a vocabulary the marker would be a control token.
    texts = [text.replace(" <tool_call> ", " ") for text in whole] if name == "control" else whole
    assert [text for text in texts if not accepts(name, form, text)] == []
    assert [text for text in others if accepts(name, form, text)] == []


STRICT = tuple(replace(tool, strict=True) for tool in TOOLS)
TAG = "<|python_tag|>"
HEADER = "<|start_header_id|>assistant<|end_header_id|>\n\n"
LLAMA, LLAMA_NOW = '{"name": "get_weather", "parameters": {"city": "Rome"}}', '{"name": "now", "parameters": {}}'
NO_CITY = [LLAMA.replace("city", "town"), LLAMA.replace('"Rome"', "1"), LLAMA.replace("get_weather", "other")]


@pytest.mark.parametrize("name", VOCABULARIES)
@pytest.mark.parametrize(
    ("dialect", "opened", "whole", "others"),
    [
        (Llama3(), HEADER, ["", " \n", "Hi {}", "Hi <|python_", LLAMA, LLAMA_NOW, TAG + LLAMA, f"So: {TAG}{LLAMA_NOW}"],
         [*NO_CITY, *(TAG + call for call in NO_CITY), "{}", " {", f"{LLAMA} so", f"{TAG}print()", f"Hi {TAG}"]),
        (Llama3(), f"{HEADER}So", ["{}", LLAMA, NO_CITY[0], TAG + LLAMA], [TAG + call for call in NO_CITY]),
        (Llama3(TAGS), HEADER, [f"<think>{{}}</think>{LLAMA}", "<think>Hm</think>\n\nHi", LLAMA, "Hi"],
         [f"<think>Hm</think>{NO_CITY[0]}", NO_CITY[0]]),
        (Llama3(TAGS), f"{HEADER}<think>\n", [f"Hm</think>{LLAMA}"], [f"Hm</think>{NO_CITY[0]}"]),
    ],
)  # fmt: skip
def test_strict_tools_are_enforced_for_calls_without_tags(
    name: str, dialect: Dialect, opened: str, whole: list[str], others: list[str]
) -> None:
    """A call of a strict tool has its schema, with and without a tag; all other text is free."""
    form = dialect.form(STRICT, AUTO, opened=opened)
    assert form is not None
    assert [text for text in whole if not accepts(name, form, text)] == []
    assert [text for text in others if accepts(name, form, text)] == []
    for text in whole:
        parser = dialect.parser(tools=STRICT, opened=opened)
        parts = [*parser.push(text), *parser.flush()]
        is_call = any(isinstance(part, CallBegin) for part in parts)
        assert is_call == (text.endswith("}}") and not (opened.endswith("So") and TAG not in text))


@pytest.mark.parametrize("dialect", {row[0].name: row[0] for row in ROWS}.values(), ids=lambda dialect: dialect.name)
def test_every_family_enforces_strict_tools(dialect: Dialect) -> None:
    opened = START if dialect.name == "harmony" else HEADER if dialect.name == "llama3" else ""
    count = Tool("count", parameters={"properties": {"to": {"type": "integer"}}, "required": ["to"]}, strict=True)
    form = dialect.form((count,), AUTO, opened=opened)
    assert "strict=True" in repr(form)


VALUES = Tool(
    "run",
    parameters={
        "properties": {
            "mode": {"enum": ["fast", "slow"]},
            "count": {"type": "integer"},
            "deep": {"$ref": "#/$defs/deep"},
            "maybe": {"type": ["string", "null"]},
        },
        "required": ["mode"],
        "$defs": {"deep": {"type": "object"}},
    },
)


def run(*arguments: tuple[str, str], dsml: str = "") -> str:
    """A call of `run` in either notation; in `dsml` each argument is marked as text or not."""
    if not dsml:
        return XML.format("run", "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments))
    parts = "".join(
        f'<｜DSML｜parameter name="{key}" string="{"true" if kind == "t" else "false"}">{value}</｜DSML｜parameter>\n'
        for (key, value), kind in zip(arguments, dsml, strict=True)
    )
    return f'{DSML}<｜DSML｜invoke name="run">\n{parts}</｜DSML｜invoke>\n{DSML_END}'


MODE, COUNT, DEEP, MAYBE = ("mode", "slow"), ("count", "12"), ("deep", '{"a": 1}'), ("maybe", "null")
TAGGED: list[tuple[Dialect, Tool, list[str], list[str]]] = [
    (
        QwenXml(), VALUES,
        [run(MODE), run(MODE, COUNT, DEEP, MAYBE), run(MODE, ("maybe", "any text"))],
        [run(), run(COUNT), run(("mode", "no")), run(MODE, ("count", "x")), run(MODE, ("deep", "[]")), run(("x", "y"))],
    ),
    (
        Dsml(), VALUES,
        [run(MODE, dsml="t"), run(MODE, COUNT, DEEP, MAYBE, dsml="tjjj"), run(MODE, MAYBE, dsml="tt")],
        [run(MODE, dsml="j"), run(MODE, COUNT, dsml="tt"), run(MODE, ("maybe", "1"), dsml="tj")],
    ),
    (QwenXml(), Tool("run", parameters={}), [run(), run(("any", "thing"))], [run(("a>b", "c"))]),
    (Dsml(), Tool("run", parameters={}), [run(("any", "thing"), dsml="t")], [run(("any", "1"), dsml="j")]),
    (Dsml(), Tool("run", parameters={"properties": {"a": True}}), [run(("a", "[]"), dsml="j")], [run(COUNT, dsml="j")]),
    (QwenXml(), Tool("run", parameters={"additionalProperties": False}), [run()], [run(("any", "thing"))]),
    (QwenXml(), Tool("run", parameters={"properties": {}}), [run()], [run(("any", "thing"))]),
    (
        QwenXml(), Tool("run", parameters={"properties": {}, "additionalProperties": True}),
        [run(), run(("any", "thing"))], [],
    ),
    (
        QwenXml(), Tool("run", parameters={"properties": {"deep": {"type": "object", "properties": {"a": True}}}}),
        [run(("deep", '{"a": 1}'))], [run(("deep", '{"a": 1, "b": 2}'))],
    ),
]  # fmt: skip


@pytest.mark.parametrize("row", range(len(TAGGED)))
def test_tagged_arguments_follow_the_schema(row: int) -> None:
    """Required arguments exist, in the order of the schema, and only declared ones if it declares some."""
    dialect, tool, whole, others = TAGGED[row]
    form = dialect.form((tool,), ONE, opened="")
    assert form is not None
    assert [text for text in whole if not accepts("plain", form, text)] == []
    assert [text for text in others if accepts("plain", form, text)] == []


WRAPPED: list[tuple[Dialect, str, list[str], list[str]]] = [
    (Hermes(), "", ["[1]"], ["Hi", ""]),
    (Hermes(TAGS), "", ["[1]", "<think>\nHm</think>\n\n[1]"], ["<think>[1]"]),
    (Hermes(TAGS), "<think>\n", ["Hm</think>\n\n[1]", "</think>[1]"], ["[1]"]),
    (Hermes(TAGS), "</think>\n\n", ["[1]"], ["</think>[1]"]),
    (
        Harmony(), START,
        [FINAL + "[1]", THOUGHT + FINAL + "[1]", THOUGHT + "<|channel|>final <|constrain|>json<|message|>[1]"],
        ["[1]", FINAL, THOUGHT, CALL],
    ),
    (Harmony(), START + FINAL, ["[1]"], [FINAL + "[1]"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "name"), [(row, name) for row in range(len(WRAPPED)) for name in tried(WRAPPED[row][0])]
)
def test_constrained_answers_have_the_format_of_their_family(row: int, name: str) -> None:
    dialect, opened, whole, others = WRAPPED[row]
    form = dialect.wrap(Json({"type": "array"}), opened=opened)
    assert [text for text in whole if not accepts(name, form, text)] == []
    assert [text for text in others if accepts(name, form, text)] == []
