"""The kind of a chunk and its parsed form."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.apis.openai.frames import Data, DeltaKind, frame_of, kind_of

_TEXTS = st.one_of(
    st.sampled_from(["", '"', '"finish_reason":"stop"', '"text":"x"', '","content":"', "\\", '"choices":[]']),
    st.text('ab":,[]{}\\ \n', max_size=12),
)
_NAMES = ("content", "reasoning_content", "reasoning", "refusal", "text")
_DELTAS = st.fixed_dictionaries(
    {},
    optional={
        "role": st.just("assistant"),
        **{name: st.one_of(st.none(), _TEXTS) for name in _NAMES},
        "tool_calls": st.lists(st.fixed_dictionaries({"index": st.just(0), "arguments": _TEXTS}), max_size=1),
        "function_call": st.fixed_dictionaries({"arguments": _TEXTS}),
    },
)
_CHOICES = st.fixed_dictionaries(
    {"index": st.integers(0, 3), "finish_reason": st.sampled_from([None, None, "stop", "length"])},
    optional={"delta": _DELTAS | st.just({"role": "assistant", "content": ""}), "text": _TEXTS, "logprobs": st.none()},
)
_CHUNKS = st.fixed_dictionaries({"choices": st.lists(_CHOICES, max_size=3)}, optional={"usage": st.none()})


def _has_content(choice: dict[str, Any]) -> bool:
    fields = [choice.get("text"), *choice.get("delta", {}).values()]
    return any(value for name, value in zip(["text", *choice.get("delta", {})], fields, strict=True) if name != "role")


def _parsed(chunk: dict[str, Any]) -> DeltaKind:
    choices = chunk["choices"]
    if any(choice["finish_reason"] is not None for choice in choices):
        return DeltaKind.FINISH
    if any(_has_content(choice) for choice in choices):
        return DeltaKind.CONTENT
    return DeltaKind.OTHER if choices else DeltaKind.USAGE


@given(_CHUNKS)
def test_kind_of_a_chunk_depends_on_all_its_choices(chunk: dict[str, Any]) -> None:
    """With and without blanks between the parts of the JSON text."""
    kind = _parsed(chunk)
    assert kind_of(chunk["choices"]) is kind
    for payload in (orjson.dumps(chunk), json.dumps(chunk).encode()):
        assert frame_of(payload) == Data(payload, kind, chunk)


@pytest.mark.parametrize("payload", [b"{}", b'{"choices":null}', b'{"error":{"message":"no"}}', b"{oops}"])
def test_invalid_chunks_are_passed_on_as_bytes(payload: bytes) -> None:
    assert frame_of(payload) == Data(payload, DeltaKind.OTHER, None)


def test_unpaired_surrogate_is_content() -> None:
    """Models generate one, and most JSON parsers reject it."""
    choice = {"delta": {"content": "\ud83d"}}
    payload = json.dumps({"choices": [choice]}).encode()
    assert frame_of(payload) == Data(payload, DeltaKind.CONTENT, {"choices": [choice]})


@pytest.mark.parametrize("choice", [1, None, {"delta": 1}, {"delta": {"content": 7}}, {"delta": {"content": ["x"]}}])
def test_unusual_choices_are_passed_on(choice: Any) -> None:
    payload = orjson.dumps({"choices": [choice]})
    assert frame_of(payload) == Data(payload, kind_of([choice]), {"choices": [choice]})
