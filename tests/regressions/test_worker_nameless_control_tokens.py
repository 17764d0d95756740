"""A control token that was drawn had no text and no bytes in `logprobs`; among the alternatives it had both."""

from __future__ import annotations

import pytest

from inference.worker.answers.generation import Generation, TokenLogprob
from inference.worker.answers.structured_answer import DividedGeneration, Reading
from tests.rigs.fake_backend import END, FakeSampler
from tests.rigs.fake_dialect import MarkParser

CONTROL = 257


class Vocabulary:
    """Every byte is a token. 256 ends; 257 is a control token."""

    end_tokens = frozenset({END})

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Control tokens are empty unless `special`."""
        return bytes([token]) if token < END else b"<|control|>" if special else b""


@pytest.mark.parametrize("divided", [False, True])
def test_a_control_token_that_was_drawn_has_its_name(divided: bool) -> None:
    """As it has among the alternatives; it is no text all the same."""
    common = (0, FakeSampler(b""), Vocabulary(), 9, ())
    reading = Reading(parser=MarkParser, call_id=lambda: "call")
    generation = DividedGeneration(*common, reading, MarkParser()) if divided else Generation(*common)
    assert generation.accept(CONTROL, -0.5, [(CONTROL, -0.5), (65, -2.0)]) is None
    output = generation.accept(END, -0.1)
    assert output is not None
    assert (output.text, output.parts) == ("", ())
    assert output.logprobs == (TokenLogprob(b"<|control|>", -0.5, ((b"<|control|>", -0.5), (b"A", -2.0)), 0),)
