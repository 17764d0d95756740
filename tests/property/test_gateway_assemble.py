"""An answer that is kept as text equals the answer that is assembled from all fields of its chunks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.apis.openai.assemble import Assembly

HEAD = {"id": "c1", "object": "chat.completion.chunk", "created": 5, "model": "demo"}
TEXTS = st.text(max_size=8)
DELTAS = (
    st.fixed_dictionaries({"content": TEXTS})
    | st.fixed_dictionaries({"content": TEXTS})
    | st.fixed_dictionaries({"role": st.sampled_from(["assistant", "tool"]), "content": TEXTS})
    | st.just({})
    | st.fixed_dictionaries(
        {},
        optional={
            "role": st.none() | st.just("assistant"),
            "content": st.none() | TEXTS | st.integers(),
            "reasoning_content": TEXTS,
            "refusal": st.none() | TEXTS,
            "annotations": st.just([1]),
            "tool_calls": st.just([{"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}}]),
        },
    )
)
LOGPROBS = st.none() | st.none() | st.just({"content": [{"token": "a"}]})
FINISHES = st.sampled_from([None, None, "stop", "length"])
WRITTEN = st.fixed_dictionaries(
    {"index": st.just(0), "delta": DELTAS, "logprobs": LOGPROBS, "finish_reason": FINISHES},
    optional={"stop_reason": st.just("END")},
)
ODD = st.fixed_dictionaries(
    {},
    optional={
        "index": st.integers(0, 1),
        "delta": DELTAS | st.none(),
        "text": TEXTS,
        "logprobs": LOGPROBS,
        "finish_reason": FINISHES,
        "stop_reason": st.just("END"),
    },
)
CHUNKS = st.lists(
    st.fixed_dictionaries(
        {"choices": st.lists(WRITTEN, max_size=1) | st.lists(WRITTEN, max_size=1) | st.lists(ODD, max_size=2)},
        optional={
            "usage": st.none() | st.fixed_dictionaries({"total_tokens": st.integers(1, 3)}),
            "service_tier": st.none() | st.just("default"),
        },
    ),
    max_size=8,
)
HEADS = st.just(HEAD) | st.fixed_dictionaries(
    {"object": st.sampled_from(["chat.completion.chunk", "text_completion"])},
    optional={"id": st.none() | st.just("c2"), "created": st.just(6), "model": st.just("other")},
)


def _sum(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    assembly = Assembly()
    for chunk in chunks:
        assembly.add(chunk)
    return assembly.result()


def _with_everything_kept(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """A `system_fingerprint` of None changes no answer, but chunks with the field are not kept as text."""
    return _sum([{"system_fingerprint": None, **chunk} for chunk in chunks])


@given(CHUNKS, st.lists(HEADS, min_size=1, max_size=2))
def test_text_and_full_assembly_give_the_same_answer(chunks: list[dict[str, Any]], heads: list[dict[str, Any]]) -> None:
    all_chunks = [{**heads[min(at, len(heads) - 1)], **chunk} for at, chunk in enumerate([{"choices": []}, *chunks])]
    before = copy.deepcopy(all_chunks)
    whole = _sum(all_chunks)
    assert whole == _with_everything_kept(all_chunks)
    assert list(whole) == list(_with_everything_kept(all_chunks)), "in the same order"
    assert all_chunks == before, "the input is not changed"


@given(st.lists(TEXTS, min_size=1, max_size=20), st.sampled_from(["chat.completion.chunk", "text_completion"]))
def test_texts_of_plain_chunks_are_joined(texts: list[str], kind: str) -> None:
    def chunk(text: str) -> dict[str, Any]:
        part = {"text": text} if kind == "text_completion" else {"delta": {"content": text}}
        return {**HEAD, "object": kind, "choices": [{"index": 0, **part, "logprobs": None, "finish_reason": None}]}

    choice = _sum([chunk(text) for text in texts])["choices"][0]
    assert (choice["text"] if kind == "text_completion" else choice["message"]["content"]) == "".join(texts)


def _choice(**fields: Any) -> dict[str, Any]:
    return {**HEAD, "choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": None, **fields}]}


@pytest.mark.parametrize(
    "chunk",
    [
        _choice(delta={"content": None}),
        _choice(delta={"content": 7}),
        _choice(delta={"role": None, "content": "b"}),
        _choice(delta={"reasoning_content": "hm"}),
        _choice(delta=None),
        _choice(index=1),
        _choice(logprobs={"content": []}),
        _choice(stop_reason="END", finish_reason="stop"),
        {**HEAD, "choices": [{"index": 0, "delta": {"content": "b"}, "logprobs": None, "stop_reason": "END"}]},
        {**HEAD, "choices": [{"index": 0, "delta": {"content": "b"}, "stop_reason": 1, "finish_reason": None}]},
        {**HEAD, "choices": [*_choice()["choices"], *_choice(index=1)["choices"]]},
        {**HEAD, "choices": [], "system_fingerprint": "fp"},
        {**HEAD, "choices": [], "service_tier": "flex"},
    ],
)
def test_chunk_with_other_fields_keeps_the_earlier_text(chunk: dict[str, Any]) -> None:
    """The text is kept once, with its role, its finish reason and the usage."""
    first = {**_choice(delta={"role": "assistant", "content": "a"}), "usage": {"total_tokens": 1}}
    for before in ([first], [first, _choice(finish_reason="length")], [{**HEAD, "choices": []}]):
        all_chunks = [*before, chunk, _choice(delta={"content": "c"})]
        assert _sum(all_chunks) == _with_everything_kept(all_chunks)


@pytest.mark.parametrize("chunk", [7, {}, {**HEAD, "choices": None}, {**HEAD, "choices": [3]}, _choice(index="0")])
def test_invalid_chunk_after_text_is_refused(chunk: Any) -> None:
    with pytest.raises(ValueError, match=r"chunk|choice"):
        _sum([_choice(delta={"content": "a"}), chunk])
