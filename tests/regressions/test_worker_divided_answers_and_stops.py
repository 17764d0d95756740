"""With stop strings, text came behind the call it stood before, and scores of tokens that were shown were lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from inference.worker.answers.generation import Generation, Output
from inference.worker.answers.structured_answer import DividedGeneration, Reading
from inference.worker.api.response_writer import Stream
from inference.worker.dialects.answer_parts import CallArguments, CallBegin, Content, Reasoning
from tests.rigs.fake_backend import END, FakeSampler
from tests.rigs.fake_dialect import MarkParser


class Pieces:
    """A vocabulary of a test's own: token n is the n-th piece."""

    end_tokens = frozenset({END})

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces: Mapping[int, bytes] = dict(enumerate(piece.encode() for piece in pieces))

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return self._pieces.get(token, b"")


def follow(pieces: Sequence[str], stops: Sequence[str], *, divided: bool = True, **changes: int) -> list[Output]:
    how = Reading(MarkParser, lambda: "call_1", **changes)
    words = Pieces(pieces)
    generation = (
        DividedGeneration(0, FakeSampler(b""), words, 99, stops, how, how.parser())
        if divided
        else Generation(0, FakeSampler(b""), words, 99, stops)
    )
    outputs: list[Output] = []
    for token in [*range(len(pieces)), END]:
        if (output := generation.accept(token, -0.5)) is not None:
            outputs.append(output)
            if output.finish is not None:
                return outputs
    raise AssertionError("it never ended")


def scored(outputs: Sequence[Output]) -> list[str]:
    return [item.piece.decode() for output in outputs for item in output.logprobs]


def test_text_that_a_stop_string_held_back_stands_before_the_call() -> None:
    outputs = follow(["look ST", "[f:", "{}", "]", "on"], ["STOP"])
    parts = [part for output in outputs for part in output.parts]
    assert parts[:3] == [Content("look "), Content("ST"), CallBegin(0, "f", "call_1")]
    stream = Stream("chat", "tiny", 0, with_usage=False, divided=True)
    raw = b"".join(stream.frames(output) for output in outputs)
    assert raw.index(b'"ST"') < raw.index(b'"tool_calls"') < raw.index(b'"on"')


def test_text_that_a_stop_string_held_back_stands_before_the_thought() -> None:
    [output, *_] = follow(["aST(why)OP"], ["STOP"])
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
def test_scores_go_out_with_their_text_as_in_a_plain_answer(pieces: list[str], expected: list[str]) -> None:
    assert scored(follow(pieces, ["STOP"])) == scored(follow(pieces, ["STOP"], divided=False)) == expected


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
def test_tokens_that_are_no_content_keep_their_scores(pieces: list[str], expected: list[str]) -> None:
    assert scored(follow(pieces, ["STOP"])) == expected


def test_a_call_too_many_takes_no_score_from_what_was_drawn() -> None:
    outputs = follow(["[f:", "{}", "]", "x[g", ":{}"], ["STOP"], most_calls=1)
    assert scored(outputs) == ["[f:", "{}", "]", "x[g", ":{}"]
    parts = [part for output in outputs for part in output.parts]
    assert parts == [CallBegin(0, "f", "call_1"), *(CallArguments(0, c) for c in "{}"), Content("x")]
