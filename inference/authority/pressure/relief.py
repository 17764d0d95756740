"""Relief of full devices: which models are evicted, and which are slowed down.

Only idle and warm models are evicted. Below CRITICAL this happens only if a model waits for memory, foreign use grew
since the last reservation, or the rules are `eager`. At EMERGENCY each regular check adds the next `Restriction`; when
the use is below HIGH or as planned, each regular check removes one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from inference.authority.placement.stage import EVICTABLE, EvictionState
from inference.authority.pressure.levels import BAND, Bounds, Gauge, Level, Use, updated_gauge

HIGH_IDLE_SECONDS = 30.0
"""At HIGH, models that are idle for this time leave, or for INFERENCE_EVICTION_IDLE_THRESHOLD_SECONDS if shorter."""


class Restriction(IntEnum):
    """A restriction of a device at EMERGENCY; each includes those with lower numbers."""

    NONE = 0
    WARN = 1
    HALVE = 2
    """half of the sequences at a time; half of that with each further restriction"""
    FORGET = 3
    """retained prefixes are dropped"""
    NO_EXTRAS = 4
    """models with a projector, adapters or a draft model are not loaded"""
    NO_LOADS = 5
    """no model is loaded"""


RESTRICTION_TEXTS: Mapping[Restriction, str] = {
    Restriction.NONE: "no restrictions",
    Restriction.WARN: "restrictions begin if the level is emergency at the next check",
    Restriction.HALVE: "1/2 of the sequences are admitted at a time",
    Restriction.FORGET: "1/4 of the sequences are admitted at a time, and retained prefixes are dropped",
    Restriction.NO_EXTRAS: (
        "1/8 of the sequences are admitted at a time, and models with vision, LoRA or a draft model are not loaded"
    ),
    Restriction.NO_LOADS: "1/16 of the sequences are admitted at a time, and no model is loaded",
}


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings. `idle_seconds`: idle time at MODERATE. `eager`: act also if no model waits for memory."""

    bounds: Bounds = field(default_factory=Bounds)
    idle_seconds: float = 120.0
    eager: bool = False
    enabled: bool = True


@dataclass(frozen=True, slots=True)
class ModelUse:
    """A model that holds memory (`bytes` per account of the ledger). `limit`: how many sequences its worker admits at a
    time; None if it admits all `parallel` ones.
    """

    model: str
    eviction_state: EvictionState
    bytes: Mapping[str, int]
    idle_seconds: float
    parallel: int = 1
    limit: int | None = None

    @property
    def warm(self) -> bool:
        """Whether it is in the warm pool."""
        return self.eviction_state is EvictionState.WARM


@dataclass(frozen=True, slots=True)
class PressureInput:
    """The input of a check. `wanted`: devices whose memory a request waits for."""

    uses: Sequence[Use]
    models: Sequence[ModelUse] = ()
    wanted: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class DevicePressure:
    """The pressure on one device: its gauge and its restriction."""

    gauge: Gauge = field(default_factory=Gauge)
    restriction: Restriction = Restriction.NONE


DevicePressures = Mapping[str, DevicePressure]


@dataclass(frozen=True, slots=True)
class Leave:
    """An idle model leaves a device: into the warm pool if possible (`offload`), else it is unloaded."""

    model: str
    offload: bool
    reason: str


@dataclass(frozen=True, slots=True)
class LimitSequences:
    """A worker admits at most `sequences` at a time."""

    model: str
    sequences: int
    reason: str


@dataclass(frozen=True, slots=True)
class DropPrefixes:
    """A worker drops its retained prefixes."""

    model: str
    reason: str


Relief = Leave | LimitSequences | DropPrefixes


def step(
    state: DevicePressures, seen: PressureInput, rules: Rules, *, regular: bool = True
) -> tuple[DevicePressures, tuple[Relief, ...]]:
    """The state after a check, and the actions. A check that is not `regular` adds WARN at most.

    Devices that are missing in the input are removed.
    """
    after: dict[str, DevicePressure] = {}
    leaves: dict[str, Leave] = {}
    forgets: dict[str, DropPrefixes] = {}
    for use in seen.uses:
        before = state.get(use.device, DevicePressure())
        gauge = updated_gauge(before.gauge, use, rules.bounds)
        restriction = _next_restriction(before.restriction, gauge, rules, regular=regular)
        after[use.device] = DevicePressure(gauge, restriction)
        if not rules.enabled:
            continue
        for leave in _leaves(use, gauge, seen, rules):
            if leave.model not in leaves or not leave.offload:
                leaves[leave.model] = leave
        if regular and gauge.level is Level.EMERGENCY and restriction >= Restriction.FORGET:
            held = [item for item in _answering(seen.models) if item.bytes.get(use.device)]
            forgets |= {item.model: DropPrefixes(item.model, _full(use, gauge.level)) for item in held}
    staying = [item for item in _answering(seen.models) if item.model not in leaves]
    forgetting = [forgets[item.model] for item in staying if item.model in forgets]
    return after, (*leaves.values(), *_limits(after, staying), *forgetting)


def refusal(state: DevicePressures, device: str, *, extras: bool) -> str | None:
    """Why the restriction of `device` rejects a load, or None. `extras`: see `ModelSpec.has_extras`."""
    pressure = state.get(device, DevicePressure())
    if pressure.restriction >= Restriction.NO_LOADS:
        return f"{device} is too full ({pressure.gauge.level}) for any load until its use is below HIGH"
    if extras and pressure.restriction >= Restriction.NO_EXTRAS:
        what = "a model with vision, LoRA or a draft model"
        return f"{device} is too full ({pressure.gauge.level}) to load {what} until it is below HIGH"
    return None


def _next_restriction(restriction: Restriction, gauge: Gauge, rules: Rules, *, regular: bool) -> Restriction:
    if not rules.enabled:
        return Restriction.NONE
    if gauge.level is Level.EMERGENCY:
        is_next = regular or restriction is Restriction.NONE
        return Restriction(min(restriction + is_next, Restriction.NO_LOADS))
    if regular and restriction and (gauge.level < Level.HIGH or gauge.planned):
        return Restriction(restriction - 1)
    return restriction


def _leaves(use: Use, gauge: Gauge, seen: PressureInput, rules: Rules) -> Iterable[Leave]:
    """The models that leave, warm ones first, then the longest idle; below CRITICAL only as many as needed."""
    level = gauge.level
    wanted = use.device in seen.wanted
    if level is Level.LOW or (level < Level.CRITICAL and gauge.planned and not (wanted or rules.eager)):
        return
    why = _full(use, level)
    if level < Level.CRITICAL:
        why += ", and a model waits for memory" if wanted else ", and foreign use grew" if not gauge.planned else ""
    idle_limit = {
        Level.MODERATE: rules.idle_seconds,
        Level.HIGH: min(HIGH_IDLE_SECONDS, rules.idle_seconds),
    }.get(level, 0.0)
    enough = use.total_bytes * (rules.bounds.of(level) - BAND) if level < Level.CRITICAL else -1.0
    idle = [item for item in seen.models if item.eviction_state in EVICTABLE and item.bytes.get(use.device)]
    used = use.used_bytes
    for item in sorted(idle, key=lambda item: (not item.warm, -item.idle_seconds, item.model)):
        if item.idle_seconds < idle_limit or used < enough:
            continue
        used -= item.bytes[use.device]
        offload = level < Level.CRITICAL and not item.warm
        yield Leave(item.model, offload, f"{why}; idle for {item.idle_seconds:.0f} s")


def _limits(state: DevicePressures, models: Iterable[ModelUse]) -> Iterable[LimitSequences]:
    for item in models:
        held = [device for device, count in item.bytes.items() if count and device in state]
        device = max(held, key=lambda name: state[name].restriction, default=None)
        restriction = Restriction.NONE if device is None else state[device].restriction
        sequences = item.parallel if restriction < Restriction.HALVE else max(1, item.parallel >> (restriction - 1))
        if sequences != (item.limit or item.parallel):
            why = RESTRICTION_TEXTS[restriction] if device is None else f"{device}: {RESTRICTION_TEXTS[restriction]}"
            yield LimitSequences(item.model, sequences, why)


def _answering(models: Iterable[ModelUse]) -> Iterable[ModelUse]:
    """The models with a worker that answers requests."""
    silent = (EvictionState.WARM, EvictionState.LOADING, EvictionState.LEAVING)
    return (item for item in models if item.eviction_state not in silent)


def _full(use: Use, level: Level) -> str:
    return f"{use.device} is at {level}: {use.numbers}"
