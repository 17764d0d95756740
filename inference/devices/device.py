"""The readings of devices, and the environment in which a process sees only some of them.

Devices have the ids `cpu`, `gpu-0`, ... `free_bytes` can be allocated now. `used_bytes` includes Headgate's own use,
because per-process figures are not known everywhere; the ledger subtracts it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inference.devices.signs import Sign
from inference.protocol import DeviceState
from inference.worker_link import DeviceGrant

CPU = "cpu"
"""The id of the CPU."""
_NUMBERED = re.compile(r"(\D+)0")


@dataclass(frozen=True, slots=True)
class Reading:
    """A measurement of one device.

    `environment` makes only this device visible to a process, within the devices that the operator allows.
    `ggml_name` is llama.cpp's name of the device in such a process.
    """

    id: str
    kind: str
    name: str
    total_bytes: int
    free_bytes: int
    used_bytes: int
    uuid: str | None = None
    ggml_name: str | None = None
    rpc_endpoint: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    state: DeviceState = DeviceState.HEALTHY
    """Set by the authority, not by probes."""
    note: str = ""
    verdict_seconds: float | None = None
    """Time until an unusable device is read or tried again."""
    driver: str = ""
    """Version of its driver, if known."""
    unified: bool = False
    """Whether it uses host memory."""
    sign: Sign = Sign.HEALTHY
    """Evidence of the newest reading about its health, with the reason in `note`."""
    context_bytes: int | None = None
    """What a process takes before its first buffer; None if unknown."""
    process_bytes: Mapping[int, int] = field(default_factory=dict)
    """Its bytes by process id, as far as the driver reports them and the processes are in the service's namespace."""

    def to_json(self) -> dict[str, Any]:
        """The entry in `/devices`."""
        return {
            "id": self.id,
            "kind": self.kind,
            "name": self.name,
            "uuid": self.uuid,
            "state": str(self.state),
            "total_bytes": self.total_bytes,
            "free_bytes": self.free_bytes,
            "used_bytes": self.used_bytes,
            "note": self.note,
            "verdict_seconds": None if self.verdict_seconds is None else round(self.verdict_seconds, 3),
        }


def outer_set(value: str | None) -> list[str] | None:
    """The devices that a variable such as CUDA_VISIBLE_DEVICES allows, in order; None when it is unset (all devices).

    As in CUDA, entries after an invalid one (`-1`) are ignored, and an empty value allows no device.
    """
    if value is None:
        return None
    allowed: list[str] = []
    for entry in (part.strip() for part in value.split(",")):
        if not entry or entry.startswith("-") or entry.lower() in ("none", "nodevfiles", "void"):
            break
        allowed.append(entry)
    return allowed


def narrowed(value: str | None, index: int, uuid: str | None) -> str:
    """The value that allows only the `index`-th of the devices that `value` allows.

    If the operator set no value, the result is the UUID of the device, which does not depend on the order of devices;
    without a UUID it is `index`.
    """
    allowed = outer_set(value)
    if allowed is not None:
        return allowed[index] if index < len(allowed) else ""
    return uuid or str(index)


HIDDEN: Mapping[str, str] = {
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
    "ROCR_VISIBLE_DEVICES": "",
    "GGML_VK_VISIBLE_DEVICES": "",
}
"""The environment that hides all accelerators, which llama.cpp would otherwise initialize."""


def environment_of(devices: Sequence[Reading]) -> Mapping[str, str]:
    """The environment of a process that may use only these devices.

    The values of each variable are joined in order, and llama.cpp numbers the devices in that order (`CUDA0`, `CUDA1`).
    """
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
    # each has "0" in HIP_VISIBLE_DEVICES: its index among the devices of its own ROCR_VISIBLE_DEVICES
    return ",".join(str(index) for index in range(len(values)))


def grants_of(devices: Sequence[Reading]) -> tuple[DeviceGrant, ...]:
    """The devices as they appear in a process with the environment of `environment_of`."""
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
