"""Threads of models that compute on the CPU: no more than cores, none without, what is configured stays."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inference.authority.handlers.running.thread_shares import shares


def test_one_model_has_all_cores_and_two_share_them() -> None:
    assert shares(4, {"a": None}) == {"a": 4}
    assert shares(5, {"a": None, "b": None}) == {"a": 3, "b": 2}
    assert shares(4, {}) == {}


def test_what_is_configured_stays_and_the_others_share_the_rest() -> None:
    assert shares(4, {"a": 3, "b": None}) == {"a": 3, "b": 1}
    assert shares(4, {"a": 9, "b": None, "c": None}) == {"a": 9, "b": 1, "c": 1}


@given(st.integers(1, 256), st.dictionaries(st.text(max_size=3), st.none() | st.integers(1, 64), max_size=12))
def test_cores_are_never_given_twice_while_there_is_one_for_each(cores: int, busy: dict[str, int | None]) -> None:
    found = shares(cores, busy)
    assert found.keys() == busy.keys()
    free = {name: found[name] for name, count in busy.items() if count is None}
    assert all(found[name] == count for name, count in busy.items() if count is not None)
    left = cores - sum(count for count in busy.values() if count is not None)
    if free:
        assert min(free.values()) >= 1
        assert max(free.values()) - min(free.values()) <= 1
        assert sum(free.values()) == max(left, len(free))
