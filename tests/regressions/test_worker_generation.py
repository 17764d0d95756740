"""Text, parts and log probabilities of an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from inference.worker.answers.generation import Generation, Output, TokenLogprob
from inference.worker.answers.structured_answer import Reading, StructuredGeneration
from inference.worker.api.response_writer import Stream
from inference.worker.dialects.answer_parts import CallArguments, CallBegin, Content, Reasoning
from tests.rigs.fake_backend import END, FakeSampler
from tests.rigs.fake_dialect import MarkParser


class Pieces:
    """A vocabulary whose token n is the n-th piece."""

    end_tokens = frozenset({END})

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces: Mapping[int, bytes] = dict(enumerate(piece.encode() for piece in pieces))

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return self._pieces.get(token, b"")


def generate(pieces: Sequence[str], stops: Sequence[str], *, divided: bool = True, **changes: int) -> list[Output]:
    reading = Reading(MarkParser, lambda: "call_1", **changes)
    words = Pieces(pieces)
    generation = (
        StructuredGeneration(0, FakeSampler(b""), words, 99, stops, reading, reading.parser())
        if divided
        else Generation(0, FakeSampler(b""), words, 99, stops)
    )
    outputs: list[Output] = []
    for token in [*range(len(pieces)), END]:
        if (output := generation.accept(token, -0.5)) is not None:
            outputs.append(output)
            if output.finish is not None:
                return outputs
    raise AssertionError("the generation did not end")


def scored(outputs: Sequence[Output]) -> list[str]:
    return [item.piece.decode() for output in outputs for item in output.logprobs]


def test_text_held_back_for_a_stop_string_precedes_the_call() -> None:
    outputs = generate(["look ST", "[f:", "{}", "]", "on"], ["STOP"])
    parts = [part for output in outputs for part in output.parts]
    assert parts[:3] == [Content("look "), Content("ST"), CallBegin(0, "f", "call_1")]
    stream = Stream("chat", "tiny", 0, with_usage=False, has_parts=True)
    raw = b"".join(stream.frames(output) for output in outputs)
    assert raw.index(b'"ST"') < raw.index(b'"tool_calls"') < raw.index(b'"on"')


def test_text_held_back_for_a_stop_string_precedes_the_reasoning() -> None:
    [output, *_] = generate(["aST(why)OP"], ["STOP"])
    assert output.parts == (Content("aST"), *map(Reasoning, "why"), Content("OP"))


PLAIN = [
    (["hello ", "xSTOP tail"], ["hello ", "xSTOP tail"]),
    (["a", "S", "T", "OP"], ["a"]),
    (["aS", "S", "TOP"], ["aS"]),
    (["a", "S", "T", "x"], ["a", "S", "T", "x"]),
    (["STOP"], []),
    (["a", "S"], ["a", "S"]),
]


@pytest.mark.parametrize(("pieces", "expected"), PLAIN)
def test_scores_are_sent_with_their_text_as_in_a_plain_answer(pieces: list[str], expected: list[str]) -> None:
    assert scored(generate(pieces, ["STOP"])) == scored(generate(pieces, ["STOP"], divided=False)) == expected


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["(", "why", ")", "xSTOP y"], ["(", "why", ")", "xSTOP y"]),
        (["(", "why", ")", "STOP"], ["(", "why", ")"]),
        (["(", "why", ")", "a", "ST", "OP"], ["(", "why", ")", "a"]),
        (["a", "[f:", "{}", "]", "b", "S", "TOP"], ["a", "[f:", "{}", "]", "b"]),
        (["a", "S", "[f:", "{}", "]", "b"], ["a", "S", "[f:", "{}", "]", "b"]),
    ],
)
def test_tokens_of_reasoning_and_calls_keep_their_scores(pieces: list[str], expected: list[str]) -> None:
    assert scored(generate(pieces, ["STOP"])) == expected


def test_tokens_of_a_call_beyond_the_limit_keep_their_scores() -> None:
    outputs = generate(["[f:", "{}", "]", "x[g", ":{}"], ["STOP"], max_calls=1)
    assert scored(outputs) == ["[f:", "{}", "]", "x[g", ":{}"]
    parts = [part for output in outputs for part in output.parts]
    assert parts == [CallBegin(0, "f", "call_1"), *(CallArguments(0, c) for c in "{}"), Content("x")]


CONTROL = 257


class Vocabulary:
    """Every byte is a token. 256 ends; 257 is a control token."""

    end_tokens = frozenset({END})

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Control tokens are empty unless `special`."""
        return bytes([token]) if token < END else b"<|control|>" if special else b""


@pytest.mark.parametrize("divided", [False, True])
def test_sampled_control_token_has_its_name_in_logprobs_and_no_text(divided: bool) -> None:
    common = (0, FakeSampler(b""), Vocabulary(), 9, ())
    reading = Reading(parser=MarkParser, call_id=lambda: "call")
    generation = StructuredGeneration(*common, reading, MarkParser()) if divided else Generation(*common)
    assert generation.accept(CONTROL, -0.5, [(CONTROL, -0.5), (65, -2.0)]) is None
    output = generation.accept(END, -0.1)
    assert output is not None
    assert (output.text, output.parts) == ("", ())
    assert output.logprobs == (TokenLogprob(b"<|control|>", -0.5, ((b"<|control|>", -0.5), (b"A", -2.0)), 0),)
