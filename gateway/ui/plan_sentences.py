"""What an action of an operator would do, as sentences, before it is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from headgate.shared.units import format_bytes
from inference.protocol import DeviceState, ModelState, ModelStatus

Action = Literal["load", "unload", "offload", "move", "restart"]

_S = ModelState
_SERVING = (_S.READY, _S.BUSY)
_AWAY = (_S.COLD, _S.FAILED, _S.UNLOADING)
_USABLE = (DeviceState.HEALTHY, DeviceState.SUSPECT)


class Forecast(NamedTuple):
    """Whether the action is possible as far as known, and what it would do or why it is not."""

    allowed: bool
    sentences: Sequence[str]


def load(model: str, plan: Mapping[str, Any], devices: Mapping[str, Mapping[str, Any]]) -> Forecast:
    """A load, from the answer of `/memory/plan` and the entries of `/devices` by id."""
    if plan["result"] == "DEPLOYED":
        return Forecast(True, [f"{model} is already loaded."])
    if plan["result"] == "CANT_ACCOMMODATE":
        sentences = [f"{model} cannot be loaded now: {plan.get('reason') or 'no reason given'}."]
        if waits_for := plan.get("waits_for"):
            sentences.append(f"It waits for memory of {' and '.join(waits_for)}.")
        if fix := plan.get("fix"):
            sentences.append(f"It would fit with {_settings(fix)}.")
        return Forecast(False, sentences)
    sentences = []
    for device, count in plan["need_bytes"].items():
        room = devices.get(device, {}).get("ledger", {}).get("room_bytes")
        amount = format_bytes(count) if room is None else f"{format_bytes(count)}; {format_bytes(room)} are free"
        is_main = device in plan["devices"]
        sentences.append(
            f"Loads {model} on {device}: {amount}." if is_main else f"Also takes memory of {device}: {amount}."
        )
    sentences += [f"Evicts {name}." for name in plan["evict"]]
    if changes := plan.get("changes"):
        sentences.append(f"Uses {_settings(changes)}, because it does not fit as configured.")
    if (rate := (plan.get("expected") or {}).get("tokens_per_second")) is not None:
        sentences.append(f"About {rate:.3g} tokens per second are expected.")
    return Forecast(True, sentences)


def unload(status: ModelStatus) -> Forecast:
    """An unload."""
    if status.state in _AWAY:
        return Forecast(False, [f"{status.id} is not loaded; it is {status.state}."])
    if status.state is _S.WARM:
        return Forecast(True, [f"Removes {status.id} from the warm pool."])
    return Forecast(True, [f"Unloads {status.id}{_from(status)}.", *_waits(status)])


def offload(status: ModelStatus) -> Forecast:
    """An offload into the warm pool."""
    if status.state not in _SERVING:
        return Forecast(False, [f"Only a loaded model can be offloaded; {status.id} is {status.state}."])
    return Forecast(True, [f"Moves {status.id} into the warm pool in host memory{_from(status)}.", *_waits(status)])


def move(status: ModelStatus, device: Mapping[str, Any]) -> Forecast:
    """A move to `device`, an entry of `/devices`."""
    target = device["id"]
    if status.state not in _SERVING:
        return Forecast(False, [f"Only a loaded model can be moved; {status.id} is {status.state}."])
    if len(status.replicas) > 1:
        return Forecast(False, [f"{status.id} has several replicas; move one of them."])
    if status.devices == (target,):
        return Forecast(False, [f"{status.id} is already on {target}."])
    if DeviceState(device["state"]) not in _USABLE:
        return Forecast(False, [f"{target} is {device['state']}."])
    room, need = device["ledger"]["room_bytes"], status.actual_bytes
    amount = "" if need is None else f": {format_bytes(need)}; {format_bytes(room)} are free there"
    sentences = [f"Moves {status.id} from {' and '.join(status.devices)} to {target}{amount}."]
    if need is not None and need > room:
        sentences.append(f"Idle models on {target} are evicted if that is enough; otherwise {status.id} stays.")
    return Forecast(True, [*sentences, *_waits(status)])


def restart(status: ModelStatus) -> Forecast:
    """A restart of the worker."""
    if status.state in _AWAY:
        return Forecast(True, [f"{status.id} is not loaded; loads it."])
    return Forecast(True, [f"Unloads {status.id}{_from(status)}, then loads it again.", *_waits(status)])


def _waits(status: ModelStatus) -> list[str]:
    sentences = []
    if status.in_flight:
        noun = "request" if status.in_flight == 1 else "requests"
        sentences.append(f"{status.in_flight} running {noun} may finish first.")
    if status.queued:
        noun = "request waits" if status.queued == 1 else "requests wait"
        sentences.append(f"{status.queued} {noun} for it.")
    return sentences


def _from(status: ModelStatus) -> str:
    freed = "" if status.actual_bytes is None else f": {format_bytes(status.actual_bytes)} become free"
    return f" from {' and '.join(status.devices)}{freed}" if status.devices else freed


def _settings(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in changes.items())
