"""The catalog of stored sequences against a search through all of them."""

from __future__ import annotations

import time
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.worker.kv.catalog import MAX_CANDIDATES, Catalog, common_prefix
from inference.worker.steps import StoredSequence, sequence_id

pytestmark = pytest.mark.unmeasured

TOKENS = st.lists(st.integers(0, 2), max_size=8).map(lambda tokens: array("i", tokens))
TENANTS = st.sampled_from(["", "a"])


def filled(items: list[tuple[array[int], str]]) -> tuple[Catalog, list[StoredSequence]]:
    catalog, stored = Catalog(), []
    for tokens, tenant in items:
        if catalog.same(tokens, tenant) is None:
            stored.append(StoredSequence(tokens, tenant))
            catalog.add(stored[-1])
    return catalog, stored


@given(st.lists(st.tuples(TOKENS, TENANTS), max_size=30), TOKENS, TENANTS, st.integers(0, 9))
def test_candidates_are_the_longest_prefixes(
    items: list[tuple[array[int], str]], prompt: array[int], tenant: str, limit: int
) -> None:
    catalog, stored = filled(items)
    own = [(item, common_prefix(item.tokens, prompt, limit)) for item in stored if item.tenant == tenant]
    expected = sorted((length for _item, length in own if length), reverse=True)
    found = list(catalog.candidates(prompt, tenant, limit))
    assert [length for _item, length in found] == expected[:MAX_CANDIDATES]
    assert {id(item) for item, _length in found} <= {id(item) for item, length in own if length}


@given(st.lists(st.tuples(TOKENS, TENANTS), max_size=30), st.data())
def test_removed_sequences_are_not_found(items: list[tuple[array[int], str]], data: st.DataObject) -> None:
    catalog, stored = filled(items)
    removed = data.draw(st.lists(st.sampled_from(stored), unique_by=id)) if stored else []
    for item in removed:
        catalog.remove(item)
        catalog.remove(item)  # ignored
    left = [item for item in stored if all(item is not other for other in removed)]
    assert len(catalog) == len(left) and {id(item) for item in catalog} == {id(item) for item in left}
    assert all(catalog.same(item.tokens, item.tenant) is item for item in left)
    assert all(catalog.same(item.tokens, item.tenant) is None for item in removed)


def test_search_among_10000_long_sequences_is_fast() -> None:
    catalog = Catalog()
    shared = list(range(1000))
    for number in range(10_000):
        catalog.add(StoredSequence(array("i", [*shared, number, *range(200)]), "tenant"))
    prompt = array("i", [*shared, 5000, *range(200), 7, 7])
    seconds = []
    for _ in range(20):
        began = time.perf_counter()
        found, length = next(catalog.candidates(prompt, "tenant", len(prompt) - 1))
        seconds.append(time.perf_counter() - began)
        assert (found.tokens[1000], length) == (5000, 1201)
    assert sorted(seconds)[10] < 0.001


@given(TOKENS, TENANTS, TOKENS, TENANTS)
def test_ids_identify_tokens_and_tenant(
    tokens: array[int], tenant: str, other_tokens: array[int], other_tenant: str
) -> None:
    is_same = sequence_id(tokens, tenant) == sequence_id(other_tokens, other_tenant)
    assert is_same == ((tokens, tenant) == (other_tokens, other_tenant))


def test_candidates_are_limited() -> None:
    catalog = Catalog()
    for number in range(3 * MAX_CANDIDATES):
        catalog.add(StoredSequence(array("i", [1, number]), ""))
    assert len(list(catalog.candidates(array("i", [1, 7, 7]), "", 2))) == MAX_CANDIDATES
