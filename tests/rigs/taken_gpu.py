"""`python -m tests.rigs.taken_gpu`: the inference service on simulated devices that others have taken before.

TAKEN_BYTES says how much of each device, from before the service first looks until the simulator is told otherwise.
"""

from __future__ import annotations

import os
import sys

from inference.__main__ import main
from inference.devices import inventory
from inference.devices.simgpu.probe import SimProbe


class Taken(SimProbe):
    """Such devices."""

    async def start(self) -> None:
        """Returns when they listen and are taken."""
        await super().start()
        await self.tell("foreign", bytes=int(os.environ["TAKEN_BYTES"]))
        await self.refresh()


if __name__ == "__main__":
    inventory.SimProbe = Taken  # type: ignore[misc]
    sys.exit(main())
