"""What is learned when memory runs out although the estimate allowed it: how it grows, what bounds it, how it goes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inference.authority.placement.headroom import (
    ENOUGH_GOOD,
    HALF_LIFE_SECONDS,
    LEAST_BYTES,
    MOST_SHARE,
    Headroom,
    asked,
    eased,
    grown,
    proven,
)

MIB = 2**20
NEED = 1600 * MIB


def test_each_shortage_doubles_it_up_to_a_quarter_of_the_need() -> None:
    """A sixteenth first, and in the end as much as a quarter of the model's own need."""
    room = Headroom()
    seen = []
    for _ in range(6):
        room = grown(room, NEED, 0.0, computing=True)
        seen.append(room.compute_bytes // MIB)
    assert seen == [100, 200, 400, 400, 400, 400]
    assert room.load_bytes == 0


def test_the_kinds_are_kept_apart() -> None:
    """A refused load says nothing of what computing takes."""
    room = grown(Headroom(), NEED, 0.0, computing=False)
    assert (room.load_bytes, room.compute_bytes) == (100 * MIB, 0)
    room = grown(room, NEED, 0.0, computing=True)
    assert (room.load_bytes, room.compute_bytes) == (100 * MIB, 100 * MIB)


def test_a_tiny_model_gets_a_mebibyte() -> None:
    """Of a need that is hardly there a share would be nothing at all."""
    assert grown(Headroom(), 0, 0.0, computing=True).compute_bytes == LEAST_BYTES


def test_good_ends_halve_it_and_then_it_is_forgotten() -> None:
    """Three in a row, each time; what is below a mebibyte is nothing."""
    room = Headroom(0, 3 * MIB)
    for _ in range(ENOUGH_GOOD - 1):
        room = proven(room, 1.0)
    assert room.compute_bytes == 3 * MIB
    room = proven(room, 1.0)
    assert room == Headroom(0, 3 * MIB // 2, 0, 1.0)
    for _ in range(ENOUGH_GOOD):
        room = proven(room, 1.0)
    assert room.is_empty


def test_a_shortage_starts_the_count_over() -> None:
    """Two good ends and a bad one are no three good ends."""
    room = proven(proven(Headroom(0, 4 * MIB), 0.0), 0.0)
    assert grown(room, NEED, 0.0, computing=False).good == 0


def test_time_halves_it() -> None:
    """Every whole hour; the rest of an hour counts for the next one."""
    room = Headroom(8 * MIB, 4 * MIB, 2, 100.0)
    assert eased(room, 100.0 + HALF_LIFE_SECONDS - 1) == room
    assert eased(room, 50.0) == room
    later = eased(room, 100.0 + 2.5 * HALF_LIFE_SECONDS)
    assert later == Headroom(2 * MIB, MIB, 0, 100.0 + 2 * HALF_LIFE_SECONDS)
    assert eased(room, 1e12).is_empty


def test_one_shortage_never_shuts_a_model_out() -> None:
    """It is asked for as far as the empty device can give it; after a second death the room is insisted on."""
    assert asked(Headroom(100 * MIB, 0), NEED, NEED + 300 * MIB) == 100 * MIB
    assert asked(Headroom(100 * MIB, 0), NEED, NEED + 30 * MIB) == 30 * MIB
    assert asked(Headroom(100 * MIB, 0), NEED, NEED - MIB) == 0
    assert asked(Headroom(400 * MIB, 100 * MIB), NEED, NEED + MIB) == MIB
    assert asked(Headroom(100 * MIB, 200 * MIB), NEED, NEED) == 200 * MIB
    assert asked(Headroom(100 * MIB, 200 * MIB), NEED, NEED + 250 * MIB) == 250 * MIB


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1e6)), max_size=30), st.integers(0, 2**40))
def test_it_is_bounded_and_never_negative(shortages: list[tuple[bool, float]], need: int) -> None:
    """Whatever happens when: at most a quarter of the need for each kind, or the least there is."""
    room = Headroom()
    for computing, now in shortages:
        room = grown(room, need, now, computing=computing)
        for count in (room.load_bytes, room.compute_bytes):
            assert 0 <= count <= max(need // MOST_SHARE, need // 16, LEAST_BYTES)
        assert not room.is_empty
