"""Devices for decisions: readings with health states, and accounts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from headgate.shared.units import MIB
from inference.authority.device_health import USABLE, DeviceHealth
from inference.authority.draft import Draft
from inference.authority.effects import ReadDevices
from inference.authority.placement.ledger import Account, Balance
from inference.authority.placement.stage import Policy
from inference.authority.state import State
from inference.devices.device import CPU, Reading
from inference.devices.signs import Sign
from inference.environment_settings import InferenceSettings
from inference.protocol import DeviceState
from inference.settings import ModelSpec

UNKNOWN_BYTES = 16 * 2**30
"""The capacity of a device of unknown size."""


# --- readings --------------------------------------------------------------------------------------------------------
def readings(state: State, now: float) -> tuple[Reading, ...]:
    """The newest readings, accelerators first. A device without its own memory has the figures of the host."""
    found = tuple(_shown(reading, state.devices.health.get(reading.id), now) for reading in state.devices.measured)
    host = next((reading for reading in found if reading.id == CPU), None)
    return tuple(_on_host(reading, host) if reading.unified and host else reading for reading in found)


def reading(state: State, device: str, now: float) -> Reading | None:
    """The newest reading of one device."""
    return next((item for item in readings(state, now) if item.id == device), None)


def named(state: State, names: Iterable[str], now: float) -> list[Reading]:
    """The newest readings of these devices, without missing ones."""
    found = {item.id: item for item in readings(state, now)}
    return [found[name] for name in names if name in found]


def accelerators(state: State, now: float) -> tuple[Reading, ...]:
    """The readings of all devices but the CPU."""
    return tuple(item for item in readings(state, now) if item.id != CPU)


def _shown(reading: Reading, health: DeviceHealth | None, now: float) -> Reading:
    """The reading with the health state; a failed device has no valid memory figures."""
    if health is None or health.state is DeviceState.HEALTHY:
        return reading
    if health.sign is Sign.FAILED:
        reading = replace(reading, free_bytes=0, used_bytes=0)
    return replace(
        reading, state=health.state, note=health.note or reading.note, verdict_seconds=health.seconds_to_verdict(now)
    )


def _on_host(reading: Reading, host: Reading) -> Reading:
    """`reading` with the host memory that is available to the accelerator."""
    total = min(reading.total_bytes or host.total_bytes, host.total_bytes)
    free = min(total, host.free_bytes)
    return replace(reading, total_bytes=total, free_bytes=free, used_bytes=total - free)


# --- accounts --------------------------------------------------------------------------------------------------------
def allowance(reading: Reading, settings: InferenceSettings) -> tuple[int, int]:
    """(capacity, budget) of a device: the limit of all use, and the limit of Headgate's share.

    The capacity of an accelerator is min(total x INFERENCE_GPU_MEMORY_MAX_PERCENT, total - reserve), that of the host
    total - reserve. The reserve is INFERENCE_GPU_MEMORY_RESERVE_MB, at most 5 % of the device. The budget of an
    accelerator is limited by INFERENCE_GPU_MEMORY_LIMIT_MB, that of the host by INFERENCE_CPU_MEMORY_MAX_PERCENT. A
    device of unknown size is limited by INFERENCE_MEMORY_LIMIT_GB, or without that by UNKNOWN_BYTES.
    """
    total = reading.total_bytes
    if total <= 0:
        unknown = settings.memory_limit_bytes or UNKNOWN_BYTES
        return unknown, unknown
    kept = min(int(settings.gpu_memory_reserve_mb * MIB), total // 20)
    if reading.id == CPU:
        return total - kept, int(total * settings.cpu_memory_max_percent)
    usable = min(int(total * settings.gpu_memory_max_percent), total - kept)
    if settings.gpu_memory_limit_mb is not None:
        return usable, min(usable, int(settings.gpu_memory_limit_mb * MIB))
    return usable, usable


def allowances(found: Sequence[Reading], settings: InferenceSettings) -> Iterator[tuple[Reading, tuple[int, int]]]:
    """The allowance of every device with its own memory.

    An accelerator without its own memory uses host memory: the host's budget is the larger one of both.
    """
    most = max((allowance(item, settings)[1] for item in found if item.unified), default=0)
    for item in found:
        if not item.unified:
            capacity, budget = allowance(item, settings)
            yield item, (capacity, max(budget, min(most, capacity)) if item.id == CPU else budget)


def budgets_of(state: State, now: float) -> Mapping[str, int]:
    """The budget of each device in bytes; the budget of the host for a device without its own memory."""
    found = readings(state, now)
    budgets = {item.id: budget for item, (_, budget) in allowances(found, state.settings)}
    return {item.id: budgets.get(item.id, budgets.get(CPU, 0)) for item in found}


def observed(state: State, measured: tuple[Reading, ...], now: float) -> State:
    """The state with these readings entered into the ledger."""
    state = replace(state, devices=replace(state.devices, measured=measured))
    return entered(state, now)


def stored(state: State, arenas: Mapping[str, int]) -> State:
    """The state with these bytes of stored sequences, by model, entered into the ledger."""
    ledger = state.ledger
    for owner, cache in ledger.caches.items():
        used_bytes = arenas.get(owner, cache.used_bytes)
        if used_bytes != cache.used_bytes:
            ledger = ledger.note_use(cache.id, used_bytes)
    return state if ledger is state.ledger else replace(state, ledger=ledger)


def entered(state: State, now: float) -> State:
    """The state with its current readings and settings entered into the ledger."""
    found = readings(state, now)
    ledger = state.ledger
    for item, (capacity, budget) in allowances(found, state.settings):
        mark = state.devices.growth.get(item.id)
        least = min(mark.foreign_bytes, item.used_bytes) if mark else 0
        ledger = ledger.open(Account(item.id, capacity, budget))
        ledger = ledger.observe(item.id, item.used_bytes, item.free_bytes, least)
    for item in found:
        if item.unified:
            ledger = ledger.share(item.id, CPU)
    return replace(state, ledger=ledger)


def limited(state: State) -> State:
    """The state with the memory limit: the configured one, or a guess if a device has no size."""
    limit = state.settings.memory_limit_bytes
    if limit is None and any(item.total_bytes <= 0 for item in state.devices.measured):
        limit = UNKNOWN_BYTES
    return replace(state, ledger=replace(state.ledger, limit_bytes=limit))


def balances(state: State, now: float) -> Mapping[str, Balance]:
    """The account of every device in numbers; devices that share memory have the same."""
    return {item.id: state.ledger.balance(item.id) for item in readings(state, now)}


def policy(settings: InferenceSettings, now: float) -> Policy:
    """The limits of a decision at `now`."""
    return Policy(now, settings.max_models, settings.max_models_per_device)


# --- which devices a model may use -----------------------------------------------------------------------------------
def candidates(spec: ModelSpec, found: Sequence[Reading], settings: InferenceSettings) -> tuple[Reading, ...]:
    """The possible devices of `spec`: the configured accelerator or all, and after them the CPU if `oom_policy` has it.

    Only usable accelerators are in the result: without `cpu` in `oom_policy` it may be empty. It is the CPU alone if
    there are no accelerators, or if the model or the service does not use them.
    """
    there = [item for item in found if item.id != CPU]
    cpu = tuple(item for item in found if item.id == CPU)
    if settings.force_cpu_mode or spec.gpu_layers == 0 or not there:
        return cpu
    allowed = [item for index, item in enumerate(there) if item.state in USABLE and spec.gpu_index in (None, index)]
    return (*allowed, *(cpu if "cpu" in spec.oom_policy else ()))


def devices_of(state: State, spec: ModelSpec, now: float) -> tuple[Reading, ...]:
    """The possible devices of `spec` now."""
    return candidates(spec, readings(state, now), state.settings)


def closed_to(spec: ModelSpec, found: Sequence[Reading]) -> tuple[Reading, ...]:
    """The accelerators for `spec` that are not usable now."""
    if spec.gpu_layers == 0:
        return ()
    there = [item for item in found if item.id != CPU]
    return tuple(
        item for index, item in enumerate(there) if item.state not in USABLE and spec.gpu_index in (None, index)
    )


def lost_for(spec: ModelSpec, found: Sequence[Reading]) -> tuple[str, float | None]:
    """The unusable accelerators of `spec` with reasons (empty for none), and the seconds until that may change."""
    closed = closed_to(spec, found)
    waits = [item.verdict_seconds for item in closed if item.verdict_seconds is not None]
    reasons = ", ".join(f"{item.id} is {item.state}" + (f" ({item.note})" if item.note else "") for item in closed)
    return reasons, max(1.0, min(waits)) if waits else None


# --- reading anew ----------------------------------------------------------------------------------------------------
def read(draft: Draft) -> int:
    """Requests a new reading; returns its number. A reading that has already begun is too old."""
    devices = draft.state.devices
    needed = devices.reads_begun + 1
    draft.set_devices(reads_wanted=max(devices.reads_wanted, needed))
    begin_read(draft)
    return needed


def begin_read(draft: Draft) -> None:
    """Begins the requested reading, one at a time."""
    devices = draft.state.devices
    if devices.reads_wanted > devices.reads_begun == devices.reads_done and not draft.state.closing:
        draft.set_devices(
            reads_begun=devices.reads_begun + 1, read_begun_at=draft.now, booked=draft.state.ledger.holdings
        )
        draft.emit(ReadDevices())
