"""Decides which idle models change their device, so that free memory lies together on one.

One device is emptied as far as its idle models fit elsewhere. It is the device that has the largest room afterwards. If
several have the same room, it is the one from which the fewest bytes move. A model on several devices stays. Nothing
moves unless the largest room grows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """An idle model on one device. `need` has its bytes on each device where it may be."""

    model: str
    device: str
    bytes: int
    need: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Shift:
    """`model` goes from one device to another; `reason` says why it was refused."""

    model: str
    source: str
    target: str
    reason: str | None = None


def repack(rooms: Mapping[str, int], pieces: Sequence[Piece]) -> tuple[Shift, ...]:
    """The moves in order; each fits after those before it. `rooms` are free bytes per device for new loads."""
    most = max(rooms.values(), default=0)
    best: tuple[Shift, ...] = ()
    moved = 0
    for source in sorted(rooms):
        shifts, gained = _emptied(source, rooms, pieces)
        room = rooms[source] + gained
        if (room, -gained) > (most, -moved) and room > max(rooms.values()):
            best, most, moved = shifts, room, gained
    return best


def _emptied(source: str, rooms: Mapping[str, int], pieces: Sequence[Piece]) -> tuple[tuple[Shift, ...], int]:
    """The moves from `source`, largest model first, each to the tightest fit; and the bytes that become free."""
    others = {device: room for device, room in rooms.items() if device != source}
    gained = 0
    shifts = []
    here = [piece for piece in pieces if piece.device == source]
    for piece in sorted(here, key=lambda item: (-item.bytes, item.model)):
        left = {device: others[device] - need for device, need in piece.need.items() if device in others}
        fitting = {device: rest for device, rest in left.items() if rest >= 0}
        if fitting:
            target = min(fitting, key=lambda device: (fitting[device], device))
            others[target] = fitting[target]
            gained += piece.bytes
            shifts.append(Shift(piece.model, source, target))
    return tuple(shifts), gained
