"""Forced calls that are cut: their markup is neither content nor seen by stop strings."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from inference.worker.answers.answer_shape import Shaping
from inference.worker.answers.generation import Output
from inference.worker.answers.structured_answer import Reading, StructuredGeneration
from inference.worker.dialects import Dialect, detect
from inference.worker.dialects.answer_parts import CallArguments, CallBegin, Content, Reasoning, Tool, ToolChoice
from inference.worker.dialects.families.deepseek import DeepSeek
from inference.worker.dialects.families.harmony import Harmony
from inference.worker.dialects.families.hermes import Generic
from inference.worker.dialects.families.llama3 import Llama3
from inference.worker.dialects.families.mistral import Mistral
from inference.worker.worker_requests import GenerateRequest
from tests.rigs.fake_backend import END, FakeSampler
from tests.rigs.fake_dialect import MarkParser

HERMES = '<tool_call>{"name": ...}</tool_call>'
TOOLS = (Tool("add"), Tool("sub"))
WIDE = str.maketrans("|_", "\uff5c\u2581")
"""The bars and lines of DeepSeek."""
TWO_CALLS = (
    '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "sub", "arguments": {}}\n</tool_call>'
)


class Bytes:
    """A token per byte."""

    end_tokens = frozenset({END})

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return bytes([token]) if token < 256 else b""


def reading(mode: str) -> Reading:
    """The reading of answers for this tool choice."""
    choice = ToolChoice("named", "add") if mode == "named" else ToolChoice(mode)  # type: ignore[arg-type]
    shaping = Shaping(detect(HERMES, []), lambda text: None)
    found = shaping.shape(GenerateRequest("chat", tools=TOOLS, choice=choice)).reading
    assert found is not None
    return found


def follow(how: Reading, text: bytes, most: int, stops: Sequence[str] = ()) -> list[Output]:
    generation = StructuredGeneration(0, FakeSampler(b""), Bytes(), most, stops, how, how.parser())
    outputs: list[Output] = []
    for token in [*text, END]:
        if (output := generation.accept(token, -0.5)) is not None:
            outputs.append(output)
            if output.finish is not None:
                break
    return outputs


def content(outputs: Sequence[Output]) -> str:
    return "".join(part.text for output in outputs for part in output.parts if isinstance(part, Content))


def test_required_and_named_calls_are_forced() -> None:
    assert [reading(mode).forced for mode in ("auto", "required", "named")] == [False, True, True]


@pytest.mark.unmeasured
@pytest.mark.parametrize("mode", ["required", "named"])
def test_forced_call_cut_at_any_token_has_no_content_and_finish_length(mode: str) -> None:
    """Each stop string occurs in the markup."""
    how = reading(mode)
    for stop in ("a", "<", "\n", "tool", '"name"', "}"):
        for most in range(1, len(TWO_CALLS) + 1):
            outputs = follow(how, TWO_CALLS.encode(), most, [stop])
            assert (content(outputs), outputs[-1].finish, outputs[-1].tokens) == ("", "length", most)
            assert sum(len(output.logprobs) for output in outputs) == most


@pytest.mark.parametrize(
    ("family", "opened", "call"),
    [
        (Generic(None, system=True), "", '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'),
        (Llama3(), "<|end_header_id|>", '{"name": "add", "parameters": {"x": 1}}'),
        (Mistral(), "", '[TOOL_CALLS]add[ARGS]{"x": 1}'),
        (
            DeepSeek(),
            "",
            "<|tool_calls_begin|><|tool_call_begin|>add<|tool_sep|>{}<|tool_call_end|><|tool_calls_end|>".translate(
                WIDE
            ),
        ),
        (Harmony(), "", "<|channel|>commentary to=functions.add <|constrain|>json<|message|>{}"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_markup_of_a_forced_call_is_no_content_in_any_dialect(family: Dialect, opened: str, call: str) -> None:
    how = Reading(lambda: family.parser(tools=TOOLS, opened=opened), lambda: "call_1", forced=True)
    for most in range(1, len(call.encode()) + 1):
        outputs = follow(how, call.encode(), most, ["a", "{"])
        assert (content(outputs), outputs[-1].finish) == ("", "length")
    assert any(isinstance(part, CallBegin) for output in outputs for part in output.parts)


def test_complete_forced_call_is_parsed() -> None:
    outputs = follow(reading("required"), TWO_CALLS.encode(), 1000, ["a", "\n"])
    parts = [part for output in outputs for part in output.parts]
    assert [part.name for part in parts if isinstance(part, CallBegin)] == ["add", "sub"]
    assert "".join(part.text for part in parts if isinstance(part, CallArguments)) == '{"x": 1}{}'
    assert (content(outputs), outputs[-1].finish) == ("", "tool_calls")


@pytest.mark.parametrize(
    ("stops", "shown", "finish"),
    [
        ((), "<tool_c", "length"),
        (("a",), "<tool_c", "length"),
        (("ol_",), "<to", "stop"),
        (("ca",), "<tool_c", "length"),
    ],
)
def test_held_back_text_is_content_if_no_call_is_forced(stops: tuple[str, ...], shown: str, finish: str) -> None:
    outputs = follow(reading("auto"), b"<tool_call>", 7, stops)
    assert (content(outputs), outputs[-1].finish) == (shown, finish)


def test_incomplete_character_after_a_forced_mark_is_no_content() -> None:
    outputs = follow(reading("required"), b"<tool_c\xe2\x82", 9, ["<"])
    assert (content(outputs), outputs[-1].finish) == ("", "length")


def test_reasoning_before_a_forced_call_is_kept_and_counted() -> None:
    how = Reading(MarkParser, lambda: "call_1", forced=True)
    outputs = follow(how, b"(ab)[f", 6, ["f"])
    assert "".join(p.text for o in outputs for p in o.parts if isinstance(p, Reasoning)) == "ab"
    assert (content(outputs), outputs[-1].finish, outputs[-1].reasoning_tokens) == ("", "length", 4)
