"""Relief of full devices: which models leave, and which are slowed down.

Only idle and warm models leave. Below CRITICAL this happens only if memory is wanted: a model waits for room, or
foreign use grew since the last reservation. At EMERGENCY each regular check climbs one rung of a ladder of
restrictions; when the use is below HIGH or as planned, each regular check goes down one rung.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from inference.authority.placement.stage import EVICTABLE, Standing
from inference.authority.pressure.levels import BAND, Bounds, Gauge, Level, Use, settle

HIGH_IDLE_SECONDS = 30.0
"""At HIGH, models that are idle for this time leave, or for INFERENCE_EVICTION_IDLE_THRESHOLD_SECONDS if shorter."""


class Rung(IntEnum):
    """The rung of the EMERGENCY ladder of a device; each includes those below it."""

    NONE = 0
    WARN = 1
    HALVE = 2
    """half of the sequences at a time; half of that on each further rung"""
    FORGET = 3
    """retained prefixes are dropped"""
    NO_EXTRAS = 4
    """models with a projector or adapters are not loaded"""
    NO_LOADS = 5
    """no model is loaded"""


SAYS: Mapping[Rung, str] = {
    Rung.NONE: "no restrictions",
    Rung.WARN: "restrictions begin at the next check",
    Rung.HALVE: "1/2 of the sequences are admitted at a time",
    Rung.FORGET: "1/4 of the sequences are admitted at a time, and retained prefixes are dropped",
    Rung.NO_EXTRAS: "1/8 of the sequences are admitted at a time, and models with vision or LoRA are not loaded",
    Rung.NO_LOADS: "1/16 of the sequences are admitted at a time, and no model is loaded",
}


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings. `idle_seconds`: idle time at MODERATE. `eager`: act also if no memory is wanted."""

    bounds: Bounds = field(default_factory=Bounds)
    idle_seconds: float = 120.0
    eager: bool = False
    enabled: bool = True


@dataclass(frozen=True, slots=True)
class Tenant:
    """A model that holds memory (`bytes` per account). `limit`: the limit of sequences that its worker has, None for
    all `parallel` ones.
    """

    model: str
    standing: Standing
    bytes: Mapping[str, int]
    idle_seconds: float
    parallel: int = 1
    limit: int | None = None

    @property
    def warm(self) -> bool:
        """Whether it is in the warm pool."""
        return self.standing is Standing.WARM


@dataclass(frozen=True, slots=True)
class PressureInput:
    """The input of a check. `wanted`: devices whose memory a request waits for."""

    uses: Sequence[Use]
    tenants: Sequence[Tenant] = ()
    wanted: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Watch:
    """One device's gauge and rung."""

    gauge: Gauge = field(default_factory=Gauge)
    rung: Rung = Rung.NONE


Watches = Mapping[str, Watch]


@dataclass(frozen=True, slots=True)
class Leave:
    """An idle model leaves a device: into the warm pool if possible (`offload`), else it is unloaded."""

    model: str
    offload: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Limit:
    """A worker admits at most `sequences` at a time."""

    model: str
    sequences: int
    reason: str


@dataclass(frozen=True, slots=True)
class Forget:
    """A worker drops its retained prefixes."""

    model: str
    reason: str


Relief = Leave | Limit | Forget


def step(
    state: Watches, seen: PressureInput, rules: Rules, *, regular: bool = True
) -> tuple[Watches, tuple[Relief, ...]]:
    """The state after a check, and the actions. A check that is not `regular` climbs to WARN at most.

    Devices that are missing in the input are removed.
    """
    after: dict[str, Watch] = {}
    leaves: dict[str, Leave] = {}
    forgets: dict[str, Forget] = {}
    for use in seen.uses:
        before = state.get(use.device, Watch())
        gauge = settle(before.gauge, use, rules.bounds)
        after[use.device] = watch = Watch(gauge, _climb(before.rung, gauge, rules, regular=regular))
        if not rules.enabled:
            continue
        for leave in _leaves(use, gauge, seen, rules):
            if leave.model not in leaves or not leave.offload:
                leaves[leave.model] = leave
        if regular and gauge.level is Level.EMERGENCY and watch.rung >= Rung.FORGET:
            held = [tenant for tenant in _answering(seen.tenants) if tenant.bytes.get(use.device)]
            forgets |= {tenant.model: Forget(tenant.model, _full(use, gauge.level)) for tenant in held}
    staying = [tenant for tenant in _answering(seen.tenants) if tenant.model not in leaves]
    forgetting = [forgets[tenant.model] for tenant in staying if tenant.model in forgets]
    return after, (*leaves.values(), *_limits(after, staying), *forgetting)


def refusal(state: Watches, device: str, *, extras: bool) -> str | None:
    """Why the ladder rejects a load on `device`, or None. `extras`: the model has a projector or adapters."""
    watch = state.get(device, Watch())
    if watch.rung >= Rung.NO_LOADS:
        return f"{device} is too full ({watch.gauge.level}) for any load until its use is below HIGH"
    if extras and watch.rung >= Rung.NO_EXTRAS:
        return f"{device} is too full ({watch.gauge.level}) to load a model with vision or LoRA until it is below HIGH"
    return None


def _climb(rung: Rung, gauge: Gauge, rules: Rules, *, regular: bool) -> Rung:
    if not rules.enabled:
        return Rung.NONE
    if gauge.level is Level.EMERGENCY:
        return Rung(min(rung + 1, Rung.NO_LOADS)) if regular or rung is Rung.NONE else rung
    if regular and rung and (gauge.level < Level.HIGH or gauge.planned):
        return Rung(rung - 1)
    return rung


def _leaves(use: Use, gauge: Gauge, seen: PressureInput, rules: Rules) -> Iterable[Leave]:
    """The models that leave, warm ones first, then the longest idle; below CRITICAL only as many as needed."""
    level = gauge.level
    wanted = use.device in seen.wanted
    if level is Level.LOW or (level < Level.CRITICAL and gauge.planned and not (wanted or rules.eager)):
        return
    why = _full(use, level)
    if level < Level.CRITICAL:
        why += ", and memory is wanted" if wanted else ", and foreign use grew" if not gauge.planned else ""
    idle_limit = {
        Level.MODERATE: rules.idle_seconds,
        Level.HIGH: min(HIGH_IDLE_SECONDS, rules.idle_seconds),
    }.get(level, 0.0)
    enough = use.total_bytes * (rules.bounds.of(level) - BAND) if level < Level.CRITICAL else -1.0
    idle = [tenant for tenant in seen.tenants if tenant.standing in EVICTABLE and tenant.bytes.get(use.device)]
    used = use.used_bytes
    for tenant in sorted(idle, key=lambda item: (not item.warm, -item.idle_seconds, item.model)):
        if tenant.idle_seconds < idle_limit or used < enough:
            continue
        used -= tenant.bytes[use.device]
        offload = level < Level.CRITICAL and not tenant.warm
        yield Leave(tenant.model, offload, f"{why}; idle for {tenant.idle_seconds:.0f} s")


def _limits(state: Watches, tenants: Iterable[Tenant]) -> Iterable[Limit]:
    for tenant in tenants:
        held = [device for device, count in tenant.bytes.items() if count and device in state]
        device = max(held, key=lambda name: state[name].rung, default=None)
        rung = Rung.NONE if device is None else state[device].rung
        sequences = tenant.parallel if rung < Rung.HALVE else max(1, tenant.parallel >> (rung - 1))
        if sequences != (tenant.limit or tenant.parallel):
            why = SAYS[rung] if device is None else f"{device}: {SAYS[rung]}"
            yield Limit(tenant.model, sequences, why)


def _answering(tenants: Iterable[Tenant]) -> Iterable[Tenant]:
    """The models with a worker that answers requests."""
    silent = (Standing.WARM, Standing.LOADING, Standing.LEAVING)
    return (item for item in tenants if item.standing not in silent)


def _full(use: Use, level: Level) -> str:
    return f"{use.device} is at {level}: {use.numbers}"
