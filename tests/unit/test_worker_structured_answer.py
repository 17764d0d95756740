"""Structured answers, token by token: visible tokens, ends, counts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from inference.worker.answers.generation import Output
from inference.worker.answers.structured_answer import Reading, StructuredGeneration
from inference.worker.dialects.answer_parts import CallArguments, CallBegin, Content, Part, Reasoning
from tests.rigs.fake_backend import END, FakeSampler
from tests.rigs.fake_dialect import MarkParser


class Vocabulary:
    """A token per byte; 256 ends an answer; 257 and 258 are control tokens, written `[` and `]`."""

    end_tokens = frozenset({END})

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Control tokens are empty unless `special`."""
        if token < 256:
            return bytes([token])
        return {257: b"[", 258: b"]"}.get(token, b"<end>") if special else b""


def reading(**changes: Any) -> Reading:
    ids = itertools.count(1)
    return Reading(
        **{"parser": MarkParser, "call_id": lambda: f"call_{next(ids)}", "parsed": frozenset({257, 258}), **changes}
    )


def follow(
    drawn: str | list[int], *, most: int = 1000, stops: tuple[str, ...] = (), logprobs: bool = False, **changes: Any
) -> list[Output]:
    """All outputs of an answer with the tokens of `drawn`."""
    tokens = [*drawn.encode(), END] if isinstance(drawn, str) else drawn
    how = reading(**changes)
    generation = StructuredGeneration(0, FakeSampler(b""), Vocabulary(), most, stops, how, how.parser())
    outputs: list[Output] = []
    for token in tokens:
        output = generation.accept(token, -0.5 if logprobs else None)
        if output is not None:
            outputs.append(output)
            if output.finish is not None:
                return outputs
    raise AssertionError("the answer has no end")


def text(outputs: list[Output]) -> str:
    assert not any(output.text for output in outputs)
    return "".join(part.text for output in outputs for part in output.parts if isinstance(part, Content))


def thoughts(outputs: list[Output]) -> str:
    return "".join(part.text for output in outputs for part in output.parts if isinstance(part, Reasoning))


def calls(outputs: list[Output]) -> list[tuple[str, str, str]]:
    """(id, name, arguments) of every call."""
    found: list[tuple[str, str, str]] = []
    for output in outputs:
        for part in output.parts:
            if isinstance(part, CallBegin):
                assert part.index == len(found)
                found.append((part.id, part.name, ""))
            elif isinstance(part, CallArguments):
                id, name, arguments = found[part.index]
                found[part.index] = (id, name, arguments + part.text)
    return found


def test_answer_is_divided_into_reasoning_text_and_calls() -> None:
    outputs = follow("(because)so[add:{1}][sub:{2}]")
    assert (thoughts(outputs), text(outputs)) == ("because", "so")
    assert calls(outputs) == [("call_1", "add", "{1}"), ("call_2", "sub", "{2}")]
    assert outputs[-1].finish == "tool_calls"
    assert outputs[-1].tokens == len("(because)so[add:{1}][sub:{2}]") + 1


def test_call_id_of_the_family_is_kept() -> None:
    assert calls(follow("[known:{}]")) == [("own", "known", "{}")]


def test_parts_keep_their_order_within_one_output() -> None:
    """A token may contain the end of a part and the beginning of the next one."""

    class Wide(Vocabulary):
        def piece(self, token: int, *, special: bool = False) -> bytes:
            return b"(a)b[f:1]" if token == 65 else super().piece(token, special=special)

    generation = StructuredGeneration(0, FakeSampler(b""), Wide(), 9, (), reading(), MarkParser())
    output = generation.accept(65)
    assert output is not None
    expected: list[Part] = [Reasoning("a"), Content("b"), CallBegin(0, "f", "call_1"), CallArguments(0, "1")]
    assert list(output.parts) == expected


@pytest.mark.parametrize(
    ("drawn", "most", "finish"),
    [
        ("plain", 99, "stop"),
        ("plain", 3, "length"),
        ("[f:{}]", 99, "tool_calls"),
        ("[f:{}]", 4, "length"),
        ("(only reasoning)", 99, "stop"),
    ],
)
def test_finish_reason_follows_from_the_end_of_the_answer(drawn: str, most: int, finish: str) -> None:
    assert follow(drawn, most=most)[-1].finish == finish


def test_named_call_ends_with_stop_as_in_openai() -> None:
    assert follow("[f:{}]", after_calls="stop")[-1].finish == "stop"


def test_stop_strings_apply_to_content_only() -> None:
    outputs = follow("(a STOP b)c[f:STOP]d STOP e", stops=("STOP",))
    assert (thoughts(outputs), text(outputs), calls(outputs)) == ("a STOP b", "cd ", [("call_1", "f", "STOP")])
    assert outputs[-1].finish == "stop"


def test_stop_string_does_not_match_across_a_call() -> None:
    outputs = follow("ST[f:{}]OP", stops=("STOP",))
    assert (text(outputs), outputs[-1].finish) == ("STOP", "tool_calls")


def test_stop_string_in_held_back_text_ends_the_answer() -> None:
    outputs = follow("x[STOP", stops=("[STOP",))
    assert (text(outputs), outputs[-1].finish) == ("x", "stop")


def test_answer_limited_to_one_call_ends_at_the_second_call() -> None:
    outputs = follow("[f:{}][g:{}] and more", max_calls=1)
    assert calls(outputs) == [("call_1", "f", "{}")]
    assert (text(outputs), outputs[-1].finish) == ("", "tool_calls")


def test_named_control_tokens_reach_the_parser() -> None:
    drawn = [257, *b"f:{}", 258, END]
    assert calls(follow(drawn)) == [("call_1", "f", "{}")]
    hidden = follow(drawn, parsed=frozenset())
    assert (calls(hidden), text(hidden)) == ([], "f:{}")


def test_end_token_of_a_family_ends_an_answer() -> None:
    """The parser sees it; the text does not contain it."""
    outputs = follow([257, *b"f:{}", 258, *b"more"], ends=frozenset({258}))
    assert (calls(outputs), text(outputs), outputs[-1].finish) == ([("call_1", "f", "{}")], "", "tool_calls")
    assert text(follow([*b"ab", END])) == "ab"


def test_end_of_an_answer_flushes_held_back_text() -> None:
    assert text(follow("a[half")) == "a[half"
    assert text(follow([*b"a", 0xE2, 0x82, END])) == "a�"


def test_reasoning_tokens_include_the_marks_around_reasoning() -> None:
    for drawn, expected in [("(ab)cd", 4), ("abcd", 0), ("(ab", 4), ("(ab)[f:{}]", 4), ("a(b)c", 3)]:
        assert follow(drawn)[-1].reasoning_tokens == expected, drawn


def test_each_token_has_a_log_probability() -> None:
    outputs = follow("(a)b[f:1]c", logprobs=True)
    pieces = [item.piece for output in outputs for item in output.logprobs]
    assert b"".join(pieces) == b"(a)b[f:1]c"
    cut = follow("abSTOPx", logprobs=True, stops=("STOP",))
    assert b"".join(item.piece for output in cut for item in output.logprobs) == b"ab"


def test_error_of_a_parser_is_raised() -> None:
    with pytest.raises(ValueError, match="broken"):
        follow("ab!")
