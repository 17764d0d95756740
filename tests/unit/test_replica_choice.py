"""Which replica gets a request, and when a model gets more or fewer replicas."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from inference.authority.placement.replica_choice import (
    AFFINITY_FACTOR,
    AFFINITY_SECONDS,
    CROWDED_SECONDS,
    SPARE_SECONDS,
    Replica,
    choose,
    choose_alone,
    has_spare,
    is_crowded,
    to_drop,
    to_load,
)

UP = Replica("a", True, 0.0, 0, 4, 0.5)
COLD = Replica("c", False, 2.0, 0, 4, can_load=True)
seconds = st.floats(0, 100)
replica = st.builds(
    Replica, st.just(""), st.booleans(), seconds, st.integers(0, 40), st.integers(1, 8), st.none() | seconds,
    can_load=st.booleans(), is_failed=st.booleans(),
)  # fmt: skip
several = st.lists(replica, min_size=1, max_size=5).map(
    lambda found: [replace(item, id=str(at)) for at, item in enumerate(found)]
)


def other(**changes: object) -> Replica:
    return replace(UP, id="b", **changes)  # type: ignore[arg-type]


def test_request_goes_to_the_replica_with_the_least_expected_wait() -> None:
    assert choose([replace(UP, active=6), other(active=5)]) == "b"
    assert choose([replace(UP, active=6), other(active=6, answer_seconds=0.1)]) == "b"
    assert choose([UP, other()]) == "a"
    assert choose([replace(UP, active=2), other(active=1)]) == "b"


def test_wait_for_a_loading_replica_includes_its_remaining_loading_time() -> None:
    assert choose([replace(UP, active=8), other(load_seconds=1.0)]) == "b"
    assert choose([replace(UP, active=8), other(load_seconds=9.0)]) == "a"


def test_replica_that_is_not_loaded_gets_requests_only_without_a_loaded_one() -> None:
    assert choose([replace(UP, active=40), COLD]) == "a"
    assert choose([replace(COLD, id="x", load_seconds=3.0), COLD]) == "c"
    assert choose([COLD, replace(COLD, id="x", load_seconds=3.0, active=9)]) == "x"  # one is loaded for all requests


def test_conversation_stays_with_its_replica_unless_the_wait_is_much_longer() -> None:
    assert choose([replace(UP, active=3), other()], "a") == "a"
    assert choose([replace(UP, active=4), other()], "a") == "a"  # 0.5 s longer
    assert choose([replace(UP, active=5), other()], "a") == "b"  # 1 s
    assert choose([replace(UP, active=5), other(active=4)], "a") == "a"  # twice the shortest
    assert choose([replace(UP, is_up=False), other()], "a") == "b"
    assert choose([UP, other()], "gone") == "a"


@given(several, st.sampled_from(["0", "1", "2", "9"]))
def test_affinity_never_costs_more_than_its_bound(replicas: list[Replica], last: str) -> None:
    found = next(item for item in replicas if item.id == choose(replicas, last))
    up = [item for item in replicas if item.is_up]
    if not up:
        return
    best = min(item.wait_seconds for item in up)
    assert found in up
    assert found.wait_seconds <= max(AFFINITY_FACTOR * best, best + AFFINITY_SECONDS)
    assert found.id == last or found.wait_seconds == best


def test_suspected_request_runs_where_a_worker_has_ended() -> None:
    failed = other(is_up=False, is_failed=True, load_seconds=2.0)
    assert choose_alone([UP, failed], 10.0) == "b"
    assert choose_alone([UP, replace(failed, load_seconds=60.0)], 10.0) == "a"
    assert choose_alone([replace(UP, active=1), other()], 10.0) == "b"
    assert choose_alone([replace(UP, is_up=False, load_seconds=1.0), COLD], 10.0) == "a"


def test_least_number_of_replicas_is_loaded_while_the_model_is_used() -> None:
    assert to_load([UP, COLD], 2, is_used=True, crowded_seconds=0) == "c"
    assert to_load([UP, COLD], 2, is_used=False, crowded_seconds=0) is None
    assert to_load([UP, other(), COLD], 2, is_used=True, crowded_seconds=0) is None
    assert to_load([COLD], 2, is_used=True, crowded_seconds=0) is None
    assert to_load([UP, replace(COLD, can_load=False)], 2, is_used=True, crowded_seconds=0) is None
    warm = replace(COLD, id="w", load_seconds=0.1)
    assert to_load([UP, COLD, warm], 2, is_used=True, crowded_seconds=0) == "w"


def test_further_replica_is_loaded_after_the_model_was_crowded_for_a_while() -> None:
    assert to_load([UP, COLD], 1, is_used=True, crowded_seconds=CROWDED_SECONDS) == "c"
    assert to_load([UP, COLD], 1, is_used=True, crowded_seconds=CROWDED_SECONDS / 2) is None
    loading = other(load_seconds=1.0)
    assert to_load([UP, loading, COLD], 1, is_used=True, crowded_seconds=60) is None  # one at a time


def test_model_is_crowded_when_as_many_wait_as_a_replica_takes() -> None:
    assert is_crowded([replace(UP, active=8)])
    assert not is_crowded([replace(UP, active=7)])
    assert is_crowded([replace(UP, active=6), other(active=6)])
    assert not is_crowded([replace(COLD, active=8)])


def test_replica_leaves_after_the_others_had_room_for_a_while() -> None:
    two = [replace(UP, active=1), other()]
    assert to_drop(two, 1, spare_seconds=SPARE_SECONDS) == "b"
    assert to_drop([other(), replace(UP, active=1)], 1, spare_seconds=SPARE_SECONDS) == "b"
    assert to_drop([UP, other()], 1, spare_seconds=SPARE_SECONDS) == "b"
    assert to_drop(two, 1, spare_seconds=SPARE_SECONDS / 2) is None
    assert to_drop(two, 2, spare_seconds=SPARE_SECONDS) is None
    assert has_spare(two, 1)
    assert has_spare([replace(UP, active=1), other(active=1)], 1)
    assert not has_spare([replace(UP, active=2), other(active=1)], 1)
    assert not has_spare(two, 2)
    assert not has_spare([COLD], 1)


@given(several, st.integers(1, 4), seconds, seconds)
def test_scaling_keeps_its_bounds(replicas: list[Replica], least: int, crowded: float, spare: float) -> None:
    up = [item.id for item in replicas if item.is_up]
    more = to_load(replicas, least, is_used=True, crowded_seconds=crowded)
    less = to_drop(replicas, least, spare_seconds=spare)
    assert more is None or (up and next(item for item in replicas if item.id == more).can_load)
    assert less is None or (less in up and len(up) > least)
