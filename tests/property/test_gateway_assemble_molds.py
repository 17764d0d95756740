"""Chunks read as bytes add up to what the same chunks add up to when each is parsed, however they were written."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.assemble import Assembly

HEAD = {"id": "c1", "object": "chat.completion.chunk", "created": 5, "model": "demo"}
TEXTS = st.text(max_size=8) | st.sampled_from(['"', '\\"content":"', "\\", "é", "\n", "x"])
DELTAS = (
    st.fixed_dictionaries({"content": TEXTS})
    | st.fixed_dictionaries({"content": st.none()})
    | st.fixed_dictionaries({"role": st.just("assistant"), "content": TEXTS})
    | st.fixed_dictionaries({"reasoning_content": TEXTS})
    | st.just({})
)
CHOICES = st.fixed_dictionaries(
    {"index": st.integers(0, 1), "delta": DELTAS},
    optional={
        "finish_reason": st.sampled_from([None, "stop"]),
        "logprobs": st.none() | st.just({"content": [{"token": "a"}]}),
    },
)
CHUNKS = st.lists(
    st.tuples(st.lists(CHOICES, max_size=2), st.none() | st.just({"total_tokens": 3}), st.booleans()), max_size=12
)


def _bytes(chunk: dict[str, Any], is_spaced: bool) -> bytes:
    return json.dumps(chunk).encode() if is_spaced else orjson.dumps(chunk)


def _sums(payloads: list[bytes]) -> tuple[dict[str, Any], dict[str, Any]]:
    read, added = Assembly(), Assembly()
    for payload in payloads:
        read.read(payload)
        added.add(orjson.loads(payload))
    assert read.is_complete == added.is_complete
    return read.result(), added.result()


@given(CHUNKS)
def test_bytes_and_objects_add_up_alike(chunks: list[tuple[list[dict[str, Any]], Any, bool]]) -> None:
    written = [_bytes({**HEAD, "choices": []}, False)]
    written += [_bytes({**HEAD, "choices": choices, "usage": usage}, spaced) for choices, usage, spaced in chunks]
    read, added = _sums(written)
    assert read == added


@given(st.lists(TEXTS, min_size=1, max_size=20), st.sampled_from(["chat.completion.chunk", "text_completion"]))
def test_a_plain_answer_is_its_texts(texts: list[str], kind: str) -> None:
    def chunk(text: str) -> bytes:
        part = {"text": text} if kind == "text_completion" else {"delta": {"content": text}}
        return orjson.dumps({**HEAD, "object": kind, "choices": [{"index": 0, **part, "finish_reason": None}]})

    read, added = _sums([chunk(text) for text in texts])
    assert read == added
    choice = read["choices"][0]
    assert (choice["text"] if kind == "text_completion" else choice["message"]["content"]) == "".join(texts)


MOLD = b'{"object":"text_completion","choices":[{"index":0,"text":%b}]}'


@pytest.mark.parametrize(
    "payload",
    [
        MOLD % b"17",
        MOLD % b'"a","text":"b"',
        MOLD % b'"a"}],"usage":{"total_tokens":1},"choices":[{"text":"b"',
        MOLD,
        b'{"choices":[]}',
    ],
)
def test_what_only_looks_like_the_mold_is_parsed_whole(payload: bytes) -> None:
    """Something else than one text between the same bytes: more of a choice, another kind of value, nothing."""
    read, added = Assembly(), Assembly()
    read.read(MOLD % b'"once"')
    added.add(orjson.loads(MOLD % b'"once"'))
    try:
        chunk = orjson.loads(payload)
    except ValueError:
        with pytest.raises(ValueError):
            read.read(payload)
        return
    read.read(payload)
    added.add(chunk)
    assert read.result() == added.result()


def test_a_stream_that_has_no_mold_is_not_searched_for_one_for_ever() -> None:
    """Its writer escapes what ours does not, or repeats a key."""
    twice = b'{"object":"text_completion","choices":[{"index":0,"text":"b","text":"b"}]}'
    escaped = MOLD % b'"\\u00e9"'
    read, added = _sums([*[twice] * 3, *[escaped] * 5, *[MOLD % b'"x"'] * 3])
    assert read == added


BEFORE, AFTER = b'{"object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":', b"}}]}"


def test_what_only_looks_like_the_chunks_before_is_read_as_what_it_is() -> None:
    """The same bytes around something that is no text."""
    read, added = _sums([BEFORE + text + AFTER for text in (*[b'"x"'] * 20, b"null", b'"y"')])
    assert read == added
    assert read["choices"][0]["message"]["content"] == "x" * 20 + "y"


def test_what_is_no_json_is_refused_behind_chunks_of_the_same_bytes() -> None:
    read = Assembly()
    for _ in range(20):
        read.read(BEFORE + b'"x"' + AFTER)
    with pytest.raises(ValueError, match="Expecting"):
        read.read(BEFORE + b'"a"b"' + AFTER)
    assert read.result()["choices"][0]["message"]["content"] == "x" * 20
