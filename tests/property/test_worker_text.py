"""Text is sent exactly, however tokens divide it: UTF-8, stop strings, and both in a generation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.worker.answers.generation import Detokenizer, Generation, StopFilter

pytestmark = pytest.mark.unmeasured

ALPHABET = "abé漢😀"


def divided(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[left:right] for left, right in itertools.pairwise(edges)]


@given(st.binary(max_size=40), st.lists(st.integers(0, 40)))
def test_text_of_bytes_does_not_depend_on_their_pieces(data: bytes, cuts: list[int]) -> None:
    """Including bytes that are not UTF-8."""
    detokenizer = Detokenizer()
    text = "".join([detokenizer.push(piece) for piece in divided(data, cuts)] + [detokenizer.flush()])
    assert text == data.decode("utf-8", "replace")


@given(st.text(ALPHABET, max_size=20), st.lists(st.integers(0, 80)))
def test_no_replacement_character_appears_while_a_character_is_incomplete(text: str, cuts: list[int]) -> None:
    detokenizer = Detokenizer()
    shown = ""
    for piece in divided(text.encode(), cuts):
        shown += detokenizer.push(piece)
        assert text.startswith(shown)


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: the stop completed by the earliest character wins, the longest of several."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            longest = max(hits, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=4),
    st.lists(st.integers(0, 30)),
)
def test_stop_strings_cut_at_the_same_place_however_the_text_is_divided(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    stop_filter = StopFilter(stops)
    shown = "".join(stop_filter.push(piece.decode()) for piece in divided(text.encode(), cuts))
    expected, matched = first_stop(text, stops)
    assert stop_filter.matched == matched
    assert shown + ("" if matched else stop_filter.flush()) == expected


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4))
def test_no_part_of_a_stop_string_is_shown(text: str, stops: list[str]) -> None:
    """Text that is shown letter by letter is never retracted."""
    stop_filter = StopFilter(stops)
    shown = ""
    for letter in text:
        shown += stop_filter.push(letter)
        assert first_stop(text, stops)[0].startswith(shown)


class Letters:
    """A vocabulary of single bytes; token 256 ends."""

    end_tokens = frozenset({256})

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return b"" if token == 256 else bytes([token])


class NoSampler:
    def sample(self, index: int) -> int:
        raise AssertionError

    def accept(self, tokens: Sequence[int]) -> None:
        raise AssertionError

    def close(self) -> None:
        pass


@given(
    st.text(ALPHABET, max_size=12),
    st.lists(st.text(ALPHABET, min_size=1, max_size=3), max_size=3),
    st.integers(1, 40),
    st.booleans(),
)
def test_generation_shows_its_tokens_up_to_stop_end_or_length(
    text: str, stops: list[str], max_tokens: int, with_logprobs: bool
) -> None:
    """The text is that of the tokens, cut at the first stop; every shown token has its log probability once."""
    tokens = [*text.encode(), 256]
    generation = Generation(0, NoSampler(), Letters(), max_tokens, stops)
    shown = ""
    logprobs = []
    finish = None
    used = 0
    for token in tokens:
        used += 1
        output = generation.accept(token, -1.0 if with_logprobs else None, [(token, -1.0)])
        if output is not None:
            shown += output.text
            logprobs += output.logprobs
            finish = output.finish
        if finish is not None:
            break
    decoded = bytes(token for token in tokens[:used] if token != 256).decode("utf-8", "replace")
    expected, matched = first_stop(decoded, stops)
    assert shown == expected
    assert finish == ("stop" if matched or tokens[used - 1] == 256 else "length")
    assert generation.tokens == used <= max_tokens
    if with_logprobs and not matched:
        assert b"".join(item.piece for item in logprobs) == bytes(t for t in tokens[:used] if t != 256)
    if with_logprobs and matched:
        assert all(item.offset < len(expected) for item in logprobs)
