"""Log probabilities as OpenAI writes them: tokens that are no text, tokens that look alike."""

from __future__ import annotations

import json
from typing import Any

from inference.worker.answers.generation import TokenLogprob
from inference.worker.api.logprob_writer import Logprobs


def completion(*items: TokenLogprob) -> dict[str, Any]:
    said = Logprobs("completion")
    said.add(items)
    return dict(json.loads(said.json()))


def test_pieces_of_characters_stay_apart_in_completions() -> None:
    """Keyed by one replacement character, the least likely of them would stand for all."""
    top = ((b"\xe2", -0.1), (b"\xf0\x9f", -2.0), (b" \xc3", -3.0), ("é".encode(), -4.0))
    said = completion(TokenLogprob(b"\xe2", -0.1, top, 0))
    assert said["tokens"] == ["bytes:\\xe2"]
    assert said["top_logprobs"] == [{"bytes:\\xe2": -0.1, "bytes:\\xf0\\x9f": -2.0, "bytes: \\xc3": -3.0, "é": -4.0}]


def test_a_piece_that_looks_like_the_writing_of_another_is_told_apart() -> None:
    top = ((b"\\xe2\xe3", -0.1), (b"\xe2\xe3", -0.2))
    assert list(completion(TokenLogprob(b"a", -1.0, top, 0))["top_logprobs"][0].values()) == [-0.1, -0.2, -1.0]


def test_the_token_that_was_drawn_stands_beside_the_likeliest() -> None:
    """Up to one more than was asked for; of tokens that look alike the likelier one is told."""
    top = ((b"a", -0.5), (b"b", -1.0))
    assert completion(TokenLogprob(b"c", -7.0, top, 0))["top_logprobs"] == [{"a": -0.5, "b": -1.0, "c": -7.0}]
    assert completion(TokenLogprob(b"b", -1.0, top, 0))["top_logprobs"] == [{"a": -0.5, "b": -1.0}]
    assert completion(TokenLogprob(b"c", -7.0, (), 0))["top_logprobs"] == [{"c": -7.0}]
    alike = ((b"a", -0.5), (b"a", -3.0))
    assert completion(TokenLogprob(b"a", -9.0, alike, 0))["top_logprobs"] == [{"a": -0.5}]
