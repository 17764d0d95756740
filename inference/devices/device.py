"""The seam of everything that measures devices: readings in, no decision out.

A probe names devices by our ids (`cpu`, `gpu-0`, ...). `free_bytes` is what could be allocated now and `used_bytes`
what everybody uses, ourselves included: the ledger takes our part out, because per-process figures lie in containers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from inference.authority.device_health.signs import Sign
from inference.protocol import DeviceState


@dataclass(frozen=True, slots=True)
class Reading:
    """One device as seen a moment ago; bytes are bytes.

    `environment` pins a process to this device and to no other; it was narrowed within what was set from outside.
    `ggml_name` is what llama.cpp calls the device in a process so pinned.
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
    """What was decided for it (`inference.health`); no probe says anything of it."""
    note: str = ""
    verdict_seconds: float | None = None
    """Until it is looked at or tried again, while it is not usable."""
    driver: str = ""
    """Version of its driver, where it is known."""
    unified: bool = False
    """Whether it has no memory of its own: its bytes are host memory."""
    sign: Sign = Sign.FINE
    """What the newest look at it says of its health, with the reason in `note`; what follows is decided elsewhere."""

    def to_json(self) -> dict[str, Any]:
        """As `/devices` shows it."""
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


class Probe(Protocol):
    """Measures some devices of the machine."""

    async def start(self) -> None:
        """Finds the devices; called once. A probe that finds none is no error."""
        ...

    def readings(self) -> tuple[Reading, ...]:
        """The newest known readings; never blocks."""
        ...

    async def refresh(self) -> None:
        """Measures anew, within a deadline of its own; a device that cannot be read keeps its last figures."""
        ...

    def listen(self, notice: Callable[[], None]) -> None:
        """Calls `notice`, on the event loop, whenever something happened that only the next refresh may show."""
        ...

    async def renew(self) -> None:
        """Starts afresh, at the next refresh and without further patience, what it measures with."""
        ...

    async def trial(self, device: str) -> None:
        """Computes on one of its devices and checks the result; raises HelperError within a deadline, saying why."""
        ...

    async def close(self) -> None:
        """Ends every process the probe started."""
        ...


def outer_set(value: str | None) -> list[str] | None:
    """The devices a variable such as CUDA_VISIBLE_DEVICES allows, in order; None when it is unset (all of them).

    As CUDA reads it: entries after an invalid one (`-1`) do not count, and an empty value means none.
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
    """The value that leaves only the `index`-th of the devices that `value` allows.

    A UUID is preferred because it means the same in any order; what an operator wrote himself is kept as it is.
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
"""The environment of a process that shall see no accelerator: otherwise llama.cpp initializes every one it sees."""
