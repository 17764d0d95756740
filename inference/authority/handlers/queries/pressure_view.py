"""Use and pressure levels of devices, from the ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from inference.authority.handlers.queries import device_view
from inference.authority.placement.plan import Refusal
from inference.authority.pressure.levels import Bounds, Level, Use, updated_gauge
from inference.authority.pressure.relief import DevicePressure, Restriction, Rules, refusal
from inference.authority.state import State
from inference.devices.device import Reading
from inference.environment_settings import InferenceSettings
from inference.protocol import DeviceState
from inference.settings import ModelSpec


def rules_of(settings: InferenceSettings) -> Rules:
    """The rules in the settings."""
    bounds = Bounds(
        settings.pressure_moderate, settings.pressure_high, settings.pressure_critical, settings.pressure_emergency
    )
    return Rules(
        bounds, settings.eviction_idle_threshold_seconds, settings.pressure_eager, settings.enable_memory_governor
    )


def bounds_of(state: State) -> Bounds:
    """The bounds of the levels."""
    return rules_of(state.settings).bounds


def uses(state: State, now: float) -> tuple[Use, ...]:
    """The use of every account of the ledger (devices that share memory have one account), without lost devices."""
    own = [item for item in device_view.readings(state, now) if state.ledger.account_of(item.id) == item.id]
    return tuple(_use(state, item) for item in own if item.state is not DeviceState.LOST)


def _use(state: State, reading: Reading) -> Use:
    """The use of a device. If its total memory is unknown, the capacity in the ledger is used."""
    balance = state.ledger.balance(reading.id)
    total = reading.total_bytes if reading.total_bytes > 0 else balance.capacity_bytes
    return Use(state.ledger.account_of(reading.id), total, balance.ours_bytes, balance.foreign_bytes)


def bytes_below_high(state: State, device: str) -> int:
    """How much more of a device can be in use before its level is HIGH. Caches count as free."""
    found = next((_use(state, item) for item in state.devices.measured if item.id == device), None)
    if found is None:
        return 0
    return max(0, int(state.settings.pressure_high * found.total_bytes) - found.used_bytes)


def level(state: State, use: Use) -> Level:
    """The pressure level of a device."""
    gauge = state.pressure.devices.get(use.device, DevicePressure()).gauge
    return updated_gauge(gauge, use, bounds_of(state)).level


def levels(state: State, now: float) -> Mapping[str, tuple[Use, Level]]:
    """Use and level of every device."""
    found = {item.id: _use(state, item) for item in device_view.readings(state, now)}
    shared = {name: found.get(use.device, use) for name, use in found.items()}
    return {name: (use, level(state, use)) for name, use in shared.items()}


def restrictions(state: State) -> Mapping[str, Restriction]:
    """The restriction of every device."""
    return {device: pressure.restriction for device, pressure in state.pressure.devices.items()}


def allowed_devices(
    state: State, spec: ModelSpec, devices: Sequence[Reading], now: float
) -> tuple[Reading, ...] | Refusal:
    """Those of `devices` whose restriction allows a load of the model, or the refusal."""
    refusals = {
        item.id: refusal(state.pressure.devices, state.ledger.account_of(item.id), extras=spec.has_extras)
        for item in devices
    }
    allowed = tuple(item for item in devices if refusals[item.id] is None)
    if allowed or not devices:
        return allowed
    found = levels(state, now)
    reasons = tuple(f"{why} ({found[name][0].numbers})" for name, why in refusals.items())
    return Refusal((), "; ".join(reasons), trace=reasons)
