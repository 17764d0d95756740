"""Which sequences are saved when a model is offloaded, and which properties must match to restore them."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from inference.worker.engine.scheduler import Scheduler
from inference.worker.kv.saved_sequences import Retained, chosen, differing
from inference.worker.steps import Job, Limits


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 50)), max_size=8), st.integers(-10, 300))
def test_most_recently_used_sequences_that_fit_are_chosen(sequences: list[tuple[int, int]], most_bytes: int) -> None:
    """Most recently used first; a sequence that is left out would not have fitted."""
    retained = [Retained(slot, array("i", [1]), "t", used) for slot, (_size, used) in enumerate(sequences)]
    sizes = {slot: size for slot, (size, _used) in enumerate(sequences)}
    kept = chosen(retained, sizes, most_bytes)
    assert sum(sizes[item.slot] for item in kept) <= max(0, most_bytes)
    assert [item.used_at for item in kept] == sorted((item.used_at for item in kept), reverse=True)
    room = most_bytes
    for item in sorted(retained, key=lambda item: item.used_at, reverse=True):
        if item in kept:
            room -= sizes[item.slot]
        else:
            assert sizes[item.slot] > room


def test_differing_returns_the_changed_keys() -> None:
    """Also keys that one side lacks."""
    assert differing({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 3, "d": 4}) == ("b", "c", "d")
    assert differing({"a": [1, 2]}, {"a": [1, 2]}) == ()


def test_adopted_sequence_is_reused_as_a_retained_prefix() -> None:
    """Only by a prompt of the same tenant."""
    limits = Limits(slots=2, context=4096, batch=64, queue=8, can_trim=True)
    tokens = array("i", range(1, 1001))
    scheduler = Scheduler(limits)
    scheduler.adopt([Retained(1, tokens, "alice")])
    (held,) = scheduler.retained()
    assert (held.slot, held.tenant, list(held.tokens)) == (1, "alice", list(tokens))
    for number, tenant, start in ((1, "bob", 0), (2, "alice", 1000)):
        assert scheduler.submit([Job(number, [*tokens, 7], tenant=tenant)])
        (row,) = [row for row in scheduler.plan(0.0, 64).rows if row.job == number]
        assert row.start == start
        scheduler.computed()
        if tenant == "alice":
            assert scheduler.retained() == []
            scheduler.extend(number, 8)
