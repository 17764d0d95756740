"""How host memory for stored sequences is divided among models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headgate.shared.units import GIB, MIB

DEFAULT_DIVISOR = 10
"""By default stored sequences of all models get the host memory that models may use, divided by this number."""
MAX_DEFAULT_BYTES = 8 * GIB
STEP_BYTES = 16 * MIB
"""The total is a multiple of this, so that small changes of free memory change no budget."""


@dataclass(frozen=True, slots=True)
class ArenaUse:
    """The arena of one model; its stored sequences take `used_bytes`.

    `fills`: the model is loaded, so that its worker adds and removes sequences. Other arenas only keep what they have.
    """

    model: str
    used_bytes: int
    last_used_at: float
    fills: bool


def total_bytes(configured_bytes: int | None, host_budget_bytes: int, room_bytes: int) -> int:
    """The sum of all budgets: as configured or by default, at most `room_bytes`, in which caches count as available."""
    wanted = configured_bytes
    if wanted is None:
        wanted = min(host_budget_bytes // DEFAULT_DIVISOR, MAX_DEFAULT_BYTES)
    return max(0, min(wanted, room_bytes)) // STEP_BYTES * STEP_BYTES


def budgets(arenas: Sequence[ArenaUse], total: int, *, alone: bool = False) -> Mapping[str, int]:
    """The budget of each model, in bytes; their sum is at most `total`. `alone`: only one model is configured.

    An arena that is not being filled keeps all it has or nothing, most recently used ones first. If models are loaded,
    these arenas get at most half of the total together; the loaded models share the rest equally. Unless it is alone,
    a loaded model gets at most half, which it can keep when it leaves for another model.
    """
    loaded = [arena.model for arena in arenas if arena.fills]
    left = total // 2 if loaded else total
    found = dict.fromkeys(loaded, 0)
    kept_bytes = 0
    for arena in sorted((item for item in arenas if not item.fills), key=lambda item: -item.last_used_at):
        fits = arena.used_bytes <= left - kept_bytes
        found[arena.model] = arena.used_bytes if fits else 0
        kept_bytes += found[arena.model]
    if loaded:
        share = (total - kept_bytes) // len(loaded)
        found |= dict.fromkeys(loaded, share if alone else min(share, total // 2))
    return found
