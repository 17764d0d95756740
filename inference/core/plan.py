"""Decides where a model goes and who must leave for it: `plan(request, ledger, models, policy)`; starts nothing.

Pure and deterministic. One trace explains a dry run, a real decision and a refusal. The cheapest set of victims is the
one with the least bytes x seconds to load them again x recency of use; pinned, dedicated, busy, loading and lately used
models are never victims.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from headgate.shared.units import format_bytes
from inference.core.fix import Scaling, nearest_fix
from inference.core.ledger import Lack, Ledger
from inference.core.victims import cheapest


class Result(StrEnum):
    """What a decision came to."""

    DEPLOYED = "DEPLOYED"
    """the model is there already"""
    FREE = "FREE"
    """it fits as things are"""
    FULL = "FULL"
    """it fits after evictions"""
    CANT_ACCOMMODATE = "CANT_ACCOMMODATE"


class Allocation(StrEnum):
    """How a model uses devices."""

    FRACTIONAL = "FRACTIONAL"
    """shares one device"""
    WHOLE = "WHOLE"
    """has one device to itself"""
    SPLIT = "SPLIT"
    """spans several devices by layer"""


class Standing(StrEnum):
    """Whether a held model could leave now."""

    IDLE = "idle"
    YOUNG = "young"
    """idle, but inside its min_residency"""
    BUSY = "busy"
    LOADING = "loading"
    LEAVING = "leaving"
    FIXED = "fixed"
    """pinned or dedicated: leaves only by hand"""


@dataclass(frozen=True, slots=True)
class Option:
    """One way to place a model: its first device and the bytes it needs per device (host RAM included).

    A fallback is looked at only when nothing else is possible (`oom_policy: cpu`).
    """

    device: str
    need: Mapping[str, int]
    fallback: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """A model that wants to be loaded; among its options the best fit is chosen."""

    model: str
    options: tuple[Option, ...]
    dedicated: bool = False
    scaling: Scaling | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """A model that holds memory now. `reload_seconds` is what its last load took; times are seconds of one clock."""

    model: str
    holding: str
    standing: Standing
    bytes: Mapping[str, int]
    last_used_at: float
    reload_seconds: float = 1.0
    dedicated: bool = False

    @property
    def device(self) -> str:
        """The device that counts for MAX_MODELS_PER_DEVICE: an accelerator if it uses one."""
        return next((name for name in self.bytes if name != "cpu"), "cpu")


@dataclass(frozen=True, slots=True)
class Policy:
    """The moment and the limits of a decision."""

    now: float
    max_models: int | None = None
    max_models_per_device: int | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the model goes. `evict` names the models that must leave first."""

    result: Result
    allocation: Allocation
    device: str
    need: Mapping[str, int]
    evict: tuple[str, ...] = ()
    trace: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the model cannot be placed now. `waits_for` names models whose end would make room; empty means never as
    things are configured. `fix` is the nearest change of the model's own settings with which it would fit.
    """

    lacks: tuple[Lack, ...]
    reason: str
    waits_for: tuple[str, ...] = ()
    fix: Mapping[str, Any] = field(default_factory=dict)
    trace: tuple[str, ...] = ()

    @property
    def result(self) -> Result:
        """Always CANT_ACCOMMODATE."""
        return Result.CANT_ACCOMMODATE


@dataclass(frozen=True, slots=True)
class Stage:
    """A ledger, and who is in it; the moments a decision looks at, one after the other."""

    ledger: Ledger
    models: tuple[Held, ...]

    def without(self, *standings: Standing) -> Stage:
        """As it will be when everybody of these standings has left."""
        gone = {held.holding for held in self.models if held.standing in standings}
        if not gone:
            return self
        return Stage(self.ledger.without(gone), tuple(held for held in self.models if held.holding not in gone))


@dataclass(frozen=True, slots=True)
class Scene:
    """What is held now and what would be left; the same for every request, so many may be asked of one."""

    now: Stage
    left: Stage
    """those who leave already are gone"""
    idle_gone: Stage
    """and so is everybody who could be evicted (as if nobody were leaving, who are waited for instead)"""
    emptied: Stage
    """only those who leave by hand alone are there"""

    @classmethod
    def of(cls, ledger: Ledger, models: Iterable[Held]) -> Scene:
        """The scene of a ledger and those who hold something in it."""
        now = Stage(ledger, tuple(models))
        movable = [standing for standing in Standing if standing is not Standing.FIXED]
        return cls(now, now.without(Standing.LEAVING), now.without(Standing.IDLE), now.without(*movable))


def plan(request: Request, ledger: Ledger, models: Sequence[Held], policy: Policy) -> Placement | Refusal:
    """Where `request` goes given what `models` hold in `ledger`; never raises for a model that does not fit."""
    return _plan(request, Scene.of(ledger, models), policy, choose=True)


def prospect(request: Request, scene: Scene, policy: Policy) -> Refusal | None:
    """Why `request` could not be placed now, or None; quick, because it does not look for the cheapest victims."""
    decision = _plan(request, scene, policy, choose=False)
    return decision if isinstance(decision, Refusal) else None


def _plan(request: Request, scene: Scene, policy: Policy, *, choose: bool) -> Placement | Refusal:
    trace: list[str] = []
    for held in scene.now.models:
        if held.model == request.model and held.standing is not Standing.LEAVING:
            kind = Allocation.WHOLE if request.dedicated else Allocation.FRACTIONAL
            trace.append(f"{request.model} is on {held.device} already")
            return Placement(Result.DEPLOYED, kind, held.device, held.bytes, (), tuple(trace))
    if not request.options:
        return Refusal((), "no device can hold it: every accelerator is excluded or lost", trace=tuple(trace))
    first = replace(request, options=tuple(option for option in request.options if not option.fallback))
    last = replace(request, options=tuple(option for option in request.options if option.fallback))
    decision = _decide(first, scene, policy, trace, choose) if first.options else None
    if last.options and (decision is None or (isinstance(decision, Refusal) and not decision.waits_for)):
        decision = _decide(last, scene, policy, trace, choose)
    assert decision is not None
    return decision


def _decide(request: Request, scene: Scene, policy: Policy, trace: list[str], choose: bool) -> Placement | Refusal:
    return (
        _free(request, scene.now, policy, trace)
        or _after_leavers(request, scene, policy, trace)
        or _full(request, scene, policy, trace, choose)
        or _refusal(request, scene, policy, trace)
    )


def _free(request: Request, now: Stage, policy: Policy, trace: list[str]) -> Placement | None:
    fitting: list[tuple[int, Option]] = []
    for option in request.options:
        if why := _obstacle(request, option, now, policy):
            trace.append(f"{option.device}: {why}")
            continue
        left = now.ledger.balance(option.device).room_bytes - option.need.get(option.device, 0)
        trace.append(f"{option.device}: fits, {format_bytes(left)} would be left")
        fitting.append((left, option))
    if not fitting:
        return None
    _, best = min(fitting, key=lambda item: item[0])
    return _placement(request, Result.FREE, best, (), trace)


def _after_leavers(request: Request, scene: Scene, policy: Policy, trace: list[str]) -> Refusal | None:
    """A wait, if those that leave already make room: nobody else has to go."""
    if scene.left is scene.now:
        return None
    for option in request.options:
        if not _obstacle(request, option, scene.left, policy):
            names = tuple(held.model for held in scene.now.models if held.standing is Standing.LEAVING)
            trace.append(f"{option.device}: fits once {', '.join(names)}, leaving now, is gone")
            return Refusal(scene.now.ledger.lacks(option.need), "room is being made", names, trace=tuple(trace))
    return None


def _full(request: Request, scene: Scene, policy: Policy, trace: list[str], choose: bool) -> Placement | None:
    best: tuple[float, int, Option, tuple[Held, ...]] | None = None
    for option in request.options:
        if _obstacle(request, option, scene.idle_gone, policy):
            continue
        if not choose:
            return _placement(request, Result.FULL, option, (), trace)
        victims = _cheapest(request, option, scene.now, policy)
        rank = (sum(_cost(held, policy.now) for held in victims), len(victims))
        if best is None or rank < best[:2]:
            best = (*rank, option, victims)
    if best is None:
        return None
    _, _, option, victims = best
    trace.append(f"{option.device}: fits once {', '.join(held.model for held in victims)} left")
    return _placement(request, Result.FULL, option, tuple(held.model for held in victims), trace)


def _refusal(request: Request, scene: Scene, policy: Policy, trace: list[str]) -> Refusal:
    movable = [held for held in scene.now.models if held.standing is not Standing.FIXED]
    emptied = scene.emptied
    for option in request.options:
        if not _obstacle(request, option, emptied, policy):
            waits = tuple(held.model for held in movable)
            trace.append(f"{option.device}: would fit once {', '.join(waits)} can leave" if waits else "")
            reason = "room is held by models that cannot leave yet: " + ", ".join(
                f"{held.model} ({held.standing})" for held in movable
            )
            lacks = scene.now.ledger.lacks(option.need)
            return Refusal(lacks, reason, waits, trace=tuple(filter(None, trace)))
    option = min(request.options, key=lambda item: sum(lack.need_bytes for lack in emptied.ledger.lacks(item.need)))
    lacks = emptied.ledger.lacks(option.need)
    reason = _obstacle(request, option, emptied, policy) or "it does not fit"
    rooms = {device: emptied.ledger.balance(device).room_bytes for device in option.need}
    fix = nearest_fix(request.scaling, option.need, rooms) if lacks and request.scaling else {}
    trace.append(f"{option.device}: {reason}, even if every model left that may leave")
    return Refusal(lacks, reason, (), fix, tuple(trace))


def _obstacle(request: Request, option: Option, stage: Stage, policy: Policy) -> str | None:
    """Why `option` is impossible while everybody of `stage` stays, or None."""
    there = _on(option.device, stage.models)
    if request.dedicated and there:
        return f"it is dedicated and {', '.join(held.model for held in there)} uses the device"
    if taken := [held.model for held in there if held.dedicated]:
        return f"the device is dedicated to {taken[0]}"
    count = len(stage.models)
    if policy.max_models is not None and count >= policy.max_models:
        return f"{count} models are loaded and INFERENCE_MAX_MODELS is {policy.max_models}"
    if policy.max_models_per_device is not None and len(there) >= policy.max_models_per_device:
        return f"{len(there)} models are on it and INFERENCE_MAX_MODELS_PER_DEVICE is {policy.max_models_per_device}"
    lacks = stage.ledger.lacks(option.need)
    if lacks:
        return "; ".join(
            f"needs {format_bytes(lack.need_bytes)} on {lack.device} and may take {format_bytes(lack.room_bytes)} "
            f"({lack.bound})"
            for lack in lacks
        )
    return None


def _on(device: str, models: Iterable[Held]) -> list[Held]:
    return [held for held in models if held.device == device and device in held.bytes]


def _cheapest(request: Request, option: Option, now: Stage, policy: Policy) -> tuple[Held, ...]:
    """The cheapest idle models without which `option` is possible; that they suffice together was seen before.

    Every obstacle is an amount that has to go: bytes per device and altogether, places, neighbors.
    """
    there = _on(option.device, now.models)
    bytes_missing, altogether = now.ledger.missing(option.need)
    places = 0 if policy.max_models is None else len(now.models) + 1 - policy.max_models
    most_there = 1 if request.dedicated else policy.max_models_per_device
    places_there = 0 if most_there is None else len(there) + 1 - most_there
    owners = sum(held.dedicated for held in there)
    idle = sorted(
        (held for held in now.models if held.standing is Standing.IDLE),
        key=lambda held: (_cost(held, policy.now), held.model),
    )
    chosen = cheapest(
        [_cost(held, policy.now) for held in idle],
        [
            [
                *(held.bytes.get(device, 0) for device in bytes_missing),
                sum(held.bytes.values()),
                1,
                int(held in there),
                int(held in there and held.dedicated),
            ]
            for held in idle
        ],
        [*bytes_missing.values(), altogether, places, places_there, owners],
    )
    assert chosen is not None
    return tuple(idle[at] for at in chosen)


def _cost(held: Held, now: float) -> float:
    """Bytes x seconds to load again x recency: 1 for one used just now, less the longer it was idle."""
    idle = max(0.0, now - held.last_used_at)
    return sum(held.bytes.values()) * max(held.reload_seconds, 0.01) / (1.0 + idle / 60.0)


def _placement(request: Request, result: Result, option: Option, evict: tuple[str, ...], trace: list[str]) -> Placement:
    allocation = Allocation.WHOLE if request.dedicated else Allocation.FRACTIONAL
    return Placement(result, allocation, option.device, option.need, evict, tuple(trace))
