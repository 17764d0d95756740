"""The warm pool stays within its budget, drops models of the least worth first, and leaves the new model its room."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from inference.authority.placement.ledger import Account, Ledger
from inference.authority.retention import HOST, EvictedModel, Warm, displaced, kept_of

GIB = 2**30
NOW = 1000.0

warms = st.builds(
    Warm,
    model=st.uuids().map(str),
    bytes=st.integers(1, 64).map(lambda count: count * 2**26),
    saves_seconds=st.floats(0, 30),
    last_used_at=st.floats(0, NOW),
)


@given(st.lists(warms, max_size=6), warms, st.integers(0, 400).map(lambda count: count * 2**26))
def test_displaced_models_suffice_and_have_the_lowest_worth(kept: list[Warm], newcomer: Warm, missing: int) -> None:
    """They release enough memory, no other set is cheaper, and their total worth is at most that of the newcomer."""
    names = displaced(newcomer, kept, missing, NOW)
    sets = [
        combination
        for size in range(len(kept) + 1)
        for combination in itertools.combinations(kept, size)
        if sum(warm.bytes for warm in combination) >= missing
    ]
    least = min((sum(warm.worth(NOW) for warm in combination) for combination in sets), default=None)
    if names is None:
        assert least is None or least > newcomer.worth(NOW) * 0.999
        return
    dropped = [warm for warm in kept if warm.model in names]
    assert sum(warm.bytes for warm in dropped) >= missing
    assert least is not None
    assert sum(warm.worth(NOW) for warm in dropped) <= max(least * 1.001, 1e-9)
    assert sum(warm.worth(NOW) for warm in dropped) <= newcomer.worth(NOW)


@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8) | st.none()), min_size=1, max_size=5),
    st.integers(0, 16),
    st.integers(0, 16),
    st.integers(8, 48),
)
def test_warm_models_leave_enough_memory_for_the_new_model(
    evicted: list[tuple[int, int | None]], need_gpu: int, need_host: int, budget: int
) -> None:
    """With any warm models the new model fits, and the limit of the host is not exceeded."""
    ledger = Ledger().open(Account("gpu-0", 64 * GIB, 64 * GIB)).open(Account(HOST, 64 * GIB, budget * GIB))
    items = []
    for number, (gpu, warm) in enumerate(evicted):
        holding, model = f"h{number}", f"m{number}"
        ledger = ledger.reserve(holding, model, {"gpu-0": gpu * GIB})
        items.append(EvictedModel(model, holding, Warm(model, warm * GIB, 1.0, number) if warm else None))
    need = {"gpu-0": need_gpu * GIB, HOST: need_host * GIB}
    kept = kept_of(items, need, ledger, NOW)
    after = ledger.without([item.holding for item in items])
    for item in items:
        if item.model in kept:
            assert item.warm is not None
            after = after.reserve(f"w {item.model}", item.model, {HOST: item.warm.bytes})
    if kept:
        assert not after.lacks(need)
    spare = budget * GIB - sum(item.warm.bytes for item in items if item.warm and item.model in kept)
    assert spare >= 0
    if not ledger.without([item.holding for item in items]).lacks(need):
        left = [item.warm.bytes for item in items if item.warm and item.model not in kept]
        assert all(size > spare - need_host * GIB for size in left), "a model was dropped although it had room"


def test_no_model_is_kept_warm_if_the_new_model_does_not_fit() -> None:
    """If the evicted models release too little memory, no model is kept warm."""
    ledger = Ledger().open(Account(HOST, GIB, GIB)).reserve("h", "m", {HOST: 10})
    leaver = EvictedModel("m", "h", Warm("m", 5, 1.0, 0.0))
    assert kept_of([leaver], {HOST: 2 * GIB}, ledger, NOW) == frozenset()
