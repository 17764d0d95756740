"""Moving idle models together: the largest room grows or nothing moves, and no device is overfull."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inference.authority.placement.repack import Piece, Shift, repack

DEVICES = ("gpu-0", "gpu-1", "gpu-2")
_rooms = st.dictionaries(st.sampled_from(DEVICES), st.integers(0, 100), min_size=1)


@st.composite
def _scenes(draw: st.DrawFn) -> tuple[dict[str, int], list[Piece]]:
    rooms = draw(_rooms)
    pieces = []
    for number in range(draw(st.integers(0, 6))):
        device = draw(st.sampled_from(sorted(rooms)))
        may = draw(st.sets(st.sampled_from(DEVICES)))
        need = {name: draw(st.integers(0, 80)) for name in sorted(may)}
        pieces.append(Piece(f"m{number}", device, draw(st.integers(0, 80)), need))
    return rooms, pieces


@given(_scenes())
def test_each_move_fits_when_it_is_made_and_the_largest_room_grows(scene: tuple[dict[str, int], list[Piece]]) -> None:
    rooms, pieces = scene
    by_name = {piece.model: piece for piece in pieces}
    after = dict(rooms)
    shifts = repack(rooms, pieces)
    for shift in shifts:
        piece = by_name.pop(shift.model)
        assert (piece.device, shift.source) == (shift.source, piece.device)
        assert shift.target in piece.need
        after[shift.target] -= piece.need[shift.target]
        after[shift.source] += piece.bytes
        assert min(after.values()) >= 0
    assert not shifts or max(after.values()) > max(rooms.values())


def test_free_memory_of_two_devices_is_joined() -> None:
    anywhere = {"gpu-0": 30, "gpu-1": 30}
    pieces = [Piece("a", "gpu-0", 30, anywhere), Piece("b", "gpu-1", 30, anywhere)]
    assert repack({"gpu-0": 40, "gpu-1": 50}, pieces) == (Shift("b", "gpu-1", "gpu-0"),)


def test_smaller_model_moves_for_the_same_room() -> None:
    anywhere = {"gpu-0": 40, "gpu-1": 40}
    pieces = [Piece("a", "gpu-0", 40, anywhere), Piece("b", "gpu-1", 30, {"gpu-0": 30, "gpu-1": 30})]
    assert repack({"gpu-0": 50, "gpu-1": 60}, pieces) == (Shift("b", "gpu-1", "gpu-0"),)


def test_model_bound_to_a_device_stays() -> None:
    assert repack({"gpu-0": 40, "gpu-1": 50}, [Piece("a", "gpu-1", 30, {"gpu-1": 30})]) == ()
    assert repack({}, []) == ()
