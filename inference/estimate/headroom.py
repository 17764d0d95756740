"""Decides how much more than estimated a model is given on a device where memory ran out; forgets it by and by.

Two kinds, because they cost differently. After a load that was refused although the estimate allowed it, nobody was
hurt: the room is asked for as far as the empty device can give it, so that refusals never shut a model out. So it is
after one death while computing, which may have been somebody else's doing. After a second one the room is asked for
whatever the device has, because requests die with the worker: a model that does not fit with it is refused with
numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

LEAST_BYTES = 2**20
"""What is below this is forgotten."""
FIRST_SHARE = 16
"""The first time a sixteenth of what the model needs there; twice as much each time after that."""
MOST_SHARE = 4
"""And never more than a quarter of it, for each kind."""
ENOUGH_GOOD = 3
"""So many workers in a row that ended in good order halve it."""
HALF_LIFE_SECONDS = 3600.0
"""And so does every hour without another shortage: what was short once may have been somebody else's use."""


@dataclass(frozen=True, slots=True)
class Headroom:
    """Bytes of one model on one device beyond its estimate. `good` counts ends in good order since the last change,
    which was at `at` (seconds).
    """

    load_bytes: int = 0
    compute_bytes: int = 0
    good: int = 0
    at: float = 0.0

    @property
    def total_bytes(self) -> int:
        """Both kinds."""
        return self.load_bytes + self.compute_bytes

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to remember."""
        return self.total_bytes == 0


def grown(room: Headroom, need_bytes: int, now: float, *, computing: bool) -> Headroom:
    """After one more shortage of a model whose estimate there is `need_bytes`: while computing, or while loading."""
    before = eased(room, now)
    if computing:
        return replace(before, compute_bytes=_more(before.compute_bytes, need_bytes), good=0, at=now)
    return replace(before, load_bytes=_more(before.load_bytes, need_bytes), good=0, at=now)


def _first(need_bytes: int) -> int:
    return max(LEAST_BYTES, need_bytes // FIRST_SHARE)


def _more(bytes_before: int, need_bytes: int) -> int:
    first = _first(need_bytes)
    return min(max(first, 2 * bytes_before), max(first, need_bytes // MOST_SHARE))


def eased(room: Headroom, now: float) -> Headroom:
    """What is left of it at `now`; a clock that was set back changes nothing."""
    halvings = int(max(0.0, now - room.at) / HALF_LIFE_SECONDS)
    return _halved(room, halvings, room.at + halvings * HALF_LIFE_SECONDS) if halvings else room


def proven(room: Headroom, now: float) -> Headroom:
    """After one more worker that ended in good order."""
    before = eased(room, now)
    if before.good + 1 < ENOUGH_GOOD:
        return replace(before, good=before.good + 1)
    return _halved(before, 1, now)


def _halved(room: Headroom, times: int, at: float) -> Headroom:
    return Headroom(_rest(room.load_bytes, times), _rest(room.compute_bytes, times), 0, at)


def _rest(count: int, times: int) -> int:
    rest = count >> min(times, 64)
    return rest if rest >= LEAST_BYTES else 0


def asked(room: Headroom, need_bytes: int, capacity_bytes: int) -> int:
    """What is added to an estimate of `need_bytes` on a device where all models together may have `capacity_bytes`."""
    insists = room.compute_bytes if room.compute_bytes > _first(need_bytes) else 0
    spare = max(0, capacity_bytes - need_bytes - insists)
    return insists + min(room.total_bytes - insists, spare)
