"""Environment variables and device names that pin a process to its devices.

The `environment` of a reading makes one device visible. For several devices the values of each variable are joined in
order, and llama.cpp numbers the devices in that order (`CUDA0`, `CUDA1`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from inference.devices.device import Reading
from inference.devices.host import CPU
from inference.worker_link import DeviceGrant

_NUMBERED = re.compile(r"(\D+)0")


def environment_of(devices: Sequence[Reading]) -> Mapping[str, str]:
    """The environment of a process that may use only these devices."""
    found: dict[str, list[str]] = {}
    for device in devices:
        for name, value in device.environment.items():
            found.setdefault(name, []).append(value)
    return {name: _joined(values) for name, values in found.items()}


def _joined(values: list[str]) -> str:
    if len(values) == 1 or not any(values):
        return values[0]
    if len(set(values)) == len(values):
        return ",".join(values)
    return ",".join(str(index) for index in range(len(values)))  # each value is index 0 of an already narrowed set


def grants_of(devices: Sequence[Reading]) -> tuple[DeviceGrant, ...]:
    """The devices as they appear in a process with this environment."""
    kinds: dict[str | None, int] = {}
    grants = []
    for device in devices:
        name = device.ggml_name
        index = kinds.get(name, 0)
        kinds[name] = index + 1
        if name is not None and index and (match := _NUMBERED.fullmatch(name)):
            name = f"{match[1]}{index}"
        kind = "cpu" if device.id == CPU else "gpu"
        grants.append(DeviceGrant(device.id, kind, name, device.rpc_endpoint))
    return tuple(grants)
