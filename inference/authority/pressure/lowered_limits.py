"""Which models leave when an operator lowers limits below the current use.

The order is warm models, idle ones, idle ones within their min_residency, models in use or loading, and pinned and
dedicated ones. Within a group the cheapest sufficient set leaves. Limits that did not change are ignored; growing
foreign use is handled as pressure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headgate.shared.units import format_bytes
from inference.authority.placement.ledger import Account, Ledger
from inference.authority.placement.stage import EvictionState, Held, Policy, Stage
from inference.authority.placement.victims import cheapest

_RANKS = {
    EvictionState.WARM: 0,
    EvictionState.IDLE: 1,
    EvictionState.YOUNG: 2,
    EvictionState.BUSY: 3,
    EvictionState.LOADING: 3,
    EvictionState.FIXED: 4,
}
_STEP = 1e6
"""Cost factor between two groups; within a group the cheapest model counts at least a thousandth of all."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits in force: budgets and memory limit of the ledger, and numbers of models."""

    ledger: Ledger
    policy: Policy


@dataclass(frozen=True, slots=True)
class Surplus:
    """The models that must be evicted, and a sentence for every exceeded limit."""

    evicted: tuple[Held, ...] = ()
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Excess:
    """One exceeded limit: the excess in bytes or models, and what each model that may be evicted releases of it."""

    reason: str
    amount: int
    gives: tuple[int, ...]


def surplus(before: Limits, now: Limits, models: Sequence[Held]) -> Surplus:
    """The models that must be evicted so that the limits of `now` that are lower than `before` are met.

    Models that are already leaving are not counted. If foreign use alone exceeds the limit of a device, all models on
    it are evicted.
    """
    stage = Stage.of(now.ledger, models).without(EvictionState.LEAVING)
    found = [item for item in _excesses(before, now, stage) if item.amount > 0]
    to_release = [min(item.amount, sum(item.gives)) for item in found]
    gives = list(zip(*(item.gives for item in found), strict=True))
    chosen = cheapest(_costs(stage.models, now.policy.now), gives, to_release) if gives else ()
    assert chosen is not None  # the excess is at most what all of them release
    return Surplus(tuple(stage.models[at] for at in chosen), tuple(item.reason for item in found))


def _costs(models: Sequence[Held], now: float) -> list[float]:
    sums = dict.fromkeys(_RANKS.values(), 0.0)
    for held in models:
        sums[_RANKS[held.eviction_state]] += held.cost(now)
    return [
        _STEP ** _RANKS[held.eviction_state] * max(1e-3, held.cost(now) / (sums[_RANKS[held.eviction_state]] or 1.0))
        for held in models
    ]


def _excesses(before: Limits, now: Limits, stage: Stage) -> Iterator[_Excess]:
    ledger, models = stage.ledger, stage.models
    for device, account in ledger.accounts.items():
        if _is_lower(before.ledger.accounts.get(device), account):
            ours = ledger.balance(device).ours_bytes
            over = ours + max(-account.budget_bytes, account.foreign_bytes - account.capacity_bytes)
            reason = f"models hold {format_bytes(over)} more of {device} than its new limit"
            yield _Excess(reason, over, tuple(held.bytes.get(device, 0) for held in models))
    if _fell(before.ledger.limit_bytes, ledger.limit_bytes):
        over = -(ledger.spare_altogether or 0)
        reason = f"loaded models hold {format_bytes(over)} more than the new INFERENCE_MEMORY_LIMIT_GB"
        yield _Excess(reason, over, tuple(held.loaded_bytes for held in models))
    most = now.policy.max_models
    if most is not None and _fell(before.policy.max_models, most):
        loaded = tuple(int(not held.is_warm) for held in models)
        yield _Excess(f"{sum(loaded)} models are loaded and INFERENCE_MAX_MODELS is {most}", sum(loaded) - most, loaded)
    most = now.policy.max_models_per_device
    if most is not None and _fell(before.policy.max_models_per_device, most):
        for device, there in stage.there.items():
            reason = f"{len(there)} models are on {device} and INFERENCE_MAX_MODELS_PER_DEVICE is {most}"
            yield _Excess(reason, len(there) - most, tuple(int(device in held.devices) for held in models))


def _is_lower(before: Account | None, now: Account) -> bool:
    return before is not None and (now.budget_bytes < before.budget_bytes or now.capacity_bytes < before.capacity_bytes)


def _fell(before: int | None, now: int | None) -> bool:
    return now is not None and (before is None or now < before)
