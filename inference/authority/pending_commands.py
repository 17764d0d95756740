"""The commands that are in progress, each with what it waits for."""

from __future__ import annotations

from dataclasses import dataclass

from inference.authority.lifecycle import Eviction
from inference.authority.placement.repack import Shift
from inference.settings import ModelSpec


@dataclass(frozen=True, slots=True)
class UnloadCommand:
    """Waits until `worker` has ended."""

    model: str
    worker: str


@dataclass(frozen=True, slots=True)
class OffloadCommand:
    """Waits until the model is warm, or was unloaded instead."""

    model: str


@dataclass(frozen=True, slots=True)
class EvictCommand:
    """Waits for the record of the model's departure."""

    model: str
    record: Eviction | None = None


@dataclass(frozen=True, slots=True)
class MoveCommand:
    """Moves a model: it is measured and checked first (`begun` is false), then its ticket waits.

    `returns_from_cpu`: the authority moves a model back that had fallen back to the CPU.
    """

    model: str
    device: str
    seconds: float | None
    begun: bool = False
    ticket: int | None = None
    returns_from_cpu: bool = False
    parent: int | None = None
    """the command that this move is part of"""


@dataclass(frozen=True, slots=True)
class CollectCommand:
    """Waits until idle models are unloaded, then until heaps are trimmed."""

    awaited: frozenset[str]
    records: tuple[Eviction, ...] = ()
    trimming: bool = False


@dataclass(frozen=True, slots=True)
class DefragmentCommand:
    """Trims, measures idle models on every device, then moves them one after another."""

    before_bytes: int
    trimmed_bytes: int = 0
    cells: int = 0
    reclaimed_bytes: int = 0
    awaited_read: int | None = None
    """None until heaps are trimmed"""
    unmeasurable: frozenset[str] = frozenset()
    planned: tuple[Shift, ...] | None = None
    moving: Shift | None = None
    done: tuple[Shift, ...] = ()


@dataclass(frozen=True, slots=True)
class RecoverCommand:
    """Waits until the state of a device is decided."""

    device: str
    renewed: bool = False


@dataclass(frozen=True, slots=True)
class PlanCommand:
    """A dry run: `spec` is what is planned for, None for the model as it is. `reduced`: the settings with which it
    would be loaded instead, because it does not fit.
    """

    model: str
    spec: ModelSpec | None
    divisions: int = 0
    reduced: ModelSpec | None = None


@dataclass(frozen=True, slots=True)
class RefreshCommand:
    """Waits for a fresh reading of all devices."""

    awaited_read: int


Command = (
    UnloadCommand | OffloadCommand | EvictCommand | MoveCommand | CollectCommand | DefragmentCommand | RecoverCommand
    | PlanCommand | RefreshCommand
)  # fmt: skip
