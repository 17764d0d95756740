"""Budgets for stored sequences stay within the total, are fair, and are stable."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.shared.units import GIB, MIB
from inference.authority.placement.kv_budgets import STEP_BYTES, ArenaUse, budgets, total_bytes

pytestmark = pytest.mark.unmeasured

sizes = st.integers(0, 2000).map(lambda count: count * MIB)
arenas = st.lists(
    st.builds(ArenaUse, st.text("abcdefgh", min_size=1, max_size=2), sizes, st.floats(0, 100), st.booleans()),
    unique_by=lambda arena: arena.model,
    max_size=8,
)


@given(arenas, sizes, st.booleans())
def test_sum_of_budgets_is_within_the_total_and_loaded_models_get_equal_budgets(
    found: list[ArenaUse], total: int, alone: bool
) -> None:
    given = budgets(found, total, alone=alone)
    assert given.keys() == {arena.model for arena in found}
    assert min(given.values(), default=0) >= 0
    assert sum(given.values()) <= total
    loaded = [arena.model for arena in found if arena.fills]
    assert len({given[name] for name in loaded}) <= 1
    if loaded:
        assert given[loaded[0]] >= total // 2 // len(loaded), "half of the total is for loaded models"


@given(arenas, sizes)
def test_arena_of_an_unloaded_model_keeps_all_or_nothing_and_the_last_used_one_is_first(
    found: list[ArenaUse], total: int
) -> None:
    given = budgets(found, total)
    rest = [arena for arena in found if not arena.fills]
    assert all(given[arena.model] in (0, arena.used_bytes) for arena in rest)
    most = total // 2 if len(rest) < len(found) else total
    latest = max(rest, key=lambda arena: arena.last_used_at, default=None)
    if latest is not None and latest.used_bytes <= most:
        later = [arena for arena in rest if arena.last_used_at == latest.last_used_at]
        assert len(later) > 1 or given[latest.model] == latest.used_bytes


@given(st.lists(st.sampled_from("ab"), min_size=1, max_size=10), sizes)
def test_two_models_in_turns_keep_all_their_stored_sequences(turns: list[str], total: int) -> None:
    """Each fills its budget while it is loaded, and has all of it when it is loaded again."""
    stored = {"a": 0, "b": 0}
    for at, name in enumerate(turns):
        found = [ArenaUse(model, count, float(at), fills=model == name) for model, count in stored.items()]
        given = budgets(found, total)
        assert all(given[model] >= count for model, count in stored.items())
        stored[name] = given[name]


@given(arenas, sizes, sizes)
def test_smaller_total_raises_no_budget_of_a_loaded_model(found: list[ArenaUse], total: int, less: int) -> None:
    loaded = [replace(arena, fills=True) for arena in found]
    before, after = budgets(loaded, total), budgets(loaded, max(0, total - less))
    assert all(after[name] <= before[name] for name in before)


def test_single_model_gets_the_whole_total() -> None:
    """With other models it leaves them half, although they have stored nothing yet."""
    only = [ArenaUse("a", 0, 0.0, fills=True)]
    assert budgets(only, GIB, alone=True) == {"a": GIB}
    assert budgets(only, GIB) == {"a": GIB // 2}
    assert budgets([], GIB) == {}


def test_default_total_is_a_tenth_of_the_host_budget_and_at_most_8_gib() -> None:
    """A configured total replaces it; what is left of the host limits both."""
    assert total_bytes(None, 40 * GIB, 100 * GIB) == 4 * GIB
    assert total_bytes(None, 400 * GIB, 100 * GIB) == 8 * GIB
    assert total_bytes(20 * GIB, 40 * GIB, 100 * GIB) == 20 * GIB
    assert total_bytes(20 * GIB, 40 * GIB, 3 * GIB + 1) == 3 * GIB
    assert total_bytes(None, 40 * GIB, -5) == 0
    assert total_bytes(2 * STEP_BYTES - 1, 40 * GIB, GIB) == STEP_BYTES
