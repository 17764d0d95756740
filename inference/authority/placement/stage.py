"""The models that hold memory at the stages of a decision: now, after models that are leaving have ended, and after
idle models are evicted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from headgate.shared.units import format_bytes
from inference.authority.placement.ledger import Ledger
from inference.estimate.layers import HOST

WARM_SCALE = 1e-12
"""The cost of a warm model as a share of its cost if it were loaded."""


class EvictionState(StrEnum):
    """Whether a model that holds memory can be evicted now."""

    IDLE = "idle"
    YOUNG = "young"
    """idle, but inside its min_residency"""
    BUSY = "busy"
    LOADING = "loading"
    LEAVING = "leaving"
    FIXED = "fixed"
    """pinned or dedicated: is not evicted for another model or because of pressure"""
    WARM = "warm"
    """in the warm pool: it is dropped before loaded models and does not count as a model of a device"""


EVICTABLE = (EvictionState.IDLE, EvictionState.WARM)


@dataclass(frozen=True, slots=True)
class Held:
    """A model that holds memory. `reload_seconds`: to load or restore it again. Times are monotonic seconds."""

    model: str
    holding: str
    eviction_state: EvictionState
    bytes: Mapping[str, int]
    last_used_at: float
    reload_seconds: float = 1.0
    dedicated: bool = False
    is_warm_copy: bool = False
    """Whether it is the warm copy of a model, which may be wanted again."""

    @property
    def is_warm(self) -> bool:
        """Whether it takes no place of a loaded model."""
        return self.is_warm_copy or self.eviction_state is EvictionState.WARM

    @property
    def device(self) -> str:
        """Its first accelerator, or the host."""
        return next((name for name in self.bytes if name != HOST), HOST)

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices on which it counts: its accelerators, or the host if it uses none; none for a warm model."""
        if self.is_warm:
            return ()
        return tuple(name for name in self.bytes if name != HOST) or (HOST,)

    @property
    def loaded_bytes(self) -> int:
        """The bytes that count for the memory limit; 0 for a warm model."""
        return 0 if self.is_warm else sum(self.bytes.values())

    def cost(self, now: float) -> float:
        """The cost of its eviction: bytes x seconds to load it again x recency (1 if just used, less with idle
        minutes).

        All warm models together cost less than one loaded model.
        """
        idle = max(0.0, now - self.last_used_at)
        scale = WARM_SCALE if self.is_warm else 1.0
        return scale * sum(self.bytes.values()) * max(self.reload_seconds, 0.01) / (1.0 + idle / 60.0)


@dataclass(frozen=True, slots=True)
class Policy:
    """The time and the limits of a decision."""

    now: float
    max_models: int | None = None
    max_models_per_device: int | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """A ledger with the models that hold memory in it, and the models of each device."""

    ledger: Ledger
    models: tuple[Held, ...]
    there: Mapping[str, tuple[Held, ...]]
    loaded: int
    """The number of models for INFERENCE_MAX_MODELS."""

    @classmethod
    def of(cls, ledger: Ledger, models: Iterable[Held]) -> Stage:
        """The stage of a ledger and the models that hold memory in it."""
        held_models = tuple(models)
        there: dict[str, list[Held]] = {}
        for held in held_models:
            for device in held.devices:
                there.setdefault(device, []).append(held)
        loaded = sum(not held.is_warm for held in held_models)
        return cls(ledger, held_models, {device: tuple(found) for device, found in there.items()}, loaded)

    def without(self, *states: EvictionState) -> Stage:
        """The stage without the models in these states."""
        gone = {held.holding for held in self.models if held.eviction_state in states}
        if not gone:
            return self
        return Stage.of(self.ledger.without(gone), (held for held in self.models if held.holding not in gone))

    def full(self, policy: Policy) -> str | None:
        """Why no model may be added, or None."""
        count = self.loaded
        if policy.max_models is not None and count >= policy.max_models:
            return f"{count} models are loaded and INFERENCE_MAX_MODELS is {policy.max_models}"
        return None

    def closed(self, device: str, policy: Policy, *, dedicated: bool) -> str | None:
        """Why `device` accepts no further model of any size, or None."""
        there = self.there.get(self.ledger.account_of(device), ())
        if not there:
            return None
        if dedicated:
            return f"it is dedicated and {device} is used by {', '.join(held.model for held in there)}"
        if taken := [held.model for held in there if held.dedicated]:
            return f"{device} is dedicated to {taken[0]}"
        most = policy.max_models_per_device
        if most is not None and len(there) >= most:
            return f"{len(there)} models are on {device} and INFERENCE_MAX_MODELS_PER_DEVICE is {most}"
        return None

    def obstacle(
        self, devices: Iterable[str], need: Mapping[str, int], policy: Policy, *, dedicated: bool
    ) -> str | None:
        """Why a model on `devices` with this need does not fit without evictions, or None."""
        if why := self.full(policy):
            return why
        for device in devices:
            if why := self.closed(device, policy, dedicated=dedicated):
                return why
        return "; ".join(
            f"needs {format_bytes(lack.need_bytes)} on {lack.device}, available are {format_bytes(lack.free_bytes)} "
            f"(limited by {lack.bound})"
            for lack in self.ledger.lacks(need)
        ) or None  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of a decision; the same for all requests at one moment."""

    now: Stage
    left: Stage
    """without models that are leaving"""
    without_idle: Stage
    """without models that could be evicted; leaving models are still there"""
    emptied: Stage
    """only pinned and dedicated models"""

    @classmethod
    def of(cls, ledger: Ledger, models: Iterable[Held]) -> Stages:
        """The stages of a ledger and the models that hold memory in it."""
        now = Stage.of(ledger, models)
        movable = [state for state in EvictionState if state is not EvictionState.FIXED]
        return cls(now, now.without(EvictionState.LEAVING), now.without(*EVICTABLE), now.without(*movable))
