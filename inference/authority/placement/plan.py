"""The planner: where a model is placed and which models must be evicted for it (`plan`).

Pure and deterministic; the same trace explains a dry run, a decision and a refusal. It tries in this order: one device
with free memory (the tightest fit), several devices with free memory, memory of models that are already leaving, one
device after evictions (or several if one costs over a tenth more), a fallback device. The cost of an evicted model is
bytes x seconds to load it again x recency of use. Pinned, dedicated, busy, loading and recently used models are not
evicted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from headgate.shared.units import format_bytes
from inference.authority.placement.ledger import Ledger
from inference.authority.placement.smaller_settings import Fit, nearest_fit, nearest_fix
from inference.authority.placement.spread import Spread, fits, split_free, split_full
from inference.authority.placement.stage import EVICTABLE, EvictionState, Held, Policy, Stage, Stages
from inference.authority.placement.victims import cheapest, least_cost
from inference.errors import Shortage
from inference.estimate.layers import Layers

__all__ = (
    "Allocation",
    "EvictionState",
    "Held",
    "Option",
    "Placement",
    "Policy",
    "Refusal",
    "Request",
    "Result",
    "Stages",
    "plan",
    "refusal_now",
)  # fmt: skip

MAX_COST_RATIO = 1.1
"""One device is preferred if its evictions cost at most this multiple of those for several devices."""


class Result(StrEnum):
    """The result of a decision."""

    DEPLOYED = "DEPLOYED"
    """the model is already loaded"""
    FREE = "FREE"
    """it fits into free memory"""
    FULL = "FULL"
    """it fits after evictions"""
    CANT_ACCOMMODATE = "CANT_ACCOMMODATE"


class Allocation(StrEnum):
    """How a model uses its devices."""

    FRACTIONAL = "FRACTIONAL"
    """shares one device"""
    WHOLE = "WHOLE"
    """is alone on its devices"""
    SPLIT = "SPLIT"
    """spans several devices"""


@dataclass(frozen=True, slots=True)
class Option:
    """One measured way to place a model: its first device and the bytes per device (host memory included).

    A fallback is used only if nothing else is possible (`oom_policy: cpu`). `layers`: the number of layers on each of
    several devices, in order.
    """

    device: str
    need: Mapping[str, int]
    fallback: bool = False
    layers: Mapping[str, int] = field(default_factory=dict)

    @property
    def devices(self) -> tuple[str, ...]:
        """Every device on which it counts as a model."""
        return tuple(self.layers) or (self.device,)


@dataclass(frozen=True, slots=True)
class Request:
    """A model to be loaded, with its options.

    `spread` describes its layers, for splits over several devices and for smaller settings; without it there are
    neither other splits than measured ones nor fixes. `fit`: changes with which it may be loaded; a refusal suggests
    others only if they do not suffice.
    """

    model: str
    options: tuple[Option, ...]
    dedicated: bool = False
    spread: Spread | None = None
    fit: Fit = field(default_factory=Fit)
    split_mode: str = "layer"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the model goes. `evict` names the models that must be evicted first.

    `tensor_split` is the number of layers on each of `devices` (or of shares of each layer), empty on one device. A
    placement that is not `measured` is computed from the need on one device, and must be measured before it is booked.
    """

    result: Result
    allocation: Allocation
    device: str
    need: Mapping[str, int]
    evict: tuple[str, ...] = ()
    trace: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    tensor_split: tuple[float, ...] = ()
    measured: bool = True

    def __post_init__(self) -> None:
        if not self.devices:
            object.__setattr__(self, "devices", (self.device,))


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the model cannot be placed now. `waits_for`: models whose end would make room; empty if it cannot fit with
    the current configuration. `fix`: the smallest change of the model's settings with which it would fit.
    """

    lacks: tuple[Shortage, ...]
    reason: str
    waits_for: tuple[str, ...] = ()
    fix: Mapping[str, Any] = field(default_factory=dict)
    trace: tuple[str, ...] = ()
    undivided: str = ""
    """Why several devices cannot share it (`split_mode`)."""

    @property
    def result(self) -> Result:
        """Always CANT_ACCOMMODATE."""
        return Result.CANT_ACCOMMODATE


def plan(request: Request, ledger: Ledger, models: Sequence[Held], policy: Policy) -> Placement | Refusal:
    """The placement of `request` while `models` hold memory in `ledger`, or the refusal."""
    return _plan(request, Stages.of(ledger, models), policy, choose=True)


def refusal_now(request: Request, stages: Stages, policy: Policy) -> Refusal | None:
    """Why `request` could not be placed now, or None; faster than `plan`, because it does not minimize evictions."""
    decision = _plan(request, stages, policy, choose=False)
    return decision if isinstance(decision, Refusal) else None


def _plan(request: Request, stages: Stages, policy: Policy, *, choose: bool) -> Placement | Refusal:
    for held in stages.now.models:
        if held.model == request.model and held.eviction_state not in (EvictionState.LEAVING, EvictionState.WARM):
            kind = _allocation(request.dedicated, len(held.devices))
            trace = (f"{request.model} is on {', '.join(held.devices)} already",)
            return Placement(Result.DEPLOYED, kind, held.device, held.bytes, (), trace, held.devices)
    if not request.options:
        return Refusal((), "no device is available: every accelerator is excluded or lost")
    first = replace(request, options=tuple(option for option in request.options if not option.fallback))
    last = replace(request, options=tuple(option for option in request.options if option.fallback), spread=None)
    look = _Decision(first, stages, policy, [], choose)
    decision = look.decide() if first.options else None
    is_final = isinstance(decision, Refusal) and not decision.waits_for and not request.fit.allows(decision.fix)
    if last.options and (decision is None or is_final):
        decision = _Decision(last, stages, policy, look.trace, choose).decide()
    assert decision is not None
    return decision


@dataclass(frozen=True, slots=True)
class _Decision:
    """One decision about one class of options."""

    request: Request
    stages: Stages
    policy: Policy
    trace: list[str]
    choose: bool

    def decide(self) -> Placement | Refusal:
        return self._free(self.stages.now) or self._after_departures() or self._full() or self._refusal()

    def _obstacle(self, option: Option, stage: Stage) -> str | None:
        return stage.obstacle(option.devices, option.need, self.policy, dedicated=self.request.dedicated)

    def _split(self, stage: Stage) -> Option | None:
        """The request divided over several devices of `stage`, or None."""
        if (spread := self.request.spread) is None:
            return None
        found = split_free(spread, stage, self.policy, dedicated=self.request.dedicated)
        return None if found is None else Option(next(iter(found)), spread.need(found), layers=found)

    def _free(self, stage: Stage) -> Placement | None:
        fitting: list[tuple[int, int, Option]] = []
        for option in self.request.options:
            if why := self._obstacle(option, stage):
                self.trace.append(f"{', '.join(option.devices)}: {why}")
                continue
            rooms = (stage.ledger.room(device)[0] - option.need.get(device, 0) for device in option.devices)
            left = min(rooms)
            how = f", divided by {self.request.split_mode}" if len(option.devices) > 1 else ""
            self.trace.append(f"{', '.join(option.devices)}: fits{how}, {format_bytes(left)} would be left")
            fitting.append((len(option.devices), left, option))
        if fitting:
            return self._placement(Result.FREE, min(fitting, key=lambda item: item[:2])[-1], ())
        if split := self._split(stage):
            self.trace.append(f"{_shares(split.layers)}: fits, divided by {self.request.split_mode}")
            return self._placement(Result.FREE, split, ())
        return None

    def _after_departures(self) -> Refusal | None:
        """A refusal with a wait, if models that are already leaving make enough room."""
        stages = self.stages
        if stages.left is stages.now:
            return None
        names = tuple(held.model for held in stages.now.models if held.eviction_state is EvictionState.LEAVING)
        for option in (*self.request.options, None):
            if option is None:
                option = self._split(stages.left)
            elif self._obstacle(option, stages.left):
                option = None
            if option is not None:
                self.trace.append(f"{', '.join(option.devices)}: fits after {', '.join(names)} is unloaded")
                lacks = stages.now.ledger.lacks(option.need)
                return Refusal(lacks, "other models are leaving to release memory", names, trace=tuple(self.trace))
        return None

    def _full(self) -> Placement | None:
        alone = self._full_measured()
        if alone is None:
            return self._full_split(math.inf)
        option, victims = alone
        if self.choose:
            below = sum(held.cost(self.policy.now) for held in victims) / MAX_COST_RATIO
            if (split := self._full_split(below)) is not None:
                return split
        return self._evicting(option, victims)

    def _full_measured(self) -> tuple[Option, tuple[Held, ...]] | None:
        """The option with the cheapest evictions, and the evicted models; without `choose` any option and no models."""
        options = [option for option in self.request.options if not self._obstacle(option, self.stages.without_idle)]
        if not options:
            return None
        if not self.choose:
            return options[0], ()
        covers = [_Cover.of(option, self.request, self.stages.now, self.policy) for option in options]
        order = sorted(range(len(covers)), key=lambda at: covers[at].least)
        best: tuple[tuple[float, int, int], Option, tuple[Held, ...]] | None = None
        for turn, at in enumerate(order):
            if best is not None and covers[at].least > best[0][0]:
                break
            victims = covers[at].victims(best[0][0] if best else math.inf, 1 / (turn + 1))
            if victims is None:  # more expensive than the best so far
                continue
            rank = (sum(held.cost(self.policy.now) for held in victims), len(victims), at)
            if best is None or rank < best[0]:
                best = (rank, options[at], victims)
        assert best is not None
        return best[1], best[2]

    def _full_split(self, below: float) -> Placement | None:
        """Several devices after evictions that cost less than `below`."""
        spread = self.request.spread
        if spread is None or self._split(self.stages.without_idle) is None:
            return None
        found = split_full(spread, self.stages.now, self.policy, dedicated=self.request.dedicated, below=below)
        if found is None:
            return None
        layers, victims = found
        return self._evicting(Option(next(iter(layers)), spread.need(layers), layers=layers), victims)

    def _evicting(self, option: Option, victims: Sequence[Held]) -> Placement:
        names = tuple(held.model for held in victims)
        self.trace.append(f"{_shares(option.layers) or option.device}: fits after {', '.join(names)} is evicted")
        return self._placement(Result.FULL, option, names)

    def _refusal(self) -> Refusal:
        now, emptied = self.stages.now, self.stages.emptied
        movable = [held for held in now.models if held.eviction_state is not EvictionState.FIXED]
        possible = next((item for item in self.request.options if not self._obstacle(item, emptied)), None)
        if (possible := possible or self._split(emptied)) is not None:
            waits = tuple(held.model for held in movable)  # at least one: it does not fit now
            self.trace.append(f"{', '.join(possible.devices)}: would fit after {', '.join(waits)} can be evicted")
            reason = "room is held by models that cannot leave yet: " + ", ".join(
                f"{held.model} ({held.eviction_state})" for held in movable
            )
            return Refusal(now.ledger.lacks(possible.need), reason, waits, trace=tuple(self.trace))
        option = min(self.request.options, key=self._unfitness)
        lacks = emptied.ledger.lacks(option.need)
        reason = self._obstacle(option, emptied) or "it does not fit"
        obstacle = ""
        if self.request.spread is not None and len(self.request.spread.over) > 1:
            obstacle = self.request.spread.obstacle
            over = ", ".join(self.request.spread.over)
            reason += f"; it is not divided over {over}: {obstacle}" if obstacle else f", nor divided over {over}"
        self.trace.append(f"{', '.join(option.devices)}: {reason}, even without all models that may be evicted")
        return Refusal(lacks, reason, (), self._fix() if lacks else {}, tuple(self.trace), obstacle)

    def _unfitness(self, option: Option) -> tuple[bool, int]:
        """Sort key for the option that a refusal describes: missing memory before rules, because memory can be
        freed.
        """
        lacks = self.stages.emptied.ledger.lacks(option.need)
        return not lacks, sum(lack.need_bytes for lack in lacks)

    def _fix(self) -> Mapping[str, Any]:
        if (spread := self.request.spread) is None:
            return {}

        def would_fit(layers: Layers, *, host: bool = True) -> bool:
            other = replace(spread, layers=layers)
            return fits(other, self.stages.emptied, self.policy, dedicated=self.request.dedicated, host=host)

        return nearest_fit(spread.layers, self.request.fit, would_fit) or nearest_fix(spread.layers, would_fit)

    def _placement(self, result: Result, option: Option, evict: tuple[str, ...]) -> Placement:
        kind = _allocation(self.request.dedicated, len(option.devices))
        split = tuple(float(count) for count in option.layers.values())
        measured = option in self.request.options
        trace = tuple(self.trace)
        return Placement(result, kind, option.device, option.need, evict, trace, option.devices, split, measured)


def _allocation(dedicated: bool, devices: int) -> Allocation:
    if dedicated:
        return Allocation.WHOLE
    return Allocation.SPLIT if devices > 1 else Allocation.FRACTIONAL


def _shares(layers: Mapping[str, int]) -> str:
    return ", ".join(f"{count} layers on {device}" for device, count in layers.items())


@dataclass(frozen=True, slots=True)
class _Cover:
    """The models that could be evicted for one option, and the amounts that must be released: bytes per device and in
    total, numbers of models. `least` is a lower bound of the cost.
    """

    idle: tuple[Held, ...]
    costs: tuple[float, ...]
    gives: tuple[tuple[int, ...], ...]
    missing: tuple[int, ...]
    least: float

    @classmethod
    def of(cls, option: Option, request: Request, now: Stage, policy: Policy) -> _Cover:
        devices = [now.ledger.account_of(device) for device in option.devices]
        bytes_missing, altogether = now.ledger.missing(option.need)
        lacking = [device for device, count in bytes_missing.items() if count]
        places = 0 if policy.max_models is None else now.loaded + 1 - policy.max_models
        missing = [*(bytes_missing[device] for device in lacking), altogether, places]
        most = 1 if request.dedicated else policy.max_models_per_device
        for device in devices:
            there = now.there.get(device, ())
            missing += [0 if most is None else len(there) + 1 - most, sum(held.dedicated for held in there)]
        everywhere = altogether > 0 or places > 0
        idle = [
            held
            for held in now.models
            if held.eviction_state in EVICTABLE
            and (everywhere or any(device in held.bytes for device in (*lacking, *devices)))
        ]
        costs = {held.holding: held.cost(policy.now) for held in idle}
        idle.sort(key=lambda held: (costs[held.holding], held.model))
        gives = [
            (
                *(held.bytes.get(device, 0) for device in lacking),
                held.loaded_bytes,
                int(held.eviction_state is EvictionState.IDLE),
                *(
                    count
                    for device in devices
                    for count in (int(device in held.devices), int(device in held.devices and held.dedicated))
                ),
            )
            for held in idle
        ]
        ranked = tuple(costs[held.holding] for held in idle)
        return cls(tuple(idle), ranked, tuple(gives), tuple(missing), least_cost(ranked, gives, missing))

    def victims(self, below: float, effort: float) -> tuple[Held, ...] | None:
        """The cheapest sufficient models; None if they cost more than `below`. All of them together must suffice."""
        chosen = cheapest(self.costs, self.gives, self.missing, below, effort)
        return None if chosen is None else tuple(self.idle[at] for at in chosen)
