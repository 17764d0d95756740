"""Learned head-room: bytes beyond the estimate for a model that ran out of memory on a device. It decays over time.

After a failed load, and after a first failure while computing (which foreign use may have caused), estimate and
head-room together are limited to the size of the empty device, so that the model can still be loaded. After a second
failure while computing they are not limited, because each failure ends running requests. A model that then does not fit
is refused with numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MIN_BYTES = 2**20
"""Smaller head-room is dropped."""
FIRST_SHARE = 16
"""The first head-room is a sixteenth of the need on the device; it doubles each time."""
MAX_SHARE = 4
"""The head-room of each kind (loading, computing) is at most a quarter of the need."""
ENOUGH_GOOD = 3
"""The head-room is halved after this number of consecutive workers that ended normally."""
HALF_LIFE_SECONDS = 3600.0
"""The head-room is halved after each such period without a shortage, because foreign use may have caused the
shortage.
"""


@dataclass(frozen=True, slots=True)
class Headroom:
    """The head-room of one model on one device. `good`: normal ends since the last change at time `at` (seconds)."""

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
        """Whether the entry can be deleted."""
        return self.total_bytes == 0


def grown(room: Headroom, need_bytes: int, now: float, *, computing: bool) -> Headroom:
    """The head-room after one more shortage, while computing or loading. `need_bytes` is the estimate."""
    before = decayed(room, now)
    if computing:
        return replace(before, compute_bytes=_more(before.compute_bytes, need_bytes), good=0, at=now)
    return replace(before, load_bytes=_more(before.load_bytes, need_bytes), good=0, at=now)


def _first(need_bytes: int) -> int:
    return max(MIN_BYTES, need_bytes // FIRST_SHARE)


def _more(bytes_before: int, need_bytes: int) -> int:
    first = _first(need_bytes)
    return min(max(first, 2 * bytes_before), max(first, need_bytes // MAX_SHARE))


def decayed(room: Headroom, now: float) -> Headroom:
    """The head-room at `now`, after decay; a clock that was set back is ignored."""
    halvings = int(max(0.0, now - room.at) / HALF_LIFE_SECONDS)
    return _halved(room, halvings, room.at + halvings * HALF_LIFE_SECONDS) if halvings else room


def after_normal_end(room: Headroom, now: float) -> Headroom:
    """The head-room after one more worker that ended normally."""
    before = decayed(room, now)
    if before.good + 1 < ENOUGH_GOOD:
        return replace(before, good=before.good + 1)
    return _halved(before, 1, now)


def _halved(room: Headroom, times: int, at: float) -> Headroom:
    return Headroom(_rest(room.load_bytes, times), _rest(room.compute_bytes, times), 0, at)


def _rest(count: int, times: int) -> int:
    rest = count >> min(times, 64)
    return rest if rest >= MIN_BYTES else 0


def extra_bytes(room: Headroom, need_bytes: int, capacity_bytes: int) -> int:
    """The bytes to add to an estimate of `need_bytes` on a device with `capacity_bytes` for all models."""
    required = room.compute_bytes if room.compute_bytes > _first(need_bytes) else 0
    spare = max(0, capacity_bytes - need_bytes - required)
    return required + min(room.total_bytes - required, spare)
