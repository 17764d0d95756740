"""`python -m tests.rigs.taken_gpu`: the inference service on simulated devices with foreign use from the start.

TAKEN_BYTES is the amount on each device before the service reads it, until the simulator gets another command.
"""

from __future__ import annotations

import os
import sys

from inference.__main__ import main
from inference.devices import inventory
from inference.devices.simgpu.probe import SimProbe


class Taken(SimProbe):
    """Simulated devices with foreign use."""

    async def start(self) -> None:
        """Returns when they listen and the memory is taken."""
        await super().start()
        await self.send("foreign", bytes=int(os.environ["TAKEN_BYTES"]))
        await self.refresh()


if __name__ == "__main__":
    inventory.SimProbe = Taken  # type: ignore[misc]
    sys.exit(main())
