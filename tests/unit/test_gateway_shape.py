"""The values of a body are counted before it is parsed, and its depth afterwards."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.apis.body_parser import MAX_NESTING, MAX_VALUES, check_count, check_depth, parse_json
from gateway.errors import RequestError


def test_so_many_values_and_no_more() -> None:
    most = b"[" + b"1," * (MAX_VALUES - 2) + b"1]"
    check_count(most)
    with pytest.raises(RequestError, match=str(MAX_VALUES)):
        check_count(b"[" + b"1," * (MAX_VALUES + 1) + b"1]")
    with pytest.raises(RequestError, match=str(MAX_VALUES)):
        check_count(b"[" + b'"",' * (2 * MAX_VALUES) + b'""]')


def test_text_may_hold_what_it_likes() -> None:
    text = "[{" * 1000 + "," * MAX_VALUES + '"\\"' * 1000
    assert parse_json(json.dumps({"a": text, "b": ["\\", '"']}).encode()) == {"a": text, "b": ["\\", '"']}


def test_a_large_body_that_is_no_json_is_not_looked_at_twice() -> None:
    with pytest.raises(RequestError) as caught:
        parse_json(b'{"a": NaN, "b": "' + b"x" * 2**20 + b'"}')
    assert caught.value.param is None
    with pytest.raises(RequestError) as caught:
        parse_json(b'{"a": NaN}')
    assert caught.value.param == "a"


JSON = st.recursive(
    st.none() | st.integers() | st.text(alphabet='ab"\\[]{},'),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='a"\\[{'), inner, max_size=4),
    max_leaves=20,
)


def _depth(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)


@given(value=JSON, levels=st.integers(MAX_NESTING - 8, MAX_NESTING + 8))
def test_the_depth_is_exact_whatever_stands_in_strings(value: object, levels: int) -> None:
    for _ in range(levels):
        value = [value]
    assert isinstance(value, list)
    if _depth(value) <= MAX_NESTING:
        check_depth(value)
    else:
        with pytest.raises(RequestError, match="nested deeper"):
            check_depth(value)


@pytest.mark.parametrize("levels", [MAX_NESTING, 5000])
def test_nesting_deeper_than_the_limit_is_refused(levels: int) -> None:
    with pytest.raises(RequestError, match="nested deeper"):
        parse_json(b'{"a":' + b"[" * levels + b"]" * levels + b"}")
