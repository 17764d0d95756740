"""Dialects: transcripts of calls and reasoning, detection from the template, messages for templates, forms."""
# ruff: noqa: RUF001 - the bars in DeepSeek's tokens are its own

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from inference.worker.dialects import Dialect, detect
from inference.worker.dialects.answer_parts import CallArguments, CallBegin, Content, Part, Reasoning, Tool, ToolChoice
from inference.worker.dialects.conversation import merge_into_results
from inference.worker.dialects.families.deepseek import DeepSeek
from inference.worker.dialects.families.dsml import Dsml
from inference.worker.dialects.families.harmony import Harmony
from inference.worker.dialects.families.hermes import Generic, Hermes
from inference.worker.dialects.families.llama3 import Llama3
from inference.worker.dialects.families.mistral import Mistral
from inference.worker.dialects.families.qwenxml import QwenXml
from inference.worker.dialects.forms import AnyText, Json, Literal, Marker, OneOf, Regex
from inference.worker.dialects.forms import Sequence as Then
from inference.worker.dialects.tagged import kind_of, properties_of, types_of
from inference.worker.dialects.thinking import BRACKETS, TAGS
from tests.rigs.chat_templates import chat_template

GOLDEN = Path(__file__).with_name("golden") / "dialects"

WEATHER = Tool("get_weather", "Weather of a city", {"type": "object", "properties": {"city": {"type": "string"}}})
NOW = Tool("now")
RUN = Tool(
    "run",
    parameters={
        "type": "object",
        "properties": {
            "text": {"enum": ["12", "13"]},
            "count": {"type": "integer"},
            "deep": {"$ref": "#/$defs/deep"},
            "maybe": {"anyOf": [{"type": "string"}, {"const": None}]},
            "sure": {"type": "boolean"},
            "free": True,
        },
        "required": ["text"],
        "$defs": {"deep": {"type": "object"}},
    },
)
TOOLS = (WEATHER, NOW)

STATELESS_APIS: dict[str, tuple[Dialect, str]] = {
    "hermes": (Hermes(), "<|im_start|>assistant\n"),
    "hermes thinking": (Hermes(TAGS), "<|im_start|>assistant\n"),
    "llama3": (Llama3(), "<|start_header_id|>assistant<|end_header_id|>\n\n"),
    "llama3 thinking": (Llama3(TAGS), "<|start_header_id|>assistant<|end_header_id|>\n\n"),
    "mistral": (Mistral(), "[/INST]"),
    "mistral thinking": (Mistral(BRACKETS), "[/INST]"),
    "deepseek": (DeepSeek(TAGS), "<｜Assistant｜>"),
    "deepseek-dsml": (Dsml(TAGS), "<｜Assistant｜></think>"),
    "qwen-xml": (QwenXml(), "<|im_start|>assistant\n"),
    "qwen-xml thinking": (QwenXml(TAGS), "<|im_start|>assistant\n"),
    "harmony": (Harmony(), "<|start|>assistant"),
    "generic": (Generic(), "assistant: "),
}


@dataclass(frozen=True)
class Case:
    """A transcript: the text of the model in pieces, and the expected parts."""

    title: str
    dialect: Dialect
    tools: Sequence[Tool]
    opened: str
    pushes: list[str]
    expected: list[str]


def cases() -> Iterator[Case]:
    """The cases of the golden files: fields, the text in pieces, then the parts, each with the number of its piece."""
    for path in sorted(GOLDEN.glob("*.txt")):
        for block in path.read_text(encoding="utf-8").split("#### ")[1:]:
            title, rest = block.split("\n", 1)
            head, _, body = rest.partition("¦")
            text, _, parts = body.rpartition("¦")
            fields = dict(line.split(": ", 1) for line in head.splitlines())
            dialect, opened = STATELESS_APIS[fields["dialect"]]
            yield Case(
                f"{path.stem}: {title}",
                dialect,
                () if fields.get("tools") == "none" else (*TOOLS, RUN),
                json.loads(fields["opened"]) if "opened" in fields else opened,
                text.split("¦"),
                parts.strip().splitlines(),
            )


def written(part: Part) -> str:
    """A part in the notation of the golden files."""
    if isinstance(part, CallBegin):
        return f"call {part.index} {part.name}" + (f" id {part.id}" if part.id else "")
    kind = "arguments" if isinstance(part, CallArguments) else "content" if isinstance(part, Content) else "reasoning"
    return f"{kind} {json.dumps(part.text, ensure_ascii=False)}"


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.title)
def test_transcripts_are_parsed_into_the_expected_parts(case: Case) -> None:
    """The number is that of the piece; `.` is the end of the text."""
    parser = case.dialect.parser(tools=case.tools, opened=case.opened)
    found = [f"{number} {written(part)}" for number, text in enumerate(case.pushes, 1) for part in parser.push(text)]
    found += [f". {written(part)}" for part in parser.flush()]
    assert found == case.expected


@pytest.mark.parametrize(
    ("name", "text"), [("hermes", '<tool_call>{{"name": "{0}"}}</tool_call>'), ("mistral", "[TOOL_CALLS]{0}[ARGS]{{}}")]
)
def test_text_longer_than_any_name_is_content(name: str, text: str) -> None:
    dialect, opened = STATELESS_APIS[name]
    for length, is_call in ((254, True), (300, False)):
        parser = dialect.parser(tools=TOOLS, opened=opened)
        found = [*parser.push(text.format("n" * length)), *parser.flush()]
        assert isinstance(found[0], CallBegin) == is_call
        assert is_call or found == [Content(text.format("n" * length))]


def test_deeply_nested_arguments_are_content() -> None:
    text = '<tool_call>{"name": "now", "arguments": "' + "[" * 100_000 + '"}</tool_call>'
    dialect, opened = STATELESS_APIS["hermes"]
    parser = dialect.parser(tools=TOOLS, opened=opened)
    assert [*parser.push(text), *parser.flush()] == [Content(text)]


def test_end_of_a_call_is_a_visible_token_of_harmony() -> None:
    """It distinguishes a call without arguments from a cut one."""
    assert "<|call|>" in Harmony().shows


# --- detection --------------------------------------------------------------------------------------------------------
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
HERMES = TURNS + '{% if tools %}Write <tool_call>{"name": N, "arguments": A}</tool_call>{{ tools | tojson }}{% endif %}'
LLAMA = "<|start_header_id|>{{ messages }}{{ tools }}" + '{"name": "x", "parameters": {}}'
V3 = (
    "{% for c in calls %}{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + c.name + '```json' "
    "+ c['function']['arguments'] + '```' }}{% endfor %}"
)
HISTORY = TURNS + '{% for c in calls %}<tool_call>{"name": {{ c.name }}</tool_call>{% endfor %}'
CHANNELS = "{{ '<|start|>assistant' }}{# <|channel|> <|message|> #}"
V31 = "{{ '<｜tool▁calls▁begin｜>' + c.name + '<｜tool▁sep｜>' + c.function.arguments|tojson }}"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (TURNS, "generic"),
        (HERMES, "hermes"),
        (HERMES.replace('"', '\\"'), "hermes"),
        (HERMES + "<function=f>", "generic"),
        (HERMES + "<function=f><parameter=p>", "qwen-xml"),
        ("{{ '<｜DSML｜function_calls>' }}", "deepseek-dsml"),
        (HERMES + "<arg_key>", "generic"),
        (HERMES + '<tool_calls>[{"name": N}]</tool_calls>', "generic"),
        (LLAMA, "llama3"),
        (LLAMA.replace("<|start_header_id|>", "<|header_start|>"), "llama3"),
        (LLAMA + "<function=f>", "generic"),
        ("[INST][TOOL_CALLS][/INST]", "mistral"),
        (V3, "deepseek"),
        (V31, "deepseek"),
        ("<|start|>{{ m }}<|channel|>final<|message|>", "harmony"),
        ("<tool_call>{{ name }}<arg_key>", "generic"),
    ],
)
def test_families_are_detected_by_their_markers(template: str, name: str) -> None:
    dialect = detect(template, ())
    assert dialect.name == name
    assert dialect.has_call_notation == (name != "generic")


@pytest.mark.parametrize(
    ("template", "control_texts", "shown"),
    [
        (HERMES, [], {"<tool_call>", "</tool_call>"}),
        (HERMES + "</think>", [], {"<tool_call>", "</tool_call>", "<think>", "</think>"}),
        (HERMES, ["</think>"], {"<tool_call>", "</tool_call>", "<think>", "</think>"}),
        ("[TOOL_CALLS][THINK][/THINK]", [], {"[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]"}),
        (TURNS + "</think>", [], {"<tool_call>", "</tool_call>", "<think>", "</think>"}),
    ],
)
def test_reasoning_is_detected_in_the_template_or_the_vocabulary(
    template: str, control_texts: list[str], shown: set[str]
) -> None:
    """Its markers are visible tokens."""
    dialect = detect(template, control_texts)
    assert dialect.shows == shown
    assert dialect.always_has_parts == any("hink" in text.lower() for text in shown)


@pytest.mark.parametrize("block", ["function_calls", "tool_calls"])
def test_name_of_the_dsml_block_is_read_from_the_template(block: str) -> None:
    dialect = detect("{%- set token = '｜DSML｜' -%}{{ '<' + token + '" + block + ">' }}", ())
    assert isinstance(dialect, Dsml)
    assert dialect.opening == f"<｜DSML｜{block}>"


def test_each_family_has_its_end_tokens() -> None:
    assert detect(LLAMA, ()).ends == {"<|eom_id|>", "<|eot_id|>"}
    assert Harmony().ends == {"<|call|>", "<|return|>"}
    assert detect(HERMES, ()).ends == frozenset()


# --- messages ---------------------------------------------------------------------------------------------------------
def conversation(*answers: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Now?"}, *answers]


def called(*calls: tuple[str, str, Any], **more: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": "",
        **more,
        "tool_calls": [{"id": id, "function": {"name": name, "arguments": given}} for id, name, given in calls],
    }


def result(text: Any, id: str | None = None) -> dict[str, Any]:
    return {"role": "tool", "content": text, **({} if id is None else {"tool_call_id": id})}


AUTO, NONE = ToolChoice(), ToolChoice("none")


def prepared(dialect: Dialect, *messages: dict[str, Any], tools: Sequence[Tool] = ()) -> list[Any]:
    found, variables = dialect.prepare(messages, tools, AUTO)
    assert variables == {}
    return found


@pytest.mark.parametrize(
    "dialect", [Hermes(), QwenXml(), Llama3(), Mistral(), DeepSeek(), Dsml(), Harmony()], ids=lambda d: d.name
)
def test_templates_get_complete_tools_in_the_format_of_openai(dialect: Dialect) -> None:
    """No tools where none may be called."""
    messages, variables = dialect.prepare(conversation(), TOOLS, AUTO)
    assert messages == conversation()
    assert [tool["function"] for tool in variables["tools"]] == [
        {"name": "get_weather", "description": "Weather of a city", "parameters": WEATHER.parameters},
        {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}},
    ]
    assert dialect.prepare(conversation(), TOOLS, ToolChoice("none"))[1] == {}
    assert dialect.prepare(conversation(), (), AUTO)[1] == {}


@pytest.mark.parametrize("given", [{"zone": "é"}, '{"zone": "é"}'])
def test_arguments_are_objects_or_text_as_the_template_requires(given: Any) -> None:
    found = conversation(called(("a", "now", given)))
    as_object, as_text = (prepared(Hermes(text_arguments=text), *found)[-1]["tool_calls"][0] for text in (False, True))
    assert as_object["function"]["arguments"] == {"zone": "é"}
    assert as_text["function"]["arguments"] == '{"zone": "é"}'


@pytest.mark.parametrize("given", [None, "", {}, " ", "null", '""', '" "', "[]", []])
def test_empty_arguments_are_an_empty_object(given: Any) -> None:
    found = called(("a", "now", given))
    assert prepared(Hermes(), found)[0]["tool_calls"][0]["function"]["arguments"] == {}
    assert prepared(Hermes(text_arguments=True), found)[0]["tool_calls"][0]["function"]["arguments"] == "{}"


@pytest.mark.parametrize("given", [r'"{\"zone\": \"é\"}"', r'" {\"zone\": \"é\"}\n"'])
def test_object_within_a_string_is_unwrapped(given: str) -> None:
    as_object, as_text = (
        prepared(Hermes(text_arguments=text), called(("a", "now", given)))[0]["tool_calls"][0]["function"]["arguments"]
        for text in (False, True)
    )
    assert (as_object, as_text) == ({"zone": "é"}, '{"zone": "é"}')


@pytest.mark.parametrize("given", ["UTC", '{"zone": "UT', "[1]", "[" * 9999, "{" * 9999, '"UTC"', "0", '"\\ud800"'])
def test_arguments_that_are_no_object_are_wrapped_for_templates_that_need_one(given: str) -> None:
    as_object, as_text = (
        prepared(Hermes(text_arguments=text), called(("a", "now", given)))[0]["tool_calls"][0]["function"]["arguments"]
        for text in (False, True)
    )
    assert (as_object, as_text) == ({"arguments": given}, given)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (V3, True),
        (V31, False),
        ("[TOOL_CALLS]{%- set arguments = c.function.arguments %}{{ '[ARGS]' + arguments }}", True),
        ("[TOOL_CALLS]{{ c.function | tojson }}", False),
    ],
)
def test_type_of_arguments_is_detected_in_the_template(template: str, text: bool) -> None:
    found = prepared(detect(template, ()), called(("000000001", "now", {})))[0]["tool_calls"][0]["function"]
    assert found["arguments"] == ("{}" if text else {})


def test_calls_and_results_are_paired() -> None:
    """Missing ids are added, results are paired in the order of their calls, an empty list of calls is left out."""
    found = prepared(
        Hermes(),
        {"role": "assistant", "content": "", "tool_calls": []},
        called(("", "now", {}), ("b", "now", {})),
        result("1"),
        result("2"),
        result("3"),
        called(("", "now", {})),
        result("4", "c"),
    )
    assert "tool_calls" not in found[0]
    assert [call["id"] for call in found[1]["tool_calls"]] == ["000000000", "b"]
    assert [message["tool_call_id"] for message in found[2:5]] == ["000000000", "b", ""]
    assert found[5]["tool_calls"][0]["id"] == "000000002"
    assert found[6]["tool_call_id"] == "c"


def test_messages_are_split_for_templates_with_one_call_per_message() -> None:
    """Results follow their call; reasoning stays with the first one."""
    calls = called(("a", "now", {}), ("b", "get_weather", {}), reasoning_content="Both.")
    results = result("B", "b"), result("A", "a"), result("?", "c"), result("B2", "b")
    found = prepared(Llama3(), *conversation(), calls, *results)
    assert [message.get("content") if "tool_calls" not in message else message["tool_calls"][0]["id"]
            for message in found[2:]] == ["a", "A", "b", "B", "B2", "?"]  # fmt: skip
    assert [message.get("reasoning_content") for message in found[2:5]] == ["Both.", None, None]


def test_other_call_ids_are_replaced_by_nine_letters_or_digits_for_mistral() -> None:
    found = prepared(Mistral(), called(("call_0-a", "now", {}), ("abcDEF123", "now", {})), result("x", "call_0-a"))
    ids = [call["id"] for call in found[0]["tool_calls"]]
    assert len(ids[0]) == 9
    assert ids[0].isalnum()
    assert ids[1] == "abcDEF123"
    assert found[1]["tool_call_id"] == ids[0]


def test_empty_content_beside_calls_is_null_for_deepseek() -> None:
    found = [called(("a", "now", {})), called(("b", "now", {}), content="Look.")]
    assert [message["content"] for message in prepared(DeepSeek(), *conversation(*found))] == [
        "Be brief.", "Now?", None, "Look.",
    ]  # fmt: skip


@pytest.mark.parametrize("fenced", [True, False])
def test_tools_are_described_in_the_system_message_if_the_template_of_deepseek_ignores_them(fenced: bool) -> None:
    """With a call in the notation of the template."""
    text = prepared(DeepSeek(fenced=fenced, presents=False), *conversation(), tools=TOOLS)[0]["content"]
    assert text.startswith("Be brief.\n\n")
    assert "Weather of a city" in text
    assert ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n" in text) == fenced
    assert ("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>" in text) != fenced


def test_tools_are_described_in_the_system_message_if_the_template_of_harmony_ignores_them() -> None:
    dialect = Harmony(presents=False)
    text = prepared(dialect, *conversation(), tools=TOOLS)[0]["content"]
    assert text.startswith("Be brief.\n\n")
    assert "Weather of a city" in text
    assert "functions.NAME" in text
    assert dialect.prepare(conversation(), TOOLS, NONE) == (conversation(), {})


def of_template(source: str) -> Dialect:
    return chat_template(source).dialect


@pytest.mark.parametrize(
    ("source", "name"),
    [(HISTORY, "generic"), (HISTORY + "{# tools #}", "generic"), (HERMES, "hermes"),
     (HISTORY + "{% if tools %}{{ raise_exception('no tools') }}{% endif %}", "generic"),
     (HERMES + "{{ raise_exception('always') }}", "hermes")],
)  # fmt: skip
def test_template_that_only_repeats_calls_does_not_present_tools(source: str, name: str) -> None:
    """This is decided by rendering it with a tool."""
    dialect = of_template(source)
    assert (dialect.name, dialect.has_call_notation) == (name, name != "generic")


@pytest.mark.parametrize(("source", "name"), [(V3, "deepseek"), (CHANNELS, "harmony")])
def test_tools_are_described_where_the_template_of_a_known_family_drops_them(source: str, name: str) -> None:
    for template, described in ((source, True), (source + "{{ tools | tojson }}", False)):
        dialect = of_template(TURNS + template)
        assert (dialect.name, dialect.has_call_notation) == (name, True)
        messages, variables = dialect.prepare(conversation(), TOOLS, AUTO)
        assert (messages[0]["content"] != "Be brief.", variables == {}) == (described, described)


def test_harmony_gets_reasoning_as_thinking_and_one_call_per_message() -> None:
    """Beside a call the template accepts only one of thinking and content, so they are joined."""
    assert Harmony().always_has_parts
    calls = (("a", "now", {}), ("b", "now", {}))
    found = prepared(
        Harmony(),
        called(*calls, content="I will look.", reasoning_content="Hm."),
        result("A", "a"),
        {"role": "assistant", "content": "Done.", "reasoning_content": "Aha."},
        called(calls[0], reasoning_content="Hm."),
        called(calls[0], content="Again."),
    )
    assert [(m.get("thinking"), m.get("content")) for m in found] == [
        ("Hm.\n\nI will look.", None), (None, "A"), (None, ""), ("Aha.", "Done."), ("Hm.", None), (None, "Again."),
    ]  # fmt: skip


def test_generic_writes_tools_calls_and_results_as_text() -> None:
    """Adjacent results and the next message of the user are one message."""
    found = prepared(
        Generic(),
        *conversation(called(("a", "now", {"zone": "UTC"}), ("b", "now", {}), content="Look.")),
        result("noon", "a"),
        result([{"type": "text", "text": "one"}], "b"),
        {"role": "user", "content": "And?"},
        {"role": "user", "content": "Well?"},
        tools=TOOLS,
    )
    assert [message["role"] for message in found] == ["system", "user", "assistant", "user", "user"]
    assert found[0]["content"].startswith("Be brief.\n\n")
    assert json.dumps(WEATHER.parameters) in found[0]["content"]
    assert found[2]["content"] == (
        'Look.\n\n<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>\n\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    )
    assert found[3]["content"] == (
        '<tool_response>\nnoon\n</tool_response>\n<tool_response>\n[{"type": "text", "text": "one"}]\n'
        "</tool_response>\n\nAnd?"
    )
    assert all("tool_calls" not in message for message in found)


def test_generic_describes_tools_in_the_system_message_or_in_the_first_one() -> None:
    """Parts of content stay parts."""
    user = {"role": "user", "content": "Hi"}
    parts = {"role": "user", "content": [{"type": "image"}]}
    assert [m["role"] for m in prepared(Generic(), user, tools=TOOLS)] == ["system", "user"]
    assert [m["role"] for m in prepared(Generic(system=False), tools=TOOLS)] == ["user"]
    [found] = prepared(Generic(system=False), user, tools=TOOLS)
    assert found["content"].endswith("\n\nHi")
    [shown] = prepared(Generic(system=False), parts, tools=TOOLS)
    assert [part["type"] for part in shown["content"]] == ["text", "image"]
    [empty] = prepared(Generic(system=False), {"role": "user", "content": []}, tools=TOOLS)
    assert [part["type"] for part in empty["content"]] == ["text"]
    assert prepared(Generic(), user) == [user]
    assert user == {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("template", "role"),
    [
        ("{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}", "user"),
        ("{{ messages }}", "user"),
        ("{% if messages[0]['role'] == \"system\" %}x{% endif %}", "system"),
    ],
)
def test_generic_detects_whether_a_template_accepts_a_system_message(template: str, role: str) -> None:
    assert prepared(detect(template, ()), tools=TOOLS)[0]["role"] == role


def test_prepared_messages_can_be_rendered() -> None:
    source = (
        '{% if tools %}{{ tools | tojson }}"name": <tool_call>\n{% endif %}'
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls %}<tool_call>{{ c.function.arguments | tojson }}</tool_call>{% endfor %}\n"
        "{% endfor %}"
    )
    template = chat_template(source)
    messages, variables = template.dialect.prepare(conversation(called(("a", "now", '{"zone": 1}'))), TOOLS, AUTO)
    text = "".join(template.render(messages, variables, generate=True))
    assert template.dialect.name == "hermes"
    assert '"description": "Weather of a city"' in text
    assert text.endswith('assistant:<tool_call>{"zone": 1}</tool_call>')


# --- forms ------------------------------------------------------------------------------------------------------------
REQUIRED = ToolChoice("required")


@pytest.mark.parametrize("name", STATELESS_APIS)
def test_no_form_where_no_call_is_allowed(name: str) -> None:
    dialect, opened = STATELESS_APIS[name]
    assert dialect.form(TOOLS, NONE, opened=opened) is None
    assert dialect.form((), REQUIRED, opened=opened) is None
    assert dialect.form(TOOLS, ToolChoice("named", "other"), opened=opened) is None


def test_families_without_a_start_of_calls_have_no_form_for_optional_calls() -> None:
    assert Llama3().form(TOOLS, AUTO, opened="") is None
    assert Llama3().form(TOOLS, REQUIRED, opened="") is not None


def test_arguments_follow_the_schema_of_the_tool() -> None:
    """Always an object; an empty one without parameters."""
    strict = Tool("s", parameters={"properties": {}}, strict=True)
    form = Llama3().form((WEATHER, NOW, strict), REQUIRED, opened="")
    assert isinstance(form, OneOf)
    assert [part.parts[1] for part in form.parts if isinstance(part, Then)] == [
        Json(WEATHER.parameters or {}, strict=False, closed=True),
        Json({"type": "object", "properties": {}, "additionalProperties": False}, strict=False),
        Json({"type": "object", "properties": {}}, strict=True, closed=True),
    ]


def test_form_of_harmony_continues_the_open_message() -> None:
    """Reasoning is ended first; an answer in progress has no calls."""
    reasoning, answer = ("<|start|>assistant<|channel|>" + text + "<|message|>So" for text in ("analysis", "final"))
    inner = Regex("x")
    assert Harmony().wrap(inner, opened=answer) == inner
    assert Harmony().form(TOOLS, REQUIRED, opened=answer) is None
    for form in (Harmony().wrap(inner, opened=reasoning), Harmony().form(TOOLS, AUTO, opened=reasoning)):
        assert isinstance(form, Then)
        assert form.parts[0] == Then((AnyText(), Marker("<|end|>"), Marker("<|start|>"), Literal("assistant")))


@pytest.mark.parametrize(
    ("schema", "types", "kind"),
    [
        ({"type": "string"}, {"string"}, "text"),
        ({"enum": ["a", None]}, {"string", "null"}, "either"),
        ({"const": 1.5}, {"number"}, "json"),
        ({"oneOf": [{"type": "integer"}, {"type": ["array", "boolean"]}]}, {"number", "array", "boolean"}, "json"),
        ({"anyOf": [{"type": "integer"}, {}]}, set(), "either"),
        ({"$ref": "#/$defs/text"}, {"string"}, "text"),
        ({"$ref": "#/$defs/again"}, {"string"}, "text"),
        ({"$ref": "#/$defs/endless"}, set(), "either"),
        ({"$ref": "#/$defs/none"}, set(), "either"),
        ({"$ref": "other"}, set(), "either"),
        (True, set(), "either"),
    ],
)
def test_kind_of_a_tagged_value_follows_from_the_schema(schema: Any, types: set[str], kind: str) -> None:
    definitions = {
        "text": {"type": "string"},
        "again": {"$ref": "#/$defs/text"},
        "endless": {"$ref": "#/$defs/endless"},
    }
    [found] = properties_of(Tool("t", parameters={"properties": {"a": schema}, "$defs": definitions})).values()
    assert (types_of(found), kind_of(found)) == (types, kind)


def test_text_of_the_user_after_results_is_joined_to_the_last_result() -> None:
    question = {"role": "user", "content": "Which?"}
    first, last = {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}
    more = {"role": "user", "content": "Both."}
    assert merge_into_results([question, first, last, more, {**more, "content": "Now."}]) == [
        question, first, {"role": "tool", "content": "2\n\nBoth.\n\nNow."}
    ]  # fmt: skip
    assert merge_into_results([question, {"role": "assistant", "content": "This."}, more])[-1] == more


THINKS = '{{ tools }}<tool_call> "name": <think></think>'
HARMONY = "<|start|><|channel|><|message|>"
SILENT = "{{ messages }}"


def continued(template: str, opened: str, message: Mapping[str, Any], rest: str) -> tuple[str, str, str]:
    """The text after the prompt, with markers in braces, and the reasoning and content parsed from the rest."""
    dialect = detect(template, ())
    begun = dialect.opening_of(message, opened=opened)
    parser = dialect.parser(tools=(), opened=begun.opened)
    parts = [*parser.push(rest), *parser.flush()]
    return (
        "".join("{" + part.text + "}" if isinstance(part, Marker) else part.text for part in begun.parts),
        "".join(part.text for part in parts if isinstance(part, Reasoning)),
        "".join(part.text for part in parts if isinstance(part, Content)),
    )


@pytest.mark.parametrize(
    ("opened", "message", "rest", "expected"),
    [
        ("", {"content": "ab"}, "c", ("ab", "", "c")),
        ("", {"content": "ab", "reasoning_content": "t"}, "c", ("{<think>}\nt\n{</think>}\n\nab", "", "c")),
        ("", {"content": "", "reasoning_content": "t"}, "u</think>c", ("{<think>}\nt", "u", "c")),
        ("<think>\n", {"content": "ab"}, "c", ("\n{</think>}\n\nab", "", "c")),
        ("<think>\n", {"content": "", "reasoning_content": "t"}, "u</think>c", ("t", "u", "c")),
        ("<think>\n", {"content": ""}, "u</think>c", ("", "u", "c")),
        ("", {"content": ""}, "<think> u</think> c", ("", "u", "c")),
        ("", {"content": "ab"}, " <think>", ("ab", "", " <think>")),
        ("", {"content": "", "reasoning_content": "t"}, " u </think> c", ("{<think>}\nt", " u", "c")),
        ("<think>\n", {"content": "", "reasoning_content": "t"}, " u", ("t", " u", "")),
        ("<think>\n", {"content": "ab"}, "\nc", ("\n{</think>}\n\nab", "", "\nc")),
        ("<think></think>", {"content": "ab"}, " c", ("ab", "", " c")),
        ("<think></think>", {"content": "", "reasoning_content": "t"}, " c", ("", "", "c")),
        ("<think>\n\n</think>\n\n", {"content": "ab", "reasoning_content": "t"}, "c", ("ab", "", "c")),
    ],
)
def test_reasoning_of_a_continued_answer_is_closed_before_content(
    opened: str, message: Mapping[str, Any], rest: str, expected: tuple[str, str, str]
) -> None:
    assert continued(THINKS, "assistant\n" + opened, message, rest) == expected


@pytest.mark.parametrize(
    ("message", "rest", "expected"),
    [
        ({"content": "ab"}, "c", ("{<|channel|>}final{<|message|>}ab", "", "c")),
        (
            {"content": "ab", "reasoning_content": "t"},
            "c",
            (
                "{<|channel|>}analysis{<|message|>}t{<|end|>}{<|start|>}assistant{<|channel|>}final{<|message|>}ab",
                "",
                "c",
            ),
        ),
        (
            {"content": "", "reasoning_content": "t"},
            "u<|end|><|start|>assistant<|channel|>final<|message|>c",
            ("{<|channel|>}analysis{<|message|>}t", "u", "c"),
        ),
        ({"content": ""}, "<|channel|>final<|message|>c", ("", "", "c")),
    ],
)
def test_channels_of_a_continued_answer_are_opened_before_content(
    message: Mapping[str, Any], rest: str, expected: tuple[str, str, str]
) -> None:
    assert continued(HARMONY, "<|end|><|start|>assistant", message, rest) == expected


def test_continued_answer_without_reasoning_is_plain_text() -> None:
    assert continued(SILENT, "assistant: ", {"content": "ab", "reasoning_content": "t"}, "c") == ("ab", "", "c")
    assert continued("", "assistant: ", {"content": "ab"}, "c") == ("ab", "", "c")
