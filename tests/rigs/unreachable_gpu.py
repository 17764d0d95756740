"""`python -m tests.rigs.unreachable_gpu`: the inference service with a GPU that no new process reaches any more.

UNREACHABLE_GPUS says how many of them the machine still shows: 1, or 0 as after a restart in the same container. With
GPUS_READ_WELL set nothing seems wrong with them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from inference import app
from inference.__main__ import main
from inference.devices.device import Reading
from inference.devices.host import CpuProbe
from inference.devices.inventory import Inventory
from inference.devices.signs import Sign
from inference.workers.helper_client import HelperError


class Unreachable:
    """A probe of such GPUs."""

    async def start(self) -> None:
        return None

    async def refresh(self) -> None:
        return None

    def listen(self, on_event: Callable[[], None]) -> None:
        return None

    async def renew(self) -> None:
        return None

    async def close(self) -> None:
        return None

    async def trial(self, device: str) -> None:
        raise HelperError(f"the trial of {device} failed: no CUDA-capable device is detected")

    def readings(self) -> tuple[Reading, ...]:
        count, size = int(os.environ["UNREACHABLE_GPUS"]), 2**30
        fields = {} if "GPUS_READ_WELL" in os.environ else {"note": "NVML: Unknown Error", "sign": Sign.UNREACHABLE}
        return tuple(Reading(f"gpu-{number}", "cuda", "a GPU", size, size, 0, **fields) for number in range(count))  # type: ignore[arg-type]


class Machine(Inventory):
    """What the service finds."""

    @classmethod
    def of(cls, *_: Any) -> Inventory:
        return Inventory([Unreachable(), CpuProbe()])


if __name__ == "__main__":
    app.Inventory = Machine  # type: ignore[misc]
    sys.exit(main())
