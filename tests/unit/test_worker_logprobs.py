"""Log probabilities of completions: tokens that are not text, tokens with the same text."""

from __future__ import annotations

import json
from typing import Any

from inference.worker.answers.generation import TokenLogprob
from inference.worker.api.logprob_writer import Logprobs


def completion(*items: TokenLogprob) -> dict[str, Any]:
    writer = Logprobs("completion")
    writer.add(items)
    return dict(json.loads(writer.json()))


def test_parts_of_characters_have_different_keys() -> None:
    """With the replacement character as key, one of them would overwrite the others."""
    top = ((b"\xe2", -0.1), (b"\xf0\x9f", -2.0), (b" \xc3", -3.0), ("é".encode(), -4.0))
    found = completion(TokenLogprob(b"\xe2", -0.1, top, 0))
    assert found["tokens"] == ["bytes:\\xe2"]
    assert found["top_logprobs"] == [{"bytes:\\xe2": -0.1, "bytes:\\xf0\\x9f": -2.0, "bytes: \\xc3": -3.0, "é": -4.0}]


def test_token_with_the_text_of_an_escaped_one_has_its_own_key() -> None:
    top = ((b"\\xe2\xe3", -0.1), (b"\xe2\xe3", -0.2))
    assert list(completion(TokenLogprob(b"a", -1.0, top, 0))["top_logprobs"][0].values()) == [-0.1, -0.2, -1.0]


def test_drawn_token_is_listed_beside_the_most_likely_ones() -> None:
    """Of tokens with the same text, the most likely one is listed."""
    top = ((b"a", -0.5), (b"b", -1.0))
    assert completion(TokenLogprob(b"c", -7.0, top, 0))["top_logprobs"] == [{"a": -0.5, "b": -1.0, "c": -7.0}]
    assert completion(TokenLogprob(b"b", -1.0, top, 0))["top_logprobs"] == [{"a": -0.5, "b": -1.0}]
    assert completion(TokenLogprob(b"c", -7.0, (), 0))["top_logprobs"] == [{"c": -7.0}]
    alike = ((b"a", -0.5), (b"a", -3.0))
    assert completion(TokenLogprob(b"a", -9.0, alike, 0))["top_logprobs"] == [{"a": -0.5}]
